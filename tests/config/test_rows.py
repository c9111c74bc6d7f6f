"""Rows and steps that the command leaves to the model and the data."""

import itertools
from dataclasses import replace

import pytest

from tests.config.composing import composed, composed_as_typed, names, sources_of_pairs
from tests.config.pairs import MODELS
from tests.tiers import only
from tpu_experiments.config.compose import machine
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import (
    LANES,
    Costs,
    Lengths,
    fitting_rows,
    intervals_of,
    rows_of,
    with_lengths,
)
from tpu_experiments.config.mesh import num_shards

DATA = [name for name in names("data") if not name.startswith(("sample", "stories")) and name not in sources_of_pairs()]
HW = [name for name in names("hw") if name not in ("cpu", "v5e256", "v6e256")]


@pytest.mark.parametrize("data", only(["wiki_ro", "uk_law"], DATA))
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_is_a_fine_tune_that_its_user_would_defend(model, data):
    """Row length, tokens of a step, epochs and micro-batch on every machine, before and after the data is measured."""
    config = composed(f"model={model}", f"data={data}", "task=plan")
    open_configs = [replace(config, hw=machine(name)) for name in HW]
    for config, measured in itertools.product(open_configs, [None, (60, 40_000), (779, 687_000), (5_000, 10**9)]):
        if measured is not None:
            config = with_lengths(config, {data: Lengths(*measured)})
        for stage in resolve_stages(config):
            rows, tokens = stage.geometry, stage.geometry.global_rows * stage.geometry.seq_len
            assert rows.seq_len % LANES == 0
            assert rows.seq_len <= min(config.model.row_tokens, config.model.arch["max_position_embeddings"])
            assert measured is None or rows.seq_len >= min(measured[0], config.model.row_tokens)
            assert rows.micro_rows * rows.seq_len <= config.model.micro_tokens or rows.micro_rows == 1
            assert tokens <= max(config.model.step_tokens, num_shards(config) * rows.seq_len)
            assert tokens >= 4096 or tokens >= measured[1] // 40
            assert 1 <= stage.epochs <= 3
            assert 5e-5 <= stage.lr <= 5e-4
            assert stage.schedule.warmup_steps is None


def test_rows_are_rounded_up_and_limited_by_the_model():
    config = composed("model=qwen05b", "data=uk_law", "hw=v5e8")
    assert rows_of(config, {"uk_law": Lengths(513, None)}).seq_len == 640
    assert rows_of(config, {"uk_law": Lengths(512, None)}).seq_len == 512
    assert rows_of(config, {"uk_law": Lengths(99_999, None)}).seq_len == 2048
    assert rows_of(config, {"uk_law": Lengths(None, None)}).seq_len == 2048


def test_the_longest_source_decides():
    config = composed("model=mistral7b", "data=[wiki_ro,uk_law]", "hw=v6e8")
    lengths = {"wiki_ro": Lengths(1500, 10**8), "uk_law": Lengths(700, 10**8)}
    assert rows_of(config, lengths).seq_len == 1536


def test_little_data_makes_smaller_steps():
    """40 steps an epoch, of 8,192 tokens or more; a power of two for each chip."""
    config = composed("model=mistral7b", "data=uk_law", "hw=v6e8")
    rows = {total: rows_of(config, {"uk_law": Lengths(1024, total)}).global_rows for total in (10**5, 10**6, 10**8)}
    assert rows == {10**5: 8, 10**6: 16, 10**8: 64}


def test_what_is_typed_is_taken():
    config = composed("model=qwen05b", "data=uk_law", "hw=v5e8", "trainer.seq_len=256", "trainer.global_batch_rows=24")
    for lengths in (None, {"uk_law": Lengths(2000, 10**9)}):
        rows = rows_of(config, lengths)
        assert (rows.seq_len, rows.global_rows) == (256, 24)


def test_a_micro_batch_divides_the_rows_of_a_device():
    assert [fitting_rows(rows, seq_len=1024, at_most=8192) for rows in (1, 6, 7, 8, 12, 16)] == [1, 6, 7, 8, 6, 8]
    assert fitting_rows(4, seq_len=16_384, at_most=8192) == 1


