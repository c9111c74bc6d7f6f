"""Environments with the packages of notebook services' images, made here, and the notebooks of launch/ run in them.

An image is a file of this folder: its Python and its packages, with their date and source.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


def requirements_of(name: str) -> tuple[str, list[str]]:
    """Return an image's Python, as `3.13`, and its packages as requirements."""
    lines = [line for line in (FOLDER / f"{name}.txt").read_text().splitlines() if line and not line.startswith("#")]
    python, *packages = lines
    assert python.startswith("python=="), "an image's first line names its Python"
    return python.removeprefix("python=="), packages


def python_of(version: str) -> str | None:
    """Return a Python of this machine; None where it has none of that version."""
    for found in _candidates(version):
        asked = subprocess.run([found, "-Ic", "import venv"], capture_output=True, check=False)
        if asked.returncode == 0:  # a shim of pyenv's can be there and fail
            return found
    return None


def _candidates(version: str) -> Iterator[str]:
    if found := shutil.which(f"python{version}"):
        yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, root.glob(f"versions/{version}.*/bin/python{version}"))


def make(name: str, folder: Path) -> None:
    """Make the environment of an image anew in a folder, with uv; its packages have exactly the listed versions.

    Raises:
        LookupError: this machine has no such Python.
    """
    version, packages = requirements_of(name)
    python = python_of(version)
    if python is None:
        raise LookupError(f"the image {name} has Python {version}, and this machine has none")
    subprocess.run(["uv", "venv", "--quiet", "--clear", "--seed", "--python", python, str(folder)], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    subprocess.run([*install, "--requirements", "-"], input="\n".join(packages), text=True, check=True)


def differences(name: str, folder: Path) -> dict[str, str | None]:
    """Return the installed versions that an image's list does not allow."""
    ask = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    answer = subprocess.run([folder / "bin" / "python", "-c", ask], capture_output=True, text=True, check=True).stdout
    found = {_plain(each): version for each, version in json.loads(answer).items()}
    wanted = [Requirement(line) for line in requirements_of(name)[1]]
    installed = {each.name: found.get(_plain(each.name)) for each in wanted}
    return {
        each.name: version
        for each in wanted
        if (version := installed[each.name]) is None or not each.specifier.contains(version, prereleases=True)
    }


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def environ(folder: Path, **extra: str) -> dict[str, str]:
    """Return the variables of a notebook in an environment: nothing of the environment that asks."""
    ours = ("TPU_", "PJRT_", "XLA_", "VIRTUAL_ENV", "PYTHON", "REPOSITORY", "OUTPUT", "MORE", "DATA", "BEFORE", "HOURS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {**kept, "PATH": f"{folder / 'bin'}:{kept['PATH']}", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", **extra}


def run_cells(notebook: Path, environment: Path, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a notebook's code cells by the Jupyter of an environment, in the notebook's folder; stops where one fails.

    Returns:
        For each cell that ran its `text` and `traceback`.
    """
    command = [str(environment / "bin" / "python"), str(FOLDER / "cells.py"), notebook.name]
    done = subprocess.run(command, cwd=notebook.parent, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found
