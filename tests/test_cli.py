"""Bad input on the real command line: exit code 2, one message, no traceback, and nothing is written."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forks
from tests.config.composing import composed
from tests.jobs import of_tiny_job
from tpu_experiments.command_line import worked_on
from tpu_experiments.runtime.processes.chips import tpu_present
from tpu_experiments.storage.run_folder import open_run

REPOSITORY = Path(__file__).parents[1]
SAMPLES = REPOSITORY / "tpu_experiments" / "samples"
REFUSED = 2

# Overrides, in which {tmp} is a folder of `inputs`, and what the message must hold.
CONFIG_CASES = {
    "unknown key": ("lora.rnak=8", "lora.rnak=8; there is no key lora.rnak. Did you mean 'r'?"),
    "unknown top-level key": ("laro.r=8", "laro.r=8; there is no key laro. Did you mean 'lora'?"),
    "wrong type": ("lora.r=abc", "lora.r=abc; it must be a whole number."),
    "unknown model": (
        "model=mistrl7b",
        "model=mistrl7b; there is no conf/model/mistrl7b.yaml. Did you mean 'mistral7b'?",
    ),
    "unknown source": ("data=[wiki_ro,ultrachat]", "data=ultrachat; there is no conf/data/ultrachat.yaml."),
    "unknown machine": ("hw=v6", "Did you mean 'v6e8'?"),
    "unknown experiment": ("experiment=mistral_ro", "Did you mean 'mistral7b_ro'?"),
    "two models": ("model=[tiny,qwen05b]", "model takes exactly one choice; write model=NAME"),
    "null group": ("lora=null", "lora=null; a group cannot be null; leave it out, or name a choice: all_linear_r16"),
    "malformed override": ("model=[tiny", "model=[tiny; the value cannot be read; close its brackets and quotes"),
    "no value": ("lora", "'lora' is no key=value; write lora=VALUE, or see --help."),
    "batch over the mesh": (
        "hw.parallel=spmd hw.num_devices=4 trainer.global_batch_rows=10",
        "trainer.global_batch_rows=10 is not a multiple of hw.num_devices=4 (hw=cpu); use 8 or 12.",
    ),
    "row too long": ("trainer.seq_len=2048", "use 1024 or less."),
    "foreign target": ("trainer._target_=os.system", "trainer._target_=os.system; it is outside tpu_experiments"),
    "several": ("seed=-1 name=a/b lora.targets=[]", "name=a/b; it names a folder"),
    "broken yaml": (
        "hydra.searchpath=[file://{tmp}] experiment=broken",
        "line 3 of {tmp}/experiment/broken.yaml cannot",
    ),
    "sweep": ("-m lora.r=-1,-2", "lora.r=-1; it must be at least 0."),
    "sweep, a later point": ("-m lora.r=8,-2", "lora.r=-2; it must be at least 0."),
    "points of several chips side by side": (
        "-m seed=1,2 hw=v6e8 trainer.global_batch_rows=8 sweeping.points_at_once=2",
        "sweeping.points_at_once=2; a point on hw=v6e8 takes 8 chips, and side by side each has one; name a machine of",
    ),
    "report of nothing": (
        "task=report task.runs=[{tmp}/none]",
        "/none; there is no run in it (a folder with identity.json)",
    ),
    "plain folder": ("name=taken output_dir={tmp}", "name=taken; {tmp}/taken exists and is not a run folder"),
}
DATA_CASES = {
    "broken line": (
        "data=sample_text data.sample_text.path={tmp}/broken.jsonl",
        "data.sample_text.path={tmp}/broken.jsonl; line 2 of broken.jsonl is not JSON",
    ),
    "no chat template": (
        "model.tokenizer_path={tmp}/tokenizer",
        "data.sample_chat.kind=chat; the tokenizer {tmp}/tokenizer has no chat template; set model.chat_format=chatml",
    ),
    "run folder of another config": (
        "name=before output_dir={tmp} lora.r=4",
        "name=before; {tmp}/before was made with lora.r=8, now 4; choose another name= or restore the values.",
    ),
}
CASES = CONFIG_CASES | DATA_CASES


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and the folder it ran in."""

    code: int
    out: str
    err: str
    folder: Path


