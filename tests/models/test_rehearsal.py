"""A config whose values do not go together is refused before anything is loaded; those of real models are not."""

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.build import describe

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
COMPUTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_oss",
    "olmo2",
    "granite",
    "mixtral",
)
REFUSED = {
    "hidden_size": (-8, 0, 63, 2**40, "abc"),
    "num_attention_heads": (0, 3, 2.5),
    "num_key_value_heads": (0, 3),
    "head_dim": (0, 7),
    "vocab_size": (0, -1, True),
    "num_hidden_layers": (0, 2**31),
    "rms_norm_eps": ("abc",),
    "rope_parameters": ({"rope_theta": "abc", "rope_type": "default"}, {"rope_type": "nothing"}),
    "hidden_act": ("nothing",),
}


def source_of(model_type: str, **values: object) -> HuggingFaceModel:
    arch = {"model_type": model_type, **SIZES, **values}
    attention = "eager" if model_type == "gpt_oss" else "sdpa"
    model = ModelConfig(name="x", path="", init="random", dtype="float32", attention=attention, arch=arch)
    return HuggingFaceModel(model, seed=0)


@pytest.mark.parametrize("model_type", COMPUTED)
def test_a_model_that_computes_passes(model_type: str) -> None:
    assert sum(p.numel() for p in source_of(model_type).empty().parameters()) > 10_000


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, some in REFUSED.items() for value in some])
def test_values_that_do_not_go_together_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.arch|model=x"):
        source_of("mistral", **{name: value}).empty()


def test_an_attention_that_the_model_has_not_is_refused() -> None:
    source = source_of("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    source.config._attn_implementation = source.model.attention = "sdpa"
    with pytest.raises(
        ConfigError, match=r"model\.attention=sdpa; transformers' gpt_oss does not compute .*attention=eager"
    ):
        source.empty()


def test_an_adapter_of_the_shared_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"matches lm_head, whose weight is the embedding's"):
        describe(source_of("mistral", tie_word_embeddings=True), lora=LoraConfig(r=2, targets=["*"]))
    describe(source_of("mistral", tie_word_embeddings=False), lora=LoraConfig(r=2, targets=["*"]))
