"""Rewards of answers, computed in processes with limits on time and memory.

A function is other people's code, called with what a model wrote: it may raise, hang, or end its process. Each costs
the answer its reward, not the run: a process that hangs or ends is replaced, the answer is NaN and told. A process
gets one answer and one function at a time; rewards are in the order of the answers whatever the order they come in.
A function in TRL's form, `(prompts, completions, **columns) -> list`, gets lists of one.
Legend: N answers, F functions.
"""

import asyncio
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, SupportsFloat

import numpy as np
import psutil
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError, failure_of, one_line
from tpu_experiments.config.reward_schema import RewardConfig
from tpu_experiments.config.targets import target_problems
from tpu_experiments.data.steps.workers import end_with_parent, start_server, usable_cores

START_SECONDS = 120.0
"""Time for a process to start and to import the functions."""
KEY = "rollout.rewards"
NAMED_ROWS = 5
"""Answers whose numbers are told for each complaint."""
NAMED_COMPLAINTS = 5
"""Complaints that are told; texts of errors may be others for each answer."""

MEMORY = "takes more memory than it may"

Function = Callable[..., Any]


@dataclass(frozen=True)
class Answer:
    """What a reward is given."""

    prompt: str
    completion: str
    row: Mapping[str, Any]


@dataclass
class Rewards:
    """Rewards of N answers by F functions."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    values_NF: NDArray[np.float64]
    """NaN where there is none."""
    complaints: dict[str, list[int]] = field(default_factory=dict)
    """What went wrong, with the numbers of the answers."""
    seconds_F: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Time in each function, over the answers it has a reward for."""

    def total(self) -> NDArray[np.float64]:
        """Return the weighted sum of every answer, (N,); NaN where a function gave none."""
        total_N: NDArray[np.float64] = self.values_NF @ np.asarray(self.weights)
        return total_N

    def sentence(self) -> str | None:
        """Return what went wrong in one sentence; None if nothing did."""
        if not self.complaints:
            return None
        parts = []
        for text, rows in list(self.complaints.items())[:NAMED_COMPLAINTS]:
            more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
            parts.append(f"{text} (rows {', '.join(map(str, rows[:NAMED_ROWS]))}{more})")
        if len(self.complaints) > NAMED_COMPLAINTS:
            parts.append(f"{len(self.complaints) - NAMED_COMPLAINTS:,} more such texts")
        num = int(np.isnan(self.values_NF).any(axis=1).sum())
        return f"{KEY}; {num:,} of {len(self.values_NF):,} answers have no reward: {'; '.join(parts)}."


@dataclass(frozen=True)
class _Job:
    row: int
    function: int


class _Worker:
    """A process that computes rewards, seen from this one."""

    def __init__(self, rewards: Mapping[str, RewardConfig], *, max_bytes: int | None) -> None:
        context = get_context("forkserver")
        self.connection, other = context.Pipe()
        arguments = (other, os.getpid(), dict(rewards), max_bytes)
        self.process = context.Process(target=_serve, args=arguments, daemon=True, name="reward")
        self.process.start()
        other.close()
        self.job: _Job | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self.is_ready = False

    def give(self, job: _Job, answer: Answer, *, max_seconds: float) -> None:
        """Send a job.

        Raises:
            OSError: the process has ended.
        """
        self.connection.send((job.function, answer.prompt, answer.completion, dict(answer.row)))
        self.job, self.deadline = job, time.monotonic() + max_seconds

    def close(self) -> int | None:
        """End the process with its children, and return its exit code as it was or now is."""
        if self.process.exitcode is None:
            self.process.kill()
            if self.is_ready and self.process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()
        return self.process.exitcode


