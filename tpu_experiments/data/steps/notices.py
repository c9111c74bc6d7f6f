"""Suspicious properties of documents: a few bytes each in the index of a block, counted over the training split.

data/audit/findings.py makes sentences of the counts. They are exact whatever the number of workers, and take as much
memory for a small source as for a large one.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.audit.findings import MIN_CUT_PEAK
from tpu_experiments.data.documents import Document, beginning
from tpu_experiments.data.tokens.tokenize import LEARN, SECOND, Tokens

Arrays = dict[str, NDArray[Any]]

OPEN, RENDERED, EMPTY_THOUGHT, ECHO, SCORED, CONTRADICTED, GOOD, BAD = 1, 2, 4, 8, 16, 32, 64, 128
"""Marks of a document: its end is inside a sentence; it spells out the marks of a chat format; a learnt answer has an
empty block of reasoning; its last answer repeats the question. Of a preference pair: its answers have scores, and the
rejected one has the higher. Of a single answer: its label."""

_BRACKETED = re.compile(
    r"[<\[][|｜][^\s<>|｜\[\]]{2,40}[|｜][>\]]"  # <|im_start|>, <|user|>, <｜User｜>, [|user|]
    r"|<\|turn>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|\[/?(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)\]"
    r"|<(?:extra_id_1|SPECIAL_1[012])>(?:System|User|Assistant)\b|\]~b\](?:system|user|ai)\b|<(?:human|bot)>:"
)
_HEADED = re.compile(r"^#{2,4} ?(?:(human|user|instruction)|assistant|response|gpt|ai|bot)\b ?:", re.I | re.M)
_SPOKEN = re.compile(r"(?:^|[\n>.!?] ?)(?:(user|human)|assistant) ?:\s", re.I)
_SHOUTED = re.compile(r"\b(?:(USER|HUMAN)|ASSISTANT):\s")

_HISTOGRAM = 2**20
"""Lengths from this one on are counted together."""
_SHORTEST = {"characters": 64, "tokens": 16}
"""Documents of fewer are equally long by chance."""
_KEPT_ANSWERS = 16
"""Most frequent answers that are kept of each block: one of most documents is among them."""
_KEPT_SUM = 4096
_KEPT_EXAMPLES = 3
_SHOWN = 60
"""Characters of an answer that a finding quotes."""


def marker_of(document: Document) -> str:
    """Return a mark of a chat format that a document spells out, whatever the family; "" if there is none.

    Marks in words need both sides: `### Human:` and `### Assistant:`, in texts also `USER:` and `ASSISTANT:`.
    """
    texts = [document.text] if document.text is not None else [content for _, content in document.messages or ()]
    texts += [content for _, content in document.rejected.messages or ()] if document.rejected is not None else []
    for text in texts:
        if any(sign in text for sign in ("<", "[", "]~b]")) and (found := _BRACKETED.search(text)):
            return found[0]
        patterns = [_HEADED] * ("##" in text) + [_SPOKEN, _SHOUTED] * (
            document.text is not None and ("ssistant" in text or "ASSISTANT" in text)
        )
        for pattern in patterns:
            sides = {bool(match[1]): match[0].strip(" \n>.!?") for match in pattern.finditer(text)}
            if len(sides) == 2:
                return f"{sides[True]} and {sides[False]}"
    return ""


def notices_of(made: Sequence[tuple[Document, Tokens]]) -> tuple[Arrays, dict[str, Any]]:
    """Return a block's arrays for D documents, and examples of what they count.

    `marks` (D,) uint8; `ends` (D, 2) int32, the characters and the learnt tokens of the last answer, or of a text;
    `answers` (D,) uint64, hashes of the last answers. Of preference pairs these are of the chosen conversation, and
    `lengths` (D, 2) int32 are the learnt tokens of the chosen and of the rejected one. Examples: documents by the mark
    of a chat format (`markers`), and the hash and beginning of the most frequent answer (`answer`).
    """
    marks, ends, answers, lengths = [], [], [], []
    markers: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for document, tokens in made:
        marker, (question, answer) = marker_of(document), _last_answer(document)
        markers[marker] += 1
        halves = np.split(tokens.flags, np.flatnonzero(tokens.flags & SECOND))
        if document.rejected is not None:
            lengths.append([np.count_nonzero(flags & LEARN) for flags in halves])
        chosen, rejected = document.scores or (0.0, 0.0)
        is_echo = bool(answer.strip()) and answer.strip() == question.strip()
        marks.append(
            OPEN * _ends_inside_a_sentence(answer)
            | RENDERED * bool(marker)
            | EMPTY_THOUGHT * tokens.has_empty_thought
            | ECHO * is_echo
            | SCORED * (document.scores is not None)
            | CONTRADICTED * (chosen < rejected)
            | (GOOD if document.label == "true" else BAD) * document.is_single
        )
        has_answer = len(halves[0]) > 1 or len(halves) == 1
        ends.append((len(answer), _last_run(halves[0 if has_answer else 1])))
        answers.append(_hash(answer))
        texts[answer.strip()] += 1
    del markers[""]
    arrays: Arrays = {
        "marks": np.array(marks, np.uint8),
        "ends": np.array(ends, np.int32).reshape(-1, 2),
        "answers": np.frombuffer(b"".join(answers), np.uint64),
    }
    if lengths:
        arrays["lengths"] = np.array(lengths, np.int32)
    examples: dict[str, Any] = {"markers": dict(markers.most_common(_KEPT_EXAMPLES))}
    if texts:
        text = texts.most_common(1)[0][0]
        examples["answer"] = [int(np.frombuffer(_hash(text), np.uint64)[0]), beginning(text[:_SHOWN])]
    return arrays, examples


def _hash(answer: str) -> bytes:
    return hashlib.blake2b(answer.strip().encode(errors="surrogatepass"), digest_size=8).digest()


def _last_answer(document: Document) -> tuple[str, str]:
    """Return the last answer that is learnt and the turn before it; a text and nothing."""
    if document.messages is None:
        return "", document.text or ""
    last = max((i for i in range(len(document.messages)) if document.is_taught(i)), default=0)
    return document.messages[last - 1][1] if last else "", document.messages[last][1]


def _ends_inside_a_sentence(text: str) -> bool:
    end = text.rstrip()[-1:]
    return end.isalpha() or end in (",", ";", "(", "-")


def _last_run(flags: NDArray[np.uint8]) -> int:
    """Return the length of the last run of learnt tokens."""
    learnt = np.flatnonzero(flags & LEARN)
    if not len(learnt):
        return 0
    breaks = np.flatnonzero(np.diff(learnt) > 1)
    return len(learnt) - (int(breaks[-1]) + 1 if len(breaks) else 0)


class Noticed:
    """Sums of the notices of a split's documents, block by block."""

    def __init__(self) -> None:
        self.documents = 0
        self.marks: Counter[int] = Counter()
        self.markers: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        self.texts: dict[int, str] = {}
        self.pairs: Counter[str] = Counter()
        """Of preference pairs: `count`, `scored`, `contradicted`, `chosen_longer`, `rejected_longer`, and the learnt
        tokens of both sides, `chosen_tokens` and `rejected_tokens`."""
        self.lengths = {unit: np.zeros((2, _HISTOGRAM + 1), np.int64) for unit in _SHORTEST}
        """For each unit, the documents by the length of their end, and those of them that end inside a sentence."""

    def add(self, arrays: Arrays, examples: dict[str, Any], *, chosen_D: NDArray[np.bool_]) -> None:
        """Add the chosen documents of a block."""
        marks_D, ends_D2 = arrays["marks"][chosen_D], arrays["ends"][chosen_D]
        self.documents += len(marks_D)
        for mark in (RENDERED, EMPTY_THOUGHT, ECHO, GOOD, BAD):
            self.marks[mark] += int(np.count_nonzero(marks_D & mark))
        self.markers.update(examples["markers"])
        if "lengths" in arrays:
            self._add_pairs(marks_D, arrays["lengths"][chosen_D])
        is_open_D = (marks_D & OPEN) > 0
        for unit, lengths_D in zip(_SHORTEST, np.minimum(ends_D2, _HISTOGRAM).T, strict=True):
            for number, counted_D in enumerate((lengths_D, lengths_D[is_open_D])):
                self.lengths[unit][number] += np.bincount(counted_D, minlength=_HISTOGRAM + 1)
        values, counts = np.unique(arrays["answers"][chosen_D], return_counts=True)
        most = np.argsort(-counts, kind="stable")[:_KEPT_ANSWERS]
        self.answers.update(dict(zip(values[most].tolist(), counts[most].tolist(), strict=True)))
        if len(self.answers) > 2 * _KEPT_SUM:
            self.answers = Counter(dict(self.answers.most_common(_KEPT_SUM)))
        if "answer" in examples and len(self.texts) < _KEPT_SUM:
            self.texts.setdefault(*examples["answer"])

    def _add_pairs(self, marks_D: NDArray[np.uint8], lengths_D2: NDArray[np.int32]) -> None:
        chosen_D, rejected_D = lengths_D2.astype(np.int64).T
        self.pairs.update(
            count=len(lengths_D2),
            scored=int(np.count_nonzero(marks_D & SCORED)),
            contradicted=int(np.count_nonzero(marks_D & CONTRADICTED)),
            chosen_longer=int(np.count_nonzero(chosen_D > rejected_D)),
            rejected_longer=int(np.count_nonzero(rejected_D > chosen_D)),
            chosen_tokens=int(chosen_D.sum()),
            rejected_tokens=int(rejected_D.sum()),
        )

    def counts(self) -> dict[str, Any]:
        """Return the counts as a manifest has them."""
        answers = {"good": self.marks[GOOD], "bad": self.marks[BAD]}
        answer, documents = max(self.answers.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
        return {
            "documents": self.documents,
            "rendered": self.marks[RENDERED],
            "markers": sorted(self.markers, key=lambda marker: (-self.markers[marker], marker))[:_KEPT_EXAMPLES],
            "empty_thoughts": self.marks[EMPTY_THOUGHT],
            "echoes": self.marks[ECHO],
            "same_answer": {"documents": documents, "text": self.texts.get(answer, "")},
            **({"pairs": dict(self.pairs)} if self.pairs else {}),
            **({"answers": answers} if any(answers.values()) else {}),
            "equal_ends": {unit: self._equal_ends(unit) for unit in _SHORTEST},
        }

    def _equal_ends(self, unit: str) -> dict[str, float]:
        """Return the length at which the most documents end inside a sentence, beside what is usual near it.

        `near` is the mean number of documents of each other length within a tenth of it.
        """
        all_L, open_L = self.lengths[unit][:, :_HISTOGRAM]
        length_L = np.arange(_HISTOGRAM)
        first_L, last_L = length_L - length_L // 10, np.minimum(length_L + length_L // 10, _HISTOGRAM - 1)
        before_L = np.append(0, np.cumsum(all_L))
        near_L = (before_L[last_L + 1] - before_L[first_L] - all_L) / np.maximum(last_L - first_L, 1)
        peak_L = open_L - MIN_CUT_PEAK * near_L
        length = _SHORTEST[unit] + int(peak_L[_SHORTEST[unit] :].argmax())
        return {
            "length": length,
            "documents": int(all_L[length]),
            "inside_a_sentence": int(open_L[length]),
            "near": round(float(near_L[length]), 3),
        }
