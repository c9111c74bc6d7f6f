"""The callbacks of conf/callbacks by themselves, with real commands, folders and clocks."""

import json
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import composed
from tpu_experiments.callbacks import copies
from tpu_experiments.callbacks.base import Checkpoint, Moment, Requests
from tpu_experiments.callbacks.commands import RunCommand
from tpu_experiments.callbacks.copies import CopyFolder
from tpu_experiments.callbacks.limits import StopAfter
from tpu_experiments.callbacks.metrics import WatchMetrics
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder

REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a command as text": (RunCommand, {"command": "echo x"}, "write the program and its arguments as a list"),
    "no program": (RunCommand, {"command": ["/no/such"]}, "there is no program /no/such on this machine"),
    "no event": (RunCommand, {"command": ["true"], "at": ["ends"]}, "'ends' is no event. Did you mean 'end'?"),
    "no place": (CopyFolder, {"to": "gs:/bucket"}, "neither a URL nor a usual path"),
    "no copy": (CopyFolder, {"to": "x", "keep": 0}, "keep=0; it must be a whole number, at least 1"),
    "no limit": (StopAfter, {}, "hours=null and usd=null; there is no limit"),
    "no hours": (StopAfter, {"hours": 0}, "hours=0; it must be a number above 0"),
    "no end": (StopAfter, {"hours": 1, "then": "halt"}, "then=halt; write end or stop"),
    "no price": (StopAfter, {"usd": 1, "price": "cheap"}, "price=cheap; write on_demand or spot"),
    "no range": (WatchMetrics, {"metrics": ["a"]}, "every value is inside; set one of both"),
    "metrics as text": (WatchMetrics, {"metrics": "a", "above": 1}, "write patterns over names of values as a list"),
    "no times": (
        WatchMetrics,
        {"metrics": ["a"], "above": 1, "times": 0},
        "times=0; it must be a whole number, at least 1",
    ),
    "seconds as text": (
        RunCommand,
        {"command": ["true"], "max_seconds": "30s"},
        "30s; it must be a number above 0, or",
    ),
    "seconds as a list": (
        RunCommand,
        {"command": ["true"], "max_seconds": [1]},
        "it must be a number above 0, or null",
    ),
    "seconds below 0": (
        RunCommand,
        {"command": ["true"], "max_seconds": -5},
        "-5; it must be a number above 0, or null",
    ),
    "endless seconds": (RunCommand, {"command": ["true"], "max_seconds": math.inf}, "inf; it must be a number above 0"),
    "a bound as text": (WatchMetrics, {"metrics": ["a"], "above": "ten"}, "above=ten; it must be a number, or null"),
    "a bound of NaN": (WatchMetrics, {"metrics": ["a"], "below": math.nan}, "below=nan; it must be a number, or null"),
    "a pattern of a number": (
        WatchMetrics,
        {"metrics": [1], "above": 1},
        "write patterns over names of values as a list",
    ),
    "half a time": (WatchMetrics, {"metrics": ["a"], "above": 1, "times": 1.5}, "times=1.5; it must be a whole number"),
    "half a copy": (CopyFolder, {"to": "x", "keep": 1.5}, "keep=1.5; it must be a whole number, at least 1"),
    "checkpoints as text": (CopyFolder, {"to": "x", "checkpoints": "no"}, "checkpoints=no; write true or false"),
    "hours as text": (StopAfter, {"hours": "six"}, "hours=six; it must be a number above 0"),
}


