"""Copy checkpoints and the export of a run to another place."""

import logging
import threading
from pathlib import Path

from tpu_experiments.callbacks.base import Callback, Checkpoint, Ended, Moment
from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.places import place_problem
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import paths

MARKER = "COMMIT.json"
"""File of a checkpoint without which it does not count; it is copied last."""
EXPORTS = ("adapter", "model", "base", "README.md", "config.yaml", "result.json")
"""What a finished run leaves, as far as it has it; result.json last."""
STOPPED_SECONDS = 5.0
"""Longest wait for a copy where the run was asked to stop: a machine that is taken back leaves 30 s in all."""

log = logging.getLogger(__name__)


class CopyFolder(Callback):
    """Copies every checkpoint, and what a finished run leaves, to `<to>/<name of the run>`, in a thread."""

    def __init__(self, *, to: str, keep: int = 2, checkpoints: bool = True) -> None:
        """Take the settings.

        Args:
            to: a folder, local or in a bucket.
            keep: newest checkpoints kept there.
            checkpoints: false copies only what a finished run leaves.
        """
        problem = place_problem("to", to, kind="folder")
        if problem is not None:
            raise ConfigError(problem)
        if keep < 1:
            raise ConfigError(f"keep={keep}; it must be at least 1.")
        self._to, self._keep, self._checkpoints = to, keep, checkpoints
        self._last: threading.Thread | None = None
        """Copies the newest checkpoint; a daemon, so that a process that was asked to stop ends."""

    def check(self, config: Config) -> None:
        """Refuse to copy a run onto itself."""
        if paths.absolute(self._to).rstrip("/") == paths.absolute(config.output_dir).rstrip("/"):
            raise ConfigError(f"to={self._to}; it is output_dir, where the run itself is; name another folder.")

    def on_save(self, run: Moment, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, unless the one before it is still being copied."""
        if not self._checkpoints:
            return
        if self._last is not None and self._last.is_alive():
            log.warning(
                "callbacks.%s: checkpoint of step %d is not copied: the one before it still is",
                run.callback,
                checkpoint.step,
            )
            return
        self._last = threading.Thread(target=self._copy_checkpoint, args=(run, checkpoint), name="copy", daemon=True)
        self._last.start()

    def on_end(self, run: Moment, ended: Ended, why: str) -> None:
        """Wait for the last copy, and copy what a finished run leaves."""
        if self._last is not None:
            self._last.join(STOPPED_SECONDS if ended == "stopped" else None)
            if self._last.is_alive():
                log.warning("callbacks.%s: the last checkpoint is not copied: the run was asked to stop", run.callback)
        if ended == "finished":
            place = paths.join(self._to, run.run_folder.name)
            for name in EXPORTS:
                if paths.exists(run.run_folder.path(name)):
                    copy_tree(run.run_folder.path(name), paths.join(place, name))
            log.info("callbacks.%s: the export is in %s", run.callback, place)

    def _copy_checkpoint(self, run: Moment, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint and remove older copies; what goes wrong is logged."""
        folder = paths.join(self._to, run.run_folder.name, "checkpoints")
        name = checkpoint.path.rstrip("/").rpartition("/")[2]
        try:
            copy_tree(checkpoint.path, paths.join(folder, name), last=MARKER)
            there = sorted(each for each in paths.list_names(folder) if each.startswith("step_"))
            for old in there[: -self._keep]:
                paths.remove_marked(paths.join(folder, old), MARKER)
            log.info("callbacks.%s: checkpoint of step %d is in %s", run.callback, checkpoint.step, folder)
        except FileNotFoundError:
            log.warning(
                "callbacks.%s: checkpoint of step %d was removed before it was copied; raise checkpoint.keep_last",
                run.callback,
                checkpoint.step,
            )
        except Exception as error:
            log.warning(
                "callbacks.%s: checkpoint of step %d is not copied (%s)", run.callback, checkpoint.step, one_line(error)
            )


def copy_tree(source: str, target: str, *, last: str | None = None) -> None:
    """Copy a file, or a folder of files; both may be in buckets.

    Args:
        last: name of a file of the folder that is copied behind all others.

    Raises:
        FileNotFoundError: the source, or a file of it, is not there any more.
    """
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
