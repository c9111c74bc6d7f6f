"""Attention as jax's Pallas kernels for the TPU ("splash" attention), lowered to HLO without a TPU: jax alone.

The kernels take grouped key/value heads as they are, skip the blocks that a causal mask or the window leaves empty,
and mask by segment. They are called by their inner functions, forward and backward apart: differentiated through jax
the backward pass would run the forward kernel once more.

Splash wants heads first, (H, T, D). A projection makes (T, H D), and the way between is a copy of everything: for
Mistral's queries a third of a projection's time (libtpu 0.0.21, v6e). A block of splash is one head of some tokens;
in (T, H D) that is a block too, so its kernels run unchanged when each block is taken from there, and rotary position
embedding is applied on the way in. Legend: B rows, H query heads, K key/value heads, T tokens, D head dimension."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tpu_experiments.runtime.kernels.attention import LANES, SUBLANES, AttentionCall, Direction, Target, padded_lanes
from tpu_experiments.runtime.patches import TORCHTPU, installed, mosaic_for_libtpu, patched_attribute, require_versions

HEADS_OF: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fwd": ((0, 1, 2), (0,)),
    "dkv": ((0, 1, 2, 7), (0, 1, 2)),
    "dq": ((0, 1, 2, 7), (0,)),
}
"""Indices of each splash kernel's operands (q, k, v, gradient of the output) and results with a head dimension."""
HEAD_AXIS = {"fwd": 0, "dkv": 1, "dq": 0}
"""Dimension of each kernel's grid that query heads are."""
SCRATCH = {"fwd": 3, "dkv": 3, "dq": 1}
"""Results of jax 0.7.1's kernels that come before those and are scratch memory; later ones declare it as that."""


def heads_first(flat: Any, *, head_dim: int) -> Any:
    """Transpose (..., T, N D) to (..., N, T, D)."""
    return jnp.swapaxes(flat.reshape(*flat.shape[:-1], -1, head_dim), -2, -3)


def heads_last(tensor: Any) -> Any:
    """Transpose (..., N, T, D) to (..., T, N D), the inverse of `heads_first`."""
    return jnp.swapaxes(tensor, -2, -3).reshape(*tensor.shape[:-3], tensor.shape[-2], -1)


def flat_call(pallas_call: Callable[..., Any], *, phase: str) -> Callable[..., Any]:
    """Wrap `pallas_call` for one splash kernel so that its blocks are read from and written to (T, H D).

    The operands and results that splash passes stay heads first: each transpose is next to its inverse, and XLA removes
    both.
    """
    operands, results = HEADS_OF[phase]

    def build(kernel: Any, *, grid_spec: Any, out_shape: Any, **settings: Any) -> Callable[..., Any]:
        in_specs, out_specs, shapes = list(grid_spec.in_specs), list(grid_spec.out_specs), list(out_shape)
        scratch = tuple(grid_spec.scratch_shapes)
        for place in operands:
            in_specs[place] = _flat_block(in_specs[place])
        offset = 0 if scratch else SCRATCH[phase]
        given = [offset + place for place in results if shapes[offset + place] is not None]
        for place in given:
            out_specs[place] = _flat_block(out_specs[place])
            shapes[place] = jax.eval_shape(heads_last, shapes[place])
        first = grid_spec.num_scalar_prefetch
        flat_grid = pltpu.PrefetchScalarGridSpec(first, grid_spec.grid, in_specs, out_specs, scratch)
        run = pallas_call(kernel, grid_spec=flat_grid, out_shape=shapes, **settings)

        def call(*tensors: Any) -> list[Any]:
            flat = list(tensors)
            for place in operands:
                flat[first + place] = heads_last(flat[first + place])
            found = list(run(*flat))
            for place in given:
                head_dim, (*parts, tokens, width) = out_specs[place].block_shape[-1], found[place].shape
                # Of one part only, splash's sum over parts is a reshape. In front of it XLA would keep the transpose.
                outer = parts if math.prod(parts) > 1 else []
                heads = heads_first(found[place].reshape(*outer, tokens, width), head_dim=head_dim)
                found[place] = heads.reshape(*parts, *heads.shape[-3:])
            return found

        return call

    return build


