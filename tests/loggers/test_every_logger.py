"""Every logger in every way of running: alone, resumed, in a sweep over two keys, in a pack, in several processes.

`RECORDED` and `require_whole` are the contract; a new logger has its line there. A server that goes away is in the
files of the loggers that have one.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.runs import REPOSITORY, run
from tpu_experiments.loggers.tracked_run import ID

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Packages of loggers that are extras; one that is not installed is left out here."""
NAMES = sorted(file.stem for file in (REPOSITORY / "conf/logger").glob("*.yaml"))
LOGGERS = [name for name in NAMES if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None]
JOB = (
    *("debug=smoke", "data=sample_text", "curriculum=single", "hw.runtime=eager", "trainer.max_stage_steps=3"),
    *(
        "trainer.max_eval_rows=2",
        "trainer.global_batch_rows=2",
        "trainer.log_every_steps=1",
        "checkpoint.every_steps=2",
    ),
    *("sample.max_new_tokens=4", "trainer.norms_every_steps=0", f"logger=[{','.join(LOGGERS)}]", "name=toy"),
)
GRID = ("-m", *JOB, "lora.r=2,4", "optim.lr=1e-3,1e-4")
STEPS = [1, 2, 3]
TRACKIO = "trackio_records"
"""Folder below the test's own in which trackio keeps its records."""
READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("tpu_experiments", sys.argv[1]), default=str))
"""


def ended(*words: str, output_dir: Path) -> str:
    """What a run without a network says; no logger may fail in it."""
    home = {"HOME": str(output_dir / "home"), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = run(*words, output_dir=output_dir, env=home | {"TRACKIO_DIR": str(output_dir / TRACKIO)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logger=" not in done.stderr.replace(" logger=[", ""), done.stderr
    return done.stderr


# ---- what each logger has recorded ------------------------------------------------------------------------------

Points = list[tuple[int, float]]


def in_lines(folder: Path, key: str) -> Points:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record[key]) for record in records if key in record]


def in_events(folder: Path, key: str) -> Points:
    return [(each.step, each.value) for each in EventAccumulator(str(folder / "tensorboard")).Reload().Scalars(key)]


def on_the_console(folder: Path, key: str) -> Points:
    """Rounded; a line has the training loss alone."""
    lines = (folder / "run.log").read_text().splitlines()
    found = [re.search(r"step (\d+)/\d+  loss +(-?[\d.]+)", line) for line in lines]
    return [(int(match[1]), float(match[2])) for match in found if match]


def in_wandb(folder: Path, key: str) -> Points:
    """Its file has no reader in its package: values are looked up in the bytes."""
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    written = b"".join(file.read_bytes() for part in parts for file in part.glob("run-*.wandb"))
    found = []
    for step, value in in_lines(folder, key):
        shown = repr(value).removesuffix(".0").encode()  # as JSON; field 16 of an item, with its length
        if key.encode() + b"\x82\x01" + bytes([len(shown)]) + shown in written:
            found.append((step, value))
    return found


def in_mlflow(folder: Path, key: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent}/mlflow.db")
    number = (folder / "mlflow" / "id").read_text().strip()
    assert client.get_run(number).info.status == "FINISHED"
    return [(each.step, each.value) for each in client.get_metric_history(number, key.replace("+", "_"))]


def in_trackio(folder: Path, key: str) -> Points:
    name = (folder / "trackio" / "id").read_text().strip()
    place = next(each for each in folder.parents if (each / TRACKIO).is_dir()) / TRACKIO
    env = os.environ | {"TRACKIO_DIR": str(place)}
    read = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO, name], env=env, capture_output=True, text=True, check=True
    )
    rows = json.loads(read.stdout.splitlines()[-1])
    return [(row["step"], row[key]) for row in rows if key in row]


RECORDED: dict[str, Callable[[Path, str], Points]] = {
    "console": on_the_console,
    "jsonl": in_lines,
    "mlflow": in_mlflow,
    "tensorboard": in_events,
    "trackio": in_trackio,
    "wandb": in_wandb,
}
ONCE = ("jsonl", "mlflow", "tensorboard")
"""Loggers that have every step once, however often the run was killed; others repeat steps that a run repeats."""
IDS = ("mlflow", "trackio", "wandb")
"""Loggers with an id of each run at their service."""


def require_measures(folder: Path, keys: Sequence[str]) -> None:
    """Require measures by the same names in each logger, wherever a record has them."""
    for key in keys:
        known = in_lines(folder, key)
        assert known, key
        for name in LOGGERS:
            if name == "console":
                continue
            found = RECORDED[name](folder, key)
            by_step = dict(sorted(found))
            assert by_step == pytest.approx(dict(known)), (name, key)
            assert len(found) == len(known) or name not in ONCE, (name, key)


def require_whole(folder: Path, *, starts: int = 1, measure: str = "eval/bits_per_byte") -> str:
    """Require every step in each logger's record; return the run's ids at the services."""
    assert sorted(RECORDED) == NAMES, "each has its line"
    losses: dict[int, Any] = dict(in_lines(folder, "train/loss"))
    assert [step for step, _ in in_lines(folder, "train/loss")] == STEPS
    assert dict(on_the_console(folder, "train/loss")) == pytest.approx(losses, abs=1e-4)
    require_measures(folder, ["train/loss", measure])
    if "wandb" in LOGGERS:
        parts = sorted((folder / "wandb").glob("offline-run-*"))
        assert len(parts) == starts
        (name,) = {file.stem for part in parts for file in part.glob("run-*.wandb")}
        assert name == f"run-{(folder / 'wandb' / 'id').read_text().strip()}"
    ids = [(folder / name / "id").read_text().strip() for name in IDS if name in LOGGERS]
    assert all(map(ID.fullmatch, ids))
    return " ".join(ids)


def of_pairs(tmp_path: Path) -> tuple[str, ...]:
    """Words of the job on sixty pairs of answers, of which no questions are asked."""
    pairs = (REPOSITORY / "tpu_experiments/samples/stories/pairs.jsonl").read_text().splitlines()[:60]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    source = "data.stories_pairs_ro"
    unasked = (f"~{source}.questions.{name}" for name in ("one_person", "several_persons"))
    return ("objective=dpo", "data=stories_pairs_ro", f"{source}.path={tmp_path / 'pairs.jsonl'}", *unasked)


def of_pairs_named() -> list[str]:
    """What records have of a step and an evaluation on pairs."""
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "kl")
    return [key for name in names for key in (f"train/{name}", f"eval/{name}", f"eval/{name}_stories_pairs_ro")]


@pytest.mark.slow
def test_alone_and_resumed(tmp_path: Path) -> None:
    ended(*JOB, output_dir=tmp_path)
    folder = tmp_path / "toy"
    name = require_whole(folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_00000003")
    assert "resumed" in ended(*JOB, output_dir=tmp_path)
    assert require_whole(folder, starts=2) == name


@pytest.mark.parametrize(
    "more", [("sweeping.pack=4",), pytest.param((), marks=pytest.mark.slow)], ids=["pack", "sweep"]
)
def test_a_sweep_over_two_keys(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Every point is a run of its own at W&B, and the same points of another sweep are others."""
    ended(*GRID, *more, output_dir=tmp_path)
    points = sorted((tmp_path / "sweeps" / "toy").glob("lora.r=*"))
    assert len(points) == 4
    assert len({require_whole(point) for point in points}) == 4
    for point in points:
        loss = json.loads((point / "result.json").read_text())["eval_loss"]
        others = [other for other in points if other != point]
        content = b"".join(file.read_bytes() for other in others for file in other.glob("wandb/*/run-*.wandb"))
        assert repr(loss).encode() not in content, "no point's figures are in another's record"


