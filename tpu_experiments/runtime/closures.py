"""Asynchronous step closures: one background thread reads the outputs of programs, in order.

torch_xla's own (2.9, torch_xla/utils/closures.py) end their thread after 3 s without work. A closure that is queued
between that decision and the thread's exit waits in the queue until the next one arrives: with log records 3 s apart, a
run that waited for its closure hung.
"""

import queue
import threading
from collections.abc import Callable


class Closures:
    """A thread that starts with the first closure and runs until the process ends.

    It keeps no reference to a closure that has run.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, closure: Callable[[], object]) -> None:
        """Queue a closure behind the earlier ones.

        Raises:
            BaseException: the error of an earlier closure, once.
        """
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="closures", daemon=True)
            self._thread.start()
        self._queue.put(closure)

    def wait(self) -> None:
        """Block until all queued closures have run.

        Raises:
            BaseException: the error of one of them, once.
        """
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            closure = self._queue.get()
            try:
                closure()
            except BaseException as error:
                self._error = self._error or error
            del closure  # else the tensors that it references live until the next one is queued
