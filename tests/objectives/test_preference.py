"""Losses of pairs: where they begin, which way round, packed or padded, split or whole; their measures; their rows."""

import math
from dataclasses import replace

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
from tpu_experiments.models.adapters.lora import scale_of
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.objectives.base import Computing, model_source, on_host
from tpu_experiments.objectives.preference import SUMS, Preference, by_segment
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.tasks.evaluate.subject import subject_of
from tpu_experiments.training.canary import halved
from tpu_experiments.training.pack import PackedStep

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
    assert math.isnan(objective.summary([0.0] * len(SUMS)).loss)


@pytest.mark.parametrize(
    "settings", [*({"loss": loss} for loss in LOSSES), {"loss": "sigmoid", "sft_weight": 0.5}], ids=str
)
def test_measures_of_documents_are_those_of_their_rows(make_run, settings):
    """A document for itself, on the host, and rows of two pairs, on the device."""
    objective = objective_of(**settings)
    run = make_run(objective)
    rows = rows_of(run, objective, made_pairs(0, count=COUNT, vocab=4000))
    reference = objective.reference_values(run.model.module, run.parameters, rows)
    moved(run)
    values = objective.reference_values(run.model.module, run.parameters, rows)
    lengths = by_segment(rows["segments"], rows["learn"].float())
    sums = objective.document_sums(*(each[:, :6].double().numpy() for each in (values, reference, lengths)))
    assert sums.shape == (COUNT // 2, 3, len(SUMS)), "the third place is empty"
    sums = sums[:, :2].reshape(COUNT, -1)
    expected = objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist())
    found = objective.measures(sums.sum(0))
    assert abs(expected.measures["rewards/margins"]) > 1e-3
    assert found.pop("loss") == pytest.approx(expected.loss, rel=1e-4)
    assert found == pytest.approx(expected.measures, rel=1e-4, abs=1e-5)
    assert ("kl" in found) == objective.has_reference


