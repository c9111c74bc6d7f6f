"""An import points down only, and torch_xla stays in the runtime; read from the source, so nothing is imported."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tpu_experiments"
LAYER_OF = {
    "config": 0,
    "runtime": 1,
    "storage": 1,
    "quantisation": 1,
    "pages": 1,
    "data": 2,
    "models": 2,
    "optim": 2,
    "objectives": 3,
    "rewards": 3,
    "metrics": 2,
    "loggers": 3,
    "callbacks": 3,
    "export": 3,
    "checkpoint": 4,
    "training": 5,
    "planning": 5,
    "tasks": 6,
    "sweeping": 6,
    "command_line.py": 7,
    "__main__.py": 8,
}
ROOMS = ("parts", "adapters", "stack", "passes", "families", "sources")
"""Rooms of models/, lowest first; its two files on top belong to the last, and stay there since configs name them."""
NAMES_TORCH_XLA = ("runtime/xla/", "runtime/kernels/on_xla.py", "runtime/processes/launch.py")
FRAMEWORKS = {"torch", "torch_xla", "transformers", "datasets", "numpy", "jax", "tokenizers", "safetensors", "pyarrow"}
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import of a file, anywhere in it."""
    return [
        node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imported(file: Path) -> set[str]:
    """Every module a file imports, anywhere in it, dotted."""
    names: set[str] = set()
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{file}: a relative import hides its layer"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_of(names: set[str]) -> set[str]:
    """Folders of the package that dotted names lie in."""
    ours = (name.split(".") for name in names if name.startswith("tpu_experiments."))
    return {parts[1] for parts in ours if parts[1] in LAYER_OF}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def test_imports_point_down() -> None:
    wrong = []
    for file in SOURCES:
        own, found = file.relative_to(PACKAGE).parts[0], parts_of(imported(file))
        if own not in LAYER_OF:  # a sample, or the package's own file
            wrong += [f"{name_of(file)} imports {part}, as only layers may" for part in found]
            continue
        sideways_or_up = {part for part in found - {own} if LAYER_OF[part] >= LAYER_OF[own]}
        wrong += [f"{name_of(file)} (layer {LAYER_OF[own]}) imports {part}" for part in sideways_or_up]
    assert wrong == []


def test_an_objective_is_named_in_its_own_files_alone() -> None:
    """Everything else asks `Objective` (objectives/base.py) or the settings' base class."""
    shared = {"base", "vocabulary", "OBJECTIVES", "TARGETS", "EVALUATED", "FIRST"}
    wrong = []
    for file in SOURCES:
        name = name_of(file)
        if name.startswith(("objectives/", "config/objectives/")):
            continue
        parts = (module.split(".") for module in imported(file))
        wrong += [f"{name} imports {'.'.join(p)}" for p in parts if "objectives" in p[1:-1] and not shared & {*p}]
        asked = re.findall(r"isinstance\(\s*[\w.]*objective\b|getattr\(locate\(", file.read_text(encoding="utf-8"))
        wrong += [f"{name} asks {text}" for text in asked]
    assert wrong == []


def test_every_folder_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - set(LAYER_OF) == {"samples"}


@cache
def modules_imported() -> dict[str, set[str]]:
    """Of every module of the package, those that it imports when it runs: TYPE_CHECKING blocks do not count."""
    modules = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in SOURCES
    }
    found: dict[str, set[str]] = {}
    for name, file in modules.items():
        tree = ast.parse(file.read_text("utf-8"))
        checks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        for_types = {ast.unparse(node) for check in checks for node in check.body}
        names: set[str] = set()
        for node in imports_of(file):
            if ast.unparse(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            else:  # of a package, a module in it, or a name of its own file
                full = (f"{node.module}.{alias.name}" for alias in node.names)
                names |= {each if each in modules else node.module or "" for each in full}
        found[name] = names & modules.keys() - {name}
    return found


def circles(imports: dict[str, set[str]]) -> list[str]:
    """A circle of imports for every module that one begins with, as `a -> b -> a`."""
    done: set[str] = set()
    found = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(imports[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(imports):
        visit(module, [])
    return found


def test_no_modules_import_each_other() -> None:
    """Imports inside functions count too: a reader who follows them would come back to where he began."""
    imports = modules_imported()
    assert sum(map(len, imports.values())) > 1000
    assert circles(imports) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b -> c -> b"]


def test_rooms_of_models_import_down() -> None:
    models = PACKAGE / "models"
    assert {path.name for path in models.iterdir() if path.is_dir() and any(path.glob("*.py"))} == set(ROOMS)

    def room_of(module: str) -> int:
        room = module.split(".")[2]
        return ROOMS.index(room) if room in ROOMS else len(ROOMS) - 1

    own = {name: others for name, others in modules_imported().items() if name.startswith("tpu_experiments.models.")}
    arrows = [(name, other) for name, others in own.items() for other in others & own.keys()]
    assert [f"{name} imports {other}" for name, other in arrows if room_of(other) > room_of(name)] == []


def test_only_the_runtime_names_torch_xla() -> None:
    named = {name_of(file) for file in SOURCES if any(n.split(".")[0] == "torch_xla" for n in imported(file))}
    assert "runtime/xla/device.py" in named
    assert [name for name in named if not name.startswith(NAMES_TORCH_XLA)] == []


def test_the_launcher_takes_nothing_of_torch_xla_but_launch() -> None:
    tree = ast.parse((PACKAGE / "runtime" / "processes" / "launch.py").read_text(encoding="utf-8"))
    accesses = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    used = {node.attr for node in accesses if isinstance(node.value, ast.Name) and node.value.id == "torch_xla"}
    assert used <= {"launch"}
    assert imported(PACKAGE / "runtime" / "processes" / "launch.py").isdisjoint({"torch_xla.core", "torch_xla.runtime"})


def test_the_config_names_no_framework() -> None:
    files = sorted((PACKAGE / "config").rglob("*.py"))
    assert files
    assert [name_of(f) for f in files if {name.split(".")[0] for name in imported(f)} & FRAMEWORKS] == []


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(
        "import torch_xla.runtime as xr\nfrom tpu_experiments.tasks import train\n"
        "def later():\n    from tpu_experiments import models\n"
    )
    assert parts_of(imported(file)) == {"tasks", "models"}
    assert "torch_xla.runtime" in imported(file)
