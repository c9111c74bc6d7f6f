"""Token rows of one length, N rows of T tokens, in the layout of the training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

TOKEN_ARRAYS = ("ids", "learn", "positions", "segments")
"""Arrays that all rows have, by the names of their tensors in the training step."""


@dataclass(frozen=True)
class Array:
    """A further array of rows, which an objective declares (objectives/base.py); 0 at padding."""

    name: str
    dtype: str
    """NumPy's name of it: `int32` or `float32`; on disk alone also `uint16` and `uint32`."""
    per: Literal["row", "token"]
    width: int = 0
    """Values of each row or token; 0: a single one, without a dimension of its own."""

    def shape(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the array's shape for rows whose tokens have this shape, T last."""
        own = (self.width,) if self.width else ()
        return (*(tokens if self.per == "token" else tokens[:-1]), *own)


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
    """Token rows with loss mask, positions and segments: four arrays of shape (N, T), and further ones.

    `learn_NT` marks the tokens that are predicted, each from the tokens before it in its segment;
    a segment's first token has no context and is never marked. `positions_NT` count from 0
    in every segment. `segments_NT` number the pieces of a row 1, 2, ...; 0 is padding.
    """

    ids_NT: NDArray[np.int32]
    learn_NT: NDArray[np.bool_]
    positions_NT: NDArray[np.int32]
    segments_NT: NDArray[np.int32]
    more: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays (N, T), (N, T, K) or (N,) by name (`Array`)."""

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
        more = {name: array[index_M] for name, array in self.more.items()}
        ids, learn, positions, segments = (self.array(name)[index_M] for name in TOKEN_ARRAYS)
        return Rows(ids, learn, positions, segments, more)

    def array(self, name: str) -> NDArray[Any]:
        """Return an array by its name, that of a further one or one of `TOKEN_ARRAYS`."""
        found: NDArray[Any] = getattr(self, f"{name}_NT") if name in TOKEN_ARRAYS else self.more[name]
        return found

    def having(self, **more: NDArray[Any]) -> "Rows":
        """Return the rows with these further arrays, by name."""
        return replace(self, more={**self.more, **more})

    @staticmethod
    def concatenate(parts: Sequence["Rows"]) -> "Rows":
        """Concatenate rows of one length, in order; a single part is returned without a copy.

        A further array that a part lacks is 0 in its rows.
        """
        assert parts, "no rows to concatenate"
        if len(parts) == 1:
            return parts[0]
        like = {name: array for part in parts for name, array in part.more.items()}
        zeros = {name: np.zeros((1, *array.shape[1:]), array.dtype) for name, array in like.items()}
        more = {
            name: np.concatenate([p.more[name] if name in p.more else zero.repeat(p.num_rows, 0) for p in parts])
            for name, zero in zeros.items()
        }
        ids, learn, positions, segments = (np.concatenate([p.array(name) for p in parts]) for name in TOKEN_ARRAYS)
        return Rows(ids, learn, positions, segments, more)


@dataclass(frozen=True)
class RowsOver:
    """Rows over others, as many and as long; a subclass takes them with more, and is a `RowSource`."""

    rows: RowSource

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def seq_len(self) -> int:
        return self.rows.seq_len


def padding(num_rows: int, *, seq_len: int, pad_id: int = 0, like: Mapping[str, NDArray[Any]] | None = None) -> Rows:
    """Return `num_rows` rows of padding, with further arrays of tokens of the types of those in `like`."""
    shape = (num_rows, seq_len)
    return Rows(
        np.full(shape, pad_id, np.int32),
        np.zeros(shape, np.bool_),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        {name: np.zeros(shape, array.dtype) for name, array in (like or {}).items()},
    )


def empty(seq_len: int) -> Rows:
    """Return zero rows of length `seq_len`."""
    return padding(0, seq_len=seq_len)
