"""Answers to the requests of lm-evaluation-harness, by the tokens of each."""

from dataclasses import dataclass, field

MOST_NEW = 256
"""Tokens of an answer where a task does not say, as in the harness's `hf` backend."""

Scored = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a context and of what is to be scored behind it."""
Written = tuple[tuple[int, ...], int, tuple[str, ...]]
"""Tokens of a prompt, most tokens of an answer, and texts that end it."""


@dataclass
class Answers:
    """What a model answers to the requests; empty to learn what is asked."""

    scores: dict[Scored, tuple[float, bool]] = field(default_factory=dict)
    """Log-probability in nats, and whether each token is the likeliest."""
    texts: dict[Written, str] = field(default_factory=dict)
