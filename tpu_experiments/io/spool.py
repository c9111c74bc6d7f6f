"""Checkpoints while their place is out of reach: kept on this machine's disk, and delivered when it is back.

`Spool.save` writes to the place a checkpoint belongs to. When that fails as storage fails (io/retry.py), it writes
to `<cache>/spool/<key>` instead, says so once, and a thread tries the place again from then on: the newest checkpoint
first, its commit marker last. The next start of the run on this machine delivers what a dead process left. The run's
records (io/mirror.py) go the same way, before the marker: who goes on from a checkpoint does not write those up to it
again. The save of a request to stop goes here first and to its place from here (io/grace.py).

A full disk is another matter: what retention may remove is removed at once and the save repeated; if that is not
enough the run goes on without this checkpoint, and `LIMIT` such saves in a row end it.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tpu_experiments.io import grace, mirror, paths
from tpu_experiments.io.retry import StorageFailed, complaint, kind_of, shown

RECORDS = "records"
LIMIT = 10
"""Saves in a row that a full disk may cost before the run stops."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 15.0, 300.0

Result = TypeVar("Result")
MakeRoom = Callable[[], object]
First = Literal["there", "here"]

log = logging.getLogger(__name__)


class Spool:
    """Between a run and the folder of its checkpoints; `save` may be called from any one thread."""

    def __init__(self, target: str, *, key: str, marker: str) -> None:
        """`target` holds a folder a checkpoint, complete once it has the file `marker`; `key` tells runs apart."""
        self.target, self.local = target, default_folder() / key
        self._marker, self._run = marker, target.rpartition("/")[0]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._out_since: float | None = None
        self._num_full = 0

    def bring_records(self, folder: str) -> None:
        """Call it before a checkpoint counts in `folder`, the target or the local one; its records go there too.

        Raises:
            Exception: the target is out of reach.
        """
        if folder == self.target:
            mirror.upload_all(run=self._run)
        else:
            mirror.copy_all()

    @property
    def records(self) -> Path:
        """Records that could not be brought to the run's folder, each at its place in it."""
        return self.local / RECORDS

    @property
    def is_out(self) -> bool:
        """Whether checkpoints go to the local disk at present."""
        return self._out_since is not None

    def save(
        self, write: Callable[[str], Result], *, make_room: MakeRoom | None = None, first: First = "there"
    ) -> Result | None:
        """What `write(folder)` returns, which writes one checkpoint, a folder of its own, below the folder it is given.

        That is the target, or the local folder while the target is out of reach; with `first="here"` the local one if
        the target is remote (`close` delivers) and here is room. When the target's disk is full, incomplete checkpoints
        are removed, then `make_room` is called, which removes what retention does not need, and `write` is called
        again; where that was not enough the result is None.

        Raises:
            StorageFailed: the disk was full `LIMIT` times in a row.
            Exception: what `write` raised for another reason than storage.
        """
        if first == "here" and paths.is_remote(self.target):
            try:
                return self._kept(write)
            except OSError as error:
                log.warning("%s; %s: the checkpoint goes to %s alone", self.local, shown(error), self.target)
        if not self.is_out:
            try:
                return self._written(write, make_room)
            except Exception as error:
                if not self._is_outage(error) and kind_of(error) != "full":
                    raise
                if kind_of(error) == "full":
                    self._go_on_without(error)
                    return None
                self._begin_outage(error)
        try:
            self._out_since = self._out_since or time.monotonic()
            result = self._kept(write)
        except OSError as error:
            self._go_on_without(error)
            return None
        self._deliver_later()
        return result

    def deliver(self) -> int:
        """Upload what is here, the newest first; the number of checkpoints that arrived.

        Raises:
            Exception: the target is still out of reach.
        """
        arrived = 0
        mirror.upload_all(run=self._run)
        self._deliver_records()
        while True:
            with self._lock:  # a save that is under way may leave another one
                names = self._names()
                if not names:
                    if not self._kept_records():
                        shutil.rmtree(self.local, ignore_errors=True)
                    self._end_outage(arrived)
                    return arrived
            arrived += self._upload(names[-1])

    def close(self) -> None:
        """Deliver what is left; a second call does nothing.

        Raises:
            StorageFailed: the target is still out of reach; the sentence says where the checkpoints are.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if not self._names() and not self._kept_records():
            return
        try:
            self.deliver()
        except Exception as error:
            raise StorageFailed(
                f"{complaint(error, place=self.target)} {self._kept_text()}; the same command on this machine "
                "delivers them."
            ) from error

    def _kept(self, write: Callable[[str], Result]) -> Result:
        with self._lock:
            self.local.mkdir(parents=True, exist_ok=True)
            return write(str(self.local))

    def _is_outage(self, error: Exception) -> bool:
        """Whether the place may be there again later; a local disk that refuses for good is the user's to mend now."""
        kind = kind_of(error)
        return kind is not None and (kind == "transient" or paths.is_remote(self.target))

    def _written(self, write: Callable[[str], Result], make_room: Callable[[], object] | None) -> Result:
        try:
            with grace.substituted():
                result = write(self.target)
        except Exception as error:
            if kind_of(error) != "full":
                raise
            log.warning("%s; %s: removing what retention no longer needs", self.target, shown(error))
            self._remove_incomplete()
            if make_room is not None:
                make_room()
            result = write(self.target)
        self._num_full = 0
        return result

    def _remove_incomplete(self) -> None:
        """What this save or an earlier one left half-done; this process is the only writer."""
        for name in paths.list_names(self.target):
            if name.startswith("step_") and not paths.exists(paths.join(self.target, name, self._marker)):
                paths.remove_tree(paths.join(self.target, name))

    def _go_on_without(self, error: Exception) -> None:
        """A save that did not fit."""
        self._num_full += 1
        sentence = f"{complaint(error, place=self.target)} This checkpoint is not written ({_free_text(self.target)})"
        if self._num_full >= LIMIT:
            raise StorageFailed(f"{sentence}; stopped after {LIMIT} in a row.") from error
        log.warning("%s; training goes on, and stops after %d in a row.", sentence, LIMIT)

    def _begin_outage(self, error: Exception) -> None:
        self._out_since = time.monotonic()
        log.warning(
            "%s Training goes on; checkpoints are kept in %s (%s) and uploaded when it is back.",
            complaint(error, place=self.target),
            self.local,
            _free_text(str(self.local)),
        )

    def _end_outage(self, arrived: int) -> None:
        if self._out_since is not None:
            minutes = (time.monotonic() - self._out_since) / 60
            log.warning("%s is back after %.1f min; %d checkpoints uploaded.", self.target, minutes, arrived)
        self._out_since = None

    def _deliver_later(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep_trying, name="spool", daemon=True)
            self._thread.start()

    def _keep_trying(self) -> None:
        seconds = FIRST_WAIT_SECONDS
        while (self.is_out or self._names()) and not self._closed.wait(seconds):
            try:
                self.deliver()
            except Exception as error:  # whatever it is, the checkpoints stay where they are
                log.info("%s is still out of reach: %s; %s", self.target, shown(error), self._kept_text())
            seconds = min(2 * seconds, LONGEST_WAIT_SECONDS)

    def _names(self) -> list[str]:
        """Complete checkpoints that wait, oldest first."""
        names = paths.list_names(str(self.local))
        return [
            name
            for name in names
            if (self.local / name / self._marker).is_file() and not (self.local / name).is_symlink()
        ]

    def _upload(self, name: str) -> bool:
        """Files first, the marker last; False where retention has removed it meanwhile."""
        source, place = self.local / name, paths.join(self.target, name)
        if not paths.exists(paths.join(place, self._marker)):
            paths.remove_tree(place)
            paths.make_dirs(place)
            files = sorted(file for file in source.rglob("*") if file.is_file() and file.name != self._marker)
            for file in [*files, source / self._marker]:
                if file.name == self._marker:
                    mirror.upload_all(run=self._run)
                try:
                    paths.copy_file(str(file), paths.join(place, *file.relative_to(source).parts))
                except FileNotFoundError:
                    if file.exists():
                        raise
                    return False
        shutil.rmtree(source, ignore_errors=True)
        return True

    def _kept_records(self) -> list[Path]:
        return sorted(file for file in self.records.rglob("*") if file.is_file() and not file.is_symlink())

    def _deliver_records(self) -> None:
        """A file that grows is brought where its place holds the beginning of it: else another life has gone on."""
        for file in self._kept_records():
            place = paths.join(self._run, *file.relative_to(self.records).parts)
            kept = file.read_bytes()
            if file.suffix == ".json" or not paths.exists(place) or kept.startswith(paths.read_bytes(place)):
                paths.write_bytes_atomic(place, kept)
            else:
                log.info("%s holds more than %s; it stays as it is", place, file)
            file.unlink(missing_ok=True)

    def _kept_text(self) -> str:
        names = self._names()
        if not names and self._kept_records():
            return f"records wait in {self.records}"
        return f"{len(names)} checkpoints wait in {self.local}" + (f", the newest {names[-1]}" if names else "")


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/tpu_experiments/spool`, or the same in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tpu_experiments" / "spool"


def key_of(folder: str, *, identity: str) -> str:
    """Name for the spool of the run folder whose identity file is `identity`: that one, and not a later one there."""
    made = paths.modified_seconds(identity)
    return hashlib.sha256(f"{paths.absolute(folder)}|{made}".encode()).hexdigest()[:20]


def _free_text(place: str) -> str:
    if paths.is_remote(place):
        return "of a bucket's quota nothing is known"
    folder = Path(place.removeprefix("file://"))
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free"
