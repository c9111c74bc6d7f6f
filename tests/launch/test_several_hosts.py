"""A slice of four workers whose runs do not end alike: which end counts, who is waited for, what is done then."""

from pathlib import Path

import pytest

from launch.tpu_vm.vm import STATUS_LINE, together, workers_of
from tests.launch.fake_slice import FakeSlice
from tests.launch.launcher import Launcher


class OfSlices(Launcher):
    cloud: FakeSlice


SLICE = ("hw=v6e16", "poll_seconds=10")


@pytest.fixture
def launcher(tmp_path: Path) -> OfSlices:
    return OfSlices(FakeSlice(num_workers=4), tmp_path)


def starts(launcher: OfSlices) -> int:
    return sum("worker.sh start" in word for call in launcher.cloud.calls for word in call)


def verdict(*words: str, stop: str = "no") -> tuple[str, int | None, bool]:
    """Of `running`, `lost`, or `CODE@SECONDS` for each worker."""
    lines = []
    for number, word in enumerate(words):
        code, _, at = word.partition("@")
        run = "exited" if at else word
        line = f"tpuexp worker={number} run={run} code={code if at else '-'} stop={stop} preempted=FALSE"
        lines.append(f"{line} bytes=0 at={at or '-'}")
    found = together(workers_of(STATUS_LINE.finditer("\n".join(lines))))
    return found.state, found.code, found.is_over


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("running", "running", "running", "running"), ("running", None, False)),
        (("0@9.5", "running", "0@9.1", "running"), ("running", None, False)),
        (("0@9", "0@9", "0@8", "0@9"), ("exited", 0, True)),
        (("running", "running", "1@9", "running"), ("exited", 1, False)),
        (("1@9.2", "1@9.3", "137@9.1", "1@9.25"), ("exited", 137, True)),
        (("2@9", "2@9", "2@9", "2@9"), ("exited", 2, True)),
        (("1@9", "1@9", "1@9", "75@8"), ("exited", 75, True)),
        (("1@9", "1@9", "lost", "1@9"), ("lost", None, True)),
        (("running", "75@8", "lost", "running"), ("lost", None, False)),
        (("0@9", "0@9", "none", "0@9"), ("lost", None, True)),
    ],
)
def test_the_first_that_failed_says_how_the_run_ended(words: tuple[str, ...], found: tuple[str, int, bool]) -> None:
    assert verdict(*words) == found


def test_after_a_request_to_stop_it_is_the_first_that_did_not_save() -> None:
    assert verdict("75@8", "75@8", "75@8", "75@8", stop="asked") == ("exited", 75, True)
    assert verdict("75@8", "1@9", "137@9.5", "75@8", stop="asked") == ("exited", 1, True)


@pytest.mark.parametrize(("code", "worker"), [("137", 2), ("1", 0), ("2", 3)])
def test_a_worker_that_fails_ends_the_launch_with_its_code_and_name(launcher: OfSlices, code: str, worker: int) -> None:
    launcher.cloud.ends = [{worker: (600.0, code)}]
    assert launcher.train(*SLICE) == 1
    assert launcher.record().reason == f"the run ended with exit code {code}"
    why = f"worker {worker} of 4 ended first, with {code} (logs/worker-{worker}.log)"
    assert sum(why in line for line in launcher.said) == 1
    assert starts(launcher) == 1
    assert not launcher.cloud.stopped_after  # the others have ended by themselves
    assert sorted(path.name for path in (launcher.folder / "ro1" / "logs").iterdir()) == [
        f"worker-{n}.log" for n in range(4)
    ]
    assert not launcher.cloud.machines


@pytest.mark.parametrize("end", ["75", "lost"])
def test_a_worker_that_was_stopped_or_restarted_starts_the_run_again_on_all(launcher: OfSlices, end: str) -> None:
    launcher.cloud.ends = [{1: (600.0, end)}]
    assert launcher.train(*SLICE) == 0
    assert starts(launcher) == 2
    assert launcher.record().outcome == "finished"
    assert len(launcher.cloud.all_machines) == 1
    assert any("worker 1 of 4" in line for line in launcher.said)


def test_a_worker_that_does_not_end_is_stopped_after_two_minutes(launcher: OfSlices) -> None:
    launcher.cloud.ends = [{2: (600.0, "1"), 3: (601.0, "deaf")}]
    assert launcher.train(*SLICE) == 1
    assert launcher.record().reason == "the run ended with exit code 1"
    (stopped_after,) = launcher.cloud.stopped_after
    assert 720 <= stopped_after < 780
    assert not launcher.cloud.machines


def test_workers_that_finish_one_by_one_are_all_waited_for(launcher: OfSlices) -> None:
    launcher.cloud.ends = [{0: (100.0, "0"), 1: (200.0, "0")}]
    assert launcher.train(*SLICE) == 0
    assert not launcher.cloud.stopped_after


def test_through_a_tunnel_all_workers_are_asked_to_stop_before_one_is_waited_for(launcher: OfSlices) -> None:
    launcher.cloud = FakeSlice(num_workers=64, work=1e9)
    assert launcher.train("hw=v6e256", "network=internal", "max_hours=2") == 1
    asked = [word for call in launcher.cloud.calls for word in call if "stop )" in word]
    assert [word.split("worker.sh ")[1].split(" )")[0] for word in asked] == ["ask-stop", "stop"]
