"""Rewards that go wrong in every way, for the tests; `row["does"]` says how."""

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
        case "waits":
            time.sleep(row["seconds"])
        case "gives":
            return row["value"]
    return len(completion)


def numpy_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
    """Whether the completion has letters, as numpy says it."""
    return np.bool_(len(completion) > 0)
