"""launch/on_vm.py: compiled programs between a folder and a bucket, and a command that it runs."""

import os
import sys
from pathlib import Path

import pytest

from launch import on_vm
from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError

pytest_plugins = ("tests.gcs",)


def test_only_what_is_missing_or_other_is_copied(gcs_bucket: str, tmp_path: Path) -> None:
    url, here, there = f"{gcs_bucket}/cache", tmp_path / "a", tmp_path / "b"
    (here / "0").mkdir(parents=True)
    (here / "0" / "one").write_bytes(b"1")
    (here / "two").write_bytes(b"22")
    assert on_vm.push(str(here), url) == 0  # written a moment ago, perhaps not to the end
    assert on_vm.push(str(here), url, age_seconds=0.0) == 2
    assert on_vm.push(str(here), url, age_seconds=0.0) == 0
    (here / "two").write_bytes(b"222")
    assert on_vm.push(str(here), url, age_seconds=0.0) == 1
    assert on_vm.pull(str(there), url) == 2
    assert on_vm.pull(str(there), url) == 0
    assert (there / "0" / "one").read_bytes() == b"1"
    assert (there / "two").read_bytes() == b"222"
    assert on_vm.pull(str(there), f"{gcs_bucket}/nothing") == 0


def test_where_programs_are_kept() -> None:
    recipe = ("experiment=mistral7b_ro", "output_dir=gs://bkt/runs", "hw.compile_cache=/disk/programs")
    folder, url = on_vm.places_of(composed(*recipe)) or ("", "")
    assert folder == "/disk/programs"
    assert url.startswith("gs://bkt/runs/compile_cache/v6e8/torch_xla-2.9.0_libtpu-")
    spawned = composed(*recipe, "hw.parallel=spawn", "sharding=replicated")
    assert on_vm.places_of(spawned) == (folder, url)  # the processes' folders lie in it
    assert on_vm.places_of(composed("experiment=mistral7b_ro", "hw.compile_cache=/disk/programs")) is None
    assert on_vm.places_of(composed("experiment=mistral7b_ro", "output_dir=gs://bkt/runs")) is None  # none are kept


def test_a_bucket_out_of_reach_keeps_nothing_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: str, url: str, *, age_seconds: float) -> int:
        raise OSError("no network")

    monkeypatch.setattr(on_vm, "push", refuse)
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    assert on_vm.run(command, (str(tmp_path), "gs://bkt/cache")) == 7
    assert "push of gs://bkt/cache failed (OSError: no network)" in capfd.readouterr().err


def test_a_machine_nobody_knows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
    assert on_vm.hw_of_machine() == "v6e4"
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v99-4")
    with pytest.raises(ConfigError, match=r"rent.accelerator_type=v99-4"):
        on_vm.hw_of_machine()
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    if not os.path.exists("/dev/accel0"):
        assert on_vm.hw_of_machine() == "cpu"
