"""Weight decay by stage: each stage steps as an optimizer with its decay, in every optimizer."""

import pytest
import torch
from torch import Tensor

from tests.config.composing import composed
from tests.optim.test_decay_groups import EMBEDDING, LR, NORM, QUERY, parameters
from tests.training.tiny import configured
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.identity import identity
from tpu_experiments.optim.base import State
from tpu_experiments.optim.updates import DECAY, Updates, with_decay
from tpu_experiments.training.step import stage_tensors

OF_STAGE = "curriculum.stages.chat.weight_decay=0"


def trained(
    updates: Updates, *, found: dict[str, Tensor], state: State, steps: range, decay: float | None = None
) -> tuple[dict[str, Tensor], State]:
    """Train on gradients that are a function of the step, with the decay of a batch."""
    for step in steps:
        grads = {name: torch.cos(p * (step + 1)) for name, p in parameters().items()}
        state = state if decay is None else with_decay(state, torch.tensor([decay]))
        found, state = updates.update(found, grads, state, lr=LR)
    return found, state


@pytest.mark.parametrize("optim", ["adamw", "adamw8bit", "adafactor"])
def test_two_stages_are_two_optimizers_that_carry_their_moments(optim: str) -> None:
    words = (f"optim={optim}", "optim.no_decay=['*embed_tokens*']")
    start = parameters()
    first, second = (configured(composed(*words, f"optim.weight_decay={decay}"))(start) for decay in (0.5, 0))
    expected, moments = trained(first, found=start, state=first.init(start), steps=range(3))
    expected, _ = trained(second, found=expected, state=moments, steps=range(3, 6))
    one = configured(composed(*words, "optim.weight_decay=0.5", OF_STAGE))(start)
    found, state = trained(one, found=start, state=one.init(start), steps=range(3), decay=0.5)
    half = found
    found, state = trained(one, found=found, state=state, steps=range(3, 6), decay=0.0)
    for name in (EMBEDDING, NORM, QUERY):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    other, _ = trained(one, found=half, state=one.init(start), steps=range(3, 6), decay=0.5)
    assert not torch.allclose(other[QUERY], found[QUERY], rtol=1e-4)
    assert state[""][DECAY].tolist() == [0.0]


def test_decay_goes_with_averages_and_lora_plus() -> None:
    words = ("optim.ema=0.9", "optim.b_lr_ratio=2", "optim.weight_decay=0.5", OF_STAGE)
    updates = configured(composed(*words))(parameters())
    found, state = trained(updates, found=parameters(), state=updates.init(parameters()), steps=range(2), decay=0.5)
    assert state[""][DECAY].tolist() == [0.5]
    assert state[""]["count"].tolist() == [2]
    assert all(bool(p.isfinite().all()) for p in found.values())


def test_a_stage_without_a_decay_of_its_own_has_the_runs() -> None:
    config = composed("optim.weight_decay=0.1", OF_STAGE)
    text, chat = resolve_stages(config)
    assert (text.weight_decay, chat.weight_decay) == (0.1, 0.0)
    batches = [stage_tensors(stage, [], stages=(text, chat)) for stage in (text, chat)]
    assert [batch[DECAY].tolist() for batch in batches] == [[pytest.approx(0.1)], [0.0]]
    plain = composed("optim.weight_decay=0.1")
    assert [stage.weight_decay for stage in resolve_stages(plain)] == [None, None]
    assert DECAY not in configured(plain)({}).init({})[""]
    assert not [key for key in identity(plain) if key.endswith("stages.chat.weight_decay")]
