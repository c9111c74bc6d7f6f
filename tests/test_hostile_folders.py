"""Run folders, adapters, models and data with a device, named pipe, socket or sparse file in the place of a file.

Each task ends in one sentence, at once: nothing waits for a pipe, reads a device or fills the memory.
"""

import gzip
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import composed
from tests.storage.test_regular_files import KINDS, LARGE, put, sockets
from tests.test_attacks import EAGER, evaluated, generated, of_command, sent
from tests.tiers import only
from tpu_experiments.command_line import check_yaml, with_plan_overlay
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.data.reading import files, json_array, tables
from tpu_experiments.data.reading.files import read_raw
from tpu_experiments.data.reading.locations import SourceFile, list_files
from tpu_experiments.storage.run_folder import RunFolder, open_run
from tpu_experiments.tasks import evaluate, generate, report
from tpu_experiments.training.questions import read_questions

__all__ = ["sockets"]
pytestmark = [pytest.mark.usefixtures("root_logger"), pytest.mark.timeout(120)]
SAMPLES = Path(__file__).parents[1] / "tpu_experiments" / "samples"
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
SHOWN = ("pipe", "zero", "socket", "sparse")
"""Kinds that every file is tried with; the others are the same to the one function that opens all."""

NO_TOKENIZER: Any = None
Try = Callable[[Path], object]
"""A command that reads a folder in which one file is none."""


def run_of(folder: Path) -> Path:
    """A finished run with an adapter, as far as it is read before its weights."""
    run = sent(folder / "outputs" / "run")
    (run / "adapter").mkdir()
    (run / "lives").mkdir()
    (run / "result.json").write_text('{"status": "finished"}')
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    return run


def model_of(folder: Path) -> Path:
    """A checkpoint with its tokenizer."""
    for part in ("tiny_base", "tokenizer"):
        shutil.copytree(SAMPLES / part, folder / "model", dirs_exist_ok=True)
    return folder / "model"


def generated_with_adapter(run: Path) -> None:
    generate.run(of_command("generate", adapter=str(run / "adapter"), prompt="x"))


def generated_with_run(run: Path) -> None:
    generate.run(of_command("generate", run=str(run), prompt="x"))


def evaluated_with_adapter(run: Path) -> None:
    evaluate.run(of_command("evaluate", run=str(run)))


def created(run: Path) -> None:
    config = composed(*EAGER, f"output_dir={run.parent}", f"name={run.name}")
    RunFolder(str(run.parent), run.name).create(config)


def reported(run: Path) -> None:
    report.run(composed("task=report", f"output_dir={run.parent}"))


def continued(run: Path) -> None:
    open_run(composed(*EAGER, f"output_dir={run.parent}", f"name={run.name}"))


def generated_with_model(model: Path) -> None:
    command = of_command("generate", prompt="x")
    command.model.path, command.model.tokenizer_path, command.model.size = str(model), str(model), "full"
    command.model.init = "pretrained"
    generate.run(command)


def templated(folder: Path) -> None:
    command = of_command("generate", prompt="x")
    command.model.chat_template_path = str(folder / "t.jinja")
    generate.run(command)


def prompted(folder: Path) -> None:
    generate.run(of_command("generate", prompts_file=str(folder / "p.txt")))


def listed(folder: Path) -> None:
    list_files(SourceSpec(name="x", path=str(folder / "d.jsonl"), kind="text"))


def asked(folder: Path) -> None:
    command = of_command("evaluate")
    next(iter(command.data.values())).questions = {"x": str(folder / "q.jsonl")}
    read_questions(command, tokenizer=NO_TOKENIZER)


def overlaid(folder: Path) -> None:
    with_plan_overlay([f"+plan={folder / 'best.yaml'}"])


def configured(folder: Path) -> None:
    check_yaml([f"--config-dir={folder}"])


CASES: list[tuple[str, Callable[[Path], Path], Try]] = [
    *(("config.yaml", run_of, task) for task in (evaluated, generated, reported, continued)),
    *(("identity.json", run_of, task) for task in (evaluated, continued)),
    *(("result.json", run_of, task) for task in (evaluated_with_adapter, reported, created)),
    *(("metrics.jsonl", run_of, task) for task in (reported, continued)),
    *((f"adapter/{name}", run_of, task) for name in ("adapter_config.json", "adapter_model.safetensors")
      for task in (generated_with_adapter, generated_with_run)),
    *((name, model_of, generated_with_model) for name in (
        "config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
        "additional_chat_templates/x.jinja", "vocab.json")),
    ("t.jinja", lambda folder: folder, templated),
    ("p.txt", lambda folder: folder, prompted),
    ("d.jsonl", lambda folder: folder, listed),
    ("q.jsonl", lambda folder: folder, asked),
    ("best.yaml", lambda folder: folder, overlaid),
    ("data/x.yaml", lambda folder: folder, configured),
]  # fmt: skip


LINKED_TOO = [kind for kind in (*KINDS, *LARGE) if kind not in SHOWN]
NOT_READ_YET = {("d.jsonl", "sparse"), ("config.yaml", "sparse", "continued"), ("metrics.jsonl", "sparse", "continued")}
"""Large files that the attempt does not read, or reads in pieces."""
REFUSED = re.compile(
    r"(it is a (device|named pipe|socket), which could wait or go on for ever, and only regular files are read"
    r"|it has 1,099,511,627,776 bytes \([0-9,]+ on the disk\), and such a file is read up to [0-9,]+"
    r"|is a symbolic link, and files are written and removed there"
    r"|model\.safetensors is not a complete safetensors file)"
)


@pytest.mark.parametrize("kind", [*SHOWN, *only((), LINKED_TOO)])
@pytest.mark.parametrize(("file", "make", "attempt"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_nothing_but_a_file_is_read(
    file: str, make: Callable[[Path], Path], attempt: Try, kind: str, tmp_path: Path, sockets: list[socket.socket]
) -> None:
    if {(file, kind), (file, kind, attempt.__name__)} & NOT_READ_YET or (kind, file) == ("linked sparse", "d.jsonl"):
        pytest.skip("it is of any size")
    folder = make(tmp_path)
    put(folder / file, kind, sockets)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        attempt(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize("kind", SHOWN)
def test_a_report_leaves_out_a_life_that_is_no_file(kind: str, tmp_path: Path, sockets: list[socket.socket]) -> None:
    run = run_of(tmp_path)
    put(run / "lives" / "1.json", kind, sockets)
    reported(run)
    assert list((run.parent / "reports").rglob("report.html"))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".txt", ".json"])
@pytest.mark.parametrize("kind", ["sparse", "bomb"])
def test_a_row_has_a_bound(suffix: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hole of 1 TiB, and of 64 MiB that unpack from 64 KiB, which stand for more."""
    for module in (files, json_array, tables):
        monkeypatch.setattr(module, "MOST_ROW_BYTES", 2**22)
    place = tmp_path / f"x{suffix}"
    if kind == "sparse":
        with place.open("wb") as sparse:
            sparse.truncate(2**40)
    else:
        place = tmp_path / f"x{suffix}.gz"
        begins = {".json": b'["', ".csv": b'a,b\n1,"', ".tsv": b"a\tb\n1\t"}.get(suffix, b'{"text": "')
        place.write_bytes(gzip.compress(begins + b"a" * 2**26, compresslevel=1))
    spec = SourceSpec(name="x", path=str(place), kind="text")
    with pytest.raises(ConfigError, match=rf"x{suffix}.*; it has more than [0-9,]+ bytes, as no text has"):
        list(read_raw(SourceFile(place.name, str(place)), spec=spec))
