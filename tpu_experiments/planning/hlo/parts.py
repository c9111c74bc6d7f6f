"""Attribution of compiled operations to the parts of a training step, by the sizes of their arrays.

torch_xla's programs carry no names of modules (XLA_HLO_DEBUG adds some, but slows every step of a run, and the plan's
program must be the run's), and scopes do not survive fusion. Sizes do: a matrix product of G batches is M x N x K
whatever axes were split or merged, and its elements and FLOPs determine all four. The rule, first match wins:

    collectives  a collective, or a fusion around one without a product
    products     by the product with the most FLOPs in a fusion: {vocabulary, hidden} is `loss`; {rank, an edge of a
                 projection} is `adapters`; the two edges of a projection, one with ranks added where adapters are
                 multiplied with it, or lanes where its weight is padded to hold one, are `projections`; any other,
                 batched ones above all, is `attention` (scores, values)
    loss         something produced in it has a dimension of the vocabulary
    optimizer    outside loops, all arrays have as many elements as a trained parameter (or scales of its 8-bit moments)
                 and some result is float32 or a code: norms, clipping, moments, update
    adapters     the same otherwise (casts, gradients copied into their stack), or results with a dimension of the rank
    attention    an array has separate axes of heads and of a head's size, or two of the row's length for each head
    projections  results are matrices with the edges of a projection: a weight that is moved or cast
    other        the rest: norms, residuals, the activation, stacks of saved tensors, masks of dropout

A fusion is counted as one part: a norm fused into a product belongs to the product. Pallas kernels are `attention`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tpu_experiments.config.defaults import LANES
from tpu_experiments.config.hardware import ChipConfig
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.planning.hlo.collectives import KINDS
from tpu_experiments.planning.hlo.flops import dot_flops
from tpu_experiments.planning.hlo.text import Computation, Instruction, Shape
from tpu_experiments.planning.timing import StepTime

PARTS = ("attention", "projections", "adapters", "loss", "optimizer", "collectives", "other")
Held = Sequence[tuple[Instruction, Computation]]
"""An instruction and everything fused into it, each with its computation."""


@dataclass(frozen=True)
class Widths:
    """Sizes of one model and batch that identify the parts of its step."""

    vocab: int
    hidden: int
    each_rank: frozenset[int]
    """Ranks of the adapters; empty where there are none."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seq_len: int
    edges: frozenset[frozenset[int]]
    """{in, out} of every projection."""
    trained: frozenset[int] = frozenset()
    """Number of elements of every trained parameter, and of the scales of its 8-bit moments, on one chip."""
    splits: frozenset[int] = frozenset()
    """Numbers of chips that a weight may be sharded over."""

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks of one adapter, and of two or three that read one tensor (models/adapters/linear.py)."""
        return frozenset(count * rank for count in (1, 2, 3) for rank in self.each_rank)

    @property
    def of_projections(self) -> frozenset[int]:
        """All edges of projections."""
        return frozenset[int]().union(*self.edges)

    def is_projection(self, first: int, second: int) -> bool:
        """Return whether two sizes are the edges of a projection, whole or shares, or with ranks or lanes added."""
        pairs = {(a, b) for a in self.whole(first) for b in self.whole(second)}
        added = {*self.ranks, LANES}
        pairs |= {pair for a, b in set(pairs) for more in added for pair in ((a - more, b), (a, b - more))}
        return any({a, b} in self.edges for a, b in pairs)

    def whole(self, size: int) -> set[int]:
        """Return the sizes that an edge may have before sharding, its own and those it may be a share of."""
        return {size, *(size * chips for chips in self.splits)}


def widths_of(
    arch: Any, *, ranks: Collection[int], seq_len: int, trained: Collection[int], splits: Collection[int]
) -> Widths:
    """Return the sizes of a model that metrics/flops.py supports.

    Args:
        arch: the model's transformers config.
        trained: number of elements of every trained parameter on one chip.
        splits: numbers of chips that a weight may be sharded over.
    """
    decoder = read_decoder(arch)
    return Widths(
        vocab=decoder.vocab_size,
        hidden=decoder.hidden,
        each_rank=frozenset(ranks),
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        seq_len=seq_len,
        edges=frozenset(frozenset(edges) for edges in decoder.projections.values()),
        trained=frozenset(trained),
        splits=frozenset(splits),
    )


def part_of(held: Held, *, is_entry: bool, widths: Widths) -> str:
    """Return the part of one instruction, by the rule above; `is_entry` is true outside all loops."""
    products = [(dot_flops(i, within=c), i, c) for i, c in held if i.opcode in {"dot", "convolution"}]
    if products:
        flops, product, within = max(products, key=lambda each: each[0])
        kinds = {within.by_name[name].shapes[0].dtype for name in product.operands[:2]}
        sizes = product_sizes(product, flops=flops, within=within)
        return part_of_product(sizes, widths=widths, in_float32=kinds == {"f32"})
    if any(i.opcode.removesuffix("-start").removesuffix("-done") in KINDS for i, _ in held):
        return "collectives"
    return part_of_passes(held, is_entry=is_entry, widths=widths)


def part_of_passes(held: Held, *, is_entry: bool, widths: Widths) -> str:
    """Return the part of an operation that holds neither a product nor a collective."""
    made = [(i.opcode, shape) for i, _ in held if i.opcode != "parameter" for shape in i.shapes]
    if any(widths.vocab in widths.whole(size) for _, shape in made for size in shape.dims):
        return "loss"
    instruction, within = held[0]
    results = [shape for shape in instruction.shapes if shape.num_elements > 1]
    arrays = results + [shape for shape in within.operand_shapes(instruction) if shape.num_elements > 1]
    if arrays and all(shape.num_elements in widths.trained for shape in arrays):
        return "optimizer" if is_entry and any(s.dtype in {"f32", "u8"} for s in instruction.shapes) else "adapters"
    scores = [shape for opcode, shape in made if opcode != "dynamic-update-slice"]  # that one's result is a stack
    if any(is_of_heads(s, widths=widths) for s in arrays) or any(is_scores(s, widths=widths) for s in scores):
        return "attention"
    if results and all(widths.ranks & set(shape.dims) for shape in results):
        return "adapters"
    if results and all(is_matrix(shape, widths=widths) for shape in results):
        return "projections"
    return "other"


def product_sizes(product: Instruction, *, flops: int, within: Computation) -> tuple[int, int, int, int]:
    """Return (G, M, N, K) of G products of M x K by K x N.

    Elements are GMK, GKN and GMN, FLOPs 2 GMNK, which determine the four.
    """
    left, right = (within.by_name[name].shapes[0].num_elements for name in product.operands[:2])
    result = product.shapes[0].num_elements
    batches = max(1, round(left * right * result / max(1, flops // 2) ** 2))
    edges = (left * result / right, right * result / left, left * right / result)
    rows, columns, contracted = (round(math.sqrt(edge / batches)) for edge in edges)
    return batches, rows, columns, contracted


def part_of_product(sizes: tuple[int, int, int, int], *, widths: Widths, in_float32: bool = False) -> str:
    """Return the part of a matrix product of these sizes.

    Sums over each head, of the attention kernel, are float32 products; those of adapters hardly ever are.
    """
    batches, *edges = sizes
    sums_heads = in_float32 and widths.num_heads in edges and widths.num_heads not in widths.each_rank
    if batches > 1 or sums_heads:
        return "attention"
    whole = [widths.whole(edge) for edge in edges]
    if any(widths.vocab in each for each in whole) and any(widths.hidden in each for each in whole):
        return "loss"
    if widths.ranks & set(edges) and any(each & widths.of_projections for each in whole):
        return "adapters"
    return "projections" if any(widths.is_projection(*pair) for pair in combinations(edges, 2)) else "attention"


def is_of_heads(shape: Shape, *, widths: Widths) -> bool:
    """Return whether an array has separate axes of heads and of a head's size."""
    sizes = list(shape.dims)
    if len(sizes) < 4 or widths.head_dim not in sizes:
        return False
    sizes.remove(widths.head_dim)
    return widths.num_heads in sizes or widths.num_kv_heads in sizes


def is_scores(shape: Shape, *, widths: Widths) -> bool:
    """Return whether an array has two axes of the row's length, for each head.

    The heads are required since a projection may be as wide as a row is long.
    """
    others = shape.num_elements // widths.seq_len**2
    return shape.dims.count(widths.seq_len) >= 2 and others > 0 and others % widths.num_heads == 0


def is_matrix(shape: Shape, *, widths: Widths) -> bool:
    """Return whether an array has the two edges of a projection, whole or one chip's share."""
    sizes = [size for size in shape.dims if size > 1]
    if len(sizes) != 2:
        return False
    return widths.is_projection(*sizes)


def seconds_by_part(cycles_by_part: dict[str, int], *, time: StepTime, chip: ChipConfig) -> dict[str, float]:
    """Return the estimated seconds of every part; their sum is the step before the calibration."""
    seconds = {part: cycles_by_part.get(part, 0) / (chip.clock_ghz * 1e9) for part in PARTS}
    seconds["attention"] += time.kernels_s
    seconds["collectives"] += time.exposed_network_s
    return seconds
