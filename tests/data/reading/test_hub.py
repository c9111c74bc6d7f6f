"""Data sets of the Hub, without the Hub."""

import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import DatasetInfo

from tests.data.readers import read, spec_for, split_rows
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.reading.hub import fingerprint_of_hub
from tpu_experiments.data.reading.locations import list_files


def complaint(path, **values):
    with pytest.raises(ConfigError) as caught:
        read(path, **values)
    assert str(caught.value).startswith(f"data.x.path={path}; ")
    return str(caught.value)


@pytest.mark.parametrize("layout", ["text", "auto"])
def test_rows_are_streamed(monkeypatch, layout):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"id": "7", "text": "a"}, {"id": None, "text": "b"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    documents = read("org/set", hub_config="20231101.ro", revision="abc", format=layout)
    assert [document.id for document in documents] == ["7", "org/set:2"]
    assert documents[1].place == "row 2 of org/set"
    arguments, options = asked[0]
    assert arguments == ("org/set", "20231101.ro")
    assert options == {"split": "train", "revision": "abc", "streaming": True}
    assert list_files(spec_for("org/set")) == []


def test_out_of_reach(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("Couldn't reach 'org/set' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    sentence = complaint("org/set")
    assert "(hub_config=None, hub_split=train, revision=None) after 0 rows:" in sentence
    assert "ConnectionError: Couldn't reach 'org/set' on the Hub" in sentence
    assert "download the data and point data.x.path= at its folder" in sentence


def test_cause_is_chained_when_it_breaks_on_the_way(monkeypatch):
    def rows():
        yield {"text": "a"}
        raise OSError("connection reset")

    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: rows())
    with pytest.raises(ConfigError, match="after 1 rows: OSError: connection reset;") as caught:
        read("org/set")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_bad_row_is_not_the_hubs(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: iter([{"body": "a"}]))
    _, refused = split_rows("org/set")
    assert [(row.reason, row.place) for row in refused] == [("no_field", "row 1 of org/set")]


def test_fingerprint_is_the_commit(monkeypatch):
    monkeypatch.setattr(
        HfApi, "dataset_info", lambda self, path, revision: DatasetInfo(id=path, sha=f"sha of {revision}")
    )
    assert fingerprint_of_hub(spec_for("org/set", revision="v1")) == "sha of v1"


def test_fingerprint_out_of_reach():
    """The tests run with HF_HUB_OFFLINE=1, so that the client refuses by itself."""
    with pytest.raises(ConfigError, match=r"data\.x\.path=org/set; no such local file or folder, and the Hub gave no"):
        fingerprint_of_hub(spec_for("org/set"))
