"""The chunked loss per token against all logits: losses, gradients by token, caps, tied heads, micro-batches on XLA."""

import pytest
import torch
import torch.nn.functional as F

from tests.models.test_head import batch_of
from tests.models.test_loss import assert_same, sample
from tests.training.tiny import ARCHITECTURES, Run
from tpu_experiments.models.passes import loss
from tpu_experiments.models.passes.forward import logits_of, target_weights
from tpu_experiments.models.passes.loss import Terms
from tpu_experiments.models.passes.token_losses import chunked_token_losses
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.next_token import next_token_losses
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.ops import python_loop, unconstrained
from tpu_experiments.training.step import summed_gradients

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def _few_first_entries(monkeypatch):
    monkeypatch.setattr(loss, "NUM_FIRST", 8)


def weights_of(losses):
    """A factor of either sign for every token, of which some are 0."""
    generator = torch.Generator().manual_seed(3)
    factors = torch.randn(losses.shape, generator=generator)
    return (factors * (torch.rand(losses.shape, generator=generator) < 0.7)).to(losses.device)


def plain(hidden, head, targets, *, soft_cap=None):
    """The formula, over all logits at once."""
    logits = (hidden @ head.T).float()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none").view(targets.shape)


def outcome(function, *, trained, tied=False):
    """Losses and gradients; the loss is not linear in the tokens' losses."""
    hidden, head, batch = sample()
    hidden.requires_grad_()
    head.requires_grad_(trained)
    # Of a tied head the hidden states depend on the same matrix.
    states = hidden + F.embedding(batch["ids"], head) if tied else hidden
    losses = function(states, head, target_weights(batch)[0])
    total = (losses * weights_of(losses)).sum() + losses.square().mean()
    return [losses.detach(), *torch.autograd.grad(total, [hidden, head] if trained else [hidden])]


def chunked(chunk, *, soft_cap=None):
    terms = Terms(chunk, python_loop, unconstrained, soft_cap, 0.0)
    return lambda *args: chunked_token_losses(*args, terms=terms)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(("trained", "tied"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_tokens_and_gradients_are_those_of_all_logits(chunk, trained, tied, soft_cap):
    found = outcome(chunked(chunk, soft_cap=soft_cap), trained=trained, tied=tied)
    expected = outcome(lambda *args: plain(*args, soft_cap=soft_cap), trained=trained, tied=tied)
    scale = max(float(each.abs().max()) for each in expected[1:])
    assert_same(found[:1], expected[:1], tolerance=2e-6)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6 * max(1.0, scale), rtol=1e-6)


@pytest.mark.parametrize("lora", ["none", "all_linear_r8"])
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_whole_models(make_config, model, lora):
    """Mistral's head is a parameter of its own, the others' is the embedding; `lora=none` trains it."""
    config = make_config(f"model={model}", "model.size=tiny", "model.dtype=float32", f"lora={lora}", "hw.runtime=eager")
    run = Run(config, EagerRuntime(config.hw))
    leaves = {name: (p + 0.01).requires_grad_() for name, p in run.parameters.items()}
    rows = batch_of(vocab=4096)

    def found(**settings):
        losses, weights = next_token_losses(run.model.module, leaves, rows, computing=Computing(**settings))
        total = (losses * weights * weights_of(losses)).sum()
        return losses, weights, *torch.autograd.grad(total, list(leaves.values()))

    whole = found()
    logits = logits_of(run.model.module, leaves, rows)[:, :-1].log_softmax(-1)
    own = -torch.gather(logits, -1, rows["ids"][:, 1:, None].long())[..., 0]
    torch.testing.assert_close(whole[0][:, :-1], own, atol=1e-5, rtol=1e-5)
    assert_same(found(chunk_tokens=14), whole, tolerance=5e-6)


@pytest.mark.parametrize("trained", [False, True])
def test_micro_batches_in_a_loop_of_torch_xla(trained):
    import torch_xla

    from tpu_experiments.runtime.xla.loop import xla_loop

    hidden, head, batch = sample()
    targets = target_weights(batch)[0]

    def gradients(loop, device, chunk):
        def loss_of(leaves, tensors, others):
            states = torch.tanh(tensors[0] @ leaves[0])
            terms = Terms(chunk, loop, unconstrained, 2.0, 0.0)
            losses = chunked_token_losses(states, leaves[-1] if trained else others[0], tensors[1], terms=terms)
            sums = F.softplus((losses * tensors[2]).sum(1))
            return sums.sum(), sums

        values = [torch.eye(hidden.shape[-1]), head] if trained else [torch.eye(hidden.shape[-1])]
        xs = (hidden[:, None], targets[:, None], weights_of(targets.float())[:, None])
        grads, sums = summed_gradients(
            loss_of,
            tuple(value.to(device) for value in values),
            tuple(x.to(device) for x in xs),
            (head.to(device),),
            loop=loop,
        )
        return [tensor.cpu() for tensor in (sums, *grads)]

    found = gradients(xla_loop, torch_xla.device(), 7)
    assert_same(found, gradients(python_loop, "cpu", 64), tolerance=1e-5)
