"""Jobs over processes of this machine or over a Ray cluster, results in the order of the jobs.

A worker is `make(settings)`, made once per process; it is called with one job after the other. Jobs write their output
to files and return a summary, so little travels between processes.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from multiprocessing import get_context
from threading import Thread
from typing import Any, TypeVar

import psutil

from tpu_experiments.config.errors import ConfigError

Settings = TypeVar("Settings")
Job = TypeVar("Job")
Result = TypeVar("Result")

INLINE_JOBS = 3  # the first processes take about 3 s to start, importing transformers; as long as three blocks take
PRELOADED = ["tpu_experiments.data.steps.tokenized", "tpu_experiments.data.steps.windows", "hydra"]
JOBS_AHEAD = 3  # per worker; bounds the memory of jobs that carry rows

_worker: Callable[[Any], Any] | None = None


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def map_jobs(
    make: Callable[[Settings], Callable[[Job], Result]],
    settings: Settings,
    jobs: Iterable[Job],
    *,
    engine: str,
    workers: int | None,
) -> Iterator[Result]:
    """`make(settings)(job)` for every job, in order; in this process when there are `INLINE_JOBS` or fewer.

    Raises:
        ConfigError: `engine` is ray and Ray is not installed.
    """
    stream = iter(jobs)
    first = list(islice(stream, INLINE_JOBS + 1))
    count = workers or usable_cores()
    if len(first) <= INLINE_JOBS or (engine == "local" and count == 1):
        run = make(settings) if first else None
        for job in chain(first, stream):
            assert run is not None
            yield run(job)
    elif engine == "ray":
        yield from _map_ray(make, settings, chain(first, stream), workers=workers)
    else:
        yield from _map_local(make, settings, chain(first, stream), workers=count)


def _map_local(
    make: Callable[[Settings], Callable[[Job], Result]], settings: Settings, jobs: Iterator[Job], *, workers: int
) -> Iterator[Result]:
    # Not fork: the tokenizer's threads and torch's would be copied in whatever state they are in. The server has no
    # such threads and imports once (3 s) what every worker of this run needs, and shares it with them.
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(os.getpid(), make, settings))
    waiting: deque[Future[Any]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_run, job))
            while len(waiting) > workers * JOBS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int, make: Callable[[Any], Callable[[Any], Any]], settings: Any) -> None:
    global _worker
    Thread(target=_end_with, args=(parent,), name="end_with_parent", daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process already
    _worker = make(settings)


def _end_with(parent: int) -> None:
    """End this process within a second of the one that asked for it; the kernel tells of the server's end only."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(parent)
        while process.is_running():
            time.sleep(1.0)
    os._exit(1)


def _run(job: Any) -> Any:
    assert _worker is not None
    return _worker(job)


def _map_ray(
    make: Callable[[Settings], Callable[[Job], Result]], settings: Settings, jobs: Iterator[Job], *, workers: int | None
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
        # RAY_ADDRESS names a cluster; without it Ray starts one of this machine's cores.
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        actor = ray.remote(num_cpus=1)(_RayWorker)
        shared = ray.put((make, settings))
        actors = [actor.remote(shared) for _ in range(count)]
        waiting: deque[Any] = deque()
        for number, job in enumerate(jobs):
            waiting.append(actors[number % count].run.remote(job))
            while len(waiting) > count * JOBS_AHEAD:
                yield ray.get(waiting.popleft())
        while waiting:
            yield ray.get(waiting.popleft())
    finally:
        if owns:
            ray.shutdown()


class _RayWorker:
    """A worker in a Ray actor; Ray resolves the reference to (make, settings)."""

    def __init__(self, shared: tuple[Callable[[Any], Callable[[Any], Any]], Any]) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        make, settings = shared
        self.worker = make(settings)

    def run(self, job: Any) -> Any:
        return self.worker(job)
