"""Seconds from SIGTERM to the complete copy on the machine's disk and to the exit, with a bucket that answers or not.

    python -m tests.benchmarks.notice

The bucket is the emulator; while it is away every request gets a 503, as from an overloaded Google Cloud Storage, or no
answer at all.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.outage import REPOSITORY, Bucket
from tpu_experiments.storage import paths

SETTINGS = (
    "model=tiny", "debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single",
    "trainer.max_stage_steps=null", "trainer.log_every_steps=10", "checkpoint.every_steps=20", "trainer.seq_len=64",
    "trainer.global_batch_rows=8", "curriculum.stages.main.steps=100000", "output_dir=gs://bkt/runs",
    "sample.max_new_tokens=0",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What the bucket does; seconds are counted from SIGTERM."""

    name: str
    away: float | None
    """When it goes; null never."""
    back: float | None = None
    silent: bool = False
    """No answer in place of a 503."""


CASES = (
    Case("there", None),
    Case("away_since_10_s", -10.0),
    Case("goes_with_the_request", 0.0),
    Case("silent", -10.0, silent=True),
    Case("back_after_10_s", -3.0, back=10.0),
)


def train(process: "subprocess.Popen[str]") -> list[str]:
    """Read the run's lines until it trains with checkpoints behind it."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        step = re.search(r"step +(\d+)/", line)
        if step and int(step[1]) >= 60:
            return lines
    raise AssertionError("".join(lines))


def measure(case: Case, bucket: Bucket, folder: Path) -> str:
    """One run, stopped; one line of figures."""
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
    command = [sys.executable, "run.py", *SETTINGS, f"name={case.name}"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = train(process)
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        if case.away is not None:
            bucket.silent, bucket.is_away = case.silent, True
            time.sleep(-case.away)
        before = set(folder.rglob("COMMIT.json"))
        asked, kept = time.monotonic(), None
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            if case.back is not None and time.monotonic() - asked >= case.back:
                bucket.is_away = False
            if kept is None and set(folder.rglob("COMMIT.json")) - before:
                kept = time.monotonic() - asked
            time.sleep(0.01)
        ended = time.monotonic() - asked
        reader.join()
    bucket.is_away = False
    checkpoints = f"gs://bkt/runs/{case.name}/checkpoints"
    complete = [name for name in paths.list_names(checkpoints) if paths.exists(f"{checkpoints}/{name}/COMMIT.json")]
    waiting = [path.parent.name for path in folder.rglob("COMMIT.json")]
    told = [line for line in lines if line.startswith(("error:", "stopped"))]
    return (
        f"{case.name}: exit code {process.returncode}, copy here after {kept:.1f} s, exit after {ended:.1f} s, "
        f"newest in the bucket {complete[-1]}, waiting here {waiting}\n  {'  '.join(told)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=[case.name for case in CASES])
    arguments = parser.parse_args()
    bucket = Bucket()
    os.environ |= {"STORAGE_EMULATOR_HOST": bucket.address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    for case in CASES:
        if case.name in arguments.cases:
            with tempfile.TemporaryDirectory() as folder:
                print(measure(case, bucket, Path(folder)), flush=True)
    bucket.server.stop()


if __name__ == "__main__":
    main()
