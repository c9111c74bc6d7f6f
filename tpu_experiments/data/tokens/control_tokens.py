"""Strings of special tokens that a document's author wrote: read as plain text, never as control tokens.

`<|im_end|>` in a question would otherwise end the turn. The template's own control tokens stay what
they are, and the text around is tokenised as if the strings were any other text. Only tokens that the
tokenizer calls special count: `<think>` or `<tool_call>`, which are not, are the author's to write.
"""

import re
import secrets
from bisect import bisect_right

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.tokens.chat import Messages, RenderedChat
from tpu_experiments.data.tokens.tool_chat import ToolChat


class ControlTokens:
    """The special tokens of one tokenizer, and how text that has their strings is encoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._tokens: list[AddedToken] = [token for token in added.values() if token.special]
        self._ids: list[int] = [token_id for token_id, token in added.items() if token.special]
        self._index = {token.content: i for i, token in enumerate(self._tokens)}
        # Longest first, so that a token that another begins with does not hide it.
        strings = sorted(self._index, key=len, reverse=True)
        self._written = re.compile("|".join(map(re.escape, strings)) or r"(?!)")
        # No author can guess these.
        nonce = secrets.token_hex(16)
        self._hidden = [f"\ufdd2{nonce}-{i}\ufdd3" for i in range(len(self._tokens))]
        self._stand_ins = [f"\ufdd4{nonce}-{i}\ufdd5" for i in range(len(self._tokens))]
        self._either = re.compile(f"{self._written.pattern}|\ufdd2{nonce}-([0-9]+)\ufdd3")
        self._backend: Tokenizer | None = None
        self._id_of: dict[int, int] = {}

    def are_in(self, text: str) -> bool:
        """Whether the string of a special token occurs."""
        return self._written.search(text) is not None

    def hide(self, messages: Messages) -> Messages:
        """The conversation with their strings replaced, so that those in its rendered text are the template's."""
        return tuple((role, self._replaced(content)) for role, content in messages)

    def hide_in_tools(self, chat: ToolChat) -> ToolChat:
        """The same of a conversation with tools, in their descriptions, calls and answers too."""
        return ToolChat(self.hide(chat.messages), tuple(map(self._replaced, chat.extras)), self._replaced(chat.tools))

    def _replaced(self, text: str) -> str:
        return self._written.sub(lambda match: self._hidden[self._index[match[0]]], text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return list(self._plain().encode(text, add_special_tokens=False).ids)

    def encode_chat(self, rendered: RenderedChat) -> tuple[list[int], Encoding, RenderedChat]:
        """Ids of a conversation that `hide` changed, their encoding, and the conversation with its own strings."""
        parts: list[str] = []
        # Characters replaced up to here -> what that adds to every later position.
        starts, shifts = [0], [0]
        last = 0
        for match in self._either.finditer(rendered.text):
            hidden = match[1]
            new = self._stand_ins[self._index[match[0]]] if hidden is None else self._tokens[int(hidden)].content
            parts += (rendered.text[last : match.start()], new)
            last = match.end()
            starts.append(last)
            shifts.append(shifts[-1] + len(new) - len(match[0]))
        text = "".join([*parts, rendered.text[last:]])

        def moved(position: int) -> int:
            return position + shifts[bisect_right(starts, position) - 1]

        answers = [(moved(begin), moved(end)) for begin, end in rendered.answers]
        encoding = self._plain().encode(text, add_special_tokens=False)
        ids = [self._id_of.get(token_id, token_id) for token_id in encoding.ids]
        return ids, encoding, RenderedChat(text, answers, [moved(cut) for cut in rendered.cuts])

    def _plain(self) -> Tokenizer:
        """A copy that reads special tokens as text, and knows a secret stand-in for each."""
        if self._backend is None:
            backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            backend.no_truncation()
            backend.no_padding()
            stand_ins = [
                AddedToken(name, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
                for name, t in zip(self._stand_ins, self._tokens, strict=True)
            ]
            backend.add_tokens(stand_ins)
            backend.encode_special_tokens = True
            added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
            self._id_of = {added[name]: token_id for name, token_id in zip(self._stand_ins, self._ids, strict=True)}
            self._backend = backend
        return self._backend
