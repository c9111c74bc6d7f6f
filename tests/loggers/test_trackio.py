"""trackio for real: its local records, and its own server in another process that goes away and comes back."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_hosts import free_port
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.tracked_run import run_id
from tpu_experiments.loggers.trackio import TrackioLogger

MakeContext = Callable[..., LoggerContext]
TOKEN = "written-by-a-test"
needed = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="the extra trackio is not installed")

PROGRAM = """
import pickle, sys, time
from dataclasses import replace
from pathlib import Path
from tpu_experiments.loggers.trackio import TrackioLogger
context, first, last, url, wait = sys.argv[1:]
context = replace(pickle.loads(Path(context).read_bytes()), resume_step=int(first) - 1)
logger = TrackioLogger(context, project="tests", server_url=url or None)
began = time.monotonic()
for step in range(int(first), int(last) + 1):
    logger.scalars(step, {"train/loss": 4.0 - step, "train/odd": float("nan")})
    if wait and step == int(first):
        time.sleep(2.0)
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.monotonic()
logger.text(int(last), tag="sample", text="Dunarea")
print("seconds", time.monotonic() - began)
logger.hparams({}, {"hparam/eval_loss": 1.25})
logger.finish()
"""
READ = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("tests", sys.argv[1]), default=str))
"""
SERVE = """
import sys, trackio
trackio.show(open_browser=False, block_thread=True, host="127.0.0.1", server_port=int(sys.argv[1]))
"""


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    return kept | {"TRACKIO_DIR": str(place), "TRACKIO_WRITE_TOKEN": TOKEN}


def pickled(context: LoggerContext, tmp_path: Path) -> str:
    import pickle

    (tmp_path / "context").write_bytes(pickle.dumps(context))
    return str(tmp_path / "context")


def logged(place: Path, run: str) -> list[dict[str, Any]]:
    read = subprocess.run(
        [sys.executable, "-c", READ, run], env=environment(place), capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(read.stdout.splitlines()[-1])
    return rows


def losses(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


@needed
@pytest.mark.slow
def test_its_local_records_and_a_resumed_run(make_context: MakeContext, tmp_path: Path) -> None:
    context, place = make_context(), tmp_path / "records"
    for first, last in (("1", "3"), ("3", "4")):  # the second is resumed at step 2, and repeats step 3
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, pickled(context, tmp_path), first, last, "", ""],
            env=environment(place),
            capture_output=True,
            text=True,
            check=True,
        )
        assert "Trackio" not in done.stdout
    rows = logged(place, run_id(context.run_folder, "trackio"))
    assert losses(rows) == [(1, 3.0), (2, 2.0), (3, 1.0), (3, 1.0), (4, 0.0)]
    assert {row["train/odd"] for row in rows if "train/odd" in row} == {None}
    assert [row["sample"]["_value"] for row in rows if "sample" in row] == ["Dunarea"] * 2
    assert [row["hparam/eval_loss"] for row in rows if "hparam/eval_loss" in row] == [1.25] * 2


@needed
@pytest.mark.slow
def test_its_server_goes_away_and_no_step_waits(make_context: MakeContext, tmp_path: Path) -> None:
    context, port = make_context(), free_port()
    url, on_server = f"http://127.0.0.1:{port}", tmp_path / "server"

    def serve() -> "subprocess.Popen[bytes]":
        with (tmp_path / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(port)], env=environment(on_server), stdout=log, stderr=log
            )
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return process
            except OSError:
                time.sleep(0.3)

    server = serve()
    command = [sys.executable, "-c", PROGRAM, pickled(context, tmp_path), "1", "4", url, "wait"]
    with subprocess.Popen(
        command, env=environment(tmp_path / "own"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdin is not None
        assert run.stdout.readline() == "ready\n"
        server.kill()
        server.wait()
        run.stdin.write("go on\n")
        run.stdin.flush()
        assert float(run.stdout.readline().split()[1]) < 1.0
        server = serve()
        assert run.wait(timeout=120) == 0
    server.kill()
    server.wait()
    name = run_id(context.run_folder, "trackio")
    found = losses(logged(on_server, name)) + losses(logged(tmp_path / "own", name))
    assert sorted(set(found)) == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0)], "on the server, or kept here"


def test_without_the_package_the_error_says_what_to_do(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"pip install trackio or leave it out of logger="):
        TrackioLogger(make_context(), project="tests")
