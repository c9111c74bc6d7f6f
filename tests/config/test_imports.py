"""Composing, refusing and `--help` load no framework, so that they answer in about a second."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FRAMEWORKS = {"torch", "torch_xla", "transformers", "datasets", "numpy", "jax", "pyarrow", "tensorboard"}
RUN = """
import json, runpy, sys
try:
    runpy.run_path("run.py", run_name="__main__")
except SystemExit:
    pass
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--cfg", "job", "--resolve"], ["lora.targets=[]"]],
    ids=["help", "cfg", "refused"],
)
def test_run_py_loads_no_framework(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(ended.stderr.splitlines()[-1]))
    assert "tpu_experiments" in loaded
    assert not loaded & FRAMEWORKS
