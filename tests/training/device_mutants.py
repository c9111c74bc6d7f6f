"""Faults of code that only a device runs, for the forward canary's test and its table.

    python -m tests.training.device_mutants KERNEL OVERRIDE...

Builds the run's model on torch_xla's CPU device, with the TPU's attention kernel interpreted (KERNEL=kernel) or none
(KERNEL=none), and prints one JSON object: the findings of the forward canary by mutant; `clean` has no fault.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.models import replaced_token
from tpu_experiments.models.parts import rope
from tpu_experiments.models.passes import forward
from tpu_experiments.runtime.kernels.attention import Scores, install_attention_kernel
from tpu_experiments.runtime.patches import patched_attribute
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.canary import HostModel
from tpu_experiments.training.forward_canary import LossFindings, losses_on_device, losses_on_host, probe_rows
from tpu_experiments.training.row_lengths import measure_rows

Call = tuple[list[Tensor], Scores]


class Mutant:
    """An attention kernel that changes its call before the right kernel computes it."""

    def __init__(self, kernel: Any, change: Callable[[list[Tensor], Scores, int], Call]) -> None:
        self.kernel, self.change = kernel, change

    def forward(self, *tensors: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor]:
        changed, others = self.change(list(tensors), scores, heads)
        out, log_sum = self.kernel.forward(*changed, heads=heads, scores=others)
        return out.to(tensors[0].dtype), log_sum


def no_rotation(tensors: list[Tensor], scores: Scores, heads: int) -> Call:
    """Leave out RoPE."""
    return [*tensors[:4], tensors[0].new_empty(0)], scores


def no_window(tensors: list[Tensor], scores: Scores, heads: int) -> Call:
    """Attend beyond the sliding window."""
    return tensors, replace(scores, window=None)


def both_sides(tensors: list[Tensor], scores: Scores, heads: int) -> Call:
    """Attend to both sides in a decoder, to one in an encoder."""
    return tensors, replace(scores, causal=not scores.causal)


def one_segment(tensors: list[Tensor], scores: Scores, heads: int) -> Call:
    """Take all documents of a row for one."""
    return [*tensors[:3], (tensors[3] > 0).to(torch.int32), tensors[4]], scores


class Stale:
    """Use the kernel that was lowered for the first layer, or for a head of half the features, in all layers."""

    def __init__(self) -> None:
        self.first: Scores | None = None

    def __call__(self, tensors: list[Tensor], scores: Scores, heads: int) -> Call:
        self.first = self.first or replace(scores, scale=scores.scale * 2**0.5)
        return tensors, self.first


def transposed_heads(tensors: list[Tensor], scores: Scores, heads: int) -> Call:
    """Read the queries (T, H D) as (T, D H)."""
    q = tensors[0].unflatten(2, (heads, -1)).transpose(2, 3).flatten(2)
    return [q, *tensors[1:]], scores


def in_bfloat16(tensors: list[Tensor], scores: Scores, heads: int) -> Call:
    """Compute a float32 model's attention in bfloat16."""
    return [*(t.to(torch.bfloat16) for t in tensors[:3]), tensors[3], tensors[4].to(torch.bfloat16)], scores


KERNEL_MUTANTS: dict[str, Callable[[], Callable[[list[Tensor], Scores, int], Call]]] = {
    "rope": lambda: no_rotation,
    "window": lambda: no_window,
    "causal": lambda: both_sides,
    "segment": lambda: one_segment,
    "stale": Stale,
    "heads": lambda: transposed_heads,
    "bfloat16": lambda: in_bfloat16,
}


@contextmanager
def without_rope(module: torch.nn.Module) -> Iterator[None]:
    """Leave queries and keys as they are in every file of the model: the fault of sdpa with a kernel installed."""
    files = {sys.modules[type(part).__module__] for part in module.modules()}
    (file,) = {file for file in files if hasattr(file, rope.NAME)}
    with patched_attribute(file, rope.NAME, lambda query, key, *others, **more: (query, key)):
        yield


@contextmanager
def with_masks(change: Callable[..., Any]) -> Iterator[None]:
    """Compute the model's masks by other arguments."""
    own, of_both_sides = forward.attention_masks, replaced_token.bidirectional_mask
    with (
        patched_attribute(forward, "attention_masks", lambda s, **more: change(own, s, **more)),
        patched_attribute(replaced_token, "bidirectional_mask", lambda s, **more: change(of_both_sides, s, **more)),
    ):
        yield


def other_sides(masks: Callable[..., Any], segments: Tensor, *, causal: bool = True, **more: Any) -> Any:
    """Make the masks of a decoder for an encoder, and the reverse."""
    return masks(segments, causal=not causal, **more)


def without_segments(masks: Callable[..., Any], segments: Tensor, **more: Any) -> Any:
    """Make masks that take all documents of a row for one."""
    return masks((segments > 0).to(segments.dtype), **more)


def plain_mutants(module: torch.nn.Module) -> dict[str, Any]:
    """Return faults of a model without a kernel."""
    has_rope = any(hasattr(sys.modules[type(part).__module__], rope.NAME) for part in module.modules())
    if not has_rope:  # DeBERTa, whose masks are made elsewhere
        return {"segment": lambda: with_masks(without_segments)}
    return {
        "rope": lambda: without_rope(module),
        "causal": lambda: with_masks(other_sides),
        "segment": lambda: with_masks(without_segments),
    }


def main(kernel: str, *overrides: str) -> None:
    """Compare the clean program and every mutant with one host model."""
    with tempfile.TemporaryDirectory() as folder:
        config = measure_rows(composed(*overrides, f"output_dir={folder}"), is_lookup=False)
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(config.hw.num_devices)}
        from tpu_experiments.config.mesh import Mesh
        from tpu_experiments.runtime.kernels.on_xla import XlaAttention
        from tpu_experiments.runtime.xla.device import XlaRuntime
        from tpu_experiments.training.trainer import Trainer

        runtime = XlaRuntime(config.hw, sharding=config.sharding)
        right = XlaAttention(mesh=Mesh(), target="interpreted") if kernel == "kernel" else None
        install_attention_kernel(right)
        inputs = make_inputs(config, resolve_stages(config))
        parts = Trainer(config, runtime, inputs=inputs, outputs=None, watch=Stopwatch())  # type: ignore[arg-type]
        parts.build()
        rows = probe_rows(parts)
        expected, predicted, rounded = losses_on_host(HostModel(parts), rows)
        found: dict[str, Any] = {}

        def compare(name: str) -> None:
            parts.evaluator = parts.build_evaluator()  # its program is traced anew
            losses, tokens = losses_on_device(parts, rows)
            assert tokens == predicted, (name, tokens, predicted)
            made = LossFindings(losses, expected, rounded, getattr(parts.objective, "reads_draws", False))
            found[name] = asdict(made) | {"difference": made.difference, "ratio": made.ratio}

        compare("clean")
        for name, mutant in KERNEL_MUTANTS.items() if right is not None else ():
            install_attention_kernel(Mutant(right, mutant()))  # type: ignore[arg-type]
            compare(name)
        for name, context in plain_mutants(parts.model.module).items() if right is None else ():
            with context():
                compare(name)
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
