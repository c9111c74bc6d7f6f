"""Which points of a sweep train in one program (training/pack.py), and what separates the others."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tpu_experiments.config.identity import flatten
from tpu_experiments.config.schema import ClassifyConfig, Config
from tpu_experiments.sweeping.points import Point

OF_EACH = ("lora.r", "lora.alpha", "lora.dropout", "lora.scaling", "lora.init", "optim.", "schedule.", "seed", "name")
"""Keys, or beginnings of keys, in which points of one pack may differ."""
DRAWN_BY_SHAPE = ("b_zero", "a_zero")
"""Values of `lora.init` for which the base stays as it is, and adapters do not depend on its weights."""


def why_alone(config: Config) -> str | None:
    """Return why a point shares its program with no other; None where it can."""
    lora, hw = config.lora, config.hw
    if config.task.name != "train":
        return f"task={config.task.name} trains nothing"
    if lora.r == 0:
        return "lora.r=0 trains all weights"
    if lora.dora:
        return "lora.dora=true needs the base's weights for each adapter"
    if lora.init not in DRAWN_BY_SHAPE:
        return f"lora.init={lora.init} depends on the base's weights"
    if config.model.linear != "plain":
        return f"model.linear={config.model.linear} trains more than adapters"
    if isinstance(config.objective, ClassifyConfig):
        return "objective=classify trains a head beside the adapter"
    if hw.parallel == "spawn" or hw.num_hosts > 1:
        return f"hw.parallel={hw.parallel} on {hw.num_hosts} hosts trains in several processes"
    return None


def packs_of(points: Sequence[Point], *, largest: int) -> list[list[Point]]:
    """Return the points by the process that trains them, in the order of the first of each.

    Args:
        largest: points of one process, at most.
    """
    groups: dict[Any, list[Point]] = {}
    for number, point in enumerate(points):
        alone = largest == 1 or why_alone(point.config) is not None
        groups.setdefault(number if alone else tuple(sorted(_common(point.config).items())), []).append(point)
    return [group[start : start + largest] for group in groups.values() for start in range(0, len(group), largest)]


def packs_text(packs: Sequence[Sequence[Point]]) -> Iterator[str]:
    """Describe the packs in a sentence, and one for each reason for which points are not together."""
    sizes = Counter(len(pack) for pack in packs)
    counts = ", ".join(
        f"{count} pack{'s' * (count > 1)} of {size} points" if size > 1 else f"{count} alone"
        for size, count in sorted(sizes.items(), reverse=True)
    )
    yield f"sweeping.pack: {counts}"
    reasons = {why_alone(pack[0].config) for pack in packs if len(pack) == 1}
    yield from (f"sweeping.pack: a point trains alone, since {reason}" for reason in sorted(filter(None, reasons)))
    common = [_common(pack[0].config) for pack in packs if why_alone(pack[0].config) is None]
    keys = [key for key in dict.fromkeys(key for each in common for key in each) if _differs(key, common)]
    if keys:
        yield f"sweeping.pack: points of different packs differ in {', '.join(keys)}"


def _differs(key: str, values: Sequence[dict[str, str]]) -> bool:
    return len({each.get(key) for each in values}) > 1


def _common(config: Config) -> dict[str, str]:
    """Return the settings that all points of a pack have in common, as text."""
    found = {key: str(value) for key, value in flatten(config).items() if not key.startswith(OF_EACH)}
    if config.model.init == "random" or config.model.size == "tiny":
        found["seed"] = str(config.seed)  # it draws the base
    return found
