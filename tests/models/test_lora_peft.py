"""Our LoRA against PEFT's on the same weights: forward, gradients, 20 training steps, and the exported adapter."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.adapter_exports import base_of
from tests.training.tiny import ARCHITECTURES, Run, plain_config, random_batch
from tpu_experiments.config.schema import Config
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.models.passes.forward import attention_masks, logits_of, row_losses
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.stacked import EMBEDDING_PARTS, MAGNITUDE, TOKEN_ROWS, is_adapter_part

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LR = 1e-3


def overrides(model: str, *more: str) -> list[str]:
    return [f"model={model}", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager", *more]


@pytest.fixture(
    params=itertools.product(ARCHITECTURES, [False, True]), ids=lambda p: f"{p[0]}-{'dora' if p[1] else 'lora'}"
)
def pair(request, make_config):
    architecture, dora = request.param
    return with_peft(make_config(*overrides(architecture, f"lora.dora={dora}")))


def with_peft(config: Config) -> tuple[Run, nn.Module]:
    """Our run and a PEFT model with the same base weights and the same adapter."""
    from peft import LoraConfig, get_peft_model

    run = Run(config, EagerRuntime(config.hw))
    base = base_of(run, config.seed)
    settings = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.targets,
        task_type="CAUSAL_LM",
        use_dora=config.lora.dora,
        use_rslora=config.lora.scaling == "alpha_over_sqrt_r",
        rank_pattern=config.lora.rank_pattern,
        alpha_pattern=config.lora.alpha_pattern,
        modules_to_save=config.lora.modules_to_save or None,
        ensure_weight_tying=config.lora.ensure_weight_tying,
        trainable_token_indices=config.lora.trainable_token_indices or None,
    )
    model = get_peft_model(base, settings)
    named = dict(model.named_parameters())
    for name, value in run.parameters.items():
        with torch.no_grad():
            if name.endswith(MAGNITUDE):
                torch.testing.assert_close(value, named[peft_name(name)], atol=0, rtol=1e-6)
            named[peft_name(name)].copy_(value)
    return run, model


def peft_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if leaf == TOKEN_ROWS:
        return f"base_model.model.{module}.token_adapter.{leaf}.default"
    if leaf in EMBEDDING_PARTS:
        return f"base_model.model.{name}.default"
    if is_adapter_part(name):
        return f"base_model.model.{name}.default.weight"
    return f"base_model.model.{module}.modules_to_save.default.{leaf}"


def peft_loss(model: nn.Module, batch) -> torch.Tensor:
    rows = {name: batch[name][0] for name in ("ids", "learn", "positions", "segments")}
    logits = model(
        input_ids=rows["ids"],
        position_ids=rows["positions"],
        attention_mask=attention_masks(rows["segments"], config=model.config),
        use_cache=False,
    ).logits
    sums, weights = row_losses(logits, rows)
    return sums.sum() / weights.sum()


def randomise_b(run: Run, model: nn.Module) -> None:
    """B starts at zero, which would hide A; give both the same random B, and lengths that are not the norms."""
    generator = torch.Generator().manual_seed(1)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in run.parameters.items():
            if name.endswith("lora_B") or name.endswith(EMBEDDING_PARTS[0]):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.02)
            elif name.endswith((MAGNITUDE, TOKEN_ROWS)):
                value.mul_(1 + torch.rand(value.shape, generator=generator))
            named[peft_name(name)].copy_(value)


def test_loss_and_gradients_agree_with_peft(pair):
    require_equal_gradients(*pair)


def require_equal_gradients(run: Run, model: nn.Module) -> None:
    randomise_b(run, model)
    batch = random_batch(0)
    leaves = {name: p.clone().requires_grad_() for name, p in run.parameters.items()}
    rows = {name: batch[name][0] for name in ("ids", "learn", "positions", "segments")}
    sums, weights = row_losses(logits_of(run.model.module, leaves, rows), rows)
    loss = sums.sum() / weights.sum()
    loss.backward()
    reference = peft_loss(model, batch)
    reference.backward()
    sum_tied_gradients(model)
    assert abs(loss.item() - reference.item()) < 1e-5
    named = dict(model.named_parameters())
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, named[peft_name(name)].grad, atol=1e-5, rtol=1e-5)


def tied_parts(model: nn.Module) -> dict[str, str]:
    """The names of PEFT's parameters of a tied head's adapter, by those of the embedding's that they share."""
    names = {name for name, _ in model.named_parameters()}
    own, head = (f"base_model.model.{path}" for path in ("model.embed_tokens.lora_embedding_", "lm_head.lora_"))
    pairs = {f"{own}{part}.default": f"{head}{other}.default.weight" for part, other in ("AB", "BA")}
    return {name: twin for name, twin in pairs.items() if name in names and twin in names} if is_tied(model) else {}


