"""Read TPU slices from conf/hw: accelerator type, zones and price."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.tpu_vm.errors import LaunchError
from tpu_experiments.config.words import machine_named

CONF_HW = Path(__file__).parents[2] / "conf" / "hw"


@dataclass(frozen=True)
class Slice:
    """A rentable slice of conf/hw."""

    hw: str
    accelerator_type: str
    runtime_version: str
    chips: int
    chips_per_host: int
    zones: tuple[str, ...]
    disk_type: str
    price: dict[str, Any]

    @property
    def num_workers(self) -> int:
        """Return the number of VMs of the slice."""
        return max(1, self.chips // self.chips_per_host)

    def usd_per_hour(self, *, spot: bool, zone: str | None, override: float | None = None) -> float:
        """Return the dollars of all chips for one hour.

        The catalogue's price holds for one region; elsewhere, and where the zone is not known yet, the highest price of
        all regions is used, so that a limit in dollars is not exceeded.

        Args:
            override: dollars of one chip-hour, given by the user.

        Raises:
            LaunchError: conf/hw has no price.
        """
        if override is not None:
            return override * self.chips
        kind = "spot" if spot else "on_demand"
        here = self.price.get(f"usd_per_chip_hour_{kind}")
        every = [here, *self.price.get(f"{kind}_range", [])]
        if zone is not None and zone.rsplit("-", 1)[0] == self.price.get("region") and here is not None:
            return float(here) * self.chips
        known = [float(price) for price in every if price is not None]
        if not known:
            raise LaunchError(f"hw={self.hw}; conf/hw/{self.hw}.yaml has no price; give usd_per_chip_hour=.")
        return max(known) * self.chips


def load_slice(hw: str, *, folder: Path = CONF_HW) -> Slice:
    """Load the slice named by `hw=`.

    Raises:
        LaunchError: conf/hw has no such file, or it cannot be rented.
    """
    hw = machine_named(hw, rentable(folder)) or hw
    node = _composed(hw, folder)
    rent = node.get("rent")
    if not rent:
        raise LaunchError(f"hw={hw}; it is no slice that can be rented; use one of: {', '.join(rentable(folder))}.")
    return Slice(
        hw=hw,
        accelerator_type=rent["accelerator_type"],
        runtime_version=rent["runtime_version"],
        chips=int(node["num_devices"]),
        chips_per_host=int(rent["chips_per_host"]),
        zones=tuple(rent["zones"]),
        disk_type=rent["disk_type"],
        price=node.get("price") or {},
    )


def rentable(folder: Path = CONF_HW) -> list[str]:
    """Return the names in conf/hw that have a `rent` section."""
    return sorted(path.stem for path in folder.glob("*.yaml") if _composed(path.stem, folder).get("rent"))


def hw_of(accelerator_type: str, *, folder: Path = CONF_HW) -> str:
    """Return the name in conf/hw with this accelerator type, which is how a .env file names a slice.

    Raises:
        LaunchError: no file has it.
    """
    found = [hw for hw in rentable(folder) if load_slice(hw, folder=folder).accelerator_type == accelerator_type]
    if not found:
        raise LaunchError(f"ACCELERATOR_TYPE={accelerator_type}; no file of conf/hw asks for it; give hw= instead.")
    return found[0]


def _composed(hw: str, folder: Path) -> dict[str, Any]:
    """Merge a file over its defaults, the one form of Hydra's composition that conf/hw uses."""
    file = folder / f"{hw}.yaml"
    if not file.is_file():
        raise LaunchError(f"hw={hw}; there is no {file}; use one of: {', '.join(rentable(folder))}.")
    own = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    merged: dict[str, Any] = {}
    for parent in own.pop("defaults", []):
        if parent not in ("_self_", "base"):
            merged = _merged(merged, _composed(parent, folder))
    return _merged(merged, own)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        known = out.get(key)
        out[key] = _merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else value
    return out
