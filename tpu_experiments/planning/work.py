"""FLOPs of attention kernels and memory of a training step, from the model's sizes, not a compiler.

FLOPs of a token are in metrics/flops.py, which the run uses too.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu_experiments.config.defaults import LANES
from tpu_experiments.config.model_schema import LoraConfig, is_in_layer, lora_of
from tpu_experiments.config.recurrence import chunk_of, delta_chunk_of
from tpu_experiments.config.schema import STATE_BYTES, AdamWConfig
from tpu_experiments.metrics.flops import Decoder, DeltaHybrid, Recurrent, Trainable, read_decoder

GIB = 2**30


def flash_attention_flops(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    direction: Literal["forward", "backward", "backward_dkv", "backward_dq"],
    causal: bool = True,
) -> float:
    """Return the FLOPs that a flash-attention kernel executes, which the compiler's estimate leaves out.

    Forward takes 2 products of (queries x keys x head_dim). Backward recomputes the scores: 4 products in the kernel
    for keys and values, 3 in the one for queries (arXiv 2205.14135, algorithm 4, cut in two as in JAX's Pallas kernel).
    """
    products = {"forward": 2, "backward": 7, "backward_dkv": 4, "backward_dq": 3}[direction]
    whole = 2.0 * products * batch * heads * queries * keys * head_dim
    return whole / 2 if causal else whole


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB per chip by class, by formulas instead of a compiler."""

    base: float
    """Frozen weights, as `model.base` stores them; 0 where every weight is trained."""
    adapters: float
    """Trained parameters in float32."""
    optimizer: float
    """Optimizer state: float32, or 8-bit codes and their scales."""
    gradients: float
    """Gradients in float32, and the trained parameters once more in the model's data type; of trained rows those of
    their matrix."""
    activations: float
    """Saved for the backward pass: all of them, or with recomputation the layer inputs and one layer's own."""
    logits: float
    """micro_rows x positions of a chunk x vocabulary in the model's data type, and their log-softmax in float32."""
    gathered: float
    """Matrices that a sharded step holds gathered at once: two of the largest of a layer. Of rounded weights, what one
    takes in float32."""
    batch: float
    """Token ids, masks, positions and segments as int32."""
    source: str = "analytic"

    @property
    def arguments(self) -> float:
        """GiB on the chip between two steps."""
        return self.base + self.adapters + self.optimizer + self.batch

    @property
    def temporaries(self) -> float:
        """GiB that a step needs in addition."""
        return self.gradients + self.activations + self.logits + self.gathered

    @property
    def total(self) -> float:
        """Peak of a step; the outputs reuse the buffers of the arguments."""
        return self.arguments + self.temporaries


@dataclass(frozen=True)
class StepSettings:
    """Settings that the memory of a step depends on, beside the model."""

    seq_len: int
    micro_rows: int
    """Rows per chip that pass through the model at once."""
    trainable: Trainable
    accumulation: int = 1
    """Number of micro-batches in one step."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(r=0))
    state_bytes: Callable[[tuple[int, ...]], float] = STATE_BYTES[AdamWConfig._target_]
    """Bytes of the optimizer's state of one parameter, by its shape."""
    outside_bytes: Callable[[tuple[int, ...]], float] | None = None
    """The same of what `outer_shapes` returns, and of weights of `lora.modules_to_save` outside of the layers, where it
    differs."""
    averaged: bool = False
    """Whether an average of the trained parameters is kept (`optim.ema`, or a schedule-free optimizer)."""
    recompute: bool = False
    """Of layers, only their inputs and `saved` are kept for the backward pass."""
    saved: tuple[str, ...] = ()
    """Projections whose outputs are saved too, and `attention`: its output, and what a kernel reads."""
    in_loop: bool = False
    """Layers are recomputed in a loop alone, for which they have to be equal."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at once; None means all of them."""
    attention: Literal["sdpa", "flash"] = "sdpa"
    sharding: Literal["replicated", "fsdp"] = "replicated"
    chips: int = 1
    """Number of chips that share a weight in `fsdp`."""
    weight_bytes: int = 2
    """Bytes of one element in the model's data type."""
    base: str = "dense"
    """Storage of the layers' matrices, as in `model.base`."""
    group: int | None = None
    """Weights that share a trained scale where adapters decide how they are rounded, 0 for a row; None elsewhere."""
    double_quant: bool = True


def matrix_bytes(rows: int, columns: int, *, base: str, double_quant: bool, item_bytes: int) -> float:
    """Return the bytes of a frozen matrix and its scales (models/adapters/quantised.py)."""
    elements = rows * columns
    if base == "int8":
        return elements + 4 * rows
    if base == "nf4":
        blocks = elements / 64
        return elements / 2 + (blocks + 4 * math.ceil(blocks / 256) + 4 if double_quant else 4 * blocks)
    return elements * item_bytes


def base_bytes(decoder: Decoder, *, base: str, double_quant: bool, item_bytes: int) -> tuple[float, float]:
    """Return the bytes of a model's matrices, which are sharded, and of its vectors, which are whole."""
    stored = dict.fromkeys(decoder.projections, base) | dict.fromkeys(decoder.stacked, "dense")
    of_layers = sum(
        decoder.copies[name]
        * matrix_bytes(high, wide, base=stored[name], double_quant=double_quant, item_bytes=item_bytes)
        for name, (wide, high) in decoder.projections.items()
    )
    rest = decoder.matrices - decoder.matrices_of_layers
    return of_layers + rest * item_bytes, decoder.vectors * item_bytes


def analytic_memory(arch: Any, *, step: StepSettings) -> MemoryEstimate:
    """Estimate the memory of a step per chip, for machines without libtpu and for pruning a search.

    Compared with five compiled programs (tests/planning/test_work.py) it is within 1 % of their arguments and between
    25 % below and 45 % above their temporaries; its total is between 1 % below and 87 % above that of every line of
    conf/tuned.yaml, most above in the smallest (tests/planning/test_tuned.py has one of each kind). It does not
    model tiles, fragmentation or XLA's fusion.

    Raises:
        ConfigError: a model that `read_decoder` does not support.
    """
    decoder = read_decoder(arch)
    split = step.chips if step.sharding == "fsdp" else 1
    of_all = split if step.trainable == "full" else 1  # adapters are whole
    shapes, outer = trained_shapes(decoder, step=step), outer_shapes(decoder, step=step)
    trained = sum(
        math.prod(shape) * count / (of_all if len(shape) > 1 else 1)
        for found in (shapes, outer)
        for shape, count in found.items()
    )
    outside = step.outside_bytes or step.state_bytes
    moment_bytes = sum(step.state_bytes(shape) * count for shape, count in shapes.items()) / of_all
    moment_bytes += sum(outside(shape) * count for shape, count in outer.items()) / of_all
    for shape in expert_shapes(decoder, step=step):  # split by experts (runtime/sharding.py)
        parts = split if shape[0] % split == 0 else 1
        trained += math.prod(shape) / parts
        moment_bytes += step.state_bytes(shape) / parts
    saved = decoder.saved_by_name(step.lora)  # trained whole beside adapters, split as the base is
    for name, own in saved.items():
        parts = split if len(own) > 1 else 1
        trained += math.prod(own) / parts
        moment_bytes += (step.state_bytes if is_in_layer(name) else outside)(own) / parts
    # The matrix with its rows, and its gradient, in float32.
    of_rows = 2 * 4 * decoder.vocab_size * decoder.hidden * len(decoder.rows_by_name(step.lora)) / split
    matrices, vectors = base_bytes(
        decoder, base=step.base, double_quant=step.double_quant, item_bytes=step.weight_bytes
    )
    matrices -= step.weight_bytes * sum(math.prod(shape) for shape in saved.values() if len(shape) > 1)
    if step.group is not None:  # a byte each
        matrices -= (step.weight_bytes - 1) * sum(wide * high for wide, high in decoder.adapted(step.lora))
    tokens = step.micro_rows * step.seq_len
    chunk = min(step.loss_chunk_tokens or tokens, tokens)
    per_element = step.weight_bytes * tokens
    kept = read_by_layer(decoder, seq_len=step.seq_len, attention=step.attention)
    if step.lora.dora:  # outputs before they get their lengths
        kept += sum(high for _, high in decoder.adapted(step.lora)) / decoder.num_layers
    kept *= per_element
    inputs = (decoder.num_layers * decoder.hidden + _saved_by_name(decoder, step.saved, lora=step.lora)) * per_element
    recompute = recomputes_layers(decoder, step=step)
    largest = max(wide * high for wide, high in decoder.projections.values())
    average_bytes = 4 * trained if step.averaged else 0.0
    # The sum that is rounded, the integers and their gradient, in float32.
    of_rounding = 3 * 4 * largest / GIB if step.group is not None else 0.0
    return MemoryEstimate(
        base=(matrices / split + vectors) / GIB if step.trainable != "full" else 0.0,
        adapters=trained * 4 / GIB,
        optimizer=(moment_bytes + average_bytes) / GIB,
        gradients=(trained * (4 + step.weight_bytes) + of_rows) / GIB,
        activations=(inputs + kept if recompute else decoder.num_layers * kept) / GIB,
        logits=chunk * decoder.vocab_size * (step.weight_bytes + 4) / GIB,
        gathered=(2 * largest * step.weight_bytes if split > 1 else 0.0) / GIB + of_rounding,
        batch=tokens * step.accumulation * 4 * 4 / GIB,
    )


def recomputes_layers(decoder: Decoder, *, step: StepSettings) -> bool:
    """Return whether the backward pass recomputes layers; of a loop only those that are equal."""
    return step.recompute and (not step.in_loop or decoder.has_equal_layers(step.lora))


def trained_shapes(decoder: Decoder, *, step: StepSettings) -> dict[tuple[int, ...], float]:
    """Return how many trained parameters have each shape, without those of `outer_shapes`.

    Norms and biases count as vectors of `hidden`.
    """
    found: dict[tuple[int, ...], float] = defaultdict(float)
    if step.trainable == "full":
        for name, (wide, high) in decoder.projections.items():
            found[high, wide] += decoder.copies[name]
        found[(decoder.hidden,)] += decoder.vectors / decoder.hidden
        return found
    for name, (wide, high) in decoder.adapted_by_name(step.lora).items():
        if name == decoder.embedding_name:
            continue
        rank = lora_of(step.lora, name).r
        found[rank, wide] += 1
        found[high, rank] += 1
        if step.lora.dora:
            found[(high,)] += 1
    return found


def outer_shapes(decoder: Decoder, *, step: StepSettings) -> dict[tuple[int, ...], float]:
    """Return the same of what is neither inside a layer nor an adapter of a Linear, as `outside_bytes` has it.

    These are embeddings and heads, an embedding's adapter, trained rows, and scales of rounded weights.
    """
    found: dict[tuple[int, ...], float] = defaultdict(float)
    if step.trainable == "full":
        found[decoder.vocab_size, decoder.hidden] += 1 if decoder.tied else 2
        rows = _other_rows(decoder)
        found[rows, decoder.hidden] += rows > 0
        return found
    rank = decoder.embedding_rank(step.lora)
    if rank:
        found[rank, decoder.vocab_size] += 1
        found[decoder.hidden, rank] += 1
    for count in decoder.rows_by_name(step.lora).values():
        found[count, decoder.hidden] += 1
    if step.group is not None:
        for wide, high in decoder.adapted(step.lora):
            found[high, wide // (step.group or wide)] += 1
    return found


def expert_shapes(decoder: Decoder, *, step: StepSettings) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes of the adapters of experts: A (experts, rank, in) and B (experts, out, rank)."""
    for name, each in decoder.adapted_experts(step.lora).items():
        rank = lora_of(step.lora, name).r
        yield each.experts, rank, each.wide
        yield each.experts, each.high, rank


def _other_rows(decoder: Decoder) -> int:
    """Return the rows of an encoder's further embeddings and of the matrix of its head."""
    embeddings = decoder.vocab_size * decoder.hidden * (1 if decoder.tied else 2)
    return int(decoder.matrices - decoder.matrices_of_layers - embeddings) // decoder.hidden


def read_by_layer(decoder: Decoder, *, seq_len: int, attention: str) -> float:
    """Return the elements per token that the backward pass of one layer reads.

    Counted in the manner of arXiv 2205.05198, section 4.1: input, both normalised inputs and the middle of the residual
    stream (4 x hidden); queries, keys and values, queries and keys again after the rotation, and the attention's
    output; gate, activated gate, up and their product. sdpa keeps the probabilities, and keys and values repeated to
    all heads. An xLSTM keeps decays, scores and their product over a chunk, two of them in float32, and the states of
    the chunks where there are several.
    """
    if isinstance(decoder, Recurrent):
        chunk, values = chunk_of(seq_len), decoder.num_heads * decoder.head_dim
        states = 2.0 * decoder.query_dim * values / chunk if chunk < seq_len else 0.0
        kept = 4.0 * decoder.hidden + 2 * decoder.num_heads * decoder.query_dim + 6 * values + 4 * decoder.intermediate
        return kept + 5 * decoder.num_heads * chunk + states
    if isinstance(decoder, DeltaHybrid):
        of_delta = _saved_by_delta(decoder, seq_len=seq_len, has_kernels=attention == "flash")
        return max(of_delta, _saved_by_attention(decoder, seq_len, attention))
    return _saved_by_attention(decoder, seq_len, attention)


def _saved_by_name(decoder: Decoder, names: Collection[str], *, lora: LoraConfig) -> float:
    """Return the elements per token of all layers that are saved by name."""
    found = 0.0
    for name, (_, high) in decoder.projections.items():
        is_read = name != decoder.last_projection or decoder.reads_last(lora)
        if decoder.saves(name, names) and is_read:
            found += decoder.copies[name] * high
    if "attention" in names:
        queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        found += decoder.num_layers * (2 * queries + 2 * keys)
    return found


def _saved_by_delta(decoder: DeltaHybrid, *, seq_len: int, has_kernels: bool) -> float:
    """Return the elements per token that the backward pass of one layer of Gated DeltaNet reads.

    The rule's kernel (runtime/kernels/delta.py) keeps its inputs, and three square matrices a chunk. Plain operations
    keep, in float32, which counts twice: queries, keys and values before and behind the convolution and in the rule,
    the corrections and what they read of the state, decays, scores and the inverse, and states of chunks.
    """
    chunk, values = delta_chunk_of(seq_len), decoder.value_heads * decoder.value_width
    keys = decoder.value_heads * decoder.key_width
    if has_kernels and {decoder.key_width, decoder.value_width, chunk} == {LANES} and seq_len % LANES == 0:
        rule, states = 2.0 * keys + values, 3.0 * decoder.value_heads * LANES
    else:
        rule = 2.0 * (4 * keys + 6 * values + 6 * decoder.value_heads * chunk)
        states = 6.0 * keys * decoder.value_width / chunk
    return 4.0 * decoder.hidden + 4 * decoder.channels + 2 * values + rule + states + 4 * decoder.intermediate


def _saved_by_attention(decoder: Decoder, seq_len: int, attention: str) -> float:
    """Return `read_by_layer` of a layer of attention."""
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    kept = 4.0 * decoder.hidden + (queries + 2 * keys) + (queries + keys) + queries + 4 * decoder.inner
    if attention == "sdpa":
        kept += decoder.num_heads * seq_len + 2 * queries
    return kept
