"""Run a command of the product as a pretended TPU.

    python -m tests.rehearsal [--keep FOLDER] [--programs] WORD...

WORDs are those of run.py, and `hw=` names the machine. FOLDER gets the programs that were sent; with --programs each is
compiled by the real libtpu afterwards.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.rehearsal.machine import NotHere, require_rehearsal
from tests.rehearsal.rehearse import hardware, rehearse


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--programs", action="store_true")
    options, words = parser.parse_known_args()
    try:
        require_rehearsal()
    except NotHere as error:
        print(f"error: this machine cannot rehearse: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        done = rehearse(words, folder=options.keep or Path(scratch), is_shown=True)
        for process, counts in sorted(done.counts.items()):
            print(f"process {process}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
        if options.programs:
            from tests.rehearsal.programs import compiled

            for sent in done.programs:
                memory = compiled(sent, hw=hardware(words)).memory
                print(f"{sent.program.name}: " + ", ".join(f"{name} {size:,}" for name, size in memory.items()))
    return done.code


if __name__ == "__main__":
    sys.exit(main())
