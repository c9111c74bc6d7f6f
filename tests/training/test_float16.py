"""float16 in plain torch: near float32, overflows skipped and the scale halved, the scale part of the state."""

import logging
import math
from functools import partial

import pytest
import torch

from tests.checkpoint.saved import save_checkpoint
from tests.config.composing import composed, refusal
from tests.tiers import only
from tests.training.runs import run
from tests.training.test_guard import progress
from tests.training.test_window import pending
from tests.training.tiny import ARCHITECTURES, Run, plain_updates, random_batch
from tpu_experiments.checkpoint.state import flat, read_state
from tpu_experiments.config.schema import GuardConfig
from tpu_experiments.models.passes.loss import Terms, chunked_row_losses
from tpu_experiments.optim.base import State
from tpu_experiments.optim.loss_scale import FIRST, GOOD, GROWTH_STEPS, LEAST, SCALE, adapted, scale_of
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.ops import python_loop
from tpu_experiments.training.guard import Guard
from tpu_experiments.training.meters import read_reports

TINY = ("model.size=tiny", "lora=all_linear_r8", "hw.runtime=eager")


@pytest.fixture
def make_run(make_config):
    def make(model: str, dtype: str, *overrides: str) -> Run:
        config = make_config(f"model={model}", *TINY, f"model.dtype={dtype}", *overrides)
        return Run(config, EagerRuntime(config.hw), updates=partial(plain_updates, is_scaled=dtype == "float16"))

    return make


def slots(state: State) -> tuple[float, float]:
    return float(state[""][SCALE]), float(state[""][GOOD])


@pytest.mark.parametrize("model", only(["mistral7b"], ARCHITECTURES))
def test_twenty_steps_are_close_to_float32(make_run, model):
    batches = [random_batch(i, accumulation=2, rows=2) for i in range(20)]
    half, full = make_run(model, "float16"), make_run(model, "float32")
    ours, expected = half.losses(batches), full.losses(batches)
    assert ours != expected, "float16 was used"
    assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) < 5e-3
    assert slots(half.state) == (FIRST, 20)


@pytest.mark.parametrize("overrides", [["lora=none"], ["model.base=nf4"], ["model.remat=save_dots"]])
def test_other_weights_are_close_too(make_run, overrides):
    batches = [random_batch(i, rows=2) for i in range(4)]
    ours = make_run("qwen05b", "float16", *overrides).losses(batches)
    expected = make_run("qwen05b", "float32", *overrides).losses(batches)
    assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) < 5e-3


def test_without_a_scale_small_gradients_are_lost(make_run):
    """Divided by the tokens of a large batch they are below float16's smallest number; the scale keeps them."""
    batch = random_batch(0, rows=2)
    total, norms = torch.tensor(3e6), {}
    for dtype, scale in (("float32", 1.0), ("float16", 1.0), ("float16", FIRST)):
        run = make_run("mistral7b", dtype)
        for name, parameter in run.parameters.items():
            if name.endswith("lora_B"):
                parameter.add_(0.01)
        grads, _ = run.step.gradients(run.parameters, batch, total / scale)
        norms[dtype, scale] = float(torch.stack([(g / scale).square().sum() for g in grads]).sum().sqrt())
    expected = norms["float32", 1.0]
    assert norms["float16", FIRST] == pytest.approx(expected, rel=0.01)
    assert norms["float16", 1.0] != pytest.approx(expected, rel=0.1)


def test_an_overflow_is_skipped_and_halves_the_scale(make_run):
    run = make_run("mistral7b", "float16")
    batches = [random_batch(i, rows=2) for i in range(40)]
    run.losses(batches[:1])
    run.state[""][SCALE].fill_(2.0**34)
    before = {name: p.clone() for name, p in run.parameters.items()}
    output = run.program(batches[1])
    assert math.isfinite(float(output.loss))
    assert not math.isfinite(float(output.grad_norm))
    assert float(output.loss_scale) == 2.0**34
    assert slots(run.state) == (2.0**33, 0)
    assert float(run.state[""]["count"]) == 1
    assert all(torch.equal(run.parameters[name], value) for name, value in before.items())
    number = 1
    while not math.isfinite(float(run.program(batches[1 + number]).grad_norm)):
        number += 1
    assert number > 1
    assert slots(run.state) == (2.0 ** (34 - number), 1), "the scale falls until a step is applied"
    assert float(run.state[""]["count"]) == 2


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(make_run, tmp_path):
    """With the scale where an overflow has put it."""
    whole, resumed = (
        make_run("qwen05b", "float16", "lora.dropout=0.1"),
        make_run("qwen05b", "float16", "lora.dropout=0.1"),
    )
    batches = [random_batch(i, rows=2, dropout=0.1) for i in range(6)]
    whole.state[""][SCALE].fill_(2.0**40)
    whole.losses(batches[:3])
    assert slots(whole.state) == (2.0**37, 0)
    known = progress(3)
    known.stages[0].steps = 3
    groups = {"parameters": whole.parameters, "optimizer": flat(whole.state)}
    copies = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in groups.items()}
    save_checkpoint(str(tmp_path), step=3, groups=copies, progress=known.to_dict(), keep_last=1)
    place = resumed.runtime.place
    assert read_state(str(tmp_path), parameters=resumed.parameters, state=resumed.state, place=place) is not None
    whole.state[""][SCALE].fill_(FIRST)
    resumed.state[""][SCALE].mul_(FIRST / 2.0**37)  # both from here on at a scale that is applied
    assert resumed.losses(batches[3:]) == whole.losses(batches[3:])
    after = whole._held()
    assert all(torch.equal(value, after[name]) for name, value in resumed._held().items())


