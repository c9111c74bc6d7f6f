"""`train` from its first request to nothing left, through what a cloud does to it."""

from pathlib import Path

import pytest

from launch.tpu_vm import code_sync
from launch.tpu_vm.vm import Vm
from launch.tpu_vm.world import Completed
from tests.launch.fake_cloud import QUOTA, STOCKOUT, TYPE_DENIED, FakeCloud, Fate, Killed, SimulatedClock
from tests.launch.launcher import SECRETS, FakeArchive, Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(FakeCloud(SimulatedClock()), tmp_path)


def zones_asked(launcher: Launcher) -> list[str]:
    return [machine.zone for machine in launcher.cloud.all_machines]


def test_a_run_is_trained_fetched_and_nothing_is_left(launcher: Launcher) -> None:
    assert launcher.train() == 0
    assert not launcher.cloud.machines
    assert (launcher.folder / "ro1" / "result.json").is_file()
    assert (launcher.folder / "ro1" / "logs" / "worker-0.log").is_file()
    (machine,) = launcher.cloud.all_machines
    assert "hw=v6e8 name=ro1" in machine.run_words
    assert launcher.record().usd_before >= launcher.cloud.billed_seconds / 3600 * 8 * 0.267


def test_the_same_command_again_rents_a_second_time_only_when_it_is_a_new_launch(launcher: Launcher) -> None:
    assert launcher.train() == 0
    first = launcher.record().launch_id
    assert launcher.train() == 0
    assert launcher.record().launch_id != first
    assert not launcher.cloud.machines


def test_a_stockout_in_two_zones_leads_to_the_third(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(failure=STOCKOUT), Fate(failure=STOCKOUT)]
    assert launcher.train() == 0
    assert zones_asked(launcher) == ["z-a", "z-b", "z-c"]
    assert not launcher.cloud.machines


def test_a_zone_that_only_queues_is_left_after_its_minutes(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(queued=10_000)]
    assert launcher.train("zone_minutes=10") == 0
    assert zones_asked(launcher) == ["z-a", "z-b"]


def test_every_zone_out_of_capacity_is_tried_again_and_given_up_after_queue_hours(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(failure=STOCKOUT) for _ in range(500)]
    assert launcher.train("queue_hours=2") == 1
    assert len(zones_asked(launcher)) > 6
    assert launcher.record().outcome == "capacity"
    assert not launcher.cloud.machines
    assert launcher.cloud.billed_seconds == 0


@pytest.mark.parametrize("failure", [QUOTA, TYPE_DENIED])
def test_a_zone_without_quota_or_without_the_type_leads_to_the_next(launcher: Launcher, failure: str) -> None:
    launcher.cloud.fates = [Fate(failure=failure), Fate(failure=STOCKOUT), Fate(failure=STOCKOUT)]
    assert launcher.train() == 0
    assert zones_asked(launcher) == ["z-a", "z-b", "z-c", "z-b"], "z-a is not asked again"
    assert not launcher.cloud.machines


def test_no_quota_in_any_zone_ends_with_the_reason_of_each(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(failure=QUOTA) for _ in range(9)]
    assert launcher.train() == 1
    assert zones_asked(launcher) == ["z-a", "z-b", "z-c"]
    assert launcher.record().outcome == "refused"
    assert launcher.record().reason.count("ask for TPU quota") == 3
    assert not launcher.cloud.machines


def test_a_reclaimed_machine_is_replaced_and_the_run_resumes(launcher: Launcher) -> None:
    launcher.cloud.work = 7200.0
    launcher.cloud.fates = [Fate(lives=3000.0), Fate(lives=2000.0)]
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 3
    third = launcher.cloud.all_machines[2]
    assert third.done_before > 3000
    assert third.run_words == launcher.cloud.all_machines[0].run_words
    assert (launcher.folder / "ro1" / "result.json").is_file()
    assert not launcher.cloud.machines


def test_a_machine_that_never_answers_is_replaced(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(silent=True)]
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 2
    assert not launcher.cloud.machines


def test_two_machines_that_never_answer_end_the_launch(launcher: Launcher) -> None:
    """A blocked port: fifty machines in turn would cost $251."""
    launcher.cloud.fates = [Fate(silent=True) for _ in range(50)]
    assert launcher.train() == 1
    assert len(launcher.cloud.all_machines) == 2
    assert "tcp:22" in launcher.record().reason
    assert launcher.cloud.billed_seconds < 3600
    assert not launcher.cloud.machines


def windows(launcher: Launcher, *kinds: str, after: float, seconds: float) -> None:
    begin = launcher.cloud.clock.now() + after
    launcher.cloud.windows = [(kind, begin, begin + seconds) for kind in kinds]


