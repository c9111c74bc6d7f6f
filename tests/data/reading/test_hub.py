"""Data sets of the Hub: from a stand-in on loopback by the real clients, in processes of their own, and without any.

The clients read their settings when they are imported, and the tests' own process has them offline.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import DatasetInfo

from tests.data.preparing import REPOSITORY
from tests.data.readers import read, spec_for
from tests.hub import HubServer
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.reading.hub import fingerprint_of_hub
from tpu_experiments.data.reading.locations import list_files

CHILD = """
import json, resource, sys
import datasets, huggingface_hub
from tests.data.readers import spec_for
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.reading.sources import read_documents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows, error = [], ""
try:
    for row in read_documents(spec_for("org/set", **json.loads(sys.argv[1]))):
        rows.append([row.place, getattr(row, "reason", "") or row.text[:40]])
except ConfigError as caught:
    error = str(caught)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"rows": rows, "error": error, "grown_mib": grown / 1024}))
"""
NUM_ROWS = 4000


def read_from(hub: HubServer, home: Path, **values: Any) -> dict[str, Any]:
    """What a process with the Hub's clients reads: place and text, or reason, of every row."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps({"format": "auto", **values})],
        env=os.environ | hub.environment(home),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def array(path: Path, count: int, *, chars: int) -> None:
    """A .json file that is one array of texts."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            file.write(("[" if i == 0 else ",") + json.dumps({"text": f"{i} " + "mare " * (chars // 5)}))
        file.write("]")


def test_arrays_are_read_as_local_ones_are_once_and_in_little_memory(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    array(folder / "train_a.json", NUM_ROWS, chars=10_000)
    (folder / "train_b.json").write_text('[{"text": "ultimul"}, {"text": 7}]')
    with HubServer(folder) as hub:
        found = read_from(hub, tmp_path / "home")
    places = [f"row {i} of train_a.json" for i in range(1, NUM_ROWS + 1)]
    assert [place for place, _ in found["rows"]] == [*places, "row 1 of train_b.json", "row 2 of train_b.json"]
    assert [text[:5] for _, text in found["rows"][:2]] == ["0 mar", "1 mar"]
    assert [text for _, text in found["rows"][-2:]] == ["ultimul", "wrong_type"]
    assert dict(hub.reads) == {"train_a.json": 1, "train_b.json": 1}
    assert hub.read_bytes["train_a.json"] == (folder / "train_a.json").stat().st_size
    assert found["grown_mib"] < 200  # 40 MB of text; taken whole it was 480


def test_other_sets_are_streamed_by_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    table = pyarrow.table({"id": ["7", None], "text": ["a", "b"]})
    pyarrow.parquet.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
    with HubServer(folder) as hub:
        found = read_from(hub, tmp_path / "home")
        assert found["rows"] == [["row 1 of org/set", "a"], ["row 2 of org/set", "b"]]
        missing = read_from(hub, tmp_path / "home", hub_split="validation")["error"]
    assert missing.startswith("data.x.path=org/set; no such local file or folder, and the Hub gave no data set")
    assert "hub_split=validation" in missing


def test_splits_are_those_of_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    configs = "configs: [{config_name: ro, data_files: [{split: train, path: b.jsonl}, {split: held, path: a.jsonl}]}]"
    (folder / "README.md").write_text(f"---\n{configs}\n---\n")
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "b.jsonl").write_text('{"text": "b"}\n{"text"\n')
    with HubServer(folder) as hub:
        held = read_from(hub, tmp_path / "home", hub_config="ro", hub_split="held")
        train = read_from(hub, tmp_path / "home", hub_config="ro", revision="main")
    assert held["rows"] == [["line 1 of a.jsonl", "a"]]
    assert train["rows"] == [["line 1 of b.jsonl", "b"], ["line 2 of b.jsonl", "not_json"]]


def test_what_is_refused_on_the_way_is_said_with_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    array(folder / "train.json", NUM_ROWS, chars=10_000)
    with HubServer(folder) as hub:
        hub.refused_from = 16 * 2**20
        found = read_from(hub, tmp_path / "home")
    assert 0 < len(found["rows"]) < NUM_ROWS
    assert found["error"].startswith("data.x.path=org/set; reading hf://datasets/org/set@")
    assert f"train.json failed after {len(found['rows'])} rows (" in found["error"]


@pytest.mark.slow
def test_a_preparation_opens_each_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train_a", "train_b"):
        rows = [{"data": [f"Întrebarea {i} din {name}?", f"Răspunsul {i} din {name}."]} for i in range(200)]
        (folder / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False))
    command = [sys.executable, "run.py", "task=prepare", "model=tiny", "data=sample_chat", f"output_dir={tmp_path}"]
    command += ["data.sample_chat.path=org/set", "data.sample_chat.format=auto"]

    def prepared_from(hub: HubServer) -> None:
        environment = os.environ | hub.environment(tmp_path / "home")
        subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, timeout=300)

    with HubServer(folder) as hub:
        prepared_from(hub)
        assert dict(hub.reads) == {"train_a.json": 1, "train_b.json": 1}
        prepared_from(hub)
        assert dict(hub.reads) == {"train_a.json": 1, "train_b.json": 1}, "what is prepared is not opened"
    manifest = json.loads(next((tmp_path / "prepared").rglob("manifest.json")).read_text())
    assert (manifest["documents_in"], manifest["documents_out"]) == (400, 400)


def test_a_name_that_is_no_file_is_asked_of_the_hub(tmp_path: Path) -> None:
    assert list_files(spec_for("org/set")) == []


def test_out_of_reach() -> None:
    """The tests run with HF_HUB_OFFLINE=1, so that the clients refuse by themselves."""
    with pytest.raises(ConfigError) as caught:
        read("org/set")
    sentence = str(caught.value)
    assert sentence.startswith("data.x.path=org/set; ")
    assert "(hub_config=None, hub_split=train, revision=None) after 0 rows:" in sentence
    assert "download the data and point data.x.path= at its folder" in sentence
    assert caught.value.__cause__ is not None


def test_fingerprint_is_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HfApi, "dataset_info", lambda self, path, revision: DatasetInfo(id=path, sha=f"sha of {revision}")
    )
    assert fingerprint_of_hub(spec_for("org/set", revision="v1")) == "sha of v1"


def test_fingerprint_out_of_reach() -> None:
    with pytest.raises(ConfigError, match=r"data\.x\.path=org/set; no such local file or folder, and the Hub gave no"):
        fingerprint_of_hub(spec_for("org/set"))
