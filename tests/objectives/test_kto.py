"""KTO: the formula, the mismatched answers, what the loss does not depend on, its rows and their audit."""

import numpy as np
import pytest
import torch

from tests.objectives.preference_pairs import labelled, made_pairs, packed, with_reference
from tests.objectives.test_preference import TINY, batch_of, make_run, moved, stepped_together  # noqa: F401
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.kto import Kto, mismatched
from tpu_experiments.objectives.preference import by_segment

pytestmark = pytest.mark.xla
SEQ_LEN, VOCAB = 96, 4000


def objective_of(**settings):
    return Kto(computing=Computing(chunk_tokens=32), **settings)


def rows_of(run, objective, examples, *, per_row=4):
    """Rows with the reference of the run as it is."""
    rows = packed(examples, per_row=per_row, seq_len=SEQ_LEN)
    return with_reference(rows, objective.reference_values(run.model.module, run.parameters, rows))


def texts(rows):
    """Of every segment with something to learn, its tokens, those to learn, and its number."""
    found = []
    for ids, learn, positions, segments in zip(
        *(rows[k] for k in ("ids", "learn", "positions", "segments")), strict=True
    ):
        own = []
        for number in range(1, int(segments.max()) + 1):
            at = segments == number
            assert positions[at].tolist() == list(range(int(at.sum())))
            if learn[at].any():
                own.append((number, ids[at].tolist(), ids[at & (learn > 0)].tolist()))
        used = segments[segments > 0]
        assert (used.diff() >= 0).all()
        assert not segments[len(used) :].any()
        found.append(own)
    return found


def test_every_prompt_gets_the_answer_before_it():
    pairs = made_pairs(0, count=9, vocab=VOCAB)
    rows = packed(labelled(pairs), per_row=4, seq_len=SEQ_LEN)
    first, second, third = texts(mismatched(rows))
    answers = [chosen for _, chosen, _ in pairs]
    assert [(ids, learn) for _, ids, learn in first + second] == [
        (pairs[i][0] + answers[j], answers[j]) for i, j in enumerate((3, 0, 1, 2, 7, 4, 5, 6))
    ]
    assert [number for number, *_ in first] == [1, 4, 5, 8], "odd places are good"
    assert third == [], "a single answer has no other"


def test_an_answer_of_a_pair_never_meets_its_own_prompt():
    pairs = made_pairs(0, count=7, vocab=VOCAB)
    first, second, third = texts(mismatched(packed(pairs, per_row=3, seq_len=128)))
    for row, numbers in ((first, (2, 0, 1)), (second, (5, 3, 4))):
        wanted = [(i, j, side) for i, j in zip(sorted(numbers), numbers, strict=True) for side in (1, 2)]
        assert [ids for _, ids, _ in row] == [pairs[i][0] + pairs[j][side] for i, j, side in wanted]
    assert third == []