def with_sums_by_row(pallas_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `pallas_call` for splash's forward kernel so that it writes log-sum-exps as (H, 8, T), not (H, T, 128).

    Splash repeats each over the 128 lanes and takes the first of them outside: of Qwen2.5 0.5B 59 MB a layer for 8,192
    tokens, 20 of the 855 ms of its step on v6e-1 (planned). Here a block is transposed when it is complete.
    """

    def build(kernel: Any, *, grid_spec: Any, out_shape: Any, **settings: Any) -> Callable[..., Any]:
        *out_specs, wide = grid_spec.out_specs
        *shapes, shape = out_shape
        _, tokens, lanes = wide.block_shape
        assert lanes == LANES, "the log-sum-exps are splash's last result, over all lanes"
        heads, length, _ = shape.shape
        first = grid_spec.num_scalar_prefetch
        place = first + len(grid_spec.in_specs) + len(out_specs)

        def index_map(*at: Any) -> tuple[Any, ...]:
            head, token, _ = wide.index_map(*at)
            return head, 0, token

        def by_row(*refs: Any) -> None:
            *given, repeated = refs
            row, given[place] = given[place], repeated
            kernel(*given)
            last = len(grid_spec.grid) - 1

            @pl.when(pl.program_id(last) == pl.num_programs(last) - 1)
            def _() -> None:
                row[...] = repeated[...].T[:SUBLANES]

        specs = [*out_specs, pl.BlockSpec((None, SUBLANES, tokens), index_map)]
        scratch = (*grid_spec.scratch_shapes, pltpu.VMEM((tokens, lanes), shape.dtype))
        grid = pltpu.PrefetchScalarGridSpec(first, grid_spec.grid, list(grid_spec.in_specs), specs, scratch)
        rows = jax.ShapeDtypeStruct((heads, SUBLANES, length), shape.dtype)
        run = pallas_call(by_row, grid_spec=grid, out_shape=[*shapes, rows], **settings)

        def call(*tensors: Any) -> list[Any]:
            *found, sums = run(*tensors)
            return [*found, sums[:, 0, :, None]]

        return call

    return build


def with_rotation(
    pallas_call: Callable[..., Any], call: AttentionCall, *, phase: str, rotation: Any
) -> Callable[..., Any]:
    """Wrap `pallas_call` for a splash kernel of one block so that it rotates q and k as it reads them.

    A kernel of its own reads and writes each once more: of Mistral 7B 78 us a layer for 2,048 tokens on v6e, by the
    memory's speed, forward and backward. Gradients of q and k are rotated back where the kernel has written them.

    Args:
        rotation: cosine and sine of a row, (2, T, D).
    """
    factor, group = call.scores.scale, call.heads // call.kv_heads

    def build(kernel: Any, *, grid_spec: Any, out_shape: Any, **settings: Any) -> Callable[..., Any]:
        first, in_specs, scratch = grid_spec.num_scalar_prefetch, list(grid_spec.in_specs), grid_spec.scratch_shapes
        turned = in_specs[:2]  # q and k
        tables = [_table_block(spec) for spec in turned]
        end = first + len(in_specs)
        results = end + (0 if scratch else SCRATCH[phase])  # dq and dk of `dkv` are its first

        def turning(*refs: Any) -> None:
            given, own, tables = [*refs[:end], *refs[end + 2 : -2]], refs[-2:], refs[end : end + 2]
            query, key = given[first : first + 2]
            given[first : first + 2] = own
            number = pl.program_id(HEAD_AXIS[phase]) % group  # of the query head, among those that share a key
            _turn(query, own[0], tables[0], factor=factor)
            pl.when(number == 0)(functools.partial(_turn, key, own[1], tables[1]))
            kernel(*given)
            if phase == "dkv":
                of_query, of_key = given[results : results + 2]
                _turn(of_query, of_query, tables[0], factor=factor, backward=True)
                last = functools.partial(_turn, of_key, of_key, tables[1], backward=True)
                pl.when(number == group - 1)(last)

        held = tuple(pltpu.VMEM(spec.block_shape[-2:], jnp.dtype(call.dtype)) for spec in turned)
        grid = pltpu.PrefetchScalarGridSpec(
            first, grid_spec.grid, [*in_specs, *tables], grid_spec.out_specs, (*scratch, *held)
        )
        run = pallas_call(turning, grid_spec=grid, out_shape=out_shape, **settings)
        return lambda *tensors: run(*tensors, rotation, rotation)

    return build


def _turn(source: Any, into: Any, table: Any, *, factor: float = 1.0, backward: bool = False) -> None:
    """Write the rotated values of one reference of a kernel, times `factor`, into another, or the same."""
    turned = _rotate(source[...], table[0], table[1], backward=backward)
    into[...] = (turned if factor == 1 else turned * factor).astype(into.dtype)


def _table_block(spec: Any) -> Any:
    """Return the block of cosines and sines (2, T, D) of the tokens that a block of heads has."""
    return pl.BlockSpec((2, *spec.block_shape[-2:]), lambda *at: (0, spec.index_map(*at)[-2], 0))


def _flat_block(spec: Any) -> Any:
    """Convert a block spec: (..., None, n, D) at (..., h, i, 0) becomes (..., n, D) at (..., i, h)."""
    *outer, _, tokens, head_dim = spec.block_shape

    def index_map(*at: Any) -> tuple[Any, ...]:
        *before, head, token, _ = spec.index_map(*at)
        return *before, token, head

    return pl.BlockSpec((*outer, tokens, head_dim), index_map)


def rotated(
    flat: Any, rotation: Any, *, call: AttentionCall, factor: float, target: Target, backward: bool = False
) -> Any:
    """Apply rope to every head of (B, T, N D) and multiply by `factor`; computed in float32.

    The formula is that of transformers' `apply_rotary_pos_emb`: x cos + rotate_half(x) sin, with
    rotate_half (a, b) = (-b, a).

    Args:
        rotation: cosine and sine, (2, B, T, D).
        backward: compute the gradient of x from the gradient of the output instead.
    """

    def kernel(x_ref: Any, rotation_ref: Any, out_ref: Any) -> None:
        _turn(x_ref, out_ref, rotation_ref, factor=factor, backward=backward)

    rows, length, width = flat.shape
    block, head_dim = call.block, call.head_dim
    given = flat if call.is_flat else heads_first(flat, head_dim=head_dim)
    if call.is_flat:
        heads = pl.BlockSpec((None, block, head_dim), lambda row, token, head: (row, token, head))
    else:
        heads = pl.BlockSpec((None, None, block, head_dim), lambda row, token, head: (row, head, token, 0))
    moved = 2 * rows * (width // head_dim + 1)  # heads in and out, cosine and sine
    num_bytes = moved * length * padded_lanes(head_dim) * flat.dtype.itemsize
    turned = pl.pallas_call(
        kernel,
        grid=(rows, length // block, width // head_dim),
        in_specs=[
            heads,
            pl.BlockSpec((2, None, block, head_dim), lambda row, token, head: (0, row, token, 0)),
        ],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct(given.shape, flat.dtype),
        cost_estimate=pl.CostEstimate(flops=5 * flat.size, transcendentals=0, bytes_accessed=num_bytes),
        interpret=target == "interpreted",
        name="turn_heads",
    )(given, rotation)
    return turned if call.is_flat else heads_last(turned)


def _rotate(x: Any, cos: Any, sin: Any, *, backward: bool) -> Any:
    x, cos, sin = (tensor.astype(jnp.float32) for tensor in (x, cos, sin))
    if backward:
        return x * cos + _halves(x * sin, signs=(1.0, -1.0))
    return x * cos + _halves(x, signs=(-1.0, 1.0)) * sin


def _halves(x: Any, *, signs: Sequence[float]) -> Any:
    """Map (a, b) to (signs[0] b, signs[1] a), inside a kernel."""
    half = x.shape[-1] // 2
    if x.shape[-1] % LANES:
        return jnp.concatenate([signs[0] * x[:, half:], signs[1] * x[:, :half]], axis=-1)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return pltpu.roll(x, half, x.ndim - 1) * jnp.where(lane < half, signs[0], signs[1])


if installed("torch_tpu") is None:
    require_versions("jax")
    jax.config.update("jax_platforms", "cpu")  # jax only lowers here, and a TPU of this process belongs to torch_xla
else:
    require_versions("jax", of=TORCHTPU, lock="requirements-torchtpu.lock")
NO_SEGMENT = -1
"""Segment of tokens that are appended for the kernel's blocks: no token of the row attends to them, padding neither."""
SHARED_SETTINGS = ("mask_value", "is_mqa", "attn_logits_soft_cap", "mask_function", "interpret")


def lowered(call: AttentionCall, *, direction: Direction, target: Target) -> bytes:
    """Return the serialised HloModuleProto of the forward or backward pass.

    Forward is (q, k, v, segments, rotation) -> (out, log-sum-exp); backward is (q, k, v, segments, rotation, out,
    log-sum-exp, grad of out) -> (dq, dk, dv). q, out (B, T, H D); k, v (B, T, K D); segments (B, T) int32; rotation
    (2, B, T, D), left out without rope; log-sum-exp (B, H, T) float32.
    """
    run = function_on_mesh(call, direction=direction, target=target)
    with mosaic_for_libtpu():
        traced = jax.jit(run, keep_unused=True).trace(*arguments_of(call, direction=direction))
        module = traced.lower(lowering_platforms=("tpu" if target == "tpu" else "cpu",)).compiler_ir("hlo")
    return bytes(module.as_serialized_hlo_module_proto())


def function_on_mesh(call: AttentionCall, *, direction: Direction, target: Target) -> Callable[..., Any]:
    """Return the forward or backward pass of `lowered` as a function of jax, over the call's chips."""
    jax.config.update("jax_use_shardy_partitioner", False)  # both backends' programs are partitioned by GSPMD
    run = attention_function(call.of_one_chip, direction=direction, target=target)
    return run if call.num_shards * call.head_shards == 1 else _on_each_chip(run, call, direction=direction)


def _on_each_chip(run: Callable[..., Any], call: AttentionCall, *, direction: Direction) -> Callable[..., Any]:
    """Wrap `run` in a shard_map over rows and heads; XLA's partitioner cannot shard a kernel."""
    # Rows that do not divide are not sharded by the run either: then every chip computes all of them.
    by_rows = "fsdp" if call.rows % call.num_shards == 0 else None
    by_heads = "tensor" if call.head_shards > 1 else None
    sizes = (call.num_shards, call.head_shards) if by_heads else (call.num_shards,)
    kinds = (AxisType.Auto,) * len(sizes)  # jax 0.12 takes them for explicit ones where nothing is said
    mesh = AbstractMesh(sizes, ("fsdp", "tensor")[: len(sizes)], axis_types=kinds)
    features, sums = PartitionSpec(by_rows, None, by_heads), PartitionSpec(by_rows, by_heads)
    specs = [features, features, features, PartitionSpec(by_rows)]
    specs += [PartitionSpec(None, by_rows)] if call.rotates else []
    specs += [features, sums, features] if direction == "backward" else []
    results = (features, sums) if direction == "forward" else (features, features, features)
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=results, check_vma=False)


