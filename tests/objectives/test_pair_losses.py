"""The formulas of the losses of pairs, by numbers in float64 that are computed here from their papers."""

import math

import pytest
import torch

from tpu_experiments.objectives.preference import Pairs, Preference

CHOSEN, REJECTED = (-2.0, -0.5, 4.0), (-20.0, -19.5, 9.0)
"""Log-probability of an answer by the model and by the reference, and its tokens."""
RATIOS = (CHOSEN[0] - CHOSEN[1], REJECTED[0] - REJECTED[1])
MEANS = (RATIOS[0] / CHOSEN[2], RATIOS[1] / REJECTED[2])
ALONE = (CHOSEN[0] / CHOSEN[2], REJECTED[0] / REJECTED[2])
ODDS = tuple(math.exp(mean) / (1 - math.exp(mean)) for mean in ALONE)


def log_s(x):
    """Logarithm of the sigmoid."""
    return -math.log1p(math.exp(-x))


RIGHT = -0.8 * log_s(0.3 * (RATIOS[0] - RATIOS[1]))
WRONG = -0.2 * log_s(-0.3 * (RATIOS[0] - RATIOS[1]))
"""The two sides of a pair of beta 0.3 that is the wrong way round with a probability of 0.2."""


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"loss": "sigmoid"}, -log_s(0.1 * (RATIOS[0] - RATIOS[1]))),
        ({"loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.2}, RIGHT + WRONG),
        ({"loss": "robust", "beta": 0.3, "label_smoothing": 0.2}, (RIGHT - WRONG) / 0.6),
        ({"loss": "hinge", "beta": 0.5}, 1 - 0.5 * (RATIOS[0] - RATIOS[1])),
        ({"loss": "hinge", "beta": -2.0}, 0.0),
        ({"loss": "ipo", "beta": 0.3}, (MEANS[0] - MEANS[1] - 1 / 0.6) ** 2),
        ({"loss": "sigmoid_norm", "beta": 0.3}, -log_s(0.3 * (MEANS[0] - MEANS[1]))),
        ({"loss": "simpo", "gamma_beta_ratio": 0.4}, -log_s(2 * (ALONE[0] - ALONE[1]) - 0.8)),
        ({"loss": "orpo", "beta": 0.3}, -0.3 * log_s(math.log(ODDS[0]) - math.log(ODDS[1]))),
    ],
)
def test_the_loss_of_a_pair_is_that_of_its_formula(settings, wanted):
    """Of answers of different lengths, of which the chosen one became less likely by more."""
    objective = Preference(**settings)
    columns = [torch.tensor([[each]]) for each in zip(CHOSEN, REJECTED, strict=True)]
    if not objective.has_reference:
        columns[1] = torch.zeros_like(columns[1])
    (loss,) = objective.losses(Pairs(*columns, torch.ones(1, 1))).flatten().tolist()
    assert loss == pytest.approx(wanted, rel=1e-6)
