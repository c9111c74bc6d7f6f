"""The gated delta rule over whole rows as operators of torch, which a device with a kernel for it computes.

Legend: B rows, N heads, T tokens, D = 128 width of queries, keys and values, K chunks, L = 128 tokens of a chunk."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_experiments.config.hardware import CalibrationConfig, HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.kernels.attention import LANES, Target

MAX_HEADS = 8
"""Most heads of a step of the kernels: their products are computed side by side. With 4 forward takes 1.46 times the
cycles on a v6e, with 16 0.83, and twice as long to compile."""
EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""
OF_PRODUCTS = (19 * 2.0 * LANES**3, 16 * 2.0 * LANES**3)
"""FLOPs of the products themselves."""
CYCLES = {"v6e": (807, 1149), "v5e": (1165, 1522)}
"""Cycles of a chunk of a head, forward and backward, with 8 heads a step, by libtpu 0.0.21's schedule with its delays
(tests/benchmarks/LOG.md). Other chips are taken for a v5e."""


def schedule_flops(hw: HwConfig) -> tuple[float, float]:
    """Return the FLOPs of a chunk of a head, forward and backward, that take as long in a plan as their cycles do.

    A plan assumes a share of the peak for kernels. Products of 128 x 128 with the work between them reach 19 and 11 %
    of the peak on a v6e, whose matrix unit is twice as wide, 52 and 34 % on a v5e.
    """
    if hw.chip is None:
        return OF_PRODUCTS
    share = (hw.calibration or CalibrationConfig()).kernel_share_of_peak
    of_cycle = hw.chip.peak_tflops_bf16 * 1e12 * share / (hw.chip.clock_ghz * 1e9)
    forward, backward = CYCLES.get(hw.chip.name, CYCLES["v5e"])
    return forward * of_cycle, backward * of_cycle


@dataclass(frozen=True)
class DeltaCall:
    """What a kernel is written for."""

    rows: int
    heads: int
    length: int
    dtype: str
    mesh: Mesh
    flops: tuple[float, float]
    """FLOPs of a chunk of a head, forward and backward, that the kernels state to whoever estimates their time."""
    target: Target = "tpu"
    """`interpreted` runs the kernel's steps as plain XLA, for tests on a CPU."""

    @property
    def row_shards(self) -> int:
        """Parts that rows are split in; rows that do not divide are on every chip, as in the run."""
        return self.mesh.num_shards if self.rows % self.mesh.num_shards == 0 else 1

    @property
    def head_shards(self) -> int:
        """Parts that heads are split in."""
        return self.mesh.tensor if self.heads % self.mesh.tensor == 0 else 1

    @property
    def heads_of_step(self) -> int:
        """Heads that one step of the kernels computes side by side."""
        heads = self.heads // self.head_shards
        return next(count for count in range(min(MAX_HEADS, heads), 0, -1) if heads % count == 0)


Four = tuple[Tensor, Tensor, Tensor, Tensor]


class DeltaKernel(Protocol):
    """The rule on one kind of device."""

    def forward(self, *given: Tensor) -> Four:
        """Return the output (B, N, T, D), and state, inverse and corrections of each chunk (B, N, K, 128, 128).

        Args:
            given: queries, keys and values (B, T, N D) of one data type; numbers of tokens (B, N, K, 3, L), float32:
                sums of the logarithms of decays over the chunk's tokens so far, in a coarse and a fine part, and rates;
                documents of tokens, and of the one before the chunk, (B, K, 2, L) int32.
        """
        ...

    def backward(self, *saved: Tensor) -> Four:
        """Return the gradients of queries, keys, values and numbers; coarse sums have none.

        Args:
            saved: the inputs of `forward`, its other results, and the gradient of the output.
        """
        ...


_installed: DeltaKernel | None = None


def install_delta_kernel(kernel: DeltaKernel | None) -> None:
    """Have the gated delta rule use this kernel from now on; None where the device has none."""
    global _installed
    _installed = kernel


def has_delta_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel computes rows of these heads (..., T, D) and (..., T, E)."""
    widths, tokens = {query.shape[-1], value.shape[-1]}, query.shape[-2]
    return _installed is not None and query.device.type != "cpu" and widths == {LANES} and tokens % LANES == 0


def delta_rule(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, segments_BT: Tensor) -> Tensor:
    """Return the rule's output (B, N, T, D), of the inputs of `DeltaKernel.forward`; differentiable."""
    segments_BKL = segments_BT.int().unflatten(1, (-1, LANES))
    before_BK = F.pad(segments_BKL[:, :-1, -1], (1, 0), value=NO_SEGMENT)
    documents = torch.stack([segments_BKL, before_BK[..., None].expand_as(segments_BKL)], 2)
    made: Tensor = _forward(query, key, value, numbers, documents)[0]
    return made


NO_SEGMENT = -2
"""Segment before a row: of no token."""


@torch.library.custom_op("tpu_experiments::delta_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _kernel().forward(query, key, value, numbers, documents)


@torch.library.custom_op("tpu_experiments::delta_backward", mutates_args=())
def _backward(saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _kernel().backward(*saved)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, documents: Tensor) -> Four:
    states, inverses, corrections = (query.new_empty((*numbers.shape[:3], LANES, LANES)) for _ in range(3))
    out = query.new_empty((*numbers.shape[:2], query.shape[1], LANES))
    return out, states, inverses, corrections


@_backward.register_fake
def _(saved: list[Tensor]) -> Four:
    query, key, value, numbers = (tensor.new_empty(tensor.shape) for tensor in saved[:4])
    return query, key, value, numbers


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Four) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_backward([*ctx.saved_tensors, grad]), None


_forward.register_autograd(_gradients, setup_context=_save)


def _kernel() -> DeltaKernel:
    assert _installed is not None, "a runtime installs the kernel before a model is called"
    return _installed
