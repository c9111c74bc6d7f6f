"""A `sky` for the PATH that runs managed jobs as processes of this machine and writes down what it was given.

`install(folder)` puts it there. Its state is a folder: `calls.jsonl` has the words of every call; `jobs/ID.json` the
name and status of a job, `jobs/ID.yaml` its file. A job is what stands behind `--` in its `run`, on the CPU here.
`broken` in the folder makes every call fail, as without a network; `refused` fails the launches.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(os.environ.get("FAKE_SKY", "/nowhere"))
ON_THIS_MACHINE = ("hw=cpu", "hw.runtime=eager")


def install(folder: Path) -> dict[str, str]:
    """Write the executable into a folder; return the variables of a process that finds it."""
    (folder / "jobs").mkdir(parents=True)
    sky = folder / "bin" / "sky"
    sky.parent.mkdir()
    sky.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    sky.chmod(0o755)
    return {"PATH": f"{sky.parent}:{os.environ['PATH']}", "FAKE_SKY": str(folder)}


def calls(folder: Path) -> list[list[str]]:
    """The words of every call so far."""
    file = folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def jobs(folder: Path) -> list[dict[str, Any]]:
    """All jobs, the oldest first."""
    files = sorted((folder / "jobs").glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_text()) for file in files]


def job_with(number: int) -> dict[str, Any]:
    """The job of that id."""
    (job,) = [each for each in jobs(FOLDER) if each["job_id"] == number]
    return job


def keep(job: dict[str, Any]) -> None:
    """Write a job down, whole at any moment."""
    file = FOLDER / "jobs" / f"{job['job_id']}.json"
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(job))
    temporary.replace(file)


def launch(words: list[str]) -> int:
    """Start a process that runs the job to its end, whatever becomes of the caller."""
    if (FOLDER / "refused").exists():
        print("sky.exceptions.NoCloudAccessError: Cloud access is not set up.", file=sys.stderr)
        return 1
    task = yaml.safe_load(Path(words[-1]).read_text())
    number = 1
    while True:  # another launch may take a number at the same moment
        try:
            with (FOLDER / "jobs" / f"{number}.yaml").open("x") as file:
                file.write(yaml.safe_dump(task))
            break
        except FileExistsError:
            number += 1
    keep({"job_id": number, "job_name": task["name"], "status": "PENDING"})
    subprocess.Popen([sys.executable, __file__, "controller", str(number)], start_new_session=True)
    print(f"Managed Job ID: {number}")
    return 0


def control(number: int) -> int:
    """Run a job: its command behind `--`, here, again after exit code 75."""
    job = job_with(number)
    task = yaml.safe_load((FOLDER / "jobs" / f"{number}.yaml").read_text())
    words = shlex.split(task["run"])
    words = words[words.index("--") + 1 :]
    here = [word for word in words[1:] if not word.startswith("hw=")]
    words = [sys.executable, *here, *ON_THIS_MACHINE]
    with (FOLDER / "jobs" / f"{number}.log").open("ab") as log:
        while True:
            child = subprocess.Popen(words, cwd=task["workdir"], stdout=log, stderr=log)
            keep(job | {"status": "RUNNING", "pid": child.pid, "controller": os.getpid()})
            code = child.wait()
            is_cancelled = job_with(number)["status"] == "CANCELLING"
            if is_cancelled or code not in task["resources"]["job_recovery"]["recover_on_exit_codes"]:
                break
    status = "CANCELLED" if is_cancelled else "SUCCEEDED" if code == 0 else "FAILED"
    keep(job | {"status": status, "code": code})
    return 0


def cancel(name: str) -> int:
    """Send SIGTERM to the newest job of that name."""
    job = [each for each in jobs(FOLDER) if each["job_name"] == name][-1]
    if job["status"] == "RUNNING":
        keep(job | {"status": "CANCELLING"})
        os.kill(job["pid"], signal.SIGTERM)
    return 0


def main(words: list[str]) -> int:
    """Do what `sky WORDS` does; words that it does not know are refused, as by the real one."""
    if words[0] == "controller":
        return control(int(words[1]))
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if (FOLDER / "broken").exists():
        print("requests.exceptions.ConnectionError: no route to host", file=sys.stderr)
        return 1
    if words[:4] == ["jobs", "launch", "--yes", "--detach-run"]:
        return launch(words)
    if words == ["jobs", "queue", "--all", "--output", "json"]:
        print("Failed to connect to SkyPilot API server at http://127.0.0.1:46580. Starting a local server.")
        if not jobs(FOLDER):  # as skypilot 0.14.1 says it without a controller
            print("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.", file=sys.stderr)
            return 1
        print(json.dumps(jobs(FOLDER), indent=2))
        return 0
    if words[:3] == ["jobs", "cancel", "--yes"] and words[-2] == "--name":
        return cancel(words[-1])
    print(f"No such command: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
