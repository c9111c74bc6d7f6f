"""The forms of task=quantize: integers by RTN or GPTQ in compressed-tensors' layout, and vectors of codebooks (VPTQ).

Integers are written as `pack-quantized` with groups, which transformers, vLLM and SGLang read. No library reads VPTQ's
vectors without CUDA, so they have a layout of this program (`quantisation/parts.py`). Layers are quantised
before anything is written (export/calibration.py); here their tensors are put beside the others.
Legend: N output features, K input features, G groups of a row."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.export.calibration import Calibrated, Parts
from tpu_experiments.export.quantised import Shapes, pack_quantized
from tpu_experiments.quantisation.grid import Grid, rounded, with_feedback
from tpu_experiments.quantisation.packing import packed_words
from tpu_experiments.quantisation.parts import VECTORS, as_parts, grid_sizes, vector_sizes
from tpu_experiments.quantisation.vectors import Vectors, encoded


class GridForm:
    """Symmetric integers with a scale for each group of a row (`rtn`, `gptq`).

    Args:
        feedback: whether later columns make good the error of earlier ones, which takes calibration rows.
    """

    def __init__(self, grid: Grid, *, form: str, feedback: bool) -> None:
        self.grid, self.form, self.needs_inputs = grid, form, feedback
        self.needs = f"of a width that task.group={grid.group} divides"

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether rows are whole groups."""
        return shape[1] % self.grid.group == 0

    def bits(self, shape: tuple[int, int]) -> float:
        """Return the bits of a weight as stored, its part of a scale in float32 among them."""
        return self.grid.bits + 32 / self.grid.group

    def encode(self, weight_NK: Tensor, hessian_KK: Tensor | None, *, seed: int) -> tuple[Parts, Tensor]:
        """Return words, scales and the shape, and the weight that they decode to; nothing is drawn by `seed`."""
        grid = self.grid
        made = rounded(weight_NK, grid) if hessian_KK is None else with_feedback(weight_NK, hessian_KK, grid)
        codes_NK, scales_NG = made
        parts = {
            "_packed": packed_words(codes_NK, bits=grid.bits),
            "_scale": scales_NG,
            "_shape": torch.tensor(weight_NK.shape),
        }
        return parts, grid.decode(codes_NK, scales_NG)

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return words (N, ceil(K / p)), scales (N, G) and the shape (2,), empty."""
        sizes = grid_sizes(self.grid.bits, self.grid.group, shape)
        return {f"{name}{end}": torch.empty(size, dtype=dtype, device="meta") for end, (size, dtype) in sizes.items()}

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the settings as compressed-tensors writes them."""
        return pack_quantized(kept, num_bits=self.grid.bits, strategy="group", group_size=self.grid.group)


class VectorForm:
    """Vectors of codebooks (`vptq`)."""

    form, needs_inputs = "vptq", True

    def __init__(self, how: Vectors) -> None:
        self.how = how
        self.needs = f"of a height that task.vector={how.length} divides"

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether columns are whole vectors."""
        return shape[0] % self.how.length == 0

    def bits(self, shape: tuple[int, int]) -> float:
        """Return the bits of a weight, codebooks among them."""
        return self.how.bits(shape)

    def encode(self, weight_NK: Tensor, hessian_KK: Tensor | None, *, seed: int) -> tuple[Parts, Tensor]:
        """Return packed indices and codebooks, and the weight that they decode to."""
        assert hessian_KK is not None, "`needs_inputs` is true"
        made = encoded(weight_NK, hessian_KK, self.how, seed=seed)
        return as_parts(made, self.how), made.decode()

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return the tensors of `as_parts`, empty."""
        sizes = vector_sizes(self.how, shape)
        return {f"{name}{end}": torch.empty(size, dtype=dtype, device="meta") for end, (size, dtype) in sizes.items()}

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the settings that `layout_of` reads."""
        return {"quant_method": VECTORS, "format": 1, "ignore": kept, **asdict(self.how)}


Form = GridForm | VectorForm


class Stored:
    """A form as the layout of an export: its tensors are those of the calibrated layers."""

    def __init__(self, form: Form, made: Calibrated) -> None:
        self.form, self.needs = form.form, form.needs
        self.holds, self.shapes, self.config = form.holds, form.shapes, form.config
        self._parts: Iterator[tuple[str, Tensor]] = made.parts()
        self._held: dict[str, Tensor] = {}

    def encode(self, name: str, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return the tensors that stand for the weight `name`; weights are asked for in the order of the layers."""
        wanted = list(self.shapes(name, (weight_NK.shape[0], weight_NK.shape[1])))
        while not self._held.keys() >= set(wanted):
            key, tensor = next(self._parts)
            self._held[key] = tensor
        return {key: self._held.pop(key) for key in wanted}