@pytest.mark.parametrize("kind", ["offline", "logged_out", "no_ssh"])
@pytest.mark.parametrize("hours", [1, 9])
def test_an_outage_of_the_laptop_leaves_the_run_alone(launcher: Launcher, kind: str, hours: int) -> None:
    launcher.cloud.work = 12 * 3600.0
    windows(launcher, kind, after=3000.0, seconds=hours * 3600.0)
    assert launcher.train("poll_seconds=120") == 0
    assert len(launcher.cloud.all_machines) == 1
    assert launcher.cloud.deleted_running == []
    assert (launcher.folder / "ro1" / "result.json").is_file()
    assert not launcher.cloud.machines


def test_a_run_that_ends_while_ssh_is_blocked_is_found_in_the_bucket(launcher: Launcher) -> None:
    windows(launcher, "no_ssh", after=1500.0, seconds=1e6)
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 1
    assert launcher.cloud.billed_seconds < launcher.cloud.work + 1800
    assert not launcher.cloud.machines


def test_a_machine_that_died_unseen_is_replaced_on_the_evidence_of_the_bucket(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(dies=1200.0)]
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 2
    assert any("renews its lease in the bucket no more" in line for line in launcher.said)
    assert not launcher.cloud.machines


@pytest.mark.parametrize("times", [1, 2])
def test_an_answer_that_the_machine_is_not_known_is_asked_again(launcher: Launcher, times: int) -> None:
    launcher.cloud.trouble = {call: "absent" for call in range(60, 60 + 2 * times)}
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 1
    assert launcher.cloud.deleted_running == []


LOCAL = ["--", "experiment=mistral7b_ro", "output_dir=outputs"]


def test_the_only_copy_of_a_result_keeps_its_machine_until_it_is_fetched(launcher: Launcher) -> None:
    """The disk here is full at the run's end; the same command fetches it when there is room."""
    windows(launcher, "full_disk", after=3800.0, seconds=20_000.0)
    assert launcher.train("spot=false", run=LOCAL) == 1
    (machine,) = launcher.cloud.machines.values()
    assert launcher.said[-1].startswith(f"NOT deleted: {machine.name} in z-a")
    assert "only copy of the results; the same command again fetches them" in launcher.said[-1]
    assert "gcloud compute tpus queued-resources delete" in launcher.said[-1]
    launcher.cloud.clock.sleep(20_000.0)
    assert launcher.train("spot=false", run=LOCAL) == 0
    assert (launcher.folder / "ro1" / "result.json").is_file()
    assert not launcher.cloud.machines
    assert launcher.cloud.deleted_copies == []


def test_down_keeps_the_only_copy_unless_it_is_told_to_lose_it(launcher: Launcher) -> None:
    windows(launcher, "full_disk", after=3800.0, seconds=1e6)
    assert launcher.train("spot=false", run=LOCAL) == 1
    assert launcher("down", "name=ro1") == 1
    assert launcher.cloud.machines
    assert launcher("down", "name=ro1", "fetch=skip") == 0
    assert not launcher.cloud.machines


def test_the_limit_of_money_ends_even_the_only_copy(launcher: Launcher) -> None:
    windows(launcher, "full_disk", after=3800.0, seconds=1e6)
    assert launcher.train("spot=false", "max_hours=2", run=LOCAL) == 1
    launcher.cloud.clock.sleep(4000.0)
    launcher.train("spot=false", "max_hours=2", run=LOCAL)
    assert not launcher.cloud.machines


