"""Account for the cost of a launch; unobserved moments are counted as billed."""

from dataclasses import dataclass, replace

from launch.tpu_vm.state import Record

HOUR = 3600.0
CLOSING_SECONDS = 420.0
"""Reserve within every limit for a checkpoint after SIGTERM (110 s), fetching and deletion."""


BOOT_SECONDS = 30.0
"""Less time than any machine takes from its request's last state without cost to READY."""


@dataclass(frozen=True)
class Limits:
    """Limits of a launch and the price of its machine."""

    usd_per_hour: float
    max_usd: float | None
    max_hours: float
    queue_seconds: float
    zone_seconds: float
    max_machines: int = 50
    unseen_seconds: float = float("inf")
    """Longest time that a machine without a run can have cost unseen."""

    @property
    def most_usd(self) -> float:
        """Return the most that the launch may cost, in dollars."""
        by_hours = self.max_hours * self.usd_per_hour
        return by_hours if self.max_usd is None else min(by_hours, self.max_usd)


def hours_used(record: Record, *, now: float) -> float:
    """Return the hours of all machines so far."""
    present = 0.0 if record.ready_at is None else max(0.0, now - record.ready_at) / HOUR
    return record.hours_before + present


def usd_used(record: Record, *, now: float, limits: Limits) -> float:
    """Return the dollars of all machines so far."""
    present = hours_used(record, now=now) - record.hours_before
    return record.usd_before + present * limits.usd_per_hour


def seconds_left(record: Record, *, now: float, limits: Limits) -> float:
    """Return the seconds until the first limit, less `CLOSING_SECONDS`.

    Without a machine, the limit in dollars is converted at the price of one started now.
    """
    hours = limits.max_hours - hours_used(record, now=now)
    if limits.max_usd is not None:
        dollars = limits.max_usd - usd_used(record, now=now, limits=limits)
        hours = min(hours, dollars / limits.usd_per_hour if limits.usd_per_hour else hours)
    return hours * HOUR - CLOSING_SECONDS


def began(record: Record, *, now: float) -> Record:
    """Mark the machine as billed since the last observation at which it cost nothing."""
    if record.ready_at is not None:
        return record
    return replace(record, ready_at=record.idle_at or record.created_at or now, machines=record.machines + 1)


def unseen(record: Record, *, now: float, limits: Limits) -> Record:
    """Count a machine that came and went while nobody looked, as on a laptop that slept.

    It had no run, so its watchdog has ended it after its idle time at the latest.
    """
    if record.ready_at is not None or record.created_at is None:
        return record
    free_at = max(record.idle_at or record.created_at, now - limits.unseen_seconds)
    return began(replace(record, idle_at=free_at), now=now)


def deleted(record: Record, *, now: float, limits: Limits) -> Record:
    """Count a machine that came while its deletion was on its way, as on a laptop that slept meanwhile."""
    free_at = record.idle_at or record.created_at
    if free_at is None or now - free_at < BOOT_SECONDS:
        return record
    return unseen(record, now=now, limits=limits)


def ended(record: Record, *, now: float, limits: Limits) -> Record:
    """Add the cost of a machine that is gone to the totals and reset its state."""
    if not record.is_absence_expected:
        record = unseen(record, now=now, limits=limits)
    return replace(
        record.before_start(),
        usd_before=usd_used(record, now=now, limits=limits),
        hours_before=hours_used(record, now=now),
        ready_at=None,
        created_at=None,
        idle_at=now,
        is_set_up=False,
        is_preempted=False,
        is_stop_asked=False,
        attempts=0,
        is_absence_expected=False,
        absences=0,
        silences=0,
        heartbeat="",
        still=0,
    )


def bill(record: Record, *, now: float, limits: Limits) -> str:
    """Return a summary such as `1.4 h, $3.02 of $60.00 ($14.26/h)`."""
    cap = "" if limits.max_usd is None else f" of ${limits.max_usd:.2f}"
    used = usd_used(record, now=now, limits=limits)
    return f"{hours_used(record, now=now):.1f} h, ${used:.2f}{cap} (${limits.usd_per_hour:.2f}/h)"
