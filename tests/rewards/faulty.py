"""Rewards that go wrong in every way, for the tests; `row["does"]` says how."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
    """The number of letters of the completion, or what the row asks for."""
    match row.get("does"):
        case "raises":
            raise ValueError("no such\nanswer")
        case "hangs":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(1000)
        case "hangs_with_child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(row["file"]).write_text(str(child.pid))
            child.wait()
        case "exits":
            raise SystemExit(3)
        case "ends":
            os._exit(5)
        case "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "eats":
            return float(len(bytearray(2**31)))
        case "forks":
            if child_pid := os.fork():
                os.waitpid(child_pid, 0)
            return 1.0 if child_pid else 7.0
        case "raises_own":
            raise ValueError(completion)
        case "waits":
            time.sleep(row["seconds"])
        case "gives":
            return row["value"]
    return len(completion)


def numpy_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
    """Whether the completion has letters, as numpy says it."""
    return np.bool_(len(completion) > 0)


async def waiting(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The number of letters, as a function of asyncio."""
    await asyncio.sleep(0)
    return len(completion)


def batch(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """As TRL calls it."""
    assert kwargs["prompts"] == ["2 + 2 ="]
    return [float(len(text) + len(right)) for text, right in zip(completions, answer, strict=True)]


async def narrow_batch(completions: list[str], most: float = 0.0) -> Any:
    """As TRL calls it, of one parameter alone; a number in the place of a list where there is no `most`."""
    return np.array([most]) if most else 1.0


def messages(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """As TRL calls it with messages."""
    return [float(len(completion[0]["content"])) for completion in completions]


def of_two(prompt: str, completion: str) -> float:
    """Takes no row."""
    return 0.0


nothing: int = 4
