"""Install the project's missing dependencies into a notebook's Python; keep its torch and torch_xla.

    python launch/add_missing.py

Colab's TPU image has matching versions of torch, torch_xla and libtpu; an unpinned `pip install` of anything that
depends on torch may replace them, and then torch_xla is no longer importable. Here the installed versions are passed as
constraints to a single pip command. Needs the standard library and `packaging`, which every such image has.
"""

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
KEPT = ("torch", "torch_xla", "torchvision", "libtpu", "jax", "jaxlib", "numpy")
NEEDED = ("torch", "torch_xla")


def installed(name: str) -> str | None:
    """Return the installed version of a package, or None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def unfit(lines: list[str], versions: Mapping[str, str | None]) -> list[str]:
    """Return the requirements that are missing or not satisfied by the installed version."""
    wanted = [Requirement(line) for line in lines]
    return [
        str(each)
        for each in wanted
        if (version := versions[each.name]) is None or not each.specifier.contains(version, prereleases=True)
    ]


def main(pyproject: Path = PYPROJECT) -> int:
    """Install what is missing and return the exit code.

    0: complete; 1: pip failed or changed a package it had to keep; 2: the image's torch or torch_xla does not fit.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    backend = project["optional-dependencies"]["xla"]
    lines = [*backend, *(line for line in project["dependencies"] if Requirement(line).name not in NEEDED)]
    versions = {Requirement(line).name: installed(Requirement(line).name) for line in lines}
    others = unfit([line for line in lines if Requirement(line).name in NEEDED], versions)
    if others:
        print(f"this image lacks {', '.join(others)}; choose a TPU runtime, or use launch/local.sh, which has its own")
        return 2
    rest = [line for line in lines if Requirement(line).name not in KEPT]
    missing = unfit(rest, versions)
    if not missing:
        print("nothing to add")
        return 0
    kept = {name: version for name in KEPT if (version := installed(name))}
    print("adding " + ", ".join(missing))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in kept.items()))
        constraints.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name, *rest]
        if subprocess.run(command, check=False).returncode != 0:
            return 1
    look = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    after = subprocess.run([sys.executable, "-c", look, *kept], capture_output=True, text=True, check=True)
    if after.stdout.split() != list(kept.values()):
        print(f"pip changed {', '.join(kept)}: {after.stdout.strip()}; restart the runtime from its menu")
        return 1
    print("kept " + ", ".join(f"{name} {version}" for name, version in kept.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
