import itertools

import numpy as np
import pytest

from tests.data.store.mixing import measure_mixing

SIZES = (12_000, 5_000, 3_000)
ROWS = sum(SIZES)


def test_the_old_order_is_the_worst():
    mixing = measure_mixing(np.arange(ROWS), sizes=SIZES, batch_rows=100, near_rows=1)
    assert mixing.displacement == 0
    assert mixing.rank_correlation == mixing.source_correlation == 1
    assert mixing.near_pairs == pytest.approx(ROWS / 2)  # all of the pairs instead of 2 / N of them
    # 199 of 200 old neighbours share a batch, except the 199 batch borders, two of which part sources.
    together = (ROWS - 1 - 199) / (ROWS - 3)
    assert mixing.neighbours_together == pytest.approx(together / (99 / (ROWS - 1)))
    # Every batch is of one source: the variance is w^2 p (1 - p).
    assert mixing.source_spread == pytest.approx(np.sqrt(100 * (ROWS - 1) / (ROWS - 100)))


def test_a_uniform_permutation_is_near_chance():
    mixing = measure_mixing(np.random.default_rng(0).permutation(ROWS), sizes=SIZES, batch_rows=100, near_rows=500)
    assert mixing.displacement == pytest.approx(1, abs=0.02)
    assert mixing.rank_correlation == pytest.approx(0, abs=4 / np.sqrt(ROWS))
    assert mixing.source_correlation == pytest.approx(0, abs=4 / np.sqrt(ROWS))
    assert mixing.near_pairs == pytest.approx(1, abs=0.15)
    assert mixing.source_spread == pytest.approx(1, abs=0.15)
    assert mixing.neighbours_together == pytest.approx(1, abs=0.4)


def test_the_expectations_are_exact():
    """The mean over all permutations of 6 rows, in batches of 2 and 4 of which the second leaves rows over."""
    sizes = (4, 2)
    orders = [np.array(order) for order in itertools.permutations(range(6))]
    for batch_rows, near_rows in ((2, 1), (4, 2), (2, 9)):
        found = [measure_mixing(o, sizes=sizes, batch_rows=batch_rows, near_rows=near_rows) for o in orders]
        assert np.mean([m.displacement for m in found]) == pytest.approx(1)
        assert np.mean([m.rank_correlation for m in found]) == pytest.approx(0)
        assert np.mean([m.source_correlation for m in found]) == pytest.approx(0)
        assert np.mean([m.near_pairs for m in found]) == pytest.approx(1)
        assert np.mean([m.source_spread**2 for m in found]) == pytest.approx(1)
        assert np.mean([m.neighbours_together for m in found]) == pytest.approx(1)


def test_each_fault_shows_in_its_own_number():
    sources = np.split(np.arange(ROWS), np.cumsum(SIZES)[:-1])
    rng = np.random.default_rng(1)
    apart = np.concatenate([rng.permutation(source) for source in sources])
    mixing = measure_mixing(apart, sizes=SIZES, batch_rows=100, near_rows=100)
    assert mixing.source_correlation == pytest.approx(0, abs=0.03)
    assert mixing.source_spread > 9

    slots = rng.permutation(np.repeat(np.arange(3), SIZES))
    riffled = np.empty(ROWS, np.int64)
    for number, source in enumerate(sources):
        riffled[slots == number] = source
    mixing = measure_mixing(riffled, sizes=SIZES, batch_rows=100, near_rows=100)
    assert mixing.source_correlation == 1
    assert mixing.source_spread == pytest.approx(1, abs=0.15)
    assert mixing.neighbours_together > 50


def test_a_perfectly_even_mix_has_no_spread():
    order = np.concatenate([np.arange(100), np.arange(100, 200)]).reshape(2, 100).T.ravel()
    assert measure_mixing(order, sizes=(100, 100), batch_rows=10, near_rows=5).source_spread == 0


@pytest.mark.parametrize(
    ("sizes", "batch_rows"), [((), 4), ((0,), 4), ((1,), 4), ((0, 1, 0), 1), ((2,), 1), ((3, 0), 8)]
)
def test_too_few_rows_give_none(sizes, batch_rows):
    mixing = measure_mixing(np.arange(sum(sizes)), sizes=sizes, batch_rows=batch_rows, near_rows=2)
    assert mixing.source_spread is None
    assert mixing.neighbours_together is None
    assert (mixing.displacement is None) == (sum(sizes) < 2)


def test_what_is_not_a_permutation_is_refused():
    for wrong in ([0, 1, 1], [0, 1], [0, 1, 3], [0, 1, -1], [0, 1, 2, 2]):
        with pytest.raises(ValueError, match="of 3 rows"):
            measure_mixing(np.array(wrong), sizes=(2, 1), near_rows=1)
