"""The one writer of answers: requests wait in a queue, and one thread uses the device for all of them."""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.passes.generation import Sampling
from tpu_experiments.tasks.generate.answers import Answer, Answers, Growth
from tpu_experiments.tasks.generate.prompts import Prompt

log = logging.getLogger(__name__)
MAX_REQUESTS = 256
"""Requests that are answered or wait; more are turned away."""
MAX_OF_A_CLIENT = 64
"""Those of one client."""
WAKING_SECONDS = 1.0
"""Longest wait for a request at a time. Python runs a signal's handler between two instructions, so a Ctrl-C that came
just before an endless wait was answered by the next request alone (a test hung so, once in five runs)."""


class Busy(Exception):
    """Too many requests wait."""


class Stopped(Exception):
    """The server ends before the answer does."""


@dataclass(frozen=True)
class End:
    """What is known when an answer has ended."""

    reason: str
    """`stop` where the model or a stop text ended it, `length` where its tokens did."""
    num_tokens: int


@dataclass(frozen=True)
class Question:
    """What is asked for, checked and tokenized."""

    model: str
    """Name of the weights that answer."""
    prompt: Prompt
    ids: list[int]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    """Texts that end the answer, which is without them."""


Piece = str | End | Exception


@dataclass
class Job:
    """An answer on its way; its pieces go to the loop that made it."""

    question: Question
    index: int
    """Number among the answers to one request."""
    draw: int | None
    """Number that determines the sampling; None for one of its own."""
    pieces: "asyncio.Queue[tuple[int, Piece]]"
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_cancelled: bool = False

    def put(self, piece: Piece) -> None:
        """Hand over a piece, from any thread; a piece for a loop that has ended is dropped."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, (self.index, piece))
        except RuntimeError:
            self.is_cancelled = True


class Writer:
    """Answers the clients in turn, and the requests of one in the order in which they came.

    Args:
        models: what answers, by name.
    """

    def __init__(self, models: Mapping[str, Answers]) -> None:
        self.models = models
        self._waiting: dict[str, deque[Job]] = {}
        self._num_requests: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._is_stopped = False

    def run(self) -> None:
        """Answer until `stop`, in the caller's thread."""
        try:
            while (job := self._next()) is not None:
                try:
                    self._write(job)
                except Exception as error:
                    job.put(error)
                    if not isinstance(error, ConfigError):
                        raise
                except BaseException:
                    job.put(Stopped())
                    raise
        finally:
            self.stop()

    def stop(self) -> None:
        """End `run` after the answer at hand, and tell those that wait."""
        with self._changed:
            self._is_stopped = True
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._changed.notify_all()
        for job in left:
            job.put(Stopped())

    @contextmanager
    def admitted(self, client: str) -> Iterator[list[Job]]:
        """Count a request inside the block; the jobs that are put into the list are cancelled behind it.

        Raises:
            Busy: too many are counted already.
        """
        jobs: list[Job] = []
        with self._changed:
            if self._num_requests.total() >= MAX_REQUESTS or self._num_requests[client] >= MAX_OF_A_CLIENT:
                raise Busy
            self._num_requests[client] += 1
        try:
            yield jobs
        finally:
            for job in jobs:
                job.is_cancelled = True
            with self._changed:
                self._num_requests[client] -= 1
                self._num_requests += Counter()  # without zeros

    def ask(self, jobs: list[Job], *, client: str) -> None:
        """Put answers into the client's queue.

        Raises:
            Stopped: nothing is written any more.
        """
        with self._changed:
            if self._is_stopped:
                raise Stopped
            self._waiting.setdefault(client, deque()).extend(jobs)
            self._changed.notify()

    def _next(self) -> Job | None:
        """Return the next answer to write, of the client whose turn it is; None after `stop`."""
        with self._changed:
            while not self._waiting and not self._is_stopped:
                self._changed.wait(WAKING_SECONDS)
            if self._is_stopped:
                return None
            client = next(iter(self._waiting))
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # behind the others
            return job

    def _write(self, job: Job) -> None:
        if job.is_cancelled:
            return
        asked, answers = job.question, self.models[job.question.model]
        growth = Growth(answers.reader.ends.marker, *asked.stops)
        answer: Answer | None = None
        text, is_stopped = "", False
        for answer in answers.grow_one(
            asked.prompt, asked.ids, draw=job.draw, sampling=asked.sampling, max_tokens=asked.max_tokens
        ):
            text, is_stopped = before_any(asked.stops, answer.text)
            if is_stopped or job.is_cancelled or self._is_stopped:
                break
            if new := growth.more(text):
                job.put(new)
        assert answer is not None, "a prompt has at least one token of an answer"
        if self._is_stopped:
            job.put(Stopped())
            return
        if rest := growth.rest(text):
            job.put(rest)
        job.put(End("stop" if answer.finished or is_stopped else "length", answer.num_tokens))
        log.info("%s: %s", asked.model, answers.latest_account())


def before_any(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Return the text before the first of the stop texts in it, and whether there is one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)
