"""A loss with several parts, each divided by its own count, and groups of parameters with optimizers of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu_experiments.config.schema import OptimConfig
from tpu_experiments.objectives.base import Objective
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.base import ParameterGroup
from tpu_experiments.optim.facts import facts_of
from tpu_experiments.optim.updates import Updates
from tpu_experiments.runtime.ops import python_loop
from tpu_experiments.training.step import TrainStep

VOCABULARY, WIDTH = 11, 8
WEIGHT_DECAY, SETTINGS = 0.1, {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


class Pair(nn.Module):
    """Two models in one: one predicts a token's value, the other whether it is even."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
        self.parity = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 1))


def weights_of(rows):
    """Learnt tokens count for the first part, all tokens for the second: (R, T, 2)."""
    return torch.stack([rows["learn"], rows["segments"]], -1).float()


def count(rows):
    return weights_of(rows).sum((0, 1))


def row_loss(module, parameters, rows):
    ids = rows["ids"].long()
    outputs = [torch.func.functional_call(part, {n.removeprefix(f"{name}."): p for n, p in parameters.items()
               if n.startswith(name)}, (ids,)) for name, part in module.named_children()]  # fmt: skip
    values = F.cross_entropy(outputs[0].transpose(1, 2), ids, reduction="none")
    parity = F.binary_cross_entropy_with_logits(outputs[1][..., 0], (ids % 2).float(), reduction="none")
    weights = weights_of(rows)
    return (torch.stack([values, 50 * parity], -1) * weights).sum(1), weights.sum(1)


def batch_of(accumulation):
    generator = torch.Generator().manual_seed(1)
    shape = (accumulation, 3, 7)
    highs = {"ids": VOCABULARY, "learn": 2, "segments": 2, "positions": 7}
    rows = {n: torch.randint(high, shape, generator=generator, dtype=torch.int32) for n, high in highs.items()}
    return rows | {"lr": torch.tensor([1e-2])}


def updates_of(parameters, **settings):
    facts = facts_of(OptimConfig(clip_norm=None), parameters, **settings)
    return Updates(AdamW(**SETTINGS), facts, WEIGHT_DECAY)


def step_of(module, **settings):
    return TrainStep(
        module,
        updates=updates_of(dict(module.named_parameters()), **settings),
        sum_over_processes=list,
        row_loss=row_loss,
        count=count,
        loop=python_loop,
    )


def loss_of(module, batch):
    """The two means added, over all rows at once, in plain torch."""
    rows = {name: tensor.flatten(0, 1) for name, tensor in batch.items() if name != "lr"}
    sums, counts = row_loss(module, dict(module.named_parameters()), rows)
    return (sums.sum(0) / counts.sum(0)).sum()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_part_is_divided_by_its_own_count(accumulation):
    module, batch = Pair(), batch_of(accumulation)
    expected = loss_of(module, batch)
    grads = torch.autograd.grad(expected, list(module.parameters()))
    step = step_of(module)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    total = count({name: tensor.flatten(0, 1) for name, tensor in batch.items() if name != "lr"})
    assert total[0] != total[1]
    ours, _ = step.gradients(parameters, batch, total)
    for one, other in zip(ours, grads, strict=True):
        torch.testing.assert_close(one, other)
    _, _, output = step(parameters, step.updates.init(parameters), batch)
    torch.testing.assert_close(output.loss, expected.detach())
    assert output.row_losses_AR.shape == (accumulation, 3)
    torch.testing.assert_close(output.row_losses_AR.sum() / output.num_supervised, output.loss)
    assert output.num_supervised == total.sum()


def test_groups_train_as_two_optimizers_do():
    """Against torch's clipping and AdamW, one of each for each model; one limit is reached and one is not."""
    module, batch = Pair(), batch_of(1)
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    names = list(parameters)
    limits, rates = {"values": 1e3, "parity": 0.5}, {"values": 1.0, "parity": 3.0}
    groups = [
        ParameterGroup(tuple(n for n in names if n.startswith(part)), limits[part], rates[part]) for part in limits
    ]
    step = step_of(module, groups=groups)
    state = step.updates.init(parameters)
    theirs = []
    for part in limits:
        own = getattr(module, part)
        kinds = [{"params": [p for p in own.parameters() if (p.ndim > 1) == decays],
                  "weight_decay": WEIGHT_DECAY * decays} for decays in (True, False)]  # fmt: skip
        betas = (SETTINGS["beta1"], SETTINGS["beta2"])
        theirs.append(torch.optim.AdamW(kinds, lr=1e-2 * rates[part], betas=betas, eps=SETTINGS["eps"]))
    for _ in range(3):
        parameters, state, output = step(parameters, state, batch)
        module.zero_grad()
        loss_of(module, batch).backward()
        norms = [torch.nn.utils.clip_grad_norm_(getattr(module, part).parameters(), limits[part]) for part in limits]
        assert norms[0] < limits["values"]
        assert norms[1] > limits["parity"]
        torch.testing.assert_close(output.grad_norm, torch.stack(norms).norm())
        for optimizer in theirs:
            optimizer.step()
        for name, p in module.named_parameters():
            torch.testing.assert_close(parameters[name], p.detach())


def test_an_objective_without_groups_has_none():
    assert Objective().parameter_groups(["a"], clip_norm=1.0) == ()