def test_the_loss_is_the_formula(make_run):  # noqa: F811
    """In float64, with log-probabilities of one answer a row and the mismatched ones written out."""
    objective = objective_of(beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    run, examples = make_run(objective), labelled(made_pairs(0, count=8, vocab=VOCAB))
    moved(run, by=0.05)
    rows = rows_of(run, objective, examples)
    begin, _ = objective.row_loss(run.model.module, run.parameters, rows)
    torch.testing.assert_close(begin, torch.full((2,), 2 * 0.5 * (1.5 + 0.7)), msg="r and z are 0")

    def alone(prompts_and_answers):
        single = packed([(p, a, []) for p, a in prompts_and_answers], per_row=1, seq_len=SEQ_LEN)
        return objective.reference_values(run.model.module, run.parameters, single)[:, 0, 0].double()

    own = [(p, c or r) for p, c, r in examples]
    turned = [(own[i][0], own[i // 4 * 4 + (i - 1) % 4][1]) for i in range(8)]
    before = alone(own), alone(turned)
    zs = []
    for by in (-0.05, 0.1, 0.1):
        moved(run, by=by)
        r, kl = alone(own) - before[0], (alone(turned) - before[1]).view(2, 4)
        z = kl.mean(1).clamp(min=0).repeat_interleave(4)
        good = torch.arange(8) % 2 == 0
        wanted = torch.where(good, 1.5 * (1 - torch.sigmoid(0.5 * (r - z))), 0.7 * (1 - torch.sigmoid(0.5 * (z - r))))
        sums, counts = objective.row_loss(run.model.module, run.parameters, rows)
        torch.testing.assert_close(sums.double(), wanted.view(2, 4).sum(1), atol=2e-5, rtol=0)
        assert counts.tolist() == [4.0, 4.0]
        found = objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist())
        assert found.loss == pytest.approx(float(wanted.mean()), abs=1e-5)
        assert found.measures["kl"] == pytest.approx(float(z.mean()), abs=1e-4)
        assert found.measures["rewards/chosen"] == pytest.approx(float(0.5 * r[good].mean()), abs=1e-4)
        assert found.measures["rewards/accuracies"] == float((torch.where(good, r - z, z - r) > 0).double().mean())
        zs += z.tolist()
    assert min(zs) == 0 < 0.01 < max(zs), "rows with a z of 0, and with more"


@pytest.mark.parametrize("are_pairs", [False, True], ids=["single", "pairs"])
def test_any_split_into_micro_batches_is_the_same_step(make_run, are_pairs):  # noqa: F811
    pairs, found = made_pairs(0, count=8, vocab=VOCAB), []
    for accumulation in (1, 2, 4):
        objective = objective_of()
        run = make_run(objective)
        rows = rows_of(run, objective, pairs if are_pairs else labelled(pairs), per_row=2)
        losses = run.losses([batch_of(rows, accumulation=accumulation)] * 3)
        assert losses[0] == pytest.approx(0.5, abs=1e-6)
        assert losses[2] < 0.49
        found.append((losses, run.parameters))
    for losses, parameters in found[1:]:
        assert losses == pytest.approx(found[0][0], abs=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, found[0][1][name], atol=2e-5, rtol=0)


def test_padding_counts_nothing(make_run):  # noqa: F811
    objective = objective_of()
    run = make_run(objective)
    rows = rows_of(run, objective, labelled(made_pairs(0, count=4, vocab=VOCAB)))
    empty = {name: torch.zeros_like(tensor) for name, tensor in rows.items()}
    assert objective.count(empty).item() == 0
    assert [each.sum().item() for each in objective.row_loss(run.model.module, run.parameters, empty)] == [0, 0]
    assert np.isnan(objective.summary([0.0] * 11).loss)


@pytest.mark.parametrize("kind", ["single", "pairs"])
def test_measures_of_documents_are_those_of_their_rows(make_run, kind):  # noqa: F811
    """A document for itself, on the host, and rows, on the device; a row with a single answer has a z of 0."""
    objective = objective_of(desirable_weight=1.5, beta=0.5)
    run, pairs = make_run(objective), made_pairs(0, count=9, vocab=VOCAB)
    rows = rows_of(run, objective, pairs if kind == "pairs" else labelled(pairs), per_row=2)
    reference = objective.reference_values(run.model.module, run.parameters, rows)
    moved(run, by=0.05)
    values = objective.reference_values(run.model.module, run.parameters, rows)
    lengths = by_segment(rows["segments"], rows["learn"].float())
    reference, values, lengths = (each[:, :6].double() for each in (reference, values, lengths))
    sums = objective.document_sums(values.numpy(), reference.numpy(), lengths.numpy())
    assert sums.shape[:2] == (5, 3)
    assert not sums[:, 2].any(), "an empty place"
    expected = objective.summary(objective.sums(run.model.module, run.parameters, rows).tolist())
    found = objective.measures(sums.sum((0, 1)))
    assert found.pop("loss") == pytest.approx(expected.loss, rel=1e-4)
    assert 0 < found.pop("rewards/auc") < 1
    assert found == pytest.approx(expected.measures, rel=1e-4, abs=1e-5)
    assert expected.measures["kl"] > 0.01


def test_measures_of_answers_of_one_kind_are_those_that_are_known():
    """All of them good: no bad answer's reward, no margin, and no area under a curve; resampled sums are a row each."""
    values = np.array([[[-3.0, 0], [0, 0], [-9, 0], [0, 0]]])
    lengths = np.array([[2.0, 0, 2, 0]])
    sums = Kto(beta=1.0).document_sums(values, np.zeros_like(values), lengths)[0]
    found = Kto(beta=1.0).measures([*np.stack([sums.sum(0), sums[0]]).T])
    assert found["rewards/chosen"].tolist() == [-6, -3]
    assert {name for name, value in found.items() if not np.isfinite(value).any()} == {
        *("rewards/rejected", "logps/rejected", "rejected_tokens", "rewards/margins", "rewards/auc")
    }
    tied = Kto().measures(Kto().document_sums(np.zeros((1, 4, 2)), np.zeros((1, 4, 2)), np.ones((1, 4))).sum((0, 1)))
    assert (tied["rewards/auc"], tied["rewards/accuracies"], tied["loss"]) == (0.5, 0.5, 0.5)


def test_the_area_under_the_curve_counts_how_often_a_good_answer_has_the_higher_reward():
    """Rewards of good answers 3, 1 and -0.2, of bad ones 2, 0.5 and -0.4; then one pair is tied."""
    rewards = np.array([[3, 2, 1, 0.5, -0.2, -0.4]])
    values = np.stack([rewards / 0.1, np.zeros_like(rewards)], -1)
    sums = Kto(beta=0.1).document_sums(values, np.zeros_like(values), np.ones((1, 6)))
    assert Kto().measures(sums.sum((0, 1)))["rewards/auc"] == pytest.approx((3 + 2 + 1) / 9)
    values[0, 2] = values[0, 3]
    sums = Kto(beta=0.1).document_sums(values, np.zeros_like(values), np.ones((1, 6)))
    assert Kto().measures(sums.sum((0, 1)))["rewards/auc"] == pytest.approx((3 + 1.5 + 1) / 9)


def test_points_of_a_pack_step_as_alone(make_run, make_config):  # noqa: F811
    """Each has answers, mismatched ones and parameters of its own."""
    runs, batches, expected = [], [], []
    for number in range(2):
        objective = objective_of()
        run = make_run(objective)
        rows = rows_of(run, objective, labelled(made_pairs(number, count=16, vocab=VOCAB)))
        moved(run, by=0.01 * (number + 1))
        batches.append(batch_of(rows, accumulation=2))
        runs.append(run)
        expected.append(run.step(run.parameters, run.state, batches[-1]))
    found = stepped_together(make_config("model=qwen05b", *TINY), runs, batches)
    assert abs(expected[0][2].loss - expected[1][2].loss) > 1e-4
    for (parameters, _, output), (alone, _, own) in zip(found, expected, strict=True):
        torch.testing.assert_close(output.row_losses_AR, own.row_losses_AR, atol=1e-6, rtol=1e-5)
        for name, value in alone.items():
            torch.testing.assert_close(parameters[name], value, atol=2e-5, rtol=0)
