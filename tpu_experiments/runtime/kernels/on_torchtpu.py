"""The TPU attention kernel in TorchTPU's graphs: lowered by jax once (splash.py), spliced into the program."""

import functools
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.runtime.kernels.attention import AttentionCall, Direction, Scores, call_of
from tpu_experiments.runtime.kernels.contraction import shape_of

NAMES: dict[str, Direction] = {
    "tpu_experiments.attention_forward.default": "forward",
    "tpu_experiments.attention_backward.default": "backward",
}
"""Operators of kernels/attention.py, as a traced graph names them."""
CONTRACTION, INT8_PRODUCT = "tpu_experiments.contraction.default", "tpu_experiments.int8_product.default"
PRODUCTS = (CONTRACTION, INT8_PRODUCT)
"""Those of kernels/contraction.py and kernels/integers.py."""


class LaterAttention:
    """An `AttentionKernel` for tensors of the meta device: a trace records its operators for `lowered_call`."""

    def forward(self, *tensors: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor]:
        raise AssertionError("tensors of the meta device have no values to attend to")

    def backward(self, *saved: Tensor, grad: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("tensors of the meta device have no values to attend to")


def lowered_call(
    direction: Direction,
    arguments: tuple[Any, ...],
    *,
    max_block: int,
    holds_rows: bool = True,
    num_shards: int = 1,
    head_shards: int = 1,
) -> Any:
    """Return the results of an attention operator on TorchTPU's placeholders.

    Args:
        arguments: of the operator (kernels/attention.py).
        num_shards: parts that XLA splits the rows into, and head_shards the heads.
    """
    if direction == "forward":
        *tensors, heads, scale, window, soft_cap, causal = arguments
    else:
        saved, grad, heads, scale, window, soft_cap, causal = arguments
        tensors = [*saved, grad]
    call, inputs = call_of(
        tensors,
        heads=heads,
        scores=Scores(scale, window, soft_cap, causal),
        max_block=max_block,
        holds_rows=holds_rows,
        num_shards=num_shards,
        head_shards=head_shards,
    )
    text, results = _lowered(call, direction)
    return spliced(text, inputs=inputs, results=results)


def spliced(text: str, *, inputs: list[Tensor], results: tuple[tuple[tuple[int, ...], str], ...]) -> list[Tensor]:
    """Return the results of a StableHLO module inside the program that TorchTPU builds.

    TorchTPU's own door for kernels asks the TPU for its topology (torch_tpu 0.2.0, `call_custom_kernel`), so the module
    goes in as the body of a loop of one iteration, which XLA removes. The carry is what the module returns.
    """
    from torch_tpu._internal.compile import tpu_torch_compile

    carry = [torch.zeros(shape, dtype=getattr(torch, dtype), device="tpu") for shape, dtype in results]
    once = torch.zeros((1,), device="tpu")
    made: list[Tensor] = tpu_torch_compile.create_scan_op(
        inits=carry,
        inputs=[once, *inputs],
        body_module=tpu_torch_compile.parse_mlir_text(text),
        scan_direction=tpu_torch_compile.ScanDirection.kForward,
        dummy_ys=[],
        num_scan_inputs=1,
    )
    return made


@functools.cache
def _lowered(call: AttentionCall, direction: Direction) -> tuple[str, tuple[tuple[tuple[int, ...], str], ...]]:
    """Return the StableHLO of (results, once, *inputs) -> results, and shape and type of every result."""
    import jax

    from tpu_experiments.runtime.kernels.splash import arguments_of, function_on_mesh

    run = function_on_mesh(call, direction=direction, target="tpu")
    inputs = arguments_of(call, direction=direction)
    results = jax.eval_shape(run, *inputs)

    def body(*tensors: Any) -> Any:
        return run(*tensors[len(results) + 1 :])

    given = [*results, jax.ShapeDtypeStruct((), "float32"), *inputs]
    traced = jax.jit(body, keep_unused=True).trace(*given)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    return text, tuple((tuple(result.shape), result.dtype.name) for result in results)


def lowered_product(name: str, arguments: tuple[Any, ...]) -> Tensor:
    """Return the result of one of `PRODUCTS` on TorchTPU's placeholders."""
    a, b, *dims = arguments
    of_a, of_b, *others = dims if name == CONTRACTION else ((1,), (dims[0],))
    in_parts = bool(others and others[0])
    kind = str(a.dtype).removeprefix("torch.")
    dtype = "int32" if name == INT8_PRODUCT else kind
    operands, of = (tuple(a.shape), tuple(b.shape)), (tuple(of_a), tuple(of_b))
    text = _text_of_product(operands, of, in_parts, kind, dtype)
    (made,) = spliced(text, inputs=[a, b], results=((shape_of(*operands, *of, in_parts), dtype),))
    return made


@functools.cache
def _text_of_product(
    operands: tuple[tuple[int, ...], tuple[int, ...]],
    of: tuple[tuple[int, ...], tuple[int, ...]],
    in_parts: bool,
    kind: str,
    dtype: str,
) -> str:
    """Return the StableHLO of (result, once, a, b) -> result, as `spliced` takes it."""
    import jax

    def body(before: Any, once: Any, a: Any, b: Any) -> Any:
        kept = (0,) if in_parts else ()
        return jax.lax.dot_general(a, b, (of, (kept, kept)), preferred_element_type=dtype)

    shapes = [(shape_of(*operands, *of, in_parts), dtype), ((), "float32"), *((shape, kind) for shape in operands)]
    given = [jax.ShapeDtypeStruct(shape, made) for shape, made in shapes]
    text: str = jax.jit(body, keep_unused=True).lower(*given).as_text()
    return text
