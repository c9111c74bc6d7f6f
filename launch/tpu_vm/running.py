"""Run external commands with a time limit; secrets go to stdin, never to the command line."""

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
