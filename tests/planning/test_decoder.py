"""Sizes read from a config are those of the module that transformers makes of it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.config.composing import composed
from tests.planning.examples import MISTRAL, TARGETS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.models.huggingface import config_from_arch

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 500,
    "sliding_window": 16,
}
VARIANTS = {
    "llama": {},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3": {"use_sliding_window": False},
    "gemma3_text": {},
    "bitnet": {},
    "mistral tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("mistral7b", 7_241_732_096),
        ("gemma3_270m", 268_098_176),
        ("qwen05b", 494_032_768),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_these_models_count_to_the_digit(model: str, parameters: int) -> None:
    assert read_decoder(composed(f"model={model}").model.arch).parameters == parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_counts_as_the_module_does(variant: str) -> None:
    config = AutoConfig.for_model(variant.split()[0], **SMALL, **VARIANTS[variant])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    decoder = read_decoder(config)
    matrices = [p for p in module.parameters() if p.ndim == 2]
    assert decoder.matrices == sum(p.numel() for p in matrices)
    assert decoder.parameters == sum(p.numel() for p in module.parameters())
    assert sorted(decoder.projections.values()) == sorted(
        (part.in_features, part.out_features)
        for name, part in module.model.layers[0].named_modules()
        if isinstance(part, torch.nn.Linear)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_windows_from_a_dict_are_those_of_the_config(variant: str) -> None:
    kind, more = variant.split()[0], VARIANTS[variant]
    config = AutoConfig.for_model(kind, **SMALL, **more)
    windows = read_decoder({"model_type": kind, **SMALL, **more}).windows
    assert windows == read_decoder(config).windows
    kinds = getattr(config, "layer_types", None)
    if kinds:
        assert windows == tuple(16 if layer == "sliding_attention" else None for layer in kinds)


def test_the_known_windows() -> None:
    assert read_decoder(composed("model=gemma3_270m").model.arch).windows == ((512,) * 5 + (None,)) * 3
    assert read_decoder(composed("model=mistral7b").model.arch).windows == (4096,) * 32
    assert read_decoder(composed("model=qwen05b").model.arch).windows == (None,) * 24


@pytest.mark.parametrize(
    ("model", "rank", "targets", "adapters"),
    [
        ("mistral7b", 32, TARGETS, 83_886_080),
        ("mistral7b", 32, ("all-linear",), 83_886_080),
        ("mistral7b", 8, ("q_proj", "v_proj"), 3_407_872),
        ("gemma3_270m", 32, TARGETS, 7_593_984),
        ("qwen05b", 32, TARGETS, 17_596_416),
        ("qwen05b", 8, ("*.q_proj", "model.layers.*.self_attn.v_proj", "q_proj"), 540_672),
        ("qwen05b", 4, ("model.layers.3.mlp.up_proj",), 4 * (896 + 4864)),
        ("qwen05b", 4, ("lm_head",), 4 * (896 + 151_936)),
    ],
)
def test_adapters_count_as_injected(model: str, rank: int, targets: tuple[str, ...], adapters: int) -> None:
    decoder = read_decoder(composed(f"model={model}").model.arch)
    assert decoder.adapter_parameters(LoraConfig(r=rank, targets=list(targets))) == adapters


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.arch\.model_type=mistal; .* Did you mean 'mistral'"):
        read_decoder(MISTRAL | {"model_type": "mistal"})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.arch\.num_key_value_heads is not set"):
        read_decoder({k: v for k, v in MISTRAL.items() if k != "num_key_value_heads"})


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("modernbert_base", 149_655_232),
        ("eurobert_210m", 310_266_624),
        ("deberta_v3_base", 184_551_780),
        ("roberta_base", 124_697_433),
        ("longformer_base", 148_711_257),
    ],
)
def test_encoders_count_to_the_digit(model: str, parameters: int) -> None:
    arch = composed(f"model={model}").model.arch
    with torch.device("meta"):
        module = AutoModelForMaskedLM.from_config(config_from_arch(dict(arch)))
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert read_decoder(arch).parameters == read_decoder(module.config).parameters == parameters
