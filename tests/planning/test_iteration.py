"""An iteration of a run on its own answers is planned by its parts, with the programs that the run has."""

import json
from dataclasses import replace

import pytest

from tests.config.composing import composed
from tests.planning.examples import example_plan
from tests.planning.test_plan_task import ONE_LAYER, plan
from tests.planning.test_report import answers_beside
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.planning.iteration import iteration_of
from tpu_experiments.planning.length import OutsideSteps, run_length
from tpu_experiments.planning.plan import Tried
from tpu_experiments.planning.report import search_cells
from tpu_experiments.planning.search import described, ranked
from tpu_experiments.tasks.plan import run
from tpu_experiments.tasks.plan.formulas import counted_only
from tpu_experiments.tasks.plan.programs import trace_run
from tpu_experiments.tasks.plan.rollouts import answers_of, num_scores
from tpu_experiments.tasks.plan.search import axes_of, case_of, search_settings
from tpu_experiments.training.batches import RunInputs, expected_programs, program_shapes

REWARDED = ("objective=grpo", "data=sample_chat", "reward=exact", "rollout.prompts=4", "rollout.samples=4")
REWARDED += ("rollout.max_new_tokens=33", "curriculum.stages.main.steps=10", "lora=all_linear_r16")


def test_the_seconds_of_an_iteration_are_its_parts_and_its_dollars_those_of_all_chips():
    decoding = answers_beside(example_plan()).decoding
    seconds = {"reward_seconds": 0.4, "score_seconds": 0.1, "step_seconds": 0.5}
    found = iteration_of(decoding, prompts=4, samples=16, updates=2, **seconds)
    written = decoding.merge_seconds + decoding.prefill_seconds + decoding.decode_seconds
    assert found.rollout_seconds == pytest.approx(written + 0.5)
    assert found.seconds == pytest.approx(written + 0.5 + 2 * 0.5) == pytest.approx(sum(found.parts.values()))
    assert found.answers_per_second == pytest.approx(64 / found.seconds)
    price = composed("hw=v5e8").hw.price
    hours = found.seconds * decoding.num_devices / 3600
    assert found.usd_per_thousand(price).spot == pytest.approx(1000 * hours * price.usd_per_chip_hour_spot)
    assert iteration_of(replace(decoding, token_seconds=None), prompts=4, samples=16, updates=2, **seconds) is None


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ((), 0),
        (("rollout.updates=2",), 1),
        (("objective.beta=0.04",), 1),
        (("objective.beta=0.04", "rollout.updates=2"), 2),
        (("model.dtype=bfloat16",), 1),
    ],
)
def test_a_rollout_is_scored_as_often_as_its_loss_reads(words, times):
    assert num_scores(composed("hw=v6e1", "model.dtype=float32", *REWARDED, *words)) == times
    assert num_scores(composed("hw=v6e1")) == 0


def test_the_answers_that_are_planned_have_the_shapes_of_the_run():
    config = composed(*ONE_LAYER[:3], *REWARDED, "trainer.seq_len=128", "task=plan")
    found = answers_of(config, config.task.decode)
    shapes = program_shapes(RunInputs(None, {}, resolve_stages(config)), config, world_size=1)
    assert shapes[f"read {found.prompt_tokens}"] == {(found.rows, found.prompt_tokens)} == {(16, 95)}
    assert shapes[f"write {found.prompt_tokens}"] == {(found.rows, found.tokens_per_call)} == {(16, 32)}
    other = composed("hw=v6e1", "task=plan", "task.decode.rows=3")
    assert answers_of(other, other.task.decode) == other.task.decode


@pytest.mark.xla
@pytest.mark.parametrize("averages", [(), ("optim.ema=0.9",)], ids=["parameters", "averages"])
def test_every_copy_of_the_weights_is_planned_that_the_run_makes(averages):
    """With averages, rollouts are written by a copy of the parameters, and held-out answers by one of the averages."""
    config = composed(*ONE_LAYER[:3], *REWARDED, "trainer.seq_len=128", *averages, "task=plan")
    run = trace_run(config, which="all")
    assert [program.name for program in run.merges] == ["merge", "merge averages"][: 1 + len(averages)]
    assert len({program.module for program in run.merges}) == len(run.merges)
    expected = expected_programs(RunInputs(None, {}, resolve_stages(config)), config)
    assert len(run.programs) + len(("read", "write")) + len(run.merges) == expected
    assert 1 + len([*counted_only(config)]) == expected


