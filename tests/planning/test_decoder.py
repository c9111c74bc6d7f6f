"""Sizes read from a config are those of the module that transformers makes of it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.config.composing import composed
from tests.planning.examples import MISTRAL, TARGETS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, is_target
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
KINDS = ["sliding_attention", "full_attention"]
VARIANTS = {
    "llama": {},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3": {"use_sliding_window": False},
    "gemma3_text": {},
    "bitnet": {},
    "mistral tied": {"tie_word_embeddings": True},
    "smollm3": {"pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "olmo3": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "glm with biases": {"pad_token_id": 0, "attention_bias": True},
    "glm4": {"pad_token_id": 0},
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


GEMMA4 = {
    "of layers": {},
    "shared": {"num_kv_shared_layers": 4, "use_double_wide_mlp": True, "layer_types": KINDS * 4},
    "one for keys and values": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "plain": {"hidden_size_per_layer_input": 0},
}


@pytest.mark.parametrize("variant", GEMMA4)
def test_gemma4_counts_as_the_module_does(variant: str) -> None:
    given = SMALL | {"global_head_dim": 48, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300}
    given |= GEMMA4[variant]
    config = AutoConfig.for_model("gemma4_text", **given)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    decoder = read_decoder(config)
    assert decoder == read_decoder({"model_type": "gemma4_text", **given})
    assert decoder.parameters == sum(p.numel() for p in module.parameters())
    assert decoder.matrices == sum(p.numel() for p in module.parameters() if p.ndim == 2)
    linears = {n: (m.in_features, m.out_features) for n, m in module.named_modules() if type(m) is torch.nn.Linear}
    for target in ("all-linear", "q_proj", "v_proj", "down_proj", "per_layer_projection"):
        expected = [shape for name, shape in linears.items() if is_target(name, target)]
        assert sorted(decoder.adapted(LoraConfig(r=1, targets=[target]))) == sorted(expected)


def test_a_mixture_counts_as_the_module_does() -> None:
    given = SMALL | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    config = AutoConfig.for_model("qwen3_moe", **given)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    decoder = read_decoder(config)
    assert decoder == read_decoder({"model_type": "qwen3_moe", **given})
    assert decoder.parameters == sum(p.numel() for p in module.parameters())
    assert len(decoder.adapted(LoraConfig(r=1, targets=["all-linear"]))) == 8 * 4
    experts = 8 * 6 * 3 * 64 * 40
    assert sum(decoder.multiplied.values()) == decoder.matrices_of_layers - experts * 4 / 6
    with pytest.raises(ConfigError, match=r"mlp_only_layers=\[1\]"):
        read_decoder({"model_type": "qwen3_moe", **given, "mlp_only_layers": [1]})
