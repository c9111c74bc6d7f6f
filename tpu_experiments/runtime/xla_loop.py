"""The loop on torch_xla: one While operation whose body is traced once, from placeholders.

It stands on the untracked half of torch_xla's scan (`_scan_impl_pytree`): the body is Python that runs once while the
program is traced, so it may hold autograd and loops of its own. torch_xla's `scan` itself traces its body with
AOTAutograd, at every step unless the same function comes again, and decides what to keep for the backward pass.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch_xla.experimental.scan import _scan_impl_pytree

from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.loop import Body, Loop, Tensors, detached, length_of
from tpu_experiments.runtime.xla_buffer import Unwritten, stacks_made_by, unwritten_for


def loop_for(device: str, *, mesh: Mesh) -> Loop:
    """The loop of programs for `device` that are split over the mesh."""
    return functools.partial(xla_loop, unwritten=unwritten_for(device, mesh=mesh))


def xla_loop(
    fn: Body,
    *,
    carry: Tensors,
    xs: Tensors,
    consts: Tensors = (),
    reverse: bool = False,
    rows: int | None = None,
    unwritten: Callable[[int], Unwritten] | None = None,
) -> tuple[Tensors, Tensors]:
    """As `Loop` says. `consts` are carried and come back unchanged, which XLA sees: they are not copied.

    Args:
        unwritten: number of rows to the maker of stacks that are not filled first; None fills with zeros.
    """
    length_of(xs)
    carry_types, x_types, const_types = ([t.dtype for t in tensors] for tensors in (carry, xs, consts))

    def body(state: tuple[Tensors, Tensors], x: Tensors) -> tuple[tuple[Tensors, Tensors], Tensors]:
        fixed = _typed(state[1], const_types)
        new, y = fn(_typed(state[0], carry_types), _typed(x, x_types), fixed)
        _check_types(new, carry_types)
        return (detached(new), fixed), detached(y)

    stacks = stacks_made_by(unwritten(rows)) if unwritten and rows else nullcontext()
    with torch.no_grad(), stacks:
        state = (detached(carry), detached(consts))
        (carry, _), ys = _scan_impl_pytree(body, state, detached(xs), reverse=reverse)
    return carry, ys


def _typed(tensors: Tensors, types: list[torch.dtype]) -> Tensors:
    """torch_xla hands the body its arguments times 1, which makes int64 of bool."""
    return tuple(t if t.dtype == dtype else t.to(dtype) for t, dtype in zip(tensors, types, strict=True))


def _check_types(carry: tuple[Tensor, ...], types: list[torch.dtype]) -> None:
    found = [t.dtype for t in carry]
    if found != types:
        raise TypeError(f"carry={types} comes back from the loop's body as {found}; it must keep its types")
