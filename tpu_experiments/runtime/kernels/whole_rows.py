"""Attention of rows that a kernel holds whole, as Pallas kernels for the TPU: jax alone.

Splash (splash.py) computes every score of a block that has a visible one: of a causal row that is one block, all T^2.
Here a row of up to 1,024 tokens is cut into parts of 256, and a part meets only the tokens that the causal mask and the
window leave it, known when the kernel is written: 0.625 T^2 scores for 1,024 tokens. The first products of the next
part are computed beside the softmax of this one, and q and k are rotated as they are read.

Scores are (keys, queries). Sums over keys then add registers instead of lanes, log-sum-exps are rows as the backward
pass reads them, and what is transposed has D features of a token, not its T probabilities. By the final schedule of
libtpu 0.0.21, cycles of one head, forward and backward, 1,024 tokens (splash in one block; here):

    D=128, causal        v6e 5,067 and 7,870; 2,928 and 5,113    v5e 6,836 and 12,039; 4,152 and 8,014
    D=64, causal         v6e 5,674 and 9,000; 3,179 and 5,414    v5e 7,220 and 13,045; 4,195 and 8,181
    D=64, 64 on each side v6e 6,619 and 9,361; 2,435 and 3,441

Softmax goes by powers of 2, as the TPU's exponential does; log2(e) is part of the factor of the rotated queries.
Legend: B rows, H query heads, K key/value heads, T tokens, D head dimension, P tokens of a part, W tokens it meets."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_experiments.runtime.kernels.attention import LANES, SUBLANES, AttentionCall, Meeting, Phase, Target
from tpu_experiments.runtime.kernels.heads import heads_first, heads_last, rotate, turn

LOG2_E = math.log2(math.e)
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a masked pair: the sum of two is still a number."""
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
"""Dimension numbers of a product with a matrix, and with a transposed one."""


def forward(call: AttentionCall, *, target: Target) -> Callable[..., Any]:
    """Return the function (q, k, v, segments, rotation or None) -> (out (B, T, H D), log-sum-exp (B, H, T))."""
    return lambda *tensors: _called(call, "fwd", *tensors, target=target)


def backward(call: AttentionCall, *, target: Target) -> Callable[..., Any]:
    """Return the function (q, k, v, segments, rotation or None, log-sum-exp, row sums, grad of out) -> (dq, dk, dv).

    Row sums (B, H, T) are those of out x grad of out over a head's features.
    """
    return lambda *tensors: _called(call, "bwd", *tensors, target=target)


def _called(call: AttentionCall, phase: Phase, *tensors: Any, target: Target) -> Any:
    """Run a kernel over the grid (B, H): heads that share a key follow each other."""
    query, key, value, segments, rotation, *others = tensors
    rows, length = segments.shape
    heads, shared = _blocks(call)
    by_query = pl.BlockSpec((None, SUBLANES, length), lambda row, head: (row, 0, 0))
    by_key = pl.BlockSpec((None, length, LANES), lambda row, head: (row, 0, 0))
    sums = pl.BlockSpec((None, None, SUBLANES, length), lambda row, head: (row, head, 0, 0))
    table = pl.BlockSpec((2, None, length, call.head_dim), lambda row, head: (0, row, 0, 0))

    def in_order(tensor: Any) -> Any:
        return tensor if call.is_flat else heads_first(tensor, head_dim=call.head_dim)

    def of_rows(tensor: Any) -> Any:
        return jnp.broadcast_to(tensor[..., None, :], (*tensor.shape[:-1], SUBLANES, length))

    given = [in_order(query), in_order(key), in_order(value), of_rows(segments)]
    given.append(jnp.broadcast_to(segments[..., None], (*segments.shape, LANES)))
    in_specs = [heads, shared, shared, by_query, by_key]
    if call.rotates:
        given.append(rotation)
        in_specs.append(table)
    of_head, of_key = (jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in given[:2])
    if phase == "fwd":
        of_sums = jax.ShapeDtypeStruct((rows, call.heads, SUBLANES, length), jnp.float32)
        results, out_specs = [of_head, of_sums], [heads, sums]
    else:
        log_sum, row_sums, grad = others
        given += [of_rows(log_sum), of_rows(row_sums), in_order(grad)]
        in_specs += [sums, sums, heads]
        results, out_specs = [of_head, of_key, of_key], [heads, shared, shared]
    found = pl.pallas_call(
        functools.partial(_forward if phase == "fwd" else _backward, call=call),
        grid=(rows, call.heads),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=results,
        scratch_shapes=_scratch(call, phase, length=length),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=rows * call.flops(phase),
            transcendentals=rows * call.exponentials(phase),
            bytes_accessed=rows * call.bytes_moved(phase),
        ),
        interpret=target == "interpreted",
        name="attention_forward" if phase == "fwd" else "attention_backward",  # read by planning/hlo/program.py
    )(*given)
    in_heads = found if phase == "bwd" else found[:1]
    made = [tensor if call.is_flat else heads_last(tensor) for tensor in in_heads]
    return tuple(made) if phase == "bwd" else (*made, found[1][:, :, 0])


