"""Epochs of a stage written in their order: the width of their ids."""

from dataclasses import replace

import numpy as np
import pytest

from tests.data.preparing import prepared, text_source, texts
from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.schema import ScheduleConfig
from tpu_experiments.data.steps.epochs import write_epochs

SEQ_LEN = 64


@pytest.fixture(scope="module")
def source(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    found = prepared({"a": text_source(texts(folder / "a.jsonl", 40))}, folder=folder, tokenizer=tokenizer, workers=1)
    return found["a"]


@pytest.mark.parametrize(("largest", "width"), [(2**16 - 1, 2), (2**16, 4)])
def test_ids_have_the_width_of_the_largest(source, tmp_path, largest, width):
    """A row that has no room is refused by the writer; one of twice the width would be twice the storage."""
    manifests = {SEQ_LEN: source.manifests[SEQ_LEN] | {"max_token_id": largest}}
    geometry = Geometry(global_rows=4, micro_rows=4, accumulation=1, num_shards=1, seq_len=SEQ_LEN)
    stage = Stage("one", 0, ("a",), geometry, 4, None, 1e-3, ScheduleConfig(), "adamw")
    write_epochs(
        stage,
        sources={"a": replace(source, manifests=manifests)},
        settings=PrepareConfig(written_epochs=1),
        seed=3,
        folder=str(tmp_path),
    )
    [shard] = [path for path in tmp_path.rglob("*.npy") if np.load(path, mmap_mode="r").dtype.names]
    assert np.load(shard, mmap_mode="r").dtype["ids"].base.itemsize == width
