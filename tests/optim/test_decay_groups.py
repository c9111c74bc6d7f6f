"""Weight decay by name: as torch.optim's parameter groups, in every optimizer, folded or not, and what is refused."""

import dataclasses

import pytest
import torch

from tests.config.composing import composed
from tests.training.tiny import configured
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity, require_same
from tpu_experiments.optim.facts import is_matched, require_patterns

EMBEDDING, NORM, QUERY = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0:2:1.self_attn.q_proj.weight"
LR = torch.tensor([0.01])


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {EMBEDDING: (70, 64), NORM: (64,), QUERY: (2, 64, 64)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def steps_of(*overrides: str, num_steps: int = 3) -> dict[str, torch.Tensor]:
    """Parameters after some steps on gradients that are a function of the step."""
    found = parameters()
    updates = configured(composed(*overrides, "optim.weight_decay=0.5"))(found)
    state = updates.init(found)
    for step in range(num_steps):
        grads = {name: torch.cos(p * (step + 1)) for name, p in parameters().items()}
        found, state = updates.update(found, grads, state, lr=LR)
    assert state[""]["count"].tolist() == [num_steps]
    return found


@pytest.mark.parametrize("optim", ["adamw", "adamw8bit", "adafactor"])
def test_the_named_ones_step_as_without_decay_and_the_others_as_with_it(optim: str) -> None:
    with_decay, without = steps_of(f"optim={optim}"), steps_of(f"optim={optim}", "optim.no_decay=['*']")
    found = steps_of(f"optim={optim}", "optim.no_decay=['*embed_tokens*']")
    assert torch.equal(found[EMBEDDING], without[EMBEDDING])
    assert not torch.equal(found[EMBEDDING], with_decay[EMBEDDING])
    assert torch.equal(found[QUERY], with_decay[QUERY])
    assert torch.equal(found[NORM], with_decay[NORM])
    assert torch.equal(with_decay[NORM], without[NORM]), "a vector has none anyway"


def test_three_steps_equal_torch_with_two_groups() -> None:
    ours = steps_of("optim=adamw", "optim.no_decay=['*embed_tokens*']")
    theirs = {name: torch.nn.Parameter(p) for name, p in parameters().items()}
    groups = [
        {"params": [theirs[QUERY]], "weight_decay": 0.5},
        {"params": [theirs[EMBEDDING], theirs[NORM]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=float(LR), betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        for name, p in parameters().items():
            theirs[name].grad = torch.cos(p * (step + 1))
        optimizer.step()
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p.detach(), atol=1e-6, rtol=1e-6)


def test_it_goes_with_lora_plus_and_other_rates_of_b() -> None:
    names = [f"model.layers.0.self_attn.q_proj.lora_{part}" for part in "AB"]
    found = {name: torch.ones(3, 4) for name in names}
    plain, both = (
        configured(composed("model=tiny", "optim.weight_decay=0.5", "optim.b_lr_ratio=4", *more))(found)
        for more in ((), ("optim.no_decay=['*lora_B']",))
    )
    grads = {name: torch.full((3, 4), 0.3) for name in names}
    a, b = names
    decayed, _ = plain.update(found, grads, plain.init(found), lr=LR)
    kept, _ = both.update(found, grads, both.init(found), lr=LR)
    assert torch.equal(decayed[a], kept[a])
    torch.testing.assert_close(kept[b] - decayed[b], torch.full((3, 4), 4 * float(LR) * 0.5))


def test_a_stack_matches_as_its_layers_do() -> None:
    assert is_matched(QUERY, ["*.layers.?.*q_proj*"])
    assert not is_matched(QUERY, ["*.layers.1.*"])
    assert not is_matched(QUERY, ["*0:2:1*"]), "names are Hugging Face's"


NAMES = [EMBEDDING, *(f"model.layers.{n}.self_attn.q_proj.weight" for n in range(12))]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (
            ["*embed_tokns*"],
            r"^optim.no_decay has '\*embed_tokns\*', which matches none of the 13 trainable parameters",
        ),
        (["*.layers.1?.*"], r"it matches model.layers.\*.self_attn.q_proj.weight in 2 of 12 layers, .* write \*"),
    ],
)
def test_what_matches_nothing_or_some_layers_is_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_patterns("no_decay", patterns, NAMES)


def test_all_layers_and_single_parameters_are_accepted() -> None:
    require_patterns("no_decay", [], NAMES)
    require_patterns("no_decay", ["*embed_tokens*", "*.layers.?.*", "*.layers.1?.*"], NAMES)


def test_without_patterns_a_run_from_before_resumes() -> None:
    config = composed("model=tiny")
    stored = identity(config)
    assert not {"optim.no_decay", "optim.ema"} & stored.keys()
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, no_decay=["*norm*"]))
    require_same(stored, config, folder="outputs/run")
    with pytest.raises(ConfigError, match=r"optim.no_decay=None, now \['\*norm\*'\]"):
        require_same(stored, other, folder="outputs/run")
