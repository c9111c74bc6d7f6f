"""Attention of rows that vector memory holds, as two Pallas kernels for the TPU: jax alone.

A kernel takes one block of up to 1,024 tokens of one head of one row at a time, forward a block of queries, backward
one of keys. What the block meets stays in vector memory for all blocks: the keys and values of the row (and of all
heads that share them), or its queries and gradients. So one backward kernel is enough, where splash (splash.py) has two
for several blocks, which compute scores and weights twice.

Splash computes every score of a block that has a visible one: of a causal row of one block, all T^2. Here a block is
cut into parts of 256, each of which meets only the tokens inside the block that the causal mask and the window leave
it, known when the kernel is written: 0.625 T^2 scores for 1,024 tokens. Blocks beside it are met whole, in a loop. The
first products of the next part are computed beside the softmax of this one; q and k are rotated as they are read.

Scores are (keys, queries). Sums over keys then add registers instead of lanes, log-sum-exps are rows as the backward
pass reads them, and what is transposed has D features of a token, not its weights. Softmax goes by powers of 2, as the
TPU's exponential does; log2(e) is part of the factor of the rotated queries. Cycles of one causal head by libtpu
0.0.21's final schedule, forward and backward (tests/benchmarks/RESULTS.md):

                               splash              here
    1,024 tokens, D=128, v6e   5,067 and 7,870     2,918 and 5,250
    1,024 tokens, D=64, v5e    7,220 and 13,045    4,183 and 8,199
    4,096 tokens, D=128, v6e   49,400 and 108,800  30,000 and 49,600

Legend: B rows, H query heads, K key/value heads, T tokens, D head dimension, P tokens of a part or block, W tokens that
it meets."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_experiments.runtime.kernels.attention import LANES, SUBLANES, AttentionCall, Meeting, Phase, Target
from tpu_experiments.runtime.kernels.heads import heads_first, heads_last, rotate

LOG2_E = math.log2(math.e)
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a masked pair: the sum of two is still a number."""
VMEM_BYTES = 64 * 2**20
"""Vector memory that a kernel of several blocks may use; of 8,192 tokens and 128 features it holds about 45 MiB."""
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
"""Dimension numbers of a product with a matrix, and with a transposed one."""


def forward(call: AttentionCall, *, target: Target) -> Callable[..., Any]:
    """Return the function (q, k, v, segments, rotation or None) -> (out (B, T, H D), log-sum-exp (B, H, T))."""
    return lambda *tensors: _called(call, "fwd", *tensors, target=target)


def backward(call: AttentionCall, *, target: Target) -> Callable[..., Any]:
    """Return the function (q, k, v, segments, rotation or None, log-sum-exp, row sums, grad of out) -> (dq, dk, dv).

    Row sums (B, H, T) are those of out x grad of out over a head's features. With a further argument, the number of a
    layer, q, k and v are stacks, and the kernel's blocks are those of that layer: nothing copies a layer out of them.
    """
    return lambda *tensors: _called(call, "bwd", *tensors, target=target)


