"""Faults that are put into loading, computing, adapting, folding and exporting, and what a certificate says of each.

A fault is of the product's code; where a family has nothing that it changes, its outcome is `equal`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.test_loaded import names_changed, no_rope, swapped, weights_changed
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import CertifyTaskConfig
from tpu_experiments.export import weights as export_weights
from tpu_experiments.models import huggingface
from tpu_experiments.models.adapters import lora
from tpu_experiments.models.parts import attention
from tpu_experiments.models.passes import forward, loss
from tpu_experiments.models.sources import buffers
from tpu_experiments.runtime import ops
from tpu_experiments.tasks.certify import certified, numerics
from tpu_experiments.tasks.certify.checks import Check

Fault = Callable[[pytest.MonkeyPatch], None]


def scaled_twice(patch: pytest.MonkeyPatch) -> None:
    """Adapters are trained with twice the scale that their files say."""
    plain = lora.scale_of
    patch.setattr(lora, "scale_of", lambda config: 2 * plain(config))


def merged_with_half(patch: pytest.MonkeyPatch) -> None:
    """An export merges half of an adapter."""
    plain = export_weights.scale_of
    patch.setattr(export_weights, "scale_of", lambda config: plain(config) / 2)


def scores_without_scale(patch: pytest.MonkeyPatch) -> None:
    """Attention scores are not divided, whatever the model says."""

    def mutant(module: Any, query: Tensor, *given: Any, scaling: float | None = None, **more: Any) -> Any:
        return plain(module, query, *given, scaling=1.0, **more)

    plain = attention.flash
    patch.setitem(attention.ALL_ATTENTION_FUNCTIONS._global_mapping, attention.FLASH, mutant)


def documents_together(patch: pytest.MonkeyPatch) -> None:
    """All documents of a row are one."""
    plain = forward.model_inputs

    def mutant(module: Any, batch: Any, *, causal: bool = True) -> dict[str, Any]:
        return plain(module, {**batch, "segments": (batch["segments"] > 0).to(batch["segments"].dtype)}, causal=causal)

    patch.setattr(forward, "model_inputs", mutant)


def windows_changed(patch: pytest.MonkeyPatch, *, by: int) -> None:
    """Sliding windows are longer by some tokens."""
    for file in (attention, forward):
        plain = file.causal_mask

        def mutant(segments: Tensor, *, window: int | None, plain: Any = plain) -> Tensor:
            changed: Tensor = plain(segments, window=window + by if window else window)
            return changed

        patch.setattr(file, "causal_mask", mutant)


def buffers_unset(patch: pytest.MonkeyPatch) -> None:
    """Buffers that are computed keep what memory held."""
    plain = huggingface.compute_buffers

    def mutant(module: Any) -> set[str]:
        found = plain(module)
        held = module.state_dict()
        for name, buffer in list(module.named_buffers()):
            if name not in held and buffer.is_floating_point():
                buffers.put_buffer(module, name, torch.full_like(buffer, 0.37))
        return found

    patch.setattr(huggingface, "compute_buffers", mutant)


def head_untied(patch: pytest.MonkeyPatch) -> None:
    """A tied head gets weights of its own, one element further."""
    plain = numerics.build_model

    def mutant(*given: Any, **more: Any) -> Any:
        built = plain(*given, **more)
        head, table = built.module.get_output_embeddings(), built.module.get_input_embeddings()
        if head is not None and head.weight is table.weight and not head.weight.is_meta:
            head.weight = torch.nn.Parameter(table.weight.detach().roll(1, 0), requires_grad=False)
            built.module._tied_weights_keys = None
            built.module.all_tied_weights_keys = {}
        return built

    patch.setattr(numerics, "build_model", mutant)


def heads_swapped(name: str, tensor: Tensor) -> Tensor:
    """The first two quarters of a projection of queries are exchanged."""
    if not name.endswith(("q_proj.weight", "query_key_value.weight", "qkv_proj.weight", "c_attn.weight")):
        return tensor
    rows = tensor.T if "c_attn" in name else tensor
    quarter = len(rows) // (12 if any(part in name for part in ("qkv", "key_value", "c_attn")) else 4)
    order = [*range(quarter, 2 * quarter), *range(quarter), *range(2 * quarter, len(rows))]
    return (rows[order].T if "c_attn" in name else rows[order]).contiguous()


def layers_backwards(patch: pytest.MonkeyPatch) -> None:
    """A loop runs over the layers from the last to the first."""

    def mutant(call: ops.LoopCall) -> Any:
        return ops.python_loop(ops.LoopCall(call.body, call.carry, tuple(x.flip(0) for x in call.xs), call.consts))

    patch.setattr(numerics, "FOLDING", ops.Folding(loop=mutant))


def cap_left_out(patch: pytest.MonkeyPatch) -> None:
    """Logits of some tokens at a time are not capped."""
    patch.setattr(loss, "capped", lambda logits, cap: logits)


def adapters_exchanged(patch: pytest.MonkeyPatch) -> None:
    """An adapter's file has those of two layers the other way round."""
    plain = numerics.write_adapter
    exchange = swapped(".0.", ".1.")

    def mutant(place: str, *, parameters: Any, **more: Any) -> Any:
        return plain(place, parameters={exchange(name): tensor for name, tensor in parameters.items()}, **more)

    patch.setattr(numerics, "write_adapter", mutant)


