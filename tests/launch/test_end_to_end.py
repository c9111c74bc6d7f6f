"""`python launch/tpu.py train` as a process, with a `gcloud` on the path whose ssh is a shell on this machine.

What stands here and nowhere else: that every remote command is a command, with its quotes, when a shell reads it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.tpu_vm.code_sync import ROOT

GCLOUD = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
here = pathlib.Path({folder!r})
words = sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
there = here / "resource"
home = here / "home"
flag = lambda name: next((w.split("=", 1)[1] for w in words if w.startswith(name + "=")), "")
def gone():
    print("NOT_FOUND: it was not found", file=sys.stderr)
    sys.exit(1)
if "create" in words:
    subprocess.run(["bash", flag("--metadata-from-file").split("=")[1]], check=True)
    there.write_text("0")
elif not there.exists():
    gone()
elif "delete" in words:
    there.unlink()
elif "queued-resources" in words:
    looks = int(there.read_text()) + 1
    there.write_text(str(looks))
    print(json.dumps({{"state": {{"state": ["PROVISIONING", "ACTIVE"][looks > 1]}}}}))
elif "describe" in words:
    print('{{"state": "READY"}}')
elif "ssh" in words:
    os.environ["HOME"] = str(home)
    os.chdir(home)
    sys.exit(subprocess.call(["bash", "-c", flag("--command")]))
elif "scp" in words:
    source, target = [w for w in words[4:] if not w.startswith("-")]
    if ":" in target:
        shutil.copy(source, home / target.split(":")[1])
    else:
        shutil.copy(home / source.split(":")[1], target)
"""
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
# The metadata host, and the API that is asked whether the VM may delete what does not exist.
CURL = """#!/bin/sh
for word; do address=$word; done
case $address in
    */default/email) printf vm@p ;;
    */default/token) printf '{{"access_token":"ya29.x","expires_in":3599}}' ;;
    */attributes/tpuexp-*) printf x ;;
    */queuedResources/x-none*)
        printf '{{\n "error": {{\n  "message": "it is denied."\n }}\n}}\n%s' "$(cat {folder}/http_code)" ;;
    *) exit 22 ;;
esac
"""
STARTUP = '[[ "$*" == "hw=v6e1 output_dir=outputs" ]] && echo "made ready" >~/ready\n'
PROMPT = "Ce 'este' \"Dunărea\" $HOME; ?"


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """A checkout of the launcher with a run of a few lines, and the fakes."""
    root = tmp_path / "code"
    ignored = shutil.ignore_patterns("__pycache__", "*.lock")
    shutil.copytree(ROOT / "launch", root / "launch", ignore=ignored)
    shutil.copytree(ROOT / "conf" / "hw", root / "conf" / "hw")
    (root / "run.py").write_text(RUN_PY)
    (root / "launch" / "startup.sh").write_text(STARTUP)
    (root / ".gitignore").write_text("outputs/\n__pycache__/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    pid, watchdog = tmp_path / "pid", tmp_path / "lib" / "watchdog.sh"
    (tmp_path / "http_code").write_text("404")
    stop = f"kill -TERM $(cat {pid}); while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.05; done"
    fakes = {
        "gcloud": GCLOUD.format(python=sys.executable, folder=str(tmp_path)),
        "sudo": '#!/bin/sh\nexec "$@"\n',
        "curl": CURL.format(folder=tmp_path),
        "systemd-run": f'#!/bin/sh\ncase "$*" in *watchdog*) exit ;; esac\n'
        f'while [ "$1" != bash ]; do shift; done; "$@" >/dev/null 2>&1 & echo $! >{pid}\n',
        "systemctl": f'#!/bin/sh\ncase "$*" in is-active*watchdog) test -e {watchdog} ;; '
        f"is-active*) kill -0 $(cat {pid}) 2>/dev/null ;; stop*) {stop} ;; esac\n",
    }
    for name, text in fakes.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return root


def started(root: Path, seed: int, *more: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WANDB_API_KEY")}
    env |= {"TPUEXP_HOME": str(root.parent / "lib")}
    env |= {"PATH": f"{root.parent / 'bin'}:{env['PATH']}", "TPUEXP_PYTHON": sys.executable, "HF_TOKEN": "it's $hush!"}
    words = ["hw=v6e1", "name=e2e", "plan=skip", "yes=true", "project=p", "zones=z-a", "poll_seconds=0.2"]
    overrides = [*more, "output_dir=outputs", f"sample.prompt={PROMPT}", f"seed={seed}"]
    command = [sys.executable, "launch/tpu.py", "train", *words, "--", *overrides]
    return subprocess.Popen(command, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


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
    assert "e2e: refused: vm@p may not delete the VM it runs on (it is denied); gcloud projects add-iam-policy" in said
    assert "nothing of e2e is left" in said
    assert not (laptop.parent / "resource").exists()
    assert not (laptop.parent / "home" / "ready").exists()
    assert "ya29" not in said + (laptop.parent / "calls").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
