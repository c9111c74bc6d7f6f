"""Import of the objects that `_target_` keys name, only here; `checks.py` has checked their prefixes."""

import ast
import importlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError, failure_of, suggest


def locate(target: str, *, key: str) -> Any:
    """Import the object that `target` (package.module.Name) names; `key` is its config key.

    Raises:
        ConfigError: the module has no such name, or is the user's own and cannot be imported.
    """
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if target.startswith("tpu_experiments."):
            raise
        raise ConfigError(f"{key}._target_={target}; {failure_of(error)}") from error
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise ConfigError(f"{key}._target_={target}; {module_name} has no {name}. {suggest(name, public)}")
    return getattr(module, name)


def target_problems(target: str, *, key: str, setting: str = "_target_") -> list[str]:
    """Return what is wrong with `target`, without importing its module (its packages' `__init__` do run).

    Args:
        setting: name of the setting below `key`.
    """
    module_name, _, name = target.rpartition(".")
    if module_name == "__main__":
        return [
            f"{key}.{setting}={target}; other processes cannot import what a notebook or a script defines; put {name} "
            f"into a file beside it (in a notebook, %%writefile mine.py heads the cell) and write mine.{name}."
        ]
    try:
        spec = importlib.util.find_spec(module_name)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        return [f"{key}.{setting}={target}; there is no module {module_name}; write package.module.Name."]
    if spec.origin is None or not spec.origin.endswith(".py"):
        return []
    defined, imported = _names_of(Path(spec.origin).read_text(encoding="utf-8"))
    if name in defined or imported & {name, "*"} or "__getattr__" in defined:
        return []
    return [f"{key}.{setting}={target}; {module_name} has no {name}. {suggest(name, defined)}"]


@lru_cache(64)
def _names_of(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a module's source defines at top level, and those it imports there.

    Parsing took 17 of the 44 ms of a composition; a sweep checks the same few files for each of its points.
    """
    defined: set[str] = set()
    imported: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):  # names defined conditionally are assumed to exist
            imported.add("*")
    return defined, imported
