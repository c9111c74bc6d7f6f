"""Losses of pairs: where they begin, which way round, packed or padded, split or whole; their measures; their rows."""

import math

import numpy as np
import pytest
import torch

from tests.config.composing import composed
from tests.objectives.preference_pairs import made_pairs, packed, swapped, with_reference
from tests.training.tiny import Run
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.objectives.preference import PreferenceConfig
from tpu_experiments.config.schema import PrepareConfig
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.preference import Preference
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.tasks.evaluate.subject import subject_of
from tpu_experiments.training.canary import halved

pytestmark = pytest.mark.xla
LOSSES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "simpo", "orpo")
TINY = ("model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager")
COUNT, SEQ_LEN = 8, 96


def objective_of(loss, **settings):
    return Preference(loss=loss, computing=Computing(chunk_tokens=32), **settings)


@pytest.fixture
def make_run(make_config):
    def make(objective, *words, model="qwen05b"):
        config = make_config(f"model={model}", *TINY, *words)
        return Run(config, EagerRuntime(config.hw), row_loss=objective.row_loss, count=objective.count)

    return make


def rows_of(run, objective, pairs, *, per_row=2, seq_len=SEQ_LEN):
    """Rows with the reference of the run as it is."""
    rows = packed(pairs, per_row=per_row, seq_len=seq_len)
    return with_reference(rows, objective.reference_values(run.model.module, run.parameters, rows))


def batch_of(rows, *, accumulation=1):
    cut = {name: tensor.reshape(accumulation, -1, tensor.shape[-1]) for name, tensor in rows.items()}
    return cut | {"lr": torch.tensor([1e-2])}


