"""SIGKILL a run on its own answers at drawn instants, and hold it against one left alone.

python -m tests.benchmarks.crash_rl [--kills 50] [--seed 0] [--folder DIR] [WORD ...]

Half of the kills come at an instant of the whole run, a quarter while it saves, and a quarter soon after a line of the
log that comes before the sampling of an iteration: in it, in its rewards, or between a rollout and its steps. A run
that is to be killed writes its stack before, which says what it was doing. Words, as hw.runtime=eager, go to all runs.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.training.crashing import Death, Run, require_equal

WORDS = (
    *("objective=grpo", "objective.beta=0.05", "model=qwen05b", "data=[sample_chat]", "trainer.max_stage_steps=8"),
    *("rollout.prompts=4", "rollout.samples=4", "rollout.updates=2", "rollout.max_new_tokens=8"),
    "+rollout.rewards={short:{function:length,arguments:{most:3}},slow:{function:tests.rewards.drawn.slow}}",
    *("optim.lr=1e-2", "trainer.seq_len=128"),
)
"""Four iterations of two updates; with a KL, so that the start of the run and the old model are scored too."""
PLACES = {
    "save": ("trainer.save", "saver."),
    "reward": ("pool.score", "rl.rewarded"),
    "sampling": ("rl.sampled",),
    "evaluation": ("rl.evaluate", "rl.evaluate_stage", "rl.show_answers"),
    "between": ("rl.rollout", "rl.rows_of"),
    "update": ("rl.train_stage",),
}
"""What a run was doing, by functions of its stack; the first that fits. Anything else is its start or its end."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path)
    options.add_argument("words", nargs="*", metavar="WORD")
    given = options.parse_args()
    words = (*WORDS, *given.words)
    place = given.folder or Path(tempfile.mkdtemp(prefix="crash_rl_"))
    rng, whole = random.Random(given.seed), Run(place / "whole", words)
    wall, kills, number = whole.finish(), 0, 0
    hit: Counter[str] = Counter()
    print(f"whole run: {wall:.1f} s", flush=True)
    while kills < given.kills:
        number += 1
        killed = Run(place / f"killed_{number}", words, notes_stack=True)
        for _ in range(10):
            kind, begun = rng.random(), time.monotonic()
            if kind < 0.5:
                was_killed = killed.kill_at(rng.random() * wall)
            elif kind < 0.75:
                was_killed = killed.kill_in_save(rng.randint(1, 3), delay=rng.random() * 0.01)
            else:
                line = "resumed at step" if killed.deaths else "stage main"
                was_killed = killed.kill_after_line(line, delay=rng.random() * 3)
            if not was_killed:
                wall = min(wall, time.monotonic() - begun)  # other work on the machine comes and goes
                break
            print(json.dumps([(death.done, place_of(death)) for death in killed.deaths]), flush=True)
        killed.finish()
        require_equal(killed, whole)
        assert rollouts(killed) == rollouts(whole)
        kills += len(killed.deaths)
        done = [(death.done, place_of(death)) for death in killed.deaths]
        hit.update(place for _, place in done)
        print(json.dumps({"kills": kills, "steps": done, "resumes": killed.resumes, "hit": hit}), flush=True)
    print(f"{kills} kills: equal in every record, row, rollout and byte", flush=True)


def place_of(death: Death) -> str:
    """Return what a run was doing when it was killed."""
    if death.kind == "save":  # another's torn checkpoint may be that of a life before
        return "save"
    found = (place for place, names in PLACES.items() if any(own.startswith(names) for own in death.stack))
    return next(found, "start or end")


def rollouts(run: Run) -> dict[str, bytes]:
    """The stored rollouts and the start of a run, by the name of their file."""
    return {path.name: path.read_bytes() for path in (run.folder / "run" / "rollouts").iterdir()}


if __name__ == "__main__":
    main()
