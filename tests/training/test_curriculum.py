"""Stages of whole runs: learning rates by the written formula, replayed rows, exit tests, and going on with them."""

import json
import math
import shutil

import pytest
from safetensors.numpy import load_file

from tests.config.composing import composed
from tests.tiers import only
from tests.training.runs import finished, records
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.models.huggingface import ShapesOfModel
from tpu_experiments.planning.length import assumed_steps
from tpu_experiments.training.batches import parameters_of_lengths

pytestmark = pytest.mark.xla
COMMON = ("debug=smoke", "hw.runtime=eager", "trainer.log_every_steps=1", "sample.max_new_tokens=0", "name=staged")
COMMON += ("schedule.warmup_steps=5",)
STAGES = (
    "trainer.max_stage_steps=14",
    "trainer.eval_every_steps=2",
    "checkpoint.keep_last=100",
    "curriculum.stages.text.shorter=2",
    "curriculum.stages.text.lr=2e-3",
    "curriculum.stages.text.exit.eval_loss=8.29",
    "curriculum.stages.chat.lr=300",  # with 50 the loss falls once more; with 2000 gradients are infinite
    "curriculum.stages.chat.schedule={name:cosine,warmup_steps:2,floor:0.1}",
    "curriculum.stages.chat.replay=0.25",
    "curriculum.stages.chat.exit={patience:2,min_delta:0.03,ends_with:best}",
    "curriculum.stages.chat.trainable=['*lora_B']",
    "logger=jsonl",
)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Folder and result of a run whose first stage ends by its target, and whose second by its patience."""
    folder = tmp_path_factory.mktemp("staged")
    return folder, finished(*COMMON, *STAGES, probe_in(folder), output_dir=folder)


def probe_in(folder):
    return (
        f"+logger={{probe: {{_target_: tpu_experiments.loggers.probe.Probe, options: {{path: {folder}/rows.jsonl}}}}}}"
    )


def rates(folder):
    return [record["train/lr"] for record in records(folder) if "train/lr" in record]


def cosine(step, *, num_steps, peak, warmup, floor):
    """The formula of the README, as a person would write it down."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / (num_steps - 1 - warmup))) / 2)


def test_learning_rates_are_the_formula_at_every_step(staged):
    """Nemira-LLM's second stage had re-created its schedule on a decayed optimizer and stayed at 1e-6."""
    folder, result = staged
    first, second = (stage["steps"] for stage in result["stages"])
    expected = [cosine(step, num_steps=14, peak=2e-3, warmup=5, floor=0.1) for step in range(first)]
    expected += [cosine(step, num_steps=14, peak=300, warmup=2, floor=0.1) for step in range(second)]
    assert rates(folder) == pytest.approx(expected, rel=1e-12)


def test_stages_end_by_their_exit_tests(staged):
    folder, result = staged
    text, chat = result["stages"]
    assert text["steps"] < 14
    assert text["steps"] % 2 == 0
    assert "at most 8.29 (exit.eval_loss)" in text["ended_by"]
    assert text["eval_sources"]["sample_text"] <= 8.29
    assert chat["steps"] < 14
    assert "2 evaluations in a row were not better" in chat["ended_by"]
    seen = {r["step"]: r["eval/loss_sample_chat"] for r in records(folder) if "eval/loss_sample_chat" in r}
    of_chat = {step: loss for step, loss in seen.items() if step > text["steps"]}
    assert chat["restored_step"] == min(of_chat, key=lambda step: of_chat[step])
    assert chat["best_loss"] == min(of_chat.values())
    assert chat["restored_step"] < text["steps"] + chat["steps"]


def test_the_stage_ends_with_the_parameters_of_its_best_evaluation(staged):
    folder, result = staged
    chat = result["stages"][1]
    best = load_file(folder / "staged" / "checkpoints" / f"step_{chat['restored_step']:08d}" / "parameters.safetensors")
    adapter = load_file(folder / "staged" / "adapter" / "adapter_model.safetensors")
    assert len(best) == len(adapter) > 0
    for name, tensor in best.items():
        kept = adapter[f"base_model.model.{name.replace('lora_A', 'lora_A.weight').replace('lora_B', 'lora_B.weight')}"]
        assert (kept == tensor).all(), name
    found = [r for r in records(folder) if "eval/loss" in r and r["step"] == chat["restored_step"]]
    assert [result["eval_loss"]] == [record["eval/loss"] for record in found]
    assert result["eval_sources"]["sample_chat"] == pytest.approx(chat["best_loss"])