def test_rollouts_and_the_answers_of_evaluations_are_in_the_length_of_the_run():
    config = composed("hw=v6e1", *REWARDED, "rollout.updates=2", "task=plan")
    stages = resolve_stages(config)
    (stage,) = stages

    class Time:
        total_s = 0.5

    def length(**given):
        outside = OutsideSteps(base_gib=0.1, eval_rows=4, eval_batch_seconds=0.0, **given)
        steps = {stage.name: 10}
        return run_length(config, stages, steps=steps, times={stage.name: Time}, outside=outside)[0]

    without, found = length(), length(rollout_seconds=3.0, answer_seconds=2.0)
    assert found.parts["rollouts"] == 5 * 3.0
    assert found.parts["training"] == 10 * 0.5
    batches = -(-config.trainer.max_eval_rows // 16)
    assert (found.eval_seconds - without.eval_seconds) % (batches * 2.0) == 0
    assert found.eval_seconds > without.eval_seconds


def test_answers_of_a_plan_are_refused_beside_those_of_rollouts():
    config = composed("hw=v6e1", *REWARDED, "task=plan", "task.decode.rows=3")
    with pytest.raises(ConfigError, match=r"task.decode.rows=3 with objective=grpo; the answers of its rollouts"):
        run(config)


@pytest.mark.slow
def test_a_run_on_its_own_answers_is_planned_whole(tmp_path):
    words = (*ONE_LAYER[:3], *REWARDED, "trainer.seq_len=128", "objective.beta=0.04", "task.reward_seconds=0.25")
    done = plan(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "plans" / "p" / "plan.json").read_text())
    own, config = found["iteration"], composed(*words, "task=plan")
    assert found["num_programs"] == expected_programs(RunInputs(None, {}, resolve_stages(config)), config)
    names = [program["name"] for program in found["programs"]]
    assert names[:3] == ["train", "eval", "score"]
    assert {"read", "write", "merge"} <= set(names)
    scored = next(program for program in found["programs"] if program["name"] == "score")
    (geometry,) = (stage.geometry for stage in resolve_stages(config))
    batches = 16 // (geometry.micro_rows * geometry.num_shards)
    assert own["score_seconds"] == pytest.approx(batches * scored["estimated_seconds"])
    assert own["update_seconds"] == pytest.approx(found["estimated_step_seconds"])
    assert own["reward_seconds"] == 0.25
    assert found["run"]["seconds"]["rollouts"] == pytest.approx(10 * (own["seconds"] - own["update_seconds"]))
    assert f"{own['seconds']:.3f} s (estimate): 4 prompts x 4 answers, 1 optimizer steps" in done.stdout
    assert found["run"]["seconds"]["compiling"] == pytest.approx(found["compile_seconds"])
    assert "per 1,000 iterations" in done.stdout


def rollouts_searched(*words):
    return composed(*ONE_LAYER[:3], *REWARDED, "trainer.seq_len=128", "task=plan", "task.explore=search", *words)


def test_a_search_of_a_run_on_its_own_answers_is_over_its_rollouts():
    config = rollouts_searched()
    assert axes_of(config, config.task) == {"rollout.prompts": [16, 32, 64, 128]}
    assert case_of(config).config.tuned != "off"
    of_steps = rollouts_searched("task.programs=train")
    assert {"trainer.micro_batch_rows", "model.remat"} <= axes_of(of_steps, of_steps.task).keys()
    assert "rollout.prompts" not in axes_of(of_steps, of_steps.task)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("task.method=analytic", "nothing is compiled here, and formulas know no decoder"),
        ("task.search.table=mine.yaml", r"task.search.table=mine.yaml takes settings of steps"),
    ],
)
def test_rollouts_are_searched_by_the_compiler_alone(word, why):
    config = rollouts_searched(word)
    with pytest.raises(ConfigError, match=rf"^task.explore=search with objective=grpo; {why}; task.programs=train "):
        search_settings(case_of(config), config.task, method=word.removeprefix("task.method="))


def test_rollouts_are_ranked_by_answers_per_second_and_shown_with_their_dollars():
    """Of two that fit, the one with the longer steps and iterations writes an answer in less time."""
    of_machine = composed("hw=v5e8").hw
    decoding = replace(answers_beside(example_plan()).decoding, num_devices=8)
    seconds = {"reward_seconds": 0.0, "score_seconds": 0.0, "samples": 8, "updates": 1}
    tried = [
        Tried(
            ("rollout.prompts=16",),
            "fits",
            4.0,
            0.25,
            iteration=iteration_of(decoding, prompts=16, step_seconds=0.25, **seconds),
        ),
        Tried(
            ("rollout.prompts=64",),
            "fits",
            8.0,
            0.9,
            iteration=iteration_of(decoding, prompts=64, step_seconds=0.9, **seconds),
        ),
        Tried(("rollout.prompts=128",), "too large", 20.0),
    ]
    best, second, large = ranked(tried)
    assert (best, second, large) == (tried[1], tried[0], tried[2])
    assert described(best) == f"{64 * 8 / best.iteration.seconds:,.0f} answers/s (estimate), 8.00 GiB per chip"
    header, first, *_, last = search_cells(replace(example_plan(), hw=of_machine, search=(best, second, large)))
    spot = best.iteration.seconds / (64 * 8) * 1000 * 8 / 3600 * of_machine.price.usd_per_chip_hour_spot
    assert dict(zip(header, first, strict=True))["$ spot"] == f"${spot:,.4f}"
    assert last == ("too large", "-", "-", "-", "-", "20.00", "rollout.prompts=128")


@pytest.mark.slow
def test_more_answers_at_once_are_cheaper_each(tmp_path):
    words = (*ONE_LAYER[:3], *REWARDED, "trainer.seq_len=128", "task.explore=search")
    done = plan(tmp_path, *words, "task.search.axes={rollout.prompts:[16]}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "plans" / "p" / "plan.json").read_text())
    first, second = found["search"]
    assert (first["overrides"], second["overrides"]) == (["rollout.prompts=16"], [])
    parts = [sum(v for k, v in each["iteration"].items() if k.endswith("_seconds")) for each in (first, second)]
    assert 16 * 4 / parts[0] > 4 * 4 / parts[1]
    assert found["iteration"]["prompts"] == 16
    assert (tmp_path / "plans" / "p" / "best.yaml").read_text().endswith("\nrollout.prompts: 16\n")
