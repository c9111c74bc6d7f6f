"""Every command of the manuals runs to its end in its smoke form: a tiny model, one step, shipped data, plain torch."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.test_manuals import MANUALS, commands_of, first_point

SMOKE = (
    "debug=smoke",
    "hw=cpu",
    "hw.runtime=eager",
    "trainer.max_stage_steps=1",
    "trainer.max_eval_rows=4",
    "sample.max_new_tokens=0",
)
OWN = re.compile(
    r"(hw|output_dir|name|\+plan|data\.\w+\.path|model\.(path|tokenizer_path)|task\.(run|runs|adapter|prompts_file|output|documents|json))="
)
"""What names a machine, a place or a file of the reader's own."""
GENERATED = "data=stories_text_ro"
"""Has no sample: the command before it in the manual writes the text, which tests/data/test_stories.py does."""
TAUGHT = "objective=distillation"
"""Reads a teacher's run, or what the command before it wrote: tests/objectives/test_distillation.py runs both."""
EXPORTED = re.compile(r"task\.(weights=(merged|gguf)|gguf=|harness=)")
"""Needs what task=export wrote, which tests/tasks/test_generate_export.py makes and reads, or rows of the Hub, in the
place of which tests/tasks/test_harness.py has its own."""
ELSEWHERE = {
    "convert": "tests/tasks/test_convert.py writes the files that it reads",
    "resume_check": "tests/training/test_resume_check.py runs it",
    "doctor": "tests/tasks/test_doctor.py",
    "serve": "tests/tasks/test_serve.py runs it, and ends it",
}


LARGE_TOKEN = re.compile(r"\d{5,}")
"""Tiny models have 4,096 tokens."""
SIZES = ("rows", "group", "vector", "codebook")
"""Settings of task=quantize that are for larger models."""


def task_of(words: list[str]) -> str:
    """Name of the task that a command runs."""
    return next((word.removeprefix("task=") for word in words if word.startswith("task=")), "train")


def smoke_form(words: list[str]) -> list[str]:
    """Overrides of a command without places of the reader's own, and with those of a trial; of a sweep, one point.

    What reads a finished run has `RUN` for its folder.
    """
    if words[:1] in (["--help"], ["--cfg"]):
        return words
    task = task_of(words)
    given = first_point([word for word in words if word != "-m"])
    # Tiny models have shorter rows than those of a manual.
    kept = [word for word in given if not OWN.match(word) and not word.startswith("trainer.seq_len=")]
    if task == "plan":
        machine = next((word for word in given if word.startswith("hw=")), "hw=v5e8")
        method = [] if any(word.startswith("task.method=") for word in kept) else ["task.method=analytic"]
        return [*kept, "debug=smoke", machine, *method]
    if task in ("evaluate", "generate"):
        kept = [word for word in kept if not word.startswith(("model=", "data=", "hw.", "task.by=", "task.data="))]
        prompt = [] if task == "evaluate" or any(w.startswith("task.prompt") for w in kept) else ["task.prompt=Ce?"]
        short = ["task.max_new_tokens=8"] if any(w.startswith("task.generate=") for w in kept) else []
        return [*kept, "task.run=RUN", *prompt, *short, "hw.runtime=eager"]
    if task == "export":
        kept = [word for word in kept if not word.startswith(("model=", "data=", "task.push"))]
        few = ("task.parity.documents=2", "task.parity.tokens=40", "task.parity.max_new_tokens=4")
        return [*kept, "task.run=RUN", *few]
    if task == "quantize":  # of a model of 64 features
        kept = [word for word in kept if not word.startswith(("model=", "data=", *(f"task.{n}=" for n in SIZES)))]
        sizes = ["task.codebook=16"] if "task.method=vptq" in kept else ["task.group=32"]
        rows = [] if "task.method=rtn" in kept else ["task.rows=2"]
        few = ("task.parity.documents=2", "task.parity.tokens=40", "task.parity.max_new_tokens=4")
        return [*kept, "task.run=RUN", *sizes, *rows, *few]
    if task == "tokenizer":  # of the shipped samples, which have some 4,000 words
        kept = [word for word in kept if not word.startswith(("task.vocab_size=", "task.compare_with="))]
        return [*kept, *SMOKE[:2], "task.vocab_size=600"]
    if task == "report":
        return [*(word for word in kept if not word.startswith("task.baseline=")), "task.runs=[RUN]"]
    kept = [word for word in kept if not word.startswith(("hw.", "trainer.max_stage_steps="))]
    kept = [LARGE_TOKEN.sub(lambda found: found[0][-3:], word) if "token_indices" in word else word for word in kept]
    return [*kept, *(SMOKE[:2] if task == "prepare" else SMOKE)]


def smoke_forms() -> list[list[str]]:
    """The different smoke forms of all commands."""
    found: dict[str, list[str]] = {}
    for file in MANUALS:
        for words in commands_of(file.read_text(encoding="utf-8")):
            is_sweep = any(word.startswith("sweep=") for word in words)  # tests/test_sweep.py runs those
            is_elsewhere = task_of(words) in ELSEWHERE or any(EXPORTED.match(word) for word in words)
            if not is_elsewhere and not {GENERATED, TAUGHT} & set(words) and not is_sweep:
                form = smoke_form(words)
                found.setdefault(shlex.join(form), form)
    return list(found.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("run")
    done = forks.run(["run.py", "model=tiny", "data=sample_chat", *SMOKE, "name=mine", f"output_dir={folder}"])
    assert done.returncode == 0, done.stderr
    return folder / "mine"


def cases() -> list[Any]:
    """All forms; those after the second of a task are slow."""
    seen: Counter[str] = Counter()
    found: list[Any] = []
    for words in smoke_forms():
        seen[task_of(words)] += 1
        marks = [pytest.mark.slow] if seen[task_of(words)] > 1 else []
        found.append(pytest.param(words, id=shlex.join(words)[:90], marks=marks))
    return found


@pytest.mark.parametrize("words", cases())
def test_it_runs(words: list[str], run: Path, tmp_path: Path) -> None:
    places = [] if words[0].startswith("--") else [f"output_dir={tmp_path}"]
    done = forks.run(["run.py", *(word.replace("RUN", str(run)) for word in words), *places])
    assert done.returncode == 0, done.stderr[-2000:]
