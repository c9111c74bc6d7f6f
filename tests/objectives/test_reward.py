"""Reward models: the loss of a pair, the token that is scored, which way round, packed or padded, split or whole."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.objectives.preference_pairs import made_pairs, packed, padded, swapped, with_margins
from tests.objectives.test_preference import batch_of, make_run, moved  # noqa: F401
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.objectives.base import model_source
from tpu_experiments.objectives.preference import by_segment
from tpu_experiments.objectives.reward import SUMS, Reward

pytestmark = pytest.mark.xla
WORDS = ("objective=reward", "data=stories_pairs_ro", "curriculum=single")
COUNT, SEQ_LEN = 8, 96


def rows_of(pairs, *, per_row=2):
    rows = packed(pairs, per_row=per_row, seq_len=SEQ_LEN)
    del rows["reference"]
    return rows


@pytest.fixture
def make_scored(make_run):  # noqa: F811
    def make(objective, *words, model="qwen05b"):
        run = make_run(objective, *WORDS, *words, model=model)
        moved(run)
        return run

    return make


def summary_of(run, objective, rows):
    return objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist())


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_of_a_pair_is_that_of_its_formula(center):
    scores = torch.tensor([[[1.5, -0.25], [-3.0, 2.0]]])
    wanted = [math.log1p(math.exp(r - c)) + center * (c + r) ** 2 for c, r in scores[0].tolist()]
    assert Reward(center_rewards_coefficient=center).losses(scores)[0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_margin_is_subtracted_from_the_difference_of_scores():
    scores, margins = torch.tensor([[[1.5, -0.25], [-3.0, 2.0]]]), torch.tensor([[2.0, -0.5]])
    wanted = [math.log1p(math.exp(r - c + m)) for (c, r), m in zip(scores[0].tolist(), [2.0, -0.5], strict=True)]
    assert Reward(margin=True).losses(scores, margins)[0].tolist() == pytest.approx(wanted, rel=1e-6)


def scores_of(run, objective, rows):
    """Scores (R, S) of the segments of the rows."""
    return objective.reference_values(run.model.module, run.parameters, rows)


def by_transformers(run, texts, *, padding):
    """Scores of texts in one padded batch, by the class of transformers."""
    config = run.model.source.config
    config.pad_token_id = padding
    module = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    module.load_state_dict({**run.model.module.state_dict(), **run.parameters})
    with torch.no_grad():
        return module(padded(texts, padding), attention_mask=padded([[1] * len(text) for text in texts], 0)).logits[
            :, 0
        ]


@pytest.mark.parametrize("model", ["mistral7b", "qwen05b", "gemma3_270m"])
@pytest.mark.parametrize("end", [None, 0], ids=["text", "padding"])
def test_scores_are_those_of_transformers(make_scored, model, end):
    """Of every text of packed rows as of a padded batch; also where texts end with the token that pads."""
    objective = Reward()
    run = make_scored(objective, "lora=none", model=model)
    pairs = made_pairs(0, count=COUNT, vocab=4000)
    if end is not None:
        pairs = [(p, [*c, end], [*r, end]) for p, c, r in pairs]
    texts = [prompt + answer for prompt, *answers in pairs for answer in answers]
    run.model.module.config.pad_token_id = 0
    found = scores_of(run, objective, rows_of(pairs))
    expected = by_transformers(run, texts, padding=0)
    assert expected.std() > 0.01
    torch.testing.assert_close(found[:, :4].flatten(), expected, atol=1e-5, rtol=0)
    assert not found[:, 4:].any(), "places of no text"


def test_swapped_pairs_negate_the_margins(make_scored):
    objective, pairs = Reward(), made_pairs(0, count=COUNT, vocab=4000)
    run = make_scored(objective)
    ours, theirs = (summary_of(run, objective, rows_of(each)).measures for each in (pairs, swapped(pairs)))
    assert abs(ours["rewards/margins"]) > 1e-3
    assert ours["rewards/margins"] == pytest.approx(-theirs["rewards/margins"], abs=1e-6)
    assert ours["rewards/accuracies"] == pytest.approx(1 - theirs["rewards/accuracies"])
    assert (ours["rewards/chosen"], ours["chosen_tokens"]) == pytest.approx(
        (theirs["rewards/rejected"], theirs["rejected_tokens"]), rel=1e-5
    )


def test_steps_raise_the_scores_of_chosen_answers_alone(make_scored):
    objective = Reward()
    run, rows = make_scored(objective), rows_of(made_pairs(0, count=COUNT, vocab=4000))
    before = summary_of(run, objective, rows)
    run.losses([batch_of(rows)] * 8)
    after = summary_of(run, objective, rows)
    assert after.loss < before.loss - 0.2
    assert after.measures["rewards/margins"] > before.measures["rewards/margins"] + 0.2
    assert after.measures["rewards/accuracies"] == 1


def test_any_layout_of_the_rows_is_the_same_step(make_scored):
    """One pair a row as padded batches have them, two packed, and two in micro-batches."""
    pairs, found = made_pairs(0, count=COUNT, vocab=4000), []
    for per_row, accumulation in ((1, 1), (2, 1), (2, 4)):
        objective = Reward(center_rewards_coefficient=0.1)
        run = make_scored(objective)
        losses = run.losses([batch_of(rows_of(pairs, per_row=per_row), accumulation=accumulation)] * 3)
        assert losses[0] - losses[2] > 1e-3, "the steps do something"
        found.append((losses, run.parameters))
    assert "score.weight" in found[0][1]
    for losses, parameters in found[1:]:
        assert losses == pytest.approx(found[0][0], abs=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, found[0][1][name], atol=2e-5, rtol=0)


def test_a_pair_with_an_empty_answer_and_padding_count_nothing(make_scored):
    objective = Reward(center_rewards_coefficient=0.1)
    run, rows = make_scored(objective), rows_of(made_pairs(0, count=COUNT, vocab=4000))
    rows["learn"][rows["segments"] == 4] = 0
    sums, counts = objective.row_loss(run.model.module, run.parameters, rows)
    assert counts.tolist() == [1.0] * 4 == [objective.count(rows).item() / 4] * 4
    assert bool(torch.isfinite(sums).all())
    empty = {name: torch.zeros_like(tensor) for name, tensor in rows.items()}
    assert objective.count(empty).item() == 0
    assert [each.sum().item() for each in objective.row_loss(run.model.module, run.parameters, empty)] == [0, 0]
    assert math.isnan(objective.summary([0.0] * len(SUMS)).loss)


@pytest.mark.parametrize("margin", [False, True])
def test_measures_of_documents_and_of_steps_are_those_of_their_rows(make_scored, margin):
    """A document for itself, on the host, rows of two pairs, on the device, and what a split step reports."""
    objective = Reward(center_rewards_coefficient=0.1, margin=margin)
    run, rows = make_scored(objective), rows_of(made_pairs(0, count=COUNT, vocab=4000))
    if margin:
        without = summary_of(run, Reward(center_rewards_coefficient=0.1), rows)
        rows |= with_margins(rows, torch.linspace(0.5, 4.0, COUNT))
        assert summary_of(run, objective, rows).loss > without.loss + 1
        assert summary_of(run, objective, rows).measures == without.measures
    lengths = by_segment(rows["segments"], rows["learn"].float())
    values = scores_of(run, objective, rows)
    documents = [each[:, :4].double().numpy() for each in (values, values, lengths)]
    found = objective.measures(objective.document_sums(*documents).sum((0, 1)))
    expected = summary_of(run, objective, rows)
    run.step.reported = objective.reported_loss
    output = run.program(batch_of(rows, accumulation=4))
    reported = objective.measures(output.reported.tolist())
    assert abs(expected.measures["rewards/margins"]) > 1e-3
    for measures in (found, reported):
        assert measures.pop("loss") == pytest.approx(expected.loss, rel=1e-5)
        assert measures == pytest.approx(expected.measures, rel=1e-5, abs=1e-6)
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-5)


def test_an_encoder_is_refused(make_config):
    config = make_config("model=modernbert_base", *WORDS, "model.size=tiny")
    with pytest.raises(ConfigError, match="an encoder, and the objective scores texts by a decoder"):
        model_source(config)
