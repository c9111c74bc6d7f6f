"""Records that a power cut or an editor damaged: put aside and told, and the run goes on."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.jsonl import JsonlLogger
from tpu_experiments.loggers.provenance import write_provenance
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder, open_run

BAD_LINES = {
    "not UTF-8": b'{"step": 2, "a": "\xff\xfe"}',
    "not JSON": b"step 2, loss 3",
    "NUL bytes": b"\0" * 512,
    "half a record": b'{"step": 2, "time": 17',
    "two records in one line": b'{"step": 2}{"step": 3}',
    "no object": b"[1, 2]",
    "a number": b"3",
    "no step": b'{"time": 1.0}',
    "a step that is no number": b'{"step": "2"}',
    "nested": b"[" * 100_000,
    "empty": b"",
}


@pytest.mark.parametrize("remote", [False, True], ids=["local", "memory"])
def test_a_line_that_cannot_be_read_is_moved_aside(
    remote: bool, make_context: Callable[..., LoggerContext], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    context = make_context(output_dir=f"memory://{tmp_path.name}" if remote else None)
    file, aside = context.run_folder.path("metrics.jsonl"), context.run_folder.path("metrics.bad.jsonl")
    for place, (name, bad) in itertools.product(("first", "middle", "last", "torn"), BAD_LINES.items()):
        if place == "torn" and not bad:
            continue
        lines = [b'{"step": %d, "time": 1.5}' % step for step in (1, 2, 3)]
        lines.insert({"first": 0, "middle": 1}.get(place, 3), bad)
        paths.write_bytes_atomic(file, b"\n".join(lines) + (b"" if place == "torn" else b"\n"))
        paths.remove_tree(aside)
        caplog.clear()
        logger = JsonlLogger(replace(context, resume_step=2))
        logger.scalars(3, {"train/loss": 7.0})
        logger.finish()
        records = [json.loads(line) for line in paths.read_text(file).splitlines()]
        assert [record["step"] for record in records] == [1, 2, 3], (place, name)
        assert paths.read_bytes(aside) == bad + b"\n", (place, name)
        told = [text for text in caplog.messages if "cannot be read" in text]
        assert len(told) == 1, (place, name)
        assert f"1 lines that cannot be read were moved to {aside}" in told[0]


def test_what_is_moved_aside_again_is_added(make_context: Callable[..., LoggerContext]) -> None:
    context = make_context()
    file = Path(context.run_folder.path("metrics.jsonl"))
    for text in ("x\n", "y\n"):
        file.write_text(text)
        JsonlLogger(make_context(resume_step=2)).finish()
    assert file.with_name("metrics.bad.jsonl").read_text() == "x\ny\n"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"lives": 3}', b'{"lives": [{"a": 1}', b"\0" * 99])
def test_a_torn_provenance_is_begun_anew(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(str(tmp_path), "x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "provenance.json").write_bytes(content)
    write_provenance(folder, {"device": "cpu"})
    assert json.loads((tmp_path / "x" / "provenance.json").read_text()) == {"lives": [{"device": "cpu"}]}
    assert (tmp_path / "x" / "provenance.bad.json").read_bytes() == content
    assert "provenance.json cannot be read" in caplog.text


def test_a_torn_result_lets_the_run_go_on(
    make_config: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("name=x", f"output_dir={tmp_path}")
    open_run(config).create(config)
    result, aside = tmp_path / "x" / "result.json", tmp_path / "x" / "result.bad.json"
    for content in (b"", b"{", b"\xff", b"[]", b'{"status": "fini', b"\0" * 99, b'{"a": NaN}'):
        aside.unlink(missing_ok=True)
        caplog.clear()
        result.write_bytes(content)
        (tmp_path / "x" / "config.yaml").write_bytes(content)
        assert open_run(config).finished() is None
        assert result.exists(), "a look changes nothing"
        open_run(config).create(config)
        assert not result.exists()
        assert aside.read_bytes() == content
        assert "result.json cannot be read" in caplog.text
        assert b"output_dir" in (tmp_path / "x" / "config.yaml").read_bytes()
