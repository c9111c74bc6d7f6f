"""Names that docstrings, comments and manuals say: arguments, files, keys of the config, choices and commands exist."""

import ast
import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from tests.benchmarks.mutations import DEFECTS
from tests.test_house_rules import SOURCES, spelled_out
from tests.test_layers import LAYER_OF
from tests.test_manuals import MANUALS, REPOSITORY, name_of
from tpu_experiments.config.schema import Config, register

KEPT = [file for file in MANUALS if file.name != "LOG.md"]
"""Manuals that are kept true; code that the log names may be gone."""
CITING = [*(file for file in SOURCES if "tests" not in file.relative_to(REPOSITORY).parts)]
CITING += sorted((REPOSITORY / "conf").rglob("*.yaml"))
ARGUMENT = re.compile(r"\s*([\w`*, ]+?)(?: \([^)]*\))?:")
PATH = re.compile(r"(?<![\w/.:-])((?:tests|tpu_experiments|conf|launch|\.ci)/[\w./*{},-]*[\w*}])")
CITED = re.compile(r"(?<![\w/.{-])((?:tests|tpu_experiments|conf|launch)/[\w/]+\.(?:py|md|yaml|sh))\b")
ROOMS = re.compile(rf"(?<![\w/.{{-])((?:{'|'.join(sorted(LAYER_OF))})/[\w/]+\.py)\b")
"""A file by its room alone, as `models/stack/fold.py`."""
CODE = re.compile(r"`([^`\n]+)`")
KEY = re.compile(r"['\"]*[+~]*([a-z_]\w*(?:\.[\w<>]+)+)(?:=.*)?")
CHOICE = re.compile(r"['\"]*([a-z]+)=([a-z]\w*)['\"]*")
MODULE = re.compile(r"python -m ((?:tests|tpu_experiments)[\w.]*\w)")
OWN = {"conf/local/default.yaml", "conf/task/NAME.yaml", "tpu_experiments/tasks/NAME.py"}
"""Files of the reader's own."""
OWN_CHOICES = {"objective=per_row"}


def documented(docstring: str) -> Iterator[str]:
    """Yield the names of a docstring's `Args:`."""
    indent: int | None = None
    lines = iter(docstring.splitlines())
    for line in lines:
        if line.strip() == "Args:":
            break
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip() and indent is None:
            indent = depth
        if line.strip() and depth < (indent or 0):
            return
        if line.strip() and depth == indent:
            match = ARGUMENT.match(line)
            yield from [name.strip(" `*") for name in match[1].split(",")] if match else [line.strip()]


def taken(node: ast.AST) -> set[str]:
    """Return the names of a function's parameters; of a class those of `__init__`, `__call__` and its fields."""
    if isinstance(node, ast.ClassDef):
        fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
        names = {target.id for target in fields if isinstance(target, ast.Name)}
        calls = (each for each in node.body if getattr(each, "name", "") in ("__init__", "__call__"))
        return names.union(*map(taken, calls))
    return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}  # type: ignore[attr-defined]


