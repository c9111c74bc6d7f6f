"""Persist the progress of a launch in one small JSON file, written before each irreversible step.

The API knows the machines; the file records what the API does not know: which of them are ours, what the goal is, and
what was paid. A launcher killed at any point recovers from the two.
"""

import json
import os
import secrets
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from launch.tpu_vm.errors import LaunchError

VERSION = 1


@dataclass(frozen=True)
class Record:
    """State of one launch. Times are seconds since 1970; money is US dollars."""

    name: str
    launch_id: str
    hw: str
    spot: bool
    project: str
    zones: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    """Arguments of run.py."""
    words: tuple[str, ...] = ()
    """Settings as given on the command line, for later commands."""
    run_folder: str = ""
    """Folder that the run writes to, as the VM sees it."""
    goal: str = "ready"
    """`ready`: a machine that is set up. `run`: the run has ended. `gone`: everything is deleted."""
    then: str = "keep"
    """`keep` the machine when the goal is reached, or delete it (`gone`)."""
    max_usd: float | None = None
    """Limit in dollars that the plan set where none was given."""
    outcome: str = ""
    """finished, failed, stopped, interrupted, budget, capacity, refused, lost or down; empty while in progress."""
    reason: str = ""
    """The outcome in one sentence."""
    done: bool = False
    """Whether nothing is left to do; then only a kept machine costs money."""
    zone_index: int = 0
    rounds: int = 0
    """Number of times that every zone was without capacity."""
    round_at: float | None = None
    """Time at which the last such round ended; None once a zone was asked again."""
    blocked: tuple[str, ...] = ()
    """Zones that cannot serve this project (quota, type of machine), each with the reason: `ZONE: REASON`."""
    queued_at: float | None = None
    """Time at which the wait for capacity began, over all zones; None while there is a machine."""
    created_at: float | None = None
    """Time at which the present resource was requested; None where there is none."""
    idle_at: float | None = None
    """Last time the resource was observed at no cost."""
    ready_at: float | None = None
    """Time from which the present machine is billed."""
    usd_before: float = 0.0
    hours_before: float = 0.0
    """Hours of the machines before the present one; `usd_before` is their cost."""
    machines: int = 0
    """Number of machines so far."""
    is_set_up: bool = False
    """Whether the present machine is set up."""
    is_started: bool = False
    """Whether the run was started on the present machine."""
    was_started: bool = False
    """Whether the run was started on any machine."""
    is_moving: bool = False
    """Whether the resource is being deleted to try the next zone."""
    is_absence_expected: bool = False
    """Whether the present resource was deleted or never created, so that its absence needs no second look."""
    absences: int = 0
    """Consecutive times that the API did not know the present resource or its node."""
    is_preempted: bool = False
    """Whether the machine has reported its preemption."""
    is_stop_asked: bool = False
    """Whether a stop was requested (`tpu.py stop`)."""
    run_state: str = "none"
    """Last observed state: none, running, lost (its machine was restarted) or exited."""
    exit_code: int | None = None
    ending_since: float | None = None
    """Time at which one of several workers was first seen to have failed while others ran."""
    attempts: int = 0
    """Number of starts of the run on the present machine."""
    log_offset: int = 0
    """Bytes of the present machine's log already printed."""
    is_fetched: bool = False
    fetch_failures: int = 0
    silences: int = 0
    """Consecutive times that the present machine did not answer over ssh, while the API said that it is READY."""
    heartbeat: str = ""
    """Lease of the run in the bucket, last seen while the machine was silent."""
    still: int = 0
    """Consecutive times that the bucket answered and the lease was the same."""
    silent_machines: int = 0
    """Machines in a row that were given back since they did not answer, with no run started."""
    setup_failures: int = 0
    history: tuple[str, ...] = ()
    """Log of the launch, newest line last."""

    @property
    def resource(self) -> str:
        """Return the id of the queued resource and its node; the launch id makes it unique."""
        return f"{self.name}-{self.launch_id}"

    @property
    def is_remote(self) -> bool:
        """Return whether the run writes to a bucket, which outlives every machine."""
        return "://" in self.run_folder

    @property
    def zone(self) -> str:
        """Return the zone where the resource is or will be."""
        return self.zones[self.zone_index % len(self.zones)]

    @property
    def open_zones(self) -> tuple[str, ...]:
        """Return the zones that are not blocked."""
        blocked = {reason.split(":", 1)[0] for reason in self.blocked}
        return tuple(zone for zone in self.zones if zone not in blocked)

    def in_next_zone(self, *, now: float) -> "Record":
        """Return the record in the next open zone; after the last one a round without capacity has ended."""
        index = self.zone_index + 1
        while self.open_zones and self.zones[index % len(self.zones)] not in self.open_zones:
            index += 1
        is_round = index // len(self.zones) > self.zone_index // len(self.zones)
        rounds, round_at = (self.rounds + 1, now) if is_round else (self.rounds, self.round_at)
        return replace(self, zone_index=index, rounds=rounds, round_at=round_at)

    def before_start(self) -> "Record":
        """Return the record with nothing of a run on the present machine: no start, state, ending or log."""
        return replace(self, is_started=False, run_state="none", exit_code=None, ending_since=None, log_offset=0)


def new_id() -> str:
    """Return six random hexadecimal digits."""
    return secrets.token_hex(3)


class Store:
    """State file of one launch."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.json"

    def load(self) -> Record | None:
        """Return the record, or None if there is no file.

        Raises:
            LaunchError: the file is damaged or written by another version.
        """
        if not self.file.is_file():
            return None
        try:
            content: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LaunchError(
                f"{self.file} is no JSON ({error}); look with `status` what is left, then delete it."
            ) from None
        if content.pop("version", None) != VERSION:
            raise LaunchError(f"{self.file} is of another version of the launcher; look with `status`, then delete it.")
        known = {item.name for item in fields(Record)}
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in content.items() if key in known
        }
        return Record(**values)

    def save(self, record: Record) -> None:
        """Replace the file atomically: a crash leaves the old record or the new one."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.write(json.dumps({"version": VERSION} | vars(record), indent=1) + "\n")

    def write(self, text: str) -> None:
        """Write the whole file atomically, synced to disk."""
        fresh = self.file.with_suffix(".json.new")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(self.file)


def noted(record: Record, line: str, **changes: Any) -> Record:
    """Return the record with changes and one more line of history; the last 200 are kept."""
    return replace(record, history=(*record.history, line)[-200:], **changes)
