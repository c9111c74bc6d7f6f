"""Adapters of a mixture's experts: each expert's matrix has an A and a B of its own, as PEFT's `target_parameters`.

PEFT adds B A to the matrices of all experts in every forward pass. Here rows are multiplied by A and B, in groups where
the frozen matrices are (models/parts/experts.py): for r=16 that is 2 % of the arithmetic of the experts of Qwen3
30B-A3B, and no second copy of them. Legend as there, and: r rank, K inputs and N outputs of a matrix.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.model_schema import LoraConfig, is_named
from tpu_experiments.models.parts.experts import grouped
from tpu_experiments.models.parts.float32_gradients import grouped_product, product
from tpu_experiments.models.parts.named import LOW, named
from tpu_experiments.runtime.stacked import OF_PARAMETERS, hugging_face_names, weight_of

MATRICES = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of experts that rows are multiplied with, in the order in which transformers' classes have them."""


class ParameterLora(nn.Module):
    """The adapter of one matrix of each expert: `lora_A` (E, r, K) and `lora_B` (E, N, r), float32."""

    def __init__(self, weight: Tensor, *, r: int, scale: float, is_transposed: bool) -> None:
        """Adapt `weight`, (E, N, K) or, transposed, (E, K, N)."""
        super().__init__()
        self.scale, self.is_transposed = scale, is_transposed
        experts, high, wide = (weight.mT if is_transposed else weight).shape
        self.lora_A = nn.Parameter(torch.empty(experts, r, wide, dtype=torch.float32, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(experts, high, r, dtype=torch.float32, device=weight.device))

    def of_sorted(self, x_RK: Tensor, sizes: Tensor) -> Tensor:
        """Return (R, N) of rows that are sorted by expert, in groups of `sizes`."""
        low_Rr = named(grouped(x_RK, self.lora_A * self.scale, sizes, 2), LOW)
        return grouped(low_Rr, self.lora_B, sizes, 2)

    def of_each(self, x_SK: Tensor) -> Tensor:
        """Return (E, S, N) of tokens that every expert computes."""
        low_SEr = product(x_SK, self.lora_A.flatten(0, 1) * self.scale).unflatten(1, self.lora_A.shape[:2])
        return grouped_product(low_SEr.transpose(0, 1), self.lora_B)

    def summed(self, x_ESK: Tensor) -> Tensor:
        """Return (S, N), the sum over experts of each one's own values."""
        low_ESr = grouped_product(x_ESK, self.lora_A * self.scale)
        return product(low_ESr.transpose(0, 1).flatten(1), self.lora_B.transpose(0, 1).flatten(1))


def matched_matrices(module: nn.Module, lora: LoraConfig) -> list[str]:
    """Return the names of the matrices of experts that `lora.target_parameters` matches.

    Raises:
        ConfigError: a target matches nothing, or a parameter that is no matrix of experts.
    """
    names = [name for name, _ in module.named_parameters()]
    matched: dict[str, None] = {}
    for target in lora.target_parameters:
        hits = [name for name in names if is_named(name, target)]
        others = [name for name in hits if not is_matrix(module, name)]
        if not hits or others:
            found = {".".join(name.split(".")[-3:]) for name in names if is_matrix(module, name)}
            what = f"matches {others[0]}, which is no matrix of experts" if others else "matches no parameter"
            advice = suggest(target, found) if found else "The model has no experts whose matrices are stacked."
            raise ConfigError(f"lora.target_parameters has {target!r}, which {what}. {advice}")
        matched |= dict.fromkeys(hits)
    return [name for name in names if name in matched]


def adapt_matrix(module: nn.Module, name: str, *, r: int, scale: float) -> None:
    """Give the matrix of this name an adapter."""
    path, _, leaf = name.rpartition(".")
    experts: Any = module.get_submodule(path)
    if not hasattr(experts, OF_PARAMETERS):
        experts.add_module(OF_PARAMETERS, nn.ModuleDict())
    made = ParameterLora(getattr(experts, leaf), r=r, scale=scale, is_transposed=bool(experts.is_transposed))
    experts.get_submodule(OF_PARAMETERS).add_module(leaf, made)


def is_matrix(module: nn.Module, name: str) -> bool:
    """Return whether a parameter is a matrix of experts that models/parts/experts.py computes."""
    path, _, leaf = name.rpartition(".")
    return leaf in MATRICES and hasattr(module.get_submodule(path), "has_gate") and module.get_parameter(name).ndim == 3


def adapted_parameters(module: nn.Module) -> dict[str, bool]:
    """Return the names of matrices of experts with an adapter; true where they are (E, K, N)."""
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, ParameterLora))
    return {weight_of(name): part.is_transposed for name, part in parts}


def ranks_of_matrices(module: nn.Module) -> dict[str, int]:
    """Return the ranks of the adapters of matrices of experts by the names of the matrices, in Hugging Face's form."""
    parts = {name: part for name, part in module.named_modules() if isinstance(part, ParameterLora)}
    return {each: part.lora_A.shape[-2] for name, part in parts.items() for each in hugging_face_names(weight_of(name))}
