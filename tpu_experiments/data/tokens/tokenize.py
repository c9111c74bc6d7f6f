"""Tokenisation of documents, with the loss mask.

Text: every token but BOS is trained on, and EOS closes the text; [CLS] and [SEP] where a tokenizer has these in their
place. Chat: the conversation is rendered with the
tokenizer's own template and tokenised once; a token is trained on when it overlaps an assistant's turn, from the first
character of the answer to the end-of-turn marker (data/tokens/chat.py finds the spans).

Special-token strings written by a document's author are read as plain text, never as control tokens: `<|im_end|>` in a
question would otherwise end the turn. The template's own control tokens are kept, and the text around is tokenised as
if the strings were any other text. Only tokens that the tokenizer calls special count: `<think>` or `<tool_call>`,
which are not, may be written by the author.
"""

import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.documents import SAME_ANSWERS, SAME_BUT_FOR_BLANKS, Document, Refused
from tpu_experiments.data.tokens.chat import (
    ChatRenderer,
    Messages,
    Needs,
    RenderedChat,
    TemplateRefusal,
    ToolChat,
    reasoning_fields,
    remedy,
    render_tool_chat,
)
from tpu_experiments.data.tokens.tokenizer import own_ends, text_end_ids, text_ends
from tpu_experiments.data.tokens.words import WordEncoding, backend_of, words_of


