"""Choose the next action from the observed state: pure rules without clock or network.

States are those of a queued resource (CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDING,
SUSPENDED, FAILED, DELETING) and ABSENT. A spot reclaim shows as SUSPENDED, or as ACTIVE over a node that is
PREEMPTED or gone; neither recovers by itself.

In doubt a machine is left running: silence is counted in failed asks and never in time, which passes while a laptop
sleeps, and a started run is given up only on evidence. What bounds the cost is the limit of money.
"""

from dataclasses import dataclass
from typing import Literal

from launch.tpu_vm.errors import STOPPED, advice_for, in_one_line, kind_of
from launch.tpu_vm.money import HOUR, Limits, hours_used, seconds_left
from launch.tpu_vm.state import Record

WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES")
UNDELETABLE = ("PROVISIONING", "DELETING", "SUSPENDING")
LOST_NODE = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "HIDING", "HIDDEN", "DELETING", "ABSENT")
MAX_SETUP_FAILURES = 2
MAX_ATTEMPTS = 20
"""Starts of the run on one machine before it counts as failed."""
MAX_FIRST_SILENCES = 12
"""Failed asks in a row, about 20 minutes, after which a machine with no run is given back."""
MAX_SILENT_MACHINES = 2
"""Such machines in a row that end the launch: the network is at fault, and a third would cost as much."""
MAX_SILENCES, MAX_STILL = 30, 15
"""Failed asks in a row, and asks without a new lease of the run in the bucket, that show a machine to be dead."""
MIN_ABSENCES = 3
"""Looks in a row in which the API does not know a resource before it counts as gone."""
MAX_FETCHES = 4
"""Failed attempts to fetch the only copy of a result before the machine is left to the user."""
SETTLING_SECONDS = 90.0
"""A new resource may not be listed yet; treating it as absent would leave it running unowned."""


@dataclass(frozen=True)
class Seen:
    """Queued resource as the API shows it."""

    state: str
    node: str = "ABSENT"
    """State of the node; queried only where the resource is ACTIVE."""
    message: str = ""
    """Error message of a FAILED resource."""
    code: int | None = None

    @property
    def is_lost(self) -> bool:
        """Return whether the machine was taken away."""
        return self.state == "SUSPENDED" or (self.state == "ACTIVE" and self.node in LOST_NODE)

    @property
    def is_missing(self) -> bool:
        """Return whether the API does not know the resource or its node."""
        return self.state == "ABSENT" or (self.state == "ACTIVE" and self.node == "ABSENT")

    @property
    def costs(self) -> bool:
        """Return whether the resource is billed in this state."""
        return self.state in ("ACTIVE", "SUSPENDING") and self.node not in LOST_NODE


@dataclass(frozen=True)
class Action:
    """Next action, with its reason."""

    kind: Literal["create", "delete", "wait", "next_zone", "set_up", "start", "look", "fetch", "close", "end", "leave"]
    why: str = ""
    is_blocked: bool = False
    """Whether the zone that `next_zone` leaves cannot serve this launch at all."""
    seconds: float = 0.0
    """Duration of a wait; 0 is `poll_seconds`."""
    outcome: str = ""
    """Outcome of the launch, for `close`."""


def decide(record: Record, seen: Seen, *, now: float, limits: Limits) -> Action:
    """Return the next action; called repeatedly until it returns `end`."""
    is_unsettled = record.created_at is not None and not record.is_moving and record.ready_at is None
    if seen.state == "ABSENT" and is_unsettled and now - (record.created_at or now) < SETTLING_SECONDS:
        return Action("wait", why="the request is not shown yet")
    is_known = record.created_at is not None and not record.is_absence_expected
    if seen.is_missing and is_known and record.absences < MIN_ABSENCES:
        return Action("wait", why="the API does not know the machine; it is asked again")
    if record.goal == "gone":
        return _towards_nothing(record, seen)
    if record.outcome:  # the run has ended and its machine is kept
        return Action("end") if record.is_fetched else _fetch(record)
    if seconds_left(record, now=now, limits=limits) <= 0:
        used = f"{hours_used(record, now=now):.1f} h"
        return Action("close", why=f"the limit of money or hours is reached after {used}", outcome="budget")
    if seen.state == "FAILED":
        return _failed(record, seen)
    if seen.is_lost or (seen.state == "ABSENT" and record.created_at is not None):
        return _lost(record, seen, limits)
    if seen.state == "ABSENT":
        return _absent(record, now, limits)
    if seen.state in UNDELETABLE:
        return Action("wait", why=seen.state)
    if seen.state in WAITING:
        return _waiting(record, seen, now, limits)
    if seen.node != "READY":
        return Action("wait", why=f"the node is {seen.node}")
    return _ready(record)


