"""wandb for real, offline, in a process of its own (it starts a service and keeps global state)."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.tracked_run import ID, run_id
from tpu_experiments.loggers.wandb import WandbLogger
from tpu_experiments.storage.run_folder import RunFolder

MakeContext = Callable[..., LoggerContext]

PROGRAM = """
import pickle, sys
from pathlib import Path
from tpu_experiments.loggers.wandb import WandbLogger
logger = WandbLogger(pickle.loads(Path(sys.argv[1]).read_bytes()), project="test")
logger.scalars(1, {"train/loss": 2.5})
logger.text(1, tag="sample", text="<b>Dunarea</b>")
logger.hparams({"lora.r": 16}, {"eval/loss": 1.25})
logger.finish()
"""


@pytest.mark.slow
def test_an_offline_run_leaves_its_files_in_the_run_folder(make_context: MakeContext, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    context = make_context()
    (tmp_path / "context").write_bytes(pickle.dumps(context))
    home = {"HOME": str(tmp_path / "home"), "WANDB_SILENT": "true"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "context")], env=clean | home, check=True)
    (run,) = Path(context.run_folder.path("wandb")).glob("offline-run-*")
    (record,) = run.glob(f"run-{run_id(context.run_folder)}.wandb")
    content = record.read_bytes()
    for expected in (b"train/loss", b"2.5", b"lora.r", b"eval/loss", b"1.25"):
        assert expected in content
    (page,) = run.glob("files/media/html/*.html")
    assert "&lt;b&gt;Dunarea&lt;/b&gt;" in page.read_text()


ENDS = """
import pickle, sys
from tpu_experiments.loggers.base import Loggers
from tpu_experiments.loggers.wandb import WandbLogger
for ended, context in pickle.load(sys.stdin.buffer).items():
    Loggers({"wandb": WandbLogger(context, project="test")}).finish(ended)
"""


def exit_code(file: Path) -> int:
    """The exit code in a run's record: after 7 bytes, checksum (4), length (2) and kind (1) of each part, and it."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at = file.read_bytes(), 7
    while at < len(content):
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        record = Record.FromString(content[at + 7 : at + 7 + size])
        if record.WhichOneof("record_type") == "exit":
            return int(record.exit.exit_code)
        at += 7 + size
    raise AssertionError(f"{file} has no end")


def test_a_record_says_how_its_run_ended_and_has_no_secret_of_the_command_line(
    make_context: MakeContext, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    contexts = {ended: make_context(f"name={ended}") for ended in ("finished", "stopped", "failed")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    subprocess.run(
        [sys.executable, "-c", ENDS, "--password=hunter2secret9"],
        input=pickle.dumps(contexts),
        env=clean | {"HOME": str(tmp_path / "home"), "WANDB_SILENT": "true"},
        check=True,
    )
    for ended, context in contexts.items():
        folder = Path(context.run_folder.path("wandb"))
        (record,) = folder.glob("offline-run-*/run-*.wandb")
        assert (exit_code(record) == 0) == (ended == "finished")
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert [file for file in files if b"hunter2secret9" in file.read_bytes()] == []


def test_without_the_package_the_error_says_what_to_do(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install wandb or leave it out of logger="):
        WandbLogger(make_context(), project="test")


def test_its_failure_never_stops_a_run() -> None:
    assert WandbLogger.on_error == "drop"


def test_the_id_is_of_the_folder_and_has_plain_characters(tmp_path: Path) -> None:
    """Two sweeps have points of the same names; an id that somebody wrote in the folder is not taken as it is."""
    names = ("lora.r=4,optim.lr=1e-3", "a:b;c,d#e?f/g'h", "ăîș", "x" * 120, "-", "plain")
    folders = [RunFolder(str(tmp_path / sweep), name.replace("/", "")) for sweep in "ab" for name in names]
    made = [run_id(folder) for folder in folders]
    assert all(ID.fullmatch(each) for each in made)
    assert len(set(made)) == len(folders)
    assert [run_id(folder) for folder in folders] == made
    assert made[0].startswith("lora-r-4-optim-lr-1e-3-")
    for foreign in ("a/b", "x" * 65, ""):
        Path(folders[0].path("wandb", "id")).write_text(foreign)
        assert ID.fullmatch(run_id(folders[0]))
    on_bucket = RunFolder("memory://ids", "a,b")
    assert run_id(on_bucket) == run_id(on_bucket)
