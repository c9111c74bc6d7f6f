"""xLSTM: the weights of transformers' class and its logits, those of NX-AI's package, and what does not apply to it.

Packed rows, adapters in PEFT and losses of steps are in test_families.py, the cell in test_mlstm.py, meshes in
tests/training/test_meshes.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, xLSTMConfig

from tests.benchmarks.xlstm_package import SIZES, WIDTH, drawn, ids
from tests.config.composing import composed
from tests.models.one_program import require_one_program
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import Mesh, mesh_of
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.families import mlstm
from tpu_experiments.models.families.xlstm import xLSTMForCausalLM
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.sharding import ShardingTable, check_heads
from tpu_experiments.runtime.xla.replay import NUM_FIRST

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}
GOLDEN = Path(__file__).parents[1] / "golden" / "xlstm_package.json"


def source_of(**values: Any) -> HuggingFaceModel:
    settings = {name: values.pop(name) for name in ("attention", "remat", "saved") if name in values}
    arch = {"model_type": "xlstm", **SMALL, **values}
    return HuggingFaceModel(
        ModelConfig(name="x", path="", init="random", dtype="float32", arch=arch, **settings), seed=3
    )


def test_the_preset_has_the_parameters_that_it_names():
    config = composed("model=xlstm_small", "lora=none")
    module = HuggingFaceModel(replace(config.model, init="random"), seed=0).empty()
    assert sum(p.numel() for p in module.parameters()) == 162_303_840


@pytest.mark.parametrize("bias", [False, True])
def test_random_weights_are_those_of_transformers(bias):
    source = source_of(use_bias=bias)
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    names = [name for name, _ in theirs.named_parameters()]
    assert names == [name for name, _ in source.empty().named_parameters()]
    assert all(torch.equal(own.tensor, theirs.get_parameter(own.name)) for own in source.weights(names))


@pytest.mark.parametrize("chunk", [None, 16])
def test_logits_are_those_of_transformers_in_both_forms(chunk, monkeypatch):
    config = xLSTMConfig(**SMALL, use_bias=True)
    ours, theirs = xLSTMForCausalLM(config).eval(), AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = drawn({name: tuple(p.shape) for name, p in ours.named_parameters()})
    ours.load_state_dict(weights)
    theirs.load_state_dict(weights)
    if chunk:
        monkeypatch.setattr(mlstm, "chunk_of", lambda _: chunk)
    tokens = torch.randint(0, 64, (2, 75), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
        assert (ours(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_logits_are_those_of_the_authors_package():
    """tests/benchmarks/xlstm_package.py recorded them, of xlstm 2.0.6 on the CPU."""
    config = xLSTMConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=WIDTH,
        num_heads=SIZES["num_heads"],
        num_hidden_layers=SIZES["num_blocks"],
    )
    model = xLSTMForCausalLM(config).eval()
    model.load_state_dict(drawn({name: tuple(p.shape) for name, p in model.named_parameters()}))
    expected = torch.tensor(json.loads(GOLDEN.read_text()))
    assert expected.std() > 0.5
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 16])
def test_steps_on_xla_are_one_program_without_a_host_read(chunk, monkeypatch):
    """Rows of 38 tokens as one product, and as chunks of 16 with what is left over."""
    if chunk:
        monkeypatch.setattr(mlstm, "chunk_of", lambda _: chunk)
    sizes = ("model.tiny_arch.vocab_size=4064", "model.remat=layer_inputs")
    config = composed("model=xlstm_small", "model.size=tiny", "model.dtype=float32", "lora=none", *sizes)
    runtime = make_runtime(config)
    run = Run(config, runtime)
    # Rows of a length that no other test has: what this process has compiled before is not compiled again.
    batches = [
        runtime.put(random_batch(i, accumulation=2, rows=2, seq_len=38), rows_dim=1) for i in range(NUM_FIRST + 3)
    ]
    require_one_program(run, runtime, batches)


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp", "fsdp_tensor"])
def test_every_matrix_but_those_of_the_gates_is_split(sharding):
    config = composed("model=xlstm_small", "lora=none", f"sharding={sharding}", "hw=v5e8")
    mesh = mesh_of(config.hw, config.sharding)
    module = HuggingFaceModel(replace(config.model, init="random"), seed=0).empty()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    table = ShardingTable(config.sharding, mesh=mesh)
    table.check(shapes)
    check_heads(mesh, module.config)
    whole = {name for name, shape in shapes.items() if len(shape) > 1 and not any(table.axes(name, shape))}
    assert {name.rpartition("mlstm_layer.")[2] for name in whole} == {"igate_preact.weight", "fgate_preact.weight"}
    parts = {
        mesh.parts(table.axes(name, shape)) for name, shape in shapes.items() if name not in whole and len(shape) > 1
    }
    assert parts == {8 // mesh.data}


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match=r"sharding\.mesh\.tensor=8; the model has 4 heads .*tensor=1 or 2 or 4"):
        check_heads(Mesh(tensor=8), source_of().config)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"attention": "flash"}, r"model\.attention=flash; .* has no attention; leave it at sdpa"),
        ({"remat": "save_dots"}, r"model\.remat=save_dots; .* use model\.remat=layer_inputs"),
        ({"saved": ["q_proj"]}, r"model\.saved=\['q_proj'\]; .* use model\.remat=layer_inputs"),
        ({"weight_mode": "fused"}, r"model\.arch\.weight_mode=fused; .* use weight_mode=single"),
        ({"tie_word_embeddings": True}, r"model\.arch\.tie_word_embeddings=true; .* set it to false"),
    ],
)
def test_what_does_not_apply_is_refused(setting, says):
    with pytest.raises(ConfigError, match=says):
        source_of(**setting)
