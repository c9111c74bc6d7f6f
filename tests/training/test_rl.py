"""A run on the model's own answers: what it writes and learns from, and that a killed one ends in the same bytes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.benchmarks.crash_rl import WORDS, rollouts
from tests.training.crashing import Run, require_equal
from tests.training.runs import finished, records, run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.batches import StageRows
from tpu_experiments.data.prompts import Prompt
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.metrics.ranking import ranking_measure
from tpu_experiments.training.batches import PromptRows
from tpu_experiments.training.rl import PolicyTrainer, RolloutRows, facts_of, prompt_indices, trainer_class
from tpu_experiments.training.rollouts import RolloutStore

COMMON = (
    *("model=tiny", "data=[sample_chat]", "lora=all_linear_r8", "objective=grpo", "objective.beta=0.05"),
    *("rollout.prompts=2", "rollout.samples=4", "rollout.updates=2", "rollout.max_new_tokens=6", "trainer.seq_len=128"),
    *("curriculum.stages.main.steps=6", "optim.lr=1e-2", "trainer.log_every_steps=1", "trainer.eval_every_steps=5"),
    *("trainer.max_eval_rows=4", "checkpoint.every_steps=1", "checkpoint.keep_last=100", "sample.max_new_tokens=0"),
    *("trainer.guard.spike_window=3", "reward=length", "rollout.rewards.length.arguments.most=2", "name=own"),
)
EAGER = (*COMMON, "hw.runtime=eager")
DRAWN = "+rollout.rewards={drawn: {function: tests.rewards.drawn.drawn, weight: 2.0}}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and result of a run, one of whose rewards is another at every call."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(*EAGER, DRAWN, output_dir=folder, as_typed=True)


def stored(folder: Path) -> dict[str, bytes]:
    """The files of rollouts, by name."""
    return {path.name: path.read_bytes() for path in (folder / "own" / "rollouts").iterdir()}


def state(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint and the adapter."""
    last = max((folder / "own" / "checkpoints").glob("step_*"))
    files = [*last.glob("*.safetensors"), folder / "own" / "adapter" / "adapter_model.safetensors"]
    return {path.name: path.read_bytes() for path in files}


def logged(folder: Path) -> list[dict[str, float]]:
    """What records say beside times, and beside rewards of held-out answers that are others at every call."""
    kept, drawn = ("step", "train/", "eval/"), ("eval/rewards/drawn", "eval/reward")
    return [{k: v for k, v in each.items() if k.startswith(kept) and k not in drawn} for each in records(folder)]


