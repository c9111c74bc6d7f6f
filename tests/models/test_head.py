"""Hidden states and head of whole models: their product is the model's logits, or the head is known not to be plain."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.test_loss import largest
from tests.training.tiny import ARCHITECTURES, Run, random_batch
from tpu_experiments.data.rows import TOKEN_ARRAYS
from tpu_experiments.models.adapters.linear import LoraLinear
from tpu_experiments.models.huggingface import config_from_arch
from tpu_experiments.models.passes.forward import has_plain_head, hidden_of, logits_of, soft_cap_of
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.next_token import next_token_loss
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.ops import python_loop

pytestmark = pytest.mark.xla
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
DECODER = SIZES | {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64},
    "gemma2": DECODER | {"final_logit_softcapping": 1.5, "query_pre_attn_scalar": 16},
    "llama": DECODER,
    "mixtral": DECODER | {"num_local_experts": 2},
    "gpt_neox": SIZES | {"intermediate_size": 48, "max_position_embeddings": 64},
}
NOT_PLAIN = {
    "cohere": DECODER | {"logit_scale": 0.0625},
    "granite": DECODER | {"logits_scaling": 8.0},
    "phi": SIZES | {"intermediate_size": 48, "max_position_embeddings": 64},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 64} | SIZES,
}


def model_of(model_type, arch):
    torch.manual_seed(0)
    config = config_from_arch({"model_type": model_type, **TOKENS, **arch})
    config._attn_implementation = "eager"  # Gemma 2 has no other
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def batch_of(*, vocab=64, seq_len=24):
    rows = {name: t[0] for name, t in random_batch(0, rows=2, seq_len=seq_len).items() if name in TOKEN_ARRAYS}
    return rows | {"ids": rows["ids"] % vocab}


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("model_type", PLAIN)
def test_the_product_is_the_logits(model_type):
    module = model_of(model_type, PLAIN[model_type])
    assert has_plain_head(module)
    cap = soft_cap_of(module)
    assert cap == PLAIN[model_type].get("final_logit_softcapping")
    with torch.no_grad():
        # other values than the module's own, which must count
        other = {name: p * 1.1 for name, p in module.named_parameters()}
        hidden, head = hidden_of(module, other, batch_of())
        torch.testing.assert_close(capped(hidden @ head.T, cap), logits_of(module, other, batch_of()))


@pytest.mark.parametrize("model_type", NOT_PLAIN)
def test_a_head_that_does_more_is_known(model_type):
    module = model_of(model_type, NOT_PLAIN[model_type])
    assert not has_plain_head(module)
    batch = batch_of()
    with torch.no_grad():
        expected, _ = next_token_loss(module, {}, batch)
        found, _ = next_token_loss(module, {}, batch, computing=Computing(10))
    assert torch.equal(found, expected)


def test_an_adapter_or_a_bias_makes_a_head_more_than_a_product():
    module = model_of("llama", DECODER)
    biased = model_of("llama", DECODER)
    module.lm_head = LoraLinear(module.lm_head, r=2, scale=1.0, dropout=0.0)
    biased.lm_head = nn.Linear(32, 64)
    assert not has_plain_head(module)
    assert not has_plain_head(biased)


def test_the_probe_changes_nothing_in_the_module():
    module = model_of("llama", DECODER)
    before = dict(module.named_modules(remove_duplicate=False))
    assert has_plain_head(module)
    assert dict(module.named_modules(remove_duplicate=False)) == before


@pytest.mark.parametrize(("num_shards", "positions"), [(1, 4), (2, 8)])
def test_the_chunk_is_counted_in_tokens_of_one_device(num_shards, positions):
    """Two rows: on one device 4 positions of each are 8 tokens, on two devices 8 of one are."""
    widths = set()

    def watched(call):
        widths.add(tuple(call.xs[0].shape[:3]))
        return python_loop(call)

    batch = batch_of()
    length = batch["ids"].shape[1]
    with torch.no_grad():
        next_token_loss(model_of("llama", DECODER), {}, batch, computing=Computing(8, num_shards, watched))
    assert widths == {(-(-length // positions), 2, positions)}


@pytest.mark.parametrize("lora", ["none", "all_linear_r8"])
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_losses_and_gradients_of_whole_models(make_config, model, lora):
    """Mistral's head is a parameter of its own, the others' is the embedding; `lora=none` trains it."""
    config = make_config(f"model={model}", "model.size=tiny", "model.dtype=float32", f"lora={lora}", "hw.runtime=eager")
    run = Run(config, EagerRuntime(config.hw))
    assert has_plain_head(run.model.module)
    leaves = {name: (p + 0.01).requires_grad_() for name, p in run.parameters.items()}
    batch = batch_of(vocab=4096)

    def outcome(**settings):
        sums, weights = next_token_loss(run.model.module, leaves, batch, **settings)
        return sums, weights, *torch.autograd.grad((sums * torch.tensor([1.0, 0.25])).sum(), list(leaves.values()))

    for ours, theirs in zip(outcome(computing=Computing(14)), outcome(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_training_step_holds_no_array_of_all_logits(make_config):
    import torch_xla

    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config("model=gemma3_270m", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")
    run = Run(config, XlaRuntime(config.hw, sharding=config.sharding))
    batch = {name: t.to(run.runtime.device) for name, t in batch_of(vocab=4096, seq_len=96).items()}

    def hlo(**settings):
        leaves = {name: p.detach().requires_grad_() for name, p in run.parameters.items()}
        sums, _ = next_token_loss(run.model.module, leaves, batch, **settings)
        grads = torch.autograd.grad(sums.sum(), list(leaves.values()))
        return torch_xla._XLAC._get_xla_tensors_hlo([sums.detach(), *grads])

    assert largest(hlo()) == 2 * 96 * 4096
    assert largest(hlo(computing=Computing(16, loop=run.runtime.loop))) < 2 * 96 * 4096
    assert python_loop is not run.runtime.loop
