"""Set up Python logging of a run: to the terminal, above progress bars, and on rank 0 to run.log.

`start_run_log(None, ...)` comes first and keeps records in memory, because a refused config must write nothing;
`start_run_log(folder, ...)` writes them to run.log once the run folder exists.
"""

import atexit
import logging
import logging.handlers
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.storage.retry import shown
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.storage.spool import Mirror

NOISY = ("httpx", "httpx2", "httpcore", "urllib3", "fsspec", "gcsfs", "datasets", "filelock", "matplotlib")
FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NUM_KEPT_RECORDS = 10_000

THREADS: set[str] = set()
"""Names of threads with a run.log of their own, as the runs of a pack have."""

log = logging.getLogger(__name__)


class TerminalHandler(logging.Handler):
    """Print records above a running progress bar, without those that the bar itself shows."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[logging.LogRecord] | None = None
        """Records that wait until another writer has finished its line (`held_back`)."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record to stderr."""
        if getattr(record, "shown_by_bar", False):
            return
        if self.held is not None:
            self.held.append(record)
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


class Formatter(logging.Formatter):
    """Formatter that redacts secrets, as of URLs in clients' errors, and escapes controls, as of names in files."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line with its traceback."""
        return for_terminal(redacted_text(super().format(record)))


class TerminalFormatter(Formatter):
    """Format as `HH:MM:SS message`, naming a rank other than 0 and a level above INFO."""

    def __init__(self, *, rank: int) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._rank = "" if rank == 0 else f"rank {rank}: "

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line without a traceback."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        thread = f"{record.threadName}: " if record.threadName in THREADS else ""
        return f"{record.asctime} {self._rank}{thread}{level}{record.message}"


class RunLogHandler(logging.FileHandler):
    """Append to run.log and upload it where it is remote."""

    def __init__(self, path: str) -> None:
        self._mirror = Mirror.of_file(path)
        super().__init__(self._mirror.local, encoding="utf-8")
        self.setFormatter(Formatter(FILE_FORMAT))
        self._has_complained = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write and flush one record."""
        super().emit(record)
        self._mirror.upload_if_due()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Warn once when the disk refuses lines, instead of logging's traceback for each."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_complained:
            self._has_complained = True
            log.warning("%s; %s: log lines are missing in this file", self._mirror.local, shown(error))

    def close(self) -> None:
        """Close the file and upload it where the run folder is remote."""
        super().close()
        self._mirror.close()  # without this handler's lock: an upload that is still running may log


OURS = (TerminalHandler, RunLogHandler, logging.handlers.MemoryHandler)


def start_run_log(folder: RunFolder | None, *, rank: int) -> None:
    """Set up the root logger; with `folder` None, records are kept in memory."""
    root = logging.getLogger()
    kept = _buffered_records()
    stop_run_log()
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)  # added by a library's logging.warning(...); it would repeat every line
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    terminal = TerminalHandler()
    terminal.setFormatter(TerminalFormatter(rank=rank))
    root.addHandler(terminal)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that the caller reports
    logging.captureWarnings(True)
    if folder is None:
        root.addHandler(_memory_handler(kept))
    elif rank == 0:
        file = RunLogHandler(folder.path("run.log"))
        for record in kept:
            file.handle(record)
        root.addHandler(file)
        # logging's own exit hook runs after the temporary folder of a remote run.log is gone
        atexit.register(stop_run_log)


def kept_records() -> list[logging.LogRecord]:
    """Return the records kept since `start_run_log(None, ...)`, and keep no further ones."""
    root, kept = logging.getLogger(), _buffered_records()
    for handler in [h for h in root.handlers if isinstance(h, logging.handlers.MemoryHandler)]:
        root.removeHandler(handler)
        handler.close()
    return kept


def start_thread_log(folder: RunFolder, *, kept: Sequence[logging.LogRecord]) -> logging.Handler:
    """Write this thread's records to run.log, and those of threads without a file of their own.

    Args:
        kept: earlier records, which are written first.
    """
    name = threading.current_thread().name
    THREADS.add(name)
    file = RunLogHandler(folder.path("run.log"))
    file.addFilter(lambda record: record.threadName == name or record.threadName not in THREADS)
    for record in kept:
        file.handle(record)
    logging.getLogger().addHandler(file)
    return file


def stop_thread_log(file: logging.Handler) -> None:
    """Close the file of `start_thread_log` and upload it where it is remote; a second call does nothing."""
    root = logging.getLogger()
    if file in root.handlers:
        root.removeHandler(file)
        file.close()


@contextmanager
def held_back() -> Iterator[None]:
    """Hold terminal records back until the block ends, so that they do not cut the line it writes."""
    terminals = [handler for handler in logging.getLogger().handlers if isinstance(handler, TerminalHandler)]
    for terminal in terminals:
        terminal.held = []
    try:
        yield
    finally:
        for terminal in terminals:
            records, terminal.held = terminal.held or [], None
            for record in records:
                terminal.handle(record)


def stop_run_log() -> None:
    """Remove the handlers from the root logger, close run.log and upload it where it is remote."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, OURS)]:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
    atexit.unregister(stop_run_log)


@contextmanager
def terminal_log() -> Iterator[None]:
    """Log to the terminal inside the block, without a run.log."""
    start_run_log(None, rank=0)
    try:
        yield
    finally:
        stop_run_log()


def _memory_handler(kept: list[logging.LogRecord]) -> logging.handlers.MemoryHandler:
    handler = logging.handlers.MemoryHandler(NUM_KEPT_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    handler.buffer.extend(kept)
    return handler


def _buffered_records() -> list[logging.LogRecord]:
    handlers = logging.getLogger().handlers
    memories = [h for h in handlers if isinstance(h, logging.handlers.MemoryHandler)]
    return [record for memory in memories for record in memory.buffer]
