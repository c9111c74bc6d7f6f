"""Pairs of answers made by a seed, as packed rows of this project and as padded batches of TRL."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = tuple[list[int], list[int], list[int]]
"""Tokens of prompt, chosen and rejected answer."""


def made_pairs(seed: int, *, count: int, vocab: int, prompt: int = 6, answer: int = 9) -> list[Pair]:
    """Pairs with prompts of up to `prompt` tokens and answers of up to `answer`, no token of which is special."""
    generator = np.random.Generator(np.random.Philox(key=seed))

    def some(most: int) -> list[int]:
        ids: list[int] = generator.integers(5, vocab, generator.integers(1, most + 1)).tolist()
        return ids

    return [(some(prompt), some(answer), some(answer)) for _ in range(count)]


def swapped(pairs: list[Pair]) -> list[Pair]:
    """The pairs with chosen and rejected answers exchanged."""
    return [(prompt, rejected, chosen) for prompt, chosen, rejected in pairs]


def labelled(pairs: list[Pair]) -> list[Pair]:
    """The chosen answers by themselves, the first good, the second bad, and so on."""
    return [(p, c, []) if number % 2 == 0 else (p, [], c) for number, (p, c, _) in enumerate(pairs)]


def packed(pairs: list[Pair], *, per_row: int, seq_len: int) -> dict[str, Tensor]:
    """Rows (R, T) of `per_row` pairs each, odd segments chosen and even ones rejected, and a reference of 0.

    A side without an answer is one token, which is not learnt, as of single answers (data/steps/pairs.py).
    """
    rows = -(-len(pairs) // per_row)
    names = ("ids", "learn", "positions", "segments")
    made = {name: torch.zeros(rows, seq_len, dtype=torch.int32) for name in names}
    for row in range(rows):
        start, segment = 0, 0
        for prompt, *answers in pairs[row * per_row : (row + 1) * per_row]:
            for answer in answers:
                ids, segment = prompt + answer if answer else prompt[:1], segment + 1
                place = (row, slice(start, start + len(ids)))
                made["ids"][place] = torch.tensor(ids, dtype=torch.int32)
                made["learn"][row, start + len(prompt) : start + len(ids)] = 1  # none of a side without an answer
                made["positions"][place] = torch.arange(len(ids), dtype=torch.int32)
                made["segments"][place] = segment
                start += len(ids)
    return made | {"reference": torch.zeros(rows, seq_len)}


def with_reference(rows: dict[str, Tensor], values_RS: Tensor) -> dict[str, Tensor]:
    """The rows with a value for every segment at its last learnt token, and a second one before the first.

    Args:
        values_RS: (R, S), or (R, S, 2).
    """
    reference = torch.zeros(rows["ids"].shape)
    for row in range(len(reference)):
        for segment in range(1, int(rows["segments"][row].max()) + 1):
            learnt = torch.nonzero((rows["segments"][row] == segment) & (rows["learn"][row] > 0))
            if len(learnt):
                own = values_RS[row, segment - 1].view(-1)
                reference[row, int(learnt[-1])] = own[0]
                if len(own) == 2:
                    reference[row, int(learnt[0]) - 1] = own[1]
    return rows | {"reference": reference}


def padded(sequences: list[list[int]], value: int) -> Tensor:
    """(N, L) of sequences padded at their ends."""
    longest = max(map(len, sequences))
    return torch.tensor([ids + [value] * (longest - len(ids)) for ids in sequences])


def of_dpo(pairs: list[Pair]) -> dict[str, Any]:
    """The batch of TRL's DPO collator: chosen answers, then rejected ones."""
    both = [(p, c) for p, c, _ in pairs] + [(p, r) for p, _, r in pairs]
    return {
        "input_ids": padded([p + a for p, a in both], 0),
        "attention_mask": padded([[1] * len(p + a) for p, a in both], 0),
        "completion_mask": padded([[0] * len(p) + [1] * len(a) for p, a in both], 0),
    }


def of_orpo(pairs: list[Pair]) -> dict[str, Any]:
    """The batch of the collator of TRL's ORPO and CPO."""
    made = {}
    for name, which in (("chosen", 1), ("rejected", 2)):
        both = [(pair[0], pair[which]) for pair in pairs]
        made[f"{name}_input_ids"] = padded([p + a for p, a in both], 0)
        made[f"{name}_attention_mask"] = padded([[1] * len(p + a) for p, a in both], 0)
        made[f"{name}_labels"] = padded([[-100] * len(p) + a for p, a in both], -100)
    return made


def with_margins(rows: dict[str, Tensor], margins_D: Tensor) -> dict[str, Tensor]:
    """The array of the pairs' margins, each at the last token of its second segment, in the order of the rows."""
    segments, margin = rows["segments"], torch.zeros(rows["ids"].shape)
    ends = (segments != torch.roll(segments, -1, 1)) & (segments > 0) & (segments % 2 == 0)
    margin[ends] = margins_D
    return {"margin": margin}


def of_reward(pairs: list[Pair]) -> dict[str, Any]:
    """The batch of TRL's collator of reward models: chosen answers, then rejected ones."""
    both = [p + c for p, c, _ in pairs] + [p + r for p, _, r in pairs]
    return {"input_ids": padded(both, 0), "attention_mask": padded([[1] * len(ids) for ids in both], 0)}


def of_kto(examples: list[Pair]) -> dict[str, Any]:
    """The batch of TRL's KTO collator, each prompt also with the answer before it."""
    own = [(prompt, chosen or rejected) for prompt, chosen, rejected in examples]
    made: dict[str, Any] = {"label": torch.tensor([bool(chosen) for _, chosen, _ in examples])}
    for name, both in (("", own), ("KL_", [(own[i][0], own[i - 1][1]) for i in range(len(own))])):
        made[f"{name}input_ids"] = padded([p + a for p, a in both], 0)
        made[f"{name}attention_mask"] = padded([[1] * len(p + a) for p, a in both], 0)
        made[f"{name}completion_mask"] = padded([[0] * len(p) + [1] * len(a) for p, a in both], 0)
    return made
