"""Callbacks in whole runs: what they are told and when, what they may ask for, what is kept, and what an error does."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.runs import REPOSITORY, SAME_SUMS, run
from tests.training.test_hosts import free_port
from tpu_experiments.storage import strict_json
from tpu_experiments.training.callbacks import from_json, to_json

LAB = '''
"""Writes down what it is told, and does what its options say."""

import json
import math
import os
import signal

from tpu_experiments.callbacks.base import Callback


class Recorder(Callback):
    def __init__(self, *, file, ask=None, at=0, when="on_step_end", kill=-1, fail=None, traffic=False):
        self.file, self.ask, self.at, self.when, self.kill = file, ask, at, when, kill
        self.fail, self.traffic, self.steps = fail, traffic, 0

    def write(self, event, run, **more):
        if self.fail == f"exit in {event}":
            raise SystemExit(3)
        if self.fail == event:
            raise OSError(f"no room for {event}")
        values = {"event": event, "step": run.step, "stage": run.stage, "tokens": run.tokens, "pid": os.getpid()}
        assert all(type(value) is float for value in run.metrics.values()), "host values alone"
        values |= {"metrics_step": run.metrics_step, "loss": run.metrics.get("train/loss"), "steps": self.steps}
        values |= {"metric_steps": [run.metric_steps.get(name) for name in ("train/loss", "eval/loss")]}
        values |= {"total": run.total_steps, "hours": run.hours, "name": run.run_folder.name, **more}
        if self.traffic:
            import torch_xla.debug.metrics as met

            values["transfers"] = (met.metric_data("TransferFromDeviceTime") or [0])[0]
        with open(self.file.format(name=run.run_folder.name), "a") as file:
            file.write(json.dumps(values) + "\\n")
        if (event, run.step) == (self.when, self.at) and self.ask:
            getattr(run, self.ask)("it is enough")
        if (event, run.step) == ("on_evaluate", self.kill):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_start(self, run):
        run.config.optim.clip_norm = 1e-9
        self.write("on_start", run)

    def on_step_end(self, run):
        self.steps += 1
        self.write("on_step_end", run)

    def on_evaluate(self, run, values):
        self.write("on_evaluate", run, eval_loss=values["eval/loss"], again=run.metrics["eval/loss"])

    def on_save(self, run, checkpoint):
        found = sorted(os.listdir(checkpoint.path))
        self.write("on_save", run, saved=checkpoint.step, is_whole="COMMIT.json" in found)

    def on_end(self, run, ended, why):
        there = os.path.exists(run.run_folder.result_path)
        self.write("on_end", run, ended=ended, why=why, has_result=there)

    def state_dict(self):
        if self.fail == "state_dict":
            return {"steps": object()}
        return {"steps": self.steps, "best": math.inf, "names": {1: 2} if self.fail == "names" else {}}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        assert state["best"] == math.inf


class Misspelt:
    def on_step(self, run):
        pass
'''
JOB = (
    *("debug=smoke", "data=sample_text", "curriculum=single", "hw.runtime=eager", "trainer.max_stage_steps=6"),
    *("trainer.max_eval_rows=2", "trainer.global_batch_rows=2", "trainer.log_every_steps=2", "trainer.seq_len=64"),
    *("trainer.eval_every_steps=3", "checkpoint.every_steps=2", "sample.max_new_tokens=0", "logger=[jsonl,console]"),
    *("checkpoint.keep_last=9", "trainer.norms_every_steps=0", "name=toy", "plugins=[call_lab]"),
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "call_lab.py").write_text(LAB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def recorder(tmp_path: Path, *, name: str = "mine", every: int = 1, on_error: str = "stop", **options: Any) -> str:
    """Word of a command with a Recorder."""
    words = {"file": str(tmp_path / "{name}.told"), **options}
    shown = ",".join(
        f"{key}: '{value}'" if isinstance(value, str) else f"{key}: {value}" for key, value in words.items()
    )
    settings = f"every: {every},on_error: {on_error},options: {{{shown}}}"
    return f"+callbacks={{{name}: {{_target_: call_lab.Recorder,{settings}}}}}"


def told(tmp_path: Path, name: str = "toy") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / f"{name}.told").read_text().splitlines()]


def of(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [record for record in records if record["event"] == event]


def ended(*words: str, output_dir: Path, code: int = 0) -> str:
    done = run(*words, output_dir=output_dir)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


@pytest.mark.usefixtures("lab")
def test_what_a_callback_is_told_alone_and_resumed(tmp_path: Path) -> None:
    """In order, once each, and in another life it goes on with what its checkpoint has; it changes no loss."""
    ended(*JOB, recorder(tmp_path, every=2), output_dir=tmp_path)
    found = told(tmp_path)
    assert [(record["event"], record["step"]) for record in found if record["event"] != "on_save"] == [
        *[("on_start", 0), ("on_evaluate", 0), ("on_step_end", 2), ("on_evaluate", 3), ("on_step_end", 4)],
        *[("on_step_end", 6), ("on_evaluate", 6), ("on_end", 6)],
    ]
    assert [record["saved"] for record in of(found, "on_save")] == [2, 4, 6]
    assert all(record["is_whole"] for record in of(found, "on_save"))
    assert found[-1]["ended"] == "finished"
    assert found[-1]["has_result"]
    assert found[-1]["why"] == ""
    by_step = of(found, "on_step_end")
    assert [record["metrics_step"] for record in by_step] == [2, 4, 6], "plain torch has each record at once"
    assert [record["metric_steps"] for record in by_step] == [[2, 0], [4, 3], [6, 3]]
    assert [record["loss"] for record in by_step] == losses(tmp_path / "toy")
    assert {record["eval_loss"] == record["again"] for record in of(found, "on_evaluate")} == {True}
    assert {record["total"] for record in found} == {6}
    assert found[0]["hours"] > 0
    first = losses(tmp_path / "toy")
    ended(*JOB, "name=without", output_dir=tmp_path)
    assert losses(tmp_path / "without") == first, "a config that a callback changes is a copy"
    (tmp_path / "toy" / "result.json").unlink()
    for step in (4, 6):
        shutil.rmtree(tmp_path / "toy" / "checkpoints" / f"step_{step:08d}")
    (tmp_path / "toy.told").unlink()
    ended(*JOB, recorder(tmp_path), output_dir=tmp_path)
    found = told(tmp_path)
    assert (found[0]["event"], found[0]["step"], found[0]["steps"]) == ("on_start", 2, 1)
    assert [record["steps"] for record in of(found, "on_step_end")] == [2, 3, 4, 5]
    assert losses(tmp_path / "toy") == first
    assert "was finished before" in ended(*JOB, recorder(tmp_path), output_dir=tmp_path)
    assert len(told(tmp_path)) == len(found), "a finished run calls nobody"


@pytest.mark.usefixtures("lab")
def test_a_run_is_ended_with_its_export(tmp_path: Path) -> None:
    """Its later stages are not begun, and the same command finds it finished."""
    two = ("data=[sample_text,sample_chat]", "curriculum=text_then_chat")
    said = ended(*JOB, *two, recorder(tmp_path, ask="end", at=3), output_dir=tmp_path)
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    assert [(stage["name"], stage["steps"]) for stage in result["stages"]] == [("text", 3)]
    assert result["stages"][0]["ended_by"] == "callbacks.mine: it is enough"
    assert "callbacks.mine: it is enough" in said
    assert (tmp_path / "toy" / "adapter" / "adapter_model.safetensors").exists()
    assert told(tmp_path)[-1]["ended"] == "finished"
    assert of(told(tmp_path), "on_evaluate")[-1]["step"] == 3
    assert "was finished before" in ended(*JOB, *two, output_dir=tmp_path)
    shutil.rmtree(tmp_path / "toy" / "adapter")
    (tmp_path / "toy" / "result.json").unlink()  # a kill between its last checkpoint and the export
    ended(*JOB, *two, output_dir=tmp_path)
    again = json.loads((tmp_path / "toy" / "result.json").read_text())
    assert again["stages"] == result["stages"]
    assert again["eval_loss"] == result["eval_loss"]


@pytest.mark.usefixtures("lab")
def test_a_stage_that_was_ended_and_killed_ends_as_a_stage_does(tmp_path: Path) -> None:
    """With its evaluation, also where the run was killed in that; the second life's checkpoint has that it is ended."""
    for step in (4, 5):
        ended(*JOB, recorder(tmp_path, ask="end", at=5, kill=5), output_dir=tmp_path, code=-9)
        assert max((tmp_path / "toy" / "checkpoints").glob("step_*")).name == f"step_{step:08d}"
    ended(*JOB, output_dir=tmp_path)
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    (stage,) = result["stages"]
    assert (stage["steps"], stage["ended_by"]) == (5, "callbacks.mine: it is enough")
    assert stage["eval_loss"] == result["eval_loss"]


