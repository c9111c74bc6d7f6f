"""up, run, logs, status, down, load_data and --dry-run, against the fake cloud."""

import os
from pathlib import Path

import pytest

from launch.tpu_vm.cli import main
from launch.tpu_vm.code_sync import ROOT
from launch.tpu_vm.world import Completed
from tests.launch.fake_cloud import FakeCloud, Fate, SimulatedClock
from tests.launch.launcher import RUN, SECRETS, Launcher

GOLDEN = Path(__file__).parents[1] / "golden" / "launch" / "train.txt"
MACHINE = ("hw=v6e8", "zones=z-a,z-b", "name=ro1")


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(FakeCloud(SimulatedClock(), work=900.0), tmp_path)


def test_a_machine_stays_after_up_and_runs_one_after_the_other(launcher: Launcher) -> None:
    assert launcher("up", *MACHINE) == 0
    assert "costs until" in launcher.said[-1]
    (machine,) = launcher.cloud.machines.values()
    assert machine.is_set_up
    assert not machine.run_id
    assert launcher("run", "name=ro1", run=RUN) == 0
    first = machine.run_id
    launcher.cloud.checkpoint = 0.0
    assert launcher("run", "name=ro1", run=[*RUN, "seed=1"]) == 0
    assert machine.run_id != first
    assert "seed=1 hw=v6e8 name=ro1" in machine.run_words
    assert launcher.cloud.machines
    assert launcher("down", "name=ro1") == 0
    assert not launcher.cloud.machines
    assert launcher.record().usd_before > 0


def test_ctrl_c_in_run_leaves_the_run_alone(launcher: Launcher) -> None:
    assert launcher("up", *MACHINE) == 0
    launcher.cloud.trouble = {len(launcher.cloud.calls) + 12: "interrupt"}
    assert launcher("run", "name=ro1", run=RUN) == 75
    (machine,) = launcher.cloud.machines.values()
    assert machine.ended is None
    assert "the run continues and costs money" in launcher.said[-1]
    assert launcher("run", "name=ro1", run=RUN) == 0
    assert machine.run_id.endswith("-1-1")


