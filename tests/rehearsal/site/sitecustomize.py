"""Loaded by every Python process of a rehearsal; the product's modules are imported as they are, and then watched.

The interpreted form of each attention kernel that is lowered is written down for translation.py, and so is the name of
each private function of torch_xla that is called."""

import functools
import importlib.abc
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("REHEARSAL_FOLDER", ""))
PRODUCT = Path(__file__).parents[3] / "tpu_experiments"
PRIVATE = re.compile(r"_XLAC\.((?:lowering\.|profiler\.)?\w+)")
"""A private name of torch_xla, as the product writes it."""


def private_names() -> dict[str, list[str]]:
    """Return the private names of torch_xla that the product uses, with the files that do."""
    found: dict[str, list[str]] = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        for name in sorted(set(PRIVATE.findall(path.read_text(encoding="utf-8")))):
            found.setdefault(name, []).append(str(path.relative_to(PRODUCT)))
    return found


def _record_kernels(module: ModuleType) -> None:
    lowered = module.lowered

    def record(call: Any, *, direction: Any, target: Any) -> bytes:
        from tests.rehearsal import translation

        made: bytes = lowered(call, direction=direction, target=target)
        translation.record(made, lowered(call, direction=direction, target="interpreted"), FOLDER)
        return made

    module.lowered = record  # type: ignore[attr-defined]


def _record_names(module: ModuleType) -> None:
    private, called = module._XLAC, set[str]()

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            if name not in called:
                called.add(name)
                with (FOLDER / f"{os.getpid()}.names").open("a") as file:
                    file.write(f"{name}\n")
            return function(*given, **named)

        return call

    for name in private_names():
        *above, leaf = name.split(".")
        owner = functools.reduce(getattr, above, private)
        found = getattr(owner, leaf)
        if not isinstance(found, type):
            setattr(owner, leaf, recording(name, found))


WATCHED = {"tpu_experiments.runtime.kernels.splash": _record_kernels, "torch_xla": _record_names}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        watch = WATCHED.pop(name, None)
        if watch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


if "REHEARSAL_FOLDER" in os.environ:
    sys.meta_path.insert(0, _Finder())
