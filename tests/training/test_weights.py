"""Batches of a stage that draws by weights: token shares, going on, other processes, what the log says."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.batches import stage_rows, stage_steps, step_batches, tokens_per_row, weights_text

WEIGHTS = {"sample_text": 0.2, "sample_chat": 0.8}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("weights")
    weights = [f"data.{name}.weight={weight}" for name, weight in WEIGHTS.items()]
    rows = ("trainer.seq_len=128", "trainer.global_batch_rows=8", "curriculum.stages.main.epochs=2")
    selected = ("model=tiny", f"data=[{','.join(WEIGHTS)}]", "curriculum=single", f"output_dir={folder}")
    config = composed(*selected, *rows, *weights, "lora.dropout=0.1")
    inputs = make_inputs(config, resolve_stages(config))
    (stage,) = inputs.stages
    rows = stage_rows(inputs, stage, config=config)
    return config, inputs, stage, rows, stage_steps(rows, stage, inputs=inputs, config=config)


def batches(staged, *, first=0, process=(0, 1)):
    config, _, stage, rows, num_steps = staged
    return list(
        step_batches(
            rows, stage, num_steps=num_steps, config=config, first=first, process=process, added={}, draws=False
        )
    )


def test_the_tokens_are_the_weights_share(staged):
    _, inputs, stage, rows, num_steps = staged
    tokens, labels = Counter(), []
    for step in range(num_steps):
        batch = rows.batch(step, global_rows=8)
        labels += batch.labels
        for label, used in zip(batch.labels, (batch.segments_GT > 0).sum(axis=1).tolist(), strict=True):
            tokens[label.partition(":")[0]] += used
    assert tokens["sample_chat"] / tokens.total() == pytest.approx(0.8, abs=0.005)
    assert tokens.total() / len(labels) == pytest.approx(tokens_per_row(inputs, stage), rel=0.01)
    assert num_steps == -(-2 * rows.num_rows // 8), "an epoch has as many rows as both together"


def test_a_run_resumes_with_the_same_rows_on_other_processes(staged):
    whole = batches(staged)
    rest = batches(staged, first=17)
    assert [info for info, _ in rest] == [info for info, _ in whole][17:]
    for (_, tensors), (_, again) in zip(whole[17:], rest, strict=True):
        assert tensors.keys() == again.keys()
        assert all(np.array_equal(tensors[name].numpy(), again[name].numpy()) for name in tensors)
    halves = [batches(staged, first=17, process=(rank, 2)) for rank in range(2)]
    for (info, _), *parts in zip(rest, *halves, strict=True):
        assert [label for part, _ in parts for label in part.labels] == info.labels


def test_the_log_says_what_is_drawn(staged):
    _, _, stage, rows, num_steps = staged
    text = weights_text(rows, stage, num_steps=num_steps)
    counts = dict(zip(stage.sources, rows.own.drawn(rows.total_for(2)), strict=True))
    assert text.startswith(f"20 % of the tokens from sample_text ({counts['sample_text']:,} of its ")
    share = counts["sample_chat"] / rows.own.counts[1]
    assert f"{share:.2f} times all)" in text
    assert share > 2
