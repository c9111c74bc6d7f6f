"""Records that wait for a server: in order, once each, through an outage, and never in the way of a step."""

import logging
import threading
import time

import pytest

from tpu_experiments.loggers import outbox
from tpu_experiments.loggers.outbox import Outbox


class Server:
    """Takes numbers, unless it is down or has no use for one."""

    def __init__(self) -> None:
        self.is_down, self.taken, self.tries = False, list[int](), 0

    def take(self, number: int) -> None:
        self.tries += 1
        if self.is_down:
            raise ConnectionError("connection refused")
        if number < 0:
            raise ValueError(f"{number} is no number")
        self.taken.append(number)


def opened() -> Outbox:
    return Outbox("test", is_refused=lambda error: isinstance(error, ValueError))


def wait_for(server: Server, tries: int) -> None:
    deadline = time.monotonic() + 20
    while server.tries < tries:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_outage_delays_records_and_loses_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "WAITS_SECONDS", (0.05,))
    caplog.set_level(logging.INFO)
    server, box = Server(), opened()
    box.put(lambda: server.take(0))
    wait_for(server, 1)
    server.is_down = True
    began = time.monotonic()
    for number in range(1, 50):
        box.put(lambda number=number: server.take(number))  # type: ignore[misc]
    assert time.monotonic() - began < 1.0, "no call waits for the server"
    wait_for(server, 4)
    server.is_down = False
    box.put(lambda: server.take(-1))
    box.put(lambda: server.take(50))
    box.close()
    assert server.taken == list(range(51))
    assert sum("its records are kept and sent again" in text for text in caplog.messages) == 1
    assert sum("the server answers again" in text for text in caplog.messages) == 1
    assert "a record is refused and left out: ValueError: -1 is no number" in caplog.text
    assert "lacks 1 records" in caplog.text


def test_the_end_of_a_run_waits_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(outbox, "MAX_WAITING", 3)
    server, box = Server(), opened()
    server.is_down = True
    for number in range(5):
        box.put(lambda number=number: server.take(number))  # type: ignore[misc]
    began = time.monotonic()
    box.close()
    assert time.monotonic() - began < 5.0
    assert "logger=test lacks 5 records (ConnectionError: connection refused); metrics.jsonl has them" in caplog.text


def test_a_server_that_hangs_ends_no_later(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(outbox, "CLOSE_SECONDS", 0.2)
    box, hang = opened(), threading.Event()
    box.put(hang.wait)
    began = time.monotonic()
    box.close()
    assert time.monotonic() - began < 5.0
    assert "lacks 1 records" in caplog.text
    hang.set()
