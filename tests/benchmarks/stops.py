"""SIGTERM at drawn instants of a run with long evaluations and samples: where it came, what was lost, when it ended.

    python -m tests.benchmarks.stops 30 [--within 40 --set hw.runtime=xla trainer.eval_every_steps=8]

Every run is stopped up to six times, then goes to its end, and is compared with one left alone: records, rows, bytes.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.training.crashing import Run, require_equal
from tests.training.test_stop_inside import STRUCK

LONG = (*STRUCK, "trainer.eval_every_steps=3", "trainer.max_eval_rows=256", "sample.max_new_tokens=48")
STOPS_OF_A_RUN = 6


def stop_at(run: Run, seconds: float, calls: Path) -> tuple[str, float, int] | None:
    """One life, asked to stop after that many seconds from its first program: where, seconds to its end, steps done.

    None when it was done before.
    """
    calls.unlink(missing_ok=True)
    process = run.start()
    while process.poll() is None and not calls.exists():
        time.sleep(0.01)
    time.sleep(seconds)
    if process.poll() is not None:
        return None
    last = calls.read_text().split()[-1].partition(":")[0]
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=600)
    ended = time.monotonic() - asked
    if (run.folder / "run" / "result.json").exists():  # it came when all was done
        return None
    assert code == 75, (run.folder / "output").read_text()[-4000:]
    return last, ended, max((event["step"] for event in run.lives[-1] if event["event"] == "rows"), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num", nargs="?", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=6.0, help="seconds from the first program to the latest stop")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every run, over `LONG`")
    arguments = parser.parse_args()
    rng, places, seconds, num_runs = random.Random(arguments.seed), Counter[str](), [], 0
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls"
        os.environ["CALLS"] = str(calls)
        common = (*LONG, *arguments.set, f"prepare.folder={folder}/prepared")
        whole = Run(Path(folder) / "whole", common)
        whole.finish()
        while seconds[arguments.num - 1 :] == []:
            run = Run(Path(folder) / f"run_{num_runs}", common)
            num_runs += 1
            for _ in range(min(STOPS_OF_A_RUN, arguments.num - len(seconds))):
                found = stop_at(run, rng.random() * arguments.within, calls)
                if found is None:
                    break
                place, ended, done = found
                places[place] += 1
                seconds.append(ended)
                print(f"{len(seconds)}: in {place}, after step {done}, exit after {ended:.2f} s", flush=True)
            if not (run.folder / "run" / "result.json").exists():
                run.finish()
            run.note_resumes()
            require_equal(run, whole)
            assert all(repeated == 0 for _, repeated in run.resumes), run.resumes
            print(f"run {num_runs}: equal; went on from steps {[step for step, _ in run.resumes]}", flush=True)
    print(f"{len(seconds)} stops of {num_runs} runs: {dict(places)}; exit after {max(seconds):.1f} s at most")


if __name__ == "__main__":
    main()
