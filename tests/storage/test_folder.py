"""A run folder belongs to one config; a refusal writes nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RESULT, RunFolder, open_run

MakeConfig = Callable[..., Config]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_opening_writes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = open_run(make_config("name=x", f"output_dir={tmp_path}/outputs"))
    assert not folder.exists()
    assert folder.finished() is None
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("base", ["local", "memory"])
def test_the_same_config_opens_it_again(base: str, make_config: MakeConfig, tmp_path: Path) -> None:
    output_dir = str(tmp_path) if base == "local" else f"memory://{tmp_path.name}"
    config = make_config("name=x", f"output_dir={output_dir}")
    folder = open_run(config)
    folder.create(config)
    assert open_run(config) == folder == RunFolder(output_dir, "x")
    stored = OmegaConf.create(paths.read_text(folder.config_path))
    assert stored == OmegaConf.structured(config)


def test_a_change_of_hardware_resumes_and_is_noted(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["name=x", f"output_dir={tmp_path}"]
    first = make_config(*overrides)
    open_run(first).create(first)
    identity = (tmp_path / "x" / "identity.json").read_bytes()
    second = make_config(*overrides, "hw.num_threads=2")
    open_run(second).create(second)
    assert (tmp_path / "x" / "identity.json").read_bytes() == identity
    assert OmegaConf.load(tmp_path / "x" / "config.yaml").hw.num_threads == 2


def test_another_config_is_refused_with_the_changed_keys(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["name=x", f"output_dir={tmp_path}"]
    first = make_config(*overrides)
    open_run(first).create(first)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"name=x; .*optim\.lr=.*, now 0\.5; choose another name="):
        open_run(make_config(*overrides, "optim.lr=0.5"))
    assert snapshot(tmp_path) == before


def test_a_foreign_folder_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("irreplaceable")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"x exists and is not a run folder .*choose another name="):
        open_run(make_config("name=x", f"output_dir={tmp_path}"))
    assert snapshot(tmp_path) == before


def test_a_file_of_that_name_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="is not a run folder"):
        open_run(make_config("name=x", f"output_dir={tmp_path}"))


def test_an_empty_folder_and_a_start_killed_in_create_are_taken(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".identity.json.1234.tmp").write_text("{")
    config = make_config("name=x", f"output_dir={tmp_path}")
    open_run(config).create(config)
    assert open_run(config).exists()


def test_finished_only_with_the_status_finished(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    (tmp_path / "x").mkdir()
    path = Path(folder.path(RESULT))
    path.write_text(json.dumps({"status": "stopped"}))
    assert folder.finished() is None
    path.write_text(json.dumps({"status": "finished", "eval_loss": 2.5}))
    assert folder.finished() == {"status": "finished", "eval_loss": 2.5}


def test_a_damaged_identity_is_made_anew_while_there_is_nothing_to_lose(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config("name=x", f"output_dir={tmp_path}")
    open_run(config).create(config)
    path = tmp_path / "x" / "identity.json"
    whole = path.read_text()
    path.write_text(whole[:100])
    open_run(config).create(config)
    assert path.read_text() == whole
    path.write_text(whole[:100])
    (tmp_path / "x" / "checkpoints" / "step_00000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"identity\.json is damaged .*; restore the file, or choose another name="):
        open_run(config)
