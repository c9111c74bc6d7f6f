"""`python launch/tpu.py train hw=v6e16` as a process: four homes for four VMs, launch/worker.sh on each at once.

What a run of four hosts does is played by a run.py of a few lines: they meet, and when one is gone the others end.
"""

import time
from pathlib import Path

import pytest

from tests.launch.laptop import launched, make_laptop

RUN_PY = """
import os, pathlib, signal, sys, time
given = dict(word.split("=", 1) for word in sys.argv[1:])
bucket = pathlib.Path(os.environ["BUCKET"])
home = os.environ["HOME"].rsplit("/", 1)[1]
life = pathlib.Path(os.environ["HOME"]) / "lives"
life.write_text(life.read_text() + "x" if life.exists() else "x")
place = bucket / f"life-{len(life.read_text())}"
place.mkdir(exist_ok=True)
(place / home).write_text("")
def stopped(number, frame):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stopped)
while len(list(place.glob("home*"))) < 4:
    time.sleep(0.02)
print("all have met", flush=True)
first = (bucket / "plan").read_text().split(",")[len(life.read_text()) - 1]
if first == "wait":
    time.sleep(60)
if first and home == first.split(":")[0]:
    (place / "broken").write_text("")
    print("the cause", flush=True)
    if first.endswith(":restart"):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(first.split(":")[1]))
while first and not (place / "broken").exists():
    time.sleep(0.02)
if first:
    time.sleep(0.3)
    print("another host is gone", flush=True)
    sys.exit(1)
if home == "home":
    folder = bucket / given["output_dir"].removeprefix("gs://") / given["name"]
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{}")
"""
STARTUP = "touch ~/ready\n"


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    return make_laptop(tmp_path, run_py=RUN_PY, startup=STARTUP, num_workers=4)


def outcome(root: Path, plan: str, *, stop: bool = False) -> tuple[int, str]:
    """Exit code and output; `plan` has for each life of the run who ends first and with which code, or `restart`s."""
    (root.parent / "bucket" / "plan").write_text(plan)
    with launched(root, "hw=v6e16", run=["output_dir=gs://bkt/runs"]) as process:
        logs = [home / ".tpu_experiments" / "log" for home in root.parent.glob("home*")]
        while stop and not all(log.exists() and "met" in log.read_text() for log in logs):
            assert process.poll() is None
            time.sleep(0.05)
        if stop:
            process.terminate()
        said, _ = process.communicate(timeout=120)
    assert not (root.parent / "resource").exists()
    assert all((home / "ready").exists() for home in root.parent.glob("home*"))
    return process.returncode, said


def log_of(root: Path, worker: int) -> str:
    return (root / "outputs" / "e2e" / "logs" / f"worker-{worker}.log").read_text()


def test_one_that_fails_ends_the_run_and_is_named(laptop: Path) -> None:
    code, said = outcome(laptop, "home-2:137")
    assert code == 1, said
    assert "the run ended with exit code 137" in said
    assert "worker 2 of 4 ended first, with 137 (logs/worker-2.log)" in said
    assert "the cause" in log_of(laptop, 2)
    assert all("another host is gone" in log_of(laptop, worker) for worker in (0, 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("end", "words"), [("75", "ended first, with 75"), ("restart", "was restarted")])
def test_one_that_was_stopped_or_restarted_has_the_run_go_on_on_all(laptop: Path, end: str, words: str) -> None:
    code, said = outcome(laptop, f"home-1:{end},")
    assert code == 0, said
    assert len(list((laptop.parent / "bucket" / "life-2").glob("home*"))) == 4
    assert (laptop / "outputs" / "e2e" / "result.json").is_file()
    assert f"worker 1 of 4 {words}" in said


def test_a_request_to_stop_reaches_all_of_them(laptop: Path) -> None:
    code, said = outcome(laptop, "wait", stop=True)
    assert code == 75, said
    assert all(log_of(laptop, worker).endswith("saved\n") for worker in range(4))
