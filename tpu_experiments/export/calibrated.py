"""The forms of task=quantize: integers by RTN or GPTQ in compressed-tensors' layout, and vectors of codebooks (VPTQ).

Integers are written as `pack-quantized` with groups, which transformers, vLLM and SGLang read. No library reads VPTQ's
vectors without CUDA, so they have a layout of this program (`quantisation/parts.py`). Layers are quantised
before anything is written (export/calibration.py); here their tensors are put beside the others.
Legend: N output features, K input features, G groups of a row."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.export.calibration import Calibrated, Parts
from tpu_experiments.export.quantised import Shapes, empty_tensors, pack_quantized
from tpu_experiments.quantisation.grid import Grid, rounded, with_feedback
from tpu_experiments.quantisation.packing import packed_words
from tpu_experiments.quantisation.parts import VECTORS, as_parts, grid_sizes, vector_sizes
from tpu_experiments.quantisation.vectors import Vectors, encoded


class GridForm:
    """Symmetric integers with a scale for each group of a row, or for a whole row (`rtn`, `gptq`, `lr_qat`).

    Args:
        feedback: whether later columns make good the error of earlier ones, which takes calibration rows.
        key: setting that the groups are from.
        inputs: how the layers round their inputs, as compressed-tensors writes it; None where they do not.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        form: str,
        feedback: bool,
        key: str = "task.group",
        inputs: dict[str, Any] | None = None,
    ) -> None:
        self.grid, self.form, self.needs_inputs, self.inputs = grid, form, feedback, inputs
        self.needs = f"of a width that {key}={grid.group} divides" if grid.group else "with a scale for each row"

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether rows are whole groups."""
        return shape[1] % self.grid.columns_of(shape[1]) == 0

    def bits(self, shape: tuple[int, int]) -> float:
        """Return the bits of a weight as stored, its part of a scale in float32 among them."""
        return self.grid.bits + 32 / self.grid.columns_of(shape[1])

    def encode(self, weight_NK: Tensor, hessian_KK: Tensor | None, *, seed: int) -> tuple[Parts, Tensor]:
        """Return words, scales and the shape, and the weight that they decode to; nothing is drawn by `seed`."""
        grid = self.grid
        made = rounded(weight_NK, grid) if hessian_KK is None else with_feedback(weight_NK, hessian_KK, grid)
        return self.packed(*made), grid.decode(*made)

    def packed(self, codes_NK: Tensor, scales_NG: Tensor) -> dict[str, Tensor]:
        """Return the tensors that stand for integers and their scales, by the end of their names."""
        return {
            "_packed": packed_words(codes_NK, bits=self.grid.bits),
            "_scale": scales_NG,
            "_shape": torch.tensor(codes_NK.shape),
        }

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return words (N, ceil(K / p)), scales (N, G) and the shape (2,), empty."""
        return empty_tensors(name, grid_sizes(self.grid.bits, self.grid.columns_of(shape[1]), shape))

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the settings as compressed-tensors writes them."""
        grouping = {"strategy": "group", "group_size": self.grid.group} if self.grid.group else {"strategy": "channel"}
        return pack_quantized(kept, inputs=self.inputs, num_bits=self.grid.bits, **grouping)


class TrainedGrid:
    """The integers of a run with rounded weights (`model.linear=lr_qat`), as the layout of an export.

    Args:
        scales: trained scales (N, G) by the name of the weight.
        inputs: how the layers round their inputs, as compressed-tensors writes it; None where they do not.
    """

    form = "lr_qat"

    def __init__(self, grid: Grid, *, scales: Mapping[str, Tensor], inputs: dict[str, Any] | None = None) -> None:
        self.grid, self.scales = grid, scales
        self._stored = GridForm(grid, form=self.form, feedback=False, key="model.linear_group", inputs=inputs)
        self.needs, self.holds, self.bits = self._stored.needs, self._stored.holds, self._stored.bits
        self.shapes, self.config = self._stored.shapes, self._stored.config

    def encode(self, name: str, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return the tensors that stand for a weight that is its scales times integers, in float32."""
        scales_NG = self.scales[name].to(torch.float32)
        made = self._stored.packed(self.grid.codes(weight_NK, scales_NG), scales_NG)
        return {f"{name}{end}": tensor for end, tensor in made.items()}


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
        return empty_tensors(name, vector_sizes(self.how, shape))

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
