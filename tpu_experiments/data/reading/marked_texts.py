"""Conversations in one text, with marks between the turns."""

import re

Turns = list[tuple[str, str]]

_INST = re.compile(r"(\[/?INST\])")
_SYSTEM = re.compile(r"\s*<<SYS>>(.*?)<</SYS>>(.*)", re.DOTALL)
_SEQUENCE_MARKS = re.compile(r"^(?:\s|</?s>)+|(?:\s|</?s>)+$")
_SPEAKER = re.compile(r"###\s?(Human|Assistant):")
_ROLE_OF_SPEAKER = {"Human": "user", "Assistant": "assistant"}


def turns_of_llama2(text: str) -> Turns:
    """Parse `<s>[INST] user [/INST] assistant </s>`, repeated, into turns.

    `<<SYS>>system<</SYS>>` may begin a user turn. The literal <s> and </s> around the turns are dropped, since the
    tokenizer writes its own. A text that ends inside an instruction ends with a user turn.

    Raises:
        ValueError: the marks are not in that order.
    """
    before, *parts = _INST.split(text)
    if _without_end(before):
        raise ValueError(f"has text before the first [INST]: {_without_end(before)[:40]!r}")
    if not parts:
        raise ValueError("has no [INST] in its text")
    marks, pieces = parts[::2], parts[1::2]
    turns: Turns = []
    for number, (mark, piece) in enumerate(zip(marks, pieces, strict=True)):
        wanted = ("[INST]", "[/INST]")[number % 2]
        if mark != wanted:
            raise ValueError(f"has {mark} where {wanted} is due, after {number} marks")
        turns += _instruction_turns(piece) if mark == "[INST]" else [("assistant", _without_end(piece))]
    return turns


def _instruction_turns(piece: str) -> Turns:
    found = _SYSTEM.match(piece)
    if found is None:
        return [("user", _without_end(piece))]
    return [("system", found[1].strip()), ("user", _without_end(found[2]))]


def turns_of_human_assistant(text: str) -> Turns:
    """Parse `### Human: user### Assistant: assistant`, repeated, into turns.

    Text before the first mark is a system turn.

    Raises:
        ValueError: there is no mark.
    """
    before, *parts = _SPEAKER.split(text)
    if not parts:
        raise ValueError("has neither ### Human: nor ### Assistant: in its text")
    turns: Turns = [("system", before.strip())] if before.strip() else []
    speakers, pieces = parts[::2], parts[1::2]
    turns += [(_ROLE_OF_SPEAKER[speaker], piece.strip()) for speaker, piece in zip(speakers, pieces, strict=True)]
    return turns


def _without_end(piece: str) -> str:
    return _SEQUENCE_MARKS.sub("", piece)
