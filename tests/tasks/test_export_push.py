"""The upload of exports by huggingface_hub to a stand-in of the Hub on loopback."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.hub import REPOSITORY, HubServer
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ExportTaskConfig
from tpu_experiments.export.card import Card
from tpu_experiments.storage import paths
from tpu_experiments.tasks.export.parity import Parity
from tpu_experiments.tasks.export.push import push, require_pushable

pytest_plugins = ("tests.gcs",)
TOKEN = "hf_of_a_test"
CHILD = """
import json, os, sys
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ExportTaskConfig
from tpu_experiments.tasks.export.push import push, require_pushable
for line in sys.stdin:
    token, values, folders = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": token} if token else {}
    task = ExportTaskConfig(name="export", push_dry_run=False, **values)
    try:
        require_pushable(task)
        print(json.dumps([0, push(task, folders)]), flush=True)
    except ConfigError as error:
        print(json.dumps([2, str(error)]), flush=True)
"""
"""Uploads, one for each line that it reads; importing what it needs takes 6 s."""


def complete(place, form, *, verdict="ok", content=b"weights"):
    """A form's folder as task=export leaves it, its weights aside."""
    folder = place / form
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": "0"} for name in ("model.safetensors", "config.json")
    }
    parity = Parity(form, verdict, "perplexity 2 times the trained model's" if verdict == "worse" else "")
    card = Card(form, "ro", base="org/base", is_on_hub=True, rank=8)
    for name in ("parity.json", "parity.md", "README.md"):
        (folder / name).write_text(name)
    facts = {"form": form, "files": files, "parity": [parity.fields()], "card": asdict(card)}
    (folder / "export.json").write_text(json.dumps(facts))
    return str(folder)


class Client:
    """A process with the Hub's client: it reads its settings when it is imported, and the tests' own has it offline."""

    def __init__(self, hub, home):
        # Without the Hub's own protocol for large files, Xet, whose server the stand-in has not.
        environment = os.environ | hub.environment(home) | {"HF_HUB_DISABLE_XET": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def push(self, folders, *, token=TOKEN, **values):
        """Exit code and text of an upload."""
        self.process.stdin.write(json.dumps([token, {"push": REPOSITORY} | values, folders]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        client = Client(server, tmp_path_factory.mktemp("home"))
        yield server, client
        client.close()


@pytest.fixture
def hub(served, tmp_path):
    """The stand-in with an empty repository."""
    server, _ = served
    server.folder, server.token = tmp_path / "served", TOKEN
    server.folder.mkdir()
    for kept in (server.requests, server.created, server.commits):
        kept.clear()
    return server


@pytest.fixture
def client(served):
    return served[1]


@pytest.mark.slow
def test_several_forms_have_folders_and_one_page(hub, client, tmp_path):
    folders = [complete(tmp_path / "export", form) for form in ("peft", "int8")]
    code, text = client.push(folders)
    assert code == 0, text
    (created,) = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("org", "set", "private")
    assert [message for message, _ in hub.commits] == ["peft of ro", "int8 of ro", "Card of ro"]
    for folder in folders:
        for file in Path(folder).iterdir():
            there = hub.folder / file.parent.name / file.name
            if file.name != "README.md":
                assert there.read_bytes() == file.read_bytes()
    card = (hub.folder / "int8" / "README.md").read_text()
    assert f'from_pretrained("{REPOSITORY}", subfolder="int8")' in card
    assert ModelCard(card).data.base_model_relation == "quantized"
    assert "## [peft](peft)" in (hub.folder / "README.md").read_text()
    assert text.startswith(f"uploaded to {REPOSITORY} on the Hub (private, if it was not there): 13 files")
    # Again, as after a longer training: the files are an earlier upload's.
    assert client.push(folders, push_private=False)[0] == 0
    assert hub.created[-1]["visibility"] == "public"


def test_one_form_has_the_root(hub, client, tmp_path):
    folder = complete(tmp_path / "export", "merged")
    code, text = client.push([folder])
    assert code == 0, text
    assert (hub.folder / "model.safetensors").read_bytes() == b"weights"
    assert f'from_pretrained("{REPOSITORY}", dtype="bfloat16")' in (hub.folder / "README.md").read_text()
    assert len(hub.commits) == 1


def test_anothers_files_are_not_written_over(hub, client, tmp_path):
    (hub.folder / "model.safetensors").write_bytes(b"of somebody")
    code, text = client.push([complete(tmp_path / "export", "merged")])
    assert (code, hub.commits) == (2, [])
    assert "it holds model.safetensors and no export.json" in text
    assert (hub.folder / "model.safetensors").read_bytes() == b"of somebody"


def test_without_a_token_nothing_is_asked(hub, client, tmp_path):
    code, text = client.push([complete(tmp_path / "export", "merged")], token=None)
    assert (code, hub.requests) == (2, [])
    assert "the variable HF_TOKEN is not set" in text


def test_a_refusal_is_one_sentence(hub, client, tmp_path):
    code, text = client.push([complete(tmp_path / "export", "merged")], token="another")
    assert (code, hub.commits) == (2, [])
    assert text.startswith(f"task.push={REPOSITORY}; the Hub refused")
    assert "another" not in text
    assert "\n" not in text


@pytest.mark.slow
def test_forms_in_cloud_storage_are_copied_for_the_upload(hub, tmp_path, gcs_bucket):
    local = Path(complete(tmp_path / "export", "nf4", content=bytes(range(256)) * 400))
    for file in local.iterdir():
        paths.copy_file(str(file), f"{gcs_bucket}/export/nf4/{file.name}")
    client = Client(hub, tmp_path / "home")  # which finds the emulator in its environment
    code, text = client.push([f"{gcs_bucket}/export/nf4"])
    client.close()
    assert code == 0, text
    for name in ("model.safetensors", "config.json", "export.json", "parity.md"):
        assert (hub.folder / name).read_bytes() == (local / name).read_bytes()


@pytest.mark.slow
def test_no_hub_is_one_sentence(tmp_path):
    with HubServer(tmp_path) as gone:
        pass
    client = Client(gone, tmp_path / "home")
    code, text = client.push([complete(tmp_path / "export", "merged")])
    client.close()
    assert code == 2
    assert text.startswith(f"task.push={REPOSITORY}; the Hub refused, or cannot be reached (ConnectError")
    assert "\n" not in text


def test_offline_is_said_before_anything_is_written(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # the tests' own process is offline
    task = ExportTaskConfig(name="export", push="me/ro", push_dry_run=False)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        require_pushable(task)


def test_a_worse_form_is_refused(tmp_path):
    folders = [complete(tmp_path, "peft"), complete(tmp_path, "nf4", verdict="worse")]
    task = ExportTaskConfig(name="export", push="me/ro")
    with pytest.raises(ConfigError, match=r"nf4 is worse than the trained model \(nf4: perplexity 2 times"):
        push(task, folders)


def test_a_dry_run_lists_files_and_sizes(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folders = [complete(tmp_path, form, content=bytes(12_345)) for form in ("peft", "int8")]
    task = ExportTaskConfig(name="export", push="me/ro", push_private=False)
    require_pushable(task)
    first, *lines = push(task, folders).splitlines()
    assert first.startswith("nothing was uploaded: task.push_dry_run=false creates me/ro on the Hub (public)")
    sizes = dict(reversed(line.split()) for line in lines)
    assert sizes["int8/model.safetensors"] == sizes["peft/model.safetensors"] == "12,345"
    assert len(lines) == 13
    assert f"uploads 13 files, {sum(int(size.replace(',', '')) for size in sizes.values()):,} bytes" in first
