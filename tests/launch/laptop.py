"""A checkout on a laptop whose `gcloud` has its VMs here: each is a home, ssh a shell, a bucket a folder."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from launch.tpu_vm.code_sync import ROOT

GCLOUD = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
here = pathlib.Path({folder!r})
words = sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
there = here / "resource"
homes = sorted(here.glob("home*"))
bucket = lambda address: here / "bucket" / address.removeprefix("gs://")
flag = lambda name: next((w.split("=", 1)[1] for w in words if w.startswith(name + "=")), "")
def gone():
    print("NOT_FOUND: it was not found", file=sys.stderr)
    sys.exit(1)
def at(home):
    return subprocess.Popen(["bash", "-c", flag("--command")], cwd=home, env=os.environ | {{"HOME": str(home)}})
if words[:2] == ["projects", "describe"]:
    print(1)
elif words[:2] == ["projects", "get-iam-policy"]:
    member = "serviceAccount:1-compute@developer.gserviceaccount.com"
    print(json.dumps({{"bindings": [{{"role": "roles/tpu.admin", "members": [member]}}]}}))
elif "storage" in words:
    source = bucket(words[-2] if "cp" in words else words[-1])
    if not source.exists():
        print("The following URLs matched no objects or files", file=sys.stderr)
        sys.exit(1)
    if "cp" in words:
        shutil.copy(source, words[-1])
elif "create" in words:
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
    worker = flag("--worker")
    sys.exit(max([each.wait() for each in [at(home) for home in (homes if worker == "all" else [homes[int(worker)]])]]))
elif "scp" in words:
    source, target = [w for w in words[4:] if not w.startswith("-")]
    if ":" in target:
        for home in homes:
            shutil.copy(source, home / target.split(":")[1])
    else:
        shutil.copy(homes[0] / source.split(":")[1], target)
"""
# The metadata host, and the API that is asked whether the VM may delete what does not exist.
CURL = """#!/bin/sh
for word; do address=$word; done
case $address in
    */default/email) printf vm@p ;;
    */default/token) printf '{{"access_token":"ya29.x","expires_in":3599}}' ;;
    */attributes/tpuexp-*) printf x ;;
    */agent-worker-number) case $HOME in *home) printf 0 ;; *) printf %s "${{HOME##*home-}}" ;; esac ;;
    */queuedResources/x-none*)
        printf '{{\n "error": {{\n  "message": "it is denied."\n }}\n}}\n%s' "$(cat {folder}/http_code)" ;;
    *) exit 22 ;;
esac
"""


def make_laptop(folder: Path, *, run_py: str, startup: str, num_workers: int = 1) -> Path:
    """A checkout of the launcher with a run of a few lines, and the fakes."""
    root = folder / "code"
    ignored = shutil.ignore_patterns("__pycache__", "*.lock")
    shutil.copytree(ROOT / "launch", root / "launch", ignore=ignored)
    shutil.copytree(ROOT / "conf" / "hw", root / "conf" / "hw")
    for part in (
        "__init__.py",
        "config/__init__.py",
        "config/words.py",
        *(f"config/{name}.py" for name in ("commands", "folders", "errors", "escaping")),
    ):  # no other file of the package
        (root / "tpu_experiments" / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tpu_experiments" / part, root / "tpu_experiments" / part)
    (root / "run.py").write_text(run_py)
    (root / "launch" / "on_vm.py").write_text("print('cpu')")  # nothing to start before the run
    (root / "launch" / "startup.sh").write_text(startup)
    (root / ".gitignore").write_text("outputs/\n__pycache__/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name in ("bin", "bucket", "home", *(f"home-{number}" for number in range(1, num_workers))):
        (folder / name).mkdir()
    (folder / "http_code").write_text("404")
    watchdog = folder / "lib" / "watchdog.sh"
    alive = "kill -0 $(cat $HOME/pid) 2>/dev/null"
    stop = f"kill -TERM $(cat $HOME/pid); while {alive}; do sleep 0.05; done"
    fakes = {
        "gcloud": GCLOUD.format(python=sys.executable, folder=str(folder)),
        "sudo": '#!/bin/sh\nexec "$@"\n',
        "curl": CURL.format(folder=folder),
        "systemd-run": '#!/bin/sh\ncase "$*" in *watchdog*) exit ;; esac\n'
        'while [ "$1" != bash ]; do shift; done; "$@" >/dev/null 2>&1 & echo $! >$HOME/pid\n',
        "systemctl": f'#!/bin/sh\ncase "$*" in is-active*watchdog) test -e {watchdog} ;; '
        f"is-active*) {alive} ;; stop*) {stop} ;; esac\n",
    }
    for name, text in fakes.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return root


def launched(root: Path, *words: str, run: list[str]) -> "subprocess.Popen[str]":
    """`tpu.py train` as a process; run.py finds the bucket's folder in BUCKET."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WANDB_API_KEY")}
    env |= {"TPUEXP_HOME": str(root.parent / "lib"), "BUCKET": str(root.parent / "bucket")}
    env |= {"PATH": f"{root.parent / 'bin'}:{env['PATH']}", "TPUEXP_PYTHON": sys.executable, "HF_TOKEN": "it's $hush!"}
    common = ["name=e2e", "plan=skip", "yes=true", "project=p", "zones=z-a", "poll_seconds=0.2"]
    command = [sys.executable, "launch/tpu.py", "train", *words, *common, "--", *run]
    # A shell has what it starts in the background ignore Ctrl-C, nohup has it ignore SIGHUP, and what the tests start
    # inherits that.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    former = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        return subprocess.Popen(command, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
