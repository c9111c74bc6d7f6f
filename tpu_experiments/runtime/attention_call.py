"""Shape of an attention call, its blocking in the kernel, and the FLOPs and bytes of its blocks."""

from dataclasses import dataclass, replace
from typing import Literal

from tpu_experiments.runtime.attention import Scores

Direction = Literal["forward", "backward"]
Phase = Literal["fwd", "dkv", "dq"]
"""jax's names of its three kernels."""
Target = Literal["tpu", "interpreted"]
SUBLANES = 8
"""Rows of a tile of vector registers."""
LANES = 128
"""Columns of a tile of vector registers; also the tokens of the smallest block of keys."""
MAX_BLOCK = 1024
"""Tokens in the largest block of queries and of keys."""
COARSE_BLOCK = 512
"""Rows longer than MAX_BLOCK are padded to a multiple of this, so that no block is smaller."""


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
    """Whether rope is applied to q and k before the kernel."""
    num_shards: int = 1
    """Chips that the rows are sharded over. It is a parameter since XLA's partitioner cannot shard a kernel itself."""
    head_shards: int = 1
    """Chips that the heads are sharded over; key/value heads are on the same chip as the query heads that read them."""
    max_block: int = MAX_BLOCK

    @property
    def of_one_chip(self) -> "AttentionCall":
        """The same call with the heads of one chip."""
        heads, kv_heads = self.heads // self.head_shards, self.kv_heads // self.head_shards
        return replace(self, heads=heads, kv_heads=kv_heads, head_shards=1)

    @property
    def is_flat(self) -> bool:
        """Whether the kernel reads heads out of (T, H D) without a transpose.

        A head must fill the lanes for that, and there must be 8 heads or more: where a model works on heads between
        projection and attention (Gemma 3 normalises them) their layout is (T, H, D), and H is padded to the 8 rows of a
        tile. Gemma 3 270M, 4 heads: 1.82 s a step with the flat layout, 1.69 s heads first.
        """
        return self.head_dim % LANES == 0 and self.heads >= SUBLANES

    @property
    def padded_length(self) -> int:
        """Tokens of a row after padding for the kernel; those at the end are in segment 0, as all padding."""
        unit = LANES if self.length <= self.largest_block else min(COARSE_BLOCK, self.largest_block)
        return -(-self.length // unit) * unit

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None where there is none or it covers the whole row."""
        window = self.scores.window
        return window if window and window < self.length else None

    @property
    def largest_block(self) -> int:
        """Tokens in the largest block for this head dimension.

        At most MAX_BLOCK / 2 for a head of 256: in blocks of 1,024 its dK and dV take 17 MiB where 16 MiB fit (v5e).
        """
        return min(self.max_block, MAX_BLOCK // -(-self.head_dim // LANES) // LANES * LANES)

    @property
    def block(self) -> int:
        """Tokens in a block: the largest allowed multiple of 128 that divides the padded length."""
        fitting = range(LANES, min(self.largest_block, self.padded_length) + 1, LANES)
        return max(size for size in fitting if self.padded_length % size == 0)

    @property
    def visited_blocks(self) -> int:
        """Pairs of a query block and a key block with any unmasked pair of tokens, per row and head."""
        count, window = self.padded_length // self.block, self.window or self.padded_length
        return sum((i - j - 1) * self.block + 1 < window for i in range(count) for j in range(i + 1))

    @property
    def backward(self) -> Literal["fused", "split"]:
        """Backward kernels: `fused`, one for all gradients, or `split`, with one of its own for dQ.

        Fused takes 5 matmuls per block, split 7. The fused kernel writes one dQ per block of keys, summed outside the
        kernel. By libtpu 0.0.21's estimates and with kernels at 40% of peak, 4 rows of 2,048 tokens with 32 heads of
        128 in blocks of 1,024 take 4.4 ms fused on v6e against 2.6 ms split (v5e: 9.1 against 10.5 ms), and the dQ
        copies grow with the square of the length.
        """
        return "fused" if self.block == self.padded_length else "split"

    def flops(self, phase: Phase) -> int:
        """Return the FLOPs of one row, over the visited blocks, whose masked pairs are computed too."""
        # fwd: scores and output; dkv: scores, dV, dP and dK (fused: and dQ); dq: scores, dP and dQ
        products = {"fwd": 2, "dkv": 5 if self.backward == "fused" else 4, "dq": 3}[phase]
        return 2 * products * self.head_dim * self.exponentials

    def bytes_moved(self, phase: Phase) -> int:
        """Return the bytes of memory traffic of one row, with every tensor read or written once."""
        queries = {"fwd": 2, "dkv": 3, "dq": 3}[phase]  # q and out; q, out and its gradient; the same, or dQ
        keys = {"fwd": 2, "dkv": 4, "dq": 2}[phase]
        per_head = self.padded_length * self.head_dim * (2 if self.dtype == "bfloat16" else 4)
        return (queries * self.heads + keys * self.kv_heads) * per_head

    @property
    def exponentials(self) -> int:
        """Exponentials of one row: the scores of its visited blocks."""
        return self.heads * self.visited_blocks * self.block**2