def test_an_error_of_the_launcher_itself_leaves_the_run_and_says_what_costs(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Vm.look
    calls = []

    def failing(self: Vm, *words: object) -> object:
        calls.append(words)
        if len(calls) == 5:
            raise ValueError("a defect")
        return look(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(Vm, "look", failing)
    assert launcher.train() == 1
    (machine,) = launcher.cloud.machines.values()
    assert launcher.said[-1].startswith(f"NOT deleted: {machine.name} in z-a: ValueError: a defect; the same command")
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 1
    assert launcher.cloud.deleted_running == []


def test_a_full_disk_rents_nothing_and_does_not_end_a_run(launcher: Launcher) -> None:
    windows(launcher, "full_disk", after=0.0, seconds=100.0)
    assert launcher.train() == 1
    assert not launcher.cloud.all_machines
    assert launcher.said[-1].endswith("nothing is rented; give the same command again")
    windows(launcher, "full_disk", after=2000.0, seconds=1000.0)
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 1


def test_code_that_cannot_be_sent_rents_nothing(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeArchive, "check_archive", lambda self: code_sync.working_tree(tmp_path))
    assert launcher.train() == 2
    assert "is no git checkout" in capsys.readouterr().err
    assert not launcher.cloud.all_machines


def test_the_plan_sets_the_limit_of_dollars(launcher: Launcher) -> None:
    launcher.cloud.work = 1e9
    assert launcher.train("plan=first", "usd_per_chip_hour=1.5", "max_hours=999", planned=2.0) == 1
    assert "max_usd=36.00, 1.5 times the planned hours at the highest price of the zones" in launcher.said
    assert launcher.record().max_usd == 36.0
    assert 30.0 < launcher.record().usd_before <= 36.0
    assert not launcher.cloud.machines


def test_a_run_that_fails_ends_the_launch_with_its_log(launcher: Launcher) -> None:
    launcher.cloud.code = 1
    assert launcher.train() == 1
    assert launcher.record().reason == "the run ended with exit code 1"
    assert (launcher.folder / "ro1" / "logs" / "worker-0.log").is_file()
    assert not launcher.cloud.machines


def test_a_set_up_that_fails_twice_ends_the_launch(launcher: Launcher) -> None:
    launcher.cloud.setup_code = 3
    assert launcher.train() == 1
    assert launcher.record().outcome == "failed"
    assert not launcher.cloud.machines


@pytest.mark.parametrize("max_usd", [5.0, 20.0])
def test_the_limit_of_dollars_is_kept(launcher: Launcher, max_usd: float) -> None:
    launcher.cloud.work = 1e9
    launcher.cloud.fates = [Fate(lives=2500.0)] * 3
    assert launcher.train(f"max_usd={max_usd}", "usd_per_chip_hour=1.5") == 1
    assert launcher.record().outcome == "budget"
    assert launcher.cloud.billed_seconds / 3600 * 12 <= max_usd
    assert launcher.record().usd_before <= max_usd
    assert launcher.cloud.billed_seconds / 3600 * 12 > 0.6 * max_usd
    assert not launcher.cloud.machines


def test_the_limit_of_hours_is_kept_and_what_was_trained_is_saved(launcher: Launcher) -> None:
    launcher.cloud.work = 1e9
    assert launcher.train("max_hours=3") == 1
    assert 2.5 < launcher.cloud.billed_seconds / 3600 <= 3
    assert launcher.cloud.checkpoint > 8000


def test_ctrl_c_stops_the_run_and_deletes(launcher: Launcher) -> None:
    launcher.cloud.trouble = {60: "interrupt"}
    assert launcher.train() == 75
    assert launcher.record().outcome == "interrupted"
    assert launcher.cloud.all_machines[0].ended == 75
    assert not launcher.cloud.machines


@pytest.mark.parametrize("call", range(1, 40))
def test_ctrl_c_at_any_call_leaves_nothing(launcher: Launcher, call: int) -> None:
    launcher.cloud.trouble = {call: "interrupt"}
    launcher.cloud.work = 600.0
    assert launcher.train() in (0, 75)
    assert not launcher.cloud.machines


def test_a_second_ctrl_c_says_what_is_left_and_down_ends_it(launcher: Launcher) -> None:
    launcher.cloud.trouble = {60: "interrupt", 61: "interrupt"}
    assert launcher.train() == 1
    assert launcher.cloud.machines
    assert "tpu.py down name=ro1" in launcher.said[-1]
    assert launcher("down", "name=ro1") == 0
    assert not launcher.cloud.machines


def test_stop_from_another_terminal_ends_the_launch_with_75(launcher: Launcher) -> None:
    inner = launcher.cloud.run
    other = Launcher(launcher.cloud, launcher.folder)

    def stopping(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        if len(launcher.cloud.calls) == 50:
            launcher.cloud.calls.append([])
            assert other("stop", "name=ro1") == 0
        return inner(words, stdin=stdin, timeout=timeout)

    launcher.cloud.run = stopping  # type: ignore[method-assign]
    assert launcher.train() == 75
    assert launcher.record().outcome == "stopped"
    assert not launcher.cloud.machines


def test_a_finished_run_is_not_rented_for_again_after_the_laptop_slept(launcher: Launcher) -> None:
    """The machine deleted itself while nobody looked; its result is in the bucket."""
    launcher.cloud.trouble = {40: "kill"}
    with pytest.raises(Killed):
        launcher.train()
    launcher.cloud.clock.sleep(40_000)
    (machine,) = launcher.cloud.machines.values()
    launcher.cloud.delete(machine)
    assert launcher.train() == 0
    assert len(launcher.cloud.all_machines) == 1
    assert (launcher.folder / "ro1" / "result.json").is_file()


def test_several_hosts_are_set_up_looked_at_and_logged_alike(launcher: Launcher) -> None:
    launcher.cloud.num_workers = 4
    assert launcher.train("hw=v6e16") == 0
    (machine,) = launcher.cloud.all_machines
    assert len(machine.secrets) == 4
    logs = launcher.folder / "ro1" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [f"worker-{n}.log" for n in range(4)]


def test_secrets_go_through_stdin_and_nowhere_else(launcher: Launcher) -> None:
    assert launcher.train() == 0
    written = "".join(file.read_text() for file in launcher.folder.rglob("*") if file.is_file())
    words = " ".join(word for call in launcher.cloud.calls for word in call)
    for name, secret in SECRETS.items():
        bare = secret.split("'")[0]
        assert bare not in written + words + "".join(launcher.said)
        assert any(name in text and bare in text for text in launcher.cloud.all_machines[0].secrets)


def test_a_spot_run_must_write_to_a_bucket(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.train(run=["--", "experiment=mistral7b_ro"]) == 2
    assert "output_dir=gs://" in capsys.readouterr().err
    assert not launcher.cloud.calls