def arguments_of(call: AttentionCall, *, direction: Direction) -> list[Any]:
    """Return the shapes of the arguments of the function that `lowered` lowers."""
    rows, length, size = call.rows, call.length, call.head_dim
    query = jax.ShapeDtypeStruct((rows, length, call.heads * size), call.dtype)
    key = jax.ShapeDtypeStruct((rows, length, call.kv_heads * size), call.dtype)
    given = [query, key, key, jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    if call.rotates:
        given.append(jax.ShapeDtypeStruct((2, rows, length, size), call.dtype))
    if direction == "backward":
        given += [query, jax.ShapeDtypeStruct((rows, call.heads, length), jnp.float32), query]
    return given


def attention_function(call: AttentionCall, *, direction: Direction, target: Target) -> Callable[..., Any]:
    """Return the jax function that `lowered` lowers, for the rows and heads of one chip.

    With `target=interpreted` it runs the kernels on a CPU.
    """
    extra = call.padded_length - call.length
    per_row = _forward if direction == "forward" else _backward

    def rotate(flat: Any, rotation: Any, *, factor: float, backward: bool = False) -> Any:
        if rotation is None:
            return flat if factor == 1 else (flat.astype(jnp.float32) * factor).astype(flat.dtype)
        return rotated(flat, rotation, call=call, factor=factor, target=target, backward=backward)

    def run(query: Any, key: Any, value: Any, segments: Any, *others: Any) -> Any:
        rotation = _padded(others[0], extra=extra, axis=2) if call.rotates else None
        flat = [_padded(tensor, extra=extra, axis=1) for tensor in (query, key, value)]
        inside = rotation if call.rotates_inside else None
        if inside is None:
            flat[:2] = rotate(flat[0], rotation, factor=call.scores.scale), rotate(flat[1], rotation, factor=1.0)
        tensors = [*flat, _padded(segments, extra=extra, axis=1, value=NO_SEGMENT)]
        if direction == "backward":
            out, log_sum, grad = others[-3:]
            tensors += [_padded(out, extra=extra, axis=1), _padded(log_sum, extra=extra, axis=2)]
            tensors.append(_padded(grad, extra=extra, axis=1))
        kernel = _kernel(call, target=target)

        def of_row(rotation: Any, *tensors: Any) -> Any:
            with _patched_pallas_call(call, rotation=rotation):
                return per_row(kernel, call, *tensors)

        in_axes = (None if inside is None else 1, *[0] * len(tensors))
        results = jax.vmap(of_row, in_axes=in_axes)(inside, *tensors)
        if direction == "forward":
            return results[0][:, : call.length], results[1][..., : call.length]
        dq, dk, dv = results
        if inside is None:
            dq = rotate(dq, rotation, factor=call.scores.scale, backward=True)
            dk = rotate(dk, rotation, factor=1.0, backward=True)
        return tuple(grads[:, : call.length] for grads in (dq, dk, dv))

    return run


def _padded(tensor: Any, *, extra: int, axis: int, value: int = 0) -> Any:
    """Append `extra` tokens."""
    width = [(0, extra if dim == axis else 0) for dim in range(tensor.ndim)]
    return jnp.pad(tensor, width, constant_values=value) if extra else tensor


def _kernel(call: AttentionCall, *, target: Target) -> Any:
    """Build jax's splash kernel with the mask and block sizes of the call; all heads share the mask."""
    shape = (call.padded_length, call.padded_length)
    if call.window is None:
        mask = masks.CausalMask(shape) if call.scores.causal else masks.FullMask(shape)
    else:  # a single mask is computed in the kernel; an intersection of two would be read from memory
        before, after = call.window - 1, 0 if call.scores.causal else call.window - 1
        mask = masks.LocalMask(shape, window_size=(before, after), offset=0)
    names = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute"]
    names += ["q_dq", "kv_dq"] if call.backward == "split" else []
    blocks = {f"block_{name}": call.block for name in names}
    sizes = kernels.BlockSizes(**blocks, use_fused_bwd_kernel=call.backward == "fused")
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * call.heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.scores.soft_cap,
        interpret=target == "interpreted",
    )


