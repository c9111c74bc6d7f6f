"""Ctrl-C before the training is one sentence and exit code 130, wherever it comes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SENTENCE = "error: interrupted; the same command resumes from the last checkpoint, where there is one."
LOADING = re.compile(r"[\d:]{8} \S+: loading torch and its dependencies")
COMMAND = """
import importlib.abc, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
MODULE = sys.argv.pop(1)

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.path.insert(0, {root!r})
runpy.run_path({root!r} + "/run.py", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["hydra", "tpu_experiments.tasks.train"])
def test_it_is_one_sentence(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND.format(root=str(REPOSITORY)), module, "hw.runtime=eager"]
    done = subprocess.run(
        [*command, f"output_dir={tmp_path / 'out'}"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 130, done.stderr
    progress = [line for line in done.stderr.splitlines() if LOADING.fullmatch(line)]
    assert [line for line in done.stderr.splitlines() if line not in progress] == [SENTENCE]
    assert len(progress) == (module != "hydra")  # composed and checked, the task is what is loaded
    assert not (tmp_path / "out").exists()