@pytest.mark.usefixtures("lab")
def test_a_run_is_ended_where_it_resumes(tmp_path: Path) -> None:
    """In mid-stage, its stage is ended too."""
    ended(*JOB, recorder(tmp_path, ask="stop", at=4), output_dir=tmp_path, code=75)
    ended(*JOB, recorder(tmp_path, ask="end", at=4, when="on_start"), output_dir=tmp_path)
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    (stage,) = result["stages"]
    assert (stage["steps"], stage["ended_by"]) == (4, "callbacks.mine: it is enough")
    assert stage["eval_loss"] == result["eval_loss"]


@pytest.mark.usefixtures("lab")
def test_a_run_is_ended_between_two_stages(tmp_path: Path) -> None:
    """By what is asked for behind the first one's checkpoint, which then says so; it is not made longer."""
    two = (*JOB, "data=[sample_text,sample_chat]", "curriculum=text_then_chat", "schedule=constant")
    ended(*two, recorder(tmp_path, ask="end", at=6, when="on_save"), output_dir=tmp_path)
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    assert [(stage["name"], stage["steps"]) for stage in result["stages"]] == [("text", 6)]
    newest = tmp_path / "toy" / "checkpoints" / "step_00000006"
    assert json.loads((newest / "progress.json").read_text())["ended_by"] == "callbacks.mine: it is enough"