def forget_after(folder: Path, step: int) -> None:
    """Make of a finished run one that was killed behind its checkpoint of a step."""
    (folder / "own" / "result.json").unlink()
    for checkpoint in (folder / "own" / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


def test_it_writes_what_it_learns_from_and_says_how_it_went(whole) -> None:
    folder, result = whole
    store = RolloutStore(str(folder / "own" / "rollouts"))
    assert store.iterations() == [0, 2, 4]
    progress = json.loads((folder / "own" / "checkpoints" / "step_00000006" / "progress.json").read_text())
    sums = {str(number): store.read(number).sha256 for number in store.iterations()}
    assert progress["rollouts"].items() > sums.items()
    first, second = store.read(0), store.read(2)
    assert first.version == 0
    assert second.version == 2
    assert first.reward_names == ("length", "drawn")
    trained = [record for record in logged(folder) if "train/loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    for record, found in zip(trained, (first, first, second, second), strict=False):
        known = found.rewards_NF[~np.isnan(found.rewards_NF[:, 1]), 1]
        assert record["train/rewards/drawn/mean"] == pytest.approx(known.mean())
        assert record["train/completions/clipped_ratio"] == found.is_cut_N.mean()
        assert record["train/kl"] >= 0
    assert trained[0]["train/ratio"] == pytest.approx(1, abs=1e-5)
    assert trained[0]["train/kl"] == pytest.approx(0, abs=1e-8)
    assert abs(trained[1]["train/ratio"] - 1) > 1e-4, "the second step is of parameters that did not sample"
    assert trained[2]["train/ratio"] == pytest.approx(1, abs=1e-5)
    assert {"reward", "rewards/length", "rewards/drawn"} <= result["eval_measures"].keys()
    assert ranking_measure(result) == ("reward", result["eval_measures"]["reward"])
    assert result.get("is_evaluated", True)
    assert "times the median" not in (folder / "own" / "run.log").read_text(), "losses are around 0"
    assert "Written after step" in (folder / "own" / "rollouts.html").read_text()
    provenance = json.loads((folder / "own" / "provenance.json").read_text())
    assert len(provenance["lives"][0]["rewards"]["drawn"]) == 64
    assert not [each for each in result["findings"] if "training rows" in each["message"]], "it does not learn them"


@pytest.mark.filterwarnings("ignore:Degrees of freedom <= 0", "ignore:Mean of empty slice")  # too few have a reward
def test_log_probabilities_are_of_the_parameters_that_wrote_the_answers(whole) -> None:
    """By two programs: the decoder has a cache and draws, scoring runs whole rows. Those of the start stay."""
    store = RolloutStore(str(whole[0] / "own" / "rollouts"))
    for number in (0, 2, 4):
        found = store.read(number)
        learnt_NT = found.learnt(masks_cut=False)
        np.testing.assert_allclose(found.old_logps_NT[learnt_NT], found.sampler_logps_NT[learnt_NT], atol=2e-4)
        moved = np.abs(found.old_logps_NT - found.start_logps_NT)[learnt_NT].max()
        assert (moved < 1e-5) == (number == 0)
        total_N = found.rewards_NF @ [1.0, 2.0]
        groups = total_N.reshape(2, 4)
        expected = (groups - np.nanmean(groups, 1, keepdims=True)) / (
            np.nanstd(groups, 1, ddof=1, keepdims=True) + 1e-4
        )
        np.testing.assert_allclose(found.advantage_N, np.nan_to_num(expected).reshape(-1), atol=1e-5)
        assert len(set(found.prompt_index_N[:4])) == len(set(found.prompt_index_N[4:])) == 1


@pytest.mark.parametrize("step", [3, pytest.param(2, marks=pytest.mark.slow)], ids=["inside", "between"])
def test_a_killed_run_reads_what_was_rewarded_and_ends_in_the_same_bytes(whole, tmp_path, step) -> None:
    """Rewards are others at every call, so none can have been computed again."""
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    forget_after(tmp_path, step)
    finished(*EAGER, DRAWN, output_dir=tmp_path, as_typed=True)
    assert stored(tmp_path) == stored(whole[0])
    assert state(tmp_path) == state(whole[0])
    assert logged(tmp_path) == logged(whole[0])


@pytest.mark.slow
def test_an_iteration_that_was_not_written_is_sampled_as_it_would_have_been(tmp_path) -> None:
    finished(*EAGER, output_dir=tmp_path, as_typed=True)
    before = stored(tmp_path), state(tmp_path), logged(tmp_path)
    forget_after(tmp_path, 2)
    for number in (2, 4):
        (tmp_path / "own" / "rollouts" / f"{number:06d}.safetensors").unlink()
    finished(*EAGER, output_dir=tmp_path, as_typed=True)
    assert (stored(tmp_path), state(tmp_path), logged(tmp_path)) == before


@pytest.mark.slow
def test_what_a_checkpoint_names_must_be_there(whole, tmp_path) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    forget_after(tmp_path, 3)
    path = tmp_path / "own" / "rollouts" / "000002.safetensors"
    content = path.read_bytes()
    path.unlink()
    done = run(*EAGER, DRAWN, output_dir=tmp_path, as_typed=True)
    assert done.returncode == 1
    assert f"error: {path}; it is missing, and the parameters that wrote these answers are gone" in done.stderr
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = run(*EAGER, DRAWN, output_dir=tmp_path, as_typed=True)
    assert done.returncode == 1
    assert f"error: {path}; the file is damaged" in done.stderr


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("base", ["dense", "int8"])
def test_folded_layers_write_as_they_learn_and_nothing_is_compiled_again(tmp_path, base) -> None:
    """The copy that answers are written with has the log-probabilities of the folded model.

    Adapters are in its weights, and beside codes of int8.
    """
    result = finished(*COMMON, f"model.base={base}", output_dir=tmp_path, as_typed=True)
    assert result["num_compiles"] == result["expected_programs"] == 6
    assert result["compiles_after_warmup"] == 0
    store = RolloutStore(str(tmp_path / "own" / "rollouts"))
    found = store.read(4)
    learnt_NT = found.learnt(masks_cut=False)
    np.testing.assert_allclose(found.old_logps_NT[learnt_NT], found.sampler_logps_NT[learnt_NT], atol=2e-4)
    start = load_file(tmp_path / "own" / "rollouts" / "start.safetensors")
    assert not any(tensor.any() for name, tensor in start.items() if name.endswith("lora_B"))


@pytest.mark.slow
def test_a_resume_check_compares_the_answers_too(tmp_path) -> None:
    done = run(*EAGER, "task=resume_check", "trainer.eval_every_steps=0", output_dir=tmp_path, as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "resume_check" / "own" / "resume_check.json").read_text())
    checks = {check["name"]: check["equal"] for check in found["checks"]}
    assert checks["answers and their rewards"]
    assert all(checks.values())
    assert len(found["resumes"]) == 2


ONE, FOUR = ("hw.num_devices=1",), ("hw.num_devices=4", "hw.parallel=spmd", "sharding=fsdp")


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize(
    ("before", "behind", "step"), [(ONE, FOUR, 2), (FOUR, ONE, 3)], ids=["one_to_four", "four_to_one_inside"]
)
def test_another_number_of_devices_goes_on_from_what_is_written(tmp_path, before, behind, step) -> None:
    finished(*COMMON, *before, output_dir=tmp_path, as_typed=True)
    written, expected = stored(tmp_path), [each["train/loss"] for each in logged(tmp_path) if "train/loss" in each]
    forget_after(tmp_path, step)
    finished(*COMMON, *behind, output_dir=tmp_path, as_typed=True)
    assert stored(tmp_path) == written
    found = [each["train/loss"] for each in logged(tmp_path) if "train/loss" in each]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1e-3


@pytest.mark.slow
@pytest.mark.xla
def test_held_out_answers_are_of_the_averages_that_are_exported(tmp_path) -> None:
    kept = ("name=", "lora=", "optim.lr", "reward=", "rollout.rewards", "objective.beta")
    words = [word for word in COMMON if not word.startswith(kept)]
    words += [
        "lora=none",
        "optim.lr=1e-2",
        "+rollout.rewards={marked: {function: tests.rewards.drawn.marked}}",
    ]
    found = finished(*words, "optim.ema=0.9", "name=own", output_dir=tmp_path / "own", as_typed=True)
    assert found["num_compiles"] == found["expected_programs"] == 7
    assert found["compiles_after_warmup"] == 0
    begin = (f"model.path={tmp_path / 'own' / 'own' / 'model'}", "hw.runtime=eager", "name=again")
    again = finished(*words, *begin, output_dir=tmp_path / "again", as_typed=True)
    assert again["eval_loss_before"] == pytest.approx(found["eval_loss"], abs=1e-5)
    assert again["eval_measures_before"]["rewards/marked"] == pytest.approx(found["eval_measures"]["rewards/marked"])


def test_no_answer_with_a_reward_ends_the_run_in_one_sentence(tmp_path) -> None:
    words = [word for word in EAGER if "length" not in word]
    words += ["+rollout.rewards={never: {function: tests.rewards.drawn.never}}", "curriculum.stages.main.steps=2"]
    done = run(*words, output_dir=tmp_path, as_typed=True)
    assert done.returncode == 1
    said = "8 of 8 answers have no reward: never raises ValueError: never (rows 0, 1, 2, 3, 4 and 3 more)"
    assert said in done.stderr
    assert "Nothing can be learnt from that" in done.stderr
    assert not list((tmp_path / "own" / "rollouts").glob("0*"))


def test_prompts_pass_through_their_epochs_without_a_gap() -> None:
    prompts = [Prompt([number + 1], "", {}) for number in range(5)]
    rows = ReplayedRows(StageRows([PromptRows(prompts, 8)], names=["a"], seed=3, stage_index=0))
    found = np.concatenate([prompt_indices(rows, iteration, num=3) for iteration in range(5)])
    assert sorted(found[:5]) == sorted(found[5:10]) == sorted(found[10:]) == [0, 1, 2, 3, 4]
    assert found[:5].tolist() != found[5:10].tolist()
    taken = PromptRows(prompts, 8).take(np.array([4, 2]))
    assert taken.ids_NT[:, 0].tolist() == [5, 3]
    assert not taken.learn_NT.any()


def test_each_step_of_an_iteration_has_rows_of_its_own(whole) -> None:
    found = RolloutStore(str(whole[0] / "own" / "rollouts")).read(2)
    rows = found.rows(masks_cut=False, pad_id=0)
    labels = [f"a:{number}" for number in range(8)]
    fed = RolloutRows(rows, labels, first=2)
    one, other = fed.batch(2, global_rows=4), fed.batch(3, global_rows=4)
    assert one.labels + other.labels == labels
    np.testing.assert_array_equal(np.concatenate([one.more["advantage"], other.more["advantage"]]), found.advantage_N)
    np.testing.assert_array_equal(np.concatenate([one.ids_GT, other.ids_GT]), rows.ids_NT)


def test_facts_leave_out_answers_without_a_reward(whole) -> None:
    found = RolloutStore(str(whole[0] / "own" / "rollouts")).read(0)
    rewards_NF = np.array([[1.0, np.nan], *[[0.0, 0.5]] * 3, *[[1.0, 0.0]] * 4])
    changed = {"rewards_NF": rewards_NF, "advantage_N": np.array([0, 1, -1, 0, *[0] * 4], np.float32)}
    facts = facts_of(type(found)(**{**vars(found), **changed}), weights=[1.0, 2.0], samples=4)
    assert facts["rewards/length/mean"] == 5 / 8
    assert facts["rewards/drawn/mean"] == pytest.approx(1.5 / 7)
    assert facts["reward"] == 1.0
    assert facts["reward_std"] == 0.0
    assert facts["frac_reward_zero_std"] == 0.5
    assert facts["no_reward"] == 1 / 8


class Another(torch.nn.Module):
    """No trainer of answers."""


def test_the_trainer_of_answers_is_chosen_by_the_objective(make_config) -> None:
    words = ("objective=grpo", "reward=exact", "data=[sample_chat]", "curriculum=single")
    assert trainer_class(make_config(*words)) is PolicyTrainer
    other = make_config(*words)
    other.trainer._target_ = f"{__name__}.Another"
    with pytest.raises(ConfigError, match=r"derive it from tpu_experiments\.training\.rl\.PolicyTrainer"):
        trainer_class(other)


@pytest.mark.slow
def test_two_processes_killed_while_they_write_answers_end_in_the_same_bytes(tmp_path) -> None:
    """Both write all answers; the first has them rewarded, and writes what both read."""
    words = (*WORDS, "hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=2", "trainer.max_stage_steps=4")
    whole, killed = Run(tmp_path / "whole", words), Run(tmp_path / "killed", words)
    whole.finish()
    assert killed.kill_after_line("stage main", delay=0.3)
    assert killed.kill_after_line("step 2", delay=0.3)
    killed.finish()
    require_equal(killed, whole)
    assert rollouts(killed) == rollouts(whole)
    assert len(rollouts(whole)) == 3  # two iterations, and the start
