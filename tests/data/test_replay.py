"""A share of replayed rows is exact at every step, and both kinds of rows go through their epochs in order."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_batches import stage
from tpu_experiments.data.replay import ReplayedRows

SHARES = st.decimals("0.01", "0.99", places=2).map(Fraction)


def mixed(share, *, own=(7, 4), others=(5,)):
    return ReplayedRows(stage(*own), stage(*others, stage_index=3), Fraction(share))


@settings(deadline=None)
@given(SHARES, st.integers(1, 9), st.integers(1, 12))
def test_the_share_is_exact_at_every_step(share, global_rows, num_steps):
    rows = mixed(share)
    own, replayed = [], []
    for step in range(num_steps):
        batch = rows.batch(step, global_rows=global_rows)
        count = rows.num_replayed((step + 1) * global_rows) - rows.num_replayed(step * global_rows)
        own += batch.labels[: global_rows - count]
        replayed += batch.labels[global_rows - count :]
        assert len(replayed) == (step + 1) * global_rows * share // 1
    plain, others = rows.own, rows.replayed
    assert own == plain.between(0, len(own))[1]
    assert replayed == others.between(0, len(replayed))[1]


@settings(deadline=None)
@given(SHARES, st.integers(1, 9), st.integers(1, 40).map(lambda n: n / 10))
def test_epochs_count_the_stages_own_rows(share, global_rows, epochs):
    """Every own row of the epochs comes up, none after them, and a step fewer would lack some."""
    rows = mixed(share)
    total, steps = rows.total_for(epochs), rows.steps_for(epochs, global_rows=global_rows)

    def own_in(num_steps):
        batches = [rows.batch(step, global_rows=global_rows, num_total=total) for step in range(num_steps)]
        labels = [label for batch in batches for label in batch.labels if label != "-"]
        return len(labels) - rows.num_replayed(num_steps * global_rows)

    assert own_in(steps) == total
    assert steps == 1 or own_in(steps - 1) < total


@pytest.mark.parametrize("share", ["0.25", "0.5"])
def test_what_is_learnt_and_the_tokens_come_along(share):
    rows = mixed(share)
    batch = rows.batch(0, global_rows=8)
    own, _ = rows.own.between(0, 8 - rows.num_replayed(8))
    assert (batch.ids_GT[: own.num_rows] == own.ids_NT).all()
    assert batch.num_rows == 8