@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    ended(*JOB, "hw.parallel=spawn", "hw.num_devices=2", output_dir=tmp_path)
    require_whole(tmp_path / "toy")


@pytest.mark.slow
def test_preferences_alone_resumed_and_in_a_pack(tmp_path: Path) -> None:
    """Rewards, margins and accuracies of training and of evaluations are in every logger under one name."""
    words, measure = (*JOB, *of_pairs(tmp_path)), "eval/rewards/margins"
    ended(*words, output_dir=tmp_path)
    folder = tmp_path / "toy"
    require_measures(folder, of_pairs_named())
    name = require_whole(folder, measure=measure)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_00000003")
    assert "resumed" in ended(*words, output_dir=tmp_path)
    assert require_whole(folder, starts=2, measure=measure) == name
    require_measures(folder, of_pairs_named())
    ended("-m", *words, "objective.beta=0.1,0.3", "sweeping.pack=2", output_dir=tmp_path)
    points = sorted((tmp_path / "sweeps" / "toy").glob("objective.beta=*"))
    assert len({require_whole(point, measure=measure) for point in points}) == 2
    for point in points:
        require_measures(point, of_pairs_named())


@pytest.mark.slow
def test_own_answers(tmp_path: Path) -> None:
    """Rewards by function, lengths, entropy, ratios and seconds of an iteration are in every logger under one name."""
    words = ("objective=grpo", "reward=length", "rollout.rewards.length.arguments.most=2", "data=sample_chat")
    rows = ("rollout.prompts=2", "rollout.samples=4", "trainer.global_batch_rows=8", "trainer.seq_len=128")
    ended(*JOB, *words, *rows, output_dir=tmp_path)
    train = ("reward", "reward_std", "rewards/length/mean", "rewards/length/std", "frac_reward_zero_std", "no_reward")
    train += ("completions/mean_length", "completions/clipped_ratio", "entropy", "ratio", "clip_ratio/low")
    keys = [*(f"train/{name}" for name in train), "eval/reward", "eval/rewards/length", "perf/sample_seconds"]
    require_measures(tmp_path / "toy", keys)
    require_whole(tmp_path / "toy", measure="eval/rewards/length")
