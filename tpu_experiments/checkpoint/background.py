"""One job at a time in a thread of its own; what it raises is raised to whoever asks next."""

import threading
from collections.abc import Callable


class Background:
    """Runs jobs beside the caller, in order, never two at once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether a job raised what nobody has been told yet."""
        return self._error is not None

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` after the one before it, whose error is raised here instead."""
        self.join()
        # No daemon: an interpreter that ends waits for it, so a save is torn by a kill alone.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise what a job raised, once; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait for the job that is under way; raise as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