@pytest.mark.parametrize("settings", [{"loss": "sigmoid"}, {"loss": "orpo"}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_reports_the_measures_of_its_rows_and_is_otherwise_the_same(make_run, settings, accumulation):
    found = []
    for is_reported in (False, True):
        objective = objective_of(**settings)
        run = make_run(objective)
        rows = rows_of(run, objective, made_pairs(0, count=COUNT, vocab=4000))
        moved(run)
        expected = objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist())
        run.step.reported = objective.reported_loss if is_reported else None
        output = run.program(batch_of(rows, accumulation=accumulation))
        found.append((output, run.parameters))
    (plain, before), (output, after) = found
    assert plain.reported is None
    assert torch.equal(output.loss, plain.loss)
    assert torch.equal(output.row_losses_AR, plain.row_losses_AR)
    assert all(torch.equal(after[name], before[name]) for name in before)
    measures = objective.measures(output.reported.tolist())
    assert measures.pop("loss") == pytest.approx(expected.loss, rel=1e-5) == pytest.approx(output.loss.item(), rel=1e-5)
    assert measures == pytest.approx(expected.measures, rel=1e-5, abs=1e-6)


def stepped_together(config, runs, batches):
    """What one program of two runs returns for each."""
    common = replace(config.lora, alpha=float(config.lora.r))
    module = build_model(model_source(config), lora=common, seed=0, place=on_host, is_packed=True).module.train()
    given = {"scales": torch.full((2,), scale_of(config.lora)), "thresholds": torch.zeros(2, dtype=torch.int32)}
    step = PackedStep(module, [run.step for run in runs])
    return step([run.parameters for run in runs], [run.state for run in runs], batches, **given)


@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
def test_points_of_a_pack_report_the_measures_of_their_own_rows(make_run, make_config, sft_weight):
    """Each has a beta, pairs and parameters of its own."""
    runs, batches, expected = [], [], []
    for number, beta in enumerate((0.1, 0.7)):
        objective = objective_of("sigmoid", beta=beta, sft_weight=sft_weight)
        run = make_run(objective)
        rows = rows_of(run, objective, made_pairs(number, count=COUNT, vocab=4000))
        moved(run, by=0.01 * (number + 1))
        run.step.reported = objective.reported_loss
        rows |= {name: torch.full((len(rows["ids"]),), value) for name, value in objective.settings.items()}
        batch = {name: tensor.reshape(2, -1, *tensor.shape[1:]) for name, tensor in rows.items()}
        batches.append(batch | {"lr": torch.tensor([1e-2])})
        runs.append(run)
        expected.append((objective, *run.step(run.parameters, run.state, batches[-1])))
    found = stepped_together(make_config("model=qwen05b", *TINY), runs, batches)
    for (parameters, _, output), (objective, alone, _, own) in zip(found, expected, strict=True):
        measures = objective.measures(output.reported.tolist())
        assert measures == pytest.approx(objective.measures(own.reported.tolist()), rel=1e-5, abs=1e-6)
        assert abs(measures["rewards/margins"]) > 1e-3
        torch.testing.assert_close(output.row_losses_AR, own.row_losses_AR, atol=1e-5, rtol=1e-5)
        for name, value in alone.items():
            torch.testing.assert_close(parameters[name], value, atol=2e-5, rtol=0)


def test_kl_is_the_mean_log_ratio_of_the_answers_tokens_and_a_tie_counts_half():
    rows = np.array([[[-4.0, -6.0, -1.0, -9.0]], [[-5.0, -5.0, -1.0, -6.0]], [[2.0, 4.0, 1.0, 3.0]]])
    found = Preference(beta=0.5).measures(Preference(beta=0.5).document_sums(*rows).sum((0, 1)))
    assert found["kl"] == pytest.approx((1 - 1 + 0 - 3) / 10)
    assert found["rewards/margins"] == pytest.approx(0.5 * (2 + 3) / 2)
    tied = Preference().document_sums(*rows[[0, 0, 2]]).sum((0, 1))
    assert Preference().measures(tied)["rewards/accuracies"] == 0.5


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


def test_what_it_can_compare_passes(make_config):
    words = ("data=stories_pairs_ro", "curriculum=single")
    for own in (("objective=dpo",), ("objective=simpo",), ("objective=simpo", "loader.order=written")):
        Preference.require_fit(make_config(*words, *own), None)


def test_rows_of_the_check_of_gradients_are_pairs():
    """They are cut anywhere, and would have no pair."""
    segments = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 2, 2, 2, 2], [0] * 6], np.int32)
    found = halved(segments)
    assert found["segments"].tolist() == [[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 2], [0] * 6]
    assert found["positions"].tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0] * 6]
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}


def test_pairs_and_texts_are_scored_apart(tmp_path):
    """Texts that are selected for a run of preferences are scored as texts; pairs belong to such runs."""
    pairs, texts = "data=stories_pairs_ro", "data=stories_ro"
    for name, words in {"pairs": ("objective=dpo", pairs), "texts": (texts,)}.items():
        RunFolder(str(tmp_path), name).create(composed("curriculum=single", "lora=none", *words))
        (tmp_path / name / "result.json").write_text('{"status": "finished"}')

    def found(run, *words):
        words = ("curriculum=single", "task.adapter=none", f"task.run={tmp_path}/{run}", *words)
        words = ("task=evaluate", "task.data=selected", *words)
        return subject_of(composed(*words)).config.objective

    assert found("pairs", pairs).name == "dpo"
    assert found("pairs", texts).name == "next_token"
    with pytest.raises(ConfigError, match="pairs and texts are scored apart; select one"):
        found("pairs", "data=[stories_pairs_ro,sample_text]")
    with pytest.raises(ConfigError, match=r"stories_pairs_ro\.kind=preference, with the run's objective=next_token"):
        found("texts", pairs)


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
