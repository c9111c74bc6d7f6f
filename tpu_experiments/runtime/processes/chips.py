"""TPU chips of this machine: on the PCI bus, as device nodes, and which processes hold them. Nothing is initialised."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GOOGLE_PCI_VENDOR = "0x1ae0"
# The same ids as torch_xla 2.9, _internal/tpu.py: v2/v3, v4, v5p, v5e, v6e, v7x.
TPU_PCI_DEVICES = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
LOCK_FILE = Path("/tmp/libtpu_lockfile")
FIRST_PORT = 8476  # libtpu's default, torch_xla 2.9 _internal/tpu.py
ONE_CHIP = "1,1,1"
VISIBLE = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICE_PATHS")
"""Variables that give a process some of its host's chips."""


@dataclass(frozen=True)
class Holder:
    """Process that has a device node open."""

    pid: int
    command: str
    node: str


@dataclass(frozen=True)
class LockFile:
    """State of libtpu's /tmp/libtpu_lockfile."""

    is_there: bool
    owner: int = 0
    is_writable: bool = True
    holder: int | None = None
    """Id of the process that has locked it."""


def tpu_present() -> bool:
    """Return whether this host has a TPU chip: a Google PCI device, or the device nodes in a container."""
    return num_pci_chips() > 0 or bool(device_nodes())


def num_chips_present() -> int | None:
    """Return the number of TPU chips of this host; None where none are found."""
    return len(device_nodes()) or num_pci_chips() or None


def num_pci_chips(bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return the number of TPU chips on the PCI bus, including those without a driver."""
    count = 0
    for vendor in bus.glob("*/vendor"):
        device = (vendor.parent / "device").read_text().strip()
        count += vendor.read_text().strip() == GOOGLE_PCI_VENDOR and device in TPU_PCI_DEVICES
    return count


def device_nodes(root: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the nodes of TPU chips, one per chip, without /dev/vfio/vfio (the container interface).

    v2 to v4 have /dev/accel0 and so on, v5e and later /dev/vfio/0 and so on. The latter are any device that is handed
    to a virtual machine, a GPU too: they count beside a TPU on the PCI bus, or where a container's maker says by
    TPU_ACCELERATOR_TYPE that there is one.
    """
    found = list(root.glob("accel[0-9]*"))
    if num_pci_chips() or os.environ.get("TPU_ACCELERATOR_TYPE"):
        found += root.glob("vfio/[0-9]*")
    return tuple(sorted(str(node) for node in found))


def holders_of(nodes: Sequence[str], *, proc: Path = Path("/proc")) -> tuple[tuple[Holder, ...], int]:
    """Return the other processes that have a node open, and how many processes could not be inspected.

    A node is known by its device, since in a container it has a path of its own.
    """
    holders, num_hidden = [], 0
    known = {_device_of(node): node for node in nodes}
    names = {Path(node).name for node in nodes}
    for folder in proc.glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            links = [link for link in (folder / "fd").iterdir() if Path(os.readlink(link)).name in names]
            opened = {_device_of(link) for link in links}
            command = _program((folder / "cmdline").read_bytes())
        except PermissionError:
            num_hidden += 1
            continue
        except (FileNotFoundError, ProcessLookupError):  # it has ended or closed the file meanwhile
            continue
        holders += [Holder(int(folder.name), command, node) for device, node in known.items() if device in opened]
    return tuple(holders), num_hidden


def _device_of(path: str | Path) -> tuple[int, int]:
    """Return the device of a node, or which file it is where it is none."""
    found = os.stat(path)
    return (found.st_rdev, 0) if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


def _program(arguments: bytes) -> str:
    """Return `python train.py` or `python -m package`, without further arguments, which may hold secrets."""
    words = arguments.decode(errors="replace").split("\0")
    return " ".join(words[: 3 if words[1:2] == ["-m"] else 2])[:120]


def one_of_several() -> dict[str, str]:
    """Return the environment with which a process takes one chip of a host that has more, the first that is free.

    Empty on a host of one chip, and where an exported variable has chosen chips.
    """
    nodes, count = device_nodes(), num_chips_present() or 1
    if count == 1 or any(os.environ.get(name) for name in VISIBLE):
        return {}
    held = {holder.node for holder in holders_of(nodes)[0]} if nodes else set()
    free = [number for number, node in enumerate(nodes) if node not in held]
    return chip_variables(free[0] if free else 0)


def chip_variables(chip: int) -> dict[str, str]:
    """Return the environment of a process that has one chip of the host and no peers.

    Skye Wanderman-Milne, https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3: bounds 1,1,1 and a port of its
    own ("non-communicating processes"). Without the bounds libtpu locks the whole host. The former names of the
    settings (`HOST` for `PROCESS`, `DEVICES` for `CHIPS`), which containers export (Kaggle, Colab, GKE), are set as
    well where they exist. torch_xla's own `configure_one_chip_topology` sets the first three by setdefault, which
    keeps these values.
    """
    port = str(FIRST_PORT + chip)
    values = {
        "TPU_VISIBLE_CHIPS": str(chip),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ONE_CHIP,
        "TPU_PROCESS_BOUNDS": ONE_CHIP,
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": "0",
    }
    former = {
        "TPU_VISIBLE_DEVICES": str(chip),
        "TPU_CHIPS_PER_HOST_BOUNDS": ONE_CHIP,
        "TPU_HOST_BOUNDS": ONE_CHIP,
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": port,
    }
    return values | {name: value for name, value in former.items() if name in os.environ}


def held_text(holders: Sequence[Holder]) -> str:
    """Return which process holds which nodes, for a sentence."""
    held: dict[int, list[Holder]] = {}
    for holder in holders:
        held.setdefault(holder.pid, []).append(holder)
    return "; ".join(
        f"process {pid} ({same[0].command}) holds {', '.join(each.node for each in same)}" for pid, same in held.items()
    )


def kill_text(holders: Sequence[Holder]) -> str:
    """Return how to end the processes, for a sentence."""
    pids = list(dict.fromkeys(holder.pid for holder in holders))
    if set(pids) & set(_ancestors()):
        return "it has started this command, as a notebook's kernel does that has used the TPU: restart the session"
    return f"wait for its end, or end it: `kill {' '.join(map(str, pids))}`"


def _ancestors(proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that this one comes of, the nearest first."""
    found = [os.getppid()]
    while found[-1] > 0:
        try:
            lines = (proc / str(found[-1]) / "status").read_text().splitlines()
        except OSError:  # of another namespace
            break
        found.append(next((int(line.split()[1]) for line in lines if line.startswith("PPid:")), 0))
    return found


def inspect_lock_file(path: Path = LOCK_FILE, locks: Path = Path("/proc/locks")) -> LockFile:
    """Return the file's owner and, from /proc/locks, the locking process; the file is not touched."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return LockFile(False)
    fields = [line.split() for line in locks.read_text().splitlines()] if locks.exists() else []
    inode = f":{status.st_ino}"
    pids = [int(row[4]) for row in fields if len(row) > 5 and row[1] != "->" and row[5].endswith(inode)]
    return LockFile(True, status.st_uid, os.access(path, os.R_OK | os.W_OK), pids[0] if pids else None)
