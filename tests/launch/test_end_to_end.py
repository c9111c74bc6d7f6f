"""`python launch/tpu.py train` as a process, with a `gcloud` on the path whose ssh is a shell on this machine.

What stands here and nowhere else: that every remote command is a command, with its quotes, when a shell reads it.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.laptop import launched, make_laptop
from tests.tiers import only

RUN_PY = """
import os, pathlib, signal, sys, time
given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(given["output_dir"]) / given["name"]
if "-m" in sys.argv:
    folder = pathlib.Path(given["output_dir"]) / "sweeps" / given["name"]
    for value in given["lora.r"].split(","):
        (folder / f"lora.r={value}" / "checkpoints").mkdir(parents=True)
        (folder / f"lora.r={value}" / "result.json").write_text(value)
    for name in ("leaderboard.md", "sweep.json"):
        (folder / name).write_text("all of them")
    sys.exit()
folder.mkdir(parents=True, exist_ok=True)
print("step 1/2  token", len(os.environ["HF_TOKEN"]), "prompt", given["sample.prompt"], flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
if given["seed"] == "1":
    time.sleep(60)
(folder / "result.json").write_text('{"finished": true}')
"""
STARTUP = '[[ "$*" == "hw=v6e1 output_dir=outputs" ]] && echo "made ready" >~/ready\n'
PROMPT = "Ce 'este' \"Dunărea\" $HOME; ?"


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    return make_laptop(tmp_path, run_py=RUN_PY, startup=STARTUP)


def started(root: Path, seed: int, *more: str) -> "subprocess.Popen[str]":
    return launched(root, "hw=v6e1", run=[*more, "output_dir=outputs", f"sample.prompt={PROMPT}", f"seed={seed}"])


def test_train_from_the_command_line_to_the_results(laptop: Path) -> None:
    with started(laptop, seed=0) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"step 1/2  token 11 prompt {PROMPT}" in said
    assert json.loads((laptop / "outputs" / "e2e" / "result.json").read_text()) == {"finished": True}
    assert "step 1/2" in (laptop / "outputs" / "e2e" / "logs" / "worker-0.log").read_text()
    assert (laptop.parent / "home" / "ready").is_file()
    assert not (laptop.parent / "resource").exists()
    state = (laptop / "outputs" / "launch" / "e2e.json").read_text()
    assert "hush!" not in said + state + (laptop.parent / "calls").read_text()


def test_a_sweep_brings_every_point_and_its_leaderboard(laptop: Path) -> None:
    with started(laptop, 0, "-m", "lora.r=8,16") as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    sweep = laptop / "outputs" / "sweeps" / "e2e"
    assert {path.name for path in sweep.iterdir()} == {"leaderboard.md", "logs", "lora.r=16", "lora.r=8", "sweep.json"}
    assert [(sweep / f"lora.r={value}" / "result.json").read_text() for value in (8, 16)] == ["8", "16"]
    assert not (sweep / "lora.r=8" / "checkpoints").exists()
    assert "results in outputs/sweeps/e2e: leaderboard.md, lora.r=16, lora.r=8, sweep.json" in said


def test_a_vm_that_may_not_delete_itself_is_given_back(laptop: Path) -> None:
    (laptop.parent / "http_code").write_text("403")
    sleep = laptop.parent / "bin" / "sleep"
    sleep.write_text("#!/bin/sh\n")
    sleep.chmod(0o755)
    with started(laptop, seed=0) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "e2e: refused: vm@p may not delete the VM it runs on (it is denied); gcloud iam roles create" in said
    assert "nothing of e2e is left" in said
    assert not (laptop.parent / "resource").exists()
    assert not (laptop.parent / "home" / "ready").exists()
    assert "ya29" not in said + (laptop.parent / "calls").read_text()


@pytest.mark.parametrize("number", only(["15"], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_saves_fetches_and_deletes(laptop: Path, number: signal.Signals) -> None:
    with started(laptop, seed=1) as process:
        log = laptop.parent / "home" / ".tpu_experiments" / "log"
        for _ in range(600):
            if log.exists() and "step 1/2" in log.read_text():
                break
            time.sleep(0.1)
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert (laptop.parent / "home" / ".tpu_experiments" / "exit").read_text() == "75\n"
    assert "saved" in (laptop / "outputs" / "e2e" / "logs" / "worker-0.log").read_text()
    assert not (laptop.parent / "resource").exists()
