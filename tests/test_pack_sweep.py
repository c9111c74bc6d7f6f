"""Points that train in one program on the real command line: each leaves what it leaves alone."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.tiers import only
from tests.training.runs import REPOSITORY, SAME_SUMS, run

JOB = (
    "debug=smoke", "data=sample_text", "curriculum=single", "logger=jsonl", "lora.dropout=0.1",
    "sample.max_new_tokens=0", "trainer.max_eval_rows=8", "data.sample_text.test_fraction=0.001",
)  # fmt: skip
POINTS = ("-m", *JOB, "name=tried", "sweeping.pack=4", "lora.r=4,8", "optim.lr=3e-4")
FILES = ("adapter/adapter_model.safetensors", "result.json", "metrics.jsonl", "run.log", "README.md", "config.yaml")


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, str, float]]:
    """Every loss with its step."""
    keys = ("train/loss", "eval/loss", "train/grad_norm")
    return [(record["step"], key, record[key]) for record in records(folder) for key in keys if key in record]


def measures(folder: Path) -> list[tuple[int, str, float]]:
    """Every measure of preferences that training steps report, with its step."""
    found = [(record["step"], key.removeprefix("train/"), record[key]) for record in records(folder) for key in record]
    return [each for each in found if each[1].startswith(("rewards/", "logps/"))]


@pytest.mark.xla
@pytest.mark.parametrize(
    "more",
    only(
        ["()"],
        [
            (),
            ("model=mistral7b", "model.size=tiny", "model.stack=unrolled"),
            ("model=gemma3_270m", "model.size=tiny", "model.stack=scanned", "model.remat=layer_inputs"),
            ("hw.parallel=spmd", "hw.num_devices=4", "model=qwen05b", "model.size=tiny", "sharding=fsdp"),
            ("optim.ema=0.9", "optim=adafactor", "trainer.trace_every_steps=1"),
            ("model.base=int8",),
            ("optim=muon", "optim.ns_dtype=float32"),
            ("optim=schedule_free_adamw",),
        ],
    ),
)
def test_each_point_leaves_what_it_leaves_alone(tmp_path: Path, more: tuple[str, ...]) -> None:
    """One process, the programs of one run, and the losses of a run alone."""
    ended = run(*POINTS, *more, output_dir=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sweeping.pack: in one program each: 1 pack of 2 points" in ended.stdout
    finding = "data.sample_text.test_fraction=0.001; the test split has 0 rows"
    assert ended.stderr.count(finding) == 1, "what the points have in common is logged once"
    assert ended.stdout.count(finding) == 2, "the closing lines of the first point, and the sweep's"
    sweep = tmp_path / "sweeps" / "tried"
    alone = run(*JOB, *more, "lora.r=8", "optim.lr=3e-4", "name=alone", output_dir=tmp_path)
    assert alone.returncode == 0, alone.stderr
    own, together = tmp_path / "alone", sweep / "lora.r=8"
    for (step, key, mine), (_, _, theirs) in zip(losses(own), losses(together), strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5), (step, key)
    assert len(losses(own)) > 6
    results = {}
    for point in sweep.glob("lora.r=*"):
        assert all((point / name).exists() for name in FILES)
        results[point.name] = json.loads((point / "result.json").read_text())
    assert len(results) == 2
    first = json.loads((own / "result.json").read_text())
    assert {r["num_compiles"] for r in results.values()} == {first["num_compiles"]}
    assert {r["compiles_after_warmup"] for r in results.values()} == {0}
    assert results[together.name]["num_trainable"] == first["num_trainable"]
    assert len({r["eval_loss"] for r in results.values()}) == 2
    accounts = [r["goodput"]["run"] for r in results.values()]
    assert sum(a["wall_seconds"] for a in accounts) == pytest.approx(
        max(a["process_seconds"] for a in accounts), rel=0.3
    )
    rows = json.loads((sweep / "sweep.json").read_text())["points"]
    assert [row["seconds"] for row in rows] == [results[row["name"]]["goodput"]["run"]["wall_seconds"] for row in rows]
    log = (together / "run.log").read_text()
    assert log.count(finding) == 1
    assert log.count("evaluate 8 x 64: compiling") == 1, "the others' lines are in their own files"
    assert "resumed" not in log


PAIRS = (
    "debug=smoke", "objective=dpo", "logger=jsonl", "lora.dropout=0.1", "lora.init=a_zero", "sample.max_new_tokens=0",
    "trainer.max_eval_rows=8", "lora.r=4", "schedule=constant", "data=stories_pairs_ro",
    *(f"~data.stories_pairs_ro.questions.{name}" for name in ("one_person", "several_persons")),
)  # fmt: skip
BETAS = ("-m", *PAIRS, "name=pairs", "sweeping.pack=4", "optim.lr=1e-4,2e-3", "objective.beta=0.1,0.5")


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("objective=simpo", "objective.sft_weight=0.5")], ids=str)
def test_points_of_preferences_with_losses_of_their_own_end_as_alone(tmp_path: Path, more: tuple[str, ...]) -> None:
    """One program for all values of beta, and one reference for all that begin as the same model."""
    ended = run(*BETAS, *more, output_dir=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sweeping.pack: in one program each: 1 pack of 4 points" in ended.stdout
    sweep, found = tmp_path / "sweeps" / "pairs", {}
    for lr, beta in (("0.0001", "0.1"), ("0.002", "0.5")):
        name = f"alone{beta}"
        alone = run(*PAIRS, *more, f"optim.lr={lr}", f"objective.beta={beta}", f"name={name}", output_dir=tmp_path)
        assert alone.returncode == 0, alone.stderr
        (point,) = sweep.glob(f"*lr={lr},*beta={beta}")
        mine, theirs = losses(tmp_path / name), losses(point)
        assert len(mine) > 6
        assert [loss for _, _, loss in theirs] == pytest.approx([loss for _, _, loss in mine], rel=1e-5, abs=1e-5)
        mine, theirs = measures(tmp_path / name), measures(point)
        assert [key for _, key, _ in theirs] == [key for _, key, _ in mine]
        assert {"rewards/margins", "rewards/accuracies", "logps/chosen"} <= {key for _, key, _ in mine}
        assert [value for _, _, value in theirs] == pytest.approx([value for _, _, value in mine], rel=1e-4, abs=1e-4)
        results = [json.loads((folder / "result.json").read_text()) for folder in (tmp_path / name, point)]
        assert results[0]["num_compiles"] == results[1]["num_compiles"]
        assert results[1]["compiles_after_warmup"] == 0
        found[lr, beta] = results[1]["eval_loss"]
    assert abs(found["0.0001", "0.1"] - found["0.002", "0.5"]) > 1e-3
    assert len([*(sweep / "prepared").glob("references/*")]) == (0 if more else 2)


EXHAUSTED = """
from tpu_experiments.training.trainer import Trainer
class Exhausted(Trainer):
    def row_loss(self, *given, **named):
        raise RuntimeError(
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.73G of 15.75G hbm."
        )
