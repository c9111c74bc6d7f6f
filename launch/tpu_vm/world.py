"""Reach all that is outside the launcher: commands with a time limit, the clock, local files and the user.

Secrets go to a command's stdin, never to its command line. --dry-run (dry_run.py) and the tests replace each part.
"""

import os
import shutil
import signal
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch.tpu_vm import code_sync, job
from launch.tpu_vm.errors import LaunchError, RemoteError
from launch.tpu_vm.job import Planner
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.state import Store, new_id

GCLOUD_ENV = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_CORE_SURVEY_ON": "0"}
TIMED_OUT = 124


@dataclass(frozen=True)
class Completed:
    """Exit code and output of a command."""

    code: int
    out: str = ""
    err: str = ""


class Run(Protocol):
    """Protocol that runs a command line; the only way to the network."""

    def __call__(self, words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        """Run `words`, with secrets on `stdin`; after `timeout` seconds the command is killed with code 124."""


def run(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
    """Run a command in a session of its own, so that Ctrl-C cannot interrupt a deletion half way.

    Raises:
        LaunchError: the program is not installed.
    """
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | GCLOUD_ENV,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise LaunchError(f"{words[0]} is not installed; see cloud.google.com/sdk/docs/install.") from None
    try:
        out, err = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process, signal.SIGKILL)
        out, err = process.communicate()
        return Completed(TIMED_OUT, out, f"{err}\ntimed out after {timeout:.0f} s")
    except BaseException:
        _end(process, signal.SIGTERM)
        raise
    return Completed(process.returncode, out, err)


def _end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the command's process group and wait; it may already have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.wait()


class Clock(Protocol):
    """Protocol of the clock."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""


class WallClock:
    """Clock of the operating system."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)


class LocalFiles:
    """Access to the file system."""

    def archive(self, file: Path) -> str:
        """Pack the working tree into one file; return a description with count and size."""
        return code_sync.archive(file)

    def check_archive(self) -> None:
        """Check that the working tree can be sent.

        Raises:
            LaunchError: it is no git checkout, or too large.
        """
        code_sync.working_tree()

    def make_dirs(self, folder: Path) -> None:
        """Create the folder and its parents."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, text: str) -> None:
        """Write a text file and create its folder."""
        self.make_dirs(file.parent)
        file.write_text(text, encoding="utf-8")

    def deploy_key(self, folder: Path) -> tuple[str, str]:
        """Return the private and the public key, created if missing."""
        file, public = code_sync.deploy_key(folder)
        return file.read_text(encoding="utf-8"), public

    def names(self, folder: Path) -> list[str]:
        """Return the sorted names in a folder."""
        return sorted(path.name for path in folder.iterdir())

    def unpack(self, file: Path, into: Path) -> list[str]:
        """Unpack the results from a tar file, delete it, and return their names.

        Raises:
            RemoteError: the file is damaged, or has entries outside `into` or of a special type.
        """
        self.make_dirs(into)
        try:
            names = _unpacked(file, into)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise RemoteError(f"the results came damaged: {error}") from error
        file.unlink()
        return names


def _unpacked(file: Path, into: Path) -> list[str]:
    """Write only regular files below `into`; tarfile's own filter is missing in Python 3.11.0 to 3.11.3."""
    root, names = into.resolve(), set()
    with tarfile.open(file) as tar:
        for member in tar:
            place = (root / member.name).resolve()
            if not place.is_relative_to(root) or not (member.isfile() or member.isdir()):
                raise tarfile.TarError(f"{member.name} is no file of a run")
            names.add(member.name.split("/")[0])
            content = tar.extractfile(member)
            if content is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as written:
                    shutil.copyfileobj(content, written)
    return sorted(names)


@dataclass
class World:
    """Everything external: network, clock, user and environment; replaced in the tests."""

    run: Run
    clock: Clock
    say: Callable[[str], None]
    ask: Callable[[str], str]
    environ: Mapping[str, str]
    plan: Planner = job.estimated
    files: LocalFiles = field(default_factory=LocalFiles)
    store: Callable[[Path, str], Store] = Store
    new_id: Callable[[], str] = new_id

    def confirm(self, question: str, settings: Settings) -> None:
        """Ask the user for confirmation, unless `yes=true`.

        Raises:
            LaunchError: the answer is not yes.
        """
        if settings.yes:
            return
        try:
            answer = self.ask(f"{question} [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise LaunchError("nothing was changed; answer y, or give yes=true.")
