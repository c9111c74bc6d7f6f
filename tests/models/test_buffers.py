"""Buffers are what the checkpoint says, or what transformers computes from its config; otherwise the run is refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.test_families import SIZES, alone
from tests.models.untrained import move_logits
from tests.training.tiny import Run, random_batch
from tpu_experiments.checkpoint.proof import read_model
from tpu_experiments.checkpoint.reading import without_values
from tpu_experiments.checkpoint.state import shapes_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.full import write_model
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.huggingface import HuggingFaceModel, ShapesOfModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.buffers import (
    compute_buffers,
    persistent_buffers,
    require_values,
    shapes_of_buffers,
)
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("plain_attention")]
WEIGHTS = "model.safetensors"
HALF = 8
"""Half of a head's features."""
LONG = {"short_factor": [1.0] * HALF, "long_factor": [2.0] * HALF, "original_max_position_embeddings": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
VALUES = {
    "apertus": {},
    "deepseek_v3": ROUTED
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
    | {"head_dim": 8},
    "gemma4_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "global_head_dim": 32}
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 4096},
    "glm4_moe": ROUTED | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "minimax_m2": ROUTED | {"num_local_experts": 4},
    "phi3": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | LONG},
}
"""Values of a config beside SIZES, of model types with buffers of each kind."""
HELD = {
    "apertus": "model.layers.1.mlp.act_fn.beta",
    "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
    "gemma4_text": "model.layers.1.layer_scalar",
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "minimax_m2": "model.layers.1.mlp.e_score_correction_bias",
}
"""A buffer that the checkpoint of a model type holds."""


def config_of(kind):
    of_kind = CONFIG_MAPPING[kind]
    settable = {name: v for name, v in SIZES.items() if not isinstance(getattr(of_kind, name, None), property)}
    return of_kind(**settable | VALUES[kind])


def written(kind, folder):
    """Transformers' model, whose buffers are not those of an untrained one, and whose files are in the folder."""
    torch.manual_seed(0)
    config = config_of(kind)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    move_logits(model)
    model.save_pretrained(folder)
    return model


def source_of(folder, *, kind=HuggingFaceModel, **values):
    given = {"name": "x", "path": str(folder), "dtype": "float32", "attention": "eager"} | values
    return kind(ModelConfig(**given), seed=0)


def built_of(source, *, r=4):
    lora = LoraConfig(r=r, alpha=8.0, targets=["all-linear"])
    return build_model(source, lora=lora, seed=0, place=lambda tensor, name: tensor)


def rows_of(length=32):
    """One document (1, T)."""
    ids = torch.randint(5, 4000, (1, length), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "positions": torch.arange(length)[None], "segments": torch.ones_like(ids)}


def logits(built, rows):
    with torch.no_grad():
        return logits_of(built.module.eval(), built.trainable, rows)[0]


@pytest.mark.parametrize("kind", VALUES)
def test_a_checkpoint_computes_what_transformers_computes_from_it(kind, tmp_path):
    model = written(kind, tmp_path)
    built = built_of(source_of(tmp_path))
    for length in (12, 32):  # of longrope's two sets of frequencies, each
        rows = rows_of(length)
        torch.testing.assert_close(logits(built, rows), alone(model, rows), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", VALUES)
def test_every_buffer_is_bit_for_bit_that_of_from_pretrained(kind, dtype, tmp_path):
    written(kind, tmp_path)
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).named_buffers())
    ours = dict(source_of(tmp_path, dtype=dtype).empty().named_buffers())
    assert theirs.keys() <= ours.keys()
    for name, buffer in theirs.items():
        assert buffer.dtype == ours[name].dtype, name
        assert torch.equal(buffer, ours[name]), name
    assert {name.rpartition(".")[2] for name in ours.keys() - theirs.keys()} <= {"long_inv_freq"}


