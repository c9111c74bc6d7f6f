"""Adapters that train in one program: each as alone, and nothing of one reaches another."""

import math
from dataclasses import replace

import pytest
import torch

from tests.config.composing import composed
from tests.models.test_lora_peft import peft_loss, peft_name
from tests.training.tiny import ARCHITECTURES, built, plain_config, plain_updates, random_batch
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.models.adapters.lora import scale_of
from tpu_experiments.models.adapters.packed import Chosen, by_adapter, joined_rows, rows_of_each, split_over
from tpu_experiments.models.parts.dropout import NOISE, threshold_of
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.objectives.base import model_source
from tpu_experiments.objectives.next_token import count_next_tokens, next_token_loss
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.pack import Pack, PackedStep, require_packable
from tpu_experiments.training.row_lengths import measure_rows
from tpu_experiments.training.step import ACTIVE, TrainStep
from tpu_experiments.training.trainer import Trainer

POINTS = [
    (4, 8, 0.05, 1e-3, 1, None),
    (8, 16, 0.0, 5e-4, 2, 1.0),
    (16, 16, 0.2, 2e-4, 3, 0.5),
    (32, 64, 0.1, 1e-4, 4, 1.0),
]
"""r, alpha, dropout, learning rate, seed and limit of the gradient norm."""


class Alone:
    """A step of one adapter, its parameters and state, and its own batches."""

    def __init__(self, config, runtime, point, *, scales_loss=False):
        r, alpha, dropout, self.lr, self.seed, clip_norm = point
        self.lora = replace(config.lora, r=r, alpha=float(alpha), dropout=dropout)
        self.runtime = runtime
        model = build_model(
            model_source(config), lora=self.lora, seed=self.seed, place=runtime.place, folding=runtime.folding
        )
        model.module.train()
        self.parameters = {name: tensor.clone() for name, tensor in model.trainable.items()}
        self.model, self.module = model, model.module
        updates = plain_updates(
            self.parameters, weight_decay=0.01 * self.seed, clip_norm=clip_norm, is_scaled=scales_loss
        )
        self.state = updates.init(self.parameters)
        self.step = TrainStep(
            model.module,
            updates=updates,
            sum_over_processes=list,
            row_loss=next_token_loss,
            count=count_next_tokens,
            loop=runtime.loop,
            constrain=runtime.constrain,
        )

    def batch(self, number, *, has_noise=None, accumulation=2):
        has_noise = bool(self.lora.dropout) if has_noise is None else has_noise
        drawn = random_batch(100 * self.seed + number, accumulation=accumulation, rows=2, lr=self.lr, dropout=0.5)
        return drawn if has_noise else {name: tensor for name, tensor in drawn.items() if name != NOISE}

    def losses(self, steps):
        found = []
        for number in range(steps):
            self.parameters, self.state, output = self.step(self.parameters, self.state, self.batch(number))
            found.append(float(output.loss))
        return found


def packed_runs(config, runtime, points=POINTS, *, scales_loss=False):
    """The runs, and their packed step over a common module."""
    runs = [Alone(config, runtime, point, scales_loss=scales_loss) for point in points]
    rank, dropout = max(point[0] for point in points), max(point[2] for point in points)
    common = replace(config.lora, r=rank, alpha=float(rank), dropout=dropout)
    module = build_model(
        model_source(config), lora=common, seed=0, place=runtime.place, folding=runtime.folding, is_packed=True
    ).module.train()
    return runs, PackedStep(module, [run.step for run in runs])


def advance(runs, step, *, steps, active=None, accumulation=2):
    """Take steps of all runs together; return the losses of each."""
    scales = torch.tensor([scale_of(run.lora) for run in runs])
    thresholds = torch.tensor([threshold_of(1 - run.lora.dropout) for run in runs], dtype=torch.int32)
    losses = [[] for _ in runs]
    for number in range(steps):
        batches = [run.batch(number, has_noise=True, accumulation=accumulation) for run in runs]
        if active is not None:
            for batch, flags in zip(batches, active, strict=True):
                batch[ACTIVE] = torch.tensor([float(flags(number))])
        found = step(
            [run.parameters for run in runs],
            [run.state for run in runs],
            batches,
            scales=scales,
            thresholds=thresholds,
        )
        for run, own, (parameters, state, output) in zip(runs, losses, found, strict=True):
            run.parameters, run.state = parameters, state
            own.append(float(output.loss))
    return losses