def test_a_quarter_of_the_rows_is_replayed(staged):
    folder, result = staged
    events = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    lines = [(event["step"], event["rows"]) for event in events if event["event"] == "rows"]
    text = result["stages"][0]["steps"]
    assert {len(labels) for step, labels in lines if step <= text} == {16}, "rows of half the length, twice as many"
    for step, labels in lines:
        replayed = sum(label.startswith("sample_text:") for label in labels)
        assert replayed == (len(labels) if step <= text else 2)
    assert {len(labels) for step, labels in lines if step > text} == {8}


def test_what_the_second_stage_does_not_train_stays(staged):
    folder, result = staged
    border = result["stages"][0]["steps"]
    before = load_file(folder / "staged" / "checkpoints" / f"step_{border:08d}" / "parameters.safetensors")
    last = max(int(path.name.removeprefix("step_")) for path in (folder / "staged" / "checkpoints").iterdir())
    after = load_file(folder / "staged" / "checkpoints" / f"step_{last:08d}" / "parameters.safetensors")
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {name for name in before if name.endswith("lora_B")}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "back",
    [pytest.param(0, marks=SLOW), 2, pytest.param(4, marks=SLOW)],
    ids=["at_the_end", "before_the_exit", "at_the_best"],
)
def test_a_run_that_resumes_ends_the_same(staged, tmp_path, back):
    whole, first = staged
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "staged"
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    (folder / "result.json").unlink()
    last = sum(stage["steps"] for stage in first["stages"])
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > last - back:
            shutil.rmtree(checkpoint)
    second = finished(*COMMON, *STAGES, probe_in(tmp_path), output_dir=tmp_path)
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    assert second["stages"] == first["stages"]
    assert second["eval_loss"] == first["eval_loss"]
    assert rates(tmp_path) == rates(whole)


@pytest.mark.parametrize("kept", only(["fresh"], ["carry", "fresh"]))
def test_moments_are_carried_over_or_fresh(tmp_path, kept):
    """With a learning rate of almost nothing a step adds (1 - beta1) g to the moments that were there."""
    settings = (
        *COMMON,
        "trainer.max_stage_steps=2",
        f"curriculum.stages.chat.optimizer={kept}",
        "checkpoint.keep_last=9",
    )
    result = finished(*settings, "checkpoint.every_steps=1", "optim.lr=1e-12", output_dir=tmp_path)
    assert [stage["steps"] for stage in result["stages"]] == [2, 2]
    place = tmp_path / "staged" / "checkpoints"
    before, after = (load_file(place / f"step_{step:08d}" / "optimizer.safetensors") for step in (2, 3))
    counts = [int(state["/count"][0]) for state in (before, after)]
    assert counts == ([2, 3] if kept == "carry" else [2, 1])


def test_tokens_are_as_many_steps_as_make_them(tmp_path):
    tokens = ("curriculum=single", "curriculum.stages.main.steps=null", "curriculum.stages.main.tokens=2000")
    result = finished(*COMMON, *tokens, "trainer.max_stage_steps=null", output_dir=tmp_path)
    (stage,) = result["stages"]
    assert 2000 <= stage["tokens"] < 2000 + 2 * 8 * 64
    assert stage["steps"] == 4


@pytest.mark.slow
def test_tokens_a_parameter_count_those_of_the_model_without_adapters(tmp_path):
    words = ("curriculum=single", "curriculum.stages.main.steps=null")
    length = "curriculum.stages.main.tokens_per_parameter=0.0015"
    result = finished(*COMMON, *words, length, "trainer.max_stage_steps=null", output_dir=tmp_path)
    wanted = 0.0015 * (result["num_parameters"] - result["num_trainable"])
    (stage,) = result["stages"]
    assert wanted <= stage["tokens"] < wanted + 2 * 8 * 64
    assert f": 0.0015 tokens a parameter, {wanted:,.0f}" in (tmp_path / "staged" / "run.log").read_text()


def test_a_length_in_tokens_a_parameter_needs_their_number() -> None:
    """llama_mini's recipe: 20 x 114,150,144 tokens in steps of 512 x 1,024."""
    config = composed("experiment=llama_mini_pretrain")
    (stage,) = resolve_stages(config)
    assert (stage.tokens, stage.epochs, stage.tokens_per_parameter) == (None, None, 20)
    counted = parameters_of_lengths([stage], source=lambda: ShapesOfModel(config.model, seed=0))
    assert counted == 114_150_144
    assert assumed_steps(config, stage, num_parameters=counted) == math.ceil(20 * counted / (512 * 1024)) == 4355
    assert assumed_steps(config, stage) is None
