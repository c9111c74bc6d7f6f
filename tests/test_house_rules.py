"""Names that say what a file holds, and a README whose paths exist."""

import re
import subprocess
from pathlib import Path

import pytest

from tpu_experiments.config.messages import FOOTER

REPOSITORY = Path(__file__).parents[1]
SOURCES = [REPOSITORY / "run.py", *sorted((REPOSITORY / "tpu_experiments").rglob("*.py"))]
SOURCES += sorted((REPOSITORY / "launch").rglob("*.py"))
SOURCES += sorted((REPOSITORY / "tests").rglob("*.py"))
TOP = {"LICENSE", "README.md", "conf", "launch", "outputs", "pyproject.toml", "run.py", "tests", "tpu_experiments"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def name_of(file: Path) -> str:
    return file.relative_to(REPOSITORY).as_posix()


def test_the_top_level_has_the_product_and_its_page_alone() -> None:
    """What is for contributors is in tests/README.md."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no checkout of git")
    tops = {path.split("/")[0] for path in listed.stdout.splitlines()}
    assert sorted(top for top in tops - TOP if not top.startswith(".")) == []


def test_no_file_or_folder_is_called_after_nothing() -> None:
    assert not [name_of(file) for file in SOURCES if {file.stem, file.parent.name} & FORBIDDEN_NAMES]


def paths_in(markdown: str) -> list[str]:
    """What looks like a path of the repository: in backticks, and either under a top-level name or one itself."""
    tops = {entry.name for entry in REPOSITORY.iterdir() if not entry.name.startswith(".") or entry.is_file()}
    quoted = re.findall(r"`([\w./{},*-]+)`", markdown)
    linked = re.findall(r"\]\(([\w./-]+)\)", markdown)
    candidates = [path.rstrip("/") for path in quoted + linked]
    return [path for path in candidates if path in tops or ("/" in path and path.split("/")[0] in tops)]


def spelled_out(path: str) -> list[str]:
    """`a/{b,c}.py` as its two paths."""
    group = re.search(r"\{([^}]*)\}", path)
    if not group:
        return [path]
    return [path.replace(group[0], option, 1) for option in group[1].split(",")]


def test_every_path_in_the_readme_exists() -> None:
    readme = REPOSITORY / "README.md"
    if not readme.exists():
        pytest.skip("README.md is not written yet")
    named = [path for shown in paths_in(readme.read_text(encoding="utf-8")) for path in spelled_out(shown)]
    produced = [path for path in named if not path.startswith("outputs/")]  # runs make those
    assert produced
    assert [path for path in produced if not any(REPOSITORY.glob(path))] == []


def test_every_path_in_the_help_exists() -> None:
    named = [path for shown in re.findall(r"tpu_experiments/[\w/.{},]+", FOOTER) for path in spelled_out(shown)]
    assert named
    assert [path for path in named if not (REPOSITORY / path).is_file()] == []


def test_the_reader_of_paths_finds_them() -> None:
    text = "See `tpu_experiments/config/{schema,nowhere}.py`, `run.py`, [conf](conf/hw) and `bf16/fp32`."
    assert paths_in(text) == ["tpu_experiments/config/{schema,nowhere}.py", "run.py", "conf/hw"]
    assert spelled_out("a/{b,c}.py") == ["a/b.py", "a/c.py"]
