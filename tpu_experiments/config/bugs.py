"""Reports of unexpected errors: one sentence for the user, and the traceback in a log file."""

import os
import platform
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tpu_experiments.config.schema import Config
from tpu_experiments.config.surroundings import sentence_of

RUN_LOG = "run.log"
NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|std::bad_alloc")
"""Texts of out-of-memory errors raised by torch or Arrow."""


def bug_sentence(error: Exception, *, config: Config | None) -> str:
    """Write the traceback of `error` to a log; return one sentence with the cause and the log's path.

    Args:
        config: of the run whose folder has run.log; None where there is none yet.
    """
    log = write_traceback(error, config=config)
    outside = sentence_of(error)
    if outside is not None:
        return f"{outside[0]}; the traceback is in {log}."
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}{f': {lines[-1]}' if lines else ''}".rstrip(".")
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return (
            f"the memory of this machine ({total:.0f} GiB) or of this process is used up ({reason}); take a machine "
            f"with more, a smaller model or smaller batches; the traceback is in {log}."
        )
    own = _frame_of(error, plugins=config.plugins if config is not None else [])
    if own is not None:
        return f"{own} raised {reason}; it is code of your own (plugins); the traceback is in {log}."
    return (
        f"a bug in tpu_experiments: {reason}; the log with the traceback is at {log}; attach it and the files that the "
        "command read when you report it."
    )


def _frame_of(error: Exception, *, plugins: Sequence[str]) -> str | None:
    """Return the innermost line of a plugin, or None if no plugin ran or it had called this package."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if any(module == plugin or module.startswith(f"{plugin}.") for plugin in plugins):
            found = f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"
        elif module.startswith("tpu_experiments."):
            found = None
    return found


def write_traceback(error: Exception, *, config: Config | None, process: str = "") -> str:
    """Append the traceback, command and versions to run.log, else to a new file; return its path."""
    shown = "".join(traceback.format_exception(error))
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    command = shlex.join(["python", *sys.argv])
    versions = f"Python {platform.python_version()}, {platform.platform()}"
    content = f"{when} CRITICAL an error that nobody foresaw, {process}{versions}: {command}\n{shown}"
    log = _run_log(config)
    if log is not None:
        try:
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(content)
            return str(log)
        except OSError:  # a full disk, or no right to write there: the traceback goes elsewhere
            pass
    number, path = tempfile.mkstemp(prefix="tpu_experiments_", suffix=".log")
    with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(content)
    return path


def _run_log(config: Config | None) -> Path | None:
    """Return run.log of a local run folder, if it exists."""
    if config is None or config.name is None or "://" in config.output_dir:
        return None
    log = Path(config.output_dir, config.name, RUN_LOG)
    return log if log.is_file() else None
