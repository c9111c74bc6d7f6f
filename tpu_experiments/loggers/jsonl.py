"""Log to metrics.jsonl: one JSON object per line, `{"step", "time", ...}`; `time` in unix seconds.

A run that was killed and resumed leaves one curve: records after the checkpoint it resumed from are dropped before the
first new one. A record of that very step that exists already (the evaluation after the last checkpoint, when the kill
came later) is not written again. Unreadable lines are moved to metrics.bad.jsonl. Non-finite values are written as
null.
"""

import errno
import logging
import os
import time
from typing import Any

from tpu_experiments.loggers.base import LoggerContext, MetricLogger
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import kind_of, shown
from tpu_experiments.storage.run_folder import put_aside
from tpu_experiments.storage.spool import Mirror

METRICS_FILE = "metrics.jsonl"
MAX_WAITING = 10_000
"""Records kept in memory while the disk is full; older ones are dropped."""

log = logging.getLogger(__name__)


class JsonlLogger(MetricLogger):
    """Append to `<run>/metrics.jsonl`, unbuffered; config.yaml and result.json hold settings and final metrics."""

    def __init__(self, context: LoggerContext) -> None:
        self._mirror = Mirror.of_file(context.run_folder.path(METRICS_FILE))
        local = str(self._mirror.local)
        self._resume_step, self._kept = context.resume_step, set[frozenset[str]]()
        if paths.exists(local):
            kept = _keep_until(local, step=context.resume_step, place=context.run_folder.path(METRICS_FILE))
            self._mirror.upload()  # truncated as the local file, so that the remote copy is a prefix of it
            self._kept = {frozenset(record) for record in kept if record["step"] == context.resume_step}
        self._file = self._mirror.local.open("ab", buffering=0)
        self._waiting: list[bytes] = []

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write one line with the values."""
        self._write({"step": step, "time": time.time(), **values})

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Write one line with the text under its tag."""
        self._write({"step": step, "time": time.time(), tag: text})

    def finish(self) -> None:
        """Close the file and upload it where the run folder is remote."""
        self._file.close()
        if self._waiting:
            log.warning("%s lacks its last %d records: the disk was full", self._mirror.local, len(self._waiting))
        self._mirror.close()

    def _write(self, record: dict[str, Any]) -> None:
        if record["step"] == self._resume_step and frozenset(record) in self._kept:
            return
        self._waiting.append(strict_json.dumps(record).encode() + b"\n")
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            if kind_of(error) != "full":
                raise
            if len(self._waiting) == 1:
                log.warning(
                    "%s; %s: log records are kept in memory until the disk has space", self._mirror.local, shown(error)
                )
            del self._waiting[:-MAX_WAITING]
        self._mirror.upload_if_due()

    def _append(self, line: bytes) -> None:
        """Append the whole line or, on an error, nothing."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")
        except OSError:
            self._file.truncate(end)
            raise


def read_records(path: str) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, skipping unreadable lines; empty if there is no file."""
    if not paths.exists(path):
        return []
    found = (_record(line) for line in paths.read_bytes(path).split(b"\n"))
    return [record for record in found if record is not None]


def _keep_until(path: str, *, step: int, place: str) -> list[dict[str, Any]]:
    """Truncate the file to the records up to `step` and return them.

    A start from step 0 keeps none, since it writes step 0 again.

    Args:
        place: the path or URL that `path` is the local copy of.
    """
    *lines, torn = paths.read_bytes(path).split(b"\n")  # splitlines would also cut at U+2028 inside a text
    read = [(line, _record(line)) for line in lines]
    bad = [line for line, record in read if record is None] + [torn] * bool(torn)
    if bad:
        aside = put_aside(place, b"".join(line + b"\n" for line in bad))
        last = ", the last of them torn when the run was killed" if torn else ""
        log.warning("%s: %d lines that cannot be read were moved to %s%s", place, len(bad), aside, last)
    whole = [(line, record) for line, record in read if record is not None]
    kept = [(line, record) for line, record in whole if step > 0 and record["step"] <= step]
    if len(kept) < len(whole):
        log.info("%s: dropped %d records after step %d", place, len(whole) - len(kept), step)
    paths.write_bytes_atomic(path, b"".join(line + b"\n" for line, _ in kept))
    return [record for _, record in kept]


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None unless it is an object with an integer `step`."""
    try:
        record = strict_json.loads(line)
    except ValueError:  # UnicodeDecodeError is one
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None
