"""The random words that dropout's masks are made of: of seed, stage, step and row, and of nothing else."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.tiny import Run, random_batch
from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.data.batches import Batch
from tpu_experiments.models.parts.dropout import RowDropout
from tpu_experiments.training.batches import has_noise, training_tensors, with_step_noise

ROWS = 24


def words(config, *, stage: int = 0, step: int = 0) -> Batch:
    """A batch with its noise."""
    rows = np.zeros((ROWS, 8), np.int32)
    return with_step_noise(Batch(rows, rows, rows, rows, ["-"] * ROWS), stage, step, config=config)


def test_words_differ_by_seed_stage_step_and_row(make_config):
    config, other = (make_config("lora.dropout=0.1", f"seed={seed}") for seed in (1, 2))
    batches = [words(config), words(config, step=1), words(config, stage=1), words(other)]
    found = np.concatenate([batch.noise_G for batch in batches])
    assert found.dtype == np.int32
    assert len(set(found.tolist())) == 4 * ROWS
    assert (found < 0).sum() > ROWS
    assert (words(config, stage=1, step=7).noise_G == words(config, stage=1, step=7).noise_G).all()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_row_keeps_its_word_in_every_process_and_micro_batch(make_config, world_size, accumulation):
    whole = words(make_config("lora.dropout=0.1"))
    geometry = Geometry(ROWS, ROWS // world_size // accumulation, accumulation, world_size, 8)
    shares = [training_tensors(whole.slice_process(r, world_size), geometry, lr=0.1) for r in range(world_size)]
    assert all(
        share["noise"].shape == share["ids"].shape[:2] == (accumulation, 24 // world_size // accumulation)
        for share in shares
    )
    assert torch.cat([share["noise"].flatten() for share in shares]).tolist() == whole.noise_G.tolist()


@pytest.mark.parametrize("smallest", ["lora.r=1", "lora.dropout=0.001"])
def test_the_smallest_adapter_and_dropout_have_words(make_config, smallest):
    assert has_noise(make_config("lora.dropout=0.1", smallest), nn.Linear(1, 1))


@pytest.mark.parametrize("off", ["lora.dropout=0", "lora=none"])
def test_without_dropout_there_are_none(make_config, off):
    overrides = ("lora.dropout=0.1",) if off == "lora=none" else ()
    config = make_config(off, *overrides)
    assert not has_noise(config, nn.Dropout(0.1))
    assert has_noise(config, RowDropout(0.1, name="own"))
    rows = np.zeros((ROWS, 8), np.int32)
    whole = Batch(rows, rows, rows, rows, ["-"] * ROWS)
    assert "noise" not in training_tensors(whole, Geometry(ROWS, ROWS, 1, 1, 8), lr=0.1)


@pytest.mark.xla
def test_losses_follow_from_the_words_alone(make_config):
    from tpu_experiments.runtime.eager import EagerRuntime

    tiny = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager", "lora=all_linear_r8")
    config = make_config(*tiny, "lora.dropout=0.1")

    def losses(seed: int, *, shift: int = 0) -> list[float]:
        run = Run(config, EagerRuntime(config.hw))
        batches = [random_batch(index, dropout=0.1) for index in range(3)]
        run.runtime.seed(seed)
        return run.losses([batch | {"noise": batch["noise"] + shift} for batch in batches])

    assert losses(1) == losses(2)
    assert abs(losses(1)[-1] - losses(1, shift=1)[-1]) > 1e-4
    with pytest.raises(RuntimeError, match=r"lora\.dropout=0\.1; the rows handed to the model lack 'noise'"):
        Run(config, EagerRuntime(config.hw)).losses([random_batch(0)])
