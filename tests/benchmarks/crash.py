"""SIGKILL a two-stage run at random instants, inside saves too, and hold every finished run against one left alone.

python -m tests.benchmarks.crash [--kills 50] [--kills-a-run 5] [--seed 6] [--folder DIR] [OVERRIDE ...]
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.training.crashing import Run, crash, require_equal


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--kills-a-run", type=int, default=5)
    options.add_argument("--seed", type=int, default=6)
    options.add_argument("--folder", type=Path)
    options.add_argument("overrides", nargs="*")
    given = options.parse_args()
    place = given.folder or Path(tempfile.mkdtemp(prefix="crash_"))
    overrides = (*given.overrides, f"prepare.folder={place / 'prepared'}")
    started, rng = time.monotonic(), random.Random(given.seed)
    whole, runs = Run(place / "whole", overrides), []
    wall = whole.finish()
    while (left := given.kills - sum(len(run.deaths) for run in runs)) > 0:
        killed = Run(place / f"killed_{len(runs)}", overrides)
        crash(killed, rng, wall=wall, num_kills=min(left, given.kills_a_run))
        require_equal(killed, whole)
        runs.append(killed)
        print(json.dumps(figures(runs) | {"wall": wall, "seconds": time.monotonic() - started}), flush=True)
        shutil.rmtree(killed.folder)
    print("equal in every record, row and byte")


def figures(runs: list[Run]) -> dict[str, Any]:
    """Counts over all runs so far."""
    deaths = [death for run in runs for death in run.deaths]
    repeated = [steps for run in runs for _, steps in run.resumes]
    return {
        "runs": len(runs),
        "kills": len(deaths),
        "before_the_first_step": sum(death.done == 0 for death in deaths),
        "aimed_at_saves": sum(death.kind == "save" for death in deaths),
        "left_a_torn_checkpoint": sum(death.is_torn for death in deaths),
        "steps_repeated_mean": sum(repeated) / max(1, len(repeated)),
        "steps_repeated_max": max(repeated, default=0),
    }


if __name__ == "__main__":
    main()
