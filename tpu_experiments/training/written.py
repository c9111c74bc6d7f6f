"""Answers that the model writes to held-out conversations, beside the real ones."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.tokens.tokenize import LEARN


@dataclass(frozen=True)
class Exchange:
    """A conversation up to its last answer, and that answer."""

    prompt_ids: list[int]
    reference: str


def exchanges(held_out: HeldOut, *, tokenizer: PreTrainedTokenizerBase, num: int) -> list[Exchange]:
    """The last answers of the first `num` conversations; what is rendered and what is an answer was settled when they
    were prepared (data/tokens/chat.py)."""
    found: list[Exchange] = []
    for ids, flags in held_out.documents():
        if len(found) == num:
            break
        learnt = np.flatnonzero(flags & LEARN)
        breaks = np.flatnonzero(np.diff(learnt) > 1)
        begin = int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0])
        answer = ids[begin : int(learnt[-1]) + 1].tolist()
        text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        found.append(Exchange(ids[:begin].tolist(), text))
    return found
