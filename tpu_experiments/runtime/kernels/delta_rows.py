"""The gated delta rule over rows of packed documents, as two Pallas kernels for the TPU: jax alone.

A kernel takes one chunk of some heads of one row at a time, forward from the first chunk to the last, backward from the
last to the first; the state, or its gradient, stays in vector memory between them. The heads of a step are chains of
products that wait for one another, and are independent: they are written side by side, since the compiler schedules in
the order of the program. With K and Q of length 1, decay M_ij from token j to i, s_i from the state before the chunk
and w_j to the chunk's end,

    A = (K K^T * M) b below the diagonal,   X = (I + A)^-1,   U = X b (V - s K S)
    O = (Q K^T * M) U + s Q S,              S' = s_L S + (w K)^T U

Forward writes S, X and U of each chunk for the backward kernel: 0.1 MiB are read faster than computed again. The
gradient of A is -dR U^T, dR = X^T dU, so nothing is inverted there. Operands of products have the model's data type,
sums are float32: XLA's float32 products read bfloat16 on a TPU too (tests/benchmarks/delta_precision.py).

Cycles of a chunk of a head by libtpu 0.0.21's schedule, delays included, forward and backward:

    heads of a step   v6e               v5e
    2                 2,099 and 1,671   1,996 and 1,995
    4                 1,182 and 1,372   1,263 and 1,576
    8                   807 and 1,149   1,165 and 1,522

Legend as in delta.py, and E = 128 width of values."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from tpu_experiments.runtime.kernels.attention import LANES, SUBLANES, Direction
from tpu_experiments.runtime.kernels.delta import EPS, DeltaCall
from tpu_experiments.runtime.kernels.lowering import hlo_of, on_each_chip
from tpu_experiments.runtime.patches import require_versions

require_versions("jax")
jax.config.update("jax_platforms", "cpu")  # jax only lowers here, and a TPU of this process belongs to torch_xla
SCALE = LANES**-0.5
NN, NT, TN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))
"""Dimension numbers of a product with a matrix, with a transposed one, and of a transposed one."""


def lowered(call: DeltaCall, *, direction: Direction) -> bytes:
    """Return the serialised HloModuleProto of `DeltaKernel.forward` or `backward` over the call's chips."""
    run = _on_each_chip(call, direction)
    return hlo_of(run, arguments_of(call, direction=direction), target=call.target)


def arguments_of(call: DeltaCall, *, direction: Direction) -> list[Any]:
    """Return the shapes of the arguments of the function that `lowered` lowers."""
    chunks = call.length // LANES
    flat = jax.ShapeDtypeStruct((call.rows, call.length, call.heads * LANES), jnp.dtype(call.dtype))
    numbers = jax.ShapeDtypeStruct((call.rows, call.heads, chunks, 3, LANES), jnp.float32)
    documents = jax.ShapeDtypeStruct((call.rows, chunks, 2, LANES), jnp.int32)
    squares = jax.ShapeDtypeStruct((call.rows, call.heads, chunks, LANES, LANES), flat.dtype)
    out = jax.ShapeDtypeStruct((call.rows, call.heads, call.length, LANES), flat.dtype)
    return [flat, flat, flat, numbers, documents] + ([squares] * 3 + [out] if direction == "backward" else [])


def _on_each_chip(call: DeltaCall, direction: Direction) -> Callable[..., Any]:
    """Return a kernel over rows and heads of all chips."""
    by_rows = "fsdp" if call.row_shards > 1 else None
    by_heads = "tensor" if call.head_shards > 1 else None
    flat, by_head = PartitionSpec(by_rows, None, by_heads), PartitionSpec(by_rows, by_heads)
    given = [flat, flat, flat, by_head, PartitionSpec(by_rows)]
    given += [by_head] * 4 if direction == "backward" else []
    made = (by_head, by_head, by_head, by_head) if direction == "forward" else (flat, flat, flat, by_head)
    run, mesh = function_of(call, direction=direction), call.mesh
    return on_each_chip(run, shards=mesh.num_shards, tensor=mesh.tensor, given=tuple(given), made=made)


