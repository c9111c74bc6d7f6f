"""Facts of every trained parameter: factors of its learning rate, whether it decays, and what it is clipped with.

One table by name, made once from config and names; `updates.py` hands it to any optimizer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.schema import OptimConfig
from tpu_experiments.optim.base import Named, ParameterGroup, own_ndim
from tpu_experiments.runtime.stacked import ADAPTER_PARTS, LEARNT_SCALE, MAGNITUDE, hugging_face_names


@dataclass(frozen=True)
class Facts:
    """How one parameter is updated."""

    factors: tuple[float, ...]
    """Of the learning rate, multiplied one after another; weight decay is per unit of the product."""
    decays: bool
    group: int
    """Number of the group that it is clipped with."""
    clip_norm: float | None
    """Largest norm of the gradient of that group; None does not clip."""


def facts_of(settings: OptimConfig, parameters: Named, *, groups: Sequence[ParameterGroup] = ()) -> dict[str, Facts]:
    """Return the facts of every parameter, by name.

    B of an adapter and DoRA's lengths of rows have the ratio of LoRA+ (arXiv 2402.12354), as in PEFT's
    `create_loraplus_optimizer`, but for an embedding's adapter, whose rate is 1e-6 there and the plain one here.
    Trained scales of rounded weights have their own (LR-QAT, arXiv 2406.06385). They do not decay, nor do vectors and
    what `no_decay` matches.

    Args:
        groups: of an objective, with all parameters together; without any, all are clipped by `clip_norm`.
    """
    ratios = {LEARNT_SCALE: settings.scale_lr_ratio} | dict.fromkeys((ADAPTER_PARTS[1], MAGNITUDE), settings.b_lr_ratio)
    found = {}
    for number, group in enumerate(groups or [ParameterGroup(tuple(parameters), settings.clip_norm)]):
        for name in group.names:
            part = name.rpartition(".")[2]
            factors = tuple(factor for factor in (group.rate, ratios.get(part, 1.0)) if factor != 1)
            is_matrix = own_ndim(name, parameters[name]) > 1
            decays = is_matrix and part != LEARNT_SCALE and not is_matched(name, settings.no_decay)
            found[name] = Facts(factors, decays, number, group.clip_norm)
    return found


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches the parameter's Hugging Face name; of a stack, the name in every layer."""
    return all(any(fnmatchcase(part, pattern) for pattern in patterns) for part in hugging_face_names(name))


def require_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Require every pattern of a key of `optim` to match a trainable parameter, in all layers or in none.

    Equal layers may be folded into a stack, which is updated as a whole.

    Args:
        key: `no_decay` or `adamw`.
        names: Hugging Face's names of the trainable parameters.

    Raises:
        ConfigError: one matches none, or some layers of several.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"optim.{key} has {pattern!r}, which matches none of the {len(names)} trainable parameters, "
                f"{names[0]} and so on. {suggest(pattern, names)}"
            )
    for kind, members in _by_kind(names).items():
        matched = [name for name in members if is_matched(name, patterns)]
        if 0 < len(matched) < len(members):
            raise ConfigError(
                f"optim.{key}=[{', '.join(patterns)}]; it matches {kind} in {len(matched)} of {len(members)} "
                "layers, and layers may be folded into one that is updated as a whole; write * for the layer."
            )


def _by_kind(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the names by their form with `*` in the place of numbers."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        found.setdefault(kind, []).append(name)
    return found