def is_tied(model: nn.Module) -> bool:
    """Whether the head's adapter is the embedding's."""
    settings: Any = model.peft_config
    return bool(settings["default"].ensure_weight_tying)


def sum_tied_gradients(model: nn.Module) -> None:
    """Add the gradients of a tied head's adapter to the embedding's.

    PEFT 0.21 makes two parameters of one storage, each with a gradient.
    """
    named = dict(model.named_parameters())
    for own, twin in tied_parts(model).items():
        assert named[own].data_ptr() == named[twin].data_ptr()
        named[own].grad = named[own].grad + named[twin].grad.T


def test_twenty_steps_agree_with_peft(pair):
    require_equal_steps(*pair, num_steps=20)


def require_equal_steps(run: Run, model: nn.Module, *, num_steps: int) -> None:
    batches = [random_batch(i, lr=LR) for i in range(num_steps)]
    ours = run.losses(batches)
    again = tied_parts(model).values()  # an optimizer would update them a second time
    trained = [p for name, p in model.named_parameters() if p.requires_grad and name not in again]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    for step, batch in enumerate(batches):
        loss = peft_loss(model, batch)
        model.zero_grad()
        loss.backward()
        sum_tied_gradients(model)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        assert abs(ours[step] - loss.item()) < 1e-5, f"step {step}"


@pytest.mark.parametrize("init", ["b_zero", "a_zero", "pissa"])
@pytest.mark.parametrize("scaling", ["alpha_over_r", "alpha_over_sqrt_r"])
@pytest.mark.parametrize("dora", [False, True])
def test_exported_adapter_gives_the_same_logits_in_peft(make_config, tmp_path, init, scaling, dora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = make_config(*overrides("qwen05b", f"lora.init={init}", f"lora.scaling={scaling}", f"lora.dora={dora}"))
    run = Run(config, EagerRuntime(config.hw))
    run.losses([random_batch(i) for i in range(3)])
    write_adapter(
        str(tmp_path),
        parameters=run.parameters,
        initial=run.model.taken_out,
        lora=config.lora,
        base_path="base",
        revision=None,
    )
    torch.manual_seed(config.seed)
    base = AutoModelForCausalLM.from_config(plain_config(run), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    with torch.no_grad():
        ours = logits_of(run.model.module.eval(), run.parameters, rows)
        theirs = model(
            input_ids=rows["ids"],
            position_ids=rows["positions"],
            attention_mask=attention_masks(rows["segments"], config=base.config),
            use_cache=False,
        ).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("init", ["b_zero", "a_zero", "pissa"])
@pytest.mark.parametrize("dora", [False, True])
def test_every_initialisation_starts_at_the_base_model(make_config, init, dora):
    config = make_config(*overrides("mistral7b", f"lora.init={init}", f"lora.dora={dora}"))
    run = Run(config, EagerRuntime(config.hw))
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    base = AutoModelForCausalLM.from_config(plain_config(run), dtype=torch.float32)
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    masks = attention_masks(rows["segments"], config=base.config)
    with torch.no_grad():
        ours = logits_of(run.model.module, run.parameters, rows)
        theirs = base(input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=masks).logits
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_kaiming_bound_is_that_of_a_linear_layer(make_config):
    config = make_config(*overrides("mistral7b"))
    run = Run(config, EagerRuntime(config.hw))
    a = run.parameters["model.layers.0.mlp.down_proj.lora_A"]
    bound = 1 / math.sqrt(a.shape[1])
    assert a.abs().max() <= bound
    assert a.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