class RewardPool:
    """Processes that compute rewards, for all iterations of a run; they start with the first answers.

    Args:
        rewards: by name.
        workers: number of processes; None is one for each core.
        max_bytes: memory of a process beside what it has when the functions are imported, where the platform limits it
            (Linux: address space); None is no limit.

    Raises:
        ConfigError: a function does not exist.
    """

    def __init__(
        self, rewards: Mapping[str, RewardConfig], *, workers: int | None = None, max_bytes: int | None = 2**31
    ) -> None:
        problems = [
            problem
            for name, reward in rewards.items()
            for problem in target_problems(reward.full_name, key=f"{KEY}.{name}", setting="function")
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        self.rewards, self.max_bytes = dict(rewards), max_bytes
        self._limits = [reward.max_seconds for reward in rewards.values()]
        self.num_workers = workers or usable_cores()
        self._workers: list[_Worker] = []

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; also those that hang."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def check(self) -> None:
        """Start a process, and wait until it has imported the functions.

        Raises:
            ConfigError: one cannot be imported or called.
        """
        self.score([])

    def score(self, answers: Sequence[Answer]) -> Rewards:
        """Return the rewards of the answers.

        Raises:
            ConfigError: a function cannot be imported or called.
        """
        names, num = tuple(self.rewards), len(self.rewards)
        found = Rewards(
            names,
            tuple(reward.weight for reward in self.rewards.values()),
            np.full((len(answers), num), np.nan),
            seconds_F=np.zeros(num),
        )
        complaints: dict[_Job, str] = {}
        left = deque(_Job(row, function) for row in range(len(answers)) for function in range(num))
        missing = min(self.num_workers, max(1, len(left))) - len(self._workers)
        if missing > 0:
            start_server()
            self._workers += [_Worker(self.rewards, max_bytes=self.max_bytes) for _ in range(missing)]
        try:
            while left or any(map(_is_busy, self._workers)):
                self._step(left, answers, found, complaints)
        except BaseException:  # a signal's handler may raise: the next answers must not get this call's rewards
            self.close()
            raise
        for job in sorted(complaints, key=lambda job: (job.function, job.row)):
            found.complaints.setdefault(f"{names[job.function]} {complaints[job]}", []).append(job.row)
        return found

    def _step(self, left: deque[_Job], answers: Sequence[Answer], found: Rewards, complaints: dict[_Job, str]) -> None:
        """Give jobs to idle workers, and take what the next one to answer, to end or to be late has."""
        for number, worker in enumerate(self._workers):
            if left and worker.is_ready and worker.job is None:
                job = left.popleft()
                try:
                    worker.give(job, answers[job.row], max_seconds=self._limits[job.function])
                except OSError:  # it ended between two answers, as by a thread that a function left
                    left.appendleft(job)
                    self._replace(number)
        busy = {worker.connection: number for number, worker in enumerate(self._workers) if _is_busy(worker)}
        until = min(self._workers[number].deadline for number in busy.values())
        for connection in wait(list(busy), timeout=max(0.0, until - time.monotonic())):
            assert isinstance(connection, Connection)
            self._take(busy[connection], found, complaints)
        for number, worker in enumerate(self._workers):
            if not _is_busy(worker) or time.monotonic() < worker.deadline or worker.connection.poll():
                continue
            if worker.job is None:
                raise ConfigError(f"{KEY}; a process has not imported the functions in {START_SECONDS:g} s; see there.")
            complaints[worker.job] = f"takes more than {self._limits[worker.job.function]:g} s"
            self._replace(number)

    def _take(self, number: int, found: Rewards, complaints: dict[_Job, str]) -> None:
        worker = self._workers[number]
        try:
            kind, value, seconds = worker.connection.recv()
        except (EOFError, OSError):
            self._ended(number, complaints)
            return
        if not worker.is_ready:
            if kind == "error":
                raise ConfigError(value)
            worker.is_ready = True
            return
        job, worker.job = worker.job, None
        assert job is not None
        if kind == "error":
            complaints[job] = value
        else:
            found.values_NF[job.row, job.function] = value
            found.seconds_F[job.function] += seconds

    def _ended(self, number: int, complaints: dict[_Job, str]) -> None:
        worker = self._workers[number]
        code = worker.close()
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        if not worker.is_ready:
            raise ConfigError(
                f"{KEY}; the process that imports the functions ended {how}; import their modules yourself to see why."
            )
        if worker.job is not None:
            complaints[worker.job] = f"ends its process {how}"
        self._replace(number)

    def _replace(self, number: int) -> None:
        self._workers[number].close()
        self._workers[number] = _Worker(self.rewards, max_bytes=self.max_bytes)


def _is_busy(worker: _Worker) -> bool:
    return worker.job is not None or not worker.is_ready


def source_sha256(reward: RewardConfig) -> str | None:
    """Return the SHA-256 of the file that has the reward's function; None if it is not Python."""
    spec = importlib.util.find_spec(reward.full_name.rpartition(".")[0])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


# ---- in the worker's process --------------------------------------------------------------------------------


def _serve(connection: Connection, parent: int, rewards: Mapping[str, RewardConfig], max_bytes: int | None) -> None:
    """Compute rewards until the other end of the connection is closed."""
    Thread(target=end_with_parent, args=(parent,), name="end_with_parent", daemon=True).start()
    os.setsid()  # what a function starts ends with this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        own = [_located(reward, key=f"{KEY}.{name}") for name, reward in rewards.items()]
    except ConfigError as error:
        connection.send(("error", str(error), 0.0))
        return
    if max_bytes is not None:
        _limit_memory(max_bytes)
    connection.send(("ready", None, 0.0))
    pid = os.getpid()
    with contextlib.suppress(EOFError):
        while True:
            number, prompt, completion, row = connection.recv()
            found = _called(own[number], prompt, completion, row)
            if os.getpid() != pid:  # a child that the function forked: its answer would be taken for the next one's
                os._exit(0)
            connection.send(found)


def _located(reward: RewardConfig, *, key: str) -> Function:
    module_name, _, name = reward.full_name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ConfigError(f"{key}.function={reward.function}; {failure_of(error)}") from error
    if not callable(found):
        raise ConfigError(f"{key}.function={reward.function}; it is no function but of type {type(found).__name__}.")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of some that are written in C
        return functools.partial(found, **reward.arguments)
    if "completions" in signature.parameters:
        return functools.partial(_of_lists, found, signature, reward)
    try:
        signature.bind("", "", {}, **reward.arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}.function={reward.function}; it is called as (prompt, completion, row) with the arguments "
            f"{list(reward.arguments)}, and takes {signature}: {error}; change its parameters, or {key}.arguments; one "
            "with a parameter `completions` is called as by TRL."
        ) from error
    return functools.partial(found, **reward.arguments)


