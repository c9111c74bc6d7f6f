"""Parameters without weight decay, by name, around any optimizer.

What decays among the others is the optimizer's own rule: parameters of two or more dimensions.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.optim.base import Named, Optimizer, State
from tpu_experiments.optim.group_rates import update_in_groups
from tpu_experiments.runtime.stacked import hugging_face_names


class DecayGroups:
    """An optimizer, and a second one without weight decay for the parameters that match a pattern."""

    def __init__(self, optimizer: Optimizer, without_decay: Optimizer, *, patterns: Sequence[str]) -> None:
        self.optimizer, self.without_decay, self.patterns = optimizer, without_decay, patterns

    def init(self, parameters: Named) -> State:
        return self.optimizer.init(parameters)

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        groups = [
            (optimizer, [name for name in parameters if is_matched(name, self.patterns) == is_without], lr)
            for is_without, optimizer in ((False, self.optimizer), (True, self.without_decay))
        ]
        return update_in_groups(parameters, grads, state, groups=groups)


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches the parameter's Hugging Face name; of a stack, the name in every layer."""
    return all(any(fnmatchcase(part, pattern) for pattern in patterns) for part in hugging_face_names(name))


def require_decay_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Require every pattern of `optim.no_decay` to match a trainable parameter, in all layers or in none.

    Equal layers may be folded into a stack, which decays as a whole.

    Args:
        names: Hugging Face's names of the trainable parameters.

    Raises:
        ConfigError: one matches none, or some layers of several.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"optim.no_decay has {pattern!r}, which matches none of the {len(names)} trainable parameters, "
                f"{names[0]} and so on. {suggest(pattern, names)}"
            )
    for kind, members in _by_kind(names).items():
        matched = [name for name in members if is_matched(name, patterns)]
        if 0 < len(matched) < len(members):
            raise ConfigError(
                f"optim.no_decay=[{', '.join(patterns)}]; it matches {kind} in {len(matched)} of {len(members)} "
                "layers, and layers may be folded into one that decays as a whole; write * in the place of the layer."
            )


def _by_kind(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the names by their form with `*` in the place of numbers."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        found.setdefault(kind, []).append(name)
    return found
