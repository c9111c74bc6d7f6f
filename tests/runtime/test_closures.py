"""Closures run in order, in another thread; their errors are raised, and nothing waits forever."""

import gc
import threading
import weakref

import pytest

from tpu_experiments.runtime.xla.programs import Closures


class Something:
    """Can be referred to weakly."""


def test_they_run_in_order_beside_the_caller() -> None:
    closures, ran, held = Closures(), [], threading.Event()
    closures.run(held.wait)
    for number in range(50):
        closures.run(lambda number=number: ran.append((number, threading.current_thread().name)))
    assert ran == []
    held.set()
    closures.wait()
    assert ran == [(number, "closures") for number in range(50)]


def test_the_thread_stays_for_what_comes_later() -> None:
    """torch_xla's ends after a while, and loses what comes while it does."""
    closures, names = Closures(), []
    for _ in range(2):
        closures.run(lambda: names.append(threading.get_ident()))
        closures.wait()
        assert closures._thread is not None
        closures._thread.join(timeout=0.2)
        assert closures._thread.is_alive()
    assert len(set(names)) == 1


def test_an_error_is_raised_once_and_nothing_hangs() -> None:
    closures, ran = Closures(), []

    def fail() -> None:
        raise MemoryError("no room for the step")

    closures.run(fail)
    closures.run(lambda: ran.append(1))
    with pytest.raises(MemoryError, match="no room"):
        closures.wait()
    closures.wait()
    assert ran == [1]
    closures.run(fail)
    has_failed = threading.Event()
    closures._queue.put(has_failed.set)
    has_failed.wait()
    with pytest.raises(MemoryError, match="no room"):
        closures.run(fail)


def test_what_has_run_is_let_go() -> None:
    closures, thing = Closures(), Something()
    closures.run(lambda thing=thing: None)
    closures.wait()
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


def test_nothing_to_wait_for() -> None:
    Closures().wait()
