"""Meters from given clocks, and the meters of whole runs."""

import logging
import statistics
from dataclasses import replace

import pytest

from tests.config.composing import composed
from tests.training.runs import finished, records
from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.metrics.flops import FlopsPerToken
from tpu_experiments.runtime.base import Counters
from tpu_experiments.training import meters as module
from tpu_experiments.training.meters import Meters, Reading

GEOMETRY = Geometry(global_rows=16, micro_rows=2, accumulation=1, num_shards=8, seq_len=1024)
FLOPS = FlopsPerToken(1e9, 1e9, 0.0, 0.5e9, 0.2e9, 0.2e9, 0.1e9)


class Device:
    """Clocks that the test sets; stands in for a Runtime, not for torch_xla."""

    rank = 0

    def __init__(self) -> None:
        self.trace, self.compiles = 0.0, 0

    def counters(self) -> Counters:
        return Counters(num_compiles=self.compiles, trace_seconds=self.trace * 0.75, dispatch_seconds=self.trace * 0.25)

    def memory_gib(self) -> float | None:
        return 9.5

    def peak_memory_gib(self) -> float | None:
        return 12.25


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The wall clock as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def made(clock):
    device = Device()
    meters = Meters(device, composed("hw=v6e8", "model=mistral7b", "data=uk_law").hw, {1024: FLOPS})
    meters.begin(GEOMETRY)
    return device, meters


def reading(meters: Meters, *, step: int, time: float, steps: int = 10) -> Reading:
    losses = [(step - steps + 1 + i, 2.0) for i in range(steps)]
    mark = meters.mark()
    return Reading(step, 1e-4, losses, 0.5, steps * 16000, time, num_supervised=steps * 8000.0, mark=mark)


def waited(meters: Meters, clock: list[float], seconds: float) -> None:
    """A batch that comes after `seconds`."""

    def batches():
        clock[0] += seconds
        yield 1

    assert next(meters.timed(batches())) == 1


def test_a_feed_that_ends_late_is_not_waited_for_as_a_batch(made, clock):
    """It ends once the device has computed the last of its batches; a step on answers has a feed of its own."""
    _, meters = made

    def batches():
        clock[0] += 0.25
        yield 1
        clock[0] += 2.0

    assert list(meters.timed(batches())) == [1]
    assert meters.input_wait_seconds == pytest.approx(0.25)


def test_a_step_is_split_and_its_share_of_the_peak_reported(made, clock):
    device, meters = made
    waited(meters, clock, 0.25)
    device.trace += 1.5
    clock[0] = 105.0
    values = meters.values(reading(meters, step=10, time=105.0))
    assert values["perf/step_seconds"] == pytest.approx(0.5)
    assert values["perf/trace_seconds"] == pytest.approx(0.15)
    assert values["perf/input_wait_seconds"] == pytest.approx(0.025)
    assert values["perf/rest_seconds"] == pytest.approx(0.325)
    assert values["perf/tokens_per_second"] == pytest.approx(32000)
    assert values["perf/supervised_tokens_per_second"] == pytest.approx(16000)
    # 32,000 tokens a second that are not padding, 2.5 GFLOP each, of 8 x 918 TFLOP/s; 16,384 positions a step at 3.0.
    assert values["perf/mfu"] == pytest.approx(32000 * 2.5e9 / (8 * 918e12))
    assert values["perf/hfu"] == pytest.approx(2 * 16384 * 3.0e9 / (8 * 918e12))
    assert (values["perf/hbm_gib"], values["perf/hbm_peak_gib"]) == (9.5, 12.25)


def test_pairs_are_told_as_pairs_and_their_tokens_as_tokens(clock):
    meters = Meters(Device(), composed("hw=v6e8", "model=mistral7b", "data=uk_law").hw, {}, examples="pairs")
    meters.begin(GEOMETRY)
    clock[0] = 105.0
    values = meters.values(replace(reading(meters, step=10, time=105.0), num_examples=250))
    assert values["perf/pairs_per_second"] == pytest.approx(50)
    assert values["perf/supervised_tokens_per_second"] == pytest.approx(16000)
    assert meters.means()["pairs_per_second"] == pytest.approx(50)


def test_what_the_host_traced_ahead_of_the_device_is_no_more_than_the_interval(made, clock):
    device, meters = made
    waited(meters, clock, 0.5)
    device.trace += 7.0
    clock[0] = 105.0
    values = meters.values(reading(meters, step=10, time=105.0))
    parts = [values[f"perf/{name}_seconds"] for name in ("trace", "input_wait", "rest")]
    assert parts == pytest.approx([0.45, 0.05, 0.0])


def test_an_interval_with_a_compilation_counts_for_nothing(made, clock):
    device, meters = made
    device.compiles = 1
    assert meters.values(reading(meters, step=10, time=160.0)) == {}
    assert meters.means()["measured_steps"] == 0
    assert meters.means()["mfu"] is None
    clock[0] = 165.0
    assert meters.values(reading(meters, step=20, time=165.0))["perf/step_seconds"] == pytest.approx(0.5)


def test_what_is_aside_is_no_part_of_a_step(made, clock):
    device, meters = made
    clock[0] = 102.0
    with meters.excluded():
        device.trace += 7.0
        device.compiles += 1
        clock[0] = 142.0
    device.trace += 1.0
    clock[0] = 145.0
    values = meters.values(reading(meters, step=10, time=145.0))
    assert values["perf/step_seconds"] == pytest.approx(0.5)
    assert values["perf/trace_seconds"] == pytest.approx(0.1)


