"""Call the Cloud TPU API through gcloud, for one launch's resource and for the list of all that costs money."""

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from launch.tpu_vm import gcloud
from launch.tpu_vm.errors import FAILED, Kind, LaunchError, advice_for, in_one_line, kind_of
from launch.tpu_vm.gcloud import LABEL, Target
from launch.tpu_vm.rules import Seen
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import Slice, hw_of, load_slice
from launch.tpu_vm.world import Completed, Run

TRIES = 6


class CloudError(Exception):
    """Failure of the API, classified by `kind` (errors.py)."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Cloud:
    """Client of the Cloud TPU API for one launch; transient failures are retried before they are raised."""

    def __init__(self, run: Run, *, sleep: Callable[[float], None]) -> None:
        self._run = run
        self._sleep = sleep

    def call(self, words: list[str], *, timeout: float = 120.0) -> str:
        """Run a gcloud command and return its standard output.

        Raises:
            CloudError: classified; for a transient or unknown failure only after six tries with 62 s of waiting in all.
        """
        done = self.ask(words, timeout=timeout)
        if done.code:
            raise CloudError(kind_of(done.err), in_one_line(done.err) or f"exit code {done.code}")
        return done.out

    def ask(self, words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        """Run a gcloud command, again while its failure is transient or unknown, and return how it ended."""
        done = self._run(words, stdin=stdin, timeout=timeout)
        for attempt in range(TRIES - 1):
            if done.code == 0 or kind_of(done.err) not in ("transient", "unknown"):
                break
            self._sleep(2.0 * 2**attempt)
            done = self._run(words, stdin=stdin, timeout=timeout)
        return done

    def look(self, target: Target) -> Seen:
        """Return the state of the queued resource and, where it is ACTIVE, of its node."""
        try:
            resource = _json(self.call(gcloud.describe(target)))
        except CloudError as error:
            if error.kind == "absent":
                return Seen("ABSENT")
            raise
        state = resource.get("state", {})
        failure = state.get("failedData", {}).get("error", {})
        name = state.get("state", "CREATING")
        node = self._node_state(target) if name == "ACTIVE" else "ABSENT"
        return Seen(name, node, message=failure.get("message", ""), code=failure.get("code"))

    def _node_state(self, target: Target) -> str:
        try:
            return str(_json(self.call(gcloud.describe_node(target))).get("state", "CREATING"))
        except CloudError as error:
            if error.kind == "absent":
                return "ABSENT"
            raise

    def create(self, target: Target, slice_: Slice, **lengths: Any) -> None:
        """Request the queued resource; one that already exists counts as success."""
        try:
            self.call(gcloud.create(target, slice_, **lengths), timeout=300.0)
        except CloudError as error:
            if error.kind != "exists":
                raise

    def delete(self, target: Target) -> Literal["accepted", "absent", "refused"]:
        """Delete the resource with its node; `refused` is a state in which the API deletes nothing."""
        try:
            self.call(gcloud.delete(target), timeout=300.0)
        except CloudError as error:
            if error.kind == "undeletable":
                return "refused"
            if error.kind == "absent":
                return "absent"
            raise
        return "accepted"


def as_launch_error(error: CloudError) -> LaunchError:
    """Turn an API failure into one sentence for the user, with what to do."""
    is_fixable = error.kind in ("structural", "credentials", "zone")
    advice = f" {advice_for(str(error))}." if is_fixable else " Try again later."
    return LaunchError(f"{str(error).rstrip('.')};{advice}", code=FAILED)


def _json(text: str) -> dict[str, Any]:
    content = json.loads(text or "{}")
    return content if isinstance(content, dict) else {}


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
    cloud: Cloud, settings: Settings, *, project: str, zones: Iterable[str] = ()
) -> tuple[list[Remaining], list[str]]:
    """Return everything found in all zones, or in `zones`, and a sentence for each listing that failed.

    The four kinds are listed at the same time, each over all zones in one call.
    """
    target = Target(settings, project, "-", "-")
    listings = (
        ("queued resources", gcloud.listing(target, "queued-resources"), _resource),
        ("nodes", gcloud.listing(target, "tpu-vm"), _node),
        ("VMs", gcloud.list_loaders(target), _vm),
        ("disks", gcloud.list_disks(target), _disk),
    )
    problems: list[str] = []

    def listed(kind: str, words: list[str], read: Callable[[dict[str, Any], str], Remaining]) -> list[Remaining]:
        try:
            rows = json.loads(cloud.call(words) or "[]")
        except CloudError as error:
            problems.append(f"the {kind} were not listed: {error}")
            return []
        return [read(row, _zone(row)) for row in rows]

    with ThreadPoolExecutor(max_workers=len(listings)) as pool:
        items = [item for found in pool.map(lambda listing: listed(*listing), listings) for item in found]
    of_resources = {(item.zone, item.name) for item in items if item.kind == "queued resource"}
    items = [item for item in items if item.kind != "node" or (item.zone, item.name) not in of_resources]
    wanted = set(zones)
    return [item for item in items if not wanted or item.zone in wanted], problems


def _zone(row: dict[str, Any]) -> str:
    """Return the zone of a listed resource: of its full name, or of the address of its zone."""
    match = re.search(r"(?:locations|zones)/([^/]+)", f"{row.get('name', '')} {row.get('zone', '')}")
    return match[1].strip() if match else "?"


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
