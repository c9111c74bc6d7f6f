"""Adapters: where they go, what they start from, what they leave alone."""

import copy

import pytest
import torch
from torch import nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models.adapters.linear import LoraLinear, Siblings
from tpu_experiments.models.adapters.lora import adapter_weights, inject, scale_of
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.dropout import noise
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.sources.build import build_model, describe

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla
WEIGHT = "layers.0.attn.q_proj.weight"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(12, 8), nn.Linear(12, 8, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.up_proj, self.norm = Attention(), nn.Linear(12, 20, bias=False), nn.LayerNorm(12)


@pytest.fixture
def module():
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    return model


def adapted(module):
    return [name for name, part in module.named_modules() if isinstance(part, LoraLinear)]


def weights(lora, *, seed=0, name=WEIGHT, shape=(8, 12)):
    base = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    named = {item.name: item.tensor for item in adapter_weights(Named(name, base), lora=lora, seed=seed)}
    prefix = name.removesuffix("weight")
    return base, named[name], named[prefix + "lora_A"], named[prefix + "lora_B"]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj"], ["layers.0.attn.q_proj", "layers.1.attn.q_proj"]),
        (
            ["up_proj", "v_proj"],
            ["layers.0.attn.v_proj", "layers.0.up_proj", "layers.1.attn.v_proj", "layers.1.up_proj"],
        ),
        (["layers.1.*"], ["layers.1.attn.q_proj", "layers.1.attn.v_proj", "layers.1.up_proj"]),
        (["*.0.*.?_proj", "layers.0.attn.q_proj"], ["layers.0.attn.q_proj", "layers.0.attn.v_proj"]),
    ],
)
def test_targets_are_last_parts_or_globs(module, targets, expected):
    inject(module, LoraConfig(r=2, targets=targets))
    assert sorted(adapted(module)) == expected


def test_all_linear_are_those_of_the_layers(module):
    module.lm_head = nn.Linear(8, 40, bias=False)
    inject(module, LoraConfig(r=4, targets=["all-linear"]))
    assert adapted(module) == [
        f"layers.{n}.{name}" for n in (0, 1) for name in ("attn.q_proj", "attn.v_proj", "up_proj")
    ]


def test_an_unmatched_target_lists_the_names_that_exist(module):
    with pytest.raises(ConfigError) as caught:
        inject(module, LoraConfig(r=2, targets=["q_proj", "qproj"]))
    message = str(caught.value)
    assert message.startswith("lora.targets has 'qproj'")
    assert "Did you mean 'q_proj'?" in message
    assert message.endswith("Names that exist: all-linear, q_proj, up_proj, v_proj.")


def test_a_module_that_is_no_linear_is_no_target(module):
    with pytest.raises(ConfigError, match=r"'norm'.*matches no Linear"):
        inject(module, LoraConfig(r=2, targets=["norm"]))


def test_frozen_weights_keep_their_names_and_only_adapters_train(module):
    before = {name: tuple(p.shape) for name, p in module.named_parameters()}
    report = inject(module, LoraConfig(r=3, targets=["q_proj"]))
    after = {name: tuple(p.shape) for name, p in module.named_parameters()}
    new = {name: after.pop(name) for name in list(after) if "lora_" in name}
    assert after == before
    assert new == {
        f"layers.{i}.attn.q_proj.lora_{kind}": shape for i in (0, 1) for kind, shape in (("A", (3, 12)), ("B", (8, 3)))
    }
    assert {name for name, p in module.named_parameters() if p.requires_grad} == set(new)
    assert (report.trainable, report.adapters) == (2 * 3 * (12 + 8), 2)
    base = 2 * (12 * 8 + 8 + 12 * 8 + 12 * 20 + 12 + 12)
    assert report.total == base + report.trainable
    assert str(report) == f"120 of {base + 120:,} parameters trained ({100 * 120 / (base + 120):.3f} %), 2 adapters"


