"""Compiled programs kept in a folder: the same run finds its own in another process, whatever its hash seed was.

torch_xla 2.9 writes programs and says `Deserializing serialized executable not supported` when it reads one, on a CPU
and on a TPU, so a program that is found counts as `unreadable`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import composed
from tests.training.runs import run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.processes.env import compile_cache_folder

COMMON = (
    "data=[sample_text]",
    "debug=smoke",
    "lora=all_linear_r8",
    "trainer.max_stage_steps=1",
    "sample.max_new_tokens=0",
)


def result_of(tmp_path: Path, *overrides: str, name: str, hash_seed: str, model: str = "gemma3_270m") -> dict[str, Any]:
    """result.json of a run that keeps its programs in one folder."""
    own = (f"model={model}", f"name={name}", f"hw.compile_cache={tmp_path / 'programs'}", *overrides)
    done = run(*COMMON, *own, output_dir=tmp_path, env={"PYTHONHASHSEED": hash_seed})
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads((tmp_path / name / "result.json").read_text()))


@pytest.mark.slow
@pytest.mark.xla
def test_the_same_run_in_another_process_finds_all_its_programs(tmp_path):
    """Seeds 1 and 3 put the two layer types of Gemma 3 into a set in different orders, and its forward pass goes over
    that set (transformers 5.23, modeling_gemma3.py:549): the graph is hashed from its outputs, so it stays the same."""
    first = result_of(tmp_path, name="first", hash_seed="1")
    stored = sorted(path.name for path in (tmp_path / "programs").iterdir())
    second = result_of(tmp_path, name="second", hash_seed="3")
    folder, programs = str(tmp_path / "programs"), first["expected_programs"]
    assert first["compile_cache"] == {"folder": folder, "hits": 0, "misses": programs, "unreadable": 0}
    assert len(stored) == programs
    cache = second["compile_cache"]
    assert (cache["misses"], cache["hits"] + cache["unreadable"]) == (0, programs)
    assert second["num_compiles"] == programs - cache["hits"]
    assert sorted(path.name for path in (tmp_path / "programs").iterdir()) == stored
    assert second["eval_loss"] == first["eval_loss"]


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("canary", ["never", "always"])
def test_a_run_that_resumes_from_a_checkpoint_finds_its_programs(tmp_path, canary):
    """What lies on the device is part of a traced step, in the order in which it came there (BuiltModel.order)."""
    own = ("trainer.trace_every_steps=1", "trainer.max_stage_steps=3", f"trainer.canary.when={canary}")
    own = (*own, "checkpoint.every_steps=1", "checkpoint.keep_last=3")
    result_of(tmp_path, *own, name="again", hash_seed="1", model="qwen05b")
    folder = tmp_path / "again"
    (folder / "result.json").unlink()
    for step in (2, 3):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    resumed = result_of(tmp_path, *own, name="again", hash_seed="1", model="qwen05b")
    cache = resumed["compile_cache"]
    assert (cache["misses"], cache["hits"] + cache["unreadable"]) == (0, resumed["expected_programs"])
    assert resumed["goodput"]["run"]["lives"] == 2


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (["hw=cpu"], None),
        (["hw=v6e8"], None),
        (["hw=v6e8", "hw.compile_cache=none"], None),
        (["hw=v6e8", "hw.compile_cache=/disk/programs"], "/disk/programs"),
        (["hw=v6e8", "hw.compile_cache=/disk/programs", "hw.parallel=spawn"], "/disk/programs/3"),
        (["hw=cpu", "hw.compile_cache=/disk/programs"], "/disk/programs"),
        (["hw=cpu", "hw.compile_cache=/disk/programs", "hw.runtime=eager"], None),
        (["hw=cpu", "hw.runtime=torchtpu"], None),
        (["hw=v6e1", "hw.runtime=torchtpu"], "/cache/tpu_experiments/compile_cache"),
        (["hw=v6e1", "hw.runtime=torchtpu", "hw.compile_cache=none"], None),
    ],
)
def test_where_programs_are_kept(overrides, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert compile_cache_folder(composed(*overrides), process=3) == folder


def test_a_bucket_is_refused():
    with pytest.raises(ConfigError, match=r"hw.compile_cache=gs://bucket/programs; programs are read and written"):
        composed("hw.compile_cache=gs://bucket/programs")
