"""SIGKILL a run on its own answers at drawn instants, and hold it against one left alone.

python -m tests.benchmarks.crash_rl [--kills 50] [--seed 0] [--folder DIR]

Half of the kills come at an instant of the whole run, a quarter while it saves, and a quarter soon after a line of the
log that comes before the sampling of an iteration: in it, in its rewards, or between a rollout and its steps.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from tests.training.crashing import Run, require_equal

WORDS = (
    *("objective=grpo", "objective.beta=0.05", "model=qwen05b", "data=[sample_chat]", "trainer.max_stage_steps=8"),
    *("rollout.prompts=4", "rollout.samples=4", "rollout.updates=2", "rollout.max_new_tokens=8"),
    *("+rollout.rewards={short:{function:length,arguments:{most:3}}}", "optim.lr=1e-2", "trainer.seq_len=128"),
)
"""Four iterations of two updates; with a KL, so that the start of the run and the old model are scored too."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path)
    given = options.parse_args()
    place = given.folder or Path(tempfile.mkdtemp(prefix="crash_rl_"))
    rng, whole = random.Random(given.seed), Run(place / "whole", WORDS)
    wall, kills, number = whole.finish(), 0, 0
    print(f"whole run: {wall:.1f} s", flush=True)
    while kills < given.kills:
        number += 1
        killed = Run(place / f"killed_{number}", WORDS)
        for _ in range(10):
            kind = rng.random()
            if kind < 0.5:
                killed.kill_at(rng.random() * wall)
            elif kind < 0.75:
                killed.kill_in_save(rng.randint(1, 3), delay=rng.random() * 0.01)
            else:
                killed.kill_after_line("resumed at step" if killed.deaths else "stage main", delay=rng.random() * 3)
        killed.finish()
        require_equal(killed, whole)
        assert rollouts(killed) == rollouts(whole)
        kills += len(killed.deaths)
        done = [death.done for death in killed.deaths]
        print(json.dumps({"kills": kills, "steps": done, "resumes": killed.resumes}), flush=True)
    print(f"{kills} kills: equal in every record, row, rollout and byte", flush=True)


def rollouts(run: Run) -> dict[str, bytes]:
    """The stored rollouts and the start of a run, by the name of their file."""
    return {path.name: path.read_bytes() for path in (run.folder / "run" / "rollouts").iterdir()}


if __name__ == "__main__":
    main()