def _forward(kernel: Any, call: AttentionCall, *tensors: Any) -> tuple[Any, Any]:
    """Return output (T, H D) and log-sum-exp (H, T) of one row."""
    *qkv, segments = tensors
    settings = dict(kernel.kwargs, save_residuals=True)
    query, key, value = (heads_first(tensor, head_dim=call.head_dim) for tensor in qkv)
    ids = kernels.SegmentIds(segments, segments)
    out, (log_sum,) = kernels._splash_attention_forward(kernel.fwd_mask_info, query, key, value, ids, None, **settings)
    return heads_last(out), log_sum


def _backward(kernel: Any, call: AttentionCall, *tensors: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of the scaled query (T, H D), the key and the value (T, K D) of one row."""
    *qkv, segments, out, log_sum, grad = tensors
    query, key, value, do = (heads_first(tensor, head_dim=call.head_dim) for tensor in (*qkv, grad))
    settings = {name: kernel.kwargs[name] for name in SHARED_SETTINGS}
    sizes = kernel.kwargs["block_sizes"]
    layouts = {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    ids = kernels.SegmentIds(segments, segments)
    given = (query, key, value, ids, None, log_sum, do, _row_sums(out, grad, heads=call.heads))
    fused = call.backward == "fused"
    block = {"bq": call.block, "bkv": call.block}
    dq, dk, dv = kernels._splash_attention_bwd_dkv(
        *given,
        **block,
        bkv_compute=call.block,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=fused,
        **settings,
        **layouts,
    )
    if not fused:
        dq = kernels._splash_attention_bwd_dq(*given, **block, mask_info=kernel.dq_mask_info, **settings, **layouts)
    return heads_last(dq), heads_last(dk), heads_last(dv)


def _row_sums(out: Any, grad: Any, *, heads: int) -> Any:
    """Return the sum of out x grad over each head's features, (H, T) float32.

    It is D of FlashAttention-2 (arXiv 2307.08691), computed as a matmul with ones in float32: a sum over part of a
    row's lanes would need another layout of the tensor.
    """
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    ones = jnp.repeat(jnp.eye(heads), out.shape[1] // heads, axis=0)
    return jnp.matmul(product, ones, precision="highest").T


@contextmanager
def _patched_pallas_call(call: AttentionCall, *, rotation: Any) -> Iterator[None]:
    """Patch splash's `pallas_call` inside: flat blocks where `call.is_flat`, a cost estimate, and rope.

    Splash gives no estimate, and the compiler cannot see into a kernel.

    Args:
        rotation: of the row (2, T, D), where kernels rotate q and k themselves.
    """
    real = kernels.pl

    def pallas_call(*args: Any, name: str, **settings: Any) -> Any:
        phase: Any = name.split("_")[2]  # splash_mha_fwd_segmented_...
        cost = real.CostEstimate(
            flops=call.flops(phase), transcendentals=call.exponentials, bytes_accessed=call.bytes_moved(phase)
        )
        build = with_sums_by_row(real.pallas_call) if phase == "fwd" else real.pallas_call
        if rotation is not None:
            build = with_rotation(build, call, phase=phase, rotation=rotation)
        build = flat_call(build, phase=phase) if call.is_flat else build
        return build(*args, name=name, cost_estimate=cost, **settings)

    with patched_attribute(kernels, "pl", SimpleNamespace(**vars(real) | {"pallas_call": pallas_call})):
        yield