def test_rank_zero_leaves_the_module_as_it_is(module):
    before = copy.deepcopy(module)
    report = inject(module, LoraConfig(r=0, targets=["not there"]))
    assert adapted(module) == []
    assert all(p.requires_grad for p in module.parameters())
    assert report.trainable == report.total == sum(p.numel() for p in before.parameters())


@pytest.mark.parametrize(("scaling", "scale"), [("alpha_over_r", 4.0), ("alpha_over_sqrt_r", 8.0)])
def test_scale(scaling, scale):
    assert scale_of(LoraConfig(r=4, alpha=16.0, scaling=scaling)) == scale


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_siblings_that_read_one_tensor_equal_adapters_by_themselves(module, dropout):
    """One product with all A; each gets its share of it, and each A its share of the gradient."""
    inject(module, LoraConfig(r=2, targets=["q_proj", "v_proj"], dropout=dropout))
    attn = module.layers[0].attn.double()
    for part in (attn.q_proj, attn.v_proj):
        nn.init.normal_(part.lora_A)
        nn.init.normal_(part.lora_B)
    alone = copy.deepcopy(attn)
    for part in (alone.q_proj, alone.v_proj):
        site, part.siblings = part.siblings.site, Siblings([part])
        part.siblings.site = site
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    results = []
    for of in (attn, alone):
        inputs, outs = x.clone().requires_grad_(), []
        for part in (of.q_proj, of.v_proj):
            with noise(torch.tensor([1, 2, 3], dtype=torch.int32)):
                outs.append(part(inputs))
        (outs[0].sin() * outs[1]).sum().backward()
        adapters = [p.grad for name, p in of.named_parameters() if "lora_" in name]
        results.append([*outs, inputs.grad, *adapters])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_sibling_that_reads_another_tensor_computes_for_itself(module):
    inject(module, LoraConfig(r=2, targets=["q_proj", "v_proj"]))
    attn = module.layers[0].attn
    for part in (attn.q_proj, attn.v_proj):
        nn.init.normal_(part.lora_A)
        nn.init.normal_(part.lora_B)
    x, y = torch.randn(2, 4, 12)

    def alone(part, z):
        return z @ part.weight.T + (0 if part.bias is None else part.bias) + z @ part.lora_A.T @ part.lora_B.T * 0.5

    for q_input, v_input in ((x, x), (x, y), (y, x), (y, y), (x, y)):
        for part, given in ((attn.q_proj, q_input), (attn.v_proj, v_input)):
            part.scale = 0.5
            torch.testing.assert_close(part(given), alone(part, given))


def test_every_tensor_that_adapters_read_has_masks_of_its_own(module):
    """By layer and site; siblings read one tensor and have one site, and sites are those of every layer."""
    inject(module, LoraConfig(r=2, targets=["q_proj", "v_proj", "up_proj"]))
    first, second = ((layer.attn.q_proj, layer.attn.v_proj, layer.up_proj) for layer in module.layers)
    assert [part.layer_idx for part in (*first, *second)] == [0, 0, 0, 1, 1, 1]
    assert [part.siblings.site for part in first] == [part.siblings.site for part in second]
    assert first[0].siblings.site == first[1].siblings.site != first[2].siblings.site
    assert all(-(2**31) <= part.siblings.site < 2**31 for part in first)


def identity_adapter(*, dropout, scale=0.5):
    """An adapter whose A and B are identities, so that its output is what dropout let through."""
    linear = nn.Linear(64, 64)
    layer = LoraLinear(linear, r=64, scale=scale, dropout=dropout)
    with torch.no_grad():
        layer.lora_A.copy_(torch.eye(64))
        layer.lora_B.copy_(torch.eye(64))
    return linear, layer


