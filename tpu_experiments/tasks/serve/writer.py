"""The one writer of answers: requests wait in a queue, and one thread uses the device for all of them."""

import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks.generate.answers import Answers, Growth
from tpu_experiments.tasks.generate.conversation import fitted
from tpu_experiments.tasks.serve.requests import Request

log = logging.getLogger(__name__)
MAX_WAITING = 64
"""Requests that may wait; more are turned away."""
WAKING_SECONDS = 1.0
"""Longest wait for a request at a time. Python runs a signal's handler between two instructions, so a Ctrl-C that came
just before an endless wait was answered by the next request alone (a test hung so, once in five runs)."""


@dataclass(frozen=True)
class End:
    """What is known when an answer has ended."""

    reason: str
    """`stop` where the model ended it, `length` where its tokens did."""
    usage: dict[str, int]
    """Counts of tokens by OpenAI's names, and `turns_left_out`, where a conversation is longer than a prompt may be."""


@dataclass
class Job:
    """A request on its way, and the pieces of its answer so far."""

    request: Request
    pieces: "queue.SimpleQueue[str | End | ConfigError]" = field(default_factory=queue.SimpleQueue)
    is_cancelled: threading.Event = field(default_factory=threading.Event)


class Writer:
    """Answers requests in the order in which they came.

    Args:
        models: what answers, by name.
    """

    def __init__(self, models: Mapping[str, Answers]) -> None:
        self.models = models
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)

    def run(self) -> None:
        """Answer until `stop`, in the caller's thread."""
        while True:
            try:
                job = self._jobs.get(timeout=WAKING_SECONDS)
            except queue.Empty:
                continue
            if job is None:
                return
            try:
                self._write(job)
            except ConfigError as error:
                job.pieces.put(error)

    def stop(self) -> None:
        """End `run` after the requests that wait."""
        self._jobs.put(None)

    def ask(self, request: Request) -> Job | None:
        """Put a request into the queue; None if too many wait."""
        job = Job(request)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return None
        return job

    def _write(self, job: Job) -> None:
        request, answers = job.request, self.models[job.request.model]
        if job.is_cancelled.is_set():
            return
        prompt, ids, num_left_out = fitted(request.messages, reader=answers.reader, place="the conversation")
        growth, answer = Growth(answers.reader.ends.marker), None
        for (answer,) in answers.grow_one(prompt, ids, temperature=request.temperature, max_tokens=request.max_tokens):
            if new := growth.more(answer.text):
                job.pieces.put(new)
            if job.is_cancelled.is_set():
                break
        assert answer is not None, "a prompt has at least one token of an answer"
        if rest := growth.rest(answer.text):
            job.pieces.put(rest)
        counts = {"prompt_tokens": len(ids), "completion_tokens": answer.num_tokens}
        usage = {**counts, "total_tokens": sum(counts.values()), "turns_left_out": num_left_out}
        job.pieces.put(End("stop" if answer.finished else "length", usage))
        log.info("%s: %s", request.model, answers.latest_account())


def pieces_of(job: Job) -> Iterator[str | End]:
    """Yield the text of an answer as it comes, then its end; a caller that stops early cancels it.

    Raises:
        ConfigError: the request cannot be answered.
    """
    try:
        while True:
            piece = job.pieces.get()
            if isinstance(piece, ConfigError):
                raise piece
            yield piece
            if isinstance(piece, End):
                return
    finally:
        job.is_cancelled.set()
