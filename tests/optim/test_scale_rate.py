"""Trained scales of rounded weights have a rate of their own and no decay, beside every other fact."""

import pytest
import torch

from tests.config.composing import composed
from tests.training.tiny import configured
from tpu_experiments.optim.updates import DECAY, with_decay

LR = torch.tensor([0.01])
A, B, SCALE = (f"layers.0:2:1.q_proj.{part}" for part in ("lora_A", "lora_B", "lora_weight_scale"))
WORDS = ("lora=all_linear_r8", "model.linear=lr_qat", "optim.b_lr_ratio=4", "optim.scale_lr_ratio=0.1")


@pytest.mark.parametrize("optim", ["adamw", "adamw8bit", "adafactor"])
@pytest.mark.parametrize("of_stage", [False, True])
def test_a_scale_moves_by_its_ratio_and_does_not_decay(optim: str, of_stage: bool) -> None:
    more = ("optim.weight_decay=0.5", *(["curriculum.stages.chat.weight_decay=0"] if of_stage else []))
    config = composed(*WORDS, f"optim={optim}", *more)
    parameters = {name: torch.ones(2, 3, 4) for name in (A, B, SCALE)}
    updates = configured(config)(parameters)
    grads = {name: torch.full_like(p, 0.3) for name, p in parameters.items()}
    state = updates.init(parameters)
    state = with_decay(state, torch.tensor([0.5])) if of_stage else state
    found, after = updates.update(parameters, grads, state, lr=LR)
    plain = configured(composed(f"optim={optim}"))(parameters)
    without, _ = plain.update(parameters, grads, plain.init(parameters), lr=LR)
    step = without[A] - 1
    assert float(step.abs().max()) > 0
    decay = float(LR) * 0.5
    torch.testing.assert_close(found[A] - 1, step - decay)
    torch.testing.assert_close(found[B] - 1, 4 * (step - decay))
    torch.testing.assert_close(found[SCALE] - 1, 0.1 * step, rtol=1e-3, atol=1e-7)
    assert after[""]["count"].tolist() == [1.0]
    assert (DECAY in after[""]) == of_stage
