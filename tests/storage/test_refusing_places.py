"""Local folders that refuse: one sentence before anything is lost, and after room was made the same end."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.preparing import digests, prepared, text_source, texts
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.storage import paths
from tpu_experiments.storage.lease import Lease
from tpu_experiments.storage.retry import StorageFailed, explain_storage_errors

TOKENIZER = Path(__file__).parents[2] / "tpu_experiments" / "samples" / "tokenizer"


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small disk of its own; skips where this account may not mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("this account may not mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def odd_places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("a")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    return {
        "/dev/null": "a file is where a folder is needed",
        "/dev/null/x": "a file is where a folder is needed",
        "/proc/x": "no folder can be made there",
        "/proc/1/x": "no folder can be made there",
        str(tmp_path / "file"): "a file is where a folder is needed",
        str(tmp_path / "file" / "x"): "a file is where a folder is needed",
        str(tmp_path / "circle" / "x"): "lead in a circle",
        str(tmp_path / "gone"): "a file is where a folder is needed",
        str(tmp_path / ("x/" * 2040)): "the name is too long",
    }


def test_an_odd_folder_is_one_sentence(tmp_path: Path) -> None:
    for place, words in odd_places(tmp_path).items():
        for use in (
            lambda p: paths.make_dirs(paths.join(p, "run")),
            lambda p: Lease(p, name="x", on_lost=int).acquire(),
        ):
            with pytest.raises(ConfigError, match=words) as refusal, explain_storage_errors(place):
                use(place)
            assert str(refusal.value).startswith(f"{place}; ")
            assert "\n" not in str(refusal.value)


def test_a_disk_mounted_read_only_is_one_sentence(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro,size=1m") as disk:
        for place in (str(disk), str(disk / "runs")):
            with pytest.raises(ConfigError, match="mounted read-only"), explain_storage_errors(place):
                paths.make_dirs(paths.join(place, "run"))


def test_an_error_elsewhere_keeps_its_trace(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_storage_errors(str(tmp_path / "runs")):
        (tmp_path / "other").read_text()


def test_a_disk_that_fills_in_the_preparation(tmp_path: Path) -> None:
    """From no room at all to enough: each time a sentence, then the same bytes as on a large disk."""
    tokenizer = load_tokenizer(str(TOKENIZER), revision=None, chat_template_path=None)
    sources = {"a": text_source(texts(tmp_path / "a.jsonl", 400))}
    settings = {"tokenizer": tokenizer, "window_tokens": 500, "workers": 1}
    prepared(sources, folder=tmp_path / "large", **settings)
    refusals: list[str] = []
    with mounted(tmp_path / "disk", "size=4k") as disk:
        for kib in (4, 16, 48, 96, 192, 1024):
            subprocess.run(["mount", "-o", f"remount,size={kib}k", str(disk)], check=True)
            try:
                with explain_storage_errors(str(disk / "p"), full="failed"):
                    prepared(sources, folder=disk / "p", **settings)
                break
            except StorageFailed as error:
                refusals.append(str(error))
        assert len(refusals) >= 2
        assert all("the disk is full; free some space" in sentence for sentence in refusals)
        assert digests(disk / "p") == digests(tmp_path / "large")