def test_means_are_over_all_measured_steps(made, clock):
    _, meters = made
    for step, time in ((10, 105.0), (20, 120.0)):
        clock[0] = time
        meters.values(reading(meters, step=step, time=time))
    means = meters.means()
    assert means["measured_steps"] == 20
    assert means["step_seconds"] == pytest.approx(1.0)
    assert means["tokens_per_second"] == pytest.approx(16000)


@pytest.mark.parametrize(
    ("trace", "wait", "said"),
    [(3.9, 0.1, []), (4.2, 0.1, ["tracing-bound"]), (0.9, 0.6, ["input-bound"]), (4.2, 0.6, ["tracing", "input"])],
)
def test_a_step_that_waits_for_the_host_is_reported_once(made, clock, caplog, trace, wait, said):
    device, meters = made
    with caplog.at_level(logging.WARNING):
        for step in (10, 20, 30):
            started = clock[0]
            waited(meters, clock, wait)
            device.trace += trace
            clock[0] = started + 5.0
            meters.values(reading(meters, step=step, time=clock[0]))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(said)
    assert all(message.startswith(start) for message, start in zip(messages, said, strict=True))


CPU_WITH_PEAK = """
defaults: [cpu, _self_]
name: cpu_with_peak
chip: {name: none, hbm_gib: 1, peak_tflops_bf16: 0.5, hbm_gb_per_second: 1, ici_gb_per_second: 0, clock_ghz: 1,
  source: made up}
"""
COMMON = (
    "model=qwen05b",
    "data=[sample_text]",
    "debug=smoke",
    "lora=all_linear_r8",
    "model.remat=layer_inputs",
    "trainer.norms_every_steps=4",
    "trainer.eval_every_steps=3",
    "sample.max_new_tokens=0",
)


@pytest.mark.parametrize("runtime", [pytest.param("xla", marks=pytest.mark.slow), "eager"])
@pytest.mark.xla
def test_the_meters_of_a_run(tmp_path, runtime):
    result = finished(*COMMON, f"hw.runtime={runtime}", output_dir=tmp_path)
    trained = [record for record in records(tmp_path) if "train/loss" in record]
    assert [record["step"] for record in trained] == [2, 4, 6]
    measured = [record for record in trained if "perf/step_seconds" in record]
    # On XLA the first interval compiles.
    assert [record["step"] for record in measured] == ([4, 6] if runtime == "xla" else [2, 4, 6])
    for record in measured:
        parts = [record[f"perf/{name}_seconds"] for name in ("trace", "input_wait", "rest")]
        assert sum(parts) == pytest.approx(record["perf/step_seconds"])
        assert (record["perf/trace_seconds"] > 0) == (runtime == "xla")
        assert 0 < record["perf/supervised_tokens_per_second"] < record["perf/tokens_per_second"]
        assert "perf/mfu" not in record  # a CPU has no datasheet here
    with_norms = [record for record in trained if "norms/grad_attention" in record]
    assert [record["step"] for record in with_norms] == [4]
    (record,) = with_norms
    squares = [record[f"norms/grad_{group}"] ** 2 for group in ("attention", "mlp")]
    assert sum(squares) ** 0.5 == pytest.approx(record["train/grad_norm"], rel=1e-5)
    assert record["norms/update_mlp"] > 0
    assert result["meters"]["measured_steps"] == 2 * len(measured)
    assert result["meters"]["mfu"] is result["meters"]["hfu"] is None
    assert result["meters"]["step_seconds"] > 0
    assert result["compiles_after_warmup"] == 0


@pytest.mark.slow
@pytest.mark.xla
def test_records_of_single_steps_have_the_time_of_the_device(tmp_path):
    """Records that nobody waits for tell the time of handing over, a thousandth of it, and one of them all the rest."""
    finished(*COMMON, "trainer.log_every_steps=1", "trainer.max_stage_steps=20", output_dir=tmp_path)
    seconds = [record["perf/step_seconds"] for record in records(tmp_path) if "perf/step_seconds" in record]
    assert len(seconds) >= 15
    assert statistics.median(seconds) > statistics.mean(seconds) / 10


@pytest.mark.slow
@pytest.mark.xla
def test_with_a_datasheet_the_share_of_the_peak_is_reported(tmp_path):
    (tmp_path / "conf" / "hw").mkdir(parents=True)
    (tmp_path / "conf" / "hw" / "cpu_with_peak.yaml").write_text(CPU_WITH_PEAK)
    hw = ("--config-dir", str(tmp_path / "conf"), "hw=cpu_with_peak")
    # debug=smoke chooses hw=cpu; the command line wins over it.
    result = finished(*hw, *COMMON, output_dir=tmp_path / "out")
    meters = result["meters"]
    assert 0 < meters["mfu"] < 1
    assert meters["hfu"] > meters["mfu"]
    last = [record for record in records(tmp_path / "out") if "train/loss" in record][-1]
    share_of_token = meters["mfu"] / meters["tokens_per_second"]
    assert last["perf/mfu"] / last["perf/tokens_per_second"] == pytest.approx(share_of_token)
    (log,) = (tmp_path / "out").glob("*/run.log")
    assert "mfu" in next(line for line in log.read_text().splitlines() if "step 6/6  loss" in line)
