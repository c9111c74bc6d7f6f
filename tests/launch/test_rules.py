"""The rules, one look at a time."""

from dataclasses import replace

import pytest

from launch.tpu_vm.money import Limits
from launch.tpu_vm.rules import Seen, decide
from launch.tpu_vm.state import Record
from tests.launch.fake_cloud import QUOTA, STOCKOUT

LIMITS = Limits(usd_per_hour=12.0, max_usd=60.0, max_hours=24.0, queue_seconds=21_600.0, zone_seconds=1800.0)
NEW = Record(name="r", launch_id="a", hw="v6e8", spot=True, project="p", zones=("z-a", "z-b"), goal="run", then="gone")
ASKED = replace(NEW, created_at=1000.0, queued_at=1000.0, idle_at=1000.0)
UP = replace(ASKED, ready_at=1200.0, queued_at=None, machines=1, is_set_up=True)
TRAINING = replace(UP, is_started=True, was_started=True, run_state="running", attempts=1, run_folder="gs://bkt/r")
ENDED = replace(TRAINING, run_state="exited", exit_code=0)
LEAVING = replace(TRAINING, goal="gone", outcome="interrupted", reason="Ctrl-C")
KEPT = replace(LEAVING, run_folder="outputs/r", outcome="finished")
MISSING = {"absences": 3}
READY, GONE = Seen("ACTIVE", "READY"), Seen("ABSENT")
NOW = 2000.0


