import numpy as np

from tests.data.row_samples import assert_same, random_rows
from tpu_experiments.data.rows import Rows, RowSource, empty, padding


def test_counts():
    rows = Rows(
        ids_NT=np.array([[1, 7, 8, 9, 9]], np.int32),
        learn_NT=np.array([[False, True, False, False, False]]),
        positions_NT=np.array([[0, 1, 2, 0, 0]], np.int32),
        segments_NT=np.array([[1, 1, 1, 0, 0]], np.int32),
    )
    assert (rows.num_rows, rows.seq_len, rows.num_tokens, rows.num_supervised) == (1, 5, 3, 1)


def test_types():
    for rows in (padding(2, seq_len=4), empty(4)):
        types = [rows.ids_NT.dtype, rows.learn_NT.dtype, rows.positions_NT.dtype, rows.segments_NT.dtype]
        assert types == [np.int32, np.bool_, np.int32, np.int32]


def test_concatenate_keeps_order():
    parts = [padding(2, seq_len=4, pad_id=5), empty(4), padding(1, seq_len=4, pad_id=6)]
    assert Rows.concatenate(parts).ids_NT[:, 0].tolist() == [5, 5, 6]
    assert Rows.concatenate(parts[:1]) is parts[0]


def test_empty():
    assert empty(8).ids_NT.shape == (0, 8)
    assert empty(8).num_tokens == 0


def test_rows_are_a_source_of_rows():
    rows = random_rows(5, seq_len=4)
    source: RowSource = rows
    assert (source.num_rows, source.seq_len) == (5, 4)
    picked = source.take(np.array([4, 0, 4]))
    assert_same(picked, Rows.concatenate([rows.take(slice(i, i + 1)) for i in (4, 0, 4)]))
    assert source.take(slice(3, 9)).num_rows == 2
