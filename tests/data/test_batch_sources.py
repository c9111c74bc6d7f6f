"""A stage's rows read from several sources, by processes that come and go: each row once, at its place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.row_samples import assert_same, random_rows
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.batches import Batch, StageRows, WrittenRows, fixed_batches, trimmed
from tpu_experiments.data.rows import Rows, padding

SEQ_LEN = 8
COUNTS = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)
ARRAYS = ("ids_GT", "learn_GT", "positions_GT", "segments_GT")


class Counted:
    """Rows that are only to be had by `take`, as those of a disk."""

    def __init__(self, rows):
        self._rows = rows
        self.num_rows, self.seq_len = rows.num_rows, rows.seq_len
        self.taken = []

    def take(self, index_M):
        self.taken.append(index_M)
        return self._rows.take(index_M)


def sources(counts):
    return [random_rows(count, seq_len=SEQ_LEN, seed=seed) for seed, count in enumerate(counts)]


def stage(parts, *, seed=0):
    return StageRows(parts, names=[f"s{i}" for i in range(len(parts))], seed=seed, stage_index=0)


def numbered(count):
    """Rows whose ids are their number."""
    ids_NT = np.repeat(np.arange(count, dtype=np.int32)[:, None], SEQ_LEN, axis=1)
    ones_NT = np.ones_like(ids_NT)
    return Rows(ids_NT, ones_NT > 1, ones_NT, ones_NT)


def numbers(batch):
    return batch.ids_GT[batch.segments_GT[:, 0] > 0, 0].tolist()


def equal(a, b):
    return a.labels == b.labels and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


@settings(deadline=None)
@given(COUNTS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_take_equals_the_concatenation(counts, seed, random):
    parts = sources(counts)
    whole = Rows.concatenate(parts)
    index_M = np.array([random.randrange(whole.num_rows) for _ in range(random.randrange(1, 20))], np.int64)
    assert_same(stage([Counted(part) for part in parts], seed=seed).take(index_M), whole.take(index_M))


def test_each_source_is_asked_once_for_a_batch_and_only_for_its_rows():
    parts = [Counted(part) for part in sources([5, 0, 9])]
    batch = stage(parts).batch(0, global_rows=6)
    assert [len(part.taken) for part in parts] == [1, 0, 1]
    assert sum(len(index_M) for part in parts for index_M in part.taken) == 6
    assert sorted(int(i) for i in parts[2].taken[0]) == sorted(
        int(label[3:]) for label in batch.labels if "s2" in label
    )


def test_late_epochs_do_not_make_the_order_of_the_first_again():
    rows = stage(sources([6]))
    orders = []
    original = rows.order
    rows.order = lambda epoch: orders.append(epoch) or original(epoch)
    rows.batch(25, global_rows=4)
    assert set(orders) == {16, 17}


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from([8, 16, 24]), st.integers(0, 2**32), st.data())
def test_a_run_that_resumes_with_half_the_processes_takes_the_next_rows(count, global_rows, seed, data):
    """8 processes up to some step, then 4: every row of the epochs once, in the order of a run of one process."""
    epochs = data.draw(st.sampled_from([1, 2, 0.5, 1.25]))
    rows = stage([numbered(count)], seed=seed)
    total, steps = rows.total_for(epochs), rows.steps_for(epochs, global_rows=global_rows)
    border = data.draw(st.integers(0, steps))

    def taken(first, last, world_size):
        seen = []
        for step in range(first, last):  # each process has its own rows object, as in a run
            shares = [
                stage([numbered(count)], seed=seed).batch(step, global_rows=global_rows, num_total=total)
                for _ in range(world_size)
            ]
            for rank, share in enumerate(shares):
                seen += numbers(share.slice_process(rank, world_size))
        return seen

    both = taken(0, border, 8) + taken(border, steps, 4)
    assert both == taken(0, steps, 1)
    assert both == [rows.order(position // rows.num_rows)[position % rows.num_rows] for position in range(total)]
    assert len(set(both[:count])) == min(count, total)


@settings(deadline=None)
@given(COUNTS, st.integers(1, 9), st.integers(0, 6))
def test_written_epochs_are_read_from_start_to_end(counts, global_rows, step):
    """The same rows in the same order give the same batches as a permutation of the same epochs."""
    shuffled = stage(sources(counts), seed=7)
    num_epochs = -(-(step + 1) * global_rows // shuffled.num_rows)
    origins = [shuffled.order(epoch).copy() for epoch in range(num_epochs)]
    epochs = [Counted(shuffled.take(order)) for order in origins]
    written = WrittenRows(
        epochs,
        origins=origins,
        names=shuffled.names,
        counts=counts,
        num_positions=(step + 1) * global_rows,
    )
    assert equal(written.batch(step, global_rows=global_rows), shuffled.batch(step, global_rows=global_rows))
    assert all(isinstance(index, slice) for epoch in epochs for index in epoch.taken)
    total = written.total_for(0.5)
    last = written.steps_for(0.5, global_rows=global_rows) - 1
    assert equal(
        written.batch(last, global_rows=global_rows, num_total=total),
        shuffled.batch(last, global_rows=global_rows, num_total=total),
    )


@pytest.mark.parametrize(("written", "positions", "needed"), [(0, 1, 1), (1, 11, 2), (2, 31, 4)])
def test_too_few_written_epochs_are_refused(written, positions, needed):
    settings_ = {"names": ["a"], "counts": [10], "num_positions": positions}
    with pytest.raises(ConfigError) as error:
        WrittenRows([numbered(10)] * written, origins=[np.arange(10)] * written, **settings_)
    assert str(error.value) == (
        f"loader.order=written; the stage needs {needed} epochs and {written} were written; set "
        f"prepare.written_epochs={needed}."
    )
    WrittenRows([numbered(10)] * needed, origins=[np.arange(10)] * needed, **settings_)


def batch_of_lengths(*lengths, seq_len=100):
    rows = padding(len(lengths), seq_len=seq_len)
    for row, length in enumerate(lengths):
        rows.ids_NT[row, :length] = 7
        rows.segments_NT[row, :length] = 1
    (batch,) = fixed_batches(rows, global_rows=len(lengths))
    return batch


@pytest.mark.parametrize(
    ("lengths", "multiple", "expected"),
    [((3, 17), 16, 32), ((16, 1), 16, 16), ((0, 0), 16, 16), ((100,), 16, 100), ((97, 3), 16, 100), ((5,), 1, 5)],
)
def test_trimmed_to_the_longest_row(lengths, multiple, expected):
    batch = batch_of_lengths(*lengths)
    short = trimmed(batch, multiple=multiple)
    assert isinstance(short, Batch)
    assert {getattr(short, name).shape for name in ARRAYS} == {(len(lengths), expected)}
    assert all(getattr(short, name).flags.c_contiguous for name in ARRAYS)
    assert all(np.array_equal(getattr(short, name), getattr(batch, name)[:, :expected]) for name in ARRAYS)
    assert (short.num_tokens, short.labels) == (batch.num_tokens, batch.labels)
