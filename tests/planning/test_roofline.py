"""Seconds of a step by formulas: steps that they were not fitted to, and what each part of them follows."""

from dataclasses import replace

import pytest

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.planning.analytic import estimated_time, how_timed
from tpu_experiments.planning.timing import StepTime

LLAMA = ("model=llama31_8b", "data=ultrachat_ro", "tuned=off")
V6E8 = (*LLAMA, "hw=v6e8")
WHOLE = ("lora=none", "hw=v6e8", "data=ultrachat_ro", "trainer.seq_len=8192", "tuned=off")


def time_of(*words: str, **geometry: int) -> StepTime:
    config = composed(*words, "task=plan")
    return estimated_time(config, config.model.arch, geometry=replace(geometry_of(config), **geometry))


def geometry_of(config: Config):
    return resolve_stages(config)[0].geometry


@pytest.mark.parametrize(
    ("words", "speed"),
    [
        (V6E8, 10_049),
        (("model=qwen3_8b", "data=ultrachat_ro", "hw=v6e8", "tuned=off"), 8_383),
        (("model=gemma3_1b", "data=ultrachat_ro", "hw=v5e8", "model.remat=layer_inputs", "tuned=off"), 17_853),
    ],
)
def test_compiled_steps_that_no_constant_was_fitted_to(words, speed) -> None:
    assert 0.75 < speed / time_of(*words).tokens_per_second_per_chip < 1.2


@pytest.mark.parametrize(("model", "rows", "seconds"), [("mistral7b", 6, 6.320), ("llama31_8b", 3, 3.443)])
def test_steps_of_all_weights_that_maxtext_measured_on_a_v6e8(model, rows, seconds) -> None:
    """Figures of tests/benchmarks/calibration.py, of chips."""
    batch = (f"trainer.global_batch_rows={8 * rows}", f"trainer.micro_batch_rows={rows}")
    assert 0.75 < time_of(f"model={model}", *WHOLE, *batch).total_s / seconds < 1.1


def test_the_parts_are_the_whole() -> None:
    time = time_of(*V6E8)
    assert time.total_s == pytest.approx(time.compute_s + time.kernels_s + time.exposed_network_s)
    assert (time.exposed_network_s, time.method) == (0, "analytic")
    assert time.tokens_per_second_per_chip == pytest.approx(2 * 4096 / time.total_s)


def test_weights_of_few_rows_are_waited_for() -> None:
    few = time_of(*V6E8, seq_len=128)
    assert few.bound_by == "network"
    assert few.total_s == pytest.approx(few.network_s)
    assert few.network_s == pytest.approx(time_of(*V6E8).network_s)
    assert time_of(*V6E8, "sharding=replicated", seq_len=128).network_s == 0


def test_layers_that_are_computed_once_move_fewer_bytes() -> None:
    words = ("model=qwen05b", "data=ultrachat_ro", "hw=v5e8", "tuned=off")
    folded, unrolled = time_of(*words), time_of(*words, "model.stack=unrolled")
    assert 1.2 < folded.total_s / unrolled.total_s < 1.35
    assert folded.kernels_s == unrolled.kernels_s


def test_a_smaller_base_is_read_sooner() -> None:
    one_row = ("hw=v5e1", "trainer.global_batch_rows=1", "trainer.seq_len=128")
    dense, small = (time_of(*LLAMA, *one_row, *more) for more in ((), ("model.base=int8",)))
    assert small.compute_s < dense.compute_s


def test_chips_that_share_a_row_share_its_work() -> None:
    words = ("model=qwen05b", "data=ultrachat_ro", "hw=v6e8", "tuned=off", "sharding=fsdp_tensor")
    apart = time_of(*words[:-1], "sharding=replicated")
    assert time_of(*words).tokens_per_second_per_chip == pytest.approx(apart.tokens_per_second_per_chip, rel=0.05)


def test_a_note_says_how_the_seconds_came_about() -> None:
    notes = [
        how_timed(config, config.model.arch)
        for config in (
            composed(*V6E8),
            composed("model=qwen3_30b_a3b", "hw=v6e8"),
            composed(*LLAMA, "hw=h100"),
            composed(*V6E8, "sharding=fsdp_tensor"),
        )
    ]
    assert "0.8 to 1.5 times" in notes[0]
    assert "sorting tokens by expert" in notes[1]
    assert "35 % of peak" in notes[2]
    assert "sums of activations" in notes[3]
    assert not any("sums of activations" in note for note in notes[:3])
