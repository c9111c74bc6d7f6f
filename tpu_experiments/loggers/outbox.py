"""Records on their way to a server, sent in order by a thread, so that no step waits for one that is slow or gone."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from tpu_experiments.config.errors import one_line

MAX_WAITING = 10_000
"""Records that wait at most; beyond, the oldest is dropped."""
WAITS_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between tries while the server cannot be reached; the last one is repeated."""
CLOSE_SECONDS = 20.0
"""Longest wait at the end for what is still to be sent."""

log = logging.getLogger(__name__)


class Outbox:
    """Sends what it is given, each until it has arrived; one that the server refuses is logged and dropped.

    Args:
        name: of the logger, for messages.
        is_refused: returns whether an error says that the same record will be refused again.
    """

    def __init__(self, name: str, *, is_refused: Callable[[Exception], bool]) -> None:
        self._name, self._is_refused = name, is_refused
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._closes_at: float | None = None
        self._num_lost = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], object]) -> None:
        """Have `send` called, after all that was put before."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._num_lost += 1
            self._waiting.append(send)
            self._changed.notify()

    def close(self) -> None:
        """Wait for what is left, at most `CLOSE_SECONDS`, and say how much did not arrive."""
        with self._changed:
            self._closes_at = time.monotonic() + CLOSE_SECONDS
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS + 1.0)
        lost = self._num_lost + len(self._waiting)
        if lost:
            log.warning("logger=%s lacks %d records (%s); metrics.jsonl has them", self._name, lost, self._problem)

    def _run(self) -> None:
        num_failed = 0
        while True:
            with self._changed:
                while not self._waiting and self._closes_at is None:
                    self._changed.wait()
                if not self._waiting:
                    return
                send = self._waiting[0]
            try:
                send()
            except Exception as error:
                self._problem = one_line(error)
                if not self._is_refused(error):
                    if num_failed == 0:
                        log.warning("logger=%s: %s; its records are kept and sent again", self._name, self._problem)
                    if self._sleep(WAITS_SECONDS[min(num_failed, len(WAITS_SECONDS) - 1)]):
                        return
                    num_failed += 1
                    continue
                log.warning("logger=%s: a record is refused and left out: %s", self._name, self._problem)
                self._num_lost += 1
            else:
                if num_failed:
                    log.info("logger=%s: the server answers again", self._name)
                num_failed = 0
            with self._changed:
                if self._waiting and self._waiting[0] is send:
                    self._waiting.popleft()

    def _sleep(self, seconds: float) -> bool:
        """Wait before another try, a second where the outbox is being closed; return whether it is too late for one."""
        until = time.monotonic() + seconds
        with self._changed:
            while (now := time.monotonic()) < until:
                if self._closes_at is not None:
                    until = min(until, now + 1.0)
                    if now >= self._closes_at:
                        return True
                self._changed.wait(min(until - now, 1.0))
        return self._closes_at is not None and time.monotonic() >= self._closes_at