@pytest.mark.usefixtures("lab")
def test_a_run_that_was_ended_behind_its_last_step_is_made_longer(tmp_path: Path) -> None:
    job = (*JOB, "schedule=constant", "trainer.max_stage_steps=null")
    asks = recorder(tmp_path, ask="end", at=6, when="on_evaluate")
    ended(*job, "curriculum.stages.main.steps=6", asks, output_dir=tmp_path)
    ended(*job, "curriculum.stages.main.steps=8", output_dir=tmp_path)
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    assert [stage["steps"] for stage in result["stages"]] == [8]


@pytest.mark.usefixtures("lab")
def test_an_error_behind_the_last_checkpoint_ends_the_run(tmp_path: Path) -> None:
    words = (*JOB, "checkpoint.every_steps=0")
    said = ended(*words, recorder(tmp_path, fail="on_save"), output_dir=tmp_path, code=1)
    assert "stopped after step 6: callbacks.mine: on_save failed (OSError: no room for on_save)" in said
    ended(*words, output_dir=tmp_path)


@pytest.mark.usefixtures("lab")
def test_a_run_is_stopped_and_goes_on(tmp_path: Path) -> None:
    said = ended(*JOB, recorder(tmp_path, ask="stop", at=3), output_dir=tmp_path, code=75)
    assert "stopped by callbacks.mine: it is enough; the same command resumes from" in said
    last = told(tmp_path)[-1]
    assert (last["event"], last["ended"], last["why"]) == ("on_end", "stopped", "callbacks.mine: it is enough")
    assert (tmp_path / "toy" / "checkpoints" / "step_00000003" / "COMMIT.json").exists()
    assert of(told(tmp_path), "on_save")[-1]["saved"] == 3
    ended(*JOB, recorder(tmp_path, ask="stop", at=3), output_dir=tmp_path)
    assert told(tmp_path)[-1]["ended"] == "finished"


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("event", ["on_step_end", "state_dict", "names"])
def test_an_error_saves_and_ends_the_run(tmp_path: Path, event: str) -> None:
    said = ended(*JOB, recorder(tmp_path, every=3, fail=event), output_dir=tmp_path, code=1)
    reasons = {"on_step_end": "OSError: no room for on_step_end", "names": "TypeError: state['names'] has the name 1"}
    method = "on_step_end" if event == "on_step_end" else "state_dict"
    assert f"callbacks.mine: {method} failed ({reasons.get(event, 'TypeError')}" in said
    assert "let the run go on without it by on_error=warn" in said
    step = 3 if event == "on_step_end" else 2
    assert (tmp_path / "toy" / "checkpoints" / f"step_{step:08d}" / "COMMIT.json").exists()
    assert "Traceback" in (tmp_path / "toy" / "run.log").read_text()
    ended(*JOB, output_dir=tmp_path)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, "ten", math.inf, -math.inf, [1, [math.inf]], {"a": {"b": -math.inf}}, np.float32(0.1), {}],
)
def test_state_comes_back_as_it_was(value: Any) -> None:
    assert from_json(json.loads(strict_json.dumps(to_json(value, key="state")))) == value


