"""Preparation that is cut short, killed, or done by other workers ends in the same bytes."""

import itertools
import os
import signal
import subprocess
import sys

import pytest

from tests import forks
from tests.data.preparing import REPOSITORY, digests, prepared, text_source, texts
from tests.tiers import only
from tpu_experiments.config.data_schema import DuplicatesConfig
from tpu_experiments.data.steps import blocks as blocks_module

SAMPLE = ("model=tiny", "data=sample_text")


@pytest.mark.parametrize("workers", only(["2"], [1, 2]))
def test_a_preparation_that_was_cut_short_resumes(tmp_path, tokenizer, monkeypatch, workers):
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", 16)
    path = texts(tmp_path / "a.jsonl", 100)

    def made(folder, **settings):
        sources = {"a": text_source(path, duplicates=DuplicatesConfig(near=0.9))}
        prepared(sources, folder=folder, tokenizer=tokenizer, window_tokens=200, **settings)
        return digests(folder)

    whole = made(tmp_path / "whole", workers=1)
    assert made(tmp_path / "cut", workers=workers) == whole
    indices = sorted((tmp_path / "cut").rglob("*.index.safetensors"))
    records = sorted((tmp_path / "cut").glob("a-rows-*/*/*.json"))
    assert (len(indices), len(records) > 3) == (7, True)
    for marker in [*indices[::2], *records[::2], *(tmp_path / "cut").glob("*/manifest.json")]:
        marker.unlink()  # written last, so what a kill leaves lacks it
    for data in (indices[2].with_name(indices[2].name.replace("index", "tokens")), records[0].with_suffix(".npy")):
        data.write_bytes(b"half")
    next((tmp_path / "cut").glob("*/blocks.json")).unlink()
    kept = {path: path.stat().st_mtime_ns for path in [*indices[1::2], *records[1::2]]}
    assert made(tmp_path / "cut", workers=workers) == whole
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what is complete is not made again"


def test_documents_are_kept_where_the_tokens_are_there_already(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", 16)
    source = {"a": text_source(texts(tmp_path / "a.jsonl", 60))}
    whole = prepared(source, folder=tmp_path / "at_once", tokenizer=tokenizer, documents="keep") and digests(
        tmp_path / "at_once"
    )
    prepared(source, folder=tmp_path / "later", tokenizer=tokenizer)
    assert not list((tmp_path / "later").rglob("*.parquet"))
    prepared(source, folder=tmp_path / "later", tokenizer=tokenizer, documents="keep")
    assert digests(tmp_path / "later") == whole
    kept = sorted((tmp_path / "later").rglob("*.parquet"))
    assert len(kept) == 4
    kept[1].unlink()
    others = {path: path.stat().st_mtime_ns for path in kept if path != kept[1]}
    prepared(source, folder=tmp_path / "later", tokenizer=tokenizer, documents="keep")
    assert digests(tmp_path / "later") == whole
    assert {path: path.stat().st_mtime_ns for path in others} == others, "what is there is not written again"


@pytest.mark.slow
def test_the_data_of_a_tpu_run_is_prepared_without_a_tpu(tmp_path):
    """The same rows as on the machine with the chips: their folder is named by a hash of what makes them."""
    for hw in ("v6e8", "cpu"):
        words = ("trainer.seq_len=128", f"hw={hw}", f"output_dir={tmp_path}")
        done = forks.run(["run.py", "task=prepare", *SAMPLE, *words])
        assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("prepared/sample_text-rows-*")
    assert (folder / "manifest.json").exists()


READER = """
import os
from tpu_experiments.data.documents import Document

def read(spec):
    yield from (Document(id=str(n), text=f"{os.environ['OWN']} {n}", messages=None) for n in range(20))
"""


def test_variables_of_the_machine_reach_a_preparation(tmp_path):
    """`hw.env` holds such things as the address of a mirror of the Hub."""
    (tmp_path / "look.py").write_text(READER)
    words = ["hw=v6e8", "+hw.env.OWN=mirror", "data.sample_text._target_=look.read", "plugins=[look]"]
    words += ["trainer.seq_len=128", f"output_dir={tmp_path}"]
    done = forks.run(["run.py", "task=prepare", *SAMPLE, *words], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_killed_anywhere_it_resumes_to_the_same_bytes(tmp_path, tokenizer):
    """SIGKILL after ever longer times, until one start gets to its end."""
    path = texts(tmp_path / "a.jsonl", 12_000)
    command = [sys.executable, "run.py", "task=prepare", *SAMPLE, f"data.sample_text.path={path}"]
    command += ["prepare.window_tokens=50000", "prepare.workers=1", "data.sample_text.duplicates.near=0.9"]
    starts = 0
    for seconds in itertools.count(3.0, 1.5):
        starts += 1
        child = subprocess.Popen([*command, f"output_dir={tmp_path / 'cut'}"], cwd=REPOSITORY, start_new_session=True)
        try:
            assert child.wait(timeout=seconds) == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert starts > 1, "it was never killed"
    subprocess.run([*command, f"output_dir={tmp_path / 'whole'}"], cwd=REPOSITORY, check=True, timeout=300)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_ray_makes_the_same_bytes(tmp_path, tokenizer):
    """On Ray's cluster of this machine, in a process of its own: Ray leaves threads and signal handlers behind."""
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(5):
        texts(folder / f"{number}.jsonl", 300, first=300 * number)
    command = [sys.executable, "run.py", "task=prepare", *SAMPLE, f"data.sample_text.path={folder}"]
    command += ["prepare.engine=ray", "prepare.workers=2", "prepare.window_tokens=2000", f"output_dir={tmp_path}"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    sources = {"sample_text": text_source(folder, format="text", eval_fraction=0.05, test_fraction=0.05)}
    settings = {"window_tokens": 2000, "workers": 1}
    prepared(sources, folder=tmp_path / "local", tokenizer=tokenizer, seq_lens=[128], **settings)
    assert digests(tmp_path / "prepared") == digests(tmp_path / "local")
