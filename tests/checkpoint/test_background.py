"""One job at a time; what it raises is raised once, to whoever asks next."""

import threading

import pytest

from tpu_experiments.checkpoint.saver import Background


def is_running(worker: Background) -> bool:
    return worker._thread is not None and worker._thread.is_alive()


def test_a_second_job_waits_for_the_first():
    worker, order, gate = Background(), [], threading.Event()

    def first() -> None:
        gate.wait(30)
        order.append(1)

    worker.start(first)
    assert is_running(worker)
    assert order == []
    threading.Timer(0.05, gate.set).start()
    worker.start(lambda: order.append(2))
    assert order[0] == 1
    worker.join()
    assert order == [1, 2]


@pytest.mark.parametrize("ask", [Background.join, lambda worker: worker.start(lambda: None)])
def test_an_error_surfaces_once(ask):
    worker = Background()

    def fail() -> None:
        raise OSError("no room")

    worker.start(fail)
    with pytest.raises(OSError, match="no room"):
        ask(worker)
    worker.join()
    worker.check()


def test_a_check_does_not_wait():
    worker, gate = Background(), threading.Event()
    worker.start(lambda: gate.wait(30) and None)
    worker.check()
    assert is_running(worker)
    gate.set()
    worker.join()
