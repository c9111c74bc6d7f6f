"""Choice of every row's next token, with static shapes; equals transformers' logits processors.

Sampling uses one uniform number per token, drawn on the host: for the same logits the choice is the same on every
device. Legend: B rows, S slots, V vocabulary, C candidates.
"""

import torch
from torch import Tensor

from tpu_experiments.config.generating import ChoiceConfig


def next_ids(
    logits_BV: Tensor, *, ids_BS: Tensor, pads_B: Tensor, slot: Tensor, uniform_B: Tensor, how: ChoiceConfig
) -> Tensor:
    """Choose the next token of every row; returns ids (B,) int32.

    Args:
        ids_BS: prompts and generated tokens, each row after `pads_B` slots of padding and up to `slot` (1,).
        uniform_B: float32 in [0, 1); unused without sampling.
    """
    scores_BV = processed(logits_BV.to(torch.float32), ids_BS=ids_BS, pads_B=pads_B, slot=slot, how=how)
    if not how.do_sample:
        return scores_BV.argmax(-1).to(torch.int32)
    probabilities_BC, ids_BC = candidates(scores_BV, how=how)
    reached_BC = probabilities_BC.cumsum(-1)
    # Inverse transform sampling. Scaled by the last sum, the distribution function reaches 1 despite rounding.
    place_B1 = (reached_BC <= uniform_B[:, None] * reached_BC[:, -1:]).sum(-1, keepdim=True)
    possible_B1 = (probabilities_BC > 0).sum(-1, keepdim=True)
    return ids_BC.gather(1, torch.minimum(place_B1, possible_B1 - 1))[:, 0].to(torch.int32)


def processed(logits_BV: Tensor, *, ids_BS: Tensor, pads_B: Tensor, slot: Tensor, how: ChoiceConfig) -> Tensor:
    """Apply `repetition_penalty` and `no_repeat_ngram_size` to logits; padding does not count as text."""
    index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
    is_text_BS = (index_S >= pads_B[:, None]) & (index_S <= slot)
    scores_BV, penalty = logits_BV, how.repetition_penalty
    if penalty != 1:
        punished = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
        scores_BV = torch.where(_occurring(ids_BS, where=is_text_BS, like=scores_BV), punished, scores_BV)
    if how.no_repeat_ngram_size:
        ends_BS = is_text_BS & _ends_of_repeats(ids_BS, pads_B=pads_B, slot=slot, size=how.no_repeat_ngram_size)
        scores_BV = scores_BV.masked_fill(_occurring(ids_BS, where=ends_BS, like=scores_BV), -torch.inf)
    return scores_BV


def candidates(scores_BV: Tensor, *, how: ChoiceConfig) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids (B, C) of the tokens to sample from, likeliest first.

    Tokens outside `top_p` have probability 0. Of tokens that tie for the last place of `top_k`, transformers keeps all,
    and this keeps `top_k` in total.
    """
    num_ids = scores_BV.shape[-1]
    best_BC, ids_BC = torch.topk(scores_BV / how.temperature, min(how.top_k or num_ids, num_ids), dim=-1)
    probabilities_BC = torch.softmax(best_BC, dim=-1)
    before_BC = probabilities_BC.cumsum(-1) - probabilities_BC
    return torch.where(before_BC < how.top_p, probabilities_BC, 0.0), ids_BC


def _occurring(ids_BS: Tensor, *, where: Tensor, like: Tensor) -> Tensor:
    """Return which ids occur in a row's slots `where`: boolean (B, V)."""
    rows, num_ids = like.shape
    counts = torch.zeros(rows, num_ids + 1, device=like.device, dtype=torch.int32)  # an extra id takes the others
    targets = torch.where(where, ids_BS, num_ids).long()
    return counts.scatter(1, targets, torch.ones_like(ids_BS))[:, :num_ids] > 0


def _ends_of_repeats(ids_BS: Tensor, *, pads_B: Tensor, slot: Tensor, size: int) -> Tensor:
    """Return the slots (B, S) whose token, written next, would repeat an earlier run of `size` tokens."""
    index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
    begins_B1 = pads_B[:, None] + size - 1
    match_BS = (index_S >= begins_B1) & (slot + 1 >= begins_B1)
    for back in range(1, size):
        place = (slot - (back - 1)).clamp(min=0).long()
        match_BS = match_BS & (ids_BS.roll(back, dims=1) == ids_BS.index_select(1, place))
    return match_BS
