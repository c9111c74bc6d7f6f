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
        (ASKED, Seen("FAILED", message=QUOTA), "close"),
        (ASKED, Seen("FAILED", code=8), "next_zone"),
        (replace(ASKED, created_at=1950.0), GONE, "wait"),
        (ASKED, GONE, "delete"),
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
        (TRAINING, Seen("ACTIVE", "ABSENT"), "delete"),
        (replace(TRAINING, is_preempted=True), READY, "wait"),
        (replace(TRAINING, is_preempted=True, unreachable_since=700.0), READY, "delete"),
        (replace(TRAINING, unreachable_since=1900.0), READY, "look"),
        (replace(TRAINING, unreachable_since=700.0), READY, "delete"),
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
        (LEAVING, READY, "fetch"),
        (replace(LEAVING, is_fetched=True), READY, "delete"),
        (replace(LEAVING, was_started=False, is_started=False), READY, "delete"),
        (LEAVING, Seen("PROVISIONING"), "wait"),
        (LEAVING, Seen("WAITING_FOR_RESOURCES"), "delete"),
        (LEAVING, Seen("FAILED", message=QUOTA), "delete"),
        (LEAVING, GONE, "fetch"),
        (replace(LEAVING, run_folder="outputs/r"), GONE, "end"),
        (replace(LEAVING, is_fetched=True), GONE, "end"),
    ],
)
def test_one_look_leads_to_one_action(record: Record, seen: Seen, kind: str) -> None:
    assert decide(record, seen, now=NOW, limits=LIMITS).kind == kind


def test_after_a_round_of_all_zones_there_is_a_pause_that_doubles() -> None:
    tried = replace(NEW, rounds=1, round_at=NOW, zone_index=2)
    assert decide(tried, GONE, now=NOW, limits=LIMITS).seconds == 120.0
    assert decide(replace(tried, rounds=9), GONE, now=NOW, limits=LIMITS).seconds == 900.0
    assert decide(tried, GONE, now=NOW + 121, limits=LIMITS).kind == "create"
    assert decide(replace(tried, zone_index=3), GONE, now=NOW, limits=LIMITS).kind == "create"


@pytest.mark.parametrize(("code", "outcome"), [(0, "finished"), (1, "failed"), (2, "failed"), (137, "failed")])
def test_the_exit_code_is_the_outcome(code: int, outcome: str) -> None:
    assert decide(replace(ENDED, exit_code=code), READY, now=NOW, limits=LIMITS).outcome == outcome
