"""Parallel map over local processes or a Ray cluster, with results in the order of the jobs.

A worker is `make_worker(settings)`, constructed once per process and called with one job after the other. Jobs write
their output to files and return a summary, so that little travels between processes.
"""

import contextlib
import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, cycle, islice
from multiprocessing import forkserver, get_context, resource_tracker
from threading import Thread
from typing import Any, TypeVar

import psutil

from tpu_experiments.config.errors import ConfigError

Settings = TypeVar("Settings")
Job = TypeVar("Job")
Result = TypeVar("Result")
MakeWorker = Callable[[Settings], Callable[[Job], Result]]
"""Constructs a worker, which is then called with one job after the other; picklable."""

INLINE_JOBS = 3  # processes take about 3 s to start (importing transformers), the time of three blocks
PRELOADED = ["tpu_experiments.data.steps.tokenized", "tpu_experiments.data.steps.windows", "hydra"]
FIRST_JOBS = 2  # per worker, queued for when the processes have started
JOBS_AHEAD = 3  # per worker; bounds the memory of jobs that carry rows

_worker: Callable[[Any], Any] | None = None


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0))


def start_server() -> None:
    """Start the fork server that workers are forked from, unless it runs.

    It imports `PRELOADED`, which takes 3 s, while this process continues.
    """
    # This process is not forked: the threads of the tokenizer and of torch would be copied in an arbitrary state. The
    # server has no such threads; it imports once what every worker of this run needs, and the forks share it.
    forkserver.set_forkserver_preload(PRELOADED)
    # Only this process handles Ctrl-C, and ends the others; the server and its forks inherit the blocked signal.
    resource_tracker.ensure_running()  # before the mask is set, since starting it unblocks the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def map_jobs(
    make_worker: MakeWorker[Settings, Job, Result],
    settings: Settings,
    jobs: Iterable[Job],
    *,
    engine: str,
    workers: int | None,
) -> Iterator[Result]:
    """Yield `make_worker(settings)(job)` for every job, in order.

    Runs in this process when there are `INLINE_JOBS` jobs or fewer, or one local worker. `workers` None uses all cores.

    Raises:
        ConfigError: `engine` is ray and Ray is not installed.
    """
    stream = iter(jobs)
    first = list(islice(stream, INLINE_JOBS + 1))
    count = workers or usable_cores()
    if len(first) <= INLINE_JOBS or (engine == "local" and count == 1):
        run = make_worker(settings) if first else None
        for job in chain(first, stream):
            assert run is not None
            yield run(job)
    elif engine == "ray":
        yield from _map_ray(make_worker, settings, chain(first, stream), workers=workers)
    else:
        yield from _map_local(make_worker, settings, chain(first, stream), workers=count)


def _map_local(
    make_worker: MakeWorker[Settings, Job, Result], settings: Settings, jobs: Iterator[Job], *, workers: int
) -> Iterator[Result]:
    pool = _Pool(make_worker, settings, workers=workers)
    try:
        yield from _in_order(jobs, submit=pool.submit, result=Future.result, workers=workers)
    finally:
        pool.close()


class _Pool:
    """Local worker processes; until the first of them has started, this process works on jobs too."""

    def __init__(self, make_worker: MakeWorker[Settings, Job, Result], settings: Settings, *, workers: int) -> None:
        start_server()
        context = get_context("forkserver")
        self._executor = ProcessPoolExecutor(workers, context, _start, (os.getpid(), make_worker, settings))
        self._num_first = FIRST_JOBS * workers
        self._first: list[Future[Any]] = []
        self._here = functools.cache(lambda: make_worker(settings))

    def submit(self, job: Any) -> Future[Any]:
        """Submit a job to the processes, or run it here while they are still starting."""
        if self._num_first > len(self._first) or any(future.done() for future in self._first):
            future = self._executor.submit(_run, job)
            if self._num_first > len(self._first):
                self._first.append(future)
            return future
        future = Future()
        try:
            future.set_result(self._here()(job))
        except Exception as error:  # raised when this job's result is due
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Shut the processes down and cancel pending jobs."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _start(parent: int, make_worker: Callable[[Any], Callable[[Any], Any]], settings: Any) -> None:
    global _worker
    Thread(target=end_with_parent, args=(parent,), name="end_with_parent", daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process already
    _worker = make_worker(settings)


def end_with_parent(parent: int) -> None:
    """Exit within a second of the end of process `parent`; the kernel reports only the fork server's end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(parent)
        while process.is_running():
            time.sleep(1.0)
    os._exit(1)


def _run(job: Any) -> Any:
    assert _worker is not None
    return _worker(job)


def _map_ray(
    make_worker: MakeWorker[Settings, Job, Result],
    settings: Settings,
    jobs: Iterator[Job],
    *,
    workers: int | None,
) -> Iterator[Result]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "prepare.engine=ray; Ray is not installed; install it (pip install 'tpu_experiments[ray]'), or use "
            "prepare.engine=local."
        ) from error
    owns = not ray.is_initialized()
    if owns:
        # RAY_ADDRESS names a cluster; without it Ray starts a local one on this machine's cores.
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        actor = ray.remote(num_cpus=1)(_RayWorker)
        shared = ray.put((make_worker, settings))
        actors = [actor.remote(shared) for _ in range(count)]
        turns = cycle(actors)
        yield from _in_order(jobs, submit=lambda job: next(turns).run.remote(job), result=ray.get, workers=count)
    finally:
        if owns:
            ray.shutdown()


def _in_order(
    jobs: Iterable[Job], *, submit: Callable[[Job], Any], result: Callable[[Any], Result], workers: int
) -> Iterator[Result]:
    """Yield results in the order of the jobs, with `JOBS_AHEAD` jobs per worker submitted ahead."""
    waiting: deque[Any] = deque()
    for job in jobs:
        waiting.append(submit(job))
        while len(waiting) > workers * JOBS_AHEAD:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


class _RayWorker:
    """A worker in a Ray actor; Ray resolves the reference to (make, settings)."""

    def __init__(self, shared: tuple[Callable[[Any], Callable[[Any], Any]], Any]) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        make_worker, settings = shared
        self.worker = make_worker(settings)

    def run(self, job: Any) -> Any:
        return self.worker(job)