def moved(run, *, by=0.02):
    """Move the parameters, so that the model is not its reference any more."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in run.parameters.values():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def test_the_loss_begins_at_ln_2(make_run):
    objective = objective_of("sigmoid")
    run = make_run(objective)
    rows = rows_of(run, objective, made_pairs(0, count=COUNT, vocab=4000))
    sums, counts = objective.row_loss(run.model.module, run.parameters, rows)
    assert counts.tolist() == [2.0] * 4
    assert torch.equal(sums, torch.full((4,), 2 * math.log(2)))
    summary = objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist())
    assert summary.loss == pytest.approx(math.log(2), abs=1e-7)
    assert summary.num_predictions == COUNT
    assert {summary.measures[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")} == {0.0}


@pytest.mark.parametrize("loss", LOSSES)
def test_swapped_pairs_negate_the_margins(make_run, loss):
    objective = objective_of(loss)
    run, pairs = make_run(objective), made_pairs(0, count=COUNT, vocab=4000)
    both = [rows_of(run, objective, each) for each in (pairs, swapped(pairs))]
    moved(run)
    found = [objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist()) for rows in both]
    ours, theirs = (each.measures for each in found)
    assert abs(ours["rewards/margins"]) > 1e-3
    assert ours["rewards/margins"] == pytest.approx(-theirs["rewards/margins"], abs=2e-5)
    assert ours["rewards/accuracies"] == pytest.approx(1 - theirs["rewards/accuracies"])
    assert (ours["logps/chosen"], ours["chosen_tokens"]) == pytest.approx(
        (theirs["logps/rejected"], theirs["rejected_tokens"]), rel=1e-5
    )


@pytest.mark.parametrize(
    "settings", [{"loss": "sigmoid"}, {"loss": "ipo", "sft_weight": 0.5}, {"loss": "orpo"}], ids=str
)
def test_any_layout_of_the_rows_is_the_same_step(make_run, settings):
    """One pair a row as padded batches have them, two packed, and two in micro-batches."""
    pairs, found = made_pairs(0, count=COUNT, vocab=4000), []
    for per_row, accumulation in ((1, 1), (2, 1), (2, 4), (1, 2)):
        objective = objective_of(**settings)
        run = make_run(objective)
        batches = [
            batch_of(rows_of(run, objective, pairs, per_row=per_row), accumulation=accumulation) for _ in range(3)
        ]
        losses = run.losses(batches)
        assert abs(losses[0] - losses[2]) > 1e-3, "the steps do something"
        found.append((losses, run.parameters))
    for losses, parameters in found[1:]:
        assert losses == pytest.approx(found[0][0], abs=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, found[0][1][name], atol=2e-5, rtol=0)


def test_a_pair_with_an_empty_answer_and_padding_count_nothing(make_run):
    objective = objective_of("sigmoid", sft_weight=1.0)
    run = make_run(objective)
    rows = rows_of(run, objective, made_pairs(0, count=COUNT, vocab=4000))
    moved(run)
    whole = objective.row_loss(run.model.module, run.parameters, rows)
    rows["learn"][rows["segments"] == 4] = 0
    sums, counts = objective.row_loss(run.model.module, run.parameters, rows)
    assert counts[:, 0].tolist() == [1.0] * 4
    assert bool((counts[:, 1] < whole[1][:, 1]).all())
    assert bool(torch.isfinite(sums).all())
    empty = {name: torch.zeros_like(tensor) for name, tensor in rows.items()}
    assert objective.count(empty).tolist() == [0.0, 0.0]
    assert [each.abs().sum().item() for each in objective.row_loss(run.model.module, run.parameters, empty)] == [0, 0]
    assert math.isnan(objective.summary([0.0] * 10).loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_documents_have_the_loss_of_their_pair(make_run, loss):
    objective = objective_of(loss)
    run = make_run(objective)
    rows = rows_of(run, objective, made_pairs(0, count=COUNT, vocab=4000))
    moved(run)
    found = objective.document_scores(run.model.module, run.parameters, rows)
    pairs = objective.pairs(run.model.module, run.parameters, rows)
    assert found.weights_RT.sum(1).tolist() == [2.0] * 4
    at = torch.nonzero(found.weights_RT)
    last = rows["segments"].roll(-1, 1) != rows["segments"]
    segments = rows["segments"].roll(-1, 1)[at[:, 0], at[:, 1]]
    assert (segments % 2 == 0).all()
    assert last.roll(-1, 1)[at[:, 0], at[:, 1]].all(), "before the last token of the rejected answer"
    losses = objective.losses(pairs)[pairs.weights_RP > 0]
    torch.testing.assert_close(found.losses_RT[found.weights_RT > 0], losses)


def test_smoothing_of_labels_belongs_to_two_losses():
    for loss in LOSSES:
        problems = PreferenceConfig("dpo", loss=loss, label_smoothing=0.1).problems(PrepareConfig())
        assert len(problems) == (loss not in ("sigmoid", "robust"))


def test_betas_are_those_of_the_loss(make_config):
    assert [Preference(loss=loss).settings["beta"] for loss in LOSSES] == [0.1] * 5 + [2.0, 0.1]
    assert [
        make_config(f"objective={name}", "data=stories_pairs_ro", "curriculum=single").objective.loss
        for name in ("dpo", "ipo", "simpo", "orpo")
    ] == [
        "sigmoid",
        "ipo",
        "simpo",
        "orpo",
    ]


@pytest.mark.parametrize("word", ["curriculum.stages.main.learn=all", "loader.order=written"])
def test_what_it_cannot_compare_is_said(make_config, word):
    config = make_config("objective=dpo", "data=stories_pairs_ro", "curriculum=single", word)
    with pytest.raises(ConfigError, match=word.replace(".", r"\.")):
        Preference.require_fit(config, None)


def test_rows_of_the_check_of_gradients_are_pairs():
    """They are cut anywhere, and would have no pair."""
    segments = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 2, 2, 2, 2], [0] * 6], np.int32)
    found = halved(segments)
    assert found["segments"].tolist() == [[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 2], [0] * 6]
    assert found["positions"].tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0] * 6]
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}


def test_a_run_of_preferences_is_not_evaluated_as_texts_are(tmp_path):
    """Its documents are pairs, two texts each."""
    RunFolder(str(tmp_path), "pairs").create(composed("objective=dpo", "data=stories_pairs_ro", "curriculum=single"))
    with pytest.raises(ConfigError, match="task=evaluate scores next, masked or replaced tokens and labels"):
        subject_of(composed("task=evaluate", f"task.run={tmp_path}/pairs"))


def test_rates_are_zephyrs_where_none_is_set():
    words = ("model=qwen05b", "objective=dpo", "data=ultrafeedback_binarized")
    rates = [
        resolve_stages(composed(*words, lora, "task=plan", "hw=v5e8"))[0].lr for lora in ("lora.r=16", "lora=none")
    ]
    assert rates == pytest.approx([5e-6, 5e-7])


def test_a_run_of_preferences_is_exported_beside_the_data_of_the_command():
    """The run's objective comes with the command's data, which it never saw."""
    assert composed("objective=dpo", "data=[sample_chat]", "task=export")
    with pytest.raises(ConfigError, match="compares the answers of preference pairs"):
        composed("objective=dpo", "data=[sample_chat]")
