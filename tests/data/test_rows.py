import numpy as np

from tpu_experiments.data.pack import pack
from tpu_experiments.data.rows import Rows, empty, padding
from tpu_experiments.data.tokenize import Tokens


def test_counts_and_types():
    rows = pack([Tokens([1, 7, 8], [False, True, True], "a")], seq_len=5, pad_id=9)
    assert (rows.num_rows, rows.seq_len, rows.num_tokens, rows.num_supervised) == (1, 5, 3, 2)
    assert rows.ids_NT.tolist() == [[1, 7, 8, 9, 9]]
    assert rows.segments_NT.tolist() == [[1, 1, 1, 0, 0]]
    types = [
        rows.ids_NT.dtype,
        rows.learn_NT.dtype,
        rows.positions_NT.dtype,
        rows.segments_NT.dtype,
    ]
    assert types == [np.int32, np.bool_, np.int32, np.int32]


def test_concatenate_keeps_order():
    parts = [padding(2, seq_len=4, pad_id=5), empty(4), padding(1, seq_len=4, pad_id=6)]
    assert Rows.concatenate(parts).ids_NT[:, 0].tolist() == [5, 5, 6]
    assert Rows.concatenate(parts[:1]) is parts[0]


def test_empty():
    assert empty(8).ids_NT.shape == (0, 8)
    assert empty(8).num_tokens == 0
