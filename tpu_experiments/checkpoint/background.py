"""Background jobs in a thread, one at a time; an error of a job is raised by the next call."""

import threading
from collections.abc import Callable


class Background:
    """Runs jobs in a background thread, in order, never two at once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether a job failed and its error has not been raised yet."""
        return self._error is not None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then run `job`; an error of the previous one is raised here instead.

        Raises:
            BaseException: the error of the previous job, once; `job` is not started then.
        """
        self.join()
        # Not a daemon: the interpreter waits for it at exit, so only a kill can tear a save.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a finished job, once; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait for the running job; raise as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