def test_dropout_takes_inputs_of_a_only_and_in_training_only():
    linear, layer = identity_adapter(dropout=0.25)
    x = torch.rand(100, 64) + 1.0
    torch.testing.assert_close(layer.eval()(x), linear(x) + 0.5 * x)
    with noise(torch.tensor([1], dtype=torch.int32)):
        through = (layer.train()(x) - linear(x)) / (0.5 * x)
    kept = through > 0.5
    torch.testing.assert_close(through, torch.where(kept, 1 / 0.75, 0.0), atol=1e-5, rtol=1e-5)
    assert kept.float().mean() == pytest.approx(0.75, abs=0.03)  # 6400 draws: 0.03 is 5.5 standard deviations


def test_the_output_is_in_the_data_type_of_the_base():
    _, layer = identity_adapter(dropout=0.0)
    assert layer.to(torch.bfloat16)(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_b_zero_and_a_zero_leave_the_base_alone():
    for init, zero, drawn in (("b_zero", 3, 2), ("a_zero", 2, 3)):
        got = weights(LoraConfig(r=4, init=init))
        assert torch.equal(got[0], got[1])
        assert not got[zero].any()
        assert got[drawn].any()
        assert all(t.dtype == torch.float32 for t in got[2:])


def test_a_zero_draws_b_with_its_stated_deviation():
    b = weights(LoraConfig(r=3, init="a_zero"), shape=(5000, 4))[3]
    assert b.std() == pytest.approx(1 / 3, rel=0.03)


def test_the_draw_depends_on_seed_and_name_alone():
    lora = LoraConfig(r=4)
    first = weights(lora)[2]
    torch.manual_seed(99)  # the global state does not matter, nor what was drawn before
    weights(lora, name="layers.1.attn.q_proj.weight")
    assert torch.equal(weights(lora)[2], first)
    assert not torch.equal(weights(lora, seed=1)[2], first)
    assert not torch.equal(weights(lora, name="layers.1.attn.q_proj.weight")[2], first)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("scaling", ["alpha_over_r", "alpha_over_sqrt_r"])
def test_pissa_takes_the_best_approximation_of_rank_r_out_of_the_base(shape, scaling):
    lora = LoraConfig(r=6, alpha=9.0, init="pissa", scaling=scaling)
    base, reduced, a, b = weights(lora, shape=shape)
    taken = scale_of(lora) * b.double() @ a.double()
    torch.testing.assert_close(reduced.double(), base.double() - taken, atol=1e-6, rtol=0)
    values = torch.linalg.svdvals(base.double())
    torch.testing.assert_close(torch.linalg.svdvals(taken)[:6], values[:6], atol=0, rtol=1e-5)
    # Eckart and Young: no matrix of rank r is closer to the base than the root of the other squared singular values
    torch.testing.assert_close((base - taken).norm(), values[6:].norm(), atol=0, rtol=1e-6)


def test_pissa_keeps_its_start_for_the_export(make_config):
    config = make_config(
        "model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "lora.init=pissa"
    )
    source = HuggingFaceModel(config.model, seed=0)
    built = build_model(source, lora=config.lora, seed=0, place=lambda tensor, name: tensor)
    assert built.initial.keys() == built.trainable.keys()
    start = {name: tensor.clone() for name, tensor in built.trainable.items()}
    for tensor in built.trainable.values():
        tensor.add_(1.0)
    assert all(torch.equal(built.initial[name], start[name]) for name in start)


def test_a_built_model_has_trainables_in_the_order_of_the_module(make_config):
    config = make_config("model=gemma3_270m", "model.size=tiny", "lora=all_linear_r8")
    source = HuggingFaceModel(config.model, seed=0)
    module, report = describe(source, lora=config.lora)
    built = build_model(source, lora=config.lora, seed=0, place=lambda tensor, name: tensor)
    assert list(built.trainable) == [name for name, p in module.named_parameters() if p.requires_grad]
    assert sum(t.numel() for t in built.trainable.values()) == report.trainable
    assert all(t.dtype == torch.float32 for t in built.trainable.values())
    frozen = [p for name, p in built.module.named_parameters() if name not in built.trainable]
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad and not p.is_meta for p in frozen)
