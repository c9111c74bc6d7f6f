"""QLoRA here and QLoRA by transformers, PEFT and bitsandbytes: the same losses on the same data, on a CPU."""

import pytest
import torch

from tests.models.test_lora_peft import peft_loss, peft_name
from tests.training.tiny import Run, random_batch
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LR = 1e-3


@pytest.mark.parametrize(
    ("double", "steps", "within"), [(False, 20, 1e-5), pytest.param(True, 100, 1e-4, marks=pytest.mark.slow)]
)
def test_losses_are_those_of_peft_over_bitsandbytes(make_config, tmp_path, double, steps, within):
    """On a CPU bitsandbytes' scales in 8 bits are now and then a neighbour of the nearest (test_quantised.py)."""
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny = make_config("model=mistral7b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(HuggingFaceModel(tiny.model, seed=0).config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in dense.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that what rounding does to the weights moves the loss
    dense.config._attn_implementation = "sdpa"
    dense.save_pretrained(tmp_path)
    words = ("model=mistral7b", f"model.path={tmp_path}", "model.dtype=float32", "lora=all_linear_r8")
    words += (f"model.base_double_quant={double}",)
    config = make_config(*words, "model.base=nf4", "model.attention=sdpa", "model.size=full", "model.init=pretrained")
    run = Run(config, EagerRuntime(config.hw))

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=nf4, dtype=torch.float32)
    model = get_peft_model(
        theirs,
        LoraConfig(
            r=config.lora.r, lora_alpha=config.lora.alpha, target_modules=config.lora.targets, task_type="CAUSAL_LM"
        ),
    )
    model.train()  # for inference its CPU kernels compute in bf16
    named = dict(model.named_parameters())
    for name, value in run.parameters.items():
        with torch.no_grad():
            named[peft_name(name)].copy_(value)
    batches = [random_batch(i % 5, lr=LR) for i in range(steps)]
    ours = run.losses(batches)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    expected = []
    for batch in batches:
        loss = peft_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert abs(ours[0] - peft_loss(dense, batches[0]).item()) > 1e-3, "rounded weights have another loss"
    assert ours[-1] < ours[0] - 0.01
    assert ours == pytest.approx(expected, abs=within)
