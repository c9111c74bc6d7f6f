"""The notebooks of launch/, executed cell by cell where there is no TPU, Colab or Kaggle."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.launch.virtual_machine import make_machine

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "launch").glob("*.ipynb"))
SHORT = "trainer.max_stage_steps=2 sample.max_new_tokens=0"
# jupyter's own, about the event loop of a test that has none
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def executed(name: str, *, folder: Path, env: Mapping[str, str]) -> list[str]:
    """What each code cell printed."""
    notebook: Any = nbformat.read(REPOSITORY / "launch" / name, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=dict(env))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_what_it_printed(path: Path) -> None:
    notebook = json.loads(path.read_text())
    nbformat.validate(nbformat.from_dict(notebook))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert path.read_text() == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def test_there_are_two() -> None:
    assert [path.name for path in NOTEBOOKS] == ["colab.ipynb", "kaggle.ipynb"]


@pytest.mark.parametrize("name", ["colab.ipynb", "kaggle.ipynb"])
@pytest.mark.parametrize("address", ["", "nowhere"])
def test_a_notebook_alone_says_in_a_sentence_what_it_needs(tmp_path: Path, name: str, address: str) -> None:
    """Before it does anything; and where the address leads to no repository."""
    notebook: Any = nbformat.read(shutil.copy(REPOSITORY / "launch" / name, tmp_path), as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.raises(CellExecutionError):
        client.execute(env={**os.environ, "REPOSITORY": address})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = [cell for cell in cells if cell.execution_count]
    (error,) = [output for output in ran[-1].outputs if output.output_type == "error"]
    if address:
        said = "git clone --depth=1 ended with exit code 128; what is above says why."
        assert "'nowhere' does not exist" in ran[-1].outputs[0].text
    else:
        said = (
            "REPOSITORY is empty, and this notebook was opened without the project around it; write the address of "
            "your copy of it, as `git clone` takes it, between the quotes of REPOSITORY in this cell, and run the cell "
            "again."
        )
    assert (len(ran), error.traceback) == (2 if address else 1, [said])
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
@pytest.mark.xla
def test_the_colab_notebook_trains_and_gives_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_ACCELERATOR_TYPE", "PJRT_DEVICE", "REPOSITORY", "DATA"):
        monkeypatch.delenv(name, raising=False)
    output = tmp_path / "runs"
    env = {**os.environ, "OUTPUT": str(output), "MORE": SHORT}
    printed = executed("colab.ipynb", folder=REPOSITORY, env=env)
    assert "nothing to add" in printed[1]
    assert "1 x cpu, started in" in printed[2]
    assert "output_dir       ok" in printed[3]
    assert f"tensorboard --logdir {output}/gemma3_270m_chat/tensorboard" in printed[4]
    assert "finished gemma3_270m_chat" in printed[5]
    assert printed[6].strip() == f"{output}/adapter.zip"
    assert (output / "gemma3_270m_chat" / "adapter" / "adapter_model.safetensors").exists()
    assert any((output / "gemma3_270m_chat" / "tensorboard").iterdir())


@pytest.mark.parametrize(("kind", "more"), [("v5p-8", ""), ("v6e-4", "lora.r=8"), ("v5p-8", "hw=v5p-8")])
def test_colab_says_so_where_it_does_not_know_the_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: str
) -> None:
    """And does not train the smoke model on a paid TPU."""
    cells = [cell["source"] for cell in json.loads((REPOSITORY / "launch" / "colab.ipynb").read_text())["cells"]]
    first, chip = (
        "".join(next(cell for cell in cells if start in cell[0])) for start in ("import importlib", "from tpu_exp")
    )
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", kind)
    monkeypatch.setenv("MORE", more)
    asked: list[tuple[str, ...]] = []
    names: dict[str, Any] = {}
    exec(first, names)
    names["sh"] = lambda *command: asked.append(command)
    if "hw=" in more:
        exec(chip, names)
        assert asked[0].count(more) == 1
        assert "debug=smoke" not in asked[0]
        return
    with pytest.raises(names["Stop"], match=f"TPU_ACCELERATOR_TYPE={kind}; this notebook knows v5litepod-1, v6e-1"):
        exec(chip, names)
    assert asked == []


@pytest.mark.slow
def test_the_kaggle_notebook_makes_its_own_environment(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    env = machine.environ(MORE=f"{SHORT} hw.runtime=eager", OUTPUT=str(tmp_path / "runs"), HF_HUB_OFFLINE="1")
    env.pop("PJRT_DEVICE", None)
    printed = executed("kaggle.ipynb", folder=machine.root, env=env)
    assert "launch/startup.sh: ready after" in printed[1]
    assert "nothing found that would keep name=qwen05b_uk_law from starting" in printed[2]
    assert "finished qwen05b_uk_law" in printed[3]
    assert "report.html" in printed[4]
    assert Path(printed[5].strip()).exists()


@pytest.mark.slow
def test_a_run_on_kaggle_goes_on_in_the_next_session(tmp_path: Path) -> None:
    """Each session is stopped by its hours; the second has the output of the first as a read-only input."""
    machine = make_machine(tmp_path)
    working, added = tmp_path / "working", tmp_path / "input" / "notebook"
    run = "curriculum.stages.main.epochs=100000 trainer.max_stage_steps=1000000 trainer.log_every_steps=1 "
    run += "sample.max_new_tokens=0 hw.runtime=eager"
    env = machine.environ(MORE=run, OUTPUT=str(working / "runs"), HF_HUB_OFFLINE="1", HOURS="0.02")
    env.pop("PJRT_DEVICE", None)
    first = executed("kaggle.ipynb", folder=machine.root, env=env)
    assert "stopped after 0.02 hours, not finished" in first[3]
    assert "adapter is not there yet" in first[5]
    reached = steps_of(working / "runs" / "qwen05b_uk_law")
    added.parent.mkdir()
    working.rename(added)
    for path in [added, *added.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    second = executed("kaggle.ipynb", folder=machine.root, env={**env, "BEFORE": str(added / "runs")})
    assert f"copying the runs of an earlier session from {added / 'runs'}" in second[2]
    assert "stopped after 0.02 hours, not finished" in second[3]
    after = steps_of(working / "runs" / "qwen05b_uk_law")
    assert after[: len(reached)] == reached
    assert after == list(range(1, len(after) + 1))
    assert len(after) > len(reached) > 1


def steps_of(run: Path) -> list[int]:
    """Return the steps of a run's records of training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]