def _blocks(call: AttentionCall) -> tuple[Any, Any]:
    """Return the blocks of a query head and of the key/value head that it reads, whole rows in the call's order."""
    group, size = call.heads // call.kv_heads, (call.padded_length, call.head_dim)
    if call.is_flat:
        return (
            pl.BlockSpec((None, *size), lambda row, head: (row, 0, head)),
            pl.BlockSpec((None, *size), lambda row, head: (row, 0, head // group)),
        )
    return (
        pl.BlockSpec((None, None, *size), lambda row, head: (row, head, 0, 0)),
        pl.BlockSpec((None, None, *size), lambda row, head: (row, head // group, 0, 0)),
    )


def _scratch(call: AttentionCall, phase: Phase, *, length: int) -> list[Any]:
    """Return the memory of a kernel: q and k rotated, v or k transposed; backward also the sums of dq, dk and dv."""
    by_token, by_feature = (length, call.head_dim), (call.head_dim, length)
    held = [pltpu.VMEM(shape, jnp.dtype(call.dtype)) for shape in (by_token, by_token, by_feature)]
    sums = (by_feature, by_token, by_token) if phase == "bwd" else ()
    return held + [pltpu.VMEM(shape, jnp.float32) for shape in sums]


def _in_twos(call: AttentionCall) -> bool:
    """Whether scores are logarithms to base 2: their factor log2(e) is then rounded once, with the rotated queries."""
    return call.rotates and call.scores.soft_cap is None


def _forward(*refs: Any, call: AttentionCall) -> None:
    """Write the output (T, D) and the log-sum-exps (8, T) of one head of one row."""
    *given, out, log_sum, queries, keys, values_DT = refs
    value, segments = given[2], given[3:5]
    _read_queries(given, queries, call=call)

    @pl.when(_number_in_group(call) == 0)
    def _() -> None:
        _read_keys(given, keys)
        values_DT[...] = value[...].T

    def first(meeting: Meeting) -> Any:
        return _scores(call, keys, queries, segments, keys_at=meeting.others, queries_at=meeting.part)[0]

    power, log = (jnp.exp2, jnp.log2) if _in_twos(call) else (jnp.exp, jnp.log)
    for (part, others), scores_WP in _one_ahead(call.meetings("fwd"), first):
        most = scores_WP.max(axis=0, keepdims=True)
        weights_WP = power(scores_WP - most)
        total = weights_WP.sum(axis=0, keepdims=True)
        mixed_DP = _product(values_DT[:, others], weights_WP.astype(value.dtype), NN) / total
        out[part] = mixed_DP.T.astype(out.dtype)
        sums = most + log(total)
        log_sum[:, part] = jnp.broadcast_to(sums / LOG2_E if _in_twos(call) else sums, log_sum[:, part].shape)


def _backward(*refs: Any, call: AttentionCall) -> None:
    """Write dq (T, D) of one head of one row, and dk and dv with the last head that reads them.

    For weights p and scores s: dv = p^T dout, ds = p (dout v^T - row sums), dq = ds k, dk = ds^T q.
    """
    *given, log_sum, row_sums, grad, dq, dk, dv, queries, keys, keys_DT, dq_DT, dk_TD, dv_TD = refs
    segments, value, table = given[3:5], given[2], given[5:]
    number, dtype = _number_in_group(call), value.dtype
    _read_queries(given, queries, call=call)
    dq_DT[...] = jnp.zeros_like(dq_DT)

    @pl.when(number == 0)
    def _() -> None:
        _read_keys(given, keys)
        keys_DT[...] = keys[...].T
        dk_TD[...] = jnp.zeros_like(dk_TD)
        dv_TD[...] = jnp.zeros_like(dv_TD)

    def first(meeting: Meeting) -> Any:
        part, others = meeting
        scores = _scores(call, keys, queries, segments, keys_at=part, queries_at=others)
        return *scores, _product(value[part], grad[others], NT)

    power, unit = (jnp.exp2, LOG2_E) if _in_twos(call) else (jnp.exp, 1.0)
    for (part, others), (scores_PW, slope_PW, dweights_PW) in _one_ahead(call.meetings("bwd"), first):
        weights_PW = power(scores_PW - log_sum[:1, others] * unit)
        dv_TD[part] += _product(weights_PW.astype(dtype), grad[others], NN)
        dscores_PW = (dweights_PW - row_sums[:1, others]) * weights_PW
        if slope_PW is not None:
            dscores_PW *= slope_PW
        dscores_PW = dscores_PW.astype(dtype)
        dk_TD[part] += _product(dscores_PW, queries[others], NN)
        dq_DT[:, others] += _product(keys_DT[:, part], dscores_PW, NN)
    dq[...] = (_turned_back(dq_DT[...].T, table) * call.scores.scale).astype(dtype)

    @pl.when(number == call.heads // call.kv_heads - 1)
    def _() -> None:
        dk[...] = _turned_back(dk_TD[...] / unit, table).astype(dtype)
        dv[...] = dv_TD[...].astype(dtype)


def _one_ahead(meetings: Iterable[Meeting], first: Callable[[Meeting], Any]) -> Iterable[tuple[Meeting, Any]]:
    """Yield each part with what `first` computes for it, after that of the next part.

    The compiler schedules in the order of the program: without this a part's products wait for the softmax before them.
    """
    ahead: list[tuple[Meeting, Any]] = []
    for meeting in meetings:
        ahead.append((meeting, first(meeting)))
        if len(ahead) > 1:
            yield ahead.pop(0)
    yield from ahead


def _number_in_group(call: AttentionCall) -> Any:
    """Return the number of the query head among those that share a key."""
    return pl.program_id(1) % (call.heads // call.kv_heads)


def _read_queries(given: list[Any], into: Any, *, call: AttentionCall) -> None:
    """Write the queries, rotated and times the factor of the scores."""
    factor = call.scores.scale * (LOG2_E if _in_twos(call) else 1.0)
    _read(given[0], into, given[5:], factor=factor)


def _read_keys(given: list[Any], into: Any) -> None:
    """Write the keys, rotated."""
    _read(given[1], into, given[5:], factor=1.0)


def _read(source: Any, into: Any, table: list[Any], *, factor: float) -> None:
    if table:
        turn(source, into, table[0], factor=factor)
    else:
        into[...] = (source[...].astype(jnp.float32) * factor).astype(into.dtype) if factor != 1 else source[...]


def _turned_back(grads_TD: Any, table: list[Any]) -> Any:
    """Return the gradients of what was rotated from those of the rotated."""
    return rotate(grads_TD, table[0][0], table[0][1], backward=True) if table else grads_TD


def _scores(
    call: AttentionCall, keys: Any, queries: Any, segments: list[Any], *, keys_at: slice, queries_at: slice
) -> tuple[Any, Any]:
    """Return scores (keys, queries) with the masked ones hidden, and the slope of the soft cap, None without one."""
    by_query, by_key = segments
    raw = _product(keys[keys_at], queries[queries_at], NT)
    cap, slope = call.scores.soft_cap, None
    if cap is not None:
        bent = jnp.tanh(raw / cap)
        raw, slope = cap * bent, 1.0 - bent * bent
    mask = pltpu.repeat(by_key[keys_at], raw.shape[1] // LANES, axis=1) == by_query[:1, queries_at]
    window = call.window or call.padded_length
    newest, oldest = keys_at.stop - 1 - queries_at.start, queries_at.stop - 1 - keys_at.start
    tests: list[Callable[[Any], Any]] = []  # of a key's distance behind the query, only where a pair fails one
    if newest > (0 if call.scores.causal else window - 1):
        tests.append(lambda distance: distance > (-1 if call.scores.causal else -window))
    if oldest > window - 1:
        tests.append(lambda distance: distance < window)
    if tests:
        key = jax.lax.broadcasted_iota(jnp.int32, raw.shape, 0) + (keys_at.start - queries_at.start)
        distance = jax.lax.broadcasted_iota(jnp.int32, raw.shape, 1) - key
        mask = functools.reduce(jnp.logical_and, [test(distance) for test in tests], mask)
    return jnp.where(mask, raw, HIDDEN), slope


def _product(a: Any, b: Any, dims: Any) -> Any:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