def unknown_arguments(source: str) -> list[str]:
    """List functions and arguments that their docstrings name and their signatures lack."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    pairs = [(node, name) for node in nodes for name in documented(ast.get_docstring(node) or "")]
    return [f"{node.name}: {name}" for node, name in pairs if name not in taken(node)]


def family(cls: type) -> set[Any]:
    """Return a class and all that are derived from it."""
    return {cls}.union(*map(family, cls.__subclasses__()))


def kinds_of(hint: Any) -> set[Any]:
    """Return the types that a field may hold, with those that extend them in a file of conf/."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(kinds_of, typing.get_args(hint)))
    return family(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else {hint}


def below(kind: Any, name: str) -> set[Any]:
    """Return the types of a member of a type; none where it has no such member."""
    if kind in (Any, dict):
        return {Any}
    if typing.get_origin(kind) is dict:
        return kinds_of(typing.get_args(kind)[1])
    hints = hints_of(kind) if dataclasses.is_dataclass(kind) and isinstance(kind, type) else {}
    return kinds_of(hints[name]) if name in hints else set()


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return typing.get_type_hints(kind)


@cache
def registered(group: str) -> set[Any]:
    """Return the schemas that files of a group extend."""
    register()
    nodes = ConfigStore.instance().repo.get(group, {})
    return {OmegaConf.get_type(node.node) for node in nodes.values() if not isinstance(node, dict)} - {dict}


def is_key(dotted: str) -> bool:
    """Return whether the config has a key; any name will do where it is the reader's (data.NAME, stages.NAME)."""
    kinds: set[Any] = {Config}
    for depth, name in enumerate(dotted.split(".")):
        kinds = set().union(*(below(kind, name) for kind in kinds))
        if depth == 0:
            kinds |= registered(name)
    return bool(kinds)


def unknown_keys(markdown: str) -> list[str]:
    """List keys of the config, and choices of its groups, that are written as code and do not exist."""
    tops = {each.name for each in dataclasses.fields(Config)}
    words = {word for code in CODE.findall(markdown) for word in code.strip("'\"").split()}
    unknown = []
    for word in sorted(words - OWN_CHOICES):
        key, choice = KEY.fullmatch(word), CHOICE.fullmatch(word)
        is_ours = key and key[1].split(".")[0] in tops and key[1] != "tuned.yaml"
        if key and is_ours and not is_key(key[1]):
            unknown.append(word)
        folder = REPOSITORY / "conf" / choice[1] if choice else REPOSITORY
        if choice and folder.is_dir() and not (folder / f"{choice[2]}.yaml").is_file():
            unknown.append(word)
    return unknown


def strings_of(source: str) -> Iterator[str]:
    """Yield the strings of a file: docstrings, messages, keys."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def keys_in(text: str) -> Iterator[str]:
    """Yield what looks like a key of the config in a sentence."""
    tops = "|".join(each.name for each in dataclasses.fields(Config))
    for key in re.findall(rf"(?<![\w./<{{-])((?:{tops})(?:\.[a-z_]+)+)(?=[=\s`,;:)'\"]|$)", text):
        if not key.endswith((".py", ".json", ".yaml", ".safetensors", "_")):
            yield key


def missing_files(text: str, pattern: re.Pattern[str], *, beside: Path = REPOSITORY) -> list[str]:
    """List paths that a text names and that lead to no file, from the top or from its own folder."""
    named = [path for shown in pattern.findall(text) for path in spelled_out(shown.rstrip("."))]
    return sorted({path for path in named if path not in OWN and not any(is_there(path, beside))})


def is_there(path: str, beside: Path) -> Iterator[bool]:
    """Yield whether a path, which may have asterisks, leads to a file."""
    for folder in (REPOSITORY, beside, REPOSITORY / "tests", REPOSITORY / "tpu_experiments"):
        yield any(folder.glob(path))


def missing_modules(text: str) -> list[str]:
    """List modules that a text has Python run and that do not exist."""
    names = {name for name in MODULE.findall(text)}
    places = {name: REPOSITORY / name.replace(".", "/") for name in names}
    return sorted(n for n, at in places.items() if not (at.with_suffix(".py").is_file() or at.is_dir()))


def test_documented_arguments_are_those_of_the_signature() -> None:
    assert len(SOURCES) > 500
    wrong = [(name_of(file), name) for file in SOURCES for name in unknown_arguments(file.read_text(encoding="utf-8"))]
    assert wrong == []


def test_keys_and_choices_that_manuals_name_exist() -> None:
    assert len(KEPT) > 15
    wrong = [(name_of(file), word) for file in KEPT for word in unknown_keys(file.read_text(encoding="utf-8"))]
    assert wrong == []


def test_keys_that_messages_and_docstrings_of_the_package_name_exist() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in CITING if file.suffix == ".py"}
    named = {(name_of(file), key) for file in texts for string in strings_of(texts[file]) for key in keys_in(string)}
    assert len(named) > 500
    assert sorted((name, key) for name, key in named if not is_key(key)) == []


def test_files_and_modules_that_manuals_name_exist() -> None:
    wrong = []
    for file in KEPT:
        text = file.read_text(encoding="utf-8")
        missing = [*missing_files(text, PATH, beside=file.parent), *missing_modules(text)]
        missing += missing_files(text, ROOMS, beside=file.parent)
        wrong += [(name_of(file), path) for path in missing]
    assert wrong == []


def test_files_that_code_cites_exist() -> None:
    wrong = []
    for file in CITING:
        text = file.read_text(encoding="utf-8")
        wrong += [
            (name_of(file), path)
            for path in [*missing_files(text, CITED), *missing_files(text, ROOMS), *missing_modules(text)]
        ]
    assert wrong == []


def test_the_list_of_defects_names_those_of_the_script_and_tests_that_exist() -> None:
    listed = (REPOSITORY / "tests/benchmarks/defects.md").read_text(encoding="utf-8")
    assert [defect.what for defect in DEFECTS if f"| {defect.what} |" not in listed] == []
    found = re.findall(r"\| `([\w/]+\.py)::(\w+)", listed)
    assert len(found) == len(DEFECTS)
    texts = {path: (REPOSITORY / "tests" / path).read_text(encoding="utf-8") for path, _ in found}
    assert [f"{path}::{name}" for path, name in found if f"def {name}(" not in texts[path]] == []


@pytest.mark.parametrize(
    ("docstring", "unknown"),
    [
        ("Args:\n        x, y: numbers.\n            more of them: 2.\n        *rest: others.", []),
        ("Args:\n        then: was renamed.\n\n    Raises:\n        ValueError: never.", ["f: then"]),
    ],
)
def test_an_argument_that_is_gone_is_found(docstring: str, unknown: list[str]) -> None:
    source = f'def f(x, *rest, y=1):\n    """Do.\n\n    {docstring}\n    """\n'
    assert unknown_arguments(source) == unknown


def test_names_that_are_gone_are_found() -> None:
    text = "`lora.r=8 data.mine.path=/x` `curriculum.stages.a.steps` `lora.rank=8` `model=nobody` `objective.mask_rate`"
    assert unknown_keys(text) == ["lora.rank=8", "model=nobody"]
    said = list(keys_in("set lora.rank=8, or model.remat; see trainer.py and `data.mine.path`"))
    assert [(key, is_key(key)) for key in said] == [
        ("lora.rank", False),
        ("model.remat", True),
        ("data.mine.path", True),
    ]
    assert missing_files("tests/test_manuals.py, conf/{hw,no}/v6e8.yaml", PATH) == ["conf/no/v6e8.yaml"]
    assert missing_files("models/nowhere.py, transformers/models/x.py, models/stack/fold.py", ROOMS) == [
        "models/nowhere.py"
    ]
    assert missing_modules("python -m tests.nothing; python -m tests.images x") == ["tests.nothing"]
