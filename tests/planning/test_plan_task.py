"""task=plan end to end: the tiny model compiled for one v6e chip by the TPU's own compiler."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def plan(folder: Path, *overrides: str, task: str = "plan") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "run.py", f"task={task}", "~local", f"output_dir={folder}", "name=p", *overrides]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("plan")
    done = plan(folder, "hw=v6e1")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "plans" / "p" / "plan.json").read_text()), done.stdout


def test_the_tiny_model_fits_and_costs_something(planned: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, printed = planned
    hbm = found["hbm_gib_per_chip"]
    assert found["fits"]
    assert found["method"] == "compiled"
    # 1,467,520 parameters in float32 and two moments of 155,648, and nothing written twice.
    assert 4 * (1_467_520 + 2 * 155_648) / 2**30 < hbm["arguments"] < 0.01
    assert hbm["limit"] == 31.25
    assert 0 < hbm["outputs"] < 1e-5
    assert found["num_programs"] == 3
    assert found["compile_seconds"] > 1
    assert 0 < found["mfu"] < 1
    assert found["tokens_per_second_per_chip"] > 1000
    assert found["hours"] > 0
    assert found["usd"]["on_demand"] > found["usd"]["spot"] > 0
    assert found["versions"]["libtpu"] == "0.0.21"
    assert "fits" in printed
    assert "estimate" in printed
    assert (folder / "plans" / "p" / "plan.svg").read_text().startswith("<svg")


def test_an_epoch_is_as_long_as_the_prepared_data(planned: tuple[Path, dict[str, Any], str]) -> None:
    folder, first, _ = planned
    compiled = sorted((folder / "plans" / "compiled").iterdir())
    settings = ("curriculum=three_epochs", "data=sample_text", f"prepare.folder={folder}/prepared", "seed=7")
    unknown = plan(folder, "hw=v6e1", *settings)
    assert unknown.returncode == 0, unknown.stderr[-3000:]
    assert "data.sample_text is not prepared (task=prepare)" in unknown.stdout
    found = json.loads((folder / "plans" / "p" / "plan.json").read_text())
    assert found["hours"] is None
    assert found["estimated_cycles"] == first["estimated_cycles"]
    made = plan(folder, *settings, task="prepare")
    assert made.returncode == 0, made.stderr[-3000:]
    assert plan(folder, "hw=v6e1", *settings).returncode == 0
    [manifest] = (folder / "prepared").glob("sample_text-rows-*/manifest.json")
    rows = json.loads(manifest.read_text())["splits"]["train"]["rows"]
    found = json.loads((folder / "plans" / "p" / "plan.json").read_text())
    assert found["run"]["optimizer_steps"] == -(-3 * rows // 16)
    assert found["hours"] > 0
    assert sorted((folder / "plans" / "compiled").iterdir()) == compiled, "what was compiled is remembered"


def test_hardware_without_a_topology_is_refused(tmp_path: Path) -> None:
    done = plan(tmp_path, "hw=cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: hw=cpu; task=plan compiles for a TPU")
    assert not list(tmp_path.iterdir())