def _of_lists(
    function: Function,
    signature: inspect.Signature,
    reward: RewardConfig,
    prompt: str,
    completion: str,
    row: Mapping[str, Any],
) -> Any:
    """Call a function of TRL's form on one answer."""
    asked: Any = [{"role": "user", "content": prompt}] if reward.gives_messages else prompt
    written: Any = [{"role": "assistant", "content": completion}] if reward.gives_messages else completion
    given = {name: [value] for name, value in row.items()} | {"prompts": [asked], "completions": [written]}
    given |= reward.arguments
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        given = {name: value for name, value in given.items() if name in signature.parameters}
    try:
        values = _waited_for(function(**given))
    except (TypeError, AttributeError, IndexError) as error:  # often of what is given
        kind = "messages" if reward.gives_messages else "texts"
        raise TypeError(
            f"{one_line(error)} (its completions are {kind}: gives_messages={reward.gives_messages})"
        ) from error
    if not hasattr(values, "__len__") or len(values) != 1:
        raise ValueError(f"a list of one reward is wanted for a list of one completion, not {values!r}")
    return values[0]


def _waited_for(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _called(function: Function, prompt: str, completion: str, row: Mapping[str, Any]) -> tuple[str, Any, float]:
    """Return what to send: the reward and the seconds it took, or what is wrong with it."""
    began = time.perf_counter()
    try:
        value = _waited_for(function(prompt, completion, row))
    except MemoryError:
        return "error", MEMORY, 0.0
    except BaseException as error:  # also of sys.exit
        if isinstance(error, ImportError) and "failed to map segment" in str(error):
            return "error", f"{MEMORY}; import {error.name or 'such a library'} at the top of its module", 0.0
        return "error", f"raises {one_line(error)}", 0.0
    seconds = time.perf_counter() - began
    if not isinstance(value, SupportsFloat):
        return "error", f"returns {'None' if value is None else f'a value of type {type(value).__name__}'}", 0.0
    try:
        number = float(value)
    except Exception as error:  # as of an array of several values
        return "error", f"returns what is no number: {one_line(error)}", 0.0
    return ("value", number, seconds) if math.isfinite(number) else ("error", f"returns {number}", 0.0)


def _limit_memory(max_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = psutil.Process().memory_info().vms + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
