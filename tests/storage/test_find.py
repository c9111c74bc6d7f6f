"""One search for a configured path, for data and models alike; patterns and URLs through the data tests."""

from pathlib import Path

import pytest

from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.huggingface import local_path
from tpu_experiments.storage import paths

SAMPLE = "tpu_experiments/samples/tokenizer"


def test_from_the_working_folder_then_from_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.find_local(SAMPLE) == paths.REPOSITORY / SAMPLE
    (tmp_path / SAMPLE).mkdir(parents=True)
    assert paths.find_local(SAMPLE) == Path(SAMPLE)
    assert paths.find_local(str(tmp_path)) == tmp_path
    assert paths.find_local(f"file://{tmp_path}") == tmp_path
    assert paths.find_local("nowhere") is None
    assert paths.find_local("gs://bucket/a") is None


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").touch()
    assert paths.find_local("~/a.jsonl") == tmp_path / "a.jsonl"


def test_data_and_models_search_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, expected in {SAMPLE: paths.REPOSITORY / SAMPLE, "org/model": None}.items():
        assert local_path(ModelConfig(name="m", path=path)) == expected
        assert paths.find_local(path) == expected
    (tmp_path / "file").touch()
    assert local_path(ModelConfig(name="m", path="file")) is None, "a checkpoint is a folder"


def test_near_misses(tmp_path: Path) -> None:
    (tmp_path / "wiki_ro.jsonl").touch()
    assert paths.near_misses(str(tmp_path / "wiki_or.jsonl")) == f"Did you mean wiki_ro.jsonl in {tmp_path}? "
    assert paths.near_misses(str(tmp_path / "something else")) == ""
    assert paths.near_misses(str(tmp_path / "gone" / "a")) == f"The folder {tmp_path / 'gone'} does not exist either. "
