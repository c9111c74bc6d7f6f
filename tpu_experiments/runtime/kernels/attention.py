"""Attention kernels that a device brings along, as two operators of torch: the only door between models and kernels.

A runtime installs its kernel; a model asks whether there is one and calls `attention`. The operators are opaque to
torch, so that AOTAutograd keeps them whole, forward and backward. Tensors are as projections make them and take them,
all heads of a token beside each other: a kernel that reads them so needs no copy in another order. An `AttentionCall`
is one shape of call, the blocks that a kernel cuts it into and the work in them, as numbers. Legend: B rows, H query
heads, K key/value heads, T tokens, D head dimension."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tpu_experiments.config.hardware import ChipConfig


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed from q and k, besides the mask of segments."""

    scale: float
    """Factor of the products q k^T."""
    window: int | None = None
    """Sliding window: a token attends to keys at a distance below this; None: at any distance."""
    soft_cap: float | None = None
    """c in c tanh(score / c); None: no soft cap."""
    causal: bool = True
    """Whether a token attends to keys up to itself alone; otherwise to keys on both sides."""


class AttentionKernel(Protocol):
    """Attention inside segments, with rope applied to q and k first."""

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
            saved: the inputs of `forward`, then its outputs. Inside a loop over layers q, k and v may be the stacks
                (L, B, T, N D) of all of them; then the layer's number, int32 (), comes last.
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
    out, _ = _forward(q, k, v, segments, turned, heads, *astuple(scores))
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
    causal: bool,
) -> tuple[Tensor, Tensor]:
    scores = Scores(scale, window, soft_cap, causal)
    return _kernel().forward(q, k, v, segments, rotation, heads=heads, scores=scores)


@torch.library.custom_op("tpu_experiments::attention_backward", mutates_args=())
def _backward(
    saved: list[Tensor],
    grad: Tensor,
    heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _kernel().backward(*saved, grad=grad, heads=heads, scores=Scores(scale, window, soft_cap, causal))


BACKWARD = torch.ops.tpu_experiments.attention_backward.default
"""The operator of the gradients, as traced graphs hold it."""


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, rotation: Tensor, heads: int, *_: Any) -> Any:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], heads, q.shape[1]), dtype=torch.float32)


