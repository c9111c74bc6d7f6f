import numpy as np
import pytest

from tpu_experiments.rewards.advantages import ADDED, advantages

NAN = float("nan")
REWARDS_N = np.array([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0, NAN, 1.0, 4.0, NAN, NAN, 3.0, NAN, NAN])
"""Four groups of four: with spread, without, with two rewards, with one."""


def test_a_group_is_compared_with_its_mean() -> None:
    found = advantages(REWARDS_N, samples=4, scale="none")
    expected = [0.5, -0.5, -0.5, 0.5, *[0] * 4, 0, -1.5, 1.5, 0, *[0] * 4]
    assert found.values_N.tolist() == expected
    assert found.values_N.dtype == np.float32
    assert (found.num_groups, found.num_without_spread) == (4, 2)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_are_divided_by_a_standard_deviation(scale: str) -> None:
    plain = advantages(REWARDS_N, samples=4, scale="none").values_N
    spread_N = np.full(16, np.std(REWARDS_N[~np.isnan(REWARDS_N)], ddof=1))
    if scale == "group":
        spread_N = np.repeat([np.std([1, 0, 0, 1], ddof=1), 1, np.std([1, 4], ddof=1), 1], 4)
    found = advantages(REWARDS_N, samples=4, scale=scale).values_N
    np.testing.assert_allclose(found, plain / (spread_N + ADDED), rtol=1e-6)


def test_the_baseline_of_rloo_is_the_mean_of_the_others() -> None:
    found = advantages(REWARDS_N, samples=4, scale="none", leaves_one_out=True)
    third = 1 / 3
    expected = [2 * third, -2 * third, -2 * third, 2 * third, *[0] * 4, 0, -3, 3, 0, *[0] * 4]
    np.testing.assert_allclose(found.values_N, expected, rtol=1e-6)
    assert found.num_without_spread == 2
    scaled = advantages(REWARDS_N, samples=4, scale="batch", leaves_one_out=True).values_N
    known = np.array(expected)[[0, 1, 2, 3, 4, 5, 6, 7, 9, 10]]
    np.testing.assert_allclose(scaled[:8], ((known - known.mean()) / (known.std(ddof=1) + ADDED))[:8], rtol=1e-5)


def test_a_batch_without_rewards_teaches_nothing() -> None:
    for scale in ("group", "batch", "none"):
        found = advantages(np.full(8, np.nan), samples=4, scale=scale)
        assert found.values_N.tolist() == [0.0] * 8
        assert found.num_without_spread == 2
