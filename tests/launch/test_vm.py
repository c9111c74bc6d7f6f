"""What the answers of several workers come to."""

from pathlib import Path

import pytest

from launch.tpu_vm.errors import RemoteError, UnreachableError
from launch.tpu_vm.gcloud import Target
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.vm import LEASE, Vm
from launch.tpu_vm.world import Completed, LocalFiles
from tpu_experiments.storage import lease

TARGET = Target(Settings(name="r"), "p", "z-a", "r-000000")


def vm_that_answers(*answers: Completed, num_workers: int = 4) -> Vm:
    left = list(answers)
    return Vm(
        lambda words, *, stdin="", timeout=0.0: left.pop(0),
        settings=TARGET.settings,
        num_workers=num_workers,
        say=print,
        scratch=Path(),
        files=LocalFiles(),
    )


def line(worker: int, run: str = "running", code: str = "-", *, at: str = "-", **given: str) -> str:
    stop, preempted = given.get("stop", "no"), given.get("preempted", "FALSE")
    return f"tpuexp worker={worker} run={run} code={code} stop={stop} preempted={preempted} bytes=7 at={at}\n"


def looked(*lines: str) -> tuple[str, int | None]:
    look = vm_that_answers(Completed(0, lines[0] + "a line\n"), Completed(0, "".join(lines))).look(TARGET, 0)
    assert (look.text, look.offset, look.is_all) == ("a line\n", 7, True)
    return look.state, look.code


def test_the_lease_that_shows_a_run_to_live_is_the_one_that_runs_renew() -> None:
    """The launcher imports nothing of the package; with another name no machine would ever be found dead."""
    assert LEASE == lease.NAME


def test_a_run_has_ended_when_all_have_or_one_has_failed() -> None:
    assert looked(*(line(n) for n in range(4))) == ("running", None)
    assert looked(*(line(n, "exited", "0") for n in range(4))) == ("exited", 0)
    assert looked(line(0), line(1, "exited", "0"), line(2), line(3)) == ("running", None)
    assert looked(line(0), line(1), line(2, "exited", "1"), line(3)) == ("exited", 1)
    assert looked(line(0), line(1, "lost"), line(2), line(3)) == ("lost", None)


def test_a_word_of_one_worker_holds_for_all() -> None:
    lines = line(0), line(1, stop="asked"), line(2, preempted="TRUE"), line(3)
    look = vm_that_answers(Completed(0, lines[0]), Completed(0, "".join(lines))).look(TARGET, 0)
    assert look.is_stop_asked
    assert look.is_preempted


def test_a_worker_that_does_not_answer_is_not_passed_over() -> None:
    with pytest.raises(UnreachableError, match="3 of 4"):
        looked(line(0), line(1), line(3))
    with pytest.raises(UnreachableError, match="timed out"):
        vm_that_answers(Completed(255, err="ssh: timed out")).look(TARGET, 0)


def test_a_command_that_fails_on_one_worker_is_distinguished_from_a_failed_ssh() -> None:
    vm_that_answers(Completed(0, "tpuexp-code=0\n" * 4)).remote(TARGET, "true")
    with pytest.raises(RemoteError, match="no space left"):
        vm_that_answers(Completed(0, "no space left\ntpuexp-code=1\n" + "tpuexp-code=0\n" * 3)).remote(TARGET, "x")
    with pytest.raises(UnreachableError):
        vm_that_answers(Completed(1, "tpuexp-code=0\n" * 3, err="ssh: 255")).remote(TARGET, "x")
