"""The lock, pyproject.toml and the top level agree with each other and with the rules."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tpu_experiments.runtime.patches import TORCHTPU, fits

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
LOCK = (ROOT / "launch" / "requirements.lock").read_text()
TOP_LEVEL = {
    "LICENSE",
    "README.md",
    "conf",
    "launch",
    "outputs",
    "pyproject.toml",
    "run.py",
    "tests",
    "tpu_experiments",
}
PYTHONS = ("3.11", "3.12", "3.13")


def wanted() -> list[str]:
    """Of the environment of torch_xla; that of TorchTPU has a lock of its own."""
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "torchtpu"}
    lines = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    return [line for line in lines if not line.startswith("tpu_experiments[")]


def lock_entries() -> list[str]:
    """The lock cut into one text per package: its requirement line and its hash lines."""
    lines = [line for line in LOCK.splitlines() if not line.lstrip().startswith("#")]
    return re.split(r"\n(?=\S)", "\n".join(lines).strip())


def locked(name: str, *, python: str, release: str = ".0") -> list[Requirement]:
    """The lock's entries for a package on Linux x86_64 with one Python."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}{release}",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    entries = [Requirement(entry.split("\\")[0]) for entry in lock_entries()]
    same = [e for e in entries if canonicalize_name(e.name) == canonicalize_name(name)]
    return [e for e in same if e.marker is None or e.marker.evaluate(environment)]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("line", wanted())
def test_the_lock_has_each_dependency_at_a_version_that_fits(line: str, python: str) -> None:
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
        pytest.skip(f"not for Python {python}: {requirement.marker}")
    entries = locked(requirement.name, python=python)
    assert len(entries) == 1
    (pin,) = entries[0].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version, prereleases=True)


@pytest.mark.parametrize("line", wanted())
def test_the_lock_holds_for_the_python_3_11_of_tpu_vms(line: str) -> None:
    """Ubuntu 22.04 calls its own 3.11.0rc1, which is less than 3.11.0."""
    name = Requirement(line).name
    assert locked(name, python="3.11", release=".0rc1") == locked(name, python="3.11")


def test_the_other_lock_has_torchtpu_and_no_torch_xla() -> None:
    lock = (ROOT / "launch" / "requirements-torchtpu.lock").read_text()
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, flags=re.MULTILINE))
    assert pins["torch-tpu"] == TORCHTPU["torch_tpu"]
    assert {name: pins[name] for name in ("torch", "jax", "libtpu")} == {
        name: TORCHTPU[name] for name in ("torch", "jax", "libtpu")
    }
    assert "torch-xla" not in pins
    assert "://" not in lock


def test_each_locked_package_is_pinned_with_hashes() -> None:
    for entry in lock_entries():
        assert re.match(r"[a-z0-9-]+==[^ ]+ ", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_the_lock_names_no_address() -> None:
    assert "://" not in LOCK
    assert not re.search(r"^\s*(-i|-f|--(extra-)?index-url|--find-links)\b", LOCK, re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["torch", "torch_xla"])
def test_torch_and_torch_xla_are_pinned_together(name: str, python: str) -> None:
    assert [str(e.specifier) for e in locked(name, python=python)] == ["==2.9.0"]
    assert any(re.match(rf"{name}==2\.9\.0$", line) for line in PROJECT["optional-dependencies"]["xla"])


def test_the_two_backends_exclude_each_other() -> None:
    ours, theirs = (
        next(r for r in map(Requirement, PROJECT["optional-dependencies"][extra]) if r.name == "torch")
        for extra in ("xla", "torchtpu")
    )
    (pin,) = ours.specifier
    assert not theirs.specifier.contains(pin.version)
    common = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert common.specifier.contains(pin.version)
    assert common.specifier.contains(TORCHTPU["torch"])


@pytest.mark.parametrize("python", PYTHONS)
def test_the_kernels_and_the_compiler_are_those_that_private_names_were_written_for(python: str) -> None:
    """libtpu 0.0.21 has no wheel for Python 3.13, 0.0.21.1 has."""
    found = {name: str(locked(name, python=python)[0].specifier) for name in ("jax", "jaxlib", "libtpu")}
    assert found == {"jax": "==0.7.1", "jaxlib": "==0.7.1", "libtpu": "==0.0.21.1" if python == "3.13" else "==0.0.21"}
    assert all(fits(name, version.removeprefix("==")) for name, version in found.items() if name != "jaxlib")


def test_the_header_says_how_the_lock_is_made() -> None:
    assert "bash launch/lock.sh" in LOCK.splitlines()[1]


def test_each_dependency_says_why_it_is_there() -> None:
    for line in wanted():
        written = [text for text in PYPROJECT.splitlines() if f'"{line}",' in text]
        assert written, f"{line} is not on a line of its own"
        assert all(re.search(r'",\s+# \w', text) for text in written), f"{line} has no reason"


def test_the_top_level_holds_only_the_agreed_names() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    names = {path.split("/")[0] for path in listing.stdout.split("\0") if path}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_outputs_keeps_only_its_placeholder() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"outputs/*", "!outputs/.gitkeep", ".venv", "conf/local/*.yaml"} <= set(ignored)
    assert (ROOT / "outputs" / ".gitkeep").is_file()
