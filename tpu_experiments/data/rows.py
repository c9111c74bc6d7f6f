"""Token rows of one length, N rows of T tokens, in the layout of the training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RowSource(Protocol):
    """N rows of T tokens with random access: `Rows` in memory, `shards.RowStore` on disk or in a bucket."""

    @property
    def num_rows(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def take(self, index_M: NDArray[np.int64] | slice) -> "Rows":
        """Return the rows at `index_M`, shape (M, T), in that order."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Token rows with loss mask, positions and segments: four arrays of shape (N, T).

    `learn_NT` marks the tokens that are predicted, each from the tokens before it in its segment;
    a segment's first token has no context and is never marked. `positions_NT` count from 0
    in every segment. `segments_NT` number the pieces of a row 1, 2, ...; 0 is padding.
    """

    ids_NT: NDArray[np.int32]
    learn_NT: NDArray[np.bool_]
    positions_NT: NDArray[np.int32]
    segments_NT: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return self.ids_NT.shape[0]

    @property
    def seq_len(self) -> int:
        return self.ids_NT.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.segments_NT))

    @property
    def num_supervised(self) -> int:
        """Tokens that are predicted."""
        return int(np.count_nonzero(self.learn_NT))

    def take(self, index_M: NDArray[np.int64] | slice) -> "Rows":
        """Return the rows at `index_M`, shape (M, T)."""
        return Rows(
            self.ids_NT[index_M],
            self.learn_NT[index_M],
            self.positions_NT[index_M],
            self.segments_NT[index_M],
        )

    @staticmethod
    def concatenate(parts: Sequence["Rows"]) -> "Rows":
        """Concatenate rows of one length, in order; a single part is returned without a copy."""
        assert parts, "no rows to concatenate"
        if len(parts) == 1:
            return parts[0]
        return Rows(
            np.concatenate([part.ids_NT for part in parts]),
            np.concatenate([part.learn_NT for part in parts]),
            np.concatenate([part.positions_NT for part in parts]),
            np.concatenate([part.segments_NT for part in parts]),
        )


def padding(num_rows: int, *, seq_len: int, pad_id: int = 0) -> Rows:
    """Return `num_rows` rows of padding."""
    shape = (num_rows, seq_len)
    return Rows(
        np.full(shape, pad_id, np.int32),
        np.zeros(shape, np.bool_),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
    )


def empty(seq_len: int) -> Rows:
    """Return zero rows of length `seq_len`."""
    return padding(0, seq_len=seq_len)
