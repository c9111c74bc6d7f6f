"""Loaded by every Python process of a rehearsal: it writes down the interpreted form of each kernel that is lowered.

The product's modules are imported as they are; one function is wrapped once its module is there."""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "tpu_experiments.runtime.kernels.splash"


def _recording(module: ModuleType) -> None:
    lowered = module.lowered

    def record(call: Any, *, direction: Any, target: Any) -> bytes:
        from tests.rehearsal import translation

        made: bytes = lowered(call, direction=direction, target=target)
        interpreted = lowered(call, direction=direction, target="interpreted")
        translation.record(made, interpreted, Path(os.environ["REHEARSAL_FOLDER"]))
        return made

    module.lowered = record  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _recording(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if os.environ.get("REHEARSAL_FOLDER"):
    import importlib.util

    sys.meta_path.insert(0, _Finder())
