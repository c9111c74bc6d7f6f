"""No traceback for anything a user can type or a file can hold: random cases of a fixed seed, and the net itself."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing.server import FAILINGS
from tpu_experiments.config.bugs import bug_sentence
from tpu_experiments.config.messages import is_of_composition

REPOSITORY = Path(__file__).parents[1]
NUM_CASES = 32
BROKEN_TRAINERS = """
from tpu_experiments.training.trainer import Trainer
class Raises(Trainer):
    def row_loss(self, *given, **named): raise KeyError("row 7")
class Misleads(Trainer):
    def row_loss(self, *given, **named): return 7
"""
# Found by the reader of an earlier version with a harness of their own, and by the first runs of this one.
REFUSED = (
    ("model.arch.max_position_embeddings=abc",),
    ("hw.rent.lr=1",),
    ("logger=[[]]",),
    ("data=[1,2]",),
    ("hw.libtpu_flags.x=1",),
    ("sample.prompts.0=x",),
    ("curriculum.stages.text.replay_sources=[[[]]]",),
    ("model.init=random", "model.arch.hidden_size=-8"),
    ("model.init=random", "model.arch.hidden_size=0"),
    ("model.init=random", "model.arch.hidden_size=abc"),
    ("model.init=random", "model.arch.num_attention_heads=0"),
    ("model.init=random", "model.arch.num_attention_heads=3"),
    ("model.init=random", "model.arch.vocab_size=0"),
    ("model.init=random", "model.arch.head_dim=7"),
    ("model.init=random", "model.arch.rms_norm_eps=abc"),
    ("model.init=random", "model.arch.num_hidden_layers=2147483647"),
    ("model.init=random", "model.arch.hidden_size=1000000000000000000000000000000"),
    ("model.init=random", "model.arch.model_type=mamba"),
    ("lora.targets=['*']",),
    ("seed=18446744073709551616",),
    ("curriculum.stages.chat.exit.patience=1" + "0" * 400,),
    ("trainer._target_=tpu_experiments.config.errors.ConfigError",),
    ("optim._target_=tpu_experiments.optim.schedules.math",),
    ("task=generate", "task.prompt=\udc80"),
    ("task=generate", "task.prompt=Salut", "task.buckets=[9223372036854775807]", "task.batch_rows=4611686018427387904"),
    ("+plan={tmp}",),
    ("x" * 4000,),
    ("--shell-completion",),
    ("sample.prompt=\udcff",),
    ("hw.env={'':1}",),
    ("hw.env={'a=b':1}",),
    ("plugins=['']", "trainer._target_=.x"),
    ("model.saved=${name}",),
    ("lora.targets=${sample}",),
    ("hw.env=${logger}",),
)


def ran(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.benchmarks.fuzz", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process that imports torch once: the commands above, and a trainer that is broken."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "broken_trainer.py").write_text(BROKEN_TRAINERS)
    broken = [
        ["plugins=[broken_trainer]", f"trainer._target_=broken_trainer.{name}"] for name in ("Raises", "Misleads")
    ]
    (folder / "given.json").write_text(json.dumps([*REFUSED, *broken]))
    given = ("--given", str(folder / "given.json"), "--beside", str(folder / "broken_trainer.py"))
    return reported("--cases", "0", *given, folder=folder)


def reported(*arguments: str, folder: Path) -> dict[str, Any]:
    ended = ran(*arguments, "--seed", "18", "--tidy", "--json", str(folder / "report.json"))
    assert (folder / "report.json").exists(), ended.stdout + ended.stderr
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return loaded


@pytest.mark.slow
def test_random_commands_and_files_end_in_a_sentence_or_train(tmp_path: Path) -> None:
    report = reported("--cases", str(NUM_CASES), folder=tmp_path)
    assert report["failings"] == {}
    assert sum(report["verdicts"].values()) == NUM_CASES
    assert report["verdicts"]["refused"] > NUM_CASES // 4
    assert report["verdicts"]["trained"] > NUM_CASES // 8


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[" ".join(words)[:60] for words in REFUSED])
def test_a_command_that_ended_in_a_traceback_once_is_refused(number: int, report: dict[str, Any]) -> None:
    given = report["given"][number]
    assert given["verdict"] == "refused", given["shown"]


def test_an_error_that_nobody_foresaw_is_seen_and_says_where_its_log_is(report: dict[str, Any]) -> None:
    given = report["given"][-1]
    assert (given["verdict"], given["code"]) == ("traceback", 1)
    assert given["verdict"] in FAILINGS
    before, _, log = given["shown"].partition("the log with the traceback is at ")
    assert before.endswith("error: a bug in tpu_experiments: TypeError: cannot unpack non-iterable int object; ")
    assert log.partition(";")[0].endswith("tiny_sample_text_cpu/run.log")
    assert "Traceback" not in before
    assert "Traceback (most recent call last)" in log, "the harness adds what is in that log"


def test_an_error_of_a_plugin_is_said_to_be_its_own(report: dict[str, Any]) -> None:
    given = report["given"][-2]
    assert (given["verdict"], given["code"]) == ("stopped", 1)
    assert (
        "broken_trainer.py:4 (row_loss) raised KeyError: 'row 7'; it is code of your own (plugins);" in given["shown"]
    )


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_memory_that_is_used_up_is_no_bug(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert re.match(r"the memory of this machine \(\d+ GiB\)", bug_sentence(error, config=None))


def test_without_a_run_folder_the_traceback_goes_into_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyError) as caught:
        {}["missing\ud800"]
    said = bug_sentence(caught.value, config=None)
    assert is_of_composition(caught.value), "no line of the package was at work"
    (log,) = tmp_path.iterdir()
    assert str(log) in said
    assert said.startswith("a bug in tpu_experiments: KeyError: ")
    assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize(("number", "is_a_bug"), [(errno.EISDIR, False), (errno.EACCES, False), (errno.ENOENT, True)])
def test_a_file_that_the_system_refuses_is_no_bug(
    number: int, is_a_bug: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = bug_sentence(OSError(number, os.strerror(number), "/lab/result.json"), config=None)
    assert said.startswith("a bug in tpu_experiments" if is_a_bug else "/lab/result.json; the system refuses it (")
    (log,) = tmp_path.iterdir()
    assert str(log) in said
