"""The loss of labels and its measures, against torch on each text alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.models.encoders import ENCODERS, source_of
from tests.models.test_classification import LABELS, labelled_rows, module_of
from tpu_experiments.objectives.classify import Classify

pytestmark = pytest.mark.xla
OF_TEXT = [2, 1, 1]
"""Labels of the three texts, of which the module with its random weights knows one."""
TARGETS = [2, 1, 1, 1, 2, 1]


def relabelled_rows():
    """The rows with labels of which some are predicted."""
    rows, texts, order = labelled_rows()
    is_label = rows["learn"] > 0
    rows["label"][is_label] = torch.tensor(OF_TEXT, dtype=torch.int32)[rows["label"][is_label].long()]
    return rows, texts, [number for row in order for number in row]


@pytest.fixture(scope="module")
def module():
    return module_of(source_of(ENCODERS[0], labels=LABELS))


@pytest.fixture(scope="module")
def logits(module):
    """Logits of the six texts of the rows, each by transformers alone."""
    _, texts, order = relabelled_rows()
    with torch.no_grad():
        alone = torch.cat([module(input_ids=ids[None]).logits for ids in texts])
    return alone[torch.tensor(order)]


def test_loss_is_the_mean_over_texts(module, logits):
    rows, _, _ = relabelled_rows()
    objective = Classify(labels=LABELS)
    with torch.no_grad():
        sums, counts = objective.row_loss(module, dict(module.named_parameters()), rows)
    assert objective.count(rows) == 6
    assert counts.tolist() == [3, 3]
    expected = F.cross_entropy(logits, torch.tensor(TARGETS))
    torch.testing.assert_close(sums.sum() / counts.sum(), expected, atol=1e-5, rtol=1e-5)


def test_gradient_is_that_of_texts_alone(module):
    rows, texts, order = relabelled_rows()
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    sums, counts = Classify(labels=LABELS).row_loss(module, parameters, rows)
    ours = dict(zip(parameters, torch.autograd.grad(sums.sum() / counts.sum(), list(parameters.values())), strict=True))
    module.zero_grad()
    with torch.enable_grad():
        alone = torch.cat([module(input_ids=texts[n][None]).logits for n in order])
        F.cross_entropy(alone, torch.tensor(TARGETS)).backward()
    for name, parameter in module.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4 * scale + 1e-7, rtol=1e-3)


def test_measures_are_those_of_the_predictions(module, logits):
    rows, _, _ = relabelled_rows()
    objective, parameters = Classify(labels=LABELS), dict(module.named_parameters())
    sums = objective.sums(module, parameters, rows)
    summary = objective.summary((2 * sums).tolist())
    guessed, true = logits.argmax(-1).numpy(), np.array(TARGETS)
    scores = []
    for label in range(3):
        either = (guessed == label).sum() + (true == label).sum()
        scores.append(2 * ((guessed == label) & (true == label)).sum() / either)
    assert summary.num_predictions == 12
    assert summary.loss == pytest.approx(F.cross_entropy(logits, torch.tensor(TARGETS)).item(), abs=1e-5)
    assert summary.measures == pytest.approx(
        {"accuracy": (guessed == true).mean(), "macro_f1": np.mean(scores), "majority": 2 / 3}
    )
    assert 0 < summary.measures["accuracy"] < 1


def test_nothing_is_measured_without_texts():
    summary = Classify(labels=LABELS).summary([0.0] * 10)
    assert np.isnan(summary.loss)
    assert (summary.num_predictions, summary.measures) == (0, {})


def test_predictions_stand_before_each_label(module, logits):
    rows, _, _ = relabelled_rows()
    found = Classify(labels=LABELS).document_scores(module, dict(module.named_parameters()), rows)
    at = (rows["learn"] > 0).roll(-1, 1)
    assert torch.equal(found.weights_RT > 0, at)
    assert found.hits_RT[at].tolist() == logits.argmax(-1).tolist()
    losses = F.cross_entropy(logits, torch.tensor(TARGETS), reduction="none")
    torch.testing.assert_close(found.losses_RT[at], losses, atol=1e-5, rtol=1e-5)