"""


def test_points_whose_program_does_not_fit_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "exhausted.py").write_text(EXHAUSTED)
    own = ("plugins=[exhausted]", "trainer._target_=exhausted.Exhausted")
    ended = run(*POINTS, *own, output_dir=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1
    assert ended.stderr.count("the memory of the device is used up (used 20.73G of 15.75G hbm); try") == 2
    assert "Traceback" not in ended.stderr
    rows = json.loads((tmp_path / "sweeps" / "tried" / "sweep.json").read_text())["points"]
    assert [row["exit_code"] for row in rows] == [2, 2]


LONG = ("curriculum.stages.main.steps=4000", "trainer.max_stage_steps=4000", "trainer.log_every_steps=1")


def started(folder: Path, *more: str) -> forks.Process:
    """The pack of two points with many steps."""
    words = ("-m", "model=tiny", *JOB, *LONG, "name=tried", "sweeping.pack=4", "lora.r=4,8", *more)
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    command = [str(REPOSITORY / "run.py"), *words, f"output_dir={folder}"]
    return forks.start(command, cwd=folder, env=kept | SAME_SUMS, stdout=subprocess.DEVNULL)


def wait_for(process: forks.Process, point: Path, *, step: int) -> None:
    """Wait until a point has trained a step."""
    deadline = time.monotonic() + 300
    while not (point / "metrics.jsonl").exists() or max((r["step"] for r in records_so_far(point)), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached within 300 s"
        time.sleep(0.2)


def records_so_far(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_pack_that_is_killed_goes_on_bit_for_bit(tmp_path: Path, how: signal.Signals) -> None:
    """With SIGKILL the points go on from checkpoints of their own, also of different steps."""
    more = ("checkpoint.every_steps=4", "curriculum.stages.main.steps=24", "trainer.max_stage_steps=24")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    with started(whole, *more) as process:
        assert process.wait(timeout=400) == 0
    with started(cut, *more) as process:
        wait_for(process, cut / "sweeps" / "tried" / "lora.r=8", step=9)
        process.send_signal(how)
        code = process.wait(timeout=100)
        assert code == (75 if how == signal.SIGTERM else -9)
    with started(cut, *more) as process:
        assert process.wait(timeout=400) == 0
    for name in ("lora.r=4", "lora.r=8"):
        ours, theirs = (folder / "sweeps" / "tried" / name for folder in (cut, whole))
        assert losses(ours) == losses(theirs)
        file = "adapter/adapter_model.safetensors"
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()
        assert "resumed at step" in (ours / "run.log").read_text()
    with started(cut, *more) as process:
        assert process.wait(timeout=100) == 0, "both are finished"


@pytest.mark.slow
def test_a_pruned_point_leaves_the_others_running(tmp_path: Path) -> None:
    prune = ("sweeping.prune=median", "sweeping.prune_after_points=1", "trainer.eval_every_steps=2")
    short = ("curriculum.stages.main.steps=40", "trainer.max_stage_steps=40", "optim.lr=1e-3,1e-9")
    with started(tmp_path, *prune, *short) as process:
        process.wait(timeout=400)
    rows = json.loads((tmp_path / "sweeps" / "tried" / "sweep.json").read_text())["points"]
    status = {row["name"]: row["status"] for row in rows}
    assert {status[f"lora.r={r},optim.lr=1e-09"] for r in (4, 8)} == {"pruned"}
    assert "finished" in {status[f"lora.r={r},optim.lr=0.001"] for r in (4, 8)}


@pytest.mark.slow
def test_optuna_draws_a_pack_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    drawn = ("sweep=optuna_lora", *JOB, "name=drawn", "sweeping={pack: 2, prune: none}", "hydra.sweeper.n_jobs=2")
    ended = run(*drawn, "hydra.sweeper.n_trials=4", output_dir=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("sweeping.pack: in one program each: 1 pack of 2 points") == 2
    rows = json.loads((tmp_path / "sweeps" / "drawn" / "sweep.json").read_text())["points"]
    assert [row["status"] for row in rows] == ["finished"] * 4


@pytest.mark.slow
def test_two_packs_train_at_once(tmp_path: Path) -> None:
    """Four points, two to a program and two programs side by side: each ends as in a sweep one after the other."""
    grid = ("lora.r=4,8", "optim.lr=1e-4,3e-4")
    at_once = run("-m", *JOB, *grid, "name=two", "sweeping.pack=2", "sweeping.points_at_once=2", output_dir=tmp_path)
    assert at_once.returncode == 0, at_once.stdout + at_once.stderr
    one_by_one = run("-m", *JOB, *grid, "name=one", "sweeping.pack=off", output_dir=tmp_path)
    assert one_by_one.returncode == 0, one_by_one.stderr
    ended = {}
    for name in ("two", "one"):
        points = [path.parent for path in (tmp_path / "sweeps" / name).glob("*/result.json")]
        ended[name] = {point.name: json.loads((point / "result.json").read_text())["eval_loss"] for point in points}
    assert len(ended["two"]) == 4
    assert ended["two"] == pytest.approx(ended["one"], abs=1e-5)
    began = [records(tmp_path / "sweeps" / "two" / name)[0]["time"] for name in ended["two"]]
    last = [records(tmp_path / "sweeps" / "two" / name)[-1]["time"] for name in ended["two"]]
    assert max(began) < min(last), "both packs were running"
