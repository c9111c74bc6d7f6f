"""Ternary layers compute what transformers' BitNet computes, train through the rounding, and count their codes."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitnet import AutoBitLinear, pack_weights
from transformers.integrations.bitnet import BitLinear as PackedLinear

from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.export.full import write_model
from tpu_experiments.export.quantised import TernaryLayout
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.bitnet import (
    MIX,
    BitLinear,
    layers_of,
    mixed,
    ternary,
    ternary_shares,
    ternary_weights,
)
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.runtime.stacked import is_stack, unstacked

pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("plain_attention"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
TINY = ("model=llama_mini", "model.size=tiny", "model.dtype=float32", "model.linear=bitnet", "lora=none")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_of(rows: int, columns: int, *, bias: bool = False) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        made.weight.copy_(drawn(rows, columns, seed=1) * 0.02)
    return made


@pytest.fixture
def eager_functions():
    """transformers' functions as they are written, without torch.compile."""
    with torch.compiler.set_stance("force_eager"):
        yield


def packed(linear: nn.Linear) -> PackedLinear:
    """transformers' packed layer of the same weight."""
    made = PackedLinear(linear.in_features, linear.out_features, bias=False, dtype=torch.float32)
    tensors = TernaryLayout(torch.float32).encode("weight", linear.weight.detach())
    made.weight.copy_(tensors["weight"])
    made.weight_scale.copy_(tensors["weight_scale"])
    return made


@pytest.mark.parametrize("width", [48, 1027])
def test_the_packed_layer_of_transformers_gives_the_same_bits(eager_functions, width):
    linear, x = linear_of(64, width), drawn(3, 5, width)
    ours = BitLinear(linear)(x)
    assert torch.equal(ours, packed(linear)(x))
    assert (ours - linear(x)).abs().max() > 0.01  # the codes are what it computes with
    codes, _ = ternary(linear.weight.detach())
    assert torch.equal(TernaryLayout(torch.float32).encode("w", linear.weight.detach())["w"], pack_weights(codes))


def test_outputs_and_gradients_are_those_of_the_layer_that_transformers_trains(eager_functions):
    linear = linear_of(64, 48, bias=True)
    theirs = AutoBitLinear(48, 64, bias=True, online_quant=True)
    theirs.load_state_dict(linear.state_dict())
    found = []
    for layer in (BitLinear(linear), theirs):
        x = drawn(3, 5, 48).requires_grad_()
        out = layer(x)
        found.append((out, *torch.autograd.grad((out * drawn(3, 5, 64, seed=2)).sum(), [x, layer.weight, layer.bias])))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_zeros_and_the_bounds_of_the_codes():
    linear = linear_of(4, 8)
    assert torch.equal(BitLinear(linear)(torch.zeros(2, 8)), torch.zeros(2, 4))
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(BitLinear(linear)(drawn(2, 8)), torch.zeros(2, 4))
    codes, inverse = ternary(torch.tensor([[3.0, -0.1, 0.4, -0.6]]))  # mean 1.025
    assert codes.tolist() == [[1, 0, 0, -1]]
    assert float(inverse) == pytest.approx(1 / 1.025)


def test_the_share_of_a_warm_up_goes_from_the_dense_layer_to_the_ternary_one():
    linear, x = linear_of(16, 32), drawn(7, 32)
    layer = BitLinear(linear)
    with mixed(torch.zeros(2)):
        torch.testing.assert_close(layer(x), F.linear(x, linear.weight), rtol=1e-5, atol=1e-6)
    with mixed(torch.ones(2)):
        assert torch.equal(layer(x), BitLinear(linear)(x))
    whole = layer(x)
    with mixed(torch.tensor(0.5)):
        assert 0 < (layer(x) - whole).norm() < (linear(x) - whole).norm()


def eager_run(make_config: Any, *words: str) -> Run:
    from tpu_experiments.runtime.eager import EagerRuntime

    config = make_config(*TINY, "hw.runtime=eager", *words)
    return Run(config, EagerRuntime(config.hw))


@pytest.mark.parametrize("form", ["online", "packed"])
def test_a_whole_model_is_that_of_transformers(make_config, eager_functions, tmp_path, tokenizer, form):
    """From the run's own model/, and from packed weights, of which the logits are equal bit for bit."""
    run = eager_run(make_config)
    rows = random_batch(3, rows=1)
    source, weights = run.model.source, {name: p.detach() for name, p in run.parameters.items()}
    writing = {"config": source.export_config, "architecture": "BitNetForCausalLM", "dtype": torch.float32}
    layout = TernaryLayout(torch.float32)
    more: dict[str, Any] = {}
    if form == "packed":
        codes = {name: layout.encode(name, weights.pop(name)) for name in ternary_weights(run.model.module)}
        weights |= {name: tensor for parts in codes.values() for name, tensor in parts.items()}
        more = {"shapes": weights, "quantization": layout.config(["lm_head"])}
    write_model(str(tmp_path), tensors=weights, tokenizer=tokenizer, **writing, **more)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    kinds = {type(part) for name, part in loaded.named_modules() if name.endswith("_proj")}
    assert kinds == {AutoBitLinear if form == "online" else PackedLinear}
    assert type(loaded.lm_head) is nn.Linear
    with torch.no_grad():
        ids = rows["ids"][0, :, : int((rows["segments"][0] == 1).sum())]
        own = {"ids": ids, "positions": torch.arange(ids.shape[1])[None], "segments": torch.ones_like(ids)}
        ours = logits_of(run.model.module, run.parameters, own)
        theirs = loaded(input_ids=ids).logits
    if form == "packed":
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)  # a rounding may fall to the other side
        for again in source_of(tmp_path).weights(list(weights)):  # to be trained on
            assert torch.equal(again.tensor, weights[again.name])