def test_another_run_on_a_busy_machine_is_refused(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher("up", *MACHINE) == 0
    launcher.cloud.trouble = {len(launcher.cloud.calls) + 12: "interrupt"}
    launcher("run", "name=ro1", run=RUN)
    assert launcher("run", "name=ro1", run=[*RUN, "seed=2"]) == 2
    assert "it is running" in capsys.readouterr().err
    assert launcher("up", "hw=v5e8", "name=ro1") == 2
    assert "has rented hw=v6e8" in capsys.readouterr().err


def test_logs_ends_with_the_run(launcher: Launcher) -> None:
    assert launcher("up", *MACHINE) == 0
    assert launcher("run", "name=ro1", run=RUN) == 0
    assert launcher("logs", "name=ro1") == 0
    assert launcher.said[-1] == "the run ended with exit code 0"


def test_status_shows_what_costs_and_down_asks_before_it_deletes_what_it_did_not_make(launcher: Launcher) -> None:
    assert launcher("up", *MACHINE) == 0
    (machine,) = launcher.cloud.machines.values()
    assert launcher("status", "zones=z-a,z-b") == 0
    text = "\n".join(launcher.said)
    assert machine.name in text
    assert "now $14.26/h" in text
    (launcher.folder / "launch" / "ro1.json").unlink()
    assert launcher("down", f"name={machine.name}", "zones=z-a,z-b", "yes=false") == 2
    assert f"{machine.name} in z-a was not made here; delete it?" in launcher.said[-1]
    assert launcher.cloud.machines
    launcher.answers = ["y"]
    assert launcher("down", f"name={machine.name}", "zones=z-a,z-b", "yes=false") == 0
    assert not launcher.cloud.machines
    assert launcher("status", "zones=z-a,z-b") == 0
    assert "nothing is left that costs money" in launcher.said


def test_renting_is_asked_for(launcher: Launcher) -> None:
    assert launcher("up", *MACHINE, "yes=false", "max_usd=9") == 2
    assert launcher.said[-1].startswith("rent v6e-8, up to $25.92/h; at most 24 h and $9.00?")
    assert not launcher.cloud.machines


def test_a_machine_that_was_taken_away_under_up_is_replaced_by_run(launcher: Launcher) -> None:
    launcher.cloud.fates = [Fate(lives=1000.0)]
    assert launcher("up", *MACHINE) == 0
    launcher.cloud.clock.sleep(5000)
    assert launcher("run", "name=ro1", run=RUN) == 0
    assert len(launcher.cloud.all_machines) == 2


def test_one_launcher_at_a_time(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    inner, codes = launcher.cloud.run, []
    other = Launcher(launcher.cloud, launcher.folder)

    def second(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        if len(launcher.cloud.calls) == 5 and not codes:
            codes.append(None)
            codes[0] = other("down", "name=ro1")
        return inner(words, stdin=stdin, timeout=timeout)

    launcher.cloud.run = second  # type: ignore[method-assign]
    assert launcher("up", *MACHINE) == 0
    assert codes == [2]
    assert "drives it" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_or_costs_too_much_rents_nothing(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = '{"fits": true, "hours": 9.0, "usd": {"spot": 128.3, "on_demand": 213.0}, "method": "compiled"}'

    def planned(words: list[str], **kwargs: object) -> int:
        assert words[2:4] == ["task=plan", "experiment=mistral7b_ro"]
        assert words[-1] == f"output_dir={launcher.folder}"
        file = launcher.folder / "plans" / "ro1" / "plan.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return 0

    monkeypatch.setattr("launch.tpu_vm.job.subprocess.call", planned)
    assert launcher.train("plan=first", "max_usd=60") == 2
    assert "the plan says $128.30" in capsys.readouterr().err
    content = content.replace("true", "false")
    assert launcher.train("plan=first", "max_usd=600") == 2
    assert "does not fit" in capsys.readouterr().err
    assert not launcher.cloud.all_machines


def test_shards_go_to_a_bucket_or_to_a_disk_whose_loader_is_always_deleted(launcher: Launcher) -> None:
    launcher.cloud.answer = lambda words, stdin: Completed(0)  # type: ignore[method-assign]
    assert launcher("load_data", "source=outputs/prepared", "bucket=gs://bkt/prepared") == 0
    assert launcher.cloud.calls == [
        ["gcloud", "storage", "rsync", "--recursive", "outputs/prepared", "gs://bkt/prepared"]
    ]
    disk = ("source=gs://bkt/prepared", "data_disk=shards", "zones=z-a", "hw=v6e8")
    assert launcher("load_data", *disk) == 0
    verbs = [" ".join(call[2:4]) for call in launcher.cloud.calls[1:]]
    assert verbs == ["disks create", "instances create", "ssh shards-loader", "instances delete", "disks update"]
    launcher.cloud.answer = lambda words, stdin: (
        Completed(1, err="PERMISSION_DENIED") if "ssh" in words else Completed(0)
    )  # type: ignore[method-assign]
    assert launcher("load_data", *disk) == 1
    assert launcher.cloud.calls[-1][2:4] == ["instances", "delete"]


def test_a_private_repository_is_cloned_with_a_key_that_was_shown_and_waited_for(launcher: Launcher) -> None:
    clone = ("code=clone", "repo=git@github.com:me/x.git", "ref=v1", "yes=false")
    launcher.answers = ["y", "n"]
    assert launcher.train(*clone) == 2
    assert not launcher.cloud.machines
    assert any("ssh-ed25519 " in line for line in launcher.said)
    launcher.answers = ["y", "y"]
    assert launcher.train(*clone) == 0
    launcher.answers = ["y"]
    assert launcher.train(*clone) == 0
    key = (launcher.folder / "launch" / "keys" / "git-github-com-me-x-git" / "deploy_key").read_text()
    assert key in launcher.cloud.stdins
    body = key.splitlines()[2]
    assert not any(body in word for call in launcher.cloud.calls for word in call)
    assert body not in "".join(launcher.said) + (launcher.folder / "launch" / "ro1.json").read_text()
    assert not any("scp" in call for call in launcher.cloud.calls)
    assert any("--branch v1 git@github.com:me/x.git" in word for call in launcher.cloud.calls for word in call)


def test_a_data_disk_is_attached_read_only_and_mounted(launcher: Launcher) -> None:
    assert launcher.train("zones=z-a", "data_disk=shards") == 0
    (machine,) = launcher.cloud.all_machines
    assert "--data-disk=source=projects/p/zones/z-a/disks/shards,mode=read-only" in machine.words
    assert any("worker.sh mount shards /mnt/data" in word for call in launcher.cloud.calls for word in call)


@pytest.mark.parametrize("command", ["up", "status", "load_data"])
def test_a_dry_run_of_the_others_changes_nothing(launcher: Launcher, command: str) -> None:
    words = {
        "up": (*MACHINE, "code=clone", "repo=git@github.com:me/x.git"),
        "status": ("zones=z-a",),
        "load_data": ("source=gs://bkt/x", "data_disk=d", "zones=z-a", "hw=v6e8"),
    }[command]
    launcher.env_file()
    before = sorted(launcher.folder.rglob("*"))
    assert launcher(command, "--dry-run", *words) == 0
    assert sorted(launcher.folder.rglob("*")) == before
    assert not launcher.cloud.calls
    assert any(line.startswith("$ gcloud") for line in launcher.said)


def test_ctrl_c_at_the_question_rents_nothing(launcher: Launcher) -> None:
    def interrupted(question: str) -> str:
        raise KeyboardInterrupt

    world = launcher.world()
    world.ask = interrupted
    words = ["up", *MACHINE, f"results={launcher.folder}", "project=p", f"env_file={launcher.env_file()}"]
    assert main(words, world) == 75
    assert not launcher.cloud.all_machines


def test_the_dry_run_of_train_is_the_golden_one(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "--dry-run", "hw=v6e8", "spot=true", "max_usd=60", "project=my-project", "env_file=empty.env"]
    launcher.env_file()
    monkeypatch.chdir(launcher.folder)
    before = sorted(launcher.folder.rglob("*"))
    assert main([*words, *RUN], launcher.world()) == 0
    assert sorted(launcher.folder.rglob("*")) == before
    assert not launcher.cloud.calls
    text = "\n".join(launcher.said).replace(str(ROOT), ".") + "\n"
    assert not any(secret.split("'")[0] in text for secret in SECRETS.values())
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text, encoding="utf-8")
    assert text.splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("place", ["gs://bucket/runs/first", "gs://bucket/runs/first/adapter", "hf://me/adapter@v1.0"])
def test_a_run_trains_on_from_an_adapter_in_a_bucket_or_on_the_hub(launcher: Launcher, place: str) -> None:
    run = [*RUN, f"start.run={place}", "start.take=weights"]
    assert launcher("train", "--dry-run", "hw=v6e8", "spot=true", "name=ro1", run=run) == 0
    planned = next(line for line in launcher.said if "task=plan" in line)
    started = next(line for line in launcher.said if "worker.sh start" in line)
    assert f" start.run={place} start.take=weights " in planned
    assert f" start.run={place} start.take=weights " in started
    assert launcher.train(run=run) == 0
    assert launcher.record().overrides[2:4] == (f"start.run={place}", "start.take=weights")


@pytest.mark.parametrize("place", ["outputs/first", "outputs/first/adapter/"])
def test_a_run_does_not_start_from_what_its_machine_does_not_have(
    launcher: Launcher, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(launcher.folder)
    words = ["train", "hw=v6e8", "spot=true", "name=ro1", "plan=skip", "project=p", "yes=true", "env_file=empty.env"]
    launcher.env_file()
    assert main([*words, *RUN, f"start.run={place}"], launcher.world()) == 2
    assert f"start.run={place}; it is a folder of this machine, and the VM has none of it" in capsys.readouterr().err
    assert not launcher.cloud.calls