def changed(folder, change):
    """Replace the tensors of a checkpoint by `change(tensors)`."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def refused(folder):
    with pytest.raises(ConfigError) as caught:
        built_of(source_of(folder))
    message = str(caught.value)
    assert message.startswith(f"model.path={folder}; ")
    assert message.rstrip().endswith((".", "?"))
    return message


@pytest.mark.parametrize("kind", HELD)
def test_a_buffer_that_the_checkpoint_lacks_is_named(kind, tmp_path):
    written(kind, tmp_path)
    stored = "block_sparse_moe.e_score".join(HELD[kind].rsplit("mlp.e_score", 1))  # an older name of minimax_m2's
    changed(tmp_path, lambda tensors: tensors.pop(stored))
    message = refused(tmp_path)
    assert "the checkpoint lacks 1 of" in message
    assert f"buffers, first {HELD[kind]!r}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["apertus", "glm4_moe"])
def test_a_buffer_that_is_no_number_is_named(kind, value, tmp_path):
    written(kind, tmp_path)
    changed(tmp_path, lambda tensors: tensors[HELD[kind]].fill_(value))
    message = refused(tmp_path)
    assert f"of {HELD[kind]} that are NaN or infinite" in message
    assert WEIGHTS in message


def test_a_buffer_of_another_shape_is_named(tmp_path):
    written("glm4_moe", tmp_path)
    changed(tmp_path, lambda tensors: tensors.update({HELD["glm4_moe"]: torch.zeros(6)}))
    assert f"the checkpoint has {HELD['glm4_moe']} as (6,), its config.json says (4,)" in refused(tmp_path)


def test_buffers_of_drawn_weights_are_those_of_the_class():
    arch = {"model_type": "apertus", **config_of("apertus").to_diff_dict()}
    source = source_of("", init="random", arch=arch)
    act = source.empty().get_submodule("model.layers.0.mlp.act_fn")
    assert (float(act.beta), float(act.eps)) == pytest.approx((0.5, -1e-6))


def test_no_buffer_is_read_for_shapes_alone(tmp_path):
    written("apertus", tmp_path)
    (tmp_path / WEIGHTS).unlink()
    module = source_of(tmp_path, kind=ShapesOfModel).empty()
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_a_rehearsal_leaves_nothing_behind(tmp_path):
    written("phi3", tmp_path)
    source = source_of(tmp_path)
    rope = source.empty().get_submodule("model.rotary_emb")
    assert torch.equal(rope.inv_freq, 2 * rope.long_inv_freq)
    assert not any(isinstance(value, torch.Tensor) for value in vars(rope).values())


def test_what_initialisation_does_not_set_is_noticed():
    module = AutoModelForCausalLM.from_config(config_of("glm4_moe"))
    module.model.register_buffer("scale", torch.tensor(3.0), persistent=False)
    assert compute_buffers(module) == {"model.scale"}
    assert compute_buffers(AutoModelForCausalLM.from_config(config_of("glm4_moe"))) == set()


@pytest.mark.parametrize("kept", ["attribute", "list", "buffer"])
def test_a_tensor_without_values_is_named(kept):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    empty = torch.zeros(2, device="meta")
    if kept == "buffer":
        module[1].register_buffer("scale", empty)
    else:
        module[1].scale = empty if kept == "attribute" else [torch.zeros(1), empty]
    with pytest.raises(ConfigError, match=r"model\.path=x; 1 tensors of Sequential .* first '1\.scale'"):
        require_values(module, origin="model.path=x")


# ---- what is saved ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["apertus", "glm4_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_keeps_its_buffers(kind, dtype, tmp_path):
    model = written(kind, tmp_path / "base")
    source = source_of(tmp_path / "base")
    built = built_of(source)
    lora = LoraConfig(r=4, alpha=8.0, targets=["all-linear"])
    whole = whole_model(source, lora=lora, trained=built.trainable)
    write_model(
        str(tmp_path / "merged"),
        tensors=whole.tensors(dtype=dtype),
        shapes=whole.shapes,
        config=whole.config,
        architecture=whole.architecture,
        dtype=dtype,
        tokenizer=load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None),
    )
    stored = load_file(tmp_path / "merged" / WEIGHTS)
    for name, buffer in persistent_buffers(model).items():
        assert torch.equal(stored[name], buffer), name
    if dtype == torch.float32:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
        rows = rows_of()
        torch.testing.assert_close(alone(again, rows), alone(model, rows), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("max_held_bytes", [0, 1e9])
def test_a_fully_trained_model_is_read_back_without_its_buffers(max_held_bytes, tmp_path):
    model = written("apertus", tmp_path / "base")
    source = source_of(tmp_path / "base")
    built, buffers = built_of(source, r=0), persistent_buffers(source.empty())
    trained = {name: tensor + 0.01 for name, tensor in built.trainable.items()}
    write_model(
        str(tmp_path / "model"),
        tensors=itertools.chain(trained.items(), buffers.items()),
        shapes=shapes_of(trained) | shapes_of_buffers(buffers),
        config=source.config,
        architecture=type(built.module).__name__,
        dtype=torch.float32,
        tokenizer=load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None),
        max_shard_bytes=3e5,
    )
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    found = read_model(str(tmp_path / "model"), max_held_bytes=max_held_bytes)
    assert without_values(found).keys() == trained.keys()
    frozen = build_frozen(source, lora=LoraConfig(r=0), trained=found, place=lambda tensor, name: tensor)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    rows = rows_of()
    with torch.no_grad():
        ours = logits_of(frozen.eval(), {}, rows)[0]
    torch.testing.assert_close(ours, alone(again, rows), atol=2e-5, rtol=2e-5)
    assert (ours - alone(model, rows)).abs().max() > 1e-2


# ---- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["apertus", "phi3"])
def test_three_steps_on_torch_xla_are_those_of_plain_torch(kind, tmp_path, make_config):
    from tpu_experiments.runtime.xla.device import XlaRuntime

    written(kind, tmp_path)
    config = make_config()
    model = replace(config.model, path=str(tmp_path), init="pretrained", size="full", dtype="float32", arch={})
    lora = replace(config.lora, r=4, alpha=8.0, targets=["all-linear"])
    config = replace(config, model=replace(model, attention="eager"), lora=lora)
    batches = [random_batch(0, lr=1e-2)] * 3
    run = Run(config, XlaRuntime(config.hw, sharding=config.sharding))
    losses = run.losses(batches)
    assert losses == pytest.approx(Run(config, EagerRuntime(config.hw)).losses(batches), abs=2e-4)
    assert losses[2] < losses[0] - 0.01
    assert {buffer.device.type for buffer in run.model.module.buffers()} == {"xla"}


def test_a_class_may_set_the_buffers_of_its_parts():
    from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

    states = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
    arch = {"model_type": "falcon_h1", **SIZES, **states, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0]}
    source = HuggingFaceModel(
        ModelConfig(name="x", path="", init="random", dtype="float32", attention="eager", arch=arch), seed=0
    )
    module = source.empty()
    for layer in module.model.layers:
        assert torch.equal(layer.mamba.mup_vector, compute_mup_vector(source.config))
