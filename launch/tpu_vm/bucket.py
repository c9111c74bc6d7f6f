"""Fetch the results of a run, or of every point of a sweep, from a bucket."""

import json
from pathlib import Path

from launch.tpu_vm import commands
from launch.tpu_vm.errors import UnreachableError
from launch.tpu_vm.failures import in_one_line, kind_of
from launch.tpu_vm.job import is_grid, is_sweep
from launch.tpu_vm.local_files import LocalFiles
from launch.tpu_vm.running import Run
from launch.tpu_vm.state import Record

COPY_SECONDS = 900.0
RESULTS = ("result.json", "test_results.json", "README.md", "config.yaml", "adapter")
SWEEP_FILES = r"[^/]+/(result\.json|test_results\.json|README\.md|config\.yaml|adapter/.*)|sweep\.json|leaderboard\..*"
SWEEP_FILES += r"|(tensorboard|logs)/.*"
"""Files of a sweep to fetch, the same that launch/worker.sh packs; each point has a folder of its own."""


class Bucket:
    """Read-only view of the bucket that the run on the VM writes to."""

    def __init__(self, run: Run, files: LocalFiles) -> None:
        self._run = run
        self._files = files

    def fetch(self, record: Record, into: Path) -> list[str]:
        """Copy the results into an existing local folder; return the names of what was copied.

        Raises:
            UnreachableError: a copy failed for another reason than a missing object.
        """
        if not is_sweep(record.overrides):
            return [name for name in RESULTS if self._copied(f"{record.run_folder}/{name}", into)]
        there = self._run(commands.bucket_look(f"{record.run_folder}/sweep.json"))
        if there.code and kind_of(there.err) == "absent":
            return []
        words = commands.bucket_part(record.run_folder, str(into), kept=SWEEP_FILES)
        done = self._run(words, timeout=COPY_SECONDS)
        if done.code:
            raise UnreachableError(in_one_line(done.err))
        return self._files.names(into)

    def is_finished(self, record: Record) -> bool:
        """Return whether the run's result, its last file, exists; for a sweep, that of every point.

        Only a grid lists all of its points in sweep.json when it starts. A failed point does not count, so that it is
        retried.
        """
        if not is_sweep(record.overrides):
            return self._run(commands.bucket_look(f"{record.run_folder}/result.json")).code == 0
        if not is_grid(record.overrides):
            return False
        done = self._run(commands.bucket_read(f"{record.run_folder}/sweep.json"))
        rows = json.loads(done.out or "{}").get("points", []) if done.code == 0 else []
        return bool(rows) and all(row.get("status") in ("finished", "pruned") for row in rows)

    def _copied(self, address: str, into: Path) -> bool:
        done = self._run(commands.bucket_copy(address, str(into)), timeout=COPY_SECONDS)
        if done.code and kind_of(done.err) != "absent":
            raise UnreachableError(in_one_line(done.err))
        return done.code == 0
