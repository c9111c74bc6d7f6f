"""The device's attention kernel as two torch operators: the only interface between models and kernels.

A runtime installs its kernel; a model asks whether there is one and calls `attention`. The operators are opaque to
torch, so that AOTAutograd does not decompose them, forward or backward. Tensors have the layout of the projections,
with the heads of a token contiguous: a kernel that reads this layout needs no transpose. Legend: B rows, H query
heads, K key/value heads, T tokens, D head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed from q and k, besides the causal and the segment mask."""

    scale: float
    """Factor of the products q k^T."""
    window: int | None = None
    """Sliding window: a token attends to keys at a distance below this; None: to all keys before it."""
    soft_cap: float | None = None
    """c in c tanh(score / c); None: no soft cap."""


class AttentionKernel(Protocol):
    """Causal attention inside segments, with rope applied to q and k first."""

    def forward(self, *tensors: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, H D) and the log-sum-exp of the scores (B, H, T) in float32.

        Args:
            tensors: q (B, T, H D), k and v (B, T, K D), segments (B, T) int32 and rotation (2, B, T, D), or (0,)
                without rope.
        """
        ...

    def backward(self, *saved: Tensor, grad: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v from that of the output.

        Args:
            saved: the inputs of `forward`, then its outputs.
        """
        ...


_installed: AttentionKernel | None = None


def install_attention_kernel(kernel: AttentionKernel | None) -> None:
    """Make `attention` call this kernel from now on; None where the device has none."""
    global _installed
    _installed = kernel


@contextmanager
def without_attention_kernel() -> Iterator[None]:
    """Have models compute attention in plain operations inside this context, as for host tensors."""
    kernel = _installed
    install_attention_kernel(None)
    try:
        yield
    finally:
        install_attention_kernel(kernel)


def has_attention_kernel() -> bool:
    """Return whether a kernel is installed, so that `attention` can be called in this process."""
    return _installed is not None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, segments: Tensor, rotation: Tensor | None, heads: int, scores: Scores
) -> Tensor:
    """Return the attention output (B, T, H D) of q (B, T, H D) over k and v (B, T, K D); differentiable.

    Args:
        segments: (B, T) int32; a token attends to its own segment only.
        rotation: cosine and sine (2, B, T, D) of the rope of every head of q and k (arXiv 2104.09864, in Hugging
            Face's rotate-half layout); None without rope. It gets no gradient.
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
