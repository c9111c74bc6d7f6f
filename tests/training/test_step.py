"""The step itself: accumulation, weighting, clipping, one program, nothing read on the host."""

import math
from functools import partial

import pytest
import torch

from tests.tiers import only
from tests.training.tiny import ARCHITECTURES, Run, plain_updates, random_batch
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.xla.replay import NUM_FIRST

pytestmark = pytest.mark.xla
TINY = ("model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager")


@pytest.fixture
def make_run(make_config):
    def make(model="qwen05b", *overrides, **settings):
        config = make_config(f"model={model}", *TINY, *overrides)
        return Run(config, EagerRuntime(config.hw), **settings)

    return make


def regrouped(batch, accumulation):
    """The same rows cut into another number of micro-batches."""
    rows = {k: v.reshape(accumulation, -1, v.shape[-1]) for k, v in batch.items() if k != "lr"}
    return rows | {"lr": batch["lr"]}


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_accumulated_equals_full_batch(make_run, model):
    batches = [random_batch(i, accumulation=1, rows=8) for i in range(5)]
    full, cut = make_run(model), make_run(model)
    expected = full.losses(batches)
    ours = cut.losses([regrouped(b, 4) for b in batches])
    assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) < 1e-5
    for name, value in full.parameters.items():
        torch.testing.assert_close(cut.parameters[name], value, atol=2e-5, rtol=0)


def test_rows_with_many_supervised_tokens_weigh_more(make_run):
    """One mean over all supervised tokens of the global batch, not a mean of micro-batch means."""
    batch = random_batch(0, accumulation=2, rows=2)
    batch["learn"][0] = 0
    batch["learn"][0, 0, 5] = 1
    (both,) = make_run().losses([batch])
    halves = [make_run().losses([{k: v[i : i + 1] if k != "lr" else v for k, v in batch.items()}])[0] for i in (0, 1)]
    run = make_run()
    _, _, output = run.step(run.parameters, run.state, batch)
    total = float(output.num_supervised)
    assert math.isclose(both, (halves[0] * 1 + halves[1] * (total - 1)) / total, rel_tol=1e-5)


def test_padding_changes_nothing(make_run):
    batch = random_batch(0, rows=2)
    padded = {k: torch.cat([v, torch.zeros_like(v)], dim=1) if k != "lr" else v for k, v in batch.items()}
    plain, with_padding = make_run(), make_run()
    assert plain.losses([batch]) == pytest.approx(with_padding.losses([padded]), abs=1e-6)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(with_padding.parameters[name], value, atol=1e-6, rtol=0)


def test_a_batch_of_padding_only_moves_nothing_but_decay(make_run):
    run = make_run()
    before = {name: p.clone() for name, p in run.parameters.items()}
    batch = {k: torch.zeros_like(v) if k != "lr" else v for k, v in random_batch(0).items()}
    assert run.losses([batch]) == [0.0]
    for name, value in run.parameters.items():
        torch.testing.assert_close(value, before[name] * (1 - 1e-3 * 0.01))


def test_clipping_bounds_the_gradient_after_the_reduction(make_run):
    run = make_run(updates=partial(plain_updates, clip_norm=None))
    _, _, output = run.step(run.parameters, run.state, random_batch(0))
    norm = float(output.grad_norm)
    clipped = make_run(updates=partial(plain_updates, clip_norm=norm / 10))
    free = make_run(updates=partial(plain_updates, clip_norm=None))
    results = [r.step(r.parameters, r.state, random_batch(0))[1] for r in (clipped, free)]
    for name in run.parameters:
        torch.testing.assert_close(results[0][name]["first"] * 10, results[1][name]["first"], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("model", only(["gemma3_270m"], ARCHITECTURES))
def test_one_program_and_no_host_read_on_xla(make_config, model):
    import torch_xla.debug.metrics as met

    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config(f"model={model}", *TINY[:-1])
    runtime = XlaRuntime(config.hw, sharding=config.sharding, trace_every=50)
    run = Run(config, runtime)
    # Rows of a length that no other test has: what this process has compiled before is not compiled again.
    batches = [runtime.put(random_batch(i, accumulation=2, rows=2, seq_len=40), rows_dim=1) for i in range(8)]
    compiles = runtime.counters().num_compiles
    met.clear_counters()
    outputs = [run.program(batch) for batch in batches[:NUM_FIRST]]  # traced; the numbers that go into them are read
    runtime.wait()
    reads = (met.metric_data("TransferFromDeviceTime") or (0,))[0]
    outputs += [run.program(batch) for batch in batches[NUM_FIRST:]]
    runtime.wait()
    fallbacks = [name for name in met.counter_names() if name.startswith("aten::")]
    assert fallbacks == []
    assert (met.metric_data("TransferFromDeviceTime") or (0,))[0] == reads
    assert runtime.counters().num_compiles == compiles + 1
    assert runtime.counters().compiles_after_warmup == 0
    assert all(math.isfinite(float(o.loss.cpu())) for o in outputs)
