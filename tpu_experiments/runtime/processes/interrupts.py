"""Ctrl-C outside the training loop: one sentence and exit code 130, from the import of this module on.

The training loop handles it itself (training/stop.py), with a checkpoint first. Only run.py imports this module, before
the imports that take seconds.
"""

import os
import sys
from types import TracebackType

INTERRUPTED = "error: interrupted; the same command resumes from the last checkpoint, where there is one."
INTERRUPTED_EXIT_CODE = 130  # a shell's exit code for a program that Ctrl-C ended


def print_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one sentence and exit with 130 on an uncaught KeyboardInterrupt; print other errors as usual."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print(INTERRUPTED, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(INTERRUPTED_EXIT_CODE)


sys.excepthook = print_interrupted
