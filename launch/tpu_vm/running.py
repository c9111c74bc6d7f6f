"""The edge: runs a command line, with a time limit, and never with a secret among its words."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from launch.tpu_vm.errors import LaunchError

GCLOUD_ENV = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_CORE_SURVEY_ON": "0"}
TIMED_OUT = 124


@dataclass(frozen=True)
class Completed:
    """What a command said."""

    code: int
    out: str = ""
    err: str = ""


class Run(Protocol):
    """Runs a command line; the only way to the network."""

    def __call__(self, words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        """`stdin` is where secrets go; after `timeout` seconds the command is ended with code 124."""


def run(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
    """For real, in a session of its own: Ctrl-C is for the launcher, which must not lose a deletion half way."""
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
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return Completed(TIMED_OUT, out, f"{err}\ntimed out after {timeout:.0f} s")
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    return Completed(process.returncode, out, err)


def printing(say: Callable[[str], None]) -> Run:
    """For --dry-run: says each command and does nothing."""

    def run_nothing(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        given = f"   # {stdin.count(chr(10))} line(s) on stdin" if stdin else ""
        say(shlex.join(words) + given)
        return Completed(0)

    return run_nothing
