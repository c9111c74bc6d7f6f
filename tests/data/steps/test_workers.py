import itertools
import os
from pathlib import Path

import pytest

from tests.data.jobs import Squarer, Waiter
from tpu_experiments.data.steps.workers import FIRST_JOBS, INLINE_JOBS, JOBS_AHEAD, map_jobs


def test_results_come_in_order_from_other_processes():
    results = list(map_jobs(Squarer, 1, range(40), engine="local", workers=2))
    assert [value for value, _ in results] == [1 + n * n for n in range(40)]
    workers = {process for _, process in results} - {os.getpid()}
    assert 1 <= len(workers) <= 2
    assert {process for _, process in results[: 2 * FIRST_JOBS]} <= workers


def test_this_process_works_until_the_others_have_started(tmp_path: Path):
    # The first jobs of the others end only after this process has done one.
    settings = (os.getpid(), tmp_path / "flag")
    results = list(map_jobs(Waiter, settings, range(2 * FIRST_JOBS + 1), engine="local", workers=2))
    assert results[-1] == (2 * FIRST_JOBS, os.getpid())
    assert os.getpid() not in {process for _, process in results[: 2 * FIRST_JOBS]}


@pytest.mark.parametrize(("count", "workers"), [(0, 4), (INLINE_JOBS, 4), (40, 1)])
def test_a_few_jobs_or_one_worker_stay_in_this_process(count, workers):
    results = list(map_jobs(Squarer, 0, range(count), engine="local", workers=workers))
    assert [value for value, _ in results] == [n * n for n in range(count)]
    assert {process for _, process in results} <= {os.getpid()}


def test_jobs_are_taken_as_they_are_needed():
    taken = itertools.count()
    jobs = (next(taken) for _ in range(1000))
    results = map_jobs(Squarer, 0, jobs, engine="local", workers=2)
    next(results)
    ahead = next(taken)
    results.close()
    assert ahead <= 2 * JOBS_AHEAD + INLINE_JOBS + 2


def test_a_job_that_fails_is_raised_in_its_place():
    results = map_jobs(Squarer, 0, [0, 1, 2, 3, -1, 5, 6], engine="local", workers=2)
    assert [next(results)[0] for _ in range(4)] == [0, 1, 4, 9]
    with pytest.raises(ValueError, match="no square of -1"):
        next(results)