def test_nan_and_tuples_come_back_as_nan_and_lists() -> None:
    first, second = from_json(json.loads(strict_json.dumps(to_json((math.nan, (1, 2)), key="state"))))
    assert math.isnan(first)
    assert second == [1, 2]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"seen": {1: 2}}, r"state\['seen'\] has the name 1, and JSON has texts alone; use str\(1\)"),
        ({"seen": [0, {1}]}, r"state\['seen'\]\[1\] is of type set, which JSON has not"),
        ({"mean": np.zeros(1)}, r"state\['mean'\] is of type ndarray"),
    ],
)
def test_state_that_json_would_change_is_refused_by_name(value: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        to_json(value, key="state")


@pytest.mark.usefixtures("lab")
def test_a_callback_that_exits_ends_no_run_unsaved(tmp_path: Path) -> None:
    said = ended(*JOB, recorder(tmp_path, fail="exit in on_evaluate", every=9), output_dir=tmp_path, code=1)
    assert "callbacks.mine: on_evaluate failed (SystemExit: 3)" in said
    ended(*JOB, recorder(tmp_path, fail="exit in on_step_end", on_error="warn"), output_dir=tmp_path)


@pytest.mark.usefixtures("lab")
def test_a_lost_run_is_restored_from_its_copy(tmp_path: Path) -> None:
    """Begun anew over its copy it is refused; with the copy in its place it goes on from there, as if never lost."""
    words = (*JOB, "callbacks=[copy]", f"callbacks.copy.options.to={tmp_path / 'copies'}")
    stops = recorder(tmp_path, ask="stop", at=4)
    ended(*words, stops, output_dir=tmp_path, code=75)
    shutil.rmtree(tmp_path / "toy")
    said = ended(*words, stops, output_dir=tmp_path, code=2)
    assert "has a copy, up to step 4, of another run, or of this one" in said
    assert not (tmp_path / "toy").exists()
    shutil.copytree(tmp_path / "copies" / "toy", tmp_path / "toy")
    assert "resumed at step 4" in ended(*words, stops, output_dir=tmp_path)
    assert of(told(tmp_path), "on_start")[-1]["steps"] == 4
    assert (tmp_path / "copies" / "toy" / "result.json").exists()


@pytest.mark.usefixtures("lab")
def test_errors_at_other_events(tmp_path: Path) -> None:
    """One at the start ends the run before its first step; with `warn`, and in on_end, the run goes on."""
    said = ended(*JOB, recorder(tmp_path, fail="on_start"), output_dir=tmp_path, code=1)
    assert "stopped after step 0: callbacks.mine: on_start failed" in said
    words = (
        recorder(tmp_path, fail="on_step_end", on_error="warn"),
        recorder(tmp_path, name="other", fail="on_end", file=str(tmp_path / "other.told")),
    )
    said = ended(*JOB, *words, output_dir=tmp_path)
    assert said.count("callbacks.mine: on_step_end failed (OSError: no room for on_step_end); the run goes on") == 6
    assert "callbacks.other: on_end failed" in said
    assert (tmp_path / "toy" / "result.json").exists()
    assert len(of(told(tmp_path, "other"), "on_step_end")) == 6


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("+callbacks={a: {_target_: call_lab.Misspelt}}", "on_step is no event; the events are on_start, on_step_end,"),
        ("+callbacks={a: {_target_: call_lab.LAB}}", "call_lab has no LAB"),
        (
            "+callbacks={a: {_target_: other_lab.X}}",
            "it is outside tpu_experiments, call_lab; to allow it add its package",
        ),
        ("+callbacks={a: {_target_: call_lab.Recorder}}", "Recorder says: TypeError"),
        ("+callbacks={a: {_target_: call_lab.Recorder, every: 0}}", "callbacks.a.every=0; it must be at least 1."),
        ("callbacks=[notify]", "callbacks.notify.options.command=???; it has no value"),
        ("callbacks=[limit]", "callbacks.limit.options="),
        ("callbacks=[nothing]", "notify"),
        ("callbacks.limit.options.hours=6", "limit is not selected; add it: 'callbacks=[limit]'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path, word: str, sentence: str) -> None:
    said = ended(*JOB, word, output_dir=tmp_path / "out", code=2)
    assert sentence in said
    assert not (tmp_path / "out" / "toy").exists()


@pytest.mark.usefixtures("lab")
def test_several_processes_agree(tmp_path: Path) -> None:
    """One process is asked, and all end behind the step at which they agree."""
    several = ("hw.parallel=spawn", "hw.num_devices=2")
    ended(*JOB, *several, recorder(tmp_path, ask="end", at=3), output_dir=tmp_path)
    found = told(tmp_path)
    assert len({record["pid"] for record in found}) == 1
    assert [record["step"] for record in of(found, "on_step_end")] == [1, 2, 3, 4]
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    assert result["stages"][0]["steps"] == 4
    said = ended(*JOB, *several, "name=other", recorder(tmp_path, fail="on_evaluate"), output_dir=tmp_path, code=1)
    assert "callbacks.mine: on_evaluate failed (OSError" in said
    assert "stopped after step 2" in said


@pytest.mark.usefixtures("lab")
def test_each_point_of_a_pack_has_its_own(tmp_path: Path) -> None:
    """One that is ended early leaves the other in the program."""
    words = ("-m", *JOB, "lora.r=2,4", "sweeping.pack=2")
    ended(*words, recorder(tmp_path, every=3), output_dir=tmp_path)
    points = sorted(path.name for path in (tmp_path / "sweeps" / "toy").glob("lora.r=*"))
    assert len(points) == 2
    for point in points:
        found = told(tmp_path, point)
        assert {record["name"] for record in found} == {point}
        assert [record["step"] for record in of(found, "on_step_end")] == [3, 6]
        assert [record["saved"] for record in of(found, "on_save")] == [2, 4, 6]
        assert found[-1]["ended"] == "finished"
        records = (tmp_path / "sweeps" / "toy" / point / "metrics.jsonl").read_text().splitlines()
        assert found[-1]["loss"] == [json.loads(r)["train/loss"] for r in records if "train/loss" in r][-1]


@pytest.mark.xla
@pytest.mark.usefixtures("lab")
def test_no_call_waits_for_the_device(tmp_path: Path) -> None:
    """Called at every step up to a log record, it has torch_xla move no tensor to the host, and compile nothing."""
    words = ("hw.runtime=xla", "trainer.log_every_steps=20", "trainer.max_stage_steps=20")
    words = (*words, "trainer.eval_every_steps=0", "checkpoint.every_steps=0")
    ended(*JOB, *words, recorder(tmp_path, traffic=True), output_dir=tmp_path)
    found = told(tmp_path)
    steps = [record["transfers"] for record in of(found, "on_step_end") if record["step"] < 20]
    assert steps == [steps[0]] * 19
    assert found[-1]["transfers"] > steps[0], "they are counted"
    assert json.loads((tmp_path / "toy" / "result.json").read_text())["compiles_after_warmup"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("kind", ["preferences", "own answers", "torch_xla, two devices"])
def test_other_ways_of_training(tmp_path: Path, kind: str) -> None:
    """Objectives and runtimes share the loop, and so the calls."""
    pairs = (REPOSITORY / "tpu_experiments/samples/stories/pairs.jsonl").read_text().splitlines()[:60]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    source = "data.stories_pairs_ro"
    unasked = [f"~{source}.questions.{name}" for name in ("one_person", "several_persons")]
    words = {
        "preferences": [
            "objective=dpo",
            "data=stories_pairs_ro",
            f"{source}.path={tmp_path / 'pairs.jsonl'}",
            *unasked,
        ],
        "own answers": [
            *("objective=grpo", "reward=length", "rollout.rewards.length.arguments.most=2", "data=sample_chat"),
            *("rollout.prompts=2", "rollout.samples=4", "trainer.global_batch_rows=8", "trainer.seq_len=128"),
        ],
        "torch_xla, two devices": ["hw.runtime=xla", "hw.parallel=spmd", "hw.num_devices=2"],
    }[kind]
    ended(*JOB, *words, recorder(tmp_path, ask="end", at=3), output_dir=tmp_path)
    found = told(tmp_path)
    assert [record["step"] for record in of(found, "on_step_end")] == [1, 2, 3]
    assert [record["saved"] for record in of(found, "on_save")] == [2, 3]
    assert found[-1]["ended"] == "finished"
    result = json.loads((tmp_path / "toy" / "result.json").read_text())
    assert result["stages"][0]["ended_by"] == "callbacks.mine: it is enough"


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.usefixtures("lab")
def test_two_hosts_agree(tmp_path: Path) -> None:
    from tests import forks
    from tests.jobs import of_tiny_job

    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = of_tiny_job([*JOB, "hw.runtime=xla", "hw.parallel=spmd", "hw.num_devices=2", "hw.num_hosts=2"])
    command = ["run.py", *words, recorder(tmp_path, ask="end", at=3), f"output_dir={tmp_path}"]
    hosts = []
    for rank in range(2):
        with (tmp_path / f"log_{rank}").open("wb") as log:
            env = kept | SAME_SUMS | place | {"RANK": str(rank)}
            hosts.append(forks.start(command, env=env, stdout=log, stderr=log))
    codes = [host.wait(timeout=240) for host in hosts]
    assert codes == [0, 0], (tmp_path / "log_0").read_text() + (tmp_path / "log_1").read_text()
    found = told(tmp_path)
    assert len({record["pid"] for record in found}) == 1
    assert [record["step"] for record in of(found, "on_step_end")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "toy" / "result.json").read_text())["stages"][0]["steps"] == 4