def _called(call: AttentionCall, phase: Phase, *tensors: Any, target: Target) -> Any:
    """Run a kernel over the grid (B, H, blocks of a row): heads that share a key follow each other."""
    query, key, value, segments, rotation, *others = tensors
    rows, length = segments.shape
    kept = [pl.BlockSpec((None, SUBLANES, length), lambda row, *_: (row, 0, 0))]
    kept.append(pl.BlockSpec((None, length, LANES), lambda row, *_: (row, 0, 0)))
    if call.rotates:
        kept.append(pl.BlockSpec((2, None, length, call.head_dim), lambda row, *_: (0, row, 0, 0)))

    def in_order(tensor: Any) -> Any:
        return tensor if call.is_flat else heads_first(tensor, head_dim=call.head_dim)

    def of_rows(tensor: Any) -> Any:
        return jnp.broadcast_to(tensor[..., None, :], (*tensor.shape[:-1], SUBLANES, length))

    given = [in_order(query), in_order(key), in_order(value), of_rows(segments)]
    given.append(jnp.broadcast_to(segments[..., None], (*segments.shape, LANES)))
    given += [rotation] if call.rotates else []
    shapes = [tensor.shape[1:] if call.reads_by_number else tensor.shape for tensor in given[:2]]
    of_head, of_key = (jax.ShapeDtypeStruct(shape, query.dtype) for shape in shapes)
    layer: list[Any] = []
    if phase == "fwd":
        queries, keys = _heads(call, by_block=True), _heads(call, of_keys=True)
        in_specs, out_specs = [queries, keys, keys, *kept], [queries, _sums(call, by_block=True)]
        results = [of_head, jax.ShapeDtypeStruct((rows, call.heads, SUBLANES, length), jnp.float32)]
    else:
        log_sum, row_sums, grad, *layer = others
        given += [of_rows(log_sum), of_rows(row_sums), in_order(grad)]
        queries, whole, sums = _heads(call), _heads(call, of_keys=True), _sums(call)
        read = _heads(call, stacked=call.reads_by_number)
        keys = _heads(call, by_block=True, of_keys=True, stacked=call.reads_by_number)
        in_specs, out_specs = [read, keys, keys, *kept, sums, sums, queries], [queries, whole, whole]
        results = [of_head, of_key, of_key]
    grid = (rows, call.heads, call.num_blocks)
    numbers = [number.reshape(1) for number in layer]

    def kernel(*refs: Any) -> None:
        (_forward if phase == "fwd" else _backward)(*refs[len(numbers) :], call=call)

    found = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(len(numbers), grid, in_specs, out_specs, _scratch(call, phase)),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),  # rows, where a chip has two cores (v4, v5p)
            vmem_limit_bytes=None if call.num_blocks == 1 else VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=rows * call.flops(phase),
            transcendentals=rows * call.exponentials(phase),
            bytes_accessed=rows * call.bytes_moved(phase),
        ),
        interpret=target == "interpreted",
        name="attention_forward" if phase == "fwd" else "attention_backward",  # read by planning/hlo/program.py
    )(*numbers, *given)
    in_heads = found if phase == "bwd" else found[:1]
    made = [tensor if call.is_flat else heads_last(tensor) for tensor in in_heads]
    return tuple(made) if phase == "bwd" else (*made, found[1][:, :, 0])


