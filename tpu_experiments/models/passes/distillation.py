"""What a student loses against a teacher's likeliest tokens, and the teacher's values themselves, by chunks of logits.

Of every position the teacher's log-probabilities of its K likeliest tokens are known, q, and the student's p are
compared with them, at one temperature, after the rest of both was dealt with:

    bucket        all other tokens are one more category, log(1 - sum exp) (TRL's `add_tail_bucket`, SDPO,
                  arXiv 2601.20802). The divergence is then at most that of the whole vocabulary, and equal to it where
                  K is all of it; no mass is invented or lost.
    renormalised  both are divided by their sum over the K tokens: what the student gives other tokens costs nothing.

With B = beta the divergence is (GKD, arXiv 2306.13649, equation 1, as TRL's `generalized_jsd_loss` has it)

    B = 0         sum q (log q - log p)                       forward KL
    B = 1         sum p (log p - log q)                       reverse KL
    else          B sum q (log q - log m) + (1 - B) sum p (log p - log m), m = B q + (1 - B) p

Legend: B rows, T tokens, C tokens of a chunk, N chunks, H hidden, V vocabulary, K likeliest tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tpu_experiments.models.passes.forward import capped, has_plain_head, hidden_of, logits_of, soft_cap_of
from tpu_experiments.models.passes.loss import Terms, _joined, _loop_inputs
from tpu_experiments.runtime.ops import BY_ROWS, LoopCall, Tensors

LEAST_REST = 1e-6
"""Smallest mass of the bucket, and no gradient below it: 1 - sum exp of float32 is off by about 1e-7."""


@dataclass(frozen=True)
class Comparison:
    """How log-probabilities are compared."""

    temperature: float = 1.0
    """Divides the student's logits, as it did the teacher's."""
    rest: str = "bucket"
    """`bucket` or `renormalised`."""
    beta: float | None = 0.0
    """0 is the forward KL and 1 the reverse one; None: rows carry a number between them."""


class Taught(NamedTuple):
    """What a teacher says of every position, and how much that counts; one tensor after the other of `xs` of a loop."""

    targets_BT: Tensor
    ids_BTK: Tensor
    """Likeliest tokens after every position, the likeliest first."""
    logps_BTK: Tensor
    """Their log-probabilities at the temperature."""
    of_teacher_BT: Tensor
    """Factor of the divergence."""
    of_tokens_BT: Tensor
    """Factor of the cross-entropy of the target."""
    beta_BT: Tensor


class Losses(NamedTuple):
    """Losses of every position, nats."""

    divergence_BT: Tensor
    tokens_BT: Tensor
    """-log p of the target, at temperature 1."""
    kl_BT: Tensor
    """Forward KL, whatever the divergence is."""

    def weighted(self, taught: Taught) -> Tensor:
        """Return the weighted loss of every position."""
        return self.divergence_BT * taught.of_teacher_BT + self.tokens_BT * taught.of_tokens_BT


def losses_of(logits_BTV: Tensor, taught: Taught, comparison: Comparison) -> Losses:
    """Return the losses of every position from float32 logits."""
    own_BT = torch.gather(logits_BTV, -1, taught.targets_BT[..., None].long())[..., 0]
    log_z_BT = torch.logsumexp(logits_BTV, -1)
    tokens_BT = log_z_BT - own_BT
    if comparison.temperature != 1:
        logits_BTV = logits_BTV / comparison.temperature
        log_z_BT = torch.logsumexp(logits_BTV, -1)
    logp_BTK = torch.gather(logits_BTV, -1, taught.ids_BTK.long()) - log_z_BT[..., None]
    logq_BTK = taught.logps_BTK
    if comparison.rest == "renormalised":
        logp_BTK, logq_BTK = (each - torch.logsumexp(each, -1, keepdim=True) for each in (logp_BTK, logq_BTK))
    elif logq_BTK.shape[-1] < logits_BTV.shape[-1]:
        logp_BTK, logq_BTK = (torch.cat([each, _rest(each)], -1) for each in (logp_BTK, logq_BTK))
    kl_BT = (torch.exp(logq_BTK) * (logq_BTK - logp_BTK)).sum(-1)
    if comparison.beta == 0:
        return Losses(kl_BT, tokens_BT, kl_BT)
    return Losses(_divergence(logp_BTK, logq_BTK, comparison, beta_BT=taught.beta_BT), tokens_BT, kl_BT)


def _rest(logp_BTK: Tensor) -> Tensor:
    """Return the logarithm of what K probabilities leave to others, (B, T, 1)."""
    return torch.log((1 - torch.exp(logp_BTK).sum(-1, keepdim=True)).clamp(min=LEAST_REST))


def _divergence(logp_BTK: Tensor, logq_BTK: Tensor, comparison: Comparison, *, beta_BT: Tensor) -> Tensor:
    if comparison.beta == 1:
        return (torch.exp(logp_BTK) * (logp_BTK - logq_BTK)).sum(-1)
    # Rows of padding have 0, whose logarithm would make NaN of their weight of 0.
    beta_BT1 = torch.where((beta_BT > 0) & (beta_BT < 1), beta_BT, 0.5)[..., None]
    # torch_xla computes logaddexp on the host, which ends the process inside a loop.
    weighted = [logp_BTK + torch.log1p(-beta_BT1), logq_BTK + torch.log(beta_BT1)]
    logm_BTK = torch.logsumexp(torch.stack(weighted), 0)
    of_teacher_BTK = torch.exp(logq_BTK) * (logq_BTK - logm_BTK)
    of_student_BTK = torch.exp(logp_BTK) * (logp_BTK - logm_BTK)
    return (beta_BT1 * of_teacher_BTK + (1 - beta_BT1) * of_student_BTK).sum(-1)


def chunked_losses(
    hidden_BTH: Tensor, head_VH: Tensor, taught: Taught, terms: Terms, comparison: Comparison
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted loss sum of every row (B,), and without a gradient `tokens_BT` and `kl_BT` of `Losses`.

    Args:
        hidden_BTH: input of the head; its data type is that of the products with the vocabulary.
        head_VH: receives its gradient where it requires one, summed over the chunks in float32.
    """
    inputs = (hidden_BTH, head_VH, taught, terms, comparison)
    if not torch.is_grad_enabled() or not (hidden_BTH.requires_grad or head_VH.requires_grad):
        sums_B, tokens_BT, kl_BT, _ = _looped(*inputs, has_gradient=False)
        return sums_B, tokens_BT, kl_BT
    found: tuple[Tensor, Tensor, Tensor] = (_TrainedHead if head_VH.requires_grad else _FrozenHead).apply(*inputs)
    return found


