"""Exact match of the model's answers to held-out questions, asked before, during and after training.

Answers are decoded greedily as samples are, in batches of `QUESTION_ROWS`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.checkpoint.progress import AnswersRecord
from tpu_experiments.config.data_schema import QUESTION_ROWS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.documents import Refused, SourceSpec
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import find_local, near_misses
from tpu_experiments.training.cached_sampler import CachedSampler
from tpu_experiments.training.evaluation import Sampler

SHOWN = 3
"""Number of answers of a set that are kept for display."""
SENTENCE = re.compile(r".*?[.!?](?=\s|$)", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """One question, tokenised for the model."""

    prompt: str
    """Text of the last user turn."""
    expected: str
    ids: list[int]
    """Token ids of the whole conversation up to the answer."""
    num_new: int
    """Tokens of the expected answer and its end mark."""

    def is_right(self, answer: str) -> bool:
        """Return whether the answer's first sentence is the expected one."""
        return first_sentence(without_reasoning(answer)) == first_sentence(without_reasoning(self.expected))

    def is_whole(self, answer: str) -> bool:
        """Return whether all of the answer is the expected one."""
        return without_reasoning(answer).strip() == without_reasoning(self.expected).strip()


def without_reasoning(text: str) -> str:
    """Return an answer without the block of reasoning before it, which may be empty (`model.chat_format=qwen3`)."""
    return text.rpartition("</think>")[2]


def first_sentence(text: str) -> str:
    """Return the text up to the first sentence mark before a blank or the end, else all of it."""
    found = SENTENCE.match(text.strip())
    return found[0] if found else text.strip()


def read_questions(config: Config, *, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Question]]:
    """Read the questions of every set.

    Raises:
        ConfigError: a file is missing, empty or has an invalid row, or a question is longer than the window.
    """
    window = config.sample.window
    return {
        name: [_fitting(question, window=window, where=where) for where, question in _read(key, path, tokenizer)]
        for name, (key, path) in config.questions.items()
    }


def _read(key: str, path: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, Question]]:
    """Yield each question of a file with its place, the start of every sentence about it."""
    shown = f"{key}={path}"
    try:
        lines = paths.read_text(str(find_local(path) or path)).splitlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        hint = "" if paths.is_remote(path) else near_misses(path)
        raise ConfigError(f"{shown}; there is no such file. {hint}Name a .jsonl file of conversations.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}; it is not UTF-8 ({error.reason}); write it so.") from error
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{shown}; it is empty: 0 questions were read; name a file with at least one row.")
    spec = SourceSpec(name=key, path=path, kind="chat", format="messages")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{shown}; line {number}", _question(line, number, spec=spec, shown=shown, tokenizer=tokenizer)


def _question(line: str, number: int, *, spec: SourceSpec, shown: str, tokenizer: PreTrainedTokenizerBase) -> Question:
    found = document_of(RawRow(line.encode(), file=spec.path, unit="line", number=number), spec=spec)
    messages = () if isinstance(found, Refused) else found.messages or ()
    if len(messages) < 2:
        why = f"{found.place} {found.message}" if isinstance(found, Refused) else f"{found.place} asks nothing."
        raise ConfigError(f"{shown}; {why} Every line is a conversation that ends with the expected answer.")
    *asked, (_, expected) = messages
    text = render(tuple(asked), tokenizer=tokenizer, ends_with="generation_prompt")
    whole = render(messages, tokenizer=tokenizer, ends_with="turn")
    ids, all_ids = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, whole))
    return Question(asked[-1][1], expected.strip(), list(ids), max(2, len(all_ids) - len(ids) + 1))


def _fitting(question: Question, *, window: int, where: str) -> Question:
    """Return the question, if it and its answer fit into the window."""
    length = len(question.ids) + question.num_new
    if length > window:
        raise ConfigError(
            f"{where} has {length} tokens with its answer, and sample.window={window}; use a longer window, or "
            "shorten it."
        )
    return question


def ask(sampler: Sampler | CachedSampler, sets: Mapping[str, Sequence[Question]]) -> dict[str, AnswersRecord]:
    """Ask the questions of every set; batches span all sets."""
    every = [question for questions in sets.values() for question in questions]
    most = max(question.num_new for question in every)
    answers = sampler.write([question.ids for question in every], max_new_tokens=most, rows=QUESTION_ROWS)
    found = {}
    for name, questions in sets.items():
        own, answers = answers[: len(questions)], answers[len(questions) :]
        found[name] = scored(questions, own)
    return found


def scored(questions: Sequence[Question], answers: Sequence[str]) -> AnswersRecord:
    """Count the right answers."""
    pairs = list(zip(questions, answers, strict=True))
    return AnswersRecord(
        asked=len(pairs),
        right=sum(question.is_right(answer) for question, answer in pairs),
        whole=sum(question.is_whole(answer) for question, answer in pairs),
        shown=list(answers[:SHOWN]),
    )


def skill_fields(
    sets: Mapping[str, Sequence[Question]], *, before: Mapping[str, AnswersRecord], after: Mapping[str, AnswersRecord]
) -> dict[str, Any] | None:
    """Return `skill` of result.json: shares of right answers, at the top level the first set's.

    None without questions.
    """
    if not sets:
        return None
    scores = {
        name: {
            "before": before[name].right / record.asked,
            "after": record.right / record.asked,
            "asked": record.asked,
            "whole_before": before[name].whole / record.asked,
            "whole_after": record.whole / record.asked,
        }
        for name, record in after.items()
    }
    first = next(iter(sets))
    examples = [
        {"question": question.prompt, "expected": question.expected, "before": old, "after": new}
        for question, old, new in zip(sets[first], before[first].shown, after[first].shown, strict=False)
    ]
    return {key: scores[first][key] for key in ("before", "after", "asked")} | {"sets": scores, "examples": examples}
