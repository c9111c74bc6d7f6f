"""Programs that a plan compiled without a TPU, for the run that loads them instead of compiling.

FOLDER/planned/<key>/facts.json    what the program depends on; the key is their hash
                     executable    what the compiler gave, serialised

jax's own cache cannot hold them: its keys contain the kind of client, which for a compiler without a TPU is another.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
PLANNED, FACTS, EXECUTABLE = "planned", "facts.json", "executable"
PACKAGES = ("libtpu", "jax", "jaxlib")
Facts = dict[str, Any]


def facts_of(
    text: str | bytes,
    *,
    aliases: Mapping[int, int],
    shardings: Sequence[str] | None,
    replicas: int,
    devices: Sequence[Any],
) -> Facts:
    """Return all that a compiled program depends on, by JSON's types.

    Args:
        text: StableHLO.
        aliases, shardings: as of `annotated` (runtime/stablehlo.py).
        devices: jax's, of a TPU or of its topology.
    """
    written = text if isinstance(text, bytes) else text.encode()
    return {
        "program": hashlib.sha256(written).hexdigest(),
        "aliases": sorted([argument, result] for argument, result in aliases.items()),
        "shardings": None if shardings is None else list(shardings),
        "replicas": replicas,
        "devices": [
            [d.device_kind, d.id, list(getattr(d, "coords", None) or []), getattr(d, "core_on_chip", None)]
            for d in devices
        ],
        "flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def key_of(facts: Facts) -> str:
    """Return the first 32 hex digits of the SHA-256 of facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def write(place: Path, *, facts: Facts, executable: bytes) -> None:
    """Write a program into a folder."""
    (place / EXECUTABLE).write_bytes(executable)
    sha256 = hashlib.sha256(executable).hexdigest()
    (place / FACTS).write_text(json.dumps({"facts": facts, "sha256": sha256}))


def keep(place: Path, *, folder: Path) -> Path | None:
    """Copy a program that `write` wrote into FOLDER/planned; return where it is, None where nothing was written."""
    known = _written(place)
    if known is None:
        return None
    to = folder / PLANNED / key_of(known["facts"])
    if not to.exists():
        unfinished = to.with_name(f"{to.name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name in (EXECUTABLE, FACTS):
            shutil.copyfile(place / name, unfinished / name)
        unfinished.replace(to)
    return to


def read(folder: Path, facts: Facts) -> bytes | None:
    """Return the serialised program of these facts; None where it was not planned, or its files are damaged.

    Where the same program was planned for another machine, a warning says for which.
    """
    place = folder / PLANNED / key_of(facts)
    if not place.exists():
        _explain(folder / PLANNED, facts)
        return None
    known = _written(place)
    executable = (place / EXECUTABLE).read_bytes() if known is not None else b""
    if known is None or hashlib.sha256(executable).hexdigest() != known.get("sha256"):
        log.warning("%s is damaged, and its program is compiled; remove the folder and plan again", place)
        return None
    return executable


def _written(place: Path) -> dict[str, Any] | None:
    """Return what stands in facts.json; None where the files are not both there, or cannot be read."""
    try:
        known: dict[str, Any] = json.loads((place / FACTS).read_text())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and "facts" in known and (place / EXECUTABLE).exists() else None


def _explain(folder: Path, facts: Facts) -> None:
    places = [place for place in sorted(folder.glob("*")) if "." not in place.name]
    for known in filter(None, map(_written, places)):
        other = known["facts"]
        if other.get("program") == facts["program"]:
            apart = "; ".join(
                f"{name}: {other.get(name)}, here {v}" for name, v in facts.items() if other.get(name) != v
            )
            log.warning("a program is compiled that was planned for another machine: %s", apart)
            return
    if places:
        log.info("a program is compiled: none of the %d in %s is this one", len(places), folder)
