"""Decode batches of prompts into text and count answers, tokens and speed."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.export.generation import Ends
from tpu_experiments.loggers.runlog import held_back
from tpu_experiments.models.passes.generation import Sampling
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.tasks.generate.prompts import Prompt
from tpu_experiments.training.evaluation import Told


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


class Continuations(Protocol):
    """Source of generated tokens: models/passes/generation.py's Decoder, or llama.cpp."""

    num_rows: int
    """Prompts answered at once."""

    @property
    def buckets(self) -> Collection[int]:
        """Return the prompt lengths used so far."""
        ...

    @property
    def num_programs(self) -> int:
        """Return the number of programs that these lengths need."""
        ...

    def stream(
        self,
        prompts: Sequence[list[int]],
        *,
        draws: Sequence[int],
        bucket: int,
        sampling: Sampling | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield the tokens generated so far for every prompt; arguments as of Decoder.stream."""
        ...


class Answers:
    """Generator of answers, with counts and speed.

    Args:
        runtime: of the decoder; None for llama.cpp.
    """

    def __init__(
        self, decoder: Continuations, reader: Reader, *, runtime: Runtime | None, num_sequences: int = 1
    ) -> None:
        self.decoder, self.reader, self.runtime, self.num_sequences = decoder, reader, runtime, num_sequences
        self.num_prompts = self.num_tokens = self.num_answers = 0
        self.seconds = 0.0
        self.latest = (0, 0.0)
        """Tokens of the latest batch, and its seconds beside compilation."""
        self._compiles_before = self._compiler()[0]

    def _compiler(self) -> tuple[int, float]:
        """Return programs compiled in this process so far, and the seconds that took."""
        if self.runtime is None:
            return 0, 0.0
        counters = self.runtime.counters()
        return counters.num_compiles, counters.compile_seconds

    def answer_all(self, prompts: Sequence[tuple[Prompt, list[int]]], *, live: bool) -> Iterator[tuple[int, Answer]]:
        """Yield number and answer of every prompt (`num_sequences` of each).

        A batch runs when the prompts of one bucket fill it, so that answers may come out of order.

        Args:
            live: print the text of a batch of one row while it is generated, and of others afterwards.
        """
        waiting: dict[int, list[tuple[int, Prompt, list[int]]]] = {}
        told = Told("generation, tokens of answers")
        for prompt, ids in prompts:
            bucket = self.reader.bucket(ids, place=prompt.place)
            for _ in range(self.num_sequences):
                number = self.num_prompts
                self.num_prompts += 1
                waiting.setdefault(bucket, []).append((number, prompt, ids))
                if len(waiting[bucket]) == self.decoder.num_rows:
                    yield from self._batch(waiting.pop(bucket), bucket=bucket, live=live, told=told)
        for bucket, rows in sorted(waiting.items()):
            yield from self._batch(rows, bucket=bucket, live=live, told=told)

    def _batch(
        self, rows: list[tuple[int, Prompt, list[int]]], *, bucket: int, live: bool, told: Told
    ) -> Iterator[tuple[int, Answer]]:
        with Screen(self.reader.ends.marker) as screen:
            yield from self._answered(rows, bucket=bucket, screen=screen if live else None, told=told)

    def _answered(
        self, rows: list[tuple[int, Prompt, list[int]]], *, bucket: int, screen: "Screen | None", told: Told
    ) -> Iterator[tuple[int, Answer]]:
        answers: list[Answer] = []
        for answers in self.grow(rows, bucket=bucket):
            if screen is None:
                told(self.num_tokens + sum(answer.num_tokens for answer in answers), None)
            if screen is not None and len(rows) == 1:
                screen.show(answers[0].text)
        if screen is not None:
            screen.end([answer.text for answer in answers])
        yield from zip((number for number, _, _ in rows), answers, strict=True)

    def grow(
        self,
        rows: list[tuple[int, Prompt, list[int]]],
        *,
        bucket: int,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
    ) -> Iterator[list[Answer]]:
        """Yield the answers to a batch while they grow, until all have ended; the caller stops at will.

        Args:
            rows: number, prompt and ids of each; the number determines the draws.
            sampling: as of Decoder.stream.
            max_new_tokens: fewer than the decoder's.
        """
        started, compiling = time.perf_counter(), self._compiler()[1]
        draws, ids = [number for number, _, _ in rows], [ids for _, _, ids in rows]
        answers: list[Answer] = []
        try:
            for written in self.decoder.stream(ids, draws=draws, bucket=bucket, sampling=sampling):
                kept = [own[:max_new_tokens] for own in written]
                answers = [self.reader.answer(row[1], own) for row, own in zip(rows, kept, strict=True)]
                yield answers
                if all(a.finished or len(own) == max_new_tokens for a, own in zip(answers, kept, strict=True)):
                    break
        finally:
            seconds = time.perf_counter() - started - (self._compiler()[1] - compiling)
            self.latest = sum(answer.num_tokens for answer in answers), seconds
            self.num_answers += len(answers)
            self.num_tokens += self.latest[0]
            self.seconds += seconds

    def grow_one(
        self,
        prompt: Prompt,
        ids: list[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        draw: int | None = None,
    ) -> Iterator[Answer]:
        """Yield the one answer to a prompt while it grows.

        Args:
            draw: determines the sampling; None for a number of its own.
        """
        if draw is None:
            draw = self.num_prompts
            self.num_prompts += 1
        bucket = self.reader.bucket(ids, place=prompt.place)
        row = (draw, prompt, ids)
        for (answer,) in self.grow([row], bucket=bucket, sampling=sampling, max_new_tokens=max_tokens):
            yield answer

    def latest_account(self) -> str:
        """Return a phrase with tokens and speed of the latest batch."""
        tokens, seconds = self.latest
        return f"{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):,.1f} tokens/s"

    def account(self) -> str:
        """Return a sentence with answers, tokens, speed and compiled programs."""
        seconds = self.seconds
        speed = self.num_tokens / max(seconds, 1e-9)
        num = self._compiler()[0] - self._compiles_before
        buckets = ", ".join(map(str, sorted(self.decoder.buckets))) or "none"
        programs = f"{num} programs compiled, {self.decoder.num_programs} needed (buckets {buckets})"
        if self.runtime is None:
            programs = "no programs: llama.cpp"
        elif self.runtime.device.type in ("cpu", "cuda"):
            programs = f"no programs: plain torch (buckets {buckets})"
        return (
            f"{self.num_answers} answers, {self.num_tokens} tokens in {seconds:.2f} s beside compilation: "
            f"{speed:,.1f} tokens/s; {programs}"
        )


class Growth:
    """Text that grows, as the pieces that are new each time.

    Args:
        markers: texts that end it; what may be the beginning of one waits for the rest.
    """

    def __init__(self, *markers: str) -> None:
        self.shown, self.markers = "", markers

    def more(self, text: str) -> str:
        """Return what is new and certain; an incomplete UTF-8 character waits for its other bytes."""
        whole = text.rstrip("\ufffd")
        held = (
            length
            for marker in self.markers
            for length in range(min(len(marker), len(whole)), 0, -1)
            if whole.endswith(marker[:length])
        )
        return self.rest(whole[: len(whole) - max(held, default=0)])

    def rest(self, text: str) -> str:
        """Return what of the final text was not returned yet; nothing if its beginning has changed."""
        if not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new


class Screen:
    """Print text on the terminal as it grows; log records wait until it ends."""

    def __init__(self, marker: str = "") -> None:
        self._growth = Growth(marker)
        self._log = ExitStack()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def show(self, text: str) -> None:
        """Print what is new."""
        is_first = not self._growth.shown
        new = self._growth.more(text)
        if new:
            if is_first:
                self._log.enter_context(held_back())
            print(for_terminal(new), end="", flush=True)

    def end(self, texts: Sequence[str]) -> None:
        """End the line; print texts again whose beginning has changed."""
        shown = self._growth.shown
        for text in texts:
            if shown and text.startswith(shown):
                print(for_terminal(text[len(shown) :]), flush=True)
            else:
                print(("\n" if shown else "") + for_terminal(text), flush=True)
        self._log.close()
