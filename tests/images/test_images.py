"""Colab's and Kaggle's images, made here: notebooks run in them, Colab's jax and libtpu make what the lock's make."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.images import NAMES, REPOSITORY, differences, environ, make, requirements_of, run_cells
from tpu_experiments.runtime import patches

# Packages of 3 to 9 GB are fetched, or linked out of uv's cache.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHORT = "trainer.max_stage_steps=2 sample.max_new_tokens=0"


@dataclass(frozen=True)
class Image:
    """An environment in which its notebook has run, uploaded alone into a folder."""

    environment: Path
    folder: Path
    fresh: Mapping[str, str | None]
    """What differed from the list before the notebook ran."""
    cells: list[dict[str, Any]]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run the image's Python in the notebook's clone of the project."""
        python = str(self.environment / "bin" / "python")
        env = environ(self.environment, HF_HUB_OFFLINE="1")
        cwd = self.folder / "tpu_experiments"
        return subprocess.run([python, *command], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def imaged(name: str, folder: Path) -> Image:
    environment = folder / "environment"
    try:
        make(name, environment)
    except LookupError as error:
        pytest.skip(str(error))
    fresh = differences(name, environment)
    alone = folder / "content"
    alone.mkdir()
    notebook = Path(shutil.copy(REPOSITORY / "launch" / f"{name}.ipynb", alone))
    given = {"REPOSITORY": REPOSITORY.as_uri(), "OUTPUT": str(alone / "runs"), "HF_HUB_OFFLINE": "1", "MORE": SHORT}
    given |= {"TPU_EXPERIMENTS_VENV": str(folder / "own"), "PYTHON": str(environment / "bin" / "python")}
    return Image(environment, alone, fresh, run_cells(notebook, environment, environ(environment, **given)))


@pytest.fixture(scope="module")
def colab(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return imaged("colab", tmp_path_factory.mktemp("colab"))


def test_each_image_says_when_and_where_it_was_read() -> None:
    assert NAMES == ["colab", "kaggle"]
    for name in NAMES:
        text = (Path(__file__).parent / f"{name}.txt").read_text()
        assert "Read on 2026-" in text
        assert "commit" in text
        assert requirements_of(name)[0] in ("3.12", "3.13")


def test_every_cell_of_the_colab_notebook_runs_in_its_image(colab: Image) -> None:
    assert colab.fresh == {}
    assert [cell["traceback"] for cell in colab.cells] == [[]] * 7
    _, added, chip, place, _, trained, adapter = (cell["text"] for cell in colab.cells)
    assert "kept torch 2.9.0, torch_xla 2.9.0, torchvision 0.24.0, libtpu 0.0.21.1, jax 0.7.2" in added
    assert "1 x cpu, started in" in chip
    assert "output_dir       ok" in place
    assert "finished gemma3_270m_chat" in trained
    assert adapter.strip() == str(colab.folder / "runs" / "adapter.zip")


def test_colab_keeps_what_belongs_together(colab: Image) -> None:
    changed = differences("colab", colab.environment)
    assert {"transformers", "datasets"} <= set(changed)
    assert not {"torch", "torch_xla", "torchvision", "libtpu", "jax", "jaxlib", "numpy", "ipykernel"} & set(changed)


@pytest.mark.parametrize("hw", ["colab", "colab_v6e"])
def test_the_doctor_finds_nothing_wrong_with_colabs_versions(colab: Image, hw: str) -> None:
    job = ("experiment=gemma3_270m_chat", f"hw={hw}", "data_size=sample")
    done = colab.run("run.py", "task=doctor", *job, "task.checks=[versions]")
    assert "versions         ok           Python 3.13, torch 2.9.0" in done.stdout, done.stdout + done.stderr[-2000:]
    assert done.returncode == 0


def test_colabs_jax_makes_the_kernels_of_the_locks(colab: Image) -> None:
    """Programs for the TPU up to names, and to the bit what they compute when interpreted."""
    theirs = colab.run("-m", "tests.images.programs")
    assert theirs.returncode == 0, theirs.stderr[-2000:]
    ours = run_here("-m", "tests.images.programs")
    assert ours.returncode == 0, ours.stderr[-2000:]
    made, known = json.loads(theirs.stdout), json.loads(ours.stdout)
    assert (made.pop("jax"), known.pop("jax")) == (*patches.ALSO_FIT["jax"], patches.WRITTEN_FOR["jax"])
    assert made == known
    assert len(set(made["programs"].values())) == len(made["programs"]) == 17


@pytest.mark.parametrize("hw", ["colab", "colab_v6e"])
def test_colabs_libtpu_compiles_the_step_as_the_locks(colab: Image, hw: str) -> None:
    """A layer with the kernel: the same memory, and the same cycles."""
    job = ["model=tiny", "data=[sample_text]", "model.attention=flash", "model.init=random", "tuned=off", f"hw={hw}"]
    job += ["model.arch.num_hidden_layers=1", "trainer.global_batch_rows=16", "trainer.seq_len=128", "name=p"]
    plans = {}
    for who, run in (("theirs", colab.run), ("ours", run_here)):
        output = colab.folder / who / hw
        done = run("run.py", "task=plan", *job, f"output_dir={output}")
        assert done.returncode == 0, done.stderr[-2000:]
        plans[who] = json.loads((output / "plans" / "p" / "plan.json").read_text())
    assert [plans[who]["versions"]["libtpu"] for who in ("theirs", "ours")] == ["0.0.21.1", "0.0.21"]
    for key in ("hbm_gib_per_chip", "estimated_cycles", "kernels", "calibration"):
        assert plans["theirs"][key] == plans["ours"][key]


def run_here(*command: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's Python, without the flags by which the tests have XLA compile fast."""
    env = environ(Path(sys.prefix), HF_HUB_OFFLINE="1")
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)


def test_every_cell_of_the_kaggle_notebook_runs_in_its_image(tmp_path: Path) -> None:
    """In an environment of its own, by the image's Python: the image's torch_xla 2.8.0 is not touched."""
    kaggle = imaged("kaggle", tmp_path)
    assert [cell["traceback"] for cell in kaggle.cells] == [[]] * 6
    assert (kaggle.fresh, differences("kaggle", kaggle.environment)) == ({}, {})
    _, made, ready, trained, shown, adapter = (cell["text"] for cell in kaggle.cells)
    assert "with Python 3.12" in made
    assert "launch/startup.sh: ready after" in made
    assert "nothing found that would keep name=qwen05b_uk_law from starting" in ready
    assert "finished qwen05b_uk_law" in trained
    assert "report.html" in shown
    assert Path(adapter.strip()).exists()
