"""Ctrl-C outside of the training loop: one sentence and exit code 130, from the import of this module on.

The training loop has its own way (training/stop.py): it saves first. Only run.py imports this, before all that takes
seconds to import.
"""

import os
import sys
from types import TracebackType

INTERRUPTED = "error: interrupted; the same command goes on from the last checkpoint, where there is one."
INTERRUPTED_EXIT_CODE = 130  # what a shell reports of a program that Ctrl-C ended


def say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Answer an interrupt that nobody caught; other errors keep their traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print(INTERRUPTED, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(INTERRUPTED_EXIT_CODE)


sys.excepthook = say_interrupted