def run_py(overrides: str, *, folder: Path, tmp: Path, needs_torch: bool = False) -> Ended:
    """Run run.py in `folder`, with its output_dir there unless the overrides name one.

    A command that is refused before torch is imported takes 0.5 s of CPU, and twice that in a fork of one that has it.
    """
    folder.mkdir()
    words = of_tiny_job(overrides.format(tmp=tmp).split())
    if "output_dir=" not in overrides:
        words.append(f"output_dir={folder}/outputs")
    command = [str(REPOSITORY / "run.py"), *words]
    if needs_torch:
        ended = forks.run(command, cwd=folder)
    else:
        ended = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr, folder)


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder with its text."""
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bad inputs."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "broken.jsonl").write_text('{"text": "unu doi trei"}\n{"text": \n')
    shutil.copytree(SAMPLES / "tokenizer", folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    (folder / "experiment").mkdir()
    (folder / "experiment" / "broken.yaml").write_text("# @package _global_\nlora: {r: 8\nname: mine\n")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.txt").write_text("not a run")
    config = composed("name=before", f"output_dir={folder}", "lora.r=8")
    open_run(config).create(config)
    return folder


@pytest.fixture(scope="module")
def answers(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every case, run beside the others; the inputs are the same afterwards."""
    base = tmp_path_factory.mktemp("cases")
    before = contents(inputs)
    folders = {case: base / str(i) for i, case in enumerate(CASES)}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        started = {
            case: pool.submit(run_py, overrides, folder=folders[case], tmp=inputs)
            for case, (overrides, _) in CONFIG_CASES.items()
        }
        ended = {case: future.result() for case, future in started.items()}
    for case, (overrides, _) in DATA_CASES.items():
        ended[case] = run_py(overrides, folder=folders[case], tmp=inputs, needs_torch=True)
    assert contents(inputs) == before
    return ended


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_one_message(case: str, answers: dict[str, Ended], inputs: Path) -> None:
    ended = answers[case]
    assert ended.code == REFUSED, ended.err
    assert ended.err.count("error: ") == 1
    assert "Traceback" not in ended.err
    assert CASES[case][1].format(tmp=inputs) in ended.err
    written = [path.relative_to(ended.folder).as_posix() for path in ended.folder.rglob("*") if path.is_file()]
    written = [path for path in written if not path.startswith("outputs/prepared/")]  # named by its content, kept
    assert written == []


@pytest.mark.parametrize("case", [case for case in CONFIG_CASES if case != "plain folder"])
def test_a_refused_config_prints_nothing_else(case: str, answers: dict[str, Ended]) -> None:
    assert answers[case].err.startswith("error: ")
    assert answers[case].out == ""


def test_several_problems_stand_one_below_the_other(answers: dict[str, Ended]) -> None:
    lines = answers["several"].err.splitlines()
    assert [line[:7] for line in lines] == ["error: ", "       ", "       "]
    assert [line[7:].partition("=")[0] for line in lines] == ["seed", "name", "lora.targets"]


@pytest.mark.skipif(tpu_present(), reason="this machine has a TPU")
def test_no_tpu_where_the_hardware_asks_for_one(tmp_path: Path) -> None:
    ended = run_py("hw=v6e8", folder=tmp_path / "case", tmp=tmp_path)
    assert ended.code == REFUSED
    assert ended.err.startswith("error: hw=v6e8 asks for a TPU and this machine has none")
    assert "use hw=cpu here" in ended.err
    assert list(ended.folder.iterdir()) == []


@pytest.mark.skipif(tpu_present(), reason="this machine has a TPU")
def test_a_sweep_for_a_tpu_that_is_not_here_starts_no_point(tmp_path: Path) -> None:
    ended = run_py("-m hw=v6e8 lora.r=4,8", folder=tmp_path / "case", tmp=tmp_path)
    assert ended.code == REFUSED
    assert [line for line in ended.err.splitlines() if line.startswith("error: hw=v6e8 asks for a TPU")]
    assert "sweep point" not in ended.out + ended.err
    assert list(ended.folder.iterdir()) == []


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have GPUs")
@pytest.mark.parametrize(
    "words",
    [
        "hw=t4x2",
        "hw.runtime=eager hw.device=cuda",
        "hw=a100 model=mistral7b data=uk_law",  # of the Hub, which is not asked
        "-m hw=t4x2 lora.r=4,8",
    ],
)
def test_no_gpu_where_the_hardware_asks_for_one(words: str, tmp_path: Path) -> None:
    ended = run_py(words, folder=tmp_path / "case", tmp=tmp_path)
    assert ended.code == REFUSED
    assert re.match(r"error: hw.device=cuda asks for \d NVIDIA GPU\(s\) and this machine has no driver", ended.err)
    assert list(ended.folder.iterdir()) == []


def test_the_config_is_shown_without_running_anything(tmp_path: Path) -> None:
    ended = run_py("--cfg job --resolve model=mistral7b", folder=tmp_path / "case", tmp=tmp_path)
    assert ended.code == 0
    assert "path: mistralai/Mistral-7B-Instruct-v0.1" in ended.out
    assert ended.err == ""
    assert list(ended.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("task=evaluate task.run=runs/mine", "runs/mine"),
        ("task=generate task.run=runs/mine", "runs/mine"),
        ("task=generate task.adapter=runs/mine/adapter", "runs/mine/adapter"),
        ("task=serve task.gguf=mine.gguf", "mine.gguf"),
        ("task=export task.run=runs/mine", "runs/mine"),
        ("task=evaluate task.adapter=none name=base", "base"),
        ("name=again", "again"),
    ],
)
def test_the_first_line_names_what_a_task_works_on(words: str, named: str) -> None:
    assert worked_on(composed(*words.split())) == named
