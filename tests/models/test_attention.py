"""`model.attention=flash` in whole models: the same logits as sdpa, by either path."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.plain_kernel import PlainKernel
from tests.training.tiny import ARCHITECTURES, Run, random_batch
from tpu_experiments.models.parts.attention import FLASH, causal_mask, flash
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.kernels.attention import install_attention_kernel

pytestmark = pytest.mark.xla
TINY = ("model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")


def rows(length: int) -> dict[str, torch.Tensor]:
    """Two rows of two documents and padding; beyond Mistral's tiny window of 48 and Gemma's of 32."""
    batch = random_batch(1, rows=2, seq_len=length)
    return {name: batch[name][0] for name in ("ids", "positions", "segments")}


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_without_a_kernel_it_is_sdpa(make_config, model):
    overrides = (f"model={model}", *TINY, "hw.runtime=eager")
    logits = []
    for attention in ("sdpa", "flash"):
        config = make_config(*overrides, f"model.attention={attention}")
        run = Run(config, EagerRuntime(config.hw))
        logits.append(logits_of(run.model.module, run.parameters, rows(150)))
    assert torch.equal(*logits)


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_every_model_tells_the_kernel_its_scale_and_window(make_config, model):
    config = make_config(f"model={model}", *TINY, "hw.runtime=eager", "model.attention=flash")
    run = Run(config, EagerRuntime(config.hw))
    kernel = PlainKernel()
    with torch.no_grad():
        sdpa = logits_of(run.model.module, run.parameters, rows(150))
        install_attention_kernel(kernel)
        try:
            by_kernel = logits_of(run.model.module, run.parameters, rows(150))
        finally:
            install_attention_kernel(None)
    assert len(kernel.turned) == run.model.module.config.num_hidden_layers
    torch.testing.assert_close(by_kernel, sdpa, atol=1e-5, rtol=0)


def test_a_model_without_windows():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=4096)
    module = LlamaForCausalLM(config)
    batch, logits = rows(64), []
    for name in ("sdpa", FLASH):
        config._attn_implementation = name
        logits.append(logits_of(module, dict(module.named_parameters()), batch))
    assert torch.equal(*logits)


def test_capped_scores_are_eager_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    segments = rows(40)["segments"]
    out, _ = flash(torch.nn.Module(), q, k, v, segments[:, None, None], softcap=2.0, sliding_window=9)
    scores = 2.0 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 8**-0.5 / 2.0)
    scores = scores.masked_fill(~causal_mask(segments, window=9), -torch.inf)
    expected = torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2))