@pytest.mark.parametrize("steps", [1, 7, 58, 183, 1_000, 20_000, 10**6])
def test_intervals_are_in_proportion(steps):
    intervals = intervals_of(composed(), total_steps=steps)
    assert 1 <= intervals.log <= min(100, max(1, steps / 20))
    assert 1 <= intervals.evaluate <= 1000
    assert 50 <= intervals.save <= 500
    assert steps < 10 or steps > 10_000 or 7 <= steps / intervals.evaluate <= 15


@pytest.mark.parametrize(("steps", "every"), [(15, 2), (38, 4), (131, 10), (183, 20), (960, 100), (9_600, 1000)])
def test_evaluations_are_about_ten_in_short_runs_too(steps, every):
    assert intervals_of(composed(), total_steps=steps).evaluate == every


@pytest.mark.parametrize("steps", [6, 15, 38, 131, 1_000, 50_000])
@pytest.mark.parametrize("cost", [0.01, 0.6, 3.0, 40.0])
@pytest.mark.parametrize("sample", [0.0, 0.05, 2.0])
def test_evaluations_take_at_most_a_tenth_of_the_steps(steps, cost, sample):
    """What is always made apart: the evaluations and samples at the ends."""
    intervals = intervals_of(composed(), total_steps=steps, costs=Costs(cost, sample, num_ends=2))
    between = steps // intervals.evaluate if intervals.evaluate else 0
    spent = between * (cost + (sample if intervals.samples else 0))
    assert spent <= max(0.0, 0.1 * steps - 2 * cost)
    plain = intervals_of(composed(), total_steps=steps)
    is_reduced = (intervals.evaluate, intervals.samples) != (plain.evaluate, True)
    assert is_reduced == bool(intervals.capped)
    if steps / plain.evaluate * (cost + sample) <= 0.05 * steps - 2 * cost:
        assert intervals == plain


def test_evaluations_that_a_run_uses_or_that_are_typed_are_made_whatever_they_cost():
    costs = Costs(40.0, 40.0, num_ends=2)
    for words in (
        ("curriculum.stages.chat.exit.patience=3",),
        ("checkpoint.keep_best=1",),
        ("trainer.eval_every_steps=4",),
    ):
        assert intervals_of(composed(*words), total_steps=40, costs=costs).evaluate == 4
    asked = intervals_of(composed("sample.at=evaluations"), total_steps=40, costs=costs)
    assert (asked.samples, asked.evaluate) == (True, 0)


def test_the_default_job_is_131_steps_with_four_rounds_of_questions():
    """What it takes for a minute belongs to its model and its data, and to no other command."""
    config = composed_as_typed()
    (stage,) = resolve_stages(config)
    assert (stage.geometry.seq_len, stage.geometry.global_rows, stage.epochs) == (128, 16, 1.9)
    assert intervals_of(config, total_steps=131).evaluate == 50
    assert (config.sample.max_new_tokens, config.sample.window, config.sample.temperature) == (12, 80, 0.0)
    other = composed_as_typed("model=mistral7b")
    assert list(other.data) == ["stories_ro"]
    assert other.sample.window == composed("model=mistral7b").sample.window == 128


@pytest.mark.parametrize(("steps", "evaluate"), [(20, 50), (400, 50), (5_000, 500), (10**6, 1000)])
def test_questions_are_asked_once_in_50_steps_at_most(steps, evaluate):
    assert intervals_of(composed_as_typed(), total_steps=steps).evaluate == evaluate


def test_all_weights_are_trained_at_a_tenth_of_the_rate_of_adapters():
    def lr(*words):
        (stage,) = resolve_stages(composed("model=qwen05b", "data=uk_law", *words))
        return stage.lr

    assert lr() == 2e-4
    assert lr("lora=none") == pytest.approx(2e-5)
    assert lr("lora=none", "model.init=random") == 2e-4
    assert lr("lora=none", "optim.lr=1e-3") == 1e-3


def test_intervals_that_are_typed_are_taken():
    words = ("trainer.log_every_steps=7", "trainer.eval_every_steps=0", "checkpoint.every_steps=0")
    intervals = intervals_of(composed(*words), total_steps=1000)
    assert (intervals.log, intervals.evaluate, intervals.save) == (7, 0, 0)