def a_target_later(patch: pytest.MonkeyPatch) -> None:
    """Every token learns the one after the next."""
    plain = forward.target_weights

    def mutant(batch: Any) -> tuple[Tensor, Tensor]:
        targets, weights = plain(batch)
        return torch.roll(targets, -1, dims=1), weights

    for file in (forward, loss):
        if hasattr(file, "target_weights"):
            patch.setattr(file, "target_weights", mutant)


FAULTS: dict[str, Fault] = {
    "adapters with twice the scale": scaled_twice,
    "scores that are not divided": scores_without_scale,
    "no RoPE": no_rope,
    "documents of a row together": documents_together,
    "biases left out": weights_changed(lambda n, t: t * 0 if n.endswith("bias") else t),
    "norms left at one": weights_changed(lambda n, t: t * 0 + 1 if "norm" in n and n.endswith("weight") else t),
    "heads exchanged": weights_changed(heads_swapped),
    "buffers that are not set": buffers_unset,
    "a tied head of its own": head_untied,
    "windows one token longer": lambda patch: windows_changed(patch, by=1),
    "gate for up": names_changed(swapped("gate_proj", "up_proj")),
    "layers exchanged": names_changed(swapped(".0.", ".1.")),
    "folded layers backwards": layers_backwards,
    "half an adapter merged": merged_with_half,
    "adapters of two layers exchanged": adapters_exchanged,
    "the token after the next is learnt": a_target_later,
    "head without its cap": cap_left_out,
}
SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "phi3": {},
    "gpt2": dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
}
"""Ten families: windows, biases, norms of heads, soft caps, fused projections, learnt positions, experts."""
NUMERICS = ["isolation", "logits", "adapter", "folded", "export"]


def config_of(family: str) -> PretrainedConfig:
    """Return a config of a family."""
    kind = CONFIG_MAPPING[family]
    settable = {name: value for name, value in SHARED.items() if not isinstance(getattr(kind, name, None), property)}
    return kind(**settable | FAMILIES[family])


def verdicts_with(family: str, make_config: Callable[..., Config], folder: Path, *more: str) -> dict[str, Check]:
    """Return the numerics of a family's certificate, with whatever fault is there now and these words."""
    config_of(family).save_pretrained(folder / "model")
    words = ("task=certify", f"model.path={folder / 'model'}", "model.attention=flash", "model.size=full")
    config = make_config(*words, "model.init=pretrained", "lora.targets=[all-linear]", f"task.checks={NUMERICS}", *more)
    assert isinstance(config.task, CertifyTaskConfig)
    content = certified(config, config.task)
    return {check["name"]: Check(**check) for check in content["checks"]}
