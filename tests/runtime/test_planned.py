"""Programs that a plan compiled are loaded for exactly what they were compiled for, and never from damaged files."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_experiments.runtime.tpu import planned

TEXT, EXECUTABLE = "module @program {}", b"machine code"


def facts(*, text: str = TEXT, kind: str = "TPU v6 lite", **changed: Any) -> planned.Facts:
    chips = [SimpleNamespace(device_kind=kind, id=number, coords=(number, 0, 0), core_on_chip=0) for number in range(2)]
    given: dict[str, Any] = {"aliases": {3: 1}, "shardings": ["{replicated}"], "replicas": 1, "devices": chips}
    return planned.facts_of(text, **{**given, **changed})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with one program, as a plan leaves it."""
    made = tmp_path / "compiled"
    made.mkdir()
    planned.write(made, facts=facts(), executable=EXECUTABLE)
    assert planned.keep(made, folder=tmp_path / "cache") == planned.keep(made, folder=tmp_path / "cache")
    return tmp_path / "cache"


def test_a_planned_program_is_read(folder: Path) -> None:
    assert planned.read(folder, facts()) == EXECUTABLE


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "TPU v5 lite"}, "devices: .*TPU v6 lite.*, here .*TPU v5 lite"),
        ({"shardings": None}, r"shardings: \['{replicated}'\], here None"),
        ({"aliases": {}}, r"aliases: \[\[3, 1\]\], here \[\]"),
        ({"replicas": 2}, "replicas: 1, here 2"),
    ],
)
def test_one_for_another_machine_is_not(
    folder: Path, changed: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert planned.read(folder, facts(**changed)) is None
    assert_said(caplog, said)


def test_nor_with_other_flags_or_versions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
        assert planned.read(folder, facts()) is None
        assert_said(caplog, "flags: , here --xla_tpu_scoped_vmem_limit_kib=65536")
    monkeypatch.setattr(planned, "version", lambda _: "99")
    assert planned.read(folder, facts()) is None
    assert_said(caplog, "versions: .*, here .*'libtpu': '99'")


def test_another_program_is_not(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert planned.read(folder, facts(text="module @program { }")) is None
    assert_said(caplog, "none of the 1 in .* is this one")


@pytest.mark.parametrize("damage", ["executable cut", "executable gone", "facts cut"])
def test_a_damaged_one_is_not(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    (place,) = (folder / planned.PLANNED).iterdir()
    file = place / damage.split()[0].replace("facts", "facts.json")
    if damage.endswith("gone"):
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert planned.read(folder, facts()) is None
    assert_said(caplog, "is damaged, and its program is compiled")


def test_a_program_that_did_not_compile_is_not_kept(tmp_path: Path) -> None:
    assert planned.keep(tmp_path, folder=tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()


def assert_said(caplog: pytest.LogCaptureFixture, pattern: str) -> None:
    said = [record.getMessage() for record in caplog.records]
    assert any(re.search(pattern, line) for line in said), said
