"""Queries and keys turned by the kernel instead of the model: the same numbers, for models of every kind."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral import modeling_mistral

from tests.models.plain_kernel import PlainKernel
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.parts import rope
from tpu_experiments.models.parts.attention import FLASH
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.runtime.kernels.attention import install_attention_kernel

pytestmark = pytest.mark.xla
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
LEFT = {"mistral": {}, "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "gemma3_text": {"head_dim": 8}}
# normalised after turning; a quarter of each head turned; pairs of neighbours turned
OWN = {
    "hunyuan_v1_dense": {"head_dim": 8},
    "stablelm": {},
    "cohere": {},
    # values narrower than queries and keys
    "deepseek_v3": {
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
    },
}


@pytest.fixture
def kernel():
    made = PlainKernel()
    yield made
    install_attention_kernel(None)


def outcome(model_type, settings, kernel, *, attention=FLASH, dtype=torch.float32):
    """Logits and the gradients of all weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    config._attn_implementation = attention
    module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    install_attention_kernel(kernel)
    parameters = dict(module.named_parameters())
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None].expand(2, -1)
    segments = (torch.arange(16) >= 9).int()[None].expand(2, -1) + 1
    ids = torch.arange(32).view(2, 16) % 61
    logits = logits_of(module, parameters, {"ids": ids, "positions": positions, "segments": segments})
    grads = torch.autograd.grad(logits.square().sum(), list(parameters.values()))
    return logits.detach(), *grads


@pytest.mark.parametrize("model_type", [*LEFT, *OWN])
def test_the_kernel_turns_where_the_model_would_and_only_there(model_type, kernel):
    settings = LEFT | OWN
    plain = outcome(model_type, settings[model_type], None)
    kernels = outcome(model_type, settings[model_type], kernel)
    for ours, theirs in zip(kernels, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5)
    assert set(kernel.turned[-2:]) == {model_type in LEFT}


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "olmo3"])
def test_models_in_bfloat16_are_turned_in_their_own_data_type(model_type, kernel):
    """OLMo's cosine and sine are float32 beside queries in bfloat16."""
    kernels = outcome(model_type, {}, kernel, dtype=torch.bfloat16)
    assert set(kernel.turned) == {True}
    plain = outcome(model_type, {}, None, attention="sdpa", dtype=torch.bfloat16)
    torch.testing.assert_close(kernels[0], plain[0], atol=0.02 * float(plain[0].abs().max()), rtol=0.02)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16", "float32"), ("bfloat16", "bfloat16", "float64")])
def test_other_data_types_are_left_to_the_model(dtypes):
    query, key, table = (torch.ones(1, 1, 3, 8, dtype=getattr(torch, name)) for name in dtypes)
    with rope._rope_deferred([modeling_mistral]):
        turned = modeling_mistral.apply_rotary_pos_emb(query, key, table[0], table[0])
        assert not rope._deferred
    assert turned[0] is not query


def test_what_stands_in_is_taken_away_again(kernel):
    before = modeling_mistral.apply_rotary_pos_emb
    outcome("mistral", {}, kernel)
    assert modeling_mistral.apply_rotary_pos_emb is before
    assert not rope._deferred
    with pytest.raises(ZeroDivisionError), rope._rope_deferred([modeling_mistral]):
        raise ZeroDivisionError
    assert modeling_mistral.apply_rotary_pos_emb is before


def without_rotation(module, query, key, value, attention_mask, **others):
    """Attention that forgets the rotation, as every one but flash does."""
    return sdpa_attention_forward(module, query, key, value, None, is_causal=True)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_rotation_that_no_layer_fetches_is_an_error(layers, kernel, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLASH, without_rotation)
    with pytest.raises(
        ConfigError, match=r"model\.attention=flash; .*istral.* rotates queries and keys .*sdpa or eager"
    ):
        outcome("mistral", {"num_hidden_layers": layers}, kernel)
    assert not rope._deferred


def test_other_attention_is_not_asked_to_rotate(kernel):
    """The default job's: with a kernel installed and `model.attention=sdpa`, the model rotates itself."""
    plain = outcome("mistral", {}, None, attention="sdpa")
    torch.testing.assert_close(outcome("mistral", {}, kernel, attention="sdpa"), plain, atol=0, rtol=0)
    assert not kernel.turned
