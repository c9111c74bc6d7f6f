"""Attention kernels that a device brings along, as two operators of torch: the only door between models and kernels.

A runtime installs its kernel; a model asks whether there is one and calls `attention`. The operators are opaque to
torch, so that AOTAutograd keeps them whole, forward and backward. Tensors are as projections make them and take them,
all heads of a token beside each other: a kernel that reads them so needs no copy in another order. Legend: B rows,
H query heads, K key/value heads, T tokens, D head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How scores are made of q and k, beside causality and segments."""

    scale: float
    """Products are multiplied by it."""
    window: int | None = None
    """A token sees keys at a distance below it; None is all before it."""
    soft_cap: float | None = None
    """c: a score becomes c tanh(score / c); None leaves it."""


class AttentionKernel(Protocol):
    """What a device brings: causal attention inside segments, of q and k that are turned first (RoPE)."""

    def forward(self, *tensors: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output (B, T, H D) and log-sum-exp of the scores (B, H, T) in float32; `tensors` are q (B, T, H D), k and
        v (B, T, K D), segments (B, T) int32 and rotation (2, B, T, D), or (0,) where nothing is turned."""
        ...

    def backward(self, *saved: Tensor, grad: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from that of the output; `saved` is what went into forward and what came out."""
        ...


_installed: AttentionKernel | None = None


def install_attention_kernel(kernel: AttentionKernel | None) -> None:
    """From now on `attention` calls this kernel; None where the device has none."""
    global _installed
    _installed = kernel


@contextmanager
def without_attention_kernel() -> Iterator[None]:
    """Inside, models compute attention in plain operations, as for tensors of the host."""
    kernel = _installed
    install_attention_kernel(None)
    try:
        yield
    finally:
        install_attention_kernel(kernel)


def has_attention_kernel() -> bool:
    """Whether `attention` can be called in this process."""
    return _installed is not None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, segments: Tensor, rotation: Tensor | None, heads: int, scores: Scores
) -> Tensor:
    """Output (B, T, H D) of q (B, T, H D) on k and v (B, T, K D), differentiable.

    Args:
        segments: (B, T) int32; a token sees its own segment only.
        rotation: cosine and sine (2, B, T, D) by which every head of q and k is turned (RoPE, arXiv 2104.09864, in
            the halves of Hugging Face); None where nothing is turned. It gets no gradient.
    """
    turned = q.new_empty(0) if rotation is None else rotation
    out, _ = _forward(q, k, v, segments, turned, heads, scores.scale, scores.window, scores.soft_cap)
    return out


def _kernel() -> AttentionKernel:
    assert _installed is not None, "a runtime installs the kernel before a model is called"
    return _installed


@torch.library.custom_op("tpu_experiments::attention_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    rotation: Tensor,
    heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    return _kernel().forward(q, k, v, segments, rotation, heads=heads, scores=Scores(scale, window, soft_cap))


@torch.library.custom_op("tpu_experiments::attention_backward", mutates_args=())
def _backward(
    saved: list[Tensor], grad: Tensor, heads: int, scale: float, window: int | None, soft_cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _kernel().backward(*saved, grad=grad, heads=heads, scores=Scores(scale, window, soft_cap))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, rotation: Tensor, heads: int, *_: Any) -> Any:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], heads, q.shape[1]), dtype=torch.float32)


@_backward.register_fake
def _(saved: list[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = saved
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.scale, ctx.window, ctx.soft_cap = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(list(ctx.saved_tensors), grad, ctx.heads, ctx.scale, ctx.window, ctx.soft_cap)
    return *grads, None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
