"""What a launch has done so far: one small JSON file, written before each thing that cannot be taken back.

The API holds the truth about machines; the file holds what the API does not know: which of them are ours, what was
meant to happen, and what was paid. A launcher that is killed anywhere finds both again.
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
    """One launch. Times are seconds since 1970; money is US dollars."""

    name: str
    launch_id: str
    hw: str
    spot: bool
    project: str
    zones: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    """What run.py is given."""
    words: tuple[str, ...] = ()
    """Settings as they were given, for the commands that follow."""
    run_folder: str = ""
    """Where the run writes, as the VM sees it."""
    goal: str = "ready"
    """`ready`: a machine that is set up. `run`: the run has ended. `gone`: nothing is left."""
    then: str = "keep"
    """`keep` the machine when the goal is reached, or let it be `gone`."""
    outcome: str = ""
    """finished, failed, stopped, interrupted, budget, capacity, refused or down; empty while it goes on."""
    reason: str = ""
    """The outcome in one sentence."""
    done: bool = False
    """Nothing is left to do, and nothing costs money unless the machine is kept."""
    zone_index: int = 0
    rounds: int = 0
    """Times that every zone was without capacity."""
    round_at: float | None = None
    """When the last such round ended."""
    queued_at: float | None = None
    """When waiting for capacity began, over all zones; null while a machine is there."""
    created_at: float | None = None
    """When the present resource was asked for; null where there is none."""
    idle_at: float | None = None
    """Last time the resource was seen and cost nothing."""
    ready_at: float | None = None
    """When the present machine began to cost."""
    usd_before: float = 0.0
    hours_before: float = 0.0
    """Of the machines before the present one."""
    machines: int = 0
    """How many there were."""
    is_set_up: bool = False
    """Of the present machine."""
    is_started: bool = False
    """The run was started on the present machine."""
    was_started: bool = False
    """The run was started on any machine."""
    is_moving: bool = False
    """The resource is deleted to try the next zone."""
    is_preempted: bool = False
    """The machine has said that it is taken away."""
    is_stop_asked: bool = False
    """Somebody asked the run to stop (`tpu.py stop`)."""
    run_state: str = "none"
    """As last seen: none, running, lost (its machine was restarted) or exited."""
    exit_code: int | None = None
    ending_since: float | None = None
    """When a worker of several was first seen to have failed while others ran."""
    attempts: int = 0
    """Starts of the run on the present machine."""
    log_offset: int = 0
    """Bytes of the present machine's log that were shown."""
    is_fetched: bool = False
    fetch_failures: int = 0
    unreachable_since: float | None = None
    setup_failures: int = 0
    history: tuple[str, ...] = ()
    """Lines of what happened, newest last."""

    @property
    def resource(self) -> str:
        """Id of the queued resource and of its node; with the launch's id in it, so that it is nobody else's."""
        return f"{self.name}-{self.launch_id}"

    @property
    def is_remote(self) -> bool:
        """The run writes to a bucket, which outlives every machine."""
        return "://" in self.run_folder

    @property
    def zone(self) -> str:
        """Where the resource is or will be."""
        return self.zones[self.zone_index % len(self.zones)]


def new_id() -> str:
    """Six random hexadecimal digits."""
    return secrets.token_hex(3)


class Store:
    """The file of one launch."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.json"

    def load(self) -> Record | None:
        """The record; None where there is none.

        Raises:
            LaunchError: the file is damaged or of another version.
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
        """Replace the file in one step; a crash leaves the old one or the new one."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.write(json.dumps({"version": VERSION} | vars(record), indent=1) + "\n")

    def write(self, text: str) -> None:
        """The whole file."""
        fresh = self.file.with_suffix(".json.new")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(self.file)


def noted(record: Record, line: str, **changes: Any) -> Record:
    """The record with changes and one more line of history; the last 200 are kept."""
    return replace(record, history=(*record.history, line)[-200:], **changes)
