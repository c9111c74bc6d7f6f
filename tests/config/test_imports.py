"""Composing, refusing and `--help` load no framework, so that they answer in about a second."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks.report_runs import made

REPOSITORY = Path(__file__).parents[2]
FRAMEWORKS = {"torch", "torch_xla", "transformers", "datasets", "numpy", "jax", "pyarrow", "tensorboard"}
RUN = """
import json, runpy, sys
try:
    runpy.run_path("run.py", run_name="__main__")
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--cfg", "job", "--resolve"],
        ["lora.targets=[]"],
        ["model=mistral7b", "data=ultrachat_ro", "hw=v5e8", "sharding=replicated", "lora=none"],
    ],
    ids=["help", "cfg", "refused", "known not to fit"],
)
def test_run_py_loads_no_framework(arguments: list[str]) -> None:
    loaded = {name.partition(".")[0] for name in modules(arguments)}
    assert "tpu_experiments" in loaded
    assert not loaded & FRAMEWORKS


def test_a_run_on_the_cpu_looks_at_no_plan_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    loaded = modules(["data=sample_text", f"data.sample_text.path={tmp_path}/empty.txt", f"output_dir={tmp_path}"])
    assert "tpu_experiments.tasks.train" in loaded
    assert "tpu_experiments.planning.check" not in loaded


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    made(tmp_path / "a")
    loaded = modules(["task=report", f"output_dir={tmp_path}", "hw=v6e8"])
    assert "tpu_experiments.tasks.report.page" in loaded
    assert not {name.partition(".")[0] for name in loaded} & FRAMEWORKS


def modules(arguments: list[str]) -> set[str]:
    """What run.py has loaded when it ends."""
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return set(json.loads(ended.stderr.splitlines()[-1]))
