"""Several adapters of one base in one program: each has rows of its own in a batch.

The adapters of a module's linear layers are stacked, (K, r, in) and (K, out, r), with ranks below the largest filled up
with zeros inside the program; parameters, gradients and optimizer state outside of it have their own rank. A product
runs adapter by adapter over that adapter's rows (one batched product), so that nothing of one reaches another, not
even a NaN. (One product with all adapters side by side, whose foreign columns are multiplied by 0, computes every row
with every adapter, and 0 times NaN is NaN.) The rows of a batch lie in the order (D, K, R): of each of the D devices
that rows are split over, R rows of each of the K adapters, so that grouping moves no row to another device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_experiments.models.parts.float32_gradients import grouped_product
from tpu_experiments.runtime.stacked import ADAPTER_PARTS

Named = Mapping[str, Tensor]
A, B, *_ = ADAPTER_PARTS


_shards: ContextVar[int] = ContextVar("shards", default=1)
"""D of the step that runs, set by `split_over`."""


@contextmanager
def split_over(num_shards: int) -> Iterator[None]:
    """Let rows inside the block be split over D devices."""
    token = _shards.set(num_shards)
    try:
        yield
    finally:
        _shards.reset(token)


def by_adapter(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each adapter's tokens by its own matrix: (..., in), (K, out, in) to (..., out).

    Args:
        x: the leading dimensions are the tokens of D K R rows in order, D as of `split_over`.
    """
    num, num_shards = len(weight), _shards.get()
    groups = x.reshape(num_shards, num, -1, x.shape[-1]).transpose(0, 1)
    out = grouped_product(groups.reshape(num, -1, x.shape[-1]), weight)
    return out.reshape(num, num_shards, -1, out.shape[-1]).transpose(0, 1).reshape(*x.shape[:-1], out.shape[-1])


def joined_rows(tensors: Sequence[Tensor], *, num_shards: int) -> Tensor:
    """Join the rows of K adapters, (A, D R, ...) each, as (A, D K R, ...)."""
    parts = [t.reshape(t.shape[0], num_shards, -1, *t.shape[2:]) for t in tensors]
    joined = torch.stack(parts, dim=2)
    return joined.reshape(joined.shape[0], -1, *tensors[0].shape[2:])


def rows_of_each(tensor: Tensor, *, num: int, num_shards: int) -> list[Tensor]:
    """Return each adapter's part, (D R, ...), of something that the rows of `joined_rows` have, (D K R, ...)."""
    parts = tensor.reshape(num_shards, num, -1, *tensor.shape[1:])
    return [parts[:, k].reshape(-1, *tensor.shape[1:]) for k in range(num)]


def packed(parameters: Sequence[Named], scales: Tensor) -> dict[str, Tensor]:
    """Stack adapters, (K, r, in) and (K, out, r), those of folded layers (L, K, ...).

    Args:
        parameters: A and B of every adapter; they may differ in rank.
        scales: of each adapter's B A, (K,); A is multiplied by it.
    """
    found = {}
    for name in parameters[0]:
        own = [each[name] for each in parameters]
        if name.endswith(A):
            rank = max(t.shape[-2] for t in own)
            own = [F.pad(t * scale, (0, 0, 0, rank - t.shape[-2])) for t, scale in zip(own, scales, strict=True)]
        else:
            rank = max(t.shape[-1] for t in own)
            own = [F.pad(t, (0, rank - t.shape[-1])) for t in own]
        found[name] = torch.stack(own, dim=own[0].ndim - 2)
    return found


class Chosen(Mapping[str, Tensor]):
    """View of one adapter among several, which a number on the device chooses: one program serves them all.

    Its values are those of `packed` for that adapter, computed from the adapters' own when one is read.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        *,
        number: Tensor,
        scales: Callable[[], Tensor],
        held: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Take the adapters, of which there may be more later.

        Args:
            number: int32 (1,), of the chosen one.
            scales: returns those of `packed`.
            held: returns the device's own tensors behind `parameters`.
        """
        self._parameters, self._scales, self._number, self._held = parameters, scales, number, held

    def __getitem__(self, name: str) -> Tensor:
        stack = packed([{name: each[name]} for each in self._parameters], self._scales())[name]
        dim = stack.ndim - 3
        return torch.index_select(stack, dim, self._number.long()).squeeze(dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters[0])

    def __len__(self) -> int:
        return len(self._parameters[0])

    @property
    def held(self) -> dict[str, Tensor]:
        """Return the tensors that the values are computed from, by name."""
        return {**self._held(), "scales": self._scales(), "number": self._number}
