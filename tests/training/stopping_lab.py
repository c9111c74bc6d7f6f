"""A trainer whose programs and tokens leave a line each, and that sends itself SIGTERM at a chosen one.

`STRIKE=sample:3` sends it before the third token of a sample; `CALLS` is the file of the lines. With `STUCK`
that call never returns to Python, as a compiler may not for minutes.
"""

import ctypes
import os
import signal
from collections import Counter
from typing import Any

from tpu_experiments.training.trainer import Trainer


class Struck(Trainer):
    """Trainer of a run that is asked to stop inside an evaluation or before a token of a sample."""

    def build(self) -> None:
        """Build, and count the calls of the programs."""
        super().build()
        calls = Counter[str]()
        self.evaluator.program = _counted(self.evaluator.program, "evaluate", calls)
        for name, owner in (("sample", self.prompted.sampler), ("ask", self.prompted.asker)):
            owner.between = _counted(owner.between, name, calls)
        self.step_program = _counted(self.step_program, "train", calls)


def _counted(program: Any, name: str, calls: "Counter[str]") -> Any:
    def counted(*inputs: Any, **more: Any) -> Any:
        calls[name] += 1
        call = f"{name}:{calls[name]}"
        with open(os.environ["CALLS"], "a") as file:
            file.write(call + "\n")
        if call == os.environ.get("STRIKE"):
            os.kill(os.getpid(), signal.SIGTERM)
            if "STUCK" in os.environ:
                mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
                library.pthread_mutex_lock(mutex)
                library.pthread_mutex_lock(mutex)  # for ever, without the interpreter's lock
        return program(*inputs, **more)

    return counted
