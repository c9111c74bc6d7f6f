"""The edge: runs a command line, with a time limit, and never with a secret among its words."""

import os
import signal
import subprocess
from contextlib import suppress
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
        _end(process, signal.SIGKILL)
        out, err = process.communicate()
        return Completed(TIMED_OUT, out, f"{err}\ntimed out after {timeout:.0f} s")
    except BaseException:
        _end(process, signal.SIGTERM)
        raise
    return Completed(process.returncode, out, err)


def _end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """The command with its children; it may have ended by itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.wait()