@pytest.mark.slow
def test_a_run_is_killed_resumed_and_equal(tmp_path):
    small = ("model=qwen05b", "data=[sample_text,sample_chat]", "lora=all_linear_r8", "debug=smoke", "name=mine")
    more = ("task=resume_check", "hw.runtime=eager", "model.dtype=float16", "sample.max_new_tokens=0")
    done = run(*small, *more, output_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_logits_far_above_the_first_ones_do_not_overflow():
    """The exponential of one is e^20 beside the target's, and the gradient still float32's."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(1, 4, 16, generator=generator), torch.randn(1200, 16, generator=generator) / 16
    hidden[0, 1] = 5 * head[1100] / head[1100].norm()
    head[1100] *= 4.5 / head[1100].norm()
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"ids": ids, "learn": torch.ones_like(ids), "segments": torch.ones_like(ids)}
    grads = {}
    for dtype in (torch.float16, torch.float32):
        inputs = hidden.to(dtype).requires_grad_()
        sums, _ = chunked_row_losses(inputs, head.to(dtype), batch, Terms(2, python_loop))
        (grads[dtype],) = torch.autograd.grad(sums.sum(), [inputs])
    assert sums.item() > 15
    torch.testing.assert_close(grads[torch.float16].float(), grads[torch.float32], rtol=2e-2, atol=2e-3)


def test_a_loss_that_is_not_finite_says_nothing_about_the_scale():
    no, yes = torch.tensor(False), torch.tensor(True)
    state = {SCALE: torch.tensor([4.0]), GOOD: torch.tensor([7.0])}
    scale = scale_of({"": state})
    assert scale is not None
    kept = adapted(state, scale=scale, is_finite=no, overflowed=no)
    assert slots({"": kept}) == (4, 7)
    late = {SCALE: torch.tensor([4.0]), GOOD: torch.tensor([GROWTH_STEPS - 1.0])}
    assert slots({"": adapted(late, scale=scale, is_finite=yes, overflowed=no)}) == (8, 0)
    assert slots({"": adapted(late, scale=torch.tensor(LEAST), is_finite=no, overflowed=yes)}) == (LEAST, 0)


def test_the_guard_counts_overflows_and_does_not_roll_back(caplog):
    caplog.set_level(logging.INFO)
    reports = [pending(1 + i, 2.0, [2.0, 1.0]) for i in range(8)]
    for report in reports[:7]:
        assert report.output is not None
        report.output.grad_norm, report.output.loss_scale = torch.tensor(math.inf), torch.tensor(2.0**16)
    guard, known = Guard(GuardConfig(max_skipped=0, action="stop"), process=(0, 1)), progress()
    guard.observe(read_reports(reports), known)
    guard.decide(read_reports(reports), known.guard)
    assert guard.request is None
    assert (known.guard.skipped, known.guard.streak) == (7, [])
    assert "step 7: gradients overflowed float16 at a loss scale of 65,536" in caplog.text


def test_at_the_least_scale_the_gradient_itself_is_bad():
    reports = [pending(1 + i, 2.0, [2.0, 1.0]) for i in range(2)]
    for report in reports:
        assert report.output is not None
        report.output.grad_norm, report.output.loss_scale = torch.tensor(math.inf), torch.tensor(LEAST)
    guard, known = Guard(GuardConfig(max_skipped=1), process=(0, 1)), progress()
    guard.observe(read_reports(reports), known)
    guard.decide(read_reports(reports), known.guard)
    assert guard.request is not None


def test_where_float16_is_refused():
    words = refusal("model.dtype=float16", "hw=v6e8", "trainer.global_batch_rows=64")
    assert "model.dtype=float16 with hw=v6e8; torch_xla and TPUs compute in bfloat16 or float32" in words
    assert "use model.dtype=bfloat16, or plain torch (hw=t4, or hw=cpu hw.runtime=eager)" in words
    words = refusal("model.dtype=float16", "task=generate", "task.prompt=x")
    assert "model.dtype=float16 with hw=cpu" in words
    assert "use task.dtype=bfloat16" in words
    assert composed("model.dtype=float16", "task=generate", "task.prompt=x", "task.dtype=bfloat16")
    words = refusal("model.dtype=float16", "hw.runtime=eager", "model.base=int8")
    assert "model.base=int8 with model.dtype=float16; sums over integer codes exceed float16's 65,504" in words
