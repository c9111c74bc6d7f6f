"""The table of dependencies: every line of pyproject.toml has one with its pin; the licences of the lock are told."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*)?")


def named():
    """Every pin of pyproject.toml by the package's name."""
    found: dict[str, set[str]] = {}
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for line in group:
            name, pin = REQUIREMENT.fullmatch(line).groups()
            if name != PROJECT["name"]:
                found.setdefault(name, set()).add(pin)
    return found


def told():
    """The pins of the manual by the package's name."""
    text = (REPOSITORY / "launch/README.md").read_text("utf-8")
    section = text.partition("## Dependencies\n")[2].partition("\nWritten here")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    assert all(len(row) == 5 and all(row) for row in rows), "a cell is empty"
    return {row[0]: set(re.findall(r"`([^`]+)`", row[1])) for row in rows[1:]}


def test_every_dependency_has_its_line():
    assert told() == named()


def test_every_package_of_the_lock_has_a_licence_or_is_named_as_missing():
    """The command of the manual; what is installed here is of the lock, or of a newer one."""
    done = subprocess.run(
        [sys.executable, "launch/licences.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    listed, _, summary = done.stdout.partition("\n\n")
    lock = (REPOSITORY / "launch/requirements.lock").read_text("utf-8")
    locked = {name.lower() for name in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==", lock, re.MULTILINE)}
    shown = {line.partition("==")[0].lower() for line in listed.splitlines()}
    missing = set(re.search(r"not installed here: (.*)", summary)[1].lower().split(", ")) - {"-"}
    assert shown | missing == locked
    assert {"torch", "transformers", "numpy"} <= shown
    assert "numpy" not in missing
