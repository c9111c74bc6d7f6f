"""Files of stored references: which are taken, which are computed again, and what their names tell."""

import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.config.composing import composed
from tests.objectives.preference_pairs import made_pairs, packed
from tests.training.tiny import Run
from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.data.rows import Rows
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.preference import Preference
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.training.reference import (
    ReferencedRows,
    _encoded,
    _file_name,
    _recorded,
    _shared,
    add_reference,
)


class Computed:
    """A pass with these values; a `ReferencePass` of one process."""

    runtime = SimpleNamespace(any_process=bool)

    def __init__(self, values):
        self.values = np.array(values, np.float32)

    def run(self, rows, *, global_rows):
        padding = np.zeros((global_rows - len(rows.ids_NT), self.values.shape[1]), np.float32)
        yield np.concatenate([self.values[: len(rows.ids_NT)], padding])


VALUES = np.array([[-1, -2], [-3, -4], [-5, 0]], np.float32)


@pytest.mark.parametrize(
    ("now", "is_taken"),
    [
        (VALUES, True),
        (np.pad(VALUES, ((0, 0), (0, 2))), True),
        (VALUES + np.float32([[0, 0], [1e-6, 0], [0, 0]]), False),
        (VALUES + np.float32([[0, 0], [0, 0], [0, 1e-6]]), True),
        (np.pad(VALUES, ((0, 0), (0, 1)), constant_values=-1), False),
    ],
)
@pytest.mark.parametrize("num_rows", [2, 3])
def test_a_stored_reference_is_taken_where_its_first_batch_is_the_same(tmp_path, now, is_taken, num_rows):
    """Batches are of two rows: what differs behind the first batch is not computed again."""
    stored = VALUES[:num_rows]
    (tmp_path / "a.npy").write_bytes(_encoded(stored))
    ids = np.zeros((num_rows, 4), np.int32)
    rows = Rows(ids, ids.astype(np.bool_), ids, ids)
    taken = _shared(Computed(now), rows, 2, path=str(tmp_path / "a.npy"))
    assert (taken is not None) == is_taken
    if is_taken:
        assert np.array_equal(taken, stored)


def test_a_stored_reference_of_fewer_rows_or_of_none_is_computed_again(tmp_path):
    rows = Rows(*(np.zeros((3, 4), np.int32) for _ in range(4)))
    path = tmp_path / "a.npy"
    for data in (None, b"", b"torn", _encoded(VALUES[:2]), _encoded(VALUES.astype(np.float64)), _encoded(VALUES[0])):
        if data is not None:
            path.write_bytes(data)
        assert _shared(Computed(VALUES), rows, 2, path=str(path)) is None, data


def test_a_resume_reads_the_bytes_that_its_checkpoint_names(tmp_path):
    data = _encoded(VALUES)
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "a.npy").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    assert np.array_equal(_recorded(str(tmp_path), "a.npy", sha256), VALUES)
    (tmp_path / "references" / "a.npy").write_bytes(_encoded(VALUES + 1))
    with pytest.raises(TrainingStopped, match="was changed"):
        _recorded(str(tmp_path), "a.npy", sha256)
    with pytest.raises(TrainingStopped, match="is missing"):
        _recorded(str(tmp_path), "b.npy", sha256)


def name_of(*words, start=None, random=False, data="d", devices=1, split="train", rows=5, batch=8):
    """The name of the file of a run of these words."""
    trainer = SimpleNamespace(
        config=composed("model=qwen05b", "objective=dpo", "data=stories_pairs_ro", "curriculum=single", *words),
        inputs=SimpleNamespace(
            start=start and SimpleNamespace(sha256=start), audit_hashes={"x@128": data, "y@128": data}
        ),
        model=SimpleNamespace(source=SimpleNamespace(random=random)),
        runtime=SimpleNamespace(num_devices=devices),
        objective=SimpleNamespace(num_references=1),
        seat=SimpleNamespace(program=None),
    )
    return _file_name(trainer, ("x", split, 128), num_rows=rows, global_rows=batch)


def test_the_name_of_a_reference_tells_what_it_depends_on():
    alike = (("optim.lr=1e-3",), ("lora.r=8",), ("lora.init=a_zero",), ("seed=7",), ("objective.beta=0.3",))
    assert {name_of(*words) for words in ((), *alike)} == {name_of()}
    others = [
        *(name_of("model.dtype=float32"), name_of("model.path=other"), name_of("trainer.loss_chunk_tokens=64")),
        *(name_of("sharding=replicated"), name_of("lora.init=pissa"), name_of("lora.init=pissa", "lora.r=8")),
        *(name_of(start="a"), name_of(start="b"), name_of("lora.r=8", start="a"), name_of("seed=7", start="a")),
        *(name_of(random=True), name_of("seed=7", random=True), name_of(data="e"), name_of(devices=2)),
        *(name_of(split="evaluation"), name_of(rows=6), name_of(batch=4), name_of("lora=none")),
    ]
    assert len({name_of(), *others}) == 1 + len(others)


def test_rows_carry_what_the_model_says_of_them_before_the_first_step(tmp_path):
    """Five rows in batches of two, the last one padded: every pair's loss begins at ln 2, also once it is stored."""
    tiny = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager")
    config = composed(*tiny, "objective=dpo", "data=stories_pairs_ro", "curriculum=single")
    objective = Preference(computing=Computing(chunk_tokens=32))
    run = Run(config, EagerRuntime(config.hw), row_loss=objective.row_loss, count=objective.count)
    made = packed(made_pairs(0, count=9, vocab=4000), per_row=2, seq_len=96)
    tokens = {name: made[name].numpy() for name in ("ids", "learn", "positions", "segments")}
    rows = Rows(tokens["ids"], tokens["learn"] > 0, tokens["positions"], tokens["segments"])
    key = ("x", "train", 96)
    for _ in ("computed", "stored"):
        trainer = SimpleNamespace(
            **{"config": config, "runtime": run.runtime, "model": run.model, "objective": objective},
            **{"parameters": run.parameters, "evaluated_parameters": run.parameters, "leave_if_requested": bool},
            **{"progress": SimpleNamespace(step=0, reference={}), "seat": SimpleNamespace(program=None)},
            inputs=SimpleNamespace(start=None, audit_hashes={"x@96": "d"}, reference={}),
        )
        add_reference(trainer, {key: (rows, 2)}, folder=str(tmp_path))
        carried = ReferencedRows(rows, trainer.inputs.reference[key]).take(slice(0, 5)).more["reference"]
        with torch.no_grad():
            found = objective.row_loss(
                run.model.module, run.parameters, made | {"reference": torch.from_numpy(carried)}
            )
        assert found[1].tolist() == [2, 2, 2, 2, 1]
        assert (found[0] / found[1]).tolist() == pytest.approx([math.log(2)] * 5, abs=1e-5)
        assert carried.min() < -5