def _heads(call: AttentionCall, *, by_block: bool = False, of_keys: bool = False, stacked: bool = False) -> Any:
    """Return the block spec of a head's row, or of a block of it, in the call's order.

    Args:
        stacked: it is taken out of a stack, by the number of the layer that the grid prefetches.
    """
    tokens, group = call.block if by_block else call.padded_length, call.heads // call.kv_heads if of_keys else 1

    def at(row: Any, head: Any, block: Any, *number: Any) -> tuple[Any, ...]:
        token = block if by_block else 0
        layer = [ref[0] for ref in number] if stacked else []
        return (*layer, row, token, head // group) if call.is_flat else (row, head // group, token, 0)

    outer = (None,) * (1 + stacked) if call.is_flat else (None, None)
    return pl.BlockSpec((*outer, tokens, call.head_dim), at)


def _sums(call: AttentionCall, *, by_block: bool = False) -> Any:
    """Return the block spec of numbers of a head's tokens, (B, H, 8, T)."""
    tokens = call.block if by_block else call.padded_length
    shape = (None, None, SUBLANES, tokens)
    return pl.BlockSpec(shape, lambda row, head, block, *_: (row, head, 0, block if by_block else 0))


def _scratch(call: AttentionCall, phase: Phase) -> list[Any]:
    """Return the memory of a kernel: q and k rotated, v or k transposed, and sums; whole rows of what is met."""
    whole, part, size = call.padded_length, call.block, call.head_dim
    if phase == "fwd":
        held, sums = [(part, size), (whole, size), (size, whole)], [(SUBLANES, part), (SUBLANES, part), (size, part)]
        sums = sums if call.num_blocks > 1 else []
    else:
        held, sums = [(whole, size), (part, size), (size, part)], [(size, whole), (whole, size), (whole, size)]
    in_dtype = [pltpu.VMEM(shape, jnp.dtype(call.dtype)) for shape in held]
    return in_dtype + [pltpu.VMEM(shape, jnp.float32) for shape in sums]


def _in_twos(call: AttentionCall) -> bool:
    """Whether scores are logarithms to base 2: their factor log2(e) is then rounded once, with the rotated queries."""
    return call.rotates and call.scores.soft_cap is None


def _forward(*refs: Any, call: AttentionCall) -> None:
    """Write the output (P, D) and the log-sum-exps (8, P) of one block of one head of one row."""
    query, key, value, by_query, by_key, *others = refs
    *table, out, log_sum, queries, keys, values_DT = others[: 5 + call.rotates]
    running = others[5 + call.rotates :]  # maxima, sums of weights, and weighted values, over the blocks met so far
    number, block = pl.program_id(2), slice(0, call.block)
    start = _start(call, number)
    power, log = (jnp.exp2, jnp.log2) if _in_twos(call) else (jnp.exp, jnp.log)
    factor = call.scores.scale * (LOG2_E if _in_twos(call) else 1.0)
    queries[...] = _turned(query[...], table, _at(start, block), factor=factor).astype(queries.dtype)

    def read(number: Any) -> None:
        at = _at(_start(call, number), block)
        keys[at] = _turned(key[at], table, at).astype(keys.dtype)
        values_DT[:, at] = value[at].T

    @pl.when((_number_in_group(call) == 0) & (number == 0))
    def _() -> None:
        _each(0, call.num_blocks, read)

    def scores_of(at: Any, part: slice, *, ahead: Any) -> Any:
        of_query = by_query[:1, _at(start, part)]
        return _scores(call, keys[at], queries[part], by_key[at], of_query, ahead=ahead)[0]

    def added(part: slice, at: Any, scores: Any) -> tuple[Any, Any, Any]:
        """Return maxima, sums and weighted values of a part with those of the blocks before."""
        most = scores.max(axis=0, keepdims=True)
        most = jnp.maximum(most, running[0][:1, part]) if running else most
        weights = power(scores - most)
        total = weights.sum(axis=0, keepdims=True)
        mixed = _product(values_DT[:, at], weights.astype(value.dtype), NN)
        if running:
            less = power(running[0][:1, part] - most)
            total, mixed = total + less * running[1][:1, part], mixed + less * running[2][:, part]
        return most, total, mixed

    def meet(other: Any) -> None:
        at = _at(_start(call, other), block)
        most, total, mixed = added(block, at, scores_of(at, block, ahead=(number - other) * call.block))
        running[0][:1], running[1][:1], running[2][...] = most, total, mixed

    if running:
        running[0][...] = jnp.full_like(running[0], HIDDEN)
        running[1][...], running[2][...] = jnp.zeros_like(running[1]), jnp.zeros_like(running[2])
        _other_blocks(call, number, meet, later=False)
        if not call.scores.causal:
            _other_blocks(call, number, meet, later=True)

    def first(meeting: Meeting) -> Any:
        part, met = meeting
        return scores_of(_at(start, met), part, ahead=part.start - met.start)

    for (part, met), scores_WP in _one_ahead(call.meetings("fwd"), first):
        most, total, mixed_DP = added(part, _at(start, met), scores_WP)
        out[part] = (mixed_DP / total).T.astype(out.dtype)
        sums = most + log(total)
        log_sum[:, part] = jnp.broadcast_to(sums / LOG2_E if _in_twos(call) else sums, log_sum[:, part].shape)


def _backward(*refs: Any, call: AttentionCall) -> None:
    """Add a block of keys to dq (T, D) of one head of one row, and the head to dk and dv of the block.

    For weights p, scores s and the gradient g of the output: dv = p^T g, ds = p (g v^T - row sums), dq = ds k and
    dk = ds^T q.
    """
    keys = _BlockOfKeys(call, *refs)
    keys.begin()

    def meet(other: Any) -> None:
        at = _at(_start(call, other), keys.block)
        keys.add(keys.block, at, *keys.first(keys.block, at, ahead=(other - keys.number) * call.block))

    if call.num_blocks > 1:
        _other_blocks(call, keys.number, meet, later=True)
        if not call.scores.causal:
            _other_blocks(call, keys.number, meet, later=False)

    def of_meeting(meeting: Meeting) -> Any:
        part, met = meeting
        return keys.first(part, _at(keys.start, met), ahead=met.start - part.start)

    for (part, met), made in _one_ahead(call.meetings("bwd"), of_meeting):
        keys.add(part, _at(keys.start, met), *made)
    keys.end()


class _BlockOfKeys:
    """The memory of the backward kernel at one block of keys, and what is computed in it."""

    def __init__(self, call: AttentionCall, *refs: Any) -> None:
        *given, self.log_sum, self.row_sums, self.grad, self.dq, self.dk, self.dv = refs[:-6]
        self.queries, self.keys, self.keys_DT, self.dq_DT, self.dk_TD, self.dv_TD = refs[-6:]
        self.query, self.key, self.value, self.by_query, self.by_key, *self.table = given
        self.call, self.number, self.block, self.dtype = call, pl.program_id(2), slice(0, call.block), self.value.dtype
        self.start = _start(call, self.number)
        self.here, self.of_group = _at(self.start, self.block), _number_in_group(call)
        self.power, self.unit = (jnp.exp2, LOG2_E) if _in_twos(call) else (jnp.exp, 1.0)

    def begin(self) -> None:
        """Rotate the block's keys, with the row's first block its queries, and with a key's first head empty sums."""
        self.keys[...] = _turned(self.key[...], self.table, self.here).astype(self.dtype)
        self.keys_DT[...] = self.keys[...].T

        def read(number: Any) -> None:
            at, factor = _at(_start(self.call, number), self.block), self.call.scores.scale * self.unit
            self.queries[at] = _turned(self.query[at], self.table, at, factor=factor).astype(self.dtype)
            self.dq_DT[:, at] = jnp.zeros_like(self.dq_DT[:, at])

        @pl.when(self.number == 0)
        def _() -> None:
            _each(0, self.call.num_blocks, read)

        @pl.when(self.of_group == 0)
        def _() -> None:
            self.dk_TD[self.here] = jnp.zeros_like(self.dk_TD[self.here])
            self.dv_TD[self.here] = jnp.zeros_like(self.dv_TD[self.here])

    def first(self, part: slice, at: Any, *, ahead: Any) -> tuple[Any, Any, Any]:
        """Return the scores of a part of the keys, their slope, and the gradients of their weights."""
        of_key, of_query = self.by_key[_at(self.start, part)], self.by_query[:1, at]
        scores = _scores(self.call, self.keys[part], self.queries[at], of_key, of_query, ahead=ahead)
        return *scores, _product(self.value[part], self.grad[at], NT)

    def add(self, part: slice, at: Any, scores_PW: Any, slope_PW: Any, of_weights_PW: Any) -> None:
        """Add what `first` returned for a part of the keys to the three gradients."""
        weights_PW = self.power(scores_PW - self.log_sum[:1, at] * self.unit)
        self.dv_TD[_at(self.start, part)] += _product(weights_PW.astype(self.dtype), self.grad[at], NN)
        of_scores_PW = (of_weights_PW - self.row_sums[:1, at]) * weights_PW
        of_scores_PW = (of_scores_PW if slope_PW is None else of_scores_PW * slope_PW).astype(self.dtype)
        self.dk_TD[_at(self.start, part)] += _product(of_scores_PW, self.queries[at], NN)
        self.dq_DT[:, at] += _product(self.keys_DT[:, part], of_scores_PW, NN)

    def end(self) -> None:
        """Write dq with the row's last block, and dk and dv of the block with a key's last head."""

        def write(number: Any) -> None:
            at = _at(_start(self.call, number), self.block)
            turned = _turned(self.dq_DT[:, at].T, self.table, at, backward=True)
            self.dq[at] = (turned * self.call.scores.scale).astype(self.dtype)

        @pl.when(self.number == self.call.num_blocks - 1)
        def _() -> None:
            _each(0, self.call.num_blocks, write)

        @pl.when(self.of_group == self.call.heads // self.call.kv_heads - 1)
        def _() -> None:
            turned = _turned(self.dk_TD[self.here] / self.unit, self.table, self.here, backward=True)
            self.dk[self.here] = turned.astype(self.dtype)
            self.dv[self.here] = self.dv_TD[self.here].astype(self.dtype)


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


def _other_blocks(call: AttentionCall, number: Any, meet: Callable[[Any], None], *, later: bool) -> None:
    """Call `meet` for each block before, or behind, one of this number, that the window reaches."""
    reach = call.num_blocks if call.window is None else -(-(call.window - 1) // call.block)
    if later:
        _each(number + 1, jnp.minimum(call.num_blocks, number + reach + 1), meet)
    else:
        _each(jnp.maximum(0, number - reach), number, meet)


def _each(first: Any, end: Any, run: Callable[[Any], None]) -> None:
    """Call `run` for every number from `first` up to `end`; a loop, unless it is only one known now."""
    if isinstance(end, int) and end - first == 1:
        run(first)
    else:
        jax.lax.fori_loop(first, end, lambda number, _: run(number), None)


def _start(call: AttentionCall, number: Any) -> Any:
    """Return the first token of a block; 0, known now, where there is only one."""
    return 0 if call.num_blocks == 1 else number * call.block


def _at(start: Any, part: slice) -> Any:
    """Return the tokens of a part behind `start`."""
    if isinstance(start, int):
        return slice(start + part.start, start + part.stop)
    return pl.ds(pl.multiple_of(start + part.start, LANES), part.stop - part.start)


def _number_in_group(call: AttentionCall) -> Any:
    """Return the number of the query head among those that share a key."""
    return pl.program_id(1) % (call.heads // call.kv_heads)


def _turned(x_TD: Any, table: list[Any], at: Any, *, factor: float = 1.0, backward: bool = False) -> Any:
    """Return x, or the gradients of it, rotated where the call rotates, times `factor`; float32 where it changes."""
    if table:
        x_TD = rotate(x_TD, table[0][0, at], table[0][1, at], backward=backward)
    return x_TD if factor == 1 else x_TD.astype(jnp.float32) * factor


def _scores(call: AttentionCall, keys: Any, queries: Any, by_key: Any, by_query: Any, *, ahead: Any) -> tuple[Any, Any]:
    """Return scores (keys, queries) with the masked ones hidden, and the slope of the soft cap, None without one.

    Args:
        by_key: segments of the keys, over all lanes.
        by_query: those of the queries, as a row.
        ahead: tokens from the first key to the first query; a number known now inside a block.
    """
    raw = _product(keys, queries, NT)
    cap, slope = call.scores.soft_cap, None
    if cap is not None:
        bent = jnp.tanh(raw / cap)
        raw, slope = cap * bent, 1.0 - bent * bent
    mask = jnp.concatenate([by_key] * (raw.shape[1] // LANES), axis=1) == by_query
    tests: list[Callable[[Any], Any]] = []  # of a query's distance behind a key, where a pair may fail one
    reach = (call.window or call.padded_length) - 1
    nearest, farthest = (0 if call.scores.causal else -reach), reach
    if isinstance(ahead, int):
        hides_near, hides_far = ahead - raw.shape[0] + 1 < nearest, ahead + raw.shape[1] - 1 > farthest
    else:
        hides_far = call.window is not None
        hides_near = hides_far and not call.scores.causal
    if hides_near:
        tests.append(lambda distance: distance >= nearest)
    if hides_far:
        tests.append(lambda distance: distance <= farthest)
    if tests:
        at_key, at_query = (jax.lax.broadcasted_iota(jnp.int32, raw.shape, axis) for axis in (0, 1))
        distance = at_query - at_key + ahead
        mask = functools.reduce(jnp.logical_and, [test(distance) for test in tests], mask)
    return jnp.where(mask, raw, HIDDEN), slope


def _product(a: Any, b: Any, dims: Any) -> Any:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
