"""Commands that are printed or written: read by the shell's rules, parsed and composed by Hydra, whatever the names."""

import ast
import itertools
import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.job import Job, check_outlives
from launch.tpu_vm.settings import Settings
from tests.config.composing import composed
from tests.launch.fake_cloud import FakeCloud, SimulatedClock
from tests.launch.launcher import Launcher
from tests.tiers import only
from tests.training.runs import REPOSITORY
from tpu_experiments.config.commands import command, override_of, typed
from tpu_experiments.config.compose import config_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.overlay import overlay_file
from tpu_experiments.config.task_schema import ReportTaskConfig
from tpu_experiments.export.card import Card, page
from tpu_experiments.loggers.closing_lines import summary
from tpu_experiments.runtime.processes.env import elsewhere
from tpu_experiments.storage.given_folders import require_checkpoint
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.sweeping import leaderboard
from tpu_experiments.sweeping.leaderboard import FINISHED, Row
from tpu_experiments.sweeping.points import Point, command_of, member_overrides, pack_command

UGLY = (
    "/lab/a b", "/lab/it's", '/lab/"', "/lab/a=b,c", "/lab/$HOME", "/lab/#1", "/lab/{x}", "/lab/${x}", "/lab/(y)[z]",
    "-dash", "/lab/țară", "/lab/100%", "/lab/back\\", "/lab/a\\\"b", "/lab/*?", "/lab/`id`;|&<>!", "null", "1E5",
    "-o d'q\"=,$#{x}${y}(z)[w]|&; ăîș %s\\",
)  # fmt: skip
ALL_IN_ONE = UGLY[-1]
PLACES = only([ALL_IN_ONE, "null"], UGLY)
NAME = "a=b,lora.r=4+c"
"""Of a run: names take letters, digits and `. _ + = , -` alone."""


def words_of(line: str) -> list[str]:
    """The arguments that a shell hands to run.py."""
    words = shell_words(line)
    assert words[:2] == ["python", "run.py"], line
    return words[2:]


