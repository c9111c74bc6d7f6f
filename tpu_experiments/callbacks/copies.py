"""Copy checkpoints and the export of a run to another place."""

import logging
import re
import threading
import uuid
from pathlib import Path

from tpu_experiments.callbacks.base import Callback, Checkpoint, Ended, Moment, is_count
from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.places import place_problem
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.run_folder import RunFolder

MARKER = "COMMIT.json"
"""File of a checkpoint without which it does not count; it is copied last."""
STEP_FOLDER = re.compile(r"step_(\d+)")
EXPORTS = ("adapter", "model", "base", "README.md", "config.yaml", "result.json")
"""What a finished run leaves beside its parts, as far as it has it; result.json last."""
ORIGIN = "origin.json"
"""File of a run folder and of its copy, made with the first copy: two of the same content are of one run."""
SWEEPS = "sweeps"
"""Folder of sweeps in an output_dir; the points of two may have one name."""
STOPPED_SECONDS = 5.0
"""Longest wait for a copy where the run was asked to stop: a machine that is taken back leaves 30 s in all."""

log = logging.getLogger(__name__)


class CopyFolder(Callback):
    """Copies checkpoints, and what a finished run leaves, to `<to>/<name of the run>`, in a thread.

    A point of a sweep goes to `<to>/sweeps/<sweep>/<point>`.
    """

    def __init__(self, *, to: str, keep: int = 2, checkpoints: bool = True) -> None:
        """Take the settings.

        Args:
            to: a folder, local or in a bucket.
            keep: newest complete checkpoints kept there.
            checkpoints: false copies only what a finished run leaves.
        """
        problem = place_problem("to", to, kind="folder")
        if problem is not None:
            raise ConfigError(problem)
        if not is_count(keep):
            raise ConfigError(f"keep={keep}; it must be a whole number, at least 1.")
        if not isinstance(checkpoints, bool):
            raise ConfigError(f"checkpoints={checkpoints}; write true or false.")
        self._to, self._keep, self._checkpoints = to, keep, checkpoints
        self._last: threading.Thread | None = None
        """Copies checkpoints; a daemon, so that a process that was asked to stop ends."""
        self._lock = threading.Lock()
        self._waiting: tuple[Moment, Checkpoint] | None = None
        """The newest checkpoint, while one before it is being copied."""
        self._is_copying = False
        self._newest = 0
        """Step that was copied last; copies up to it are of steps that this process has seen, and may be removed."""

    def check(self, config: Config) -> None:
        """Refuse to copy a run onto itself, or over a copy that the run does not go on from."""
        folder = RunFolder.of(config)
        if paths.absolute(self._place(folder)) == paths.absolute(folder.path()):
            raise ConfigError(f"to={self._to}; it is output_dir, where the run itself is; name another folder.")
        try:
            self._require_own(folder, begins=not steps_in(folder.path("checkpoints")))
        except ConfigError:
            raise
        except Exception as error:  # an outage of the copy's storage keeps no run from its work
            log.warning("to=%s cannot be read (%s); each copy tries it again", self._to, one_line(error))

    def on_save(self, run: Moment, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, as soon as the one before it is copied; of those that wait, the newest alone."""
        if not self._checkpoints:
            return
        with self._lock:
            left, self._waiting = self._waiting, (run, checkpoint)
            if not self._is_copying:
                self._is_copying = True
                self._last = threading.Thread(target=self._copy_waiting, name="copy", daemon=True)
                self._last.start()
        if left is not None:
            log.warning(
                "callbacks.%s: checkpoint of step %d is not copied: one before it still is, and that of step %d waits",
                run.callback,
                left[1].step,
                checkpoint.step,
            )

    def on_end(self, run: Moment, ended: Ended, why: str) -> None:
        """Wait for the last copy, and copy what a finished run leaves."""
        if self._last is not None:
            self._last.join(STOPPED_SECONDS if ended == "stopped" else None)
            if self._last.is_alive():
                log.warning("callbacks.%s: the last checkpoint is not copied: the run was asked to stop", run.callback)
        if ended == "finished":
            place = self._claim(run.run_folder)
            result = run.run_folder.finished() or {}
            for name in [*(result.get("parts") or {}), *EXPORTS]:
                if paths.exists(run.run_folder.path(name)):
                    copy_tree(run.run_folder.path(name), paths.join(place, name))
            log.info("callbacks.%s: the export is in %s", run.callback, place)

    def _copy_waiting(self) -> None:
        """Copy the checkpoint that waits, until none does."""
        while True:
            with self._lock:
                taken, self._waiting = self._waiting, None
                self._is_copying = taken is not None
            if taken is None:
                return
            self._copy_checkpoint(*taken)

    def _copy_checkpoint(self, run: Moment, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint and remove older copies; what goes wrong is logged.

        Incomplete copies are removed too, and those of later steps that this process has copied, which were rolled
        back. (checkpoint/retention.py does so in the run folder; that is a layer above this one.)
        """
        name = checkpoint.path.rstrip("/").rpartition("/")[2]
        try:
            folder = paths.join(self._claim(run.run_folder), "checkpoints")
            paths.remove_marked(paths.join(folder, name), MARKER)  # of a step that is saved again
            copy_tree(checkpoint.path, paths.join(folder, name), last=MARKER)
            last = max(checkpoint.step, self._newest)
            steps = {step: each for step, each in steps_in(folder).items() if step <= last}
            complete = [
                step
                for step in sorted(steps)
                if step <= checkpoint.step and paths.exists(paths.join(folder, steps[step], MARKER))
            ]
            for step in steps.keys() - set(complete[-self._keep :]):
                paths.remove_marked(paths.join(folder, steps[step]), MARKER)
            self._newest = checkpoint.step
            log.info("callbacks.%s: checkpoint of step %d is in %s", run.callback, checkpoint.step, folder)
        except FileNotFoundError:
            log.warning(
                "callbacks.%s: checkpoint of step %d was removed before it was copied; raise checkpoint.keep_last",
                run.callback,
                checkpoint.step,
            )
        except Exception as error:
            log.warning(
                "callbacks.%s: checkpoint of step %d is not copied (%s)",
                run.callback,
                checkpoint.step,
                one_line(error, most=500),
            )

    def _place(self, folder: RunFolder) -> str:
        """Return where the run's copy is: below `to` as the run is below the output_dir of the command."""
        above = paths.absolute(folder.output_dir).rstrip("/").split("/")[-2:]
        return paths.join(self._to, *(above if above[0] == SWEEPS else []), folder.name)

    def _require_own(self, folder: RunFolder, *, begins: bool = False) -> None:
        """Require the place of the copy to be empty, or to have the copy of this run.

        Args:
            begins: the run has no checkpoint, so that a copy of one is all that there is.

        Raises:
            ConfigError: it has another run's, or that of this run before its folder was lost.
        """
        place = self._place(folder)
        names = [name for name in paths.list_names(place) if not name.startswith(".")]
        copied = steps_in(paths.join(place, "checkpoints"))
        origin = origin_of(place)
        if names and (origin is None or origin != origin_of(folder.path()) or (begins and copied)):
            raise ConfigError(
                f"to={self._to}; {place} has a copy, up to step {max(copied, default=0)}, of another run, or of this "
                f"one before {folder.path()} was lost; copy it there to go on from it, or remove it, or name another "
                "to=."
            )

    def _claim(self, folder: RunFolder) -> str:
        """Return the place of the copy, after writing into it whose it is, with what a run folder needs to go on."""
        self._require_own(folder)
        place, own = self._place(folder), origin_of(folder.path())
        if own is None:
            own = strict_json.dumps({"id": uuid.uuid4().hex, "run": paths.absolute(folder.path())}).encode()
            paths.write_bytes_atomic(folder.path(ORIGIN), own)
        if origin_of(place) is None:
            paths.make_dirs(place)
            paths.write_bytes_atomic(paths.join(place, ORIGIN), own)
        if folder.exists():
            copy_one(paths.absolute(folder.identity_path), paths.join(place, "identity.json"))
        return place


def steps_in(folder: str) -> dict[int, str]:
    """Return the names of the checkpoints in a folder, complete or not, by their steps."""
    return {int(found[1]): name for name in paths.list_names(folder) if (found := STEP_FOLDER.fullmatch(name))}


def origin_of(folder: str) -> bytes | None:
    """Return what a run folder or a copy says of its origin; None where it says nothing."""
    path = paths.join(folder, ORIGIN)
    return paths.read_bytes(path) if paths.exists(path) else None


def copy_tree(source: str, target: str, *, last: str | None = None) -> None:
    """Copy a file, or a folder of files; both may be in buckets.

    Args:
        last: name of a file of the folder that is copied behind all others.

    Raises:
        FileNotFoundError: the source, or a file of it, is not there any more.
    """
    source = paths.absolute(source)  # a path, of file:// too
    is_folder = bool(paths.list_names(source)) if paths.is_remote(source) else Path(source).is_dir()
    if not is_folder:
        copy_one(source, target)
        return
    names = paths.list_names(source)
    for name in sorted(names, key=lambda each: each == last):
        copy_one(paths.join(source, name), paths.join(target, name))
    if last is not None and last not in names:
        raise FileNotFoundError(paths.join(source, last))


def copy_one(source: str, target: str) -> None:
    """Copy a file; of one in a bucket, memory holds a piece, or all of it where the target is in a bucket too.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    paths.make_dirs(paths.folder_of(target))
    if not paths.is_remote(source):
        paths.copy_file(source, target)
        return
    num_bytes = paths.size_of(source)
    if num_bytes is None:
        raise FileNotFoundError(source)
    ranges = ((at, min(at + paths.COPIED_BYTES, num_bytes)) for at in range(0, num_bytes, paths.COPIED_BYTES))
    paths.write_chunks_atomic(target, (memoryview(paths.read_range(source, *each)) for each in ranges))