def _towards_nothing(record: Record, seen: Seen) -> Action:
    if record.was_started and not record.is_fetched:
        is_there = seen.state == "ACTIVE" and not seen.is_lost and record.is_started
        has_copy = is_there and not record.is_remote
        if (has_copy and seen.node == "READY") or (record.is_remote and seen.state == "ABSENT"):
            return _fetch(record)
        if has_copy and record.outcome != "budget":
            return Action("wait", why=f"the node is {seen.node}; its results are fetched before it is deleted")
    if seen.state == "ABSENT":
        return Action("end")
    if seen.state in UNDELETABLE:
        return Action("wait", why=f"{seen.state}: the API refuses to delete it now")
    return Action("delete", why=record.reason)


def _fetch(record: Record) -> Action:
    if record.fetch_failures < MAX_FETCHES:
        return Action("fetch")
    return Action("leave", why=f"the results could not be fetched in {MAX_FETCHES} attempts")


def _failed(record: Record, seen: Seen) -> Action:
    kind = kind_of(seen.message, code=seen.code)
    if kind == "zone":
        why = f"{in_one_line(seen.message)}: {advice_for(seen.message)}"
        return Action("next_zone", why=why, is_blocked=True)
    if kind == "structural":
        why = f"{in_one_line(seen.message)}: {advice_for(seen.message)}"
        return Action("close", why=why, outcome="refused")
    return Action("next_zone", why=f"no capacity in {record.zone} ({in_one_line(seen.message, limit=80) or 'FAILED'})")


def _lost(record: Record, seen: Seen, limits: Limits) -> Action:
    if record.machines >= limits.max_machines:
        return Action("close", why=f"{record.machines} machines were taken away", outcome="capacity")
    return Action("delete", why=f"the machine was taken away ({seen.state}, node {seen.node})")


def _absent(record: Record, now: float, limits: Limits) -> Action:
    if _waited_too_long(record, now, limits):
        return Action(
            "close", why=f"no capacity within queue_hours={limits.queue_seconds / HOUR:g}", outcome="capacity"
        )
    if not record.open_zones:
        return Action("close", why=f"no zone can serve it: {'; '.join(record.blocked)}", outcome="refused")
    if record.round_at is not None:
        pause = min(60.0 * 2 ** min(record.rounds, 5), 900.0) - (now - record.round_at)
        if pause > 0:
            return Action("wait", why="every zone is out of capacity", seconds=pause)
    return Action("create")


def _waiting(record: Record, seen: Seen, now: float, limits: Limits) -> Action:
    if _waited_too_long(record, now, limits):
        return Action(
            "close", why=f"no capacity within queue_hours={limits.queue_seconds / HOUR:g}", outcome="capacity"
        )
    here = now - (record.created_at if record.created_at is not None else now)
    if len(record.open_zones) > 1 and here > limits.zone_seconds:
        return Action("next_zone", why=f"{here / 60:.0f} min in {seen.state} in {record.zone}")
    return Action("wait", why=f"{seen.state} in {record.zone}")


def _waited_too_long(record: Record, now: float, limits: Limits) -> bool:
    return record.queued_at is not None and now - record.queued_at > limits.queue_seconds


def _silent(record: Record) -> Action | None:
    """Return what to do with a machine that does not answer over ssh, or None to ask it again."""
    has_nothing = not record.is_started and (not record.is_set_up or record.then == "gone")
    if has_nothing and record.silences >= MAX_FIRST_SILENCES:
        if record.silent_machines + 1 < MAX_SILENT_MACHINES:
            return Action("delete", why=f"the machine has not answered {record.silences} times in a row")
        why = f"{MAX_SILENT_MACHINES} machines in a row did not answer over ssh; open tcp:22 in the firewall of the "
        return Action("close", why=f"{why}network, here and in the project, or use network=internal", outcome="failed")
    if record.silences >= MAX_SILENCES and record.is_preempted:
        return Action("delete", why="the machine was being taken away and answers no more")
    if record.silences >= MAX_SILENCES and record.still >= MAX_STILL:
        return Action("delete", why="the machine does not answer, and its run renews its lease in the bucket no more")
    return None


def _ready(record: Record) -> Action:
    silent = _silent(record)
    if silent is not None:
        return silent
    if not record.is_set_up:
        if record.setup_failures >= MAX_SETUP_FAILURES:
            return Action("close", why="the set-up failed twice; its last lines are above", outcome="failed")
        return Action("set_up")
    if record.goal == "ready":
        return Action("end")
    if not record.is_started:
        return Action("start")
    if record.run_state == "lost" and record.attempts < MAX_ATTEMPTS:
        return Action("start")
    if record.run_state != "exited":
        return Action("look")
    if record.exit_code == 0:
        return Action("close", why="the run finished", outcome="finished")
    if record.exit_code == STOPPED and record.is_stop_asked:
        return Action("close", why="the run was stopped and saved a checkpoint", outcome="stopped")
    if (
        record.exit_code == STOPPED and record.attempts < MAX_ATTEMPTS
    ):  # stopped by the machine, for a reclaim or maintenance that did not take place
        return Action("start")
    return Action("close", why=f"the run ended with exit code {record.exit_code}", outcome="failed")