def shell_words(line: str) -> list[str]:
    """The words that a shell makes of a command line."""
    words = shlex.split(line, comments=True)
    printed = ["bash", "-c", f"set -- {line}\nprintf '%s\\0' \"$@\""]
    shown = subprocess.run(printed, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\0")[:-1] == words
    return words


def commands_in(text: str) -> list[str]:
    """The lines of a text that are commands."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith("python run.py")]


RESULT: dict[str, Any] = {
    "name": NAME, "eval_loss_before": 2.0, "eval_loss": 1.0, "eval_sources": {}, "eval_sources_before": {},
    "stages": [],
    "guard": {"skipped": 0, "rollbacks": 0}, "num_trainable": 1, "num_parameters": 2, "tokens_per_second": 1.0,
    "meters": {"step_seconds": None}, "num_compiles": 1, "compiles_after_warmup": 0, "compile_cache": None,
    "sample_before": "", "sample_after": "", "adapter_path": "x/adapter", "hw": "v5e8", "perplexity": 2.0,
}  # fmt: skip


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    (word,) = shlex.split(command(override_of("k", text)))[2:]
    found = OverridesParser.create().parse_override(word)
    assert OmegaConf.create({"k": found.value()}).k == text
    (word,) = shlex.split(command(override_of("k", [text, {"a": text}])))[2:]
    first, second = OmegaConf.create({"k": OverridesParser.create().parse_override(word).value()}).k
    assert [first, second.a] == [text, text]


@pytest.mark.parametrize("key", ["q_proj", r"layers\.0\..*", r"layers.(0|1).[qk]\d+_proj", r"a\(b", "a: b=c", "d\\"])
def test_a_pattern_of_names_comes_back(key: str) -> None:
    (word,) = shlex.split(command(override_of("lora.rank_pattern", {key: 2})))[2:]
    assert OverridesParser.create().parse_override(word).value() == {key: 2}


@pytest.mark.parametrize("place", PLACES)
def test_the_closing_lines(place: str) -> None:
    """Of a run alone and of a sweep's point, of an adapter and with the user's own code."""
    given = [
        "--config-dir",
        place,
        override_of("plugins", ["x y"]),
        "sweeping.pack=4",
        "hydra.mode=RUN",
        "optim.lr=0.1",
    ]
    given += [override_of("output_dir", place), override_of("name", NAME)]
    for parent in (place, f"{place}/sweeps/{NAME}"):
        folder = RunFolder(parent, NAME)
        lines = commands_in(summary(RESULT, folder=folder, arguments=given))
        assert len(lines) == (4 if parent == place else 3), "a point of a sweep is not swept again"
        for line in lines[:3]:
            words = [word for word in words_of(line) if not word.startswith("plugins=")]
            assert config_of(words).task.run == folder.path()  # type: ignore[attr-defined]
        for line in lines[3:]:
            many, option, value, plugins, *words = words_of(line)
            assert (many, option, value, plugins) == ("-m", "--config-dir", place, 'plugins=["x y"]')
            swept = config_of([*words[:-1], "lora.r=8"])
            assert (swept.output_dir, swept.name) == (place, f"{NAME}_ranks")
            assert words[-1] == "lora.r=8,16,32"


@pytest.mark.parametrize("place", PLACES)
def test_those_of_a_sweep(place: str) -> None:
    """What it prints at its end, and what it starts."""
    folder = f"{place}/sweeps/{NAME}"
    row = Row("p", {"lora.r": "4"}, ["lora.r=4", override_of("model.path", place)], folder, FINISHED, eval_loss=1.0)
    text = leaderboard.markdown([row], name=NAME, folder=folder)
    best, compare = commands_in(text)
    assert config_of(words_of(best)).model.path == place
    report = config_of(words_of(compare)).task
    assert isinstance(report, ReportTaskConfig)
    assert report.runs == [folder]
    assert config_of(words_of(compare)).output_dir == place
    board = shlex.split(next(line for line in text.splitlines() if "tensorboard --logdir" in line))
    assert board == ["tensorboard", "--logdir", f"{folder}/tensorboard"]
    config = replace(composed(), output_dir=folder, name=NAME)
    point = Point(NAME, {}, ("model=tiny",), config)
    for words in (command_of(point, given=place)[2:-1], member_overrides(point)):
        own = config_of(words)
        assert (own.output_dir, own.name) == (folder, NAME)
    words = pack_command(point, folder=place)[2:]
    assert config_of([word for word in words if word != "hydra.mode=RUN"]).task.points == place  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", PLACES)
def test_those_of_refusals_and_pages(place: str) -> None:
    from tpu_experiments.tasks.generate.origin import form_of

    with pytest.raises(ConfigError) as refused:
        form_of(place, "merged")
    config = config_of(words_of(str(refused.value).partition("write it first: `")[2].removesuffix("`.")))
    assert config.task.run == place  # type: ignore[attr-defined]
    assert config.task.forms == ["merged"]  # type: ignore[attr-defined]
    assert overlay_file([override_of("+plan", f"{place}/best.yaml")]) == f"{place}/best.yaml"


@pytest.mark.parametrize("place", PLACES)
def test_those_of_an_export_s_card(place: str) -> None:
    """llama.cpp's, vLLM's and the Hub's commands hand the names on as they are."""
    forms = ("peft", "merged", "gguf", "rtn", "gptq", "vptq")  # the last three are those of task=quantize
    for form, subfolder in itertools.product(forms, (None, "x")):
        page_of = Card(form, "run", base=f"/base/{place}")
        text = page(page_of, place=f"/b/{place}", comparison="", files=[f"{place}.gguf"], subfolder=subfolder)
        local = f"/b/{place}" if subfolder is None else f"{place.rpartition('/')[2]}/{subfolder}"
        blocks = re.findall(r"^```+bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.splitlines()]
        assert bool(lines) == (form != "vptq" or subfolder is not None)
        for line in lines:
            words = shell_words(line)
            given = {"hf": f"/b/{place}", "llama-cli": f"{local}/{place}.gguf"}.get(words[0])
            given = given or (f"/base/{place}" if form == "peft" else local)
            assert given in words
            assert words[0] != "vllm" or form != "peft" or words[-1] == f"adapter={local}"
        for block in re.findall(r"^```+python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            named = {node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)}
            assert (local if form == "vptq" else f"/b/{place}") in named


@pytest.mark.parametrize("place", PLACES)
def test_those_of_the_launcher(place: str, tmp_path: Path) -> None:
    """The plan of a dry run, the command that the machine gets, and the one that deletes it."""
    launcher = Launcher(FakeCloud(SimulatedClock()), tmp_path)
    given = ["output_dir=gs://bucket/runs", override_of("model.path", place)]
    machine = ("--dry-run", "hw=v6e8", "spot=true", "name=ro1", f"account={place}", f"results={place}")
    assert launcher("train", *machine, run=["--", *given]) == 0
    shown = [line.removeprefix("$ ") for line in launcher.said if line.startswith("$ ")]
    lines = [shell_words(line.removesuffix(" < (a secret on stdin)")) for line in shown]
    assert all(f"--account={place}" in words for words in lines if words[0] == "gcloud" and "compute" in words)
    (planned,) = (words for words in lines if "task=plan" in words)
    config = config_of(planned[2:])
    assert (config.model.path, Path(config.output_dir)) == (place, Path(place))
    (started,) = (word for words in lines for word in words if "worker.sh start" in word)
    assert set(given) <= set(shell_words(started.partition(" && ")[2].partition(" ); code=")[0]))
    with pytest.raises(LaunchError) as refused:
        check_outlives(
            Job((f"start.run={place}/a",), "ro1", "gs://b"), Settings(results=place), num_workers=1, is_new=True
        )
    copy, _, there = str(refused.value).partition("copy it (")[2].rpartition(") and give ")
    assert shell_words(copy)[4] == f"{place}/a"
    assert shlex.split(there.removesuffix(".")) == ["start.run=gs://bucket/runs/a"]


@pytest.mark.parametrize("place", PLACES)
def test_those_of_a_machine_without_a_tpu(place: str) -> None:
    """To plan, to rent and to try the same here."""
    machine = composed("hw=v6e8").hw
    text = elsewhere(machine, [override_of("model.path", place), "hw=v6e8"])
    planned, rest = text.partition("plan it here: `")[2].split("`, rent one: `")
    rented, tried = rest.removesuffix("` tries it on a tiny model").split("`, or use hw=cpu here, where `")
    assert config_of(words_of(planned)).model.path == place
    words = shell_words(rented)
    assert words[:5] == ["python", "launch/tpu.py", "train", "hw=v6e8", "--"]
    assert config_of(words[5:]).model.path == place
    assert config_of(words_of(tried)).model.path == place


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["colab.ipynb", "kaggle.ipynb"])
def test_those_of_the_notebooks(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells up to the training, with commands noted instead of run."""
    monkeypatch.setenv("OUTPUT", place)
    monkeypatch.setenv("DATA", place)
    monkeypatch.setenv("MORE", typed(override_of("plugins", [place])))
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    cells = json.loads((REPOSITORY / "launch" / name).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    asked: list[tuple[str, ...]] = []
    names: dict[str, Any] = {}
    for source in sources[: 1 + next(k for k, source in enumerate(sources) if 'run.py", *RUN' in source)]:
        exec(source, names)
        names["sh"] = lambda *command, fine=(0,): asked.append(command) or 0
    runs = [words[words.index("run.py") + 1 :] for words in asked if "run.py" in words]
    assert override_of("output_dir", place) in runs[-1]
    assert len(runs) == (3 if name == "colab.ipynb" else 2)  # of the chip, of the places, and the training
    for words in runs:
        own = [word for word in words if word != override_of("plugins", [place])]
        assert len(own) == len(words) - 1
        config = config_of(own)
        assert config.output_dir == (place if any(word.startswith("output_dir=") for word in own) else "outputs")
        assert name == "kaggle.ipynb" or config.data["messages"].path == place


@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a=b,c", "${x}$HOME", "(y)[z]", "back\\", "`id`;|&<>!*?"])
def test_what_to_write_instead_of_a_folder(tmp_path: Path, name: str) -> None:
    """Of an adapter, a run, and a folder with a GGUF file."""
    for file, named, keys in (
        ("adapter_config.json", "", ("start.run", "task.adapter")),
        ("identity.json", "", ("start.run", "task.run")),
        ("x.gguf", "/x.gguf", ("model.path",)),
    ):
        folder = tmp_path / file / name
        folder.mkdir(parents=True)
        (folder / file).write_text("{}")
        with pytest.raises(ConfigError) as refused:
            require_checkpoint(str(folder))
        for key in keys:
            assert typed(override_of(key, f"{folder}{named}")) in str(refused.value)


TYPED = re.compile(r"""f["'].*(python run\.py|tensorboard --logdir|\btask\.runs?=).*\{""")
"""A command in a text with values in it."""
IN_MESSAGES = re.compile(r"task\.runs?=\{\w+(\.run)?\}[;,\"]")
"""The key that a refusal begins with, as it was given; it is no command."""


def test_no_other_module_writes_commands() -> None:
    """A value that is put into a text by itself is quoted for nobody."""
    for file in sorted((REPOSITORY / "tpu_experiments").rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            assert not TYPED.search(IN_MESSAGES.sub("", line)), f"{file}:{number}: {line}"
