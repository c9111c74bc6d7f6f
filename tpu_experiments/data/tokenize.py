"""Documents to token ids, and which of them are learnt.

Text: every token but BOS, closed by EOS. Chat: the conversation is rendered once with the
tokenizer's own template and tokenised once; a token is learnt when it overlaps an assistant's turn,
from the first character of the answer to the end-of-turn marker (data/chat.py finds the spans).
"""

from bisect import bisect_right
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.chat import Messages, render_conversation
from tpu_experiments.data.documents import Document


@dataclass
class Tokens:
    """One document: ids, and for each whether it is learnt."""

    ids: list[int]
    learn: list[bool]
    document_id: str


def tokenize_document(document: Document, *, tokenizer: PreTrainedTokenizerBase, source: str = "<name>") -> Tokens:
    """Tokens of a text or of a conversation; `source` names the source in an error.

    Raises:
        ConfigError: no assistant turn, or a template that does not render the conversation.
    """
    if document.text is not None:
        return _tokenize_text(document.text, tokenizer=tokenizer, document_id=document.id)
    assert document.messages is not None
    where = f"data.{source}; document {document.id}"
    ids, learn = _tokenize_chat(document.messages, tokenizer=tokenizer, where=where)
    return Tokens(ids, learn, document.id)


def _tokenize_text(text: str, *, tokenizer: PreTrainedTokenizerBase, document_id: str) -> Tokens:
    ids = _with_bos(_encode(text, tokenizer=tokenizer), tokenizer=tokenizer)
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    learn = [True] * len(ids)
    if ids and ids[0] == tokenizer.bos_token_id:
        learn[0] = False
    return Tokens(ids, learn, document_id)


def _tokenize_chat(
    messages: Messages, *, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    last_answer = max((i for i, m in enumerate(messages) if m[0] == "assistant"), default=-1)
    if last_answer < 0:
        roles = ", ".join(role for role, _ in messages)
        raise ConfigError(
            f"{where} has no assistant turn to learn: its {len(messages)} turns are by {roles}; "
            "a row without supervised tokens teaches nothing; remove it, or use a text source."
        )
    # Turns after the last answer are never learnt and never looked back at.
    text, spans = render_conversation(messages[: last_answer + 1], tokenizer=tokenizer, where=where)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoding["input_ids"])
    learn = _overlaps(encoding["offset_mapping"], spans=spans)
    return _close(ids, learn, tokenizer=tokenizer)


def _overlaps(offsets: list[tuple[int, int]], *, spans: list[tuple[int, int]]) -> list[bool]:
    """For each token's (begin, end) in characters, whether it overlaps one of the sorted spans."""
    ends = [end for _, end in spans]
    learn = []
    for begin, end in offsets:
        following = bisect_right(ends, begin)  # the first span that ends after the token begins
        learn.append(following < len(spans) and end > spans[following][0])
    return learn


def _close(ids: list[int], learn: list[bool], *, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Learn EOS after the last answer when the template has no end-of-turn marker of its own."""
    num_kept = len(learn) - learn[::-1].index(True) if any(learn) else len(learn)
    is_marked = any(learn) and tokenizer.decode(ids[num_kept - 1], skip_special_tokens=True) == ""
    if is_marked or tokenizer.eos_token_id is None:
        return ids, learn
    return [*ids[:num_kept], tokenizer.eos_token_id], [*learn[:num_kept], True]


def _encode(text: str, *, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _with_bos(ids: list[int], *, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]
