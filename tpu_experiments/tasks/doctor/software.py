"""Check versions against the repository's requirements, and exported variables that mislead a run."""

import math
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.patches import WRITTEN_FOR, fits, missing_library
from tpu_experiments.tasks.doctor.finding import Finding, failed, ok, warning, worst

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
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


COUNTS = ("PJRT_LOCAL_PROCESS_COUNT", "TPU_NUM_DEVICES")
BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
TYPES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16")
DEBUG = ("XLA_IR_DEBUG", "XLA_HLO_DEBUG")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OVERWRITTEN = ("PJRT_DEVICE", "CPU_NUM_DEVICES")
CHIP_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of a host by their number, as libtpu lays them out."""
PROCESSES = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")
"""What torch_xla sets for each process of one chip, unless it is exported: Kaggle exports the first as `local`."""
HOST = ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
KNOWN = (*COUNTS, *BOUNDS, *TYPES, *DEBUG, *FLAGS, *OVERWRITTEN, *PROCESSES, *HOST, "XLA_USE_SPMD")


def inspect_variables() -> dict[str, str]:
    """Return the exported variables among `KNOWN`; no other is read, so no secret is."""
    return {name: os.environ[name] for name in KNOWN if os.environ.get(name)}


def judge_variables(exported: Mapping[str, str], config: Config) -> Finding:
    """Judge the variables that torch_xla 2.9 and libtpu read and the config does not control."""
    hw = config.hw
    if hw.runtime != "xla":
        return ok("none that this runtime reads")
    findings = [_judge_variable(name, value, hw=hw) for name, value in exported.items()]
    if "TPU_SKIP_MDS_QUERY" in exported and "TPU_ACCELERATOR_TYPE" not in exported and hw.device == "tpu":
        remedy = "export TPU_ACCELERATOR_TYPE, TPU_WORKER_ID, TPU_HOST_BOUNDS and TPU_CHIPS_PER_HOST_BOUNDS too"
        findings.append(failed("TPU_SKIP_MDS_QUERY without TPU_ACCELERATOR_TYPE", remedy))
    if hw.device == "tpu":
        findings.append(_judge_bounds(exported, hw=hw))
    return worst([finding for finding in findings if finding is not None] or [ok("none that would mislead the run")])


def _judge_bounds(exported: Mapping[str, str], *, hw: HwConfig) -> Finding | None:
    """Judge the bounds of hosts and of chips on a host, which a notebook service exports in place of metadata."""
    hosts, chips = exported.get("TPU_HOST_BOUNDS", ""), exported.get("TPU_CHIPS_PER_HOST_BOUNDS", "")
    if not chips or (not hosts and hw.num_hosts > 1):
        return None
    try:
        count = math.prod(int(part) for part in f"{hosts or '1,1,1'},{chips}".split(","))
    except ValueError:
        return None
    if count >= hw.num_devices:
        return None
    seen = f"TPU_CHIPS_PER_HOST_BOUNDS={chips} TPU_HOST_BOUNDS={hosts} are {count} chips"
    known = CHIP_BOUNDS.get(hw.num_devices // hw.num_hosts)
    remedy = f"`export TPU_CHIPS_PER_HOST_BOUNDS={known}`" if known else "unset them"
    return failed(f"{seen}, and hw={hw.name} has {hw.num_devices}", f"{remedy}, or choose the hw= of {count}")


def _judge_variable(name: str, value: str, *, hw: HwConfig) -> Finding | None:
    seen = f"{name}={value[:60]}"
    if name in COUNTS or (name == "XLA_USE_SPMD" and hw.parallel != "spmd"):
        return failed(seen, f"`unset {name}`: it falsifies the number of devices")
    if name in BOUNDS and hw.device == "tpu" and hw.num_devices > 1:
        return failed(seen, f"`unset {name}`: it gives this run fewer chips than hw.num_devices={hw.num_devices}")
    if name in PROCESSES and hw.device == "tpu" and hw.parallel == "spawn":
        why = "each process of one chip inherits it and dies (`Expected 8 worker addresses, got 1`)"
        return failed(seen, f"`unset {name}`, or use hw.parallel=spmd: {why}")
    if name in TYPES:
        return warning(seen, f"`unset {name}`: it changes data types behind the program; use model.dtype=")
    if name in DEBUG and hw.device == "tpu":
        return warning(
            seen,
            f"`unset {name}`: it changes the keys of the compile cache, so nothing in it is found",
        )
    if name in FLAGS:
        unknown = "a flag that XLA does not know ends the process" if name == "XLA_FLAGS" else "libtpu aborts on others"
        return warning(seen, f"`unset {name}` unless you mean it, or use hw.libtpu_flags=: {unknown}")
    mine = {"PJRT_DEVICE": hw.device.upper(), "CPU_NUM_DEVICES": str(hw.num_devices)}
    if name in OVERWRITTEN and value != mine[name] and not (name == "CPU_NUM_DEVICES" and hw.device != "cpu"):
        return warning(seen, f"`unset {name}`: the run sets it to {mine[name]} itself, your other programs see yours")
    return None
