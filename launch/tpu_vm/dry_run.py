"""Print each command of --dry-run and answer it as a project where everything succeeds at once."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launch.tpu_vm.job import plan_words
from launch.tpu_vm.settings import settings_of
from launch.tpu_vm.slices import load_slice
from launch.tpu_vm.state import Record, Store
from launch.tpu_vm.world import Completed, LocalFiles, World


class DryClock:
    """Clock whose time does not pass."""

    def now(self) -> float:
        """Return 0."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Return at once."""


class DryRun:
    """Run that executes nothing; a command equal to the last one is not printed again."""

    def __init__(self, say: Callable[[str], None], *, num_workers: int, service_account: str = "") -> None:
        self._say = say
        self._num_workers = num_workers
        member = f"serviceAccount:{service_account or 'NUMBER-compute@developer.gserviceaccount.com'}"
        self._policy = json.dumps({"bindings": [{"role": "roles/tpu.admin", "members": [member]}]})
        self._is_there = False
        self._last = ""

    def __call__(self, words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        """Print the command and return a successful answer."""
        line = shlex.join(words) + (" < (a secret on stdin)" if stdin else "")
        if line != self._last:
            self._say(f"$ {line}")
        self._last = line
        return self._answer(words)

    def _answer(self, words: list[str]) -> Completed:
        verb = " ".join(word for word in words[:6] if not word.startswith("-"))
        if "queued-resources create" in verb:
            self._is_there = True
        elif "queued-resources delete" in verb:
            self._is_there = False
        elif "projects describe" in verb:
            return Completed(0, "NUMBER\n")
        elif "get-iam-policy" in verb:
            return Completed(0, self._policy)
        elif "describe" in verb and not self._is_there:
            return Completed(1, err="NOT_FOUND")
        elif "queued-resources describe" in verb:
            return Completed(0, '{"state": {"state": "ACTIVE"}}')
        elif "tpu-vm describe" in verb:
            return Completed(0, '{"state": "READY"}')
        elif "tpu-vm ssh" in verb:
            return self._ssh(words)
        elif "config get-value" in verb:
            return Completed(0, "PROJECT\n")
        return Completed(0)

    def _ssh(self, words: list[str]) -> Completed:
        count = self._num_workers if "--worker=all" in words else 1
        command = next((word for word in words if word.startswith("--command=")), "")
        if re.search(r"worker\.sh look", command):
            state = "run=exited code=0 stop=no preempted=FALSE bytes=0 at=1"
            return Completed(0, "".join(f"tpuexp worker={worker} {state}\n" for worker in range(count)))
        if re.search(r"watchdog\.sh check", command):
            return Completed(0, "tpuexp-watchdog=granted\ntpuexp-code=0\n" * count)
        return Completed(0, "tpuexp-code=0\n" * count)


class MemoryStore(Store):
    """Store that reads existing records and writes nothing."""

    def save(self, record: Record) -> None:
        """Discard the record."""


class NoFiles(LocalFiles):
    """File access of --dry-run, which writes nothing."""

    def archive(self, file: Path) -> str:
        """Return a description without packing."""
        return "the files of this working tree"

    def make_dirs(self, folder: Path) -> None:
        """Create nothing."""

    def write(self, file: Path, text: str) -> None:
        """Write nothing."""

    def deploy_key(self, folder: Path) -> tuple[str, str]:
        """Return placeholders for both keys."""
        return "(the private key)\n", "ssh-ed25519 (made when it is no dry run)"

    def names(self, folder: Path) -> list[str]:
        """Return no names."""
        return []

    def unpack(self, file: Path, into: Path) -> list[str]:
        """Return no names."""
        return []


def dry_world(world: World, words: list[str]) -> World:
    """Return a world in which commands are printed and nothing is run, written or asked."""
    settings, _ = settings_of(words)
    count = load_slice(settings.hw).num_workers if settings.hw else 1
    pretended = DryRun(world.say, num_workers=count, service_account=settings.service_account)

    def say_plan(overrides: tuple[str, ...], *, run_name: str, spot: bool, results: Path) -> None:
        world.say(f"$ {shlex.join(['python', 'run.py', *plan_words(overrides, results=results)[2:]])}")

    return replace(
        world,
        run=pretended,
        clock=DryClock(),
        ask=lambda question: "y",
        plan=say_plan,
        files=NoFiles(),
        store=MemoryStore,
        new_id=lambda: "000000",
    )
