"""Check the devices: how many there are, which processes hold them, and whether they start."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tpu_experiments.config.folders import REPOSITORY
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.runtime.processes.chips import (
    LOCK_FILE,
    Holder,
    LockFile,
    device_nodes,
    held_text,
    holders_of,
    kill_text,
    num_pci_chips,
)
from tpu_experiments.runtime.processes.env import variables
from tpu_experiments.runtime.processes.faults import ADDRESSES, BUSY, FIND_HOLDER, NO_NETWORK, RESTART, UNSET_ADDRESSES
from tpu_experiments.runtime.processes.libtpu import libtpu_problem
from tpu_experiments.runtime.processes.metadata import CHIP_BOUNDS, HOST_NETWORK, metadata_problem
from tpu_experiments.tasks.doctor.finding import Finding, failed, is_me, not_checked, ok, shown_gb, warning

MEMLOCK_BYTES = 64 * 2**30
"""Locked memory below which a run may hang or fail: what public TPU containers are given (Marin, torchprime)."""
HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24  # linux/capability.h: locks memory without a limit; passes a hard limit
PORT = 8476  # torch_xla's first
CAUSE = re.compile(r"Check failed|[A-Za-z]*Error\b|UNKNOWN:|INVALID_ARGUMENT|INTERNAL:|[Ff]ailed to")
NOTEBOOKS = ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")
"""Variables of the services whose machines cannot be set up by their users."""


@dataclass(frozen=True)
class Probed:
    """Result of the child process that starts the devices; `error` if it failed."""

    num_devices: int = 0
    kind: str = ""
    total: float = 0.0
    """Result of 1 + 1 on the device."""
    seconds: float = 0.0
    error: str | None = None
    name: str = ""
    """Name of a GPU."""
    gib: float = 0.0
    """Memory of a GPU."""
    has_bf16: bool = True
    """Whether the arithmetic of a GPU has bf16."""


@dataclass(frozen=True)
class Devices:
    """Devices of this machine."""

    nodes: tuple[str, ...]
    """One node per chip: /dev/accel* of v2 to v4, /dev/vfio/0 and up of later chips."""
    closed_nodes: tuple[str, ...]
    """Nodes that this user may not open."""
    num_pci_chips: int
    holders: tuple[Holder, ...]
    num_hidden_processes: int
    """Processes of other users, whose open files only root can see."""
    probed: Probed | None
    """None where no child was started, because a chip is held or `problem` keeps it from starting."""
    problem: tuple[str, str] | None = None
    """What keeps a run from starting before it comes to the chips, and what to do."""


def inspect_devices(config: Config, task: DoctorTaskConfig) -> Devices:
    """List device nodes and their holders, then start the devices in a child unless one is held."""
    nodes = device_nodes()
    closed = tuple(node for node in nodes if not os.access(node, os.R_OK | os.W_OK))
    holders, num_hidden = holders_of(nodes) if nodes else ((), 0)
    problem = None
    if nodes or num_pci_chips():
        problem = metadata_problem(config.hw) or (libtpu_problem(config.hw) if config.hw.device == "tpu" else None)
    is_waste = problem or (config.hw.device == "tpu" and (holders or closed or not nodes))
    probed = None if is_waste else probe(config.hw, timeout_seconds=task.device_timeout_seconds)
    return Devices(nodes, closed, num_pci_chips(), holders, num_hidden, probed, problem)


def probe(hw: HwConfig, *, timeout_seconds: float) -> Probed:
    """Run runtime/processes/probe.py with a run's environment variables; it is killed after the time-out."""
    command = [sys.executable, "-m", "tpu_experiments.runtime.processes.probe", hw.runtime, hw.device]
    environment = {**os.environ, **variables(hw), **(alone_on_slice(hw) if hw.num_hosts > 1 else {})}
    try:
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        return Probed(error=f"the devices did not start within {timeout_seconds:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return Probed(error=_error_of(done.stderr, code=done.returncode))
    answer = json.loads(lines[-1])
    facts = {key: answer[key] for key in ("name", "gib", "has_bf16") if key in answer}
    return Probed(answer["num_devices"], answer["kind"], answer["sum"], answer["seconds"], **facts)


def alone_on_slice(hw: HwConfig) -> dict[str, str]:
    """Return the variables with which libtpu starts this host's chips without the slice's other hosts.

    A run waits for those (pytorch/xla issue 7714). As chip_variables does for one chip: all that says which
    process of how many this is has to agree, or hosts other than the first are out of bounds. Never run on a slice.
    """
    chips = hw.num_devices // hw.num_hosts
    bounds, numbers = CHIP_BOUNDS.get(chips, f"{chips},1,1"), ",".join(map(str, range(chips)))
    values = {
        "TPU_VISIBLE_CHIPS": numbers,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{PORT}",
        "TPU_PROCESS_PORT": str(PORT),
        "CLOUD_TPU_TASK_ID": "0",
    }
    former = {
        "TPU_VISIBLE_DEVICES": numbers,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    return values | {name: value for name, value in former.items() if name in os.environ}


def _error_of(text: str, *, code: int) -> str:
    """Return the child's last line, or, where a signal ended it, the first that looks like the cause.

    libtpu prints a stack trace after that.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code >= 0:
        return lines[-1][:300] if lines else f"exit code {code}"
    cause = next((line for line in lines if CAUSE.search(line)), lines[-1] if lines else "it printed nothing")
    return f"their process died of {signal.Signals(-code).name}: {cause[:300]}"


def judge_devices(devices: Devices, config: Config) -> Finding:
    """Judge whether `hw.num_devices` devices start, on one of several hosts its part of them."""
    hw = config.hw
    if hw.device == "tpu" and not (devices.nodes or devices.num_pci_chips):
        return failed("no TPU (no Google PCI device, no /dev/accel*, no /dev/vfio/*)", "use a TPU VM, or hw=cpu here")
    if hw.device == "tpu" and not devices.nodes:
        remedy = "the runtime version does not suit the chip: create the VM again with the one of runtime_version"
        return failed(f"{devices.num_pci_chips} chips, and no driver is bound to them", remedy)
    if devices.problem is not None:
        return failed(*devices.problem)
    if devices.closed_nodes:
        return failed(f"{', '.join(devices.closed_nodes)} may not be opened", "run as root, or as the user who owns it")
    if devices.holders:
        return failed(held_text(devices.holders), kill_text(devices.holders))
    chips = hw.num_devices // hw.num_hosts
    if hw.num_hosts > 1 and len(devices.nodes) != chips:
        seen = f"{len(devices.nodes)} chips, and a host of hw={hw.name} has {chips}"
        return failed(seen, "choose the hw= of this slice, or take another machine")
    assert devices.probed is not None
    finding = _judge_probed(
        devices.probed, hw=hw, num_nodes=len(devices.nodes), num_hidden=devices.num_hidden_processes
    )
    if finding.verdict == "ok" and not devices.probed.has_bf16 and config.model.dtype == "bfloat16":
        return warning(f"{finding.seen}; it emulates model.dtype=bfloat16, slowly", "model.dtype=float16")
    if hw.num_hosts > 1 and finding.verdict == "failed" and not _is_certain(devices.probed, hw=hw):
        # They were asked to start without the other hosts, which no run does and nobody has tried.
        remedy = "a run starts them together with the other hosts; if that fails too, " + finding.remedy
        return warning(f"{len(devices.nodes)} chips, which did not start by themselves: {finding.seen}", remedy)
    return finding


def _is_certain(probed: Probed, *, hw: HwConfig) -> bool:
    """Return whether a failure of one host's own chips would be a failure of the run."""
    if probed.error is not None:
        return _is_busy(probed.error)
    return probed.kind.lower() != hw.device or probed.total != 2.0


def _is_busy(error: str) -> bool:
    return bool(BUSY.search(error)) or "busy" in error or "in use" in error


def _judge_probed(probed: Probed, *, hw: HwConfig, num_nodes: int, num_hidden: int) -> Finding:
    if probed.error is not None:
        hidden = f"; {num_hidden} processes of other users were not looked into" if num_hidden else ""
        return failed(probed.error + hidden, _remedy_of(probed.error, hw=hw))
    what = f"{probed.name} of {probed.gib:.2f} GiB" if probed.name else probed.kind.lower()
    seen = f"{probed.num_devices} x {what}, started in {probed.seconds:.1f} s"
    if hw.runtime == "xla" and probed.kind.lower() != hw.device:
        return failed(seen, f"torch_xla fell back to {probed.kind}; install libtpu, or use hw=cpu")
    wanted = hw.num_devices // hw.num_hosts if hw.device == "tpu" else hw.num_devices
    # A host of a slice whose probe met the others' counts all chips.
    if probed.num_devices < wanted if hw.runtime == "eager" else probed.num_devices not in (wanted, hw.num_devices):
        if hw.runtime == "eager" and hw.device == "cpu":
            return ok(f"cpu, shared by {hw.num_devices} processes")
        if hw.device == "cuda":
            remedy = f"hw.num_devices={probed.num_devices}, or look at CUDA_VISIBLE_DEVICES and `nvidia-smi`"
            return failed(f"{seen}, and hw={hw.name} has {wanted}", remedy)
        remedy = f"choose hw= with {probed.num_devices}, or set TPU_VISIBLE_CHIPS and its bounds for a part of a host"
        if probed.num_devices < min(wanted, num_nodes):  # as Kaggle's v5e-8 shows one of its eight
            seen = f"{probed.num_devices} of this machine's {num_nodes} chips started in {probed.seconds:.1f} s"
            remedy = f"unset what `variables` names; {RESTART}; or choose hw= with {probed.num_devices}"
        return failed(f"{seen}, and hw={hw.name} has {wanted} on a host", remedy)
    if probed.total != 2.0:
        return failed(f"{seen}, and 1 + 1 is {probed.total} there", "the device computes wrongly: take another machine")
    return ok(seen)


def _remedy_of(error: str, *, hw: HwConfig) -> str:
    """Return what to do about devices that did not start."""
    if _is_busy(error):
        return FIND_HOLDER
    if ADDRESSES.search(error):
        return UNSET_ADDRESSES
    if NO_NETWORK.search(error):
        return HOST_NETWORK
    if hw.device == "cuda" and "NVIDIA driver" in error:
        return "no GPU here, or no driver: `nvidia-smi` must list it; use hw=cpu on a machine without"
    if hw.device == "cuda" and "not compiled with CUDA" in error:
        return "this torch is built for the CPU; install the lock's: `bash launch/local.sh python run.py task=doctor`"
    remedy = f"read the whole message: `python -m tpu_experiments.runtime.processes.probe {hw.runtime} {hw.device}`"
    if " died of SIG" in error and hw.device == "tpu":
        remedy += f"; {RESTART}"
        if find_spec("tensorflow") is not None:  # pytorch/xla issue 6610
            remedy += "; tensorflow here loads libtpu too: leave it out, as launch/startup.sh does"
    return remedy


@dataclass(frozen=True)
class Memlock:
    """How much memory a run here may lock."""

    limit: int | None
    """Bytes; None without a limit."""
    is_exempt: bool = False
    """Whether this user's rights pass the limit."""
    is_notebook: bool = False
    """Whether it is a notebook service's machine, whose limits nobody can change."""


def inspect_memlock(status: Path = Path("/proc/self/status")) -> Memlock:
    """Read the hard limit, to which a run raises its own, and this process's capabilities."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lines = status.read_text().splitlines() if status.exists() else []
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    is_exempt = bool(effective >> CAP_IPC_LOCK & 1 or effective >> CAP_SYS_RESOURCE & 1)
    is_notebook = any(os.environ.get(name) for name in NOTEBOOKS)
    return Memlock(None if hard == resource.RLIM_INFINITY else hard, is_exempt, is_notebook)


def judge_memlock(memlock: Memlock, config: Config) -> Finding:
    """Judge whether libtpu may lock the memory that chips read and write by themselves (DMA)."""
    if config.hw.device != "tpu":
        return ok("no limit matters to this hardware")
    if memlock.limit is None or memlock.limit >= MEMLOCK_BYTES:
        return ok("unlimited" if memlock.limit is None else f"{shown_gb(memlock.limit)} may be locked")
    seen = f"{memlock.limit // 1024:,} KiB of memory may be locked (RLIMIT_MEMLOCK)"
    if memlock.is_exempt:
        return ok(f"{seen}, and this user's rights pass that limit")
    seen += ", and libtpu locks memory for DMA"
    if memlock.is_notebook:
        return warning(seen, "nothing to be done on a notebook service; if the run hangs, take another machine")
    remedy = (
        "systemd: -p LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; GKE: the capability SYS_RESOURCE; on the VM: "
        "`* - memlock unlimited` in /etc/security/limits.conf and a new login"
    )
    return failed(seen, remedy)


def inspect_hugepages(path: Path = HUGEPAGES) -> str | None:
    """Return for which memory the kernel takes large pages: always, madvise or never; None where it does not say."""
    chosen = re.search(r"\[(\w+)\]", path.read_text()) if path.exists() else None
    return chosen[1] if chosen else None


def judge_hugepages(chosen: str | None, config: Config) -> Finding:
    """Judge whether a TPU starts as fast as it may; jax warns of anything but `always` from v5e on."""
    if config.hw.device != "tpu":
        return ok("this hardware does not need them")
    if chosen is None:
        return not_checked("the kernel does not say whether it has transparent hugepages")
    if chosen == "always":
        return ok("always")
    seen = f"transparent hugepages are set to {chosen}, so the TPU starts and ends more slowly"
    return warning(seen, f"`sudo sh -c 'echo always >{HUGEPAGES}'`, on its host if this is a container")


def judge_lock_file(lock: LockFile, config: Config) -> Finding:
    """Judge the lock file: one left by a crash or another user makes libtpu report the TPU as in use."""
    if not lock.is_there:
        return ok("none")
    if config.hw.device != "tpu":
        return ok(f"{LOCK_FILE} is there, and this hardware does not look at it")
    if lock.holder is not None:
        return failed(f"process {lock.holder} holds {LOCK_FILE}", f"wait for its end, or `kill {lock.holder}`")
    remedy = f"`sudo rm -f {LOCK_FILE}`: no process holds it"
    if not lock.is_writable or not is_me(lock.owner):
        return failed(f"{LOCK_FILE} belongs to user {lock.owner}", remedy)
    return warning(f"{LOCK_FILE} exists and no process holds it", f"if libtpu says that it is in use, {remedy}")
