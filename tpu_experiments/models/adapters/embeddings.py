"""Adapters of the embedding, y = W[token] + scale * B A[token], and of a head that is tied to it, as PEFT's.

A is (r, V) and B (H, r), the transposed B and A of the head, whose logits are W h + scale * A^T B^T h. A starts at 0.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, is_named
from tpu_experiments.models.adapters.linear import LoraLinear, multiplied
from tpu_experiments.models.adapters.token_rows import vocabulary_modules
from tpu_experiments.models.parts.named import LOW, named
from tpu_experiments.runtime.stacked import EMBEDDING_PARTS

A, B = EMBEDDING_PARTS


def targeted_embedding(module: Any, lora: LoraConfig) -> tuple[str, list[str]]:
    """Return the name of the embedding that `lora.targets` has, and of the heads that share its adapter.

    A target has to be the end of its name: a glob and `all-linear` are of Linears. Nothing is found of a model without
    an embedding of tokens.
    """
    if not hasattr(module, "get_input_embeddings"):
        return "", []
    names = vocabulary_modules(module)
    if not names:
        return "", []
    (first, embedding), *others = names.items()
    tied = [name for name, part in others if part.weight is embedding.weight] if lora.ensure_weight_tying else []
    is_found = any(is_named(name, target) for name in (first, *tied) for target in lora.targets)
    return (first, tied) if is_found else ("", [])


def adapt_embedding(module: nn.Module, name: str, tied: list[str], *, r: int, scale: float, lora: LoraConfig) -> None:
    """Give an embedding, and the heads that are tied to it, one adapter.

    Raises:
        ConfigError: it starts as, or is, another kind of adapter; or the module is no plain embedding.
    """
    embedding: Any = module.get_submodule(name)
    is_plain = type(embedding).forward is nn.Embedding.forward or isinstance(
        getattr(embedding, "embed_scale", None), Tensor
    )
    if not isinstance(embedding, nn.Embedding) or not is_plain:
        raise ConfigError(f"lora.targets has {name}, a {type(embedding).__name__}, which computes more; leave it out.")
    if embedding.weight.requires_grad:
        raise ConfigError(f"lora.targets has {name}, which lora.modules_to_save has too; leave it out of one of them.")
    others = {"lora.dora=true": lora.dora, f"lora.init={lora.init}": lora.init not in ("b_zero", "a_zero")}
    for key, is_other in others.items():
        if is_other:
            raise ConfigError(
                f"{key} and lora.targets has {name}; an embedding's adapter has neither lengths nor such a start here; "
                "use lora.dora=false and lora.init=b_zero, or leave the embedding out."
            )
    device = embedding.weight.device
    embedding.register_parameter(A, nn.Parameter(torch.empty(r, embedding.num_embeddings, device=device)))
    embedding.register_parameter(B, nn.Parameter(torch.empty(embedding.embedding_dim, r, device=device)))
    embedding.lora_scale = scale  # type: ignore[assignment]
    embedding.register_forward_hook(_adapted)
    for head in tied:
        module.set_submodule(head, TiedHead(module.get_submodule(head), embedding, dropout=lora.dropout, name=head))


def _adapted(embedding: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Return an embedding's output with its adapter, which is multiplied as the class multiplies its rows (Gemma)."""
    low = F.embedding(inputs[0], embedding.lora_embedding_A.T, embedding.padding_idx)
    factor = getattr(embedding, "embed_scale", None)
    change = multiplied(low, embedding.lora_embedding_B * embedding.lora_scale)
    return (out + (change if factor is None else change * factor.to(change.dtype))).to(out.dtype)


class TiedHead(LoraLinear):
    """A head that is the embedding, with the embedding's adapter."""

    is_formula = False

    def __init__(self, linear: Any, embedding: Any, *, dropout: float, name: str) -> None:
        """Take the place of `linear`."""
        super().__init__(linear, r=1, scale=embedding.lora_scale, dropout=dropout, name=name)
        del self.lora_A, self.lora_B
        self.register_parameter(A, embedding.lora_embedding_A)
        self.register_parameter(B, embedding.lora_embedding_B)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., H) to logits (..., V), in the data type of `x`."""
        b: Any = self.lora_embedding_B
        a: Any = self.lora_embedding_A
        low = named(multiplied(self.dropped(x), b.T * self.scale), LOW)
        return self.frozen(x, self.bias) + multiplied(low, a.T)


def adapted_embedding(module: nn.Module) -> tuple[str, bool]:
    """Return the name of the adapted embedding's matrix, and whether a head shares its adapter; empty of none."""
    name = next((name for name, part in module.named_modules() if A in part._parameters), None)
    is_tied = any(isinstance(part, TiedHead) for part in module.modules())
    return ("", False) if name is None else (f"{name}.weight", is_tied)


def drawn(shape: tuple[int, ...], *, r: int, is_tied: bool, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield A, zeros, and B for an embedding (V, H), as PEFT draws them.

    B is normal, and where it is the A of a head, too, Kaiming-uniform as that of a Linear.
    """
    yield torch.zeros(r, shape[0])
    b, bound = torch.empty(shape[1], r), 1 / math.sqrt(shape[1])
    yield b.uniform_(-bound, bound, generator=generator) if is_tied else b.normal_(generator=generator)