def moment(folder: Path, *, step: int = 3, config: Config | None = None, **given: Any) -> Moment:
    """A run that trains to `folder`."""
    facts: dict[str, Any] = {"stage": "main", "stage_step": step, "tokens": 64 * step, "metrics": {}}
    facts |= {"metrics_step": step, "hours": 0.5, "usd": {"on_demand": None, "spot": None}, "_requests": Requests()}
    facts |= {"metric_steps": dict.fromkeys(given.get("metrics", {}), step)}
    own = RunFolder(str(folder), "x")
    return Moment(
        callback="mine", step=step, total_steps=9, run_folder=own, config=config or Config(), **{**facts, **given}
    )


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_in_a_sentence(name: str) -> None:
    kind, options, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        kind(**options)


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_command_reads_each_event_and_no_call_waits_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "told"
    slow = f"import sys, time; time.sleep(0.3); open({str(file)!r}, 'a').write(sys.stdin.read() + '\\n')"
    callback = RunCommand(command=[sys.executable, "-S", "-c", slow], at=["start", "evaluate", "end"])
    began = time.monotonic()
    callback.on_start(moment(tmp_path, step=0))
    callback.on_evaluate(moment(tmp_path, metrics={"eval/loss": math.nan}), {"eval/loss": 2.5})
    callback.on_save(moment(tmp_path), Checkpoint(3, "nowhere"))
    assert time.monotonic() - began < 0.3
    callback.on_end(moment(tmp_path), "failed", "the TPU stopped working")
    first, second, third = told(file)
    assert (first["event"], first["text"]) == ("start", "x begins, of 9 steps")
    assert second["text"] == "x, step 3: held-out loss 2.5000"
    assert second["metrics"] == {"eval/loss": None}
    assert third["text"] == "x failed after step 3: the TPU stopped working"
    assert third["ended"] == "failed"
    assert not caplog.records


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["sh", "-c", "echo no route >&2; exit 7"], "exit code 7: no route"),
        (["sleep", "30"], "it took more than 0.2 s"),
        (["sh", "-c", r"printf 'no route \377' >&2; exit 7"], "exit code 7: no route \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_command_that_fails_is_logged(
    command: list[str], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = RunCommand(command=command, max_seconds=0.2)
    callback.on_end(moment(tmp_path), "finished", "")
    (record,) = caplog.records
    assert problem in record.message
    assert record.message.startswith("callbacks.mine: ")


def test_a_command_reads_why_a_run_failed_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "told"
    write = f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read() + '\\n')"
    callback = RunCommand(command=[sys.executable, "-S", "-c", write])
    callback.on_end(moment(tmp_path), "failed", "no answer from https://me:hunter2secret9@hub.lab/data")
    (end,) = told(file)
    assert end["text"] == "x failed after step 3: no answer from https://REDACTED@hub.lab/data"


def test_no_error_of_a_thread_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = RunCommand(command=["echo", "a\0b"], max_seconds=None)  # a ValueError of subprocess
    callback.on_end(moment(tmp_path), "finished", "")
    (record,) = caplog.records
    assert record.message == "callbacks.mine: echo failed (ValueError: embedded null byte)"


def test_a_run_that_was_asked_to_stop_waits_for_no_command_that_has_not_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, begun = tmp_path / "told", tmp_path / "begun"
    slow = f"import sys, time; open({str(begun)!r}, 'w'); time.sleep(0.3); "
    slow += f"open({str(file)!r}, 'a').write(sys.stdin.read() + '\\n')"
    callback = RunCommand(command=[sys.executable, "-S", "-c", slow], at=["evaluate", "end"])
    for step in range(4):
        callback.on_evaluate(moment(tmp_path, step=step), {"eval/loss": 2.5})
    while not begun.exists():
        time.sleep(0.01)
    callback.on_end(moment(tmp_path), "stopped", "")
    assert [each["event"] for each in told(file)] == ["evaluate", "end"]
    assert [record.message for record in caplog.records] == [
        "callbacks.mine: 3 events are not told: the run was asked to stop"
    ]


def checkpoint(folder: Path, step: int) -> Checkpoint:
    place = folder / "x" / "checkpoints" / f"step_{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("COMMIT.json", "parameters.safetensors", "progress.json"):
        (place / name).write_text(f"{name} of {step}")
    return Checkpoint(step, str(place))


