"""Random valid rows, as packing makes them."""

import numpy as np

from tpu_experiments.data.rows import Rows, padding

FIELDS = ("ids_NT", "learn_NT", "positions_NT", "segments_NT")


def random_rows(num_rows: int, *, seq_len: int, vocab_size: int = 1000, pad_id: int = 3, seed: int = 0) -> Rows:
    """Rows of random segments of about a fifth of a row; some end in padding, some are nothing else."""
    generator = np.random.default_rng(seed)
    rows = padding(num_rows, seq_len=seq_len, pad_id=pad_id)
    for row in range(num_rows):
        column = segment = 0
        while column < seq_len and generator.random() < 0.9:
            length = min(int(generator.integers(1, seq_len // 5 + 2)), seq_len - column)
            segment += 1
            where = slice(column, column + length)
            rows.ids_NT[row, where] = generator.integers(0, vocab_size, length)
            rows.learn_NT[row, where] = generator.random(length) < 0.7
            rows.learn_NT[row, column] = False
            rows.positions_NT[row, where] = np.arange(length)
            rows.segments_NT[row, where] = segment
            column += length
    return rows


def assert_same(found: Rows, expected: Rows) -> None:
    """Equal values and types."""
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name, strict=True)
