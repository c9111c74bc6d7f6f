"""Check versions against the repository's requirements, and exported variables that mislead a run."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

from packaging.requirements import Requirement

from tpu_experiments.config.defaults import is_open
from tpu_experiments.config.folders import REPOSITORY
from tpu_experiments.config.hardware import HwConfig, flags_of
from tpu_experiments.config.schema import Config
from tpu_experiments.planning.tuned import tuned
from tpu_experiments.runtime.patches import WRITTEN_FOR, fits, missing_library
from tpu_experiments.runtime.processes.env import exported_flags
from tpu_experiments.runtime.processes.variables import stray_variables
from tpu_experiments.tasks.doctor.finding import Finding, failed, ok, warning, worst

PYPROJECT = REPOSITORY / "pyproject.toml"
PINNED = ("torch", "torch_xla")
OF_A_TPU = ("libtpu", "jax", "jaxlib")
KERNELS = ("jax", "jaxlib")
LIBTPU_OF_313 = "0.0.21.1"
"""The first libtpu with a wheel for Python 3.13, as in pyproject.toml."""
SET_UP = "run `bash launch/local.sh python run.py task=doctor`, which installs the lock"


@dataclass(frozen=True)
class Package:
    """A requirement and the installed version."""

    name: str
    wanted: str
    """Version specifier, for example `==2.9.0`."""
    installed: str | None

    @property
    def fits(self) -> bool:
        """Return whether the installed version satisfies the requirement."""
        if self.installed is None:
            return False
        return Requirement(f"{self.name}{self.wanted}").specifier.contains(self.installed, prereleases=True)


@dataclass(frozen=True)
class Software:
    """Python version and installed packages."""

    python: tuple[int, int]
    packages: tuple[Package, ...]
    missing_library: str | None = None
    """Shared library of this Python that torch_xla loads and does not find, as `libpython3.11`."""


def inspect_software(config: Config) -> Software:
    """Read the installed packages' metadata; none of them is imported."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    backend = "torchtpu" if config.hw.runtime == "torchtpu" else "xla"
    wanted = [line for line in project["dependencies"] if Requirement(line).name not in PINNED]
    wanted += project["optional-dependencies"][backend]
    if backend == "xla":
        wanted += [line for line in _requires("torch_xla") if Requirement(line).name in OF_A_TPU]
    packages = []
    for line in wanted:
        requirement = Requirement(line)
        packages.append(Package(requirement.name, str(requirement.specifier), _installed(requirement.name)))
    return Software((sys.version_info.major, sys.version_info.minor), tuple(packages), missing_library())


def judge_versions(software: Software, config: Config) -> Finding:
    """Judge Python, torch and torch_xla, libtpu and jax where a TPU needs them, and all other packages."""
    hw, findings = config.hw, []
    if software.missing_library and hw.runtime == "xla":
        library = software.missing_library
        findings.append(failed(f"no {library}.so.1.0, which torch_xla loads", f"`apt-get install {library}`"))
    jax = next((package.installed for package in software.packages if package.name == "jax"), None)
    if not (3, 11) <= software.python < (3, 14):
        shown = ".".join(map(str, software.python))
        findings.append(failed(f"Python {shown}", "use Python 3.11, 3.12 or 3.13"))
    for package in software.packages:
        wanted = _as_a_run_wants(package, jax=jax, python=software.python) if hw.runtime == "xla" else package
        finding = _judge_package(wanted, hw=hw, attention=config.model.attention)
        if finding is not None:
            findings.append(finding)
    shown = ", ".join(
        f"{package.name} {package.installed}"
        for package in software.packages
        if package.name in (*PINNED, *OF_A_TPU, "torch_tpu") and package.installed
    )
    return worst(findings or [ok(f"Python {'.'.join(map(str, software.python))}, {shown}")])


def _judge_package(package: Package, *, hw: HwConfig, attention: str) -> Finding | None:
    name, is_tpu = package.name, hw.device == "tpu"
    needs_jax = is_tpu or hw.runtime == "torchtpu"
    if package.fits or (name in OF_A_TPU and not needs_jax) or (name == "torch_xla" and hw.runtime != "xla"):
        return None
    seen = f"{name} {package.installed or 'is missing'} ({package.wanted} wanted)"
    if hw.runtime == "torchtpu" and name in (*PINNED, *OF_A_TPU, "torch_tpu"):
        return failed(seen, "make the environment of launch/requirements-torchtpu.lock (runtime/README.md)")
    if name in KERNELS and attention != "flash":
        return warning(seen, f"model.attention=flash would be refused; install {name}{package.wanted}")
    if name == "torch" and hw.runtime == "eager" and package.installed is not None:
        return warning(seen, f"tested with {name}{package.wanted} alone; plain torch 2.11 trained on a GPU")
    if name in (*PINNED, *OF_A_TPU):
        return failed(seen, f"torch, torch_xla, libtpu and jax belong together: install {name}{package.wanted}")
    if package.installed is None:
        return failed(seen, f"`pip install '{name}{package.wanted}'`, or {SET_UP}")
    return warning(seen, f"this version was not tried; {SET_UP}")


def _as_a_run_wants(package: Package, *, jax: str | None, python: tuple[int, int]) -> Package:
    """Return a package with the version that a run with torch_xla takes, where it takes no other.

    Args:
        jax: the installed version, which jaxlib's equals.
    """
    source, found = ("jax", jax) if package.name == "jaxlib" else (package.name, package.installed)
    if source not in WRITTEN_FOR:
        return package
    version = (found or "").partition("+")[0]
    if not fits(source, version):
        version = LIBTPU_OF_313 if source == "libtpu" and python >= (3, 13) else WRITTEN_FOR[source]
    return replace(package, wanted=f"=={version}")


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge_variables(exported: Mapping[str, str], config: Config) -> Finding:
    """Judge the variables that torch_xla 2.9 and libtpu read and the config does not control."""
    if config.hw.runtime != "xla":
        return ok("none that this runtime reads")
    strays = stray_variables(exported, config.hw)
    found = [(failed if each.is_fatal else warning)(each.seen, each.remedy) for each in strays]
    return worst(found or [ok("none that would mislead the run")])


def inspect_flags(config: Config) -> list[str]:
    """Return the flags that libtpu would have in a run."""
    settled = config if is_open(config) else tuned(config, is_logged=False)
    return flags_of(settled.hw, exported=exported_flags())


def judge_flags(flags: Sequence[str], config: Config) -> Finding:
    """Show the flags that libtpu would have."""
    if config.hw.device != "tpu":
        return ok("none: libtpu is for a TPU")
    return ok(f"of two of one name the last counts: {' '.join(flags)}")
