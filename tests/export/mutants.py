"""Faults of a merge or of what is written, each as another model that a form is written of."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.export.weights import WholeModel, whole_model
from tpu_experiments.tasks.export.subject import Subject

Change = Callable[[str, Tensor, Tensor], Tensor]
"""Returns what is written in the place of a merged weight, given its name, the base's and the merged one."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    change: Change = lambda name, base, merged: merged
    config: Callable[[object], None] | None = None
    """Changes the model's config in place."""


def of(part: str, changed: Callable[[Tensor, Tensor], Tensor]) -> Mutant:
    """Change the weights whose names have a part."""
    return Mutant(lambda name, base, merged: changed(base, merged) if part in name else merged)


def rope_lost(config: object) -> None:
    """Put RoPE's base back to another value."""
    rope = copy.deepcopy(config.rope_parameters)  # type: ignore[attr-defined]
    rope["rope_theta"] = 500.0 if rope["rope_theta"] == 10000.0 else 10000.0
    config.rope_parameters = rope  # type: ignore[attr-defined]


MUTANTS: dict[str, Mutant] = {
    "the base": of("", lambda base, merged: base),
    "a layer not merged": of("layers.1.", lambda base, merged: base),
    "a projection not merged": of("layers.0.self_attn.v_proj", lambda base, merged: base),
    "twice the adapter": of("", lambda base, merged: 2 * merged - base),
    "half the adapter": of("", lambda base, merged: (merged + base) / 2),
    "the adapter taken away": of("", lambda base, merged: 2 * base - merged),
    "another head": of("embed_tokens", lambda base, merged: merged.roll(1, 0)),
    "a weight transposed": of("layers.0.self_attn.o_proj", lambda base, merged: merged.t().contiguous()),
    "a weight of zeros": of("layers.0.mlp.down_proj", lambda base, merged: merged * 0),
    "a scale slips by 2 %": of("layers.0.self_attn.q_proj", lambda base, merged: merged * 1.02),
    "two rows swapped": of("layers.0.mlp.up_proj", lambda base, merged: merged[[1, 0, *range(2, len(merged))]]),
    "a norm that is not read": of("layers.0.input_layernorm", lambda base, merged: torch.ones_like(merged)),
    "RoPE's base lost": Mutant(config=rope_lost),
}
SOUND = "nothing"


def mutated(subject: Subject, name: str) -> Subject:
    """Return the subject with a fault in the model that is written."""
    mutant = Mutant() if name == SOUND else MUTANTS[name]
    model, base = subject.model, _base(subject)
    config = copy.deepcopy(model.config)
    if mutant.config is not None:
        mutant.config(config)

    def read(effect, dtype):  # type: ignore[no-untyped-def]
        for (part, merged), (_, original) in zip(model.read(effect, dtype), base.read(None, dtype), strict=True):
            yield part, mutant.change(part, original, merged).contiguous()

    return replace(subject, model=replace(model, config=config, read=read))


def _base(subject: Subject) -> WholeModel:
    return whole_model(subject.source, lora=LoraConfig(r=0), trained={})
