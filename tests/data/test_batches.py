import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_experiments.data.batches import StageRows, fixed_batches, one_batch, with_all_tokens_learnt
from tpu_experiments.data.rows import Rows


def rows_of(first, count, *, seq_len=4):
    """Rows whose ids are all the row's own number."""
    ids_NT = np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], seq_len, axis=1)
    positions_NT = np.tile(np.arange(seq_len, dtype=np.int32), (count, 1))
    ones_NT = np.ones_like(ids_NT)
    return Rows(ids_NT, positions_NT > 0, positions_NT, ones_NT)


def stage(*counts, seed=0, stage_index=0):
    firsts = np.cumsum([0, *counts])
    parts = [rows_of(int(first), n) for first, n in zip(firsts, counts, strict=False)]
    names = [f"s{i}" for i in range(len(counts))]
    return StageRows(parts, names=names, seed=seed, stage_index=stage_index)


def seen(batch):
    return batch.ids_GT[batch.segments_GT[:, 0] > 0, 0].tolist()


def test_order_is_a_permutation_that_the_key_decides():
    orders = {
        (seed, index, epoch): tuple(stage(50, seed=seed, stage_index=index).order(epoch).tolist())
        for seed, index, epoch in itertools.product(range(2), repeat=3)
    }
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 8
    assert stage(50).order(1).tolist() == list(orders[0, 0, 1])


def test_order_does_not_change_between_versions():
    assert stage(8, seed=3, stage_index=1).order(2).tolist() == [3, 4, 0, 1, 5, 6, 2, 7]


def test_order_of_old_epochs_comes_back():
    rows = stage(20)
    first = rows.order(0).tolist()
    for epoch in range(1, 5):
        rows.order(epoch)
    assert rows.order(0).tolist() == first


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
def test_batches_flow_through_the_epochs(first, second, global_rows, step):
    rows = stage(first, second)
    stream = np.concatenate([rows.order(epoch) for epoch in range(120)])
    batch = rows.batch(step, global_rows=global_rows, num_total=None)
    start = step * global_rows
    assert seen(batch) == stream[start : start + global_rows].tolist()
    again = stage(first, second).batch(step, global_rows=global_rows, num_total=None)
    assert np.array_equal(again.ids_GT, batch.ids_GT)
    assert again.labels == batch.labels


def test_last_batch_of_an_epoch_is_padded():
    rows = stage(7)
    steps = rows.steps_for(1, global_rows=4)
    assert (steps, rows.total_for(1)) == (2, 7)
    batches = [rows.batch(step, global_rows=4, num_total=7) for step in range(steps)]
    assert sorted(seen(batches[0]) + seen(batches[1])) == list(range(7))
    last = batches[1]
    assert last.labels[-1] == "-"
    assert not last.segments_GT[-1].any()
    assert not last.learn_GT[-1].any()
    assert (last.num_tokens, last.num_supervised) == (12, 9)
    beyond = rows.batch(5, global_rows=4, num_total=7)
    assert beyond.labels == ["-"] * 4
    assert beyond.num_tokens == 0


def test_labels_name_source_and_row():
    rows = stage(3, 2)
    batch = rows.batch(0, global_rows=5, num_total=None)
    expected = {0: "s0:0", 1: "s0:1", 2: "s0:2", 3: "s1:0", 4: "s1:1"}
    assert batch.labels == [expected[row] for row in seen(batch)]


def test_arrays_are_int32():
    batch = stage(3).batch(0, global_rows=2, num_total=None)
    arrays = [batch.ids_GT, batch.learn_GT, batch.positions_GT, batch.segments_GT]
    assert {array.dtype.name for array in arrays} == {"int32"}
    assert {array.shape for array in arrays} == {(2, 4)}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_processes_share_the_batch(world_size):
    batch = stage(13).batch(1, global_rows=8, num_total=13)
    parts = [batch.slice_process(rank, world_size) for rank in range(world_size)]
    for name in ("ids_GT", "learn_GT", "positions_GT", "segments_GT"):
        union = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(union, getattr(batch, name))
    assert [label for part in parts for label in part.labels] == batch.labels
    assert sum(part.num_tokens for part in parts) == batch.num_tokens


@pytest.mark.parametrize(
    ("epochs", "count", "global_rows", "steps"),
    [
        (1, 8, 4, 2),
        (1.0, 9, 4, 3),
        (2, 9, 4, 5),
        (0.5, 9, 4, 2),
        (0.07, 100, 7, 1),
        (0.1, 30, 3, 1),
    ],
)
def test_steps_for(epochs, count, global_rows, steps):
    rows = stage(count)
    assert rows.steps_for(epochs, global_rows=global_rows) == steps
    assert -(-rows.total_for(epochs) // global_rows) == steps


def test_fixed_batches_cover_all_rows_in_order():
    batches = list(fixed_batches(rows_of(0, 7), global_rows=3))
    assert [seen(batch) for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[2].ids_GT.shape == (3, 4)
    assert batches[2].labels == ["held_out:6", "-", "-"]
    assert list(fixed_batches(rows_of(0, 0), global_rows=3)) == []


def test_all_tokens_but_the_first_of_a_document_and_padding_can_be_learnt():
    positions_NT, segments_NT = np.array([[0, 1, 2, 0, 1, 0]]), np.array([[1, 1, 1, 2, 2, 0]])
    rows = Rows(*(array.astype(np.int32) for array in (segments_NT, 0 * segments_NT, positions_NT, segments_NT)))
    found = with_all_tokens_learnt(one_batch(rows, labels=["a:0"], global_rows=2))
    assert found.learn_GT.tolist() == [[0, 1, 1, 0, 1, 0], [0] * 6]
