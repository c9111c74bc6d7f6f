"""Answers to the requests of lm-evaluation-harness, by the tokens of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_experiments.config.errors import ConfigError

MOST_NEW = 256
"""Tokens of an answer where a task does not say, as in the harness's `hf` backend."""

Scored = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a context and of what is to be scored behind it."""
Written = tuple[tuple[int, ...], int, tuple[str, ...]]
"""Tokens of a prompt, most tokens of an answer, and texts that end it."""


@dataclass
class Answers:
    """What a model answers to the requests; empty to learn what is asked."""

    is_whole: bool = False
    """Whether nothing else may be asked."""

    scores: dict[Scored, tuple[float, bool]] = field(default_factory=dict)
    """Log-probability in nats, and whether each token is the likeliest."""
    texts: dict[Written, str] = field(default_factory=dict)
    num_cut: int = 0
    """Contexts and prompts that have lost their start."""

    def score(self, key: Scored) -> tuple[float, bool]:
        """Return the score of a request; a new one is noted, with none."""
        self._require_known(key, self.scores)
        return self.scores.setdefault(key, (0.0, False))

    def text(self, key: Written) -> str:
        """Return the answer to a request; a new one is noted, with an empty one."""
        self._require_known(key, self.texts)
        return self.texts.setdefault(key, "")

    def _require_known(self, key: Any, known: Mapping[Any, Any]) -> None:
        if self.is_whole and key not in known:
            raise ConfigError(
                "task.harness; a task asks something else each time that it is read, and what it asks is read twice; "
                "leave it out."
            )
