"""Answers that the model writes to held-out conversations, beside the real ones."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.tokens.tokenize import LEARN


@dataclass(frozen=True)
class Exchange:
    """A conversation up to its last answer, and that answer as reference."""

    prompt_ids: list[int]
    reference: str


def as_records(held_out: HeldOut, *, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return the documents as text, decoded from their tokens."""
    if held_out.kind == "chat":
        found = exchanges(held_out, tokenizer=tokenizer, num=held_out.flat.num_documents)
        prompts = [str(tokenizer.decode(exchange.prompt_ids)) for exchange in found]
        return [
            {"source": held_out.name, "prompt": prompt, "reference": exchange.reference}
            for prompt, exchange in zip(prompts, found, strict=True)
        ]
    texts = (tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in held_out.documents())
    return [{"source": held_out.name, "text": str(text)} for text in texts]


def exchanges(held_out: HeldOut, *, tokenizer: PreTrainedTokenizerBase, num: int) -> list[Exchange]:
    """Return the last exchange of the first `num` conversations.

    What is rendered and what is an answer was decided when they were prepared (data/tokens/chat.py).
    """
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