def function_of(call: DeltaCall, *, direction: Direction) -> Callable[..., Any]:
    """Return the function of jax of the rows and heads of one chip."""
    is_back, heads, chunks = direction == "backward", call.heads_of_step, call.length // LANES

    def at(chunk: Any) -> Any:
        return chunks - 1 - chunk if is_back else chunk

    flat = pl.BlockSpec((None, LANES, heads * LANES), lambda row, group, chunk: (row, at(chunk), group))
    numbers = pl.BlockSpec((None, heads, None, 3, LANES), lambda row, group, chunk: (row, group, at(chunk), 0, 0))
    documents = pl.BlockSpec((None, None, 2, LANES), lambda row, group, chunk: (row, at(chunk), 0, 0))
    square = pl.BlockSpec((None, heads, None, LANES, LANES), lambda row, group, chunk: (row, group, at(chunk), 0, 0))
    first = pl.BlockSpec((None, heads, LANES, LANES), lambda row, group, chunk: (row, group, at(chunk), 0))
    given = [flat, flat, flat, numbers, documents] + ([square] * 3 + [first] if is_back else [])
    made = [flat, flat, flat, numbers] if is_back else [first, square, square, square]

    def run(*tensors: Any) -> Any:
        rows, num_heads = tensors[3].shape[:2]
        squares = jax.ShapeDtypeStruct((rows, num_heads, chunks, LANES, LANES), tensors[0].dtype)
        out = jax.ShapeDtypeStruct((rows, num_heads, call.length, LANES), tensors[0].dtype)
        results = tensors[:4] if is_back else [out, squares, squares, squares]
        shapes = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in results]
        count, moved = rows * num_heads * chunks, [*tensors, *shapes]
        return pl.pallas_call(
            functools.partial(_backward if is_back else _forward, heads=heads),
            grid=(rows, num_heads // heads, chunks),
            in_specs=given,
            out_specs=made,
            out_shape=shapes,
            scratch_shapes=[pltpu.VMEM((heads, LANES, LANES), jnp.float32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=int(count * call.flops[is_back]),
                transcendentals=count * LANES * (LANES + 4),
                bytes_accessed=sum(each.size * each.dtype.itemsize for each in moved),
            ),
            interpret=call.target == "interpreted",
            name=f"delta_{direction}",
        )(*tensors)

    return run


class _Tokens:
    """Decays and rates of one head's tokens, as both kernels use them: columns (L, 1) unless said otherwise."""

    def __init__(self, numbers: Any, documents: Any) -> None:
        coarse, fine, rate = (numbers[i : i + 1] for i in range(3))
        segments, before = (documents[i : i + 1] for i in range(2))
        sums, last = coarse + fine, slice(LANES - 1, LANES)
        since = _decay(sums, segments == before)
        until = _decay((coarse[:, last] - coarse) + (fine[:, last] - fine), segments == segments[:, last])
        self.kept = _decay(sums[:, last], segments[:, last] == before)
        """Decay of the state over the chunk, the same number in a row (1, L)."""
        of_document = segments.astype(jnp.float32)
        of_row = _columns([coarse, fine, rate, since, until, of_document])
        self.rate, self.since, self.until = of_row[2:5]
        at_row, at_column = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        self.below, self.apart, self.same = at_row > at_column, at_row ^ at_column, at_row == at_column
        is_seen = (at_row >= at_column) & (of_row[5] == of_document)
        self.decay = _decay((of_row[0] - coarse) + (of_row[1] - fine), is_seen)
        """From the token of a column to that of a row (L, L)."""


def _forward(*refs: Any, heads: int) -> None:
    """Write the output, state, inverse and corrections of one chunk of some heads."""
    query, key, value, numbers, documents, out, states, inverses, corrections, state = refs
    dtype = value.dtype

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)

    def of(head: int) -> Iterator[None]:
        at = slice(head * LANES, (head + 1) * LANES)
        tokens = _Tokens(numbers[head], documents[...])
        k, q = _of_length_1(key[:, at])[0], _of_length_1(query[:, at])[0] * SCALE
        low, before = k.astype(dtype), state[head]
        both, before_low = jnp.concatenate([low, q.astype(dtype)], 0), before.astype(dtype)
        states[head] = before_low
        alike = _product(both, low, NT)
        yield
        known = _product(both, before_low)
        strict, scores = alike[:LANES] * tokens.decay * tokens.rate, (alike[LANES:] * tokens.decay).astype(dtype)
        wanted = (tokens.rate * (value[:, at].astype(jnp.float32) - tokens.since * known[:LANES])).astype(dtype)
        read, written = tokens.since * known[LANES:], (k * tokens.until).astype(dtype)
        # In rounds, as in `inverse_of_unit_lower`.
        inverse = jnp.where(tokens.same, 1.0, 0.0) - jnp.where(tokens.below & (tokens.apart < 2), strict, 0.0)
        half = 2
        while half < LANES:
            is_between = tokens.below & (tokens.apart >= half) & (tokens.apart < 2 * half)
            between, rounded = jnp.where(is_between, strict, 0.0).astype(dtype), inverse.astype(dtype)
            yield
            changed = _product(rounded, between).astype(dtype)
            yield
            inverse = inverse - _product(changed, rounded)
            half *= 2
        inverses[head] = rounded = inverse.astype(dtype)
        yield
        corrections[head] = new = _product(rounded, wanted).astype(dtype)
        yield
        out[head] = (_product(scores, new) + read).astype(dtype)
        state[head] = tokens.kept * before + _product(written, new, TN)

    _side_by_side(of(head) for head in range(heads))


def _backward(*refs: Any, heads: int) -> None:
    """Write the gradients of one chunk of some heads."""
    query, key, value, numbers, documents, states, inverses, corrections, grad, dq, dk, dv, dnumbers, dstate = refs
    dtype = value.dtype

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        dstate[...] = jnp.zeros_like(dstate)

    def of(head: int) -> Iterator[None]:
        at = slice(head * LANES, (head + 1) * LANES)
        tokens = _Tokens(numbers[head], documents[...])
        decay, rate, since, until = tokens.decay, tokens.rate, tokens.since, tokens.until
        (k, k_factor), (q, q_factor) = _of_length_1(key[:, at]), _of_length_1(query[:, at])
        q, q_factor = q * SCALE, q_factor * SCALE
        k_low, q_low = k.astype(dtype), q.astype(dtype)
        both = jnp.concatenate([q_low, k_low], 0)
        alike = _product(both, k_low, NT)
        yield
        scores, strict = alike[:LANES] * decay, jnp.where(tokens.below, alike[LANES:] * decay, 0.0)  # strict: A / b
        before, after, new, grad_out = states[head], dstate[head], corrections[head], grad[head]
        after_low = after.astype(dtype)
        dnew = _product(scores.astype(dtype), grad_out, TN) + _product((k * until).astype(dtype), after_low)
        dwanted = _product(inverses[head], dnew.astype(dtype), TN)
        dv[:, at] = (rate * dwanted).astype(dv.dtype)
        pairs = _product(jnp.concatenate([grad_out, dwanted.astype(dtype)], 0), new, NT)
        dscores, dstrict = pairs[:LANES], jnp.where(tokens.below, -pairs[LANES:], 0.0)
        of_rate = dstrict * strict
        of_decay = of_rate * rate + dscores * scores
        dalike_q, dalike_k = (dscores * decay).astype(dtype), (dstrict * (decay * rate)).astype(dtype)
        dread = jnp.concatenate([since * grad_out.astype(jnp.float32), -since * dwanted], 0).astype(dtype)
        of_state = _product(dread, before, NT)
        dq_state, dk_state = of_state[:LANES], rate * of_state[LANES:]
        dk_after = until * _product(new, after_low, NT)
        dq_whole = _product(dalike_q, k_low) + dq_state
        dk_whole = _product(dalike_k, k_low) + _product(jnp.concatenate([dalike_q, dalike_k], 0), both, TN)
        dk_whole = dk_whole + dk_state + dk_after
        dq[:, at] = (q_factor * (dq_whole - q * ((q * dq_whole).sum(1, keepdims=True) * LANES))).astype(dq.dtype)
        dk[:, at] = (k_factor * (dk_whole - k * (k * dk_whole).sum(1, keepdims=True))).astype(dk.dtype)
        of_until = k * dk_after
        gains = (of_decay + q * dq_state + k * dk_state - of_until).sum(1, keepdims=True)
        drate = (dwanted * value[:, at].astype(jnp.float32) + k * of_state[LANES:] + of_rate).sum(1, keepdims=True)
        lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
        of_row = jnp.where(lane == 0, gains, jnp.where(lane == 1, drate, 0.0)).T
        ends = (of_until + tokens.kept * (after * before.astype(jnp.float32))).sum(0, keepdims=True)
        at_end = jnp.where(lane[:1] == LANES - 1, ends.sum(1, keepdims=True), 0.0)
        dsums = of_row[:1] - of_decay.sum(0, keepdims=True) + at_end
        dnumbers[head] = jnp.concatenate([jnp.zeros_like(dsums), dsums, of_row[1:2]], 0)
        rated = jnp.concatenate([q_low, (k * rate).astype(dtype)], 0)
        dstate[head] = tokens.kept * after + _product(rated, dread, TN)

    _side_by_side(of(head) for head in range(heads))


def _side_by_side(heads: Iterable[Iterator[None]]) -> None:
    """Run the heads' computations in turns, each to its next product that others wait for."""
    for _ in itertools.zip_longest(*heads):
        pass


def _decay(logarithm: Any, is_same: Any) -> Any:
    """Return decays, 0 between documents."""
    return jnp.exp(jnp.where(is_same, logarithm, -jnp.inf))


def _columns(rows: Sequence[Any]) -> list[Any]:
    """Return up to 8 rows (1, L) as columns (L, 1)."""
    turned = jnp.concatenate([*rows, *[jnp.zeros_like(rows[0])] * (SUBLANES - len(rows))], 0).T
    return [turned[:, number : number + 1] for number in range(len(rows))]


def _of_length_1(vectors: Any) -> tuple[Any, Any]:
    """Return vectors (L, D) over their length, and the factors of that (L, 1)."""
    vectors = vectors.astype(jnp.float32)
    factor = jax.lax.rsqrt((vectors * vectors).sum(1, keepdims=True) + EPS)
    return vectors * factor, factor


def _product(a: Any, b: Any, dims: Any = NN) -> Any:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
