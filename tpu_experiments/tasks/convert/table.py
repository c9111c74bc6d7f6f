"""Keys of another program's config: what each is here, and the draft of an experiment that they give.

A key has an equal here, or has no effect on what is learnt (speed, places, logs), or changes what is learnt and has no
equal. The manual's tables (README.md) are made from the same objects.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu_experiments.config.errors import nearest

Kind = Literal["equal", "idle", "missing"]


@dataclass(frozen=True)
class Key:
    """What becomes of one key."""

    kind: Kind
    ours: str = ""
    """Keys here, of a key that has an equal."""
    why: str = ""
    """What differs, or the reason why there is no equal or why none is needed."""
    neutral: tuple[Any, ...] = (None, False)
    """Values that change nothing, of a key without an equal."""


def equal(ours: str, why: str = "") -> Key:
    """Return a key with an equal here."""
    return Key("equal", ours, why)


def idle(why: str) -> Key:
    """Return a key that changes speed, places or logs, and not what is learnt."""
    return Key("idle", why=why)


def missing(why: str, *neutral: Any) -> Key:
    """Return a key that changes what is learnt and has no equal, unless it has one of the neutral values."""
    return Key("missing", why=why, neutral=(None, False, *neutral))


@dataclass(frozen=True)
class Tool:
    """Another program: its keys, the values that it takes for keys that are not given, and their conversion."""

    name: str
    keys: Mapping[str, Key]
    defaults: Mapping[str, Any]
    convert: Callable[["Draft"], None]


@dataclass
class Draft:
    """An experiment in the making, and what became of every key."""

    tool: Tool
    given: dict[str, Any]
    """Values of the other program's config, those that are null left out."""
    nulls: frozenset[str] = frozenset()
    """Keys that are null there."""
    trainer: str = ""
    """Command of a program that has several (`sft`, `dpo`, ...)."""
    devices: int = 1
    """Devices of the other program's run."""
    row_format: str | None = None
    """Format of the rows where the other config does not say it (`task.format`)."""
    dataset_info: Mapping[str, Any] | None = None
    """Descriptions of LLaMA-Factory's data sets by name."""
    folder: str = ""
    """Folder of the other config, from which its paths are also looked for."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """The other command's own values of keys that are not given, before those of the program."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Choices of config groups."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values by their dotted keys here."""
    became: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key there, the keys here with their values."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Keys whose equal differs in something, with what that is."""
    problems: dict[str, str] = field(default_factory=dict)
    """Keys that would train something else, with the reason."""
    template: str | None = None
    """Chat template to be written beside the experiment."""
    read: set[str] = field(default_factory=set)

    def value(self, key: str) -> Any:
        """Return what a key with an equal here has, or the other program's default; None where it has none."""
        assert self.tool.keys[key].kind == "equal", key
        self.read.add(key)
        return self.given.get(key, self.default(key))

    def default(self, key: str) -> Any:
        """Return the other program's own value of a key; None where it has none."""
        return self.defaults.get(key, self.tool.defaults.get(key))

    def flag(self, key: str) -> bool:
        """Return whether a key is on; what is neither on nor off is refused."""
        value = self.value(key)
        found = as_truth(value)
        if value is not None and found is None:
            self.refuse(key, "it is neither true nor false")
        return found is True

    def number(self, key: str) -> float | None:
        """Return a key's number; None of one that is not given, and of what is no number, which is refused."""
        value = self.value(key)
        found = as_number(value)
        if value is not None and found is None:
            self.refuse(key, "it is no number")
        return found

    def listed(self, key: str) -> list[Any]:
        """Return a key's list, of a single text or mapping a list of that; what is neither is refused."""
        value = self.value(key)
        if isinstance(value, list):
            return value
        if isinstance(value, str | Mapping):
            return [value]
        if value is not None:
            self.refuse(key, "it is no list")
        return []

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return a key's mapping; what is none is refused."""
        value = self.value(key)
        if isinstance(value, Mapping):
            return value
        if value is not None:
            self.refuse(key, "it is no mapping")
        return {}

    def is_given(self, key: str) -> bool:
        """Return whether the other config has the key."""
        return key in self.given

    def set(self, key: str, value: Any, *, of: str | Iterable[str]) -> None:
        """Set a key here, because of keys there."""
        self.settings[key] = value
        self._because(key, value, of=of)

    def choose(self, group: str, choice: Any, *, of: str | Iterable[str]) -> None:
        """Choose a file of a group here, because of keys there."""
        self.groups[group] = choice
        self._because(group, choice, of=of)

    def _because(self, key: str, value: Any, *, of: str | Iterable[str]) -> None:
        for each in (of,) if isinstance(of, str) else of:
            self.became.setdefault(each, {})[key] = value

    def note(self, key: str, text: str) -> None:
        """Say what differs in the equal of a key."""
        if (key, text) not in self.notes:
            self.notes.append((key, text))

    def refuse(self, key: str, why: str) -> None:
        """Say why a key's value would train something else; the first reason stays."""
        self.problems.setdefault(key, why)

    def refuse_without_equal(self) -> None:
        """Refuse given keys that have no equal, and those that nobody knows."""
        for key, why in without_equal(self.given, self.tool.keys, tool=self.tool.name):
            self.refuse(key, why)

    def refuse_nulls(self) -> None:
        """Refuse keys that are null, of a program that passes null on in the place of its own value."""
        for key in self.nulls:
            if self.default(key) is not None:
                self.refuse(
                    key, f"null is passed on there, in the place of {self.default(key)}; write a value, or leave it out"
                )


def without_equal(given: Mapping[str, Any], keys: Mapping[str, Key], *, tool: str) -> Iterator[tuple[str, str]]:
    """Yield keys that have no equal or that nobody knows, with the reason; those that are null or off are neither."""
    for key, value in given.items():
        known = keys.get(key)
        if value is None:
            continue
        if known is None:
            near = nearest(str(key), list(keys))
            hint = f"did you mean {near}?" if near else "nothing is known of it here"
            yield key, f"{tool} has no such key as far as is known here; {hint}"
        elif known.kind == "missing" and not is_neutral(value, known.neutral):
            yield key, known.why


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Return whether a value is one of these, of the same type but for numbers, which may be texts; what is empty is.

    >>> is_neutral(0, (None, False)), is_neutral(0.0, (0,)), is_neutral("1.0", (1,)), is_neutral([], ())
    (False, True, True, True)
    """
    if isinstance(value, list | dict | str) and not value:
        return True
    if isinstance(value, str) and (number := as_number(value)) is not None:
        value = number
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


ON, OFF = ("true", "1", "yes", "y", "t", "on", "auto", "full"), ("false", "0", "no", "n", "f", "off")


def as_truth(value: Any) -> bool | None:
    """Return a truth value of YAML or a command line, also of a text or of 1 and 0; `auto` is true; None of others.

    >>> as_truth("Yes"), as_truth(0), as_truth("auto"), as_truth(2)
    (True, False, True, None)
    """
    said = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    return True if said in ON else False if said in OFF else None


def as_number(value: Any) -> float | None:
    """Return a number of YAML or a command line, also of a text (`2e-5` in YAML 1.1); None of others, NaN too."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