@pytest.mark.parametrize("remote", [False, True], ids=["local", "memory"])
def test_checkpoints_and_the_export_are_copied(tmp_path: Path, remote: bool) -> None:
    to = f"memory://{tmp_path.name}" if remote else str(tmp_path / "copies")
    callback = CopyFolder(to=to, keep=2)
    for step in (2, 4, 6):
        callback.on_save(moment(tmp_path), checkpoint(tmp_path, step))
        assert callback._last is not None
        callback._last.join()
    (tmp_path / "x" / "adapter").mkdir()
    (tmp_path / "x" / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "x" / "generator").mkdir()
    (tmp_path / "x" / "generator" / "config.json").write_text("{}")
    result = {"status": "finished", "parts": {"generator": str(tmp_path / "x" / "generator")}}
    (tmp_path / "x" / "result.json").write_text(json.dumps(result))
    callback.on_end(moment(tmp_path), "finished", "")
    assert paths.list_names(paths.join(to, "x", "checkpoints")) == ["step_00000004", "step_00000006"]
    newest = paths.join(to, "x", "checkpoints", "step_00000006")
    assert len(paths.list_names(newest)) == 3
    assert paths.read_text(paths.join(newest, "COMMIT.json")) == "COMMIT.json of 6"
    assert paths.read_text(paths.join(to, "x", "adapter", "adapter_config.json")) == "{}"
    assert paths.exists(paths.join(to, "x", "generator", "config.json"))
    assert paths.exists(paths.join(to, "x", "result.json"))
    if remote:  # and back, from a bucket
        back = CopyFolder(to=str(tmp_path / "back"))
        back.on_save(moment(tmp_path), Checkpoint(6, newest))
        back.on_end(moment(tmp_path), "stopped", "")
        assert (tmp_path / "back/x/checkpoints/step_00000006/progress.json").read_text() == "progress.json of 6"


@pytest.mark.parametrize("remote", [False, True], ids=["local", "memory"])
def test_copies_behind_a_rollback_and_of_a_step_that_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """Later copies go, as do incomplete ones; while a step is copied again, its copy does not count."""
    to = f"memory://{tmp_path.name}-again" if remote else str(tmp_path / "copies")
    folder, complete = paths.join(to, "x", "checkpoints"), []
    callback, copy_one = CopyFolder(to=to, keep=9), copies.copy_one

    def save(step: int) -> None:
        callback.on_save(moment(tmp_path, step=step), checkpoint(tmp_path, step))
        assert callback._last is not None
        callback._last.join()

    def watched(source: str, target: str) -> None:
        complete.append(paths.exists(paths.join(paths.folder_of(target), "COMMIT.json")))
        copy_one(source, target)

    for step in (4, 6, 8):
        save(step)
    paths.make_dirs(paths.join(folder, "step_00000002"))
    paths.write_text_atomic(paths.join(folder, "step_00000002", "progress.json"), "{}")  # of a copy that was killed
    monkeypatch.setattr(copies, "copy_one", watched)
    save(6)
    assert complete == [False] * 3
    assert paths.list_names(folder) == ["step_00000004", "step_00000006"]


def test_of_checkpoints_that_come_during_a_copy_the_newest_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    callback, begun, goes_on = CopyFolder(to=str(tmp_path / "copies"), keep=9), threading.Event(), threading.Event()
    copy_one = copies.copy_one

    def slow(source: str, target: str) -> None:
        begun.set()
        assert goes_on.wait(30)
        copy_one(source, target)

    monkeypatch.setattr(copies, "copy_one", slow)
    callback.on_save(moment(tmp_path), checkpoint(tmp_path, 2))
    assert begun.wait(30)
    for step in (4, 6):
        callback.on_save(moment(tmp_path), checkpoint(tmp_path, step))
    goes_on.set()
    callback.on_end(moment(tmp_path), "failed", "x")
    assert paths.list_names(str(tmp_path / "copies/x/checkpoints")) == ["step_00000002", "step_00000006"]
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "callbacks.mine: checkpoint of step 4 is not copied: one before it still is, and that of step 6 waits"
    ]


def test_a_checkpoint_that_retention_removes_meanwhile_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").mkdir()
    callback = CopyFolder(to=str(tmp_path / "copies"))
    callback.on_save(moment(tmp_path), Checkpoint(2, str(tmp_path / "gone")))
    callback.on_end(moment(tmp_path), "failed", "x")
    assert "was removed before it was copied; raise checkpoint.keep_last" in caplog.text


