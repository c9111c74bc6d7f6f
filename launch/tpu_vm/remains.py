"""List what costs money in the project: queued resources, nodes, and load_data's VMs and disks."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launch.tpu_vm import commands, loading
from launch.tpu_vm.cloud import Cloud, CloudError
from launch.tpu_vm.commands import LABEL, Target
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import hw_of, load_slice


@dataclass(frozen=True)
class Remaining:
    """One resource found in the project."""

    kind: str
    """queued resource, node, VM or disk."""
    name: str
    zone: str
    state: str
    what: str
    """Accelerator type, machine type, or size."""
    usd_per_hour: float | None
    """0 where this state costs nothing; None where the price is unknown."""
    launch: str
    """Launch in the resource's label; empty where another tool created it."""


def remaining(
    cloud: Cloud, settings: Settings, *, project: str, zones: Iterable[str]
) -> tuple[list[Remaining], list[str]]:
    """Return everything found, and a sentence for each listing that failed."""
    targets = [Target(settings, project, zone, "-") for zone in dict.fromkeys(zones)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = list(pool.map(lambda target: _in_zone(cloud, target), targets))
    return [item for items, _ in found for item in items], [problem for _, problems in found for problem in problems]


def _in_zone(cloud: Cloud, target: Target) -> tuple[list[Remaining], list[str]]:
    items: list[Remaining] = []
    problems: list[str] = []
    for kind, words, read in (
        ("queued resources", commands.listing(target, "queued-resources"), _resource),
        ("nodes", commands.listing(target, "tpu-vm"), _node),
        ("VMs", loading.list_vms(target), _vm),
        ("disks", loading.list_disks(target), _disk),
    ):
        try:
            rows = json.loads(cloud.call(words) or "[]")
        except CloudError as error:
            problems.append(f"{target.zone}: the {kind} were not listed: {error}")
            continue
        items += [read(row, target.zone) for row in rows]
    nodes_of_resources = {item.name for item in items if item.kind == "queued resource"}
    return [item for item in items if item.kind != "node" or item.name not in nodes_of_resources], problems


def _resource(row: dict[str, Any], zone: str) -> Remaining:
    spec = (row.get("tpu", {}).get("nodeSpec") or [{}])[0]
    node = spec.get("node", {})
    state = row.get("state", {}).get("state", "?")
    is_spot = "spot" in row
    price = _price(node.get("acceleratorType", ""), zone, is_spot=is_spot) if state in ("ACTIVE", "SUSPENDING") else 0.0
    what = f"{node.get('acceleratorType', '?')}{' spot' if is_spot else ''}"
    return Remaining("queued resource", _last(row), zone, state, what, price, node.get("labels", {}).get(LABEL, ""))


def _node(row: dict[str, Any], zone: str) -> Remaining:
    state = row.get("state", "?")
    is_spot = bool(row.get("schedulingConfig", {}).get("spot") or row.get("schedulingConfig", {}).get("preemptible"))
    costs = state not in ("PREEMPTED", "TERMINATED", "STOPPED")
    price = _price(row.get("acceleratorType", ""), zone, is_spot=is_spot) if costs else 0.0
    return Remaining(
        "node", _last(row), zone, state, row.get("acceleratorType", "?"), price, row.get("labels", {}).get(LABEL, "")
    )


def _vm(row: dict[str, Any], zone: str) -> Remaining:
    what = str(row.get("machineType", "?")).rsplit("/", 1)[-1]
    return Remaining("VM", _last(row), zone, row.get("status", "?"), what, None, row.get("labels", {}).get(LABEL, ""))


def _disk(row: dict[str, Any], zone: str) -> Remaining:
    what = f"{row.get('sizeGb', '?')} GB"
    return Remaining("disk", _last(row), zone, row.get("status", "?"), what, None, row.get("labels", {}).get(LABEL, ""))


def _last(row: dict[str, Any]) -> str:
    return str(row.get("name", "?")).rsplit("/", 1)[-1]


def _price(accelerator_type: str, zone: str, *, is_spot: bool) -> float | None:
    try:
        return load_slice(hw_of(accelerator_type)).usd_per_hour(spot=is_spot, zone=zone)
    except LaunchError:
        return None


def table(items: list[Remaining], problems: list[str]) -> str:
    """Return lines for the terminal, with the sum in dollars per hour."""
    lines = [f"{'zone':<16} {'what':<16} {'name':<28} {'':<16} {'state':<22} {'$/h':>7}  launch"] if items else []
    for item in items:
        price = "?" if item.usd_per_hour is None else f"{item.usd_per_hour:.2f}"
        row = f"{item.zone:<16} {item.kind:<16} {item.name:<28} {item.what:<16} {item.state:<22} {price:>7}"
        lines.append(f"{row}  {item.launch or 'not made here'}")
    total = sum(item.usd_per_hour or 0.0 for item in items)
    unknown = sum(item.usd_per_hour is None for item in items)
    if not items and not problems:
        return "nothing is left that costs money"
    more = (
        f", and {unknown} of unknown price (disks and VMs: cloud.google.com/compute/disks-image-pricing)"
        if unknown
        else ""
    )
    return "\n".join([*lines, f"now ${total:.2f}/h{more}" if items else "nothing was found", *problems])