@_backward.register_fake
def _(saved: list[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor.new_empty(tensor.shape[-3:]) for tensor in saved[:3])
    return q, k, v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, scale, window, soft_cap, causal = inputs
    ctx.scores = (scale, window, soft_cap, causal)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(list(ctx.saved_tensors), grad, ctx.heads, *ctx.scores)
    return *grads, None, None, None, *(None for _ in ctx.scores)


_forward.register_autograd(_gradients, setup_context=_save)


Direction = Literal["forward", "backward"]
Phase = Literal["fwd", "bwd", "dkv", "dq"]
"""Kernels: forward; backward, of a row that is read whole; and jax's names of splash's two for backward."""
Target = Literal["tpu", "interpreted"]
SUBLANES = 8
"""Rows of a tile of vector registers."""
LANES = 128
"""Columns of a tile of vector registers; also the tokens of the smallest block of keys."""
MAX_BLOCK = 1024
"""Tokens in the largest block of queries and of keys."""
COARSE_BLOCK = 512
"""Rows longer than MAX_BLOCK are padded to a multiple of this, so that no block is smaller."""
PART = 256
"""Tokens of a block that a kernel of whole rows takes at once."""
WHOLE_BYTES = 2 * 2**20
"""Largest row of a head that kernels hold whole: 8,192 tokens of at most 128 features in bfloat16."""


class Meeting(NamedTuple):
    """Tokens of a block whose scores a kernel computes at once."""

    part: slice
    """Queries forward, keys backward."""
    others: slice
    """The keys, or queries, that any of them meets."""


@dataclass(frozen=True)
class AttentionCall:
    """Everything about an attention call that is fixed when it is lowered."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    """Tokens of a row."""
    head_dim: int
    dtype: str
    """jax's name: `bfloat16` or `float32`."""
    scores: Scores
    rotates: bool = False
    """Whether rope is applied to q and k."""
    num_shards: int = 1
    """Chips that the rows are sharded over. It is a parameter since XLA's partitioner cannot shard a kernel itself."""
    head_shards: int = 1
    """Chips that the heads are sharded over; key/value heads are on the same chip as the query heads that read them."""
    max_block: int = MAX_BLOCK
    holds_rows: bool = True
    """Whether the chip's vector memory holds a row of several blocks (`holds_rows`)."""
    layers: int = 0
    """Layers of the stacks that the backward pass reads q, k and v from; 0 where they are one layer's."""
    rotation_dtype: str = ""
    """jax's name of the data type of cosine and sine where it is another one (float32 of OLMo); empty elsewhere."""

    @property
    def is_whole(self) -> bool:
        """Whether the kernels hold a head's row whole (whole_rows.py); longer ones are splash's."""
        row_bytes = self.padded_length * padded_lanes(self.head_dim) * self.item_bytes
        return self.num_blocks == 1 or (self.holds_rows and row_bytes <= WHOLE_BYTES)

    @property
    def reads_by_number(self) -> bool:
        """Whether the backward kernel reads one layer's q, k and v out of the stacks; else they are copied first."""
        return self.layers > 0 and self.is_whole and self.is_flat and self.padded_length == self.length

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return self.padded_length // self.block

    @property
    def of_one_chip(self) -> "AttentionCall":
        """The same call with the heads of one chip."""
        heads, kv_heads = self.heads // self.head_shards, self.kv_heads // self.head_shards
        return replace(self, heads=heads, kv_heads=kv_heads, head_shards=1)

    @property
    def is_flat(self) -> bool:
        """Whether the kernel reads heads out of (T, H D) without a transpose (`reads_flat`)."""
        return reads_flat(heads=self.heads, head_dim=self.head_dim)

    @property
    def padded_length(self) -> int:
        """Tokens of a row after padding for the kernel; those at the end are in a segment of their own."""
        unit = LANES if self.length <= self.largest_block else min(COARSE_BLOCK, self.largest_block)
        return -(-self.length // unit) * unit

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None where there is none or it covers the whole row."""
        window = self.scores.window
        return window if window and window < self.length else None

    @property
    def largest_block(self) -> int:
        """Tokens in the largest block for this head dimension and data type.

        Half of MAX_BLOCK for a head of 256, and in float32: of 1,024 tokens one block takes up to 22 MiB where 16 MiB
        fit (v4, and v5e by default).
        """
        sizes = -(-self.head_dim // LANES) * (self.item_bytes // 2)
        return min(self.max_block, max(LANES, MAX_BLOCK // sizes // LANES * LANES))

    @property
    def block(self) -> int:
        """Tokens in a block: the largest allowed multiple of 128 that divides the padded length.

        In rows of several blocks one is not longer than the window, since a block meets those beside it whole.
        """
        largest = min(self.largest_block, self.padded_length)
        if self.window is not None and largest < self.padded_length:
            largest = min(largest, max(PART, padded_lanes(self.window)))
        fitting = range(LANES, largest + 1, LANES)
        return max(size for size in fitting if self.padded_length % size == 0)

    @property
    def visited_blocks(self) -> int:
        """Pairs of a query block and a key block with any unmasked pair of tokens, per row and head."""
        count, window = self.padded_length // self.block, self.window or self.padded_length
        pairs = ((i, j) for i in range(count) for j in range(i + 1 if self.scores.causal else count))
        return sum((abs(i - j) - 1) * self.block + 1 < window for i, j in pairs)

    def meetings(self, phase: Phase) -> list[Meeting]:
        """Return the parts of a block and what each meets there: queries' keys (`fwd`), or keys' queries (`bwd`)."""
        length, causal = self.block, self.scores.causal
        reach = (self.window or length) - 1
        before, after = (reach, 0 if causal else reach) if phase == "fwd" else (0 if causal else reach, reach)
        size = PART if causal or self.window else length
        parts = [slice(start, min(start + size, length)) for start in range(0, length, size)]
        starts = (max(0, part.start - before) // LANES * LANES for part in parts)
        ends = (min(length, padded_lanes(part.stop + after)) for part in parts)
        return [Meeting(part, slice(start, end)) for part, start, end in zip(parts, starts, ends, strict=True)]

    def flops(self, phase: Phase) -> int:
        """Return the FLOPs of one row, masked pairs of what is computed at once included."""
        # fwd: scores and output; bwd: scores, dV, dP, dK and dQ; dkv: scores, dV, dP and dK; dq: scores, dP and dQ
        products = {"fwd": 2, "bwd": 5, "dkv": 4, "dq": 3}[phase]
        return 2 * products * self.head_dim * self.exponentials(phase)

    def bytes_moved(self, phase: Phase) -> int:
        """Return the bytes of memory traffic of one row, with every tensor read or written once, and whole lanes."""
        queries = {"fwd": 2, "bwd": 3, "dkv": 3, "dq": 3}[phase]  # q and out; q, out's gradient and dQ, or out
        keys = {"fwd": 2, "bwd": 4, "dkv": 4, "dq": 2}[phase]
        per_head = self.padded_length * padded_lanes(self.head_dim) * self.item_bytes
        return (queries * self.heads + keys * self.kv_heads) * per_head

    def exponentials(self, phase: Phase) -> int:
        """Return the exponentials of one row: the computed scores of visited blocks, or parts on the diagonal."""
        if not self.is_whole:
            return self.heads * self.visited_blocks * self.block**2
        sides = ((part.stop - part.start, others.stop - others.start) for part, others in self.meetings(phase))
        inside = self.num_blocks * sum(tokens * met for tokens, met in sides)
        return self.heads * (inside + (self.visited_blocks - self.num_blocks) * self.block**2)


def holds_rows(chip: ChipConfig | None) -> bool:
    """Return whether a chip's vector memory is large enough for kernels that hold rows of several blocks.

    They take up to 45 MiB of it. A v4's core has 16; where it is not known, splash takes those rows.
    """
    return chip is not None and chip.vmem_mib is not None and chip.vmem_mib >= 64


def reads_flat(*, heads: int, head_dim: int) -> bool:
    """Return whether the kernel reads heads out of (T, H D) without a transpose, rather than heads first.

    A head must fill the lanes for that, and there must be 8 heads or more: where a model works on heads between
    projection and attention (Gemma 3 normalises them) their layout is (T, H, D), and H is padded to the 8 rows of a
    tile. Gemma 3 270M, 4 heads: 1.82 s a step with the flat layout, 1.69 s heads first.
    """
    return head_dim % LANES == 0 and heads >= SUBLANES


def padded_lanes(width: int) -> int:
    """Round up to whole lanes, of which a row of the TPU's memory, or a slice of its vector memory, is made."""
    return -(-width // LANES) * LANES


DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def call_of(
    tensors: Sequence[Tensor],
    *,
    heads: int,
    scores: Scores,
    max_block: int,
    holds_rows: bool = True,
    num_shards: int = 1,
    head_shards: int = 1,
) -> tuple[AttentionCall, list[Tensor]]:
    """Return a call by its tensors (`AttentionKernel`), and those that the kernel takes: without rope no rotation."""
    q, k, v, segments, rotation, *others = tensors
    *layers, rows, length, width = q.shape
    head_dim, rotates = width // heads, rotation.numel() > 0
    call = AttentionCall(
        *(rows, heads, k.shape[-1] // head_dim, length, head_dim),
        dtype=DTYPES[q.dtype],
        scores=scores,
        rotates=rotates,
        num_shards=num_shards,
        head_shards=head_shards,
        max_block=max_block,
        holds_rows=holds_rows,
        layers=layers[0] if layers else 0,
        rotation_dtype=DTYPES[rotation.dtype] if rotates and rotation.dtype != q.dtype else "",
    )
    return call, [q, k, v, segments, *([rotation] if rotates else []), *others]
