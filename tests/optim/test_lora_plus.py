"""LoRA+ against PEFT's `create_loraplus_optimizer` on a tiny model, and what the ratio is refused with."""

import dataclasses

import pytest
import torch

from tests.config.composing import composed
from tests.models.test_lora_peft import LR, overrides, peft_loss, peft_name, randomise_b
from tests.training.tiny import Run, configured, plain_config, plain_updates, random_batch
from tpu_experiments.config.checks import check
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity, require_same
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.eager import EagerRuntime

RATIO, WEIGHT_DECAY = 16.0, 0.1


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize(
    ("optim", "of_torch", "settings", "dora"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}, False),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}, True),
        ("adafactor", torch.optim.Adafactor, {"beta2_decay": -0.8, "eps": (1e-30, 1e-3), "foreach": False}, False),
    ],
)
def test_ten_steps_agree_with_peft(make_config, optim, of_torch, settings, dora) -> None:
    """With DoRA without weight decay, from which PEFT here does not except the lengths of rows."""
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    from transformers import AutoModelForCausalLM

    weight_decay = 0.0 if dora else WEIGHT_DECAY
    more = (f"optim={optim}", f"optim.b_lr_ratio={RATIO}", f"optim.weight_decay={weight_decay}", f"lora.dora={dora}")
    config = make_config(*overrides("qwen05b", *more))
    run = Run(config, EagerRuntime(config.hw), updates=configured(config))
    torch.manual_seed(config.seed)
    base = AutoModelForCausalLM.from_config(plain_config(run), dtype=torch.float32)
    lora = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.targets,
        task_type="CAUSAL_LM",
        use_dora=dora,
    )
    model = get_peft_model(base, lora)
    named = dict(model.named_parameters())
    start = {name: value.clone() for name, value in run.parameters.items()}
    for name, value in start.items():
        with torch.no_grad():
            named[peft_name(name)].copy_(value)
    randomise_b(run, model)  # torch's Adafactor divides 0 by 0 where the gradient of A is zero
    batches = [random_batch(i, lr=LR) for i in range(10)]
    ours = run.losses(batches)
    optimizer = create_loraplus_optimizer(
        model,
        of_torch,
        lr=LR,
        loraplus_lr_ratio=RATIO,
        loraplus_weight_decay=weight_decay,
        **settings,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    for step, batch in enumerate(batches):
        loss = peft_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        assert abs(ours[step] - loss.item()) < 1e-5, f"step {step}"
    for name, value in run.parameters.items():
        torch.testing.assert_close(value, named[peft_name(name)].detach(), atol=2e-5, rtol=1e-4)
        assert not torch.equal(value, start[name])


def test_b_alone_is_scaled_step_and_decay() -> None:
    parameters = {f"layers.0:2:1.q_proj.lora_{part}": torch.ones(2, 3, 4) for part in "AB"}
    grads = {name: torch.full_like(p, 0.3) for name, p in parameters.items()}
    one, four = (plain_updates(parameters, weight_decay=0.5, b_lr_ratio=ratio) for ratio in (1.0, 4.0))
    plain, _ = one.update(parameters, grads, one.init(parameters), lr=torch.tensor([0.01]))
    scaled, state = four.update(parameters, grads, four.init(parameters), lr=torch.tensor([0.01]))
    a, b = parameters
    assert torch.equal(scaled[a], plain[a])
    torch.testing.assert_close(scaled[b] - 1, 4 * (plain[b] - 1))
    assert state[""]["count"].tolist() == [1.0]


def test_it_is_refused_without_adapters() -> None:
    with pytest.raises(ConfigError, match=r"^optim.b_lr_ratio=16 with lora=none; only adapters have a B .*lora=all_li"):
        check(composed("model=tiny", "lora=none", "optim.b_lr_ratio=16"))
    check(composed("model=tiny", "lora=none"))


def test_another_ratio_is_another_run_and_a_run_from_before_it_resumes() -> None:
    config = composed("model=tiny")
    stored = identity(config)
    assert "optim.b_lr_ratio" not in stored
    other: Config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, b_lr_ratio=4.0))
    require_same(stored, config, folder="outputs/run")
    with pytest.raises(ConfigError, match=r"optim.b_lr_ratio=None, now 4.0"):
        require_same(stored, other, folder="outputs/run")
