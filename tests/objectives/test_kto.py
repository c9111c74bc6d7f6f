"""KTO: the formula, the mismatched answers, what the loss does not depend on, its rows and their audit."""

import numpy as np
import pytest
import torch

from tests.objectives.preference_pairs import labelled, made_pairs, packed, with_reference
from tests.objectives.test_preference import TINY, batch_of, make_run, moved, stepped_together  # noqa: F401
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.kto import Kto, mismatched

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
