"""Rotary position embedding left to the attention kernel, for models of transformers that write it their own way.

transformers turns queries and keys in a tensor of their own before attention; a kernel reads them anyway and can turn
them there. While `computed` runs, `apply_rotary_pos_emb` of the model's file hands queries and keys on as they are,
and `take` gives the kernel's caller the cosines and sines."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tpu_experiments.runtime.kernels.attention import has_attention_kernel
from tpu_experiments.runtime.patches import replaced

log = logging.getLogger(__name__)
NAME = "apply_rotary_pos_emb"
Result = TypeVar("Result")
_waiting: list[tuple[Tensor, Tensor, Tensor]] = []
"""Queries, keys and rotation of the layer that is being computed."""
_turns_itself: set[type] = set()


class ChangedAfterTurning(Exception):
    """Raised where a model changes rotated queries or keys before attention and needs the rotation itself."""


def computed(module: nn.Module, compute: Callable[[], Result]) -> Result:
    """Run `compute()`, a forward pass of `module`, with RoPE left to the attention kernel where possible.

    Where the model turns out to change rotated queries or keys, `compute` runs again without this, as it does from then
    on for all modules of that class.
    """
    files = _files_that_turn(module) if has_attention_kernel() and type(module) not in _turns_itself else []
    if files:
        try:
            with _left_to_the_kernel(files):
                return compute()
        except ChangedAfterTurning:
            _turns_itself.add(type(module))
            log.info(
                "%s changes queries after applying RoPE: the model applies RoPE, not the attention kernel",
                type(module).__name__,
            )
    return compute()


def take(query: Tensor, key: Tensor) -> Tensor | None:
    """Return the rotation that `query` and `key` (B, N, T, D) still need: cosine and sine (2, B, T, D).

    None where they are rotated already.

    Raises:
        ChangedAfterTurning: they are not the tensors whose rotation was deferred.
    """
    if not _waiting:
        return None
    own_query, own_key, rotation = _waiting.pop()
    if own_query is not query or own_key is not key:
        raise ChangedAfterTurning
    return rotation


def _files_that_turn(module: nn.Module) -> list[ModuleType]:
    """Return the Python modules of the model whose `apply_rotary_pos_emb` is the usual one."""
    files = {type(part).__module__: sys.modules[type(part).__module__] for part in module.modules()}
    return [file for file in files.values() if hasattr(file, NAME) and _is_usual(getattr(file, NAME))]


def _is_usual(turn: Callable[..., Any]) -> bool:
    """Return whether a function computes x cos + rotate_half(x) sin, tested on some numbers.

    rotate_half maps (a, b) to (-b, a).
    """
    generator = torch.Generator().manual_seed(0)
    x, (cos, sin) = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(2, 1, 3, 8, generator=generator)
    first, second = x.chunk(2, -1)
    expected = x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    try:
        return all(torch.allclose(found, expected) for found in turn(x, x, cos, sin))
    except Exception:  # another signature or other shapes
        return False


@contextmanager
def _left_to_the_kernel(files: list[ModuleType]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(_waiting.clear)
        for file in files:
            stack.enter_context(replaced(file, NAME, _leaving(getattr(file, NAME))))
        yield


def _leaving(turn: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def leave(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if rest or more or query.ndim != 4 or cos.shape[-1] != query.shape[-1]:
            return turn(query, key, cos, sin, *rest, **more)
        rows = query.shape[0]
        _waiting.append((query, key, torch.stack([t.expand(rows, -1, -1) for t in (cos, sin)])))
        return query, key

    return leave
