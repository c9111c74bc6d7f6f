"""What is read of a program's outputs beside the loop: closures that one thread runs, one after the other.

torch_xla's own asynchronous step closures (2.9, torch_xla/utils/closures.py) end their thread after 3 s without work. A
closure that comes between that decision and the thread's last moment stays in the queue until the next one comes: with
log records 3 s apart, a run that waited for its closure stood still.
"""

import queue
import threading
from collections.abc import Callable


class Closures:
    """A thread that starts with the first closure and stays; it keeps nothing of a closure that has run."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, closure: Callable[[], object]) -> None:
        """Have it run behind those before it.

        Raises:
            BaseException: what one of those before it raised, once.
        """
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="closures", daemon=True)
            self._thread.start()
        self._queue.put(closure)

    def wait(self) -> None:
        """Return once all have run.

        Raises:
            BaseException: what one of them raised, once.
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
            del closure  # else tensors that it holds live until the next one comes
