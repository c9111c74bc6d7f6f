"""What a crash cannot have left in a checkpoint folder is refused in one sentence, and nothing of it is run."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest

from tests.checkpoint.saved import load_latest
from tests.checkpoint.test_store import save
from tpu_experiments.checkpoint.manifest import COMMIT, PROGRESS
from tpu_experiments.checkpoint.store import latest_step
from tpu_experiments.config.errors import ConfigError

TENSORS = "parameters.safetensors"


class Bomb:
    """A pickle that would make a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def replaced(target: Path, name: str, content: bytes) -> None:
    """Change a file and the manifest with it, as who can write the bucket could."""
    (target / name).write_bytes(content)
    manifest = json.loads((target / COMMIT).read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (target / COMMIT).write_text(json.dumps(manifest))


def listing(name: str):
    return lambda target: replaced(target, name, b"anything") if "/" not in name else listed(target, name)


def listed(target: Path, name: str) -> None:
    manifest = json.loads((target / COMMIT).read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (target / COMMIT).write_text(json.dumps(manifest))


def manifest_with(**changed: object):
    def change(target: Path) -> None:
        manifest = json.loads((target / COMMIT).read_text()) | changed
        (target / COMMIT).write_text(json.dumps(manifest))

    return change


def beside(name: str):
    return lambda target: (target / name).write_bytes(pickle.dumps(Bomb(target / "ran")))


def in_the_place_of(name: str):
    return lambda target: replaced(target, name, pickle.dumps(Bomb(target / "ran")))


def file_of(name: str, content: bytes):
    return lambda target: replaced(target, name, content)


CASES = {
    "a pickle beside the files": (beside("optimizer.pt"), "optimizer.pt; a checkpoint holds safetensors and JSON"),
    "a pickle with Hugging Face's name": (beside("pytorch_model.bin"), "pytorch_model.bin; a checkpoint holds"),
    "a pickle in capitals": (beside("STATE.PKL"), "STATE.PKL; a checkpoint holds"),
    "a pickle as tensors": (in_the_place_of(TENSORS), "its header should"),
    "a pickle as progress": (in_the_place_of(PROGRESS), "progress.json; it cannot be read"),
    "a way out of the folder": (listing("../../../secret.safetensors"), "'../../../secret.safetensors', which is no"),
    "a name from the root": (listing("/etc/passwd"), "'/etc/passwd', which is no name of a checkpoint's file"),
    "a name with a zero": (manifest_with(files={"a\0.safetensors": {}, PROGRESS: {}}), "which is no name"),
    "a size that is none": (
        manifest_with(files={PROGRESS: {"bytes": -1, "sha256": "0" * 64}}),
        "it gives progress.json -1 bytes",
    ),
    "a checksum that is none": (manifest_with(files={PROGRESS: {"bytes": 1, "sha256": "x"}}), "the SHA-256 'x'"),
    "no progress": (manifest_with(files={}), "does not list progress.json"),
    "another step": (manifest_with(step=3), "it says step 3, unlike its folder's name"),
    "NaN in the manifest": (manifest_with(eval_loss=float("nan")), "COMMIT.json; it holds NaN"),
    "NaN in progress": (file_of(PROGRESS, b'{"step": NaN}'), "progress.json; it cannot be read (it holds NaN"),
    "a name twice in progress": (file_of(PROGRESS, b'{"step": 1, "step": 2}'), "'step' comes twice"),
    "progress that is a list": (file_of(PROGRESS, b"[]"), "progress.json; it is no JSON object"),
    "an endless header": (file_of(TENSORS, (2**40).to_bytes(8, "little") + b"{}"), "should have 1,099,511,627,776"),
    "a header over the limit": (file_of(TENSORS, (10**8 + 1).to_bytes(8, "little")), "should have 100,000,001 bytes"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_sentence_and_nothing_runs(case, tmp_path):
    change, words = CASES[case]
    save(str(tmp_path), 1)
    target = Path(save(str(tmp_path), 2))
    change(target)
    with pytest.raises(ConfigError) as caught:
        load_latest(str(tmp_path))
    message = str(caught.value)
    assert words in message
    assert len(message.splitlines()) == 1
    assert "find out who wrote it" in message
    assert not (target / "ran").exists()


def test_a_folder_for_a_file_and_a_file_for_a_folder_are_one_sentence(tmp_path):
    (tmp_path / "step_00000002" / "COMMIT.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"COMMIT\.json; it is a folder where a file belongs"):
        latest_step(str(tmp_path))
    (tmp_path / "step_00000003").write_text("a")
    with pytest.raises(ConfigError, match="step_00000003; it is a file where a checkpoint's folder belongs"):
        latest_step(str(tmp_path))
