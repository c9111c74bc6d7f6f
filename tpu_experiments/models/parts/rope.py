"""Rotary position embedding left to the attention kernel, for models of transformers that write it their own way.

transformers turns queries and keys in a tensor of their own before attention; a kernel reads them anyway and can turn
them there. While `with_rope_in_kernel` runs a model of `model.attention=flash`, `apply_rotary_pos_emb` of its file
returns queries and keys unchanged, and `pending_rotation` returns the cosines and sines to the kernel's caller. A
rotation that no kernel has fetched when the next is deferred, or when the forward pass ends, is an error: attention was
computed without positions."""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.kernels.attention import has_attention_kernel
from tpu_experiments.runtime.patches import patched_attribute

log = logging.getLogger(__name__)
NAME = "apply_rotary_pos_emb"
CHANGED = ("longrope", "dynamic")
"""Types of RoPE whose modules replace their frequencies, in place, according to the longest row that they are given."""
FLASH = "segment_kernel"
"""Key of parts/attention.py in transformers' attention table, whose function alone fetches what is deferred here. A
name containing `flash` makes transformers look for a CUDA package."""
Result = TypeVar("Result")
_deferred: list[tuple[Tensor, Tensor, Tensor]] = []
"""Queries, keys and rotation of the layer that is being computed."""
_applies_rope_itself: set[type] = set()


class ChangedAfterRotation(Exception):
    """Raised where a model changes rotated queries or keys before attention and needs the rotation itself."""


def row_limits(config: Any) -> dict[str, int]:
    """Return the lengths that rows may have, by the name of the config's value that sets them.

    LongRoPE computes all positions of a batch with other frequencies where one exceeds the length of pre-training, so
    that a short document's logits would depend on the others of its batch.
    """
    found = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            found["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
    return {name: int(limit) for name, limit in found.items() if limit is not None}


def with_rope_in_kernel(module: nn.Module, compute: Callable[[], Result]) -> Result:
    """Run `compute()`, a forward pass of `module`, with RoPE left to the attention kernel where possible.

    Where the model turns out to change rotated queries or keys, `compute` runs again without this, as it does from then
    on for all modules of that class.

    Raises:
        ConfigError: a layer deferred its rotation and computed attention without it.
    """
    files = (
        _modules_with_standard_rope(module)
        if has_attention_kernel() and type(module) not in _applies_rope_itself
        else []
    )

    def computed() -> Result:
        with frequencies_kept(module):
            return compute()

    if files:
        try:
            with _rope_deferred(files):
                result = computed()
                _require_none_pending(type(module).__name__)
                return result
        except ChangedAfterRotation:
            _applies_rope_itself.add(type(module))
            log.info(
                "%s changes queries after applying RoPE: the model applies RoPE, not the attention kernel",
                type(module).__name__,
            )
    return computed()


@contextmanager
def frequencies_kept(module: nn.Module) -> Iterator[None]:
    """Give RoPE that changes its frequencies (`CHANGED`) copies of them inside the block.

    Otherwise the module keeps a value of the trace. One that the body of a loop leaves behind, which several
    micro-batches or tokens are, ends the process in torch_xla 2.9 (segmentation fault).
    """
    parts = [part for part in module.modules() if any(kind in str(getattr(part, "rope_type", "")) for kind in CHANGED)]
    before = [dict(part._buffers) for part in parts]
    for part in parts:
        part._buffers.update({name: None if b is None else b.clone() for name, b in part._buffers.items()})
    try:
        yield
    finally:
        for part, buffers in zip(parts, before, strict=True):
            part._buffers.clear()
            part._buffers.update(buffers)


def pending_rotation(query: Tensor, key: Tensor) -> Tensor | None:
    """Return the rotation that `query` and `key` (B, N, T, D) still need: cosine and sine (2, B, T, D).

    None where they are rotated already.

    Raises:
        ChangedAfterRotation: they are not the tensors whose rotation was deferred.
    """
    if not _deferred:
        return None
    own_query, own_key, rotation = _deferred.pop()
    if own_query is not query or own_key is not key:
        raise ChangedAfterRotation
    return rotation


def _modules_with_standard_rope(module: nn.Module) -> list[ModuleType]:
    """Return the Python modules of the model's flash attention whose `apply_rotary_pos_emb` is the usual one."""
    names, others = set(), set()
    for part in module.modules():
        names.add(type(part).__module__)
        if getattr(getattr(part, "config", None), "_attn_implementation", FLASH) != FLASH:
            others.add(type(part).__module__)
    files = [sys.modules[name] for name in sorted(names - others)]
    return [file for file in files if hasattr(file, NAME) and _is_standard_rope(getattr(file, NAME))]


def _require_none_pending(model: str) -> None:
    if _deferred:
        raise ConfigError(
            f"model.attention=flash; {model} rotates queries and keys (RoPE) in a layer whose attention does not call "
            "the kernel, which would compute it without positions; use model.attention=sdpa or eager."
        )


@functools.cache
def _is_standard_rope(apply_rope: Callable[..., Any]) -> bool:
    """Return whether a function computes x cos + rotate_half(x) sin, tested on some numbers.

    rotate_half maps (a, b) to (-b, a).
    """
    generator = torch.Generator().manual_seed(0)
    x, (cos, sin) = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(2, 1, 3, 8, generator=generator)
    first, second = x.chunk(2, -1)
    expected = x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    try:
        return all(torch.allclose(found, expected) for found in apply_rope(x, x, cos, sin))
    except Exception:  # another signature or other shapes
        return False


@contextmanager
def _rope_deferred(files: list[ModuleType]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(_deferred.clear)
        for file in files:
            stack.enter_context(patched_attribute(file, NAME, _deferring(getattr(file, NAME), file=file.__name__)))
        yield


def _deferring(apply_rope: Callable[..., tuple[Tensor, Tensor]], *, file: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def defer(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        is_usual = not rest and more in ({}, {"unsqueeze_dim": 1})  # ModernBERT states the default
        is_usual &= query.dtype == key.dtype and cos.dtype in (query.dtype, torch.float32)  # float32: OLMo
        if not is_usual or query.ndim != 4 or cos.shape[-1] != query.shape[-1]:
            return apply_rope(query, key, cos, sin, *rest, **more)
        _require_none_pending(file.rpartition(".")[2].removeprefix("modeling_"))
        rows = query.shape[0]
        _deferred.append((query, key, torch.stack([t.expand(rows, -1, -1) for t in (cos, sin)])))
        return query, key

    return defer