def test_a_place_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    callback = CopyFolder(to=str(tmp_path / "file" / "below"))
    callback.on_save(moment(tmp_path), checkpoint(tmp_path, 2))
    callback.on_end(moment(tmp_path), "failed", "x")
    assert "checkpoint of step 2 is not copied (" in caplog.text


def test_a_run_is_not_copied_onto_itself(tmp_path: Path) -> None:
    for to, output_dir in ((f"{tmp_path}/", f"{tmp_path}"), (f"{tmp_path}", f"{tmp_path}/sweeps/s")):
        config = composed(f"output_dir={output_dir}")
        with pytest.raises(ConfigError, match="it is output_dir"):
            CopyFolder(to=to).check(config)
        CopyFolder(to=str(tmp_path / "copies")).check(config)


def copied(to: str, folder: Path, step: int, *, callback: CopyFolder | None = None) -> CopyFolder:
    """Copy a checkpoint of the run in `folder`, as one process does."""
    callback = callback or CopyFolder(to=to)
    callback.on_save(moment(folder, step=step), checkpoint(folder, step))
    assert callback._last is not None
    callback._last.join()
    return callback


@pytest.mark.parametrize("remote", [False, True], ids=["local", "memory"])
def test_the_copy_of_another_run_or_of_a_lost_folder_is_not_touched(
    tmp_path: Path, remote: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And is refused at the start; a run that goes on from its checkpoint, or whose folder is copied back, is not."""
    to = f"memory://{tmp_path.name}-whose" if remote else str(tmp_path / "copies")
    config = composed(f"output_dir={tmp_path / 'a'}", "name=x")
    CopyFolder(to=to).check(config)
    for step in (4000, 5000):
        copied(to, tmp_path / "a", step)
        CopyFolder(to=to).check(config)
    kept = ["step_00004000", "step_00005000"]
    sentence = "has a copy, up to step 5000, of another run, or of this one before .*a/x was lost; copy it there"
    shutil.rmtree(tmp_path / "a" / "x" / "checkpoints")
    with pytest.raises(ConfigError, match=sentence):
        CopyFolder(to=to).check(config)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ConfigError, match=sentence):
        CopyFolder(to=to).check(config)
    for folder in ("a", "b"):  # the lost one begins anew, and another run
        callback = copied(to, tmp_path / folder, 100)
        assert "checkpoint of step 100 is not copied (ConfigError: to=" in caplog.messages[-1]
        with pytest.raises(ConfigError, match="of another run"):
            callback.on_end(moment(tmp_path / folder), "finished", "")
    assert paths.list_names(paths.join(to, "x", "checkpoints")) == kept
    paths.remove_tree(paths.join(to, "x", "origin.json"))
    with pytest.raises(ConfigError, match=sentence):
        CopyFolder(to=to).check(config)


def test_a_copy_is_copied_back(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "identity.json").write_text("{}")
    to = str(tmp_path / "copies")
    copied(to, tmp_path, 4)
    shutil.rmtree(tmp_path / "x")
    shutil.copytree(tmp_path / "copies" / "x", tmp_path / "x")
    assert RunFolder(str(tmp_path), "x").exists()
    CopyFolder(to=to).check(composed(f"output_dir={tmp_path}", "name=x"))
    copied(to, tmp_path, 6)
    assert paths.list_names(f"{to}/x/checkpoints") == ["step_00000004", "step_00000006"]


def test_later_copies_that_this_process_has_not_made_stay(tmp_path: Path) -> None:
    """It goes on from an earlier step where its newest checkpoint was lost; the copy has it still."""
    to = str(tmp_path / "copies")
    for step in (4, 8):
        copied(to, tmp_path, step)
    callback = copied(to, tmp_path, 6)
    assert paths.list_names(f"{to}/x/checkpoints") == ["step_00000004", "step_00000006", "step_00000008"]
    copied(to, tmp_path, 10, callback=callback)
    assert paths.list_names(f"{to}/x/checkpoints") == ["step_00000008", "step_00000010"]


def test_points_of_two_sweeps_have_two_copies(tmp_path: Path) -> None:
    to = str(tmp_path / "copies")
    for sweep in ("one", "two"):
        copied(to, tmp_path / "sweeps" / sweep, 4)
        assert paths.list_names(f"{to}/sweeps/{sweep}/x/checkpoints") == ["step_00000004"]


def test_a_copy_that_cannot_be_read_keeps_no_run_from_its_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    CopyFolder(to=str(tmp_path / "file" / "below")).check(composed(f"output_dir={tmp_path}"))
    assert "cannot be read (NotADirectoryError" in caplog.text


def test_a_run_folder_as_a_url_of_files_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = CopyFolder(to=f"file://{tmp_path / 'copies'}")
    own = RunFolder(f"file://{tmp_path}", "x")
    run = replace(moment(tmp_path), run_folder=own)
    place = Path(checkpoint(tmp_path, 2).path)
    (tmp_path / "x" / "result.json").write_text('{"status": "finished"}')
    callback.on_save(run, Checkpoint(2, f"file://{place}"))
    callback.on_end(run, "finished", "")
    assert (tmp_path / "copies/x/checkpoints" / place.name / "COMMIT.json").exists()
    assert (tmp_path / "copies/x/result.json").exists()
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_limits(tmp_path: Path) -> None:
    dollars: Mapping[str, float | None] = {"on_demand": 12.0, "spot": 3.0}
    for options, kind, why in (
        ({"hours": 0.6}, None, ""),
        ({"hours": 0.5}, "end", "callbacks.mine: 0.5 hours have reached hours=0.5"),
        ({"hours": 0.4, "then": "stop"}, "stop", "callbacks.mine: 0.5 hours have reached hours=0.4"),
        ({"usd": 11}, "end", "callbacks.mine: 12.00 dollars have reached usd=11"),
        ({"usd": 11, "price": "spot"}, None, ""),
    ):
        now = moment(tmp_path, usd=dollars)
        StopAfter(**options).on_step_end(now)  # type: ignore[arg-type]
        assert (now._requests.kind, now._requests.why) == (kind, why)
    with pytest.raises(ConfigError, match="hw=cpu has no price on_demand; set hours="):
        StopAfter(usd=1).check(composed("hw=cpu"))
    StopAfter(usd=1).check(composed("hw=v6e8", "task=plan"))


def test_values_outside_a_range_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = WatchMetrics(metrics=["norms/grad_*", "no_such"], above=2.0, below=0.1, times=2, then="end")
    asked = Requests()
    for step, value in enumerate([3.0, 1.0, 3.0, 3.0, 3.0, 0.01, 0.01], start=1):
        if step == 4:  # a resume in between
            state = json.loads(json.dumps(callback.state_dict()))
            callback = WatchMetrics(metrics=["norms/grad_*", "no_such"], above=2.0, below=0.1, times=2, then="end")
            callback.load_state_dict(state)
        now = moment(tmp_path, step=step, metrics={"norms/grad_q": value, "train/loss": 9.0}, _requests=asked)
        callback.on_step_end(now)
        callback.on_step_end(now)  # no new record
        assert (asked.kind is not None) is (step >= 4)
    assert asked.why == "callbacks.mine: norms/grad_q=3 is above 2, 2 records in a row"
    callback.on_evaluate(now, {"norms/grad_eval": math.nan})
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "step 4: norms/grad_q=3 is above 2, 2 records in a row"
    ]
    callback.on_end(now, "finished", "")
    assert "no logged value has a name like no_such" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_a_value_counts_once_however_many_records_come_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Norms are in some records alone; an evaluation before training has its own step."""
    callback = WatchMetrics(metrics=["norms/grad_q", "eval/loss"], above=2.0, times=2)
    for step, logged in ((2, 2), (4, 2), (6, 2), (8, 8)):
        values, steps = {"norms/grad_q": 3.0, "train/loss": 9.0}, {"norms/grad_q": logged, "train/loss": step}
        callback.on_step_end(moment(tmp_path, step=step, metrics=values, metric_steps=steps))
        assert len(caplog.records) == int(step == 8)
    callback = WatchMetrics(metrics=["eval/loss"], above=2.0)
    callback.on_evaluate(moment(tmp_path, step=0, metrics_step=-1), {"eval/loss": 3.0})
    assert "step 0: eval/loss=3 is above 2" in caplog.text
