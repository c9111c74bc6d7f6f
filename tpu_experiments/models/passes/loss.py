"""Next-token loss and scores from hidden states: the logits exist for some positions of every row at a time.

With a frozen head the gradient of the hidden states is computed beside the loss, so that a step multiplies with the
vocabulary twice (logits, and their gradient with the head) and repeats nothing. A trained head adds its own gradient
and, since its rows are weighted by what comes back, the logits a second time. A vocabulary of 262,144 makes 1 GiB of
float32 logits of every 1024 positions.
Legend: B rows, T tokens, C tokens of a chunk, N chunks, H hidden, V vocabulary."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tpu_experiments.models.passes.forward import capped, target_weights
from tpu_experiments.runtime.ops import BY_ROWS, HEAD, Constrain, Loop, LoopCall, Tensors, apart, unconstrained

NUM_FIRST = 1024
"""Entries of the vocabulary (a tokenizer's first are its commonest) whose logits are computed beforehand, to bound the
exponents."""
MAX_EXPONENT = 75.0
"""262,144 times e^75 is still a float32. A logit further than this above the target's and all of the first entries' is
clamped: the loss of such a position is reported as 75 nats or little more."""


@dataclass(frozen=True)
class Terms:
    """What a position's loss is, and how many are computed at once."""

    chunk_positions: int
    """Upper bound of the positions of every row whose logits exist at once."""
    loop: Loop
    constrain: Constrain = unconstrained
    soft_cap: float | None = None
    """c in c tanh(logits / c) (Gemma 2, arXiv 2408.00118)."""
    z_loss: float = 0.0
    """Factor of log(Z)^2, which is added to the loss (PaLM, arXiv 2204.02311, 1e-4)."""
    left_out: int | None = None
    """Token that is never predicted: its logit counts as minus infinity."""
    rows_N: Tensor | None = None
    """Tokens whose rows of the head are all that is trained of it, int64 (N,)."""


def chunked_row_losses(
    hidden_BTH: Tensor, head_VH: Tensor, batch: Mapping[str, Tensor], terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss sum (nats) and the weight sum of every row, both (B,) float32.

    The result is that of `row_losses` on the logits; arguments are those of `chunked_losses`.
    """
    targets_BT, weights_BT = target_weights(batch)
    return chunked_losses(hidden_BTH, head_VH, targets_BT, weights_BT, terms), weights_BT.sum(1)


def chunked_losses(hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, weights_BT: Tensor, terms: Terms) -> Tensor:
    """Return the weighted sum (B,) of the losses of given targets, nats.

    The chunks are equal: T is cut into ceil(T / chunk_positions) and padded with positions of weight 0 to a multiple of
    that, fewer of them than there are chunks. (A divisor of T would need none and may be 1.) In plain torch on a
    CPU, where any shape may do, a gradient is computed of the positions that have a weight alone.

    Args:
        hidden_BTH: input of the head; its data type is that of the products with the vocabulary.
        head_VH: receives its gradient where it requires one, summed over the chunks in float32; of `terms.rows_N`,
            those rows' alone.
    """
    if not torch.is_grad_enabled() or not (hidden_BTH.requires_grad or head_VH.requires_grad):
        return _sums(hidden_BTH, head_VH, targets_BT, weights_BT, terms)[0]
    if hidden_BTH.device.type == "cpu":
        hidden_BTH, targets_BT, weights_BT = weighted_first(hidden_BTH, targets_BT, weights_BT)
    is_trained = head_VH.requires_grad and terms.rows_N is None
    loss = _TrainedHead if is_trained else _FrozenHead
    sums_B: Tensor = loss.apply(hidden_BTH, head_VH, targets_BT, weights_BT, terms)
    return sums_B


def weighted_first(hidden_BTH: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the positions of every row that have a weight to its front, and leave out the columns that are left.

    Of SmolLM2 135M, whose vocabulary is a fifth of its products, a step on orders of which 39 % are learnt takes 13 %
    less (tests/benchmarks/LOG.md#smollm2-beside-trl-and-peft).
    """
    is_left_BT = weights_BT == 0
    most = max(1, int((~is_left_BT).sum(1).max()))
    if most == weights_BT.shape[1]:
        return hidden_BTH, targets_BT, weights_BT
    index_BK = torch.argsort(is_left_BT.to(torch.uint8), dim=1, stable=True)[:, :most]
    hidden_BKH = hidden_BTH.gather(1, index_BK[..., None].expand(-1, -1, hidden_BTH.shape[2]))
    return hidden_BKH, targets_BT.gather(1, index_BK), weights_BT.gather(1, index_BK)


def chunked_scores(
    hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, weights_BT: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of `chunked_losses`, without a gradient, and the scores of every position.

    Returns:
        Weighted loss sums (B,); then loss in nats and whether no token is likelier than the target, (B, T) float32,
        whatever the weight.
    """

    def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
        chunk = _Chunk(x[0], *consts, targets_BC=x[1], terms=terms)
        losses_BC = chunk.losses()
        return (carry[0] + (losses_BC * x[2]).sum(1),), (losses_BC, chunk.hits())

    xs, consts = _loop_inputs(hidden_BTH, head_VH, targets_BT, weights_BT, terms)
    carry = (torch.zeros_like(weights_BT[:, 0]),)
    (sums_B,), tokens = terms.loop(LoopCall(body, carry=carry, xs=xs, consts=consts, rows=hidden_BTH.shape[0]))
    losses_BT, hits_BT = (_joined(each_NBC, hidden_BTH.shape[1]) for each_NBC in tokens)
    return sums_B, losses_BT, hits_BT


def _sums(
    hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, weights_BT: Tensor, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return loss sums (B,) and the log-partition (B, T), with one product with the vocabulary."""

    def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
        chunk = _Chunk(x[0], *consts, targets_BC=x[1], terms=terms)
        return (carry[0] + (chunk.losses() * x[2]).sum(1),), (chunk.log_z_BC,)

    xs, consts = _loop_inputs(hidden_BTH, head_VH, targets_BT, weights_BT, terms)
    carry = (torch.zeros_like(weights_BT[:, 0]),)
    (sums_B,), (log_z_NBC,) = terms.loop(LoopCall(body, carry=carry, xs=xs, consts=consts))
    return sums_B, _joined(log_z_NBC, hidden_BTH.shape[1])


def _loop_inputs(
    hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, weights_BT: Tensor, terms: Terms, *more_BT: Tensor
) -> tuple[Tensors, Tensors]:
    """Return the inputs of each chunk, and the constants of the loop.

    A sharded head is gathered once, before the loop, except along `tensor`, whose devices share the vocabulary; rows
    keep their sharding. Without these constraints XLA gathered the head in every chunk and split the gradient of the
    hidden states along H (compiled for v6e-8).
    """
    parts = (terms.constrain(hidden_BTH, axes=BY_ROWS), targets_BT, weights_BT, *more_BT)
    head = terms.constrain(head_VH.to(hidden_BTH.dtype), axes=HEAD)
    return tuple(_cut(part, terms.chunk_positions) for part in parts), (head, numbers(head_VH.shape[0], head_VH.device))


def trained_rows(head_VH: Tensor, terms: Terms, *, dtype: torch.dtype) -> Tensors:
    """Return the trained rows (N, H) of a head and their tokens (N,), or nothing."""
    if terms.rows_N is None or not head_VH.requires_grad:
        return ()
    return head_VH.detach().index_select(0, terms.rows_N).to(dtype), terms.rows_N.to(torch.int32)


def slopes_of_rows(x: Tensors, rows: Tensors, *, log_z_BC: Tensor, terms: Terms) -> Tensors:
    """Return the derivative (B, C, N) of every position's loss with respect to the logits of trained rows, if any."""
    return (_slope(x[0], *rows, targets_BC=x[1], log_z_BC=log_z_BC, terms=terms),) if rows else ()


def gradient_of_rows(
    slopes_BTN: Tensor, grads_BT: Tensor, hidden_BTH: Tensor, *, like: Tensor, rows_N: Tensor
) -> Tensor:
    """Return the gradient of a head (V, H), which is zero but for the trained rows."""
    grad_NH = (slopes_BTN * grads_BT[..., None]).flatten(0, 1).T @ hidden_BTH.float().flatten(0, 1)
    return grad_NH.new_zeros(like.shape).index_copy(0, rows_N, grad_NH).to(like.dtype)


class _FrozenHead(torch.autograd.Function):
    """Loss and gradient of the hidden states in one pass; saved is the gradient for a weight of 1 per row.

    Of a head of which some rows are trained, the slopes of their logits are saved too: their gradient costs a product
    with those rows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, weights_BT: Tensor, terms: Terms
    ) -> Tensor:
        def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
            chunk = _Chunk(x[0], *consts[:2], targets_BC=x[1], terms=terms)
            slopes = slopes_of_rows(x, consts[2:], log_z_BC=chunk.log_z_BC, terms=terms)
            return (carry[0] + (chunk.losses() * x[2]).sum(1),), (chunk.gradient(x[2]), *slopes)

        xs, consts = _loop_inputs(hidden_BTH, head_VH, targets_BT, weights_BT, terms)
        consts = (*consts, *trained_rows(head_VH, terms, dtype=hidden_BTH.dtype))
        carry, length = (torch.zeros_like(weights_BT[:, 0]),), hidden_BTH.shape[1]
        rows = hidden_BTH.shape[0]
        (sums_B,), (grads_NBCH, *slopes) = terms.loop(LoopCall(body, carry=carry, xs=xs, consts=consts, rows=rows))
        more = [_joined(each, length) for each in slopes]
        more += [weights_BT, hidden_BTH] if more else []
        ctx.save_for_backward(terms.constrain(_joined(grads_NBCH, length), axes=BY_ROWS), *more)
        ctx.head, ctx.rows_N = torch.empty_like(head_VH, device="meta"), terms.rows_N
        return sums_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        unit_BTH, *more = ctx.saved_tensors
        # In float32: 1 / tokens rounded to bf16 would scale the whole gradient by up to 0.2%.
        grad_BTH = (unit_BTH.float() * grad_B[:, None, None]).to(unit_BTH.dtype)
        if not more:
            return grad_BTH, None, None, None, None
        slopes_BTN, weights_BT, hidden_BTH = more
        grads_BT = weights_BT * grad_B[:, None]
        grad_VH = gradient_of_rows(slopes_BTN, grads_BT, hidden_BTH, like=ctx.head, rows_N=ctx.rows_N)
        return grad_BTH, grad_VH, None, None, None


class _TrainedHead(torch.autograd.Function):
    """The loss; backward recomputes the logits of each chunk, for both gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, weights_BT: Tensor, terms: Terms
    ) -> Tensor:
        sums_B, log_z_BT = _sums(hidden_BTH, head_VH, targets_BT, weights_BT, terms)
        ctx.terms = terms
        ctx.save_for_backward(hidden_BTH, head_VH, targets_BT, weights_BT, log_z_BT)
        return sums_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BTH, head_VH, targets_BT, weights_BT, log_z_BT = ctx.saved_tensors
        grads_BT = weights_BT * grad_B[:, None]
        return (
            *gradients_by_token(hidden_BTH, head_VH, targets_BT, grads_BT, log_z_BT, terms=ctx.terms),
            None,
            None,
            None,
        )


def gradients_by_token(
    hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, grads_BT: Tensor, log_z_BT: Tensor, *, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states and head, for one of each position's loss (B, T); logits are recomputed."""

    def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
        slope_BCV = _slope(x[0], *consts, targets_BC=x[1], log_z_BC=x[3], terms=terms)
        grad_BCV = (slope_BCV * x[2][..., None]).to(x[0].dtype)
        # Float32 operands, so that devices sum in float32 (models/parts/float32_gradients.py).
        grad_VH = grad_BCV.float().flatten(0, 1).T @ x[0].float().flatten(0, 1)
        return (carry[0] + grad_VH,), (grad_BCV @ consts[0],)

    xs, consts = _loop_inputs(hidden_BTH, head_VH, targets_BT, grads_BT, terms, log_z_BT)
    carry = (torch.zeros_like(head_VH, dtype=torch.float32),)
    rows = hidden_BTH.shape[0]
    (grad_VH,), (grads_NBCH,) = terms.loop(LoopCall(body, carry=carry, xs=xs, consts=consts, rows=rows))
    grad_BTH = terms.constrain(_joined(grads_NBCH, hidden_BTH.shape[1]), axes=BY_ROWS)
    return grad_BTH, grad_VH.to(head_VH.dtype)


class _Chunk:
    """Loss of one chunk, and its gradient for a frozen head.

    Of the product with the vocabulary only the exponentials of the logits are kept, and they are summed as they are
    made: XLA fuses both into the product, where a log-sum-exp would read the results twice more. This needs a shift,
    before any logit is known, that no logit is far above. The target's own exponential is left out of the sum and of
    the gradient's product and added separately: softmax - 1 would lose its last digits in bf16 where the softmax is
    near 1.
    """

    def __init__(
        self, hidden_BCH: Tensor, head_VH: Tensor, index_V: Tensor, *, targets_BC: Tensor, terms: Terms
    ) -> None:
        self.terms, self.head_VH, self.dtype = terms, head_VH, hidden_BCH.dtype
        self.row_BCH = F.embedding(targets_BC, head_VH).float()
        self.target_BC = capped((hidden_BCH.float() * self.row_BCH).sum(-1), terms.soft_cap)
        some_BCV = capped(torch.matmul(hidden_BCH, head_VH[:NUM_FIRST].T).float(), terms.soft_cap)
        if terms.left_out is not None and terms.left_out < NUM_FIRST:
            some_BCV = torch.where(index_V[:NUM_FIRST] == terms.left_out, torch.finfo(torch.float32).min, some_BCV)
        shift_BC = torch.maximum(self.target_BC, some_BCV.amax(-1))
        logits_BCV = capped(torch.matmul(hidden_BCH, head_VH.T).float(), terms.soft_cap)
        exp_BCV = torch.exp(torch.clamp(logits_BCV - shift_BC[..., None], max=MAX_EXPONENT))
        # A comparison, not a scatter: elementwise work is fused into the product, and rows keep their sharding.
        exp_BCV = torch.where(targets_BC[..., None] == index_V, 0.0, exp_BCV)
        if terms.left_out is not None:
            exp_BCV = torch.where(index_V == terms.left_out, 0.0, exp_BCV)
        self.exp_BCV, self.shift_BC = exp_BCV, shift_BC
        self.others_BC = exp_BCV.sum(-1)
        self.sum_BC = self.others_BC + torch.exp(self.target_BC - shift_BC)
        self.log_z_BC = torch.log(self.sum_BC) + shift_BC
        self.pull_BCV = exp_BCV if terms.soft_cap is None else exp_BCV * _cap_slope(logits_BCV, terms.soft_cap)

    def losses(self) -> Tensor:
        """Return the loss of every position (B, C), in nats."""
        losses_BC = self.log_z_BC - self.target_BC
        return losses_BC + self.terms.z_loss * self.log_z_BC**2 if self.terms.z_loss else losses_BC

    def hits(self) -> Tensor:
        """Return 1 where no token is likelier than the target (B, C), float32.

        The target's logit is not rounded to bf16.
        """
        own_BC = torch.exp(self.target_BC - self.shift_BC)
        return (self.exp_BCV.amax(-1) <= own_BC).to(torch.float32)

    def gradient(self, weights_BC: Tensor) -> Tensor:
        """Return the gradient (B, C, H) of the weighted losses with respect to the hidden states."""
        others_BCH = self._pulled()
        of_target_BC = -self.others_BC
        if self.terms.z_loss:
            slope_BC = 2 * self.terms.z_loss * self.log_z_BC
            others_BCH = others_BCH * (1 + slope_BC)[..., None]
            of_target_BC = of_target_BC + slope_BC * (self.sum_BC - self.others_BC)
        if self.terms.soft_cap is not None:
            of_target_BC = of_target_BC * _cap_slope(self.target_BC, self.terms.soft_cap)
        scale_BC = weights_BC / self.sum_BC
        grad_BCH = others_BCH * scale_BC[..., None] + (of_target_BC * scale_BC)[..., None] * self.row_BCH
        return grad_BCH.to(self.dtype)

    def _pulled(self) -> Tensor:
        """Return the sum (B, C, H) of the other tokens' rows of the head, each times its exponential, in float32."""
        if self.dtype != torch.float16:
            # Behind a barrier: with the sum of `gradient` in it, the product has smaller tiles in 16 MiB of vector
            # memory (v5e, planned: 5.0 instead of 3.6 ms for 2,048 positions of Gemma 3 270M).
            return apart(self.pull_BCV.to(self.dtype) @ self.head_VH).float()
        # Exponentials reach e^75 and float16 65,504; their shares of the sum are at most 1.
        shares_BCV = self.pull_BCV / self.sum_BC[..., None]
        return (shares_BCV.to(self.dtype) @ self.head_VH).float() * self.sum_BC[..., None]


def _slope(
    hidden_BCH: Tensor, head_VH: Tensor, index_V: Tensor, *, targets_BC: Tensor, log_z_BC: Tensor, terms: Terms
) -> Tensor:
    """Return the derivative (B, C, V) of every position's loss with respect to the logits before capping."""
    logits_BCV = capped(torch.matmul(hidden_BCH, head_VH.T).float(), terms.soft_cap)
    # The clamp is for positions whose log-partition was computed from clamped exponents.
    slope_BCV = torch.exp(torch.clamp(logits_BCV - log_z_BC[..., None], max=0.0))
    if terms.left_out is not None:
        slope_BCV = torch.where(index_V == terms.left_out, 0.0, slope_BCV)
    if terms.z_loss:
        slope_BCV = slope_BCV * (1 + 2 * terms.z_loss * log_z_BC[..., None])
    slope_BCV = slope_BCV - (targets_BC[..., None] == index_V).to(torch.float32)
    return slope_BCV if terms.soft_cap is None else slope_BCV * _cap_slope(logits_BCV, terms.soft_cap)


def _cap_slope(values: Tensor, cap: float) -> Tensor:
    """Return the derivative of `capped` where it has this value."""
    return 1 - (values / cap) ** 2


def numbers(size: int, device: torch.device, *, side: int = 512) -> Tensor:
    """Return 0 to size - 1, int32, as a sum of two short ranges.

    torch_xla writes a range into the program number by number: 262,144 of them took 78 ms of every step's tracing.
    """
    high, low = (torch.arange(n, dtype=torch.int32, device=device) for n in (math.ceil(size / side), side))
    return (high[:, None] * side + low).flatten()[:size]


def _cut(tensor: Tensor, chunk_positions: int) -> Tensor:
    """Split (B, T, ...) into (N, B, C, ...), padded with zeros at the end."""
    length = tensor.shape[1]
    num = math.ceil(length / chunk_positions)
    size = math.ceil(length / num)
    if num * size > length:
        tensor = F.pad(tensor, [0, 0] * (tensor.ndim - 2) + [0, num * size - length])
    return tensor.unflatten(1, (num, size)).transpose(0, 1)


def _joined(chunks_NBCH: Tensor, length: int) -> Tensor:
    """Join (N, B, C, H) to (B, T, H), the inverse of `_cut`."""
    return chunks_NBCH.transpose(0, 1).flatten(1, 2)[:, :length]


class Scores(NamedTuple):
    """Scores of R rows of T tokens, float32."""

    sums_R: Tensor
    """Weighted loss sums, nats; bit for bit those of `next_token_loss` (objectives/next_token.py)."""
    weights_R: Tensor
    losses_RT: Tensor
    """-log p of the token after each position, nats, whatever its weight."""
    hits_RT: Tensor
    """1 where no other token was likelier."""
    weights_RT: Tensor | None = None
    """Weights of the tokens after each position; None: those of `target_weights`."""


TokenScores = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Tensor]], Scores]
"""(module, parameters, rows (R, T)) to their scores."""
