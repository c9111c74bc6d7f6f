"""SIGKILL a run on preferences in its reference pass, evaluations, steps and saves, and hold it against one left alone.

python -m tests.benchmarks.crash_preferring [--rounds 1] [--seed 0] [--folder DIR] [--pack]

With `--pack` it is a sweep of two points in one program.

Every round is one run that is killed nine times: by a drawn delay twice after each line of `BEFORE`, once while it
saves, and once after each line of `AFTER`. Its prepared rows and its stored reference are its own, so a kill in the
pass leaves it without one.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from tests.training.crashing import Run, require_equal

BEFORE = {"reference 8 x 128: compiled": 1.0, "evaluate 8 x 128: compiled": 1.0, "train 1 x 8 x 128: compiled": 0.3}
AFTER = {"checkpoint of step 4": 0.1, "checkpoint of step 6": 0.1}
"""Lines of the log, and the longest delay behind each in seconds: the reference pass, the evaluation before the first
step, the first steps; the evaluation of step 5; the last steps, the save and the evaluation behind them."""
WORDS = (
    *("objective=dpo", "data=ro_dpo_helpsteer", "curriculum=single", "trainer.seq_len=128"),
    *("lora.alpha=16", "optim.lr=1e-3", "data.ro_dpo_helpsteer.epochs=8"),
)
SWEEP = ("sweeping.pack=2", "objective.beta=0.1,0.5")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path)
    options.add_argument("--pack", action="store_true")
    given = options.parse_args()
    place = given.folder or Path(tempfile.mkdtemp(prefix="crash_preferring_"))
    rng, whole = random.Random(given.seed), run_in(place / "whole", is_pack=given.pack)
    whole.finish()
    for number in range(given.rounds):
        killed = run_in(place / f"killed_{number}", is_pack=given.pack)
        for line, longest in BEFORE.items():
            for _ in range(2):
                killed.kill_after_line(line, delay=rng.random() * longest)
                told(killed)
        killed.kill_in_save(1, delay=rng.random() * 0.01)
        told(killed)
        for line, longest in AFTER.items():
            killed.kill_after_line(line, delay=rng.random() * longest)
            told(killed)
        killed.finish()
        require_equal(killed, whole)
        assert references(killed) == references(whole)
        print(f"{len(killed.deaths)} kills: equal in every record, row and byte", flush=True)


def run_in(folder: Path, *, is_pack: bool = False) -> Run:
    return Run(folder, (*WORDS, f"prepare.folder={folder / 'prepared'}"), SWEEP if is_pack else ())


def told(run: Run) -> None:
    """Print the last death, and whether a reference was left."""
    last = vars(run.deaths[-1]) if run.deaths else {}
    print(json.dumps({"number": len(run.deaths), **last, "references": sorted(references(run))}), flush=True)


def references(run: Run) -> dict[str, bytes]:
    """The stored values, by the name of their file."""
    return {path.name: path.read_bytes() for path in (run.folder / "prepared" / "references").glob("*.npy")}


if __name__ == "__main__":
    main()
