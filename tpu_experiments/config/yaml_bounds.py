"""Size limits of untrusted YAML, checked before it is constructed.

Ten nested lists of ten aliases each are 400 bytes of text and ten thousand million nodes. The check counts libyaml's
events, including the nodes that each alias refers to, without expanding them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import read_regular

MAX_BYTES = 2**19
MAX_NODES = 10_000
"""Limit of keys, values, lists and mappings, which PyYAML reads in a second; a config of this project has some
1,000."""
MAX_DEPTH = 40
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
MAX_DIGITS = 4_000
"""Limit of the characters of a number: PyYAML's time for base-60 numbers (`1:00:00`) grows with their square."""
OF_VALUES = (ValueError, KeyError, IndexError, AttributeError)
"""Errors, besides its own, that PyYAML raises for values it cannot construct: the 31st of February, `!!timestamp x`."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class _Open:
    """A list or mapping that has not been closed yet."""

    anchor: str | None
    nodes: int = 1
    height: int = 1


def require_bounded(text: str, *, place: str) -> None:
    """Check size, depth and the number of nodes with all aliases expanded; syntax errors are let through.

    Raises:
        ConfigError: one exceeds the limits, or an alias is inside the node it refers to.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise _refusal(place, f"it has {size:,} bytes, and more than {MAX_BYTES:,} are not read")
    try:
        _count(yaml.parse(text, Loader=LOADER), place=place)
    except yaml.YAMLError as error:
        if "maximum nesting depth" in str(error):  # libyaml 0.2.6 reads ahead and refuses 1,000 levels by itself
            raise _refusal(place, TOO_DEEP) from error
        return  # the reader reports the error


def require_bounded_folder(folder: Path) -> None:
    """Check every YAML file below a folder, linked folders included, as Hydra reads them.

    Raises:
        ConfigError: one of them is too large (`require_bounded`), or a device, named pipe or socket.
    """
    for file in sorted(_yaml_files(folder)):
        try:
            require_bounded(read_regular(file).decode(), place=str(file))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}; it is not UTF-8 ({error.reason}); write it as text.") from error
        except (FileNotFoundError, IsADirectoryError):  # a dangling link, or a folder of that name: left to Hydra
            continue


def _yaml_files(folder: Path) -> Iterator[Path]:
    """Yield the YAML files below a folder; one that links lead back to is read once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place) / name for name in names if name.endswith(".yaml"))


def _count(events: Iterator[Any], *, place: str) -> None:
    known: dict[str, tuple[int, int]] = {}
    levels: list[_Open] = [_Open(None)]

    def add(nodes: int, height: int) -> None:
        level = levels[-1]
        level.nodes, level.height = level.nodes + nodes, max(level.height, height + 1)
        if sum(each.nodes for each in levels) > MAX_NODES:
            raise _refusal(place, f"written out it has more than {MAX_NODES:,} keys and values (aliases counted)")
        if len(levels) + height > MAX_DEPTH + 1:
            raise _refusal(place, TOO_DEEP)

    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if any(level.anchor == event.anchor for level in levels):
                raise _refusal(place, f"the alias *{event.anchor} is inside the node that it names")
            add(*known.get(event.anchor, (1, 1)))
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor:
                known[event.anchor] = (1, 1)
            if event.implicit[0] and len(event.value) > MAX_DIGITS and event.value[0] in "+-.0123456789":
                raise _refusal(place, f"it has a number of {len(event.value):,} characters")
            add(1, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            levels.append(_Open(event.anchor))
            add(0, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = levels.pop()
            if closed.anchor:
                known[closed.anchor] = (closed.nodes, closed.height)
            add(closed.nodes, closed.height)


def _refusal(place: str, what: str) -> ConfigError:
    return ConfigError(f"{place}; {what}; no config of this program does: find out who wrote it.")