class ControlTokens:
    """Special tokens of one tokenizer, and encoding of text that contains their strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._tokens: list[AddedToken] = [token for token in added.values() if token.special]
        self._ids: list[int] = [token_id for token_id, token in added.items() if token.special]
        self._index = {token.content: i for i, token in enumerate(self._tokens)}
        # Longest first, so that a token does not shadow a longer one that begins with it.
        strings = sorted(self._index, key=len, reverse=True)
        self._written = re.compile("|".join(map(re.escape, strings)) or r"(?!)")
        # A random nonce, so that no author can write these strings.
        nonce = secrets.token_hex(16)
        self._hidden = [f"\ufdd2{nonce}-{i}\ufdd3" for i in range(len(self._tokens))]
        self._stand_ins = [f"\ufdd4{nonce}-{i}\ufdd5" for i in range(len(self._tokens))]
        self._either = re.compile(f"{self._written.pattern}|\ufdd2{nonce}-([0-9]+)\ufdd3")
        self._backend: Tokenizer | None = None
        self._id_of: dict[int, int] = {}

    def occur_in(self, text: str) -> bool:
        """Return whether the string of a special token occurs."""
        return self._written.search(text) is not None

    def hide(self, messages: Messages) -> Messages:
        """Replace special-token strings in a conversation; those in its rendered text are then the template's."""
        return tuple((role, self._replaced(content)) for role, content in messages)

    def hide_in_tools(self, chat: ToolChat) -> ToolChat:
        """Do the same for a conversation with tools, in their descriptions, calls and answers too."""
        return ToolChat(self.hide(chat.messages), tuple(map(self._replaced, chat.extras)), self._replaced(chat.tools))

    def _replaced(self, text: str) -> str:
        return self._written.sub(lambda match: self._hidden[self._index[match[0]]], text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which no string is a control token."""
        return list(self._plain().encode(text, add_special_tokens=False).ids)

    def encode_chat(self, rendered: RenderedChat) -> tuple[list[int], Encoding, RenderedChat]:
        """Encode a rendered conversation changed by `hide`, with its own strings restored.

        Returns:
            Its ids, their encoding, and the restored conversation, whose spans match the encoding.
        """
        parts: list[str] = []
        # Position in the rendered text, and the shift of all later positions by the replacements so far.
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
        asked = [(moved(begin), moved(end)) for begin, end in rendered.asked]
        return ids, encoding, RenderedChat(text, answers, [moved(cut) for cut in rendered.cuts], asked=asked)

    def _plain(self) -> Tokenizer:
        """Return a copy of the tokenizer that reads special tokens as text, with a secret stand-in for each."""
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


LEARN, CUT, SECOND, BODY = 1, 2, 4, 8
"""Flags of a token: it is trained on; a piece may begin here, at a user or system turn after an answer; the rejected
conversation of a pair begins here; in a pair's prompt, what a user turn says begins here, or the last has ended."""

_CALL_CHARACTERS = 2**20
"""Characters per call of the tokenizer: an encoding with offsets takes some 150 bytes a token."""


@dataclass(eq=False)
class Tokens:
    """One document of L tokens: ids, and the flags of each; of a pair, those of both conversations, chosen first."""

    ids: NDArray[np.int32]
    flags: NDArray[np.uint8]
    document_id: str
    has_empty_thought: bool = False
    """Whether an answer that is trained on has a block of reasoning with nothing in it."""


@dataclass(frozen=True)
class Faulty(Refused):
    """A conversation with answers that cannot be learnt from its text, but perhaps from texts that end with them."""

    turns: tuple[int, ...] = ()
    """Indices of the turns of these answers, from 0."""


class DocumentTokenizer:
    """Batched tokenisation of documents; constructed once per process.

    One instance caches what it found out about the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, marks_prompts: bool = False) -> None:
        """Take a tokenizer; `marks_prompts` flags the turns of prompts with `BODY`."""
        self._marks_prompts = marks_prompts
        self.counts: Counter[str] = Counter()
        """`special_tokens_in_text`: documents with strings of special tokens, which were read as plain text. For
        conversations, up to their last answer: `begins_with_answer`, documents; `blank_answer_not_learnt`,
        `answer_as_context`, `rewritten_answer_learnt_apart` and `rewritten_answer_not_learnt`, turns."""
        self._tokenizer = tokenizer
        self._render = ChatRenderer(tokenizer)
        self._control = ControlTokens(tokenizer)
        self._words = words_of(tokenizer)
        self._is_marker: dict[int, bool] = {}

    def tokenize(self, documents: Sequence[Document]) -> list[Tokens | Refused]:
        """Return the tokens of each document, or the reason for none, in order; independent of batching."""
        done: list[Tokens | Refused] = []
        for batch in _batches(documents):
            arrays: dict[int, _Arrays | Refused] = {}
            empty_thoughts: set[int] = set()
            self._tokenize_texts(batch, arrays)
            self._tokenize_chats(batch, arrays, empty_thoughts)
            done += [
                _checked(document, arrays[i], has_empty_thought=i in empty_thoughts) for i, document in enumerate(batch)
            ]
        return done

    def _tokenize_texts(self, batch: Sequence[Document], done: dict[int, "_Arrays | Refused"]) -> None:
        plain: dict[int, str] = {}
        for i, document in enumerate(batch):
            if document.text is None:
                continue
            text = document.text
            if self._control.occur_in(text):
                text = self._without_ends(text)
            if self._control.occur_in(text):
                self.counts["special_tokens_in_text"] += 1
                done[i] = self._closed(batch[i], self._control.encode(text))
            else:
                plain[i] = text
        for i, encoding in self._encoded(plain, with_offsets=False):
            done[i] = self._closed(batch[i], encoding.ids)

    def _tokenize_chats(
        self, batch: Sequence[Document], done: dict[int, "_Arrays | Refused"], empty_thoughts: set[int]
    ) -> None:
        plain: dict[int, RenderedChat] = {}
        for i, document in enumerate(batch):
            if document.messages is None:
                continue
            answered = _up_to_last_answer(document)
            if not answered:
                done[i] = _no_answer(document)
                continue
            extras = document.extras[: len(answered)]
            written = [*(content for _, content in answered), *extras, document.tools]
            is_plain = not any(map(self._control.occur_in, written))
            try:
                if document.uses_tools:
                    chat = ToolChat(answered, extras, document.tools)
                    chat = chat if is_plain else self._control.hide_in_tools(chat)
                    rendered = render_tool_chat(chat, tokenizer=self._tokenizer, fields=self._reasoning_fields)
                else:
                    rendered = self._render(answered if is_plain else self._control.hide(answered))
            except TemplateRefusal as refusal:
                done[i] = Refused("template", _place(document), f"has {refusal}")
                continue
            rendered, faults = self._taught(rendered, document, num_turns=len(answered))
            if faults:
                done[i] = self._faulty(document, faults, num_turns=len(answered))
            elif is_plain:
                plain[i] = rendered
                empty_thoughts.update([i] * _has_empty_thought(rendered))
            else:
                self.counts["special_tokens_in_text"] += 1
                ids, encoding, rendered = self._control.encode_chat(rendered)
                empty_thoughts.update([i] * _has_empty_thought(rendered))
                done[i] = self._closed_chat(ids, flags_of(encoding, rendered=rendered))
        texts = {i: rendered.text for i, rendered in plain.items()}
        for i, encoded in self._encoded(texts, with_offsets=True):
            done[i] = self._closed_chat(encoded.ids, flags_of(encoded, rendered=plain[i]))

    def _taught(
        self, rendered: RenderedChat, document: Document, *, num_turns: int
    ) -> tuple[RenderedChat, dict[int, str]]:
        """Drop, and count, the spans of answers that are not trained on; return by turn the faults of the others."""
        messages = (document.messages or ())[:num_turns]
        answers = [turn for turn, (role, _) in enumerate(messages) if role == "assistant"]
        turns = [[turn] for turn in answers]
        if len(turns) != len(rendered.answers):  # the template needed adjacent turns of one role merged (chat.py)
            turns = [[t + i for i in range(n)] for t, n in _runs(answers)]
        assert len(turns) == len(rendered.answers), f"{len(rendered.answers)} spans of {len(turns)} answers"
        is_blank = {turn: document.is_blank(turn) for turn in answers}
        # A joined answer is trained on when all of its turns that are not blank are.
        filled_turns = [[turn for turn in run if not is_blank[turn]] for run in turns]
        is_learnt = [bool(run) and all(map(document.is_taught, run)) for run in filled_turns]
        faults = {turns[number][-1]: fault for number, fault in rendered.faults.items() if is_learnt[number]}
        if faults:
            return rendered, faults
        self.counts["begins_with_answer"] += next((role == "assistant" for role, _ in messages if role != "system"))
        self.counts["blank_answer_not_learnt"] += sum(is_blank.values())
        self.counts["answer_as_context"] += sum(turn in document.context and not is_blank[turn] for turn in answers)
        spans = [span for span, learnt in zip(rendered.answers, is_learnt, strict=True) if learnt]
        return RenderedChat(rendered.text, spans, rendered.cuts, asked=rendered.asked * self._marks_prompts), {}

    def _faulty(self, document: Document, faults: dict[int, str], *, num_turns: int) -> "Faulty":
        turn, fault = next(iter(faults.items()))
        needs: Needs = "reasoning" if fault.endswith("reasoning") else "tools" if "call" in fault else "every turn"
        message = (
            f"has {num_turns} turns, and in the chat template of {self._tokenizer.name_or_path} the answer of turn "
            f"{turn + 1} {fault}, so that it cannot be learnt; {remedy(self._tokenizer, needs=needs)}"
        )
        return Faulty("template", _place(document), message, turns=tuple(faults))

    @cached_property
    def _reasoning_fields(self) -> dict[bool, str | None]:
        return reasoning_fields(self._tokenizer)

    def _encoded(self, texts: dict[int, str], *, with_offsets: bool) -> Iterator[tuple[int, Encoding | WordEncoding]]:
        """Encode word by word where that is exact, and the remaining texts in one batch."""
        others: dict[int, str] = {}
        for i, text in texts.items():
            encoding = self._words.encode(text) if self._words else None
            if encoding is None:
                others[i] = text
            else:
                yield i, encoding
        backend = backend_of(self._tokenizer)
        encode_batch = backend.encode_batch if with_offsets else backend.encode_batch_fast
        yield from zip(others, encode_batch(list(others.values()), add_special_tokens=False), strict=True)

    def _without_ends(self, text: str) -> str:
        """Strip a leading BOS and a trailing EOS, which are added again later, so that they are not doubled."""
        begin, end = text_ends(self._tokenizer)
        return text.removeprefix(begin or "").removesuffix(end or "")

    def _closed(self, document: Document, ids: "_Ids") -> "_Arrays":
        return self._closed_text(ids) if document.label is None else self._labelled_text(ids)

    def _closed_text(self, ids: "_Ids") -> "_Arrays":
        bos, eos = self._text_ends
        ends = ([] if end is None else [end] for end in (bos, eos))
        closed = np.concatenate([next(ends), ids, next(ends)], dtype=np.int32, casting="unsafe")
        flags = np.full(len(closed), LEARN, np.uint8)
        flags[: bos is not None] = 0
        return closed, flags

    @cached_property
    def _text_ends(self) -> tuple[int | None, int | None]:
        return text_end_ids(self._tokenizer)

    @cached_property
    def _own_ends(self) -> tuple[list[int], list[int]]:
        return own_ends(self._tokenizer)

    def _labelled_text(self, ids: "_Ids") -> "_Arrays":
        """Return a text as `tokenizer(text)` gives it, and a last token, the only one that is learnt, for the label."""
        before, after = self._own_ends
        closed = np.concatenate([before, ids, after, [0]], dtype=np.int32, casting="unsafe")
        flags = np.zeros(len(closed), np.uint8)
        flags[-1] = LEARN
        return closed, flags

    def _closed_chat(self, ids: "_Ids", flags: NDArray[np.uint8]) -> "_Arrays":
        """Train on EOS after the last answer if the template has no end-of-turn marker of its own."""
        learnt = np.flatnonzero(flags & LEARN)
        num_kept = int(learnt[-1]) + 1 if len(learnt) else len(flags)
        eos = self._tokenizer.eos_token_id
        if eos is None or (len(learnt) > 0 and self._ends_turn(int(ids[num_kept - 1]))):
            return np.array(ids, np.int32), flags
        return np.append(np.array(ids[:num_kept], np.int32), np.int32(eos)), np.append(
            flags[:num_kept], np.uint8(LEARN)
        )

    def _ends_turn(self, token_id: int) -> bool:
        if token_id not in self._is_marker:
            self._is_marker[token_id] = self._tokenizer.decode(token_id, skip_special_tokens=True) == ""
        return self._is_marker[token_id]


def tokenize_apart(
    documents: Sequence[Document], *, tokenizer: "DocumentTokenizer | ByteTokenizer", rewritten: str
) -> list[tuple[Document, Tokens | Refused]]:
    """Tokenize documents, and give answers with a fault (chat.py) a document each, which ends with it.

    So every answer is learnt as the model generates it, after the prompt that it generates it from.

    Args:
        rewritten: `data.<name>.rewritten_answers`.

    Returns:
        Documents and tokens, more of both than `documents` where one was split.
    """
    done: list[tuple[Document, Tokens | Refused]] = []
    for document, tokens in zip(documents, tokenizer.tokenize(documents), strict=True):
        if not isinstance(tokens, Faulty):
            done.append((document, tokens))
            continue
        parts = _parts(document, tokens.turns, rewritten=rewritten)
        made = list(zip(parts, tokenizer.tokenize(parts), strict=True))
        refused = next((part for _, part in made if isinstance(part, Refused)), None)
        if refused is not None:  # nothing of a row is dropped
            done.append((document, Refused(refused.reason, refused.place, refused.message, refused.is_bad_row)))
            continue
        name = "rewritten_answer_learnt_apart" if rewritten == "split" else "rewritten_answer_not_learnt"
        tokenizer.counts[name] += len(tokens.turns)
        done += made
    return done


def _parts(document: Document, faulty: Sequence[int], *, rewritten: str) -> list[Document]:
    """Return a document for each faulty answer, and one for the others; the latter alone where they are context."""
    messages = document.messages or ()
    answers = [turn for turn in range(len(messages)) if document.is_taught(turn)]
    sound = [turn for turn in answers if turn not in faulty]
    kept = [([turn], f"{document.id}#{turn + 1}") for turn in faulty if rewritten == "split"]
    if sound or not kept:
        kept.append((sound, document.id))
    return [
        replace(
            document,
            id=name,
            messages=messages[: max(learnt, default=len(messages) - 1) + 1],
            extras=document.extras[: max(learnt, default=len(messages) - 1) + 1],
            context=tuple(sorted({*document.context, *(turn for turn in answers if turn not in learnt)})),
        )
        for learnt, name in kept
    ]


def tokenize_pairs(
    documents: Sequence[Document], *, tokenizer: "DocumentTokenizer | ByteTokenizer"
) -> list[tuple[Document, Tokens | Refused]]:
    """Tokenize preference pairs: the chosen conversation, and the rejected one from a token with `SECOND` on.

    A pair is refused where one of the two is, and where both are the same, as rendered or but for the blanks at the
    ends of their turns; blanks inside are indentation or paragraphs, which one may prefer. A single answer is a pair
    without the other one, in whose place is one token that is not learnt: a good one is chosen, a bad one rejected.
    """
    halves = [
        half for document in documents for half in (replace(document, rejected=None, label=None), document.rejected)
    ]
    made = iter(tokenizer.tokenize([half for half in halves if half is not None]))
    return [
        (document, _alone(next(made), is_good=document.label == "true"))
        if document.rejected is None
        else (document, _joined(next(made), next(made), document=document))
        for document in documents
    ]


def _alone(own: Tokens | Refused, *, is_good: bool) -> Tokens | Refused:
    if isinstance(own, Refused):
        return Refused(own.reason, own.place, own.message, own.is_bad_row)
    parts = [(own.ids, own.flags), (own.ids[:1], np.zeros(1, np.uint8))]
    (first, flags), (second, others) = parts if is_good else parts[::-1]
    joined = np.concatenate([flags, others])
    joined[len(flags)] |= SECOND
    return Tokens(np.concatenate([first, second]), joined, own.document_id, own.has_empty_thought)


def _joined(chosen: Tokens | Refused, rejected: Tokens | Refused, *, document: Document) -> Tokens | Refused:
    for half in (chosen, rejected):
        if isinstance(half, Refused):
            return Refused(half.reason, half.place, half.message, half.is_bad_row)
    assert isinstance(chosen, Tokens)
    assert isinstance(rejected, Tokens)
    if np.array_equal(chosen.ids, rejected.ids):
        return Refused("same_answers", _place(document), SAME_ANSWERS)
    if document.rejected is not None and _stripped(document) == _stripped(document.rejected):
        return Refused("same_answers", _place(document), SAME_BUT_FOR_BLANKS)
    flags = np.concatenate([chosen.flags, rejected.flags])
    flags[len(chosen.flags)] |= SECOND
    has_empty_thought = chosen.has_empty_thought or rejected.has_empty_thought
    return Tokens(np.concatenate([chosen.ids, rejected.ids]), flags, chosen.document_id, has_empty_thought)


def _stripped(document: Document) -> tuple[object, ...]:
    turns = [(role, content.strip()) for role, content in document.messages or ()]
    return (turns, document.extras)


class ByteTokenizer:
    """Documents as their UTF-8 bytes, where no tokenizer exists yet; refuses what `DocumentTokenizer` would refuse.

    Of conversations, the bytes of all turns that are not blank.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def tokenize(self, documents: Sequence[Document]) -> list[Tokens | Refused]:
        """Return the bytes of each document, one id each, or the reason for none, in order."""
        return [self._bytes(document) for document in documents]

    def _bytes(self, document: Document) -> Tokens | Refused:
        if document.messages is not None and not _up_to_last_answer(document):
            return _no_answer(document)
        content = "".join(texts_of(document)).encode()
        ids = np.frombuffer(content, np.uint8).astype(np.int32)
        return Tokens(ids, np.full(len(ids), LEARN, np.uint8), document.id)


def texts_of(document: Document) -> list[str]:
    """Return the text of a document, or the contents of a conversation's turns that are not blank."""
    if document.messages is None:
        return [document.text or ""]
    return [content for _, content in document.messages if content.strip()]


_Arrays = tuple[NDArray[np.int32], NDArray[np.uint8]]
_Ids = list[int] | NDArray[np.int32]


def flags_of(encoding: Encoding | WordEncoding, *, rendered: RenderedChat) -> NDArray[np.uint8]:
    """Return the flags (L,) of a conversation's tokens; `encoding` is that of its text."""
    flags = np.zeros(len(encoding), np.uint8)
    for begin, end in rendered.answers:
        first = _first_overlapping(encoding, begin=begin, end=end)
        if first is not None:
            flags[first : _last_overlapping(encoding, begin=begin, end=end) + 1] = LEARN
    for cut in rendered.cuts:
        token = _first_overlapping(encoding, begin=cut, end=len(rendered.text))
        # A token shared by the end of an answer and the next turn belongs to the answer.
        while token is not None and token < len(flags) and flags[token]:
            token += 1
        if token is not None and token < len(flags):
            flags[token] = CUT
    for border in [*(begin for begin, _ in rendered.asked), *(end for _, end in rendered.asked[-1:])]:
        token = _first_overlapping(encoding, begin=border, end=len(rendered.text))
        if token is not None:
            flags[token] |= BODY
    return flags


def _first_overlapping(encoding: Encoding | WordEncoding, *, begin: int, end: int) -> int | None:
    """Return the first token with characters in [begin, end); looked up in Rust, 1 ns a token."""
    token = encoding.char_to_token(begin) if begin < end else None
    if token is None:
        tokens = (encoding.char_to_token(character) for character in range(begin + 1, end))
        token = next((token for token in tokens if token is not None), None)
    # Blanks may belong to a token of zero width, which char_to_token does not find.
    while token and _characters(encoding, token - 1)[1] > begin:
        token -= 1
    return token


def _last_overlapping(encoding: Encoding | WordEncoding, *, begin: int, end: int) -> int:
    """Return the last token with characters in [begin, end), which must have one."""
    tokens = (encoding.char_to_token(character) for character in range(end - 1, begin - 1, -1))
    token = next(token for token in tokens if token is not None)
    # A character of several bytes may be shared by several tokens.
    while token + 1 < len(encoding) and _characters(encoding, token + 1)[0] < end:
        token += 1
    return token


def _characters(encoding: Encoding | WordEncoding, token: int) -> tuple[int, int]:
    characters = encoding.token_to_chars(token)
    assert characters is not None, f"token {token} of {len(encoding)} has no place in the text"
    return characters


def _checked(document: Document, arrays: "_Arrays | Refused", *, has_empty_thought: bool = False) -> Tokens | Refused:
    if isinstance(arrays, Refused):
        return arrays
    ids, flags = arrays
    if not np.any(flags & LEARN):
        return Refused("nothing_to_learn", _place(document), "has no token to learn.", is_bad_row=False)
    return Tokens(ids, flags, document.id, has_empty_thought)


_EMPTY_THOUGHT = re.compile(
    r"<(think|thinking|thought|reasoning|reflection|seed:think)>\s*</\1>|\[THINK\]\s*\[/THINK\]"
    r"|<\|channel\|>(?:analysis|thought)<\|message\|>\s*<\|end\|>|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
)


def _has_empty_thought(rendered: RenderedChat) -> bool:
    """Return whether a span that is trained on has a block of reasoning with nothing in it."""
    return any(_EMPTY_THOUGHT.search(rendered.text, begin, end) is not None for begin, end in rendered.answers)


def _up_to_last_answer(document: Document) -> Messages:
    """Return the turns up to the last trained answer; later turns do not affect the loss."""
    messages = document.messages or ()
    return messages[: max((i + 1 for i in range(len(messages)) if document.is_taught(i)), default=0)]


def _runs(turns: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, number) of each run of consecutive numbers.

    >>> _runs([0, 1, 3])
    [(0, 2), (3, 1)]
    """
    runs: list[tuple[int, int]] = []
    for turn in turns:
        if runs and turn == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((turn, 1))
    return runs


def _no_answer(document: Document) -> Refused:
    roles = ", ".join(role for role, _ in document.messages or ())
    return Refused(
        "no_answer",
        _place(document),
        f"has no assistant turn to learn: its {len(document.messages or ())} turns are by {roles}; a row without "
        "supervised tokens teaches nothing; remove it, or use a text source.",
        is_bad_row=False,
    )


def _place(document: Document) -> str:
    return document.place or f"document {document.id}"


def _batches(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    """Yield runs of documents of about `_CALL_CHARACTERS` characters."""
    begin = length = 0
    for i, document in enumerate(documents):
        length += len(document.text or "") + sum(len(content) for _, content in document.messages or ())
        length += len(document.tools) + sum(map(len, document.extras))
        if length >= _CALL_CHARACTERS or i + 1 == len(documents):
            yield documents[begin : i + 1]
            begin, length = i + 1, 0