def _logits(hidden_BCH: Tensor, head_VH: Tensor) -> Tensor:
    return torch.matmul(hidden_BCH, head_VH.T).float()


def _slope(logits_BCV: Tensor, taught: Taught, terms: Terms, comparison: Comparison) -> tuple[Losses, Tensor]:
    """Return the losses of a chunk, and the derivative of their weighted sum with respect to the logits."""
    with torch.enable_grad():
        leaf_BCV = logits_BCV.detach().requires_grad_()
        found = losses_of(capped(leaf_BCV, terms.soft_cap), taught, comparison)
        (slope_BCV,) = torch.autograd.grad(found.weighted(taught).sum(), leaf_BCV)
    return Losses(*(each.detach() for each in found)), slope_BCV


def _looped(
    hidden_BTH: Tensor, head_VH: Tensor, taught: Taught, terms: Terms, comparison: Comparison, *, has_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return sums (B,), losses of tokens and KL (B, T), and the gradient (B, T, H) for a weight of 1 per row."""

    def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
        here = Taught(*x[1:])
        gradient: Tensors = ()
        logits_BCV = _logits(x[0], consts[0])
        if has_gradient:
            found, slope_BCV = _slope(logits_BCV, here, terms, comparison)
            gradient = (slope_BCV.to(x[0].dtype) @ consts[0],)
        else:
            found = losses_of(capped(logits_BCV, terms.soft_cap), here, comparison)
        return (carry[0] + found.weighted(here).sum(1),), (found.tokens_BT, found.kl_BT, *gradient)

    xs, consts = _loop_inputs(hidden_BTH, head_VH, taught[0], taught[1], terms, *taught[2:])
    carry = (torch.zeros_like(taught.of_tokens_BT[:, 0]),)
    (sums_B,), found = terms.loop(LoopCall(body, carry=carry, xs=xs, consts=consts, rows=hidden_BTH.shape[0]))
    tokens_BT, kl_BT, *gradient = (_joined(each, hidden_BTH.shape[1]) for each in found)
    return sums_B, tokens_BT, kl_BT, gradient[0] if gradient else None


class _FrozenHead(torch.autograd.Function):
    """Losses and gradient of the hidden states in one pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_BTH: Tensor, head_VH: Tensor, taught: Taught, terms: Terms, comparison: Comparison
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums_B, tokens_BT, kl_BT, unit_BTH = _looped(hidden_BTH, head_VH, taught, terms, comparison, has_gradient=True)
        assert unit_BTH is not None
        ctx.save_for_backward(terms.constrain(unit_BTH, axes=BY_ROWS))
        ctx.mark_non_differentiable(tokens_BT, kl_BT)
        return sums_B, tokens_BT, kl_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (unit_BTH,) = ctx.saved_tensors
        # In float32, as in models/passes/loss.py.
        return (unit_BTH.float() * grad_B[:, None, None]).to(unit_BTH.dtype), None, None, None, None


class _TrainedHead(torch.autograd.Function):
    """The losses; backward computes the logits of a chunk again, for both gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_BTH: Tensor, head_VH: Tensor, taught: Taught, terms: Terms, comparison: Comparison
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums_B, tokens_BT, kl_BT, _ = _looped(hidden_BTH, head_VH, taught, terms, comparison, has_gradient=False)
        ctx.terms, ctx.comparison = terms, comparison
        ctx.save_for_backward(hidden_BTH, head_VH, *taught)
        ctx.mark_non_differentiable(tokens_BT, kl_BT)
        return sums_B, tokens_BT, kl_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BTH, head_VH, *rest = ctx.saved_tensors
        taught, terms = Taught(*rest), ctx.terms
        grads_BT = grad_B[:, None].expand_as(taught.of_tokens_BT)

        def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
            _, slope_BCV = _slope(_logits(x[0], consts[0]), Taught(*x[1:-1]), terms, ctx.comparison)
            grad_BCV = (slope_BCV * x[-1][..., None]).to(x[0].dtype)
            # Float32 operands, so that devices sum in float32 (models/parts/float32_gradients.py).
            grad_VH = grad_BCV.float().flatten(0, 1).T @ x[0].float().flatten(0, 1)
            return (carry[0] + grad_VH,), (grad_BCV @ consts[0],)

        xs, consts = _loop_inputs(hidden_BTH, head_VH, taught[0], taught[1], terms, *taught[2:], grads_BT)
        carry = (torch.zeros_like(head_VH, dtype=torch.float32),)
        call = LoopCall(body, carry=carry, xs=xs, consts=consts, rows=hidden_BTH.shape[0])
        (grad_VH,), (grads_NBCH,) = terms.loop(call)
        grad_BTH = terms.constrain(_joined(grads_NBCH, hidden_BTH.shape[1]), axes=BY_ROWS)
        return grad_BTH, grad_VH.to(head_VH.dtype), None, None, None


class OfTeacher(NamedTuple):
    """What is taken of a teacher's predictions."""

    top_k: int
    temperature: float
    num_ids: int
    """Ids of the tokenizer: a model may have embeddings beyond them, which no student need have."""


def likeliest(
    module: nn.Module, parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor], *, taken: OfTeacher, computing: Any
) -> Tensor:
    """Return log-probabilities and ids of the likeliest tokens after every position, (B, T, 2 K) float32.

    Log-probabilities are over the whole vocabulary, at the temperature, the likeliest first; an id below 2^24 is a
    float32. No gradient.

    Args:
        computing: a `Computing` (objectives/base.py).
    """

    def of(logits_BTV: Tensor) -> Tensor:
        scaled_BTV = logits_BTV.float() / taken.temperature
        top = torch.topk(scaled_BTV[..., : taken.num_ids], taken.top_k, dim=-1)
        logps_BTK = top.values - torch.logsumexp(scaled_BTV, -1, keepdim=True)
        return torch.cat([logps_BTK, top.indices.float()], -1)

    with torch.no_grad():
        if computing.chunk_tokens is None or not has_plain_head(module):
            return of(logits_of(module, parameters, rows))
        hidden_BTH, head_VH = hidden_of(module, parameters, rows)
        terms = computing.terms(hidden_BTH, soft_cap=soft_cap_of(module))

        def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
            return carry, (of(capped(_logits(x[0], consts[0]), terms.soft_cap)),)

        zeros_BT = torch.zeros_like(hidden_BTH[..., 0])
        xs, consts = _loop_inputs(hidden_BTH, head_VH, zeros_BT, zeros_BT, terms)
        call = LoopCall(body, carry=(zeros_BT[:, 0],), xs=xs, consts=consts, rows=hidden_BTH.shape[0])
        _, (values_NBCK,) = terms.loop(call)
        return _joined(values_NBCK, hidden_BTH.shape[1])