@pytest.mark.parametrize(
    ("record", "seen", "kind"),
    [
        (NEW, GONE, "create"),
        (ASKED, Seen("CREATING"), "wait"),
        (ASKED, Seen("WAITING_FOR_RESOURCES"), "wait"),
        (ASKED, Seen("PROVISIONING"), "wait"),
        (ASKED, Seen("FAILED", message=STOCKOUT), "next_zone"),
        (ASKED, Seen("FAILED", message=QUOTA), "next_zone"),
        (ASKED, Seen("FAILED", message="PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"), "close"),
        (replace(NEW, blocked=("z-a: quota", "z-b: quota")), GONE, "close"),
        (ASKED, Seen("FAILED", code=8), "next_zone"),
        (replace(ASKED, created_at=1950.0), GONE, "wait"),
        (replace(ASKED, absences=2), GONE, "wait"),
        (replace(ASKED, absences=3), GONE, "delete"),
        (replace(ASKED, is_absence_expected=True), GONE, "delete"),
        (replace(ASKED, created_at=0.0), Seen("WAITING_FOR_RESOURCES"), "next_zone"),
        (replace(ASKED, created_at=0.0), Seen("PROVISIONING"), "wait"),
        (replace(ASKED, queued_at=-30_000.0), Seen("WAITING_FOR_RESOURCES"), "close"),
        (replace(UP, is_set_up=False), Seen("ACTIVE", "CREATING"), "wait"),
        (replace(UP, is_set_up=False), READY, "set_up"),
        (replace(UP, is_set_up=False, setup_failures=2), READY, "close"),
        (UP, READY, "start"),
        (replace(UP, goal="ready"), READY, "end"),
        (TRAINING, READY, "look"),
        (TRAINING, Seen("SUSPENDED"), "delete"),
        (TRAINING, Seen("SUSPENDING"), "wait"),
        (TRAINING, Seen("ACTIVE", "PREEMPTED"), "delete"),
        (replace(TRAINING, absences=1), Seen("ACTIVE", "ABSENT"), "wait"),
        (replace(TRAINING, absences=3), Seen("ACTIVE", "ABSENT"), "delete"),
        (replace(TRAINING, is_preempted=True), READY, "look"),
        (replace(TRAINING, is_preempted=True, silences=30), READY, "delete"),
        (replace(UP, is_set_up=False, silences=11), READY, "set_up"),
        (replace(UP, is_set_up=False, silences=12), READY, "delete"),
        (replace(UP, is_set_up=False, silences=12, silent_machines=1), READY, "close"),
        (replace(UP, then="keep", silences=500), READY, "start"),
        (replace(TRAINING, silences=500), READY, "look"),
        (replace(TRAINING, silences=500, still=14), READY, "look"),
        (replace(TRAINING, silences=30, still=15), READY, "delete"),
        (replace(TRAINING, run_state="lost"), READY, "start"),
        (replace(TRAINING, usd_before=58.0), READY, "close"),
        (replace(TRAINING, hours_before=23.9), READY, "close"),
        (replace(TRAINING, machines=50), Seen("SUSPENDED"), "close"),
        (ENDED, READY, "close"),
        (replace(ENDED, exit_code=75), READY, "start"),
        (replace(ENDED, exit_code=75, is_stop_asked=True), READY, "close"),
        (replace(ENDED, exit_code=75, attempts=20), READY, "close"),
        (replace(ENDED, exit_code=1), READY, "close"),
        (replace(ENDED, outcome="finished"), READY, "fetch"),
        (replace(ENDED, outcome="finished", is_fetched=True), READY, "end"),
        (LEAVING, READY, "delete"),
        (KEPT, READY, "fetch"),
        (replace(LEAVING, is_fetched=True), READY, "delete"),
        (replace(LEAVING, was_started=False, is_started=False), READY, "delete"),
        (LEAVING, Seen("PROVISIONING"), "wait"),
        (LEAVING, Seen("WAITING_FOR_RESOURCES"), "delete"),
        (LEAVING, Seen("FAILED", message=QUOTA), "delete"),
        (replace(LEAVING, absences=1), GONE, "wait"),
        (replace(LEAVING, **MISSING), GONE, "fetch"),
        (replace(LEAVING, run_folder="outputs/r", **MISSING), GONE, "end"),
        (replace(LEAVING, is_fetched=True, **MISSING), GONE, "end"),
        (replace(KEPT, fetch_failures=3), READY, "fetch"),
        (replace(KEPT, fetch_failures=4), READY, "leave"),
        (KEPT, Seen("ACTIVE", "REPAIRING"), "wait"),
        (replace(KEPT, outcome="budget"), Seen("ACTIVE", "REPAIRING"), "delete"),
    ],
)
def test_one_look_leads_to_one_action(record: Record, seen: Seen, kind: str) -> None:
    assert decide(record, seen, now=NOW, limits=LIMITS).kind == kind


def test_after_a_round_of_all_zones_there_is_a_pause_that_doubles() -> None:
    tried = replace(NEW, rounds=1, round_at=NOW, zone_index=2)
    assert decide(tried, GONE, now=NOW, limits=LIMITS).seconds == 120.0
    assert decide(replace(tried, rounds=9), GONE, now=NOW, limits=LIMITS).seconds == 900.0
    assert decide(tried, GONE, now=NOW + 121, limits=LIMITS).kind == "create"
    assert decide(replace(tried, round_at=None), GONE, now=NOW, limits=LIMITS).kind == "create"


def test_a_blocked_zone_is_skipped_and_the_rounds_are_counted_without_it() -> None:
    record = replace(NEW, zones=("z-a", "z-b", "z-c"), blocked=("z-b: no quota",))
    second = record.in_next_zone(now=NOW)
    assert (second.zone, second.rounds, second.round_at) == ("z-c", 0, None)
    third = second.in_next_zone(now=NOW)
    assert (third.zone, third.rounds, third.round_at) == ("z-a", 1, NOW)


@pytest.mark.parametrize(("code", "outcome"), [(0, "finished"), (1, "failed"), (2, "failed"), (137, "failed")])
def test_the_exit_code_is_the_outcome(code: int, outcome: str) -> None:
    assert decide(replace(ENDED, exit_code=code), READY, now=NOW, limits=LIMITS).outcome == outcome