@pytest.fixture(scope="module")
def tokenizer():
    from tpu_experiments.data.tokens.tokenizer import load_tokenizer

    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


def with_mix(batch: dict[str, Tensor], mix: float | None) -> dict[str, Tensor]:
    return batch if mix is None else {**batch, MIX: torch.full(batch["ids"].shape[:2], mix)}


@pytest.mark.parametrize("mix", [None, pytest.param(0.5, marks=pytest.mark.slow)])
def test_folded_layers_on_torch_xla_train_as_layers_of_plain_torch(make_config, mix):
    from tpu_experiments.runtime.xla.device import XlaRuntime

    words = () if mix is None else ("model.linear_warmup_steps=9",)
    config = make_config(*TINY, "model.tiny_arch.num_hidden_layers=3", *words)
    folded = Run(config, XlaRuntime(config.hw, sharding=config.sharding))
    plain = eager_run(make_config, "model.tiny_arch.num_hidden_layers=3", *words)
    assert any(is_stack(name) for name in folded.parameters)
    batches = [with_mix(random_batch(seed, accumulation=2, rows=2), mix) for seed in range(3)]
    for run in (folded, plain):
        run.step.ternary = ternary_weights(run.model.module)
    losses = plain.losses(batches)
    assert folded.losses(batches) == pytest.approx(losses, abs=1e-3)
    assert losses[-1] < losses[0]
    output = folded.program(folded.runtime.put(batches[0], rows_dim=1))
    assert output.shares.shape == (3, 3)
    torch.testing.assert_close(output.shares.cpu().sum(1), torch.ones(3))


def test_shares_by_layer_are_those_of_the_codes(make_config):
    run = eager_run(make_config)
    names = ternary_weights(run.model.module)
    assert len(names) == 7 * 2
    assert layers_of(names) == [0, 1]
    shares = ternary_shares(run.parameters, names)
    for layer in (0, 1):
        own = [n for n in names if f"layers.{layer}." in n]
        codes = torch.cat([ternary(run.parameters[name])[0].flatten() for name in own])
        expected = [float((codes == code).float().mean()) for code in (-1, 0, 1)]
        assert shares[layer].tolist() == pytest.approx(expected, abs=1e-6)
    stacks: dict[str, list[Tensor]] = {}
    for name in names:
        stacks.setdefault(name.replace("layers.0.", "layers.1."), []).append(run.parameters[name])
    folded = {name.replace("layers.1.", "layers.0:2:1."): torch.stack(parts) for name, parts in stacks.items()}
    assert set(unstacked(folded)) == set(names)
    torch.testing.assert_close(ternary_shares(folded, list(folded)), shares)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama in a folder, and its config."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64)
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    whole.save_pretrained(folder)
    return folder, whole


def source_of(folder: Any, **more: Any) -> HuggingFaceModel:
    settings = {"linear": "bitnet", "dtype": "float32", **more}
    return HuggingFaceModel(ModelConfig(name="mine", path=str(folder), **settings), seed=0)


def test_a_warm_up_begins_as_the_pretrained_llama(make_config, llama):
    from tpu_experiments.models.sources.build import build_model

    folder, whole = llama
    source = source_of(folder, linear_warmup_steps=9)
    lora = make_config("lora=none").lora
    model = build_model(source, lora=lora, seed=0, place=lambda tensor, *, name: tensor)
    assert type(model.module).__name__ == "BitNetForCausalLM"
    norms = [name for name in model.trainable if "sub_norm" in name]
    assert len(norms) == 4
    assert all(torch.equal(model.trainable[name], torch.ones_like(model.trainable[name])) for name in norms)
    ids = torch.arange(9)[None]
    rows = {"ids": ids, "positions": ids, "segments": torch.ones_like(ids)}
    with torch.no_grad():
        at_first = logits_of(model.module, model.trainable, {**rows, MIX: torch.zeros(1)})
        torch.testing.assert_close(at_first, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        quantised = logits_of(model.module, model.trainable, rows)
        assert (quantised - at_first).abs().max() > 0.05
        at_last = logits_of(model.module, model.trainable, {**rows, MIX: torch.ones(1)})
    assert torch.equal(at_last, quantised)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "qwen2"}, "has the layers of a Llama, and a 'qwen2' has others"),
        ({"mlp_bias": True}, "mlp_bias=True has no place"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window=8 has no place"),
        ({"head_dim": 32}, "head_dim=32 has no place"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "its weights are codes (bitnet, packed)"),
    ],
)
def test_a_model_that_is_no_bitnet_is_refused(llama, tmp_path, values, words):
    folder, _ = llama
    config = json.loads((folder / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model\.linear=bitnet") as caught:
        source_of(tmp_path)
    assert words in str(caught.value)