@pytest.fixture
def tiny(make_config):
    def make(model, *overrides):
        shape = (f"model={model}", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager")
        config = make_config(*shape, *overrides)
        return config, EagerRuntime(config.hw)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_each_trains_as_alone_for_fifty_steps(tiny, model):
    compare_with_alone(*tiny(model), steps=50)


def test_each_trains_as_alone(tiny):
    compare_with_alone(*tiny("mistral7b"), steps=6)


def test_each_has_the_loss_scale_that_it_has_alone(tiny):
    """As in float16; in float32 a scale by a power of two changes no digit."""
    compare_with_alone(*tiny("qwen05b"), steps=3, scales_loss=True)


def test_the_only_one_that_was_built_trains_as_alone(tiny):
    """The others of its pack may have ended before, by errors of their own."""
    compare_with_alone(*tiny("qwen05b"), steps=2, points=POINTS[:1])


def compare_with_alone(config, runtime, *, steps, points=POINTS, scales_loss=False):
    runs, step = packed_runs(config, runtime, points, scales_loss=scales_loss)
    losses = advance(runs, step, steps=steps)
    for run, own, point in zip(runs, losses, points, strict=True):
        alone = Alone(config, runtime, point, scales_loss=scales_loss)
        start = {name: tensor.clone() for name, tensor in alone.parameters.items()}
        expected = alone.losses(steps)
        assert max(abs(a - b) for a, b in zip(own, expected, strict=True)) < 1e-5
        for name, value in alone.parameters.items():
            torch.testing.assert_close(run.parameters[name], value, atol=1e-5, rtol=0)
            assert (value - start[name]).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_each_trains_as_with_peft_alone(tiny, model):
    """Fifty steps; without dropout, whose masks are drawn in another way there."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config, runtime = tiny(model)
    runs, step = packed_runs(config, runtime, [(r, a, 0.0, lr, seed, clip) for r, a, _, lr, seed, clip in POINTS])
    peft = []
    for run in runs:
        torch.manual_seed(config.seed)
        base = AutoModelForCausalLM.from_config(plain_config(run), dtype=torch.float32)
        settings = LoraConfig(
            r=run.lora.r, lora_alpha=run.lora.alpha, target_modules=run.lora.targets, task_type="CAUSAL_LM"
        )
        other = get_peft_model(base, settings)
        named = dict(other.named_parameters())
        with torch.no_grad():
            for name, value in run.parameters.items():
                named[peft_name(name)].copy_(value)
        trained = [p for p in other.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=run.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01 * run.seed, foreach=False
        )
        peft.append((other, trained, optimizer))
    losses = advance(runs, step, steps=50, accumulation=1)
    for run, own, (other, trained, optimizer), point in zip(runs, losses, peft, POINTS, strict=True):
        for number, ours in enumerate(own):
            loss = peft_loss(other, run.batch(number, accumulation=1))
            loss.backward()
            if point[-1] is not None:
                torch.nn.utils.clip_grad_norm_(trained, point[-1])
            optimizer.step()
            optimizer.zero_grad()
            assert abs(ours - float(loss.detach())) < 1e-5, number
        named = dict(other.named_parameters())
        for name, value in run.parameters.items():
            torch.testing.assert_close(value, named[peft_name(name)].detach(), atol=1e-5, rtol=0)


def test_a_learning_rate_of_a_billion_touches_no_other_adapter(tiny):
    """Its loss and its values overflow, and every number of the others stays bit for bit."""
    config, runtime = tiny("mistral7b")
    runs, step = packed_runs(config, runtime)
    expected = advance(runs, step, steps=6)
    wild, step = packed_runs(config, runtime, [POINTS[0], (8, 16, 0.0, 1e9, 2, 1.0), *POINTS[2:]])
    losses = advance(wild, step, steps=6)
    assert not math.isfinite(losses[1][-1])
    for k in (0, 2, 3):
        assert losses[k] == expected[k]
        assert all(torch.equal(wild[k].parameters[name], value) for name, value in runs[k].parameters.items())


def test_an_adapter_that_has_ended_keeps_its_values_and_its_place(tiny):
    config, runtime = tiny("mistral7b")
    runs, step = packed_runs(config, runtime, POINTS[:2])
    expected = advance(runs, step, steps=4)
    ended, step = packed_runs(config, runtime, POINTS[:2])
    always = lambda number: True  # noqa: E731
    losses = advance(ended, step, steps=4, active=[always, lambda number: number < 2])
    assert losses[0] == expected[0]
    alone = Alone(config, runtime, POINTS[1])
    alone.losses(2)
    for name, value in alone.parameters.items():
        torch.testing.assert_close(ended[1].parameters[name], value, atol=1e-6, rtol=0)
    assert float(ended[1].state[""]["count"]) == 2
    assert float(ended[0].state[""]["count"]) == 4


def test_rows_keep_their_device_and_their_order():
    """Two devices, three adapters, two rows of each on a device: (D, K, R)."""
    own = [torch.arange(4).reshape(1, 4, 1) + 10 * k for k in range(3)]
    joined = joined_rows(own, num_shards=2)
    assert joined.flatten().tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    back = rows_of_each(joined[0], num=3, num_shards=2)
    assert all(torch.equal(part, each[0]) for part, each in zip(back, own, strict=True))
    x, weight = torch.randn(12, 5, 7), torch.randn(3, 6, 7)
    with split_over(2):
        parts = rows_of_each(by_adapter(x, weight), num=3, num_shards=2)
    for k, part in enumerate(rows_of_each(x, num=3, num_shards=2)):
        torch.testing.assert_close(parts[k], part @ weight[k].T)


def test_a_chosen_adapter_is_that_of_its_number():
    ranks, names = (2, 3), ("m.0:2:1.q.lora_A", "m.0:2:1.q.lora_B", "m.9.v.lora_A", "m.9.v.lora_B")
    each = []
    for r in ranks:
        shapes = ((2, r, 4), (2, 5, r), (r, 4), (5, r))
        each.append({name: torch.randn(shape) for name, shape in zip(names, shapes, strict=True)})
    scales = torch.tensor([0.5, 2.0])
    for number, own in enumerate(each):
        chosen = Chosen(each, number=torch.tensor([number]), scales=lambda: scales, held=dict)
        for a, b in ((names[0], names[1]), (names[2], names[3])):
            torch.testing.assert_close(chosen[b] @ chosen[a], scales[number] * own[b] @ own[a])
            assert chosen[a].shape[-2] == 3


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_the_models_of_the_recipes_can_be_packed(tiny, model):
    config, runtime = tiny(model)
    require_packable(built(config, runtime))


class NotingRuntime(EagerRuntime):
    """Notes the names of what is uploaded, in turn."""

    def __init__(self, *args):
        super().__init__(*args)
        self.placed = []

    def place(self, tensor, *, name):
        self.placed.append(name)
        return super().place(tensor, name=name)


def test_a_resumed_run_uploads_its_adapters_in_the_order_of_the_first_upload(tmp_path):
    """The files of the base have them in another order than its module: k before q, down before gate."""
    words = ("model=tiny", "model.size=full", "data=[sample_text]", "debug=smoke", "hw.runtime=eager")
    config = measure_rows(composed(*words, f"output_dir={tmp_path}"), is_lookup=False)
    runtime = NotingRuntime(config.hw)
    pack = Pack(runtime, ["a", "b"], loras=[config.lora] * 2)
    inputs = make_inputs(config, resolve_stages(config))
    for seat in pack.seats:
        trainer = Trainer(config, runtime, inputs=inputs, outputs=None, watch=Stopwatch())
        trainer.seat = seat
        before = len(runtime.placed)
        trainer.build()
        adapters = [name for name in runtime.placed[before:] if name in trainer.parameters]
        assert list(trainer.model.order) == adapters == list(trainer.parameters)
    assert set(pack.base.order) == set(adapters)
    assert list(pack.base.order) != adapters, "the base's files differ in their order, or this test proves nothing"


def test_a_model_with_dropout_of_its_own_is_refused(tiny):
    config, runtime = tiny("qwen05b", "+model.arch.attention_dropout=0.1")
    with pytest.raises(
        ConfigError, match=r"own dropout \(model\.layers\.0\.self_attn\.attention_dropout=0\.1\) may draw"
    ):
        require_packable(built(config, runtime))


def test_weights_beside_adapters_are_refused(tiny):
    config, runtime = tiny("qwen05b")
    model = built(config, runtime)
    model.trainable["score.weight"] = torch.zeros(2, 64)
    with pytest.raises(ConfigError, match=r"sweeping\.pack; score\.weight is trained beside the adapter"):
        require_packable(model)
