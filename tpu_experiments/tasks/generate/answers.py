"""Decode batches of prompts into text and count answers, tokens and speed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.loggers.runlog import held_back
from tpu_experiments.models.generation import Decoder
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.tasks.generate.prompts import Ends, Prompt


@dataclass(frozen=True)
class Answer:
    """Text generated for a prompt."""

    prompt: Prompt
    text: str
    num_tokens: int
    """Tokens without the one that ended the answer."""
    finished: bool
    """Whether the model ended the answer, rather than `task.max_new_tokens`."""

    def fields(self) -> dict[str, Any]:
        """Return a line of `task.output`."""
        facts = {"text": self.text, "num_tokens": self.num_tokens, "finished": self.finished}
        return {"prompt": self.prompt.shown, **facts}


@dataclass(frozen=True)
class Reader:
    """Conversion of prompts to token ids and of generated ids to text."""

    ids: Callable[[Prompt], list[int]]
    tokenizer: PreTrainedTokenizerBase
    ends: Ends
    kind: str
    buckets: list[int]
    """Prompt lengths of the compiled programs, ascending."""

    def bucket(self, ids: Sequence[int], *, place: str) -> int:
        """Return the smallest bucket that holds these ids.

        Raises:
            ConfigError: they are longer than the largest.
        """
        for bucket in self.buckets:
            if len(ids) <= bucket:
                return bucket
        raise ConfigError(
            f"{place}; it has {len(ids)} tokens and the longest of task.buckets that leaves room for "
            f"task.max_new_tokens has {self.buckets[-1]}; cut it, or add a longer bucket."
        )

    def answer(self, prompt: Prompt, written: list[int]) -> Answer:
        """Return the answer decoded up to its end."""
        end = next((place for place, token in enumerate(written) if token in self.ends.ids), len(written))
        text = str(self.tokenizer.decode(written[:end], skip_special_tokens=True))
        is_marked = bool(self.ends.marker) and self.ends.marker in text
        if is_marked:
            text = text.partition(self.ends.marker)[0]
        if self.kind == "chat":
            text = text.strip()
        return Answer(prompt, text, end, finished=end < len(written) or is_marked)


class Answers:
    """Generator of answers, with counts and speed."""

    def __init__(self, decoder: Decoder, reader: Reader, *, runtime: Runtime, num_sequences: int) -> None:
        self.decoder, self.reader, self.runtime, self.num_sequences = decoder, reader, runtime, num_sequences
        self.num_prompts = self.num_tokens = self.num_answers = 0
        self.seconds = 0.0
        self._before = runtime.counters()

    def answer_all(self, prompts: Sequence[tuple[Prompt, list[int]]], *, live: bool) -> Iterator[tuple[int, Answer]]:
        """Yield number and answer of every prompt (`num_sequences` of each).

        A batch runs when the prompts of one bucket fill it, so that answers may come out of order.

        Args:
            live: print the text of a batch of one row while it is generated, and of others afterwards.
        """
        waiting: dict[int, list[tuple[int, Prompt, list[int]]]] = {}
        for prompt, ids in prompts:
            bucket = self.reader.bucket(ids, place=prompt.place)
            for _ in range(self.num_sequences):
                number = self.num_prompts
                self.num_prompts += 1
                waiting.setdefault(bucket, []).append((number, prompt, ids))
                if len(waiting[bucket]) == self.decoder.num_rows:
                    yield from self._batch(waiting.pop(bucket), bucket=bucket, live=live)
        for bucket, rows in sorted(waiting.items()):
            yield from self._batch(rows, bucket=bucket, live=live)

    def _batch(
        self, rows: list[tuple[int, Prompt, list[int]]], *, bucket: int, live: bool
    ) -> Iterator[tuple[int, Answer]]:
        with Screen() as screen:
            yield from self._answered(rows, bucket=bucket, screen=screen if live else None)

    def _answered(
        self, rows: list[tuple[int, Prompt, list[int]]], *, bucket: int, screen: "Screen | None"
    ) -> Iterator[tuple[int, Answer]]:
        started = time.perf_counter()
        draws = [number for number, _, _ in rows]
        answers: list[Answer] = []
        for written in self.decoder.stream([ids for _, _, ids in rows], draws=draws, bucket=bucket):
            answers = [self.reader.answer(row[1], own) for row, own in zip(rows, written, strict=True)]
            if screen is not None and len(rows) == 1:
                screen.show(answers[0].text)
            if all(answer.finished for answer in answers):
                break
        self.seconds += time.perf_counter() - started
        self.num_answers += len(answers)
        self.num_tokens += sum(answer.num_tokens for answer in answers)
        if screen is not None:
            screen.end([answer.text for answer in answers])
        yield from zip(draws, answers, strict=True)

    def account(self) -> str:
        """Return a sentence with answers, tokens, speed and compiled programs."""
        now = self.runtime.counters()
        seconds = self.seconds - (now.compile_seconds - self._before.compile_seconds)
        speed = self.num_tokens / max(seconds, 1e-9)
        num = now.num_compiles - self._before.num_compiles
        buckets = ", ".join(map(str, sorted(self.decoder.buckets))) or "none"
        programs = f"{num} programs compiled, {self.decoder.num_programs} needed (buckets {buckets})"
        if self.runtime.device.type != "xla":
            programs = f"no programs: plain torch (buckets {buckets})"
        return (
            f"{self.num_answers} answers, {self.num_tokens} tokens in {seconds:.2f} s beside compilation: "
            f"{speed:,.1f} tokens/s; {programs}"
        )


class Screen:
    """Print text on the terminal as it grows; log records wait until it ends."""

    def __init__(self) -> None:
        self.shown = ""
        self._log = ExitStack()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def show(self, text: str) -> None:
        """Print what is new; an incomplete UTF-8 character waits for its other bytes."""
        whole = text.rstrip("\ufffd")
        if whole.startswith(self.shown):
            if not self.shown and whole:
                self._log.enter_context(held_back())
            print(whole[len(self.shown) :], end="", flush=True)
            self.shown = whole

    def end(self, texts: Sequence[str]) -> None:
        """End the line; print texts again whose beginning has changed."""
        for text in texts:
            if self.shown and text.startswith(self.shown):
                print(text[len(self.shown) :], flush=True)
            else:
                print(("\n" if self.shown else "") + text, flush=True)
        self._log.close()
