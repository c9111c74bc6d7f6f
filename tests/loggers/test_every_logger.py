"""Every logger in every way of running: alone, resumed, in a sweep over two keys, in a pack, in several processes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.runs import REPOSITORY, run
from tpu_experiments.loggers.wandb import ID

LOGGERS = sorted(file.stem for file in (REPOSITORY / "conf/logger").glob("*.yaml"))
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


def ended(*words: str, output_dir: Path) -> str:
    """What a run without a network says; no logger may fail in it."""
    home = {"HOME": str(output_dir / "home"), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = run(*words, output_dir=output_dir, env=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logger=" not in done.stderr.replace(" logger=[", ""), done.stderr
    return done.stderr


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


def require_measures(folder: Path, keys: Sequence[str]) -> None:
    """Require measures by the same names in each logger, wherever a record has them."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    written = b"".join(file.read_bytes() for file in folder.glob("wandb/*/run-*.wandb"))
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for key in keys:
        known = {record["step"]: record[key] for record in records if key in record}
        assert {event.step: event.value for event in events.Scalars(key)} == pytest.approx(known), key
        assert key.encode() in written
        assert all(str(value).encode() in written for value in known.values()), key


def require_whole(folder: Path, *, starts: int = 1, measure: str = "eval/bits_per_byte") -> str:
    """Require every step once in each logger's record; return the run's id at W&B."""
    assert LOGGERS == ["console", "jsonl", "tensorboard", "wandb"], "each has its line below"
    lines = [line for line in (folder / "run.log").read_text().splitlines() if " loss " in line and "tok/s" in line]
    assert [step for step in STEPS for line in lines if f"step {step}/3" in line][-1] == 3
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses: dict[int, Any] = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    assert [record["step"] for record in records if "train/loss" in record] == STEPS
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(losses)
    assert len(events.Scalars("train/loss")) == len(STEPS)
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(parts) == starts
    (name,) = {file.stem for part in parts for file in part.glob("run-*.wandb")}
    written = b"".join(file.read_bytes() for part in parts for file in part.glob("run-*.wandb"))
    assert all(str(loss).encode() in written for loss in losses.values())
    assert written.count(measure.encode()) > 1
    assert ID.fullmatch(name.removeprefix("run-"))
    return name


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
