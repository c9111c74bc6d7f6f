"""Every tensor of a checkpoint is read, is of a known kind that is logged, or stops the run by its name."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.benchmarks.decoders import small_config
from tests.models.encoders import ENCODERS, SMALL
from tests.models.test_families import FAMILIES, SIZES, alone
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.models.huggingface import CLASSIFIER, HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources import unread
from tpu_experiments.models.sources.build import build_model

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("plain_attention")]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def written(folder, kind="llama", **values):
    """Transformers' model, saved in the folder."""
    torch.manual_seed(0)
    of_kind = CONFIG_MAPPING[kind]
    settable = {name: v for name, v in SIZES.items() if not isinstance(getattr(of_kind, name, None), property)}
    config = of_kind(**settable | values)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def source_of(folder, **more):
    model = ModelConfig(name="x", path=str(folder), dtype="float32", attention="eager")
    return HuggingFaceModel(model, seed=0, **more)


def built_of(folder, *, r=0):
    lora = LoraConfig(r=r, alpha=8.0, targets=["all-linear"] if r else [])
    return build_model(source_of(folder), lora=lora, seed=0, place=lambda tensor, name: tensor)


def change(folder, more=(), less=()):
    """Add tensors to a checkpoint and take others out of it."""
    tensors = {name: t for name, t in load_file(folder / WEIGHTS).items() if name not in less} | dict(more)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def refused(folder):
    with pytest.raises(ConfigError) as caught:
        built_of(folder)
    message = str(caught.value)
    assert message.startswith(f"model.path={folder}; ")
    assert message.endswith(".")
    return message


def logged(folder, caplog, **more):
    """What the log says of the tensors that are not read."""
    unread._said.clear()
    source = source_of(folder, **more)
    with caplog.at_level(logging.INFO):
        shapes = {name: tuple(p.shape) for name, p in source.empty().named_parameters()}
        source.require_weights(shapes)
    found = [record.message for record in caplog.records if "are not read" in record.message]
    assert len(found) <= 1
    return found[0] if found else ""


LAYER = "model.layers.1.self_attn.q_proj"
STRAYS = {
    "a bias": ({f"{LAYER}.bias": torch.ones(64)}, "give the config.json that belongs to these weights"),
    "a layer": ({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}, "config.json has num_hidden_layers=2"),
    "an adapter": ({f"base_model.model.{LAYER}.lora_A.weight": torch.ones(4, 64)}, "they are of an adapter: merge it"),
    "scales of int8": ({f"{LAYER}.SCB": torch.ones(64)}, "they are of quantised weights"),
    "scales of fp8": ({f"{LAYER}.weight_scale_inv": torch.ones(1)}, "they are of quantised weights"),
    "a value head": ({"v_head.summary.weight": torch.ones(1, 64)}, "transformers' save_pretrained, which leaves them"),
    "a norm of queries": ({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, "give the config.json"),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_a_tensor_that_the_model_has_not_stops_the_run_by_name(stray, tmp_path):
    written(tmp_path)
    tensors, remedy = STRAYS[stray]
    change(tmp_path, tensors)
    message = refused(tmp_path)
    assert (
        f"the checkpoint has 1 tensor that LlamaForCausalLM has not with its config.json, first {next(iter(tensors))!r}"
        in message
    )
    assert remedy in message


def test_weights_of_another_model_type_are_named(tmp_path):
    """A Qwen 2 checkpoint under the name of a Llama would lose its biases."""
    written(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path)
    assert "the checkpoint has 6 tensors that LlamaForCausalLM has not" in message
    assert ".self_attn.k_proj.bias'" in message


# ---- tied weights -------------------------------------------------------------------------------------------


def test_a_copy_of_a_tied_weight_is_known(tmp_path, caplog):
    written(tmp_path, tie_word_embeddings=True)
    change(tmp_path, {HEAD: load_file(tmp_path / WEIGHTS)[EMBEDDING].clone()})
    text = logged(tmp_path, caplog)
    assert (
        f"of the checkpoint's 21 tensors these are not read: 1 that are copies of tied weights (1.0 MB, first {HEAD})"
        in text
    )


@pytest.mark.parametrize("r", [0, 4])
def test_a_copy_that_differs_from_its_twin_is_refused(r, tmp_path):
    written(tmp_path, tie_word_embeddings=True)
    other = load_file(tmp_path / WEIGHTS)[EMBEDDING].clone()
    other[7, 3] += 1e-3
    change(tmp_path, {HEAD: other})
    assert f"config.json ties {HEAD} to {EMBEDDING}, and the checkpoint has them with different values" in refused(
        tmp_path
    )


@pytest.mark.parametrize("r", [0, 4])
def test_a_tied_weight_is_read_under_either_name(r, tmp_path):
    model = written(tmp_path, tie_word_embeddings=True)
    change(tmp_path, {HEAD: load_file(tmp_path / WEIGHTS)[EMBEDDING]}, less=[EMBEDDING])
    built = built_of(tmp_path, r=r)
    ids = torch.arange(5, 25)[None]
    batch = {"ids": ids, "positions": torch.arange(20)[None], "segments": torch.ones_like(ids)}
    with torch.no_grad():
        ours = logits_of(built.module.eval(), built.trainable, batch)[0]
    torch.testing.assert_close(ours, alone(model, batch), atol=1e-5, rtol=0)


def test_untied_weights_are_both_read(tmp_path, caplog):
    written(tmp_path, tie_word_embeddings=False)
    assert logged(tmp_path, caplog) == ""


# ---- known kinds --------------------------------------------------------------------------------------------

TABLES = {
    "llama": {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
    },
    "gptj": {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.ones(())},
    "gpt_neox": {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8).bool()},
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_older_versions_are_known(kind, tmp_path, caplog):
    written(tmp_path, kind, **({"rotary_dim": 4} if kind == "gptj" else {}))
    change(tmp_path, TABLES[kind])
    text = logged(tmp_path, caplog)
    assert f"not read: {len(TABLES[kind])} that are computed from the config" in text


def test_a_vector_is_no_mask(tmp_path):
    written(tmp_path, "gpt2")
    change(tmp_path, {"transformer.h.0.attention.bias": torch.ones(8)})
    assert "GPT2LMHeadModel has not" in refused(tmp_path)


def test_what_transformers_itself_leaves_out_is_logged(tmp_path, caplog):
    written(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    change(tmp_path, {"mtp.fc.weight": torch.ones(4, 4)})
    assert "Qwen3MoeForCausalLM has not" in refused(tmp_path)
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    written(tmp_path / "glm", "glm4_moe", **routed)
    change(tmp_path / "glm", {"model.layers.92.enorm.weight": torch.ones(16)})  # a head that predicts a token ahead
    text = logged(tmp_path / "glm", caplog)
    assert "1 that transformers' Glm4MoeForCausalLM leaves out (64 bytes, first model.layers.92.enorm.weight)" in text


def test_the_part_that_sees_is_counted_in_one_line(tmp_path, caplog):
    family = next(one for one in FAMILIES if one.model_type == "gemma3")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32).save_pretrained(tmp_path)
    text = logged(tmp_path, caplog)
    count = sum("vision" in name or "projector" in name for name in load_file(tmp_path / WEIGHTS))
    assert f"not read: {count} of the part that sees or hears (" in text
    change(tmp_path, {"model.vision_tower.extra.weight": torch.ones(2)})
    assert "the checkpoint has 1 tensor that Gemma3ForConditionalGeneration has not" in refused(tmp_path)


def test_keys_of_layers_that_share_them_are_known(tmp_path, caplog):
    """Gemma 4 E2B's own checkpoint has them, and transformers' class leaves them out."""
    torch.manual_seed(0)
    config = small_config("gemma4")
    text = {name: value for name, value in config.text_config.to_dict().items() if name != "per_layer_config"}
    text |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 32}
    config.text_config = type(config.text_config)(**text | {"layer_types": ["sliding_attention", "full_attention"] * 2})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    before = logged(tmp_path, caplog)
    caplog.clear()
    names = {f"model.language_model.layers.3.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")}
    change(tmp_path, {name: torch.ones(16) for name in sorted(names)})
    assert "3 that transformers' Gemma4ForConditionalGeneration leaves out" in logged(tmp_path, caplog)
    assert "leaves out" not in before
    change(tmp_path, {"model.language_model.layers.1.self_attn.q_proj.bias": torch.ones(16)})
    assert "the checkpoint has 1 tensor that Gemma4ForConditionalGeneration has not" in refused(tmp_path)


def test_another_head_of_an_encoder_is_known(tmp_path, caplog):
    encoder = next(one for one in ENCODERS if one.model_type == "roberta")
    config = CONFIG_MAPPING["roberta"](**SMALL | encoder.values)
    AutoModelForMaskedLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    change(tmp_path, {"roberta.pooler.dense.weight": torch.ones(64, 64)})
    text = logged(tmp_path, caplog, head=CLASSIFIER, causal=False, labels=["a", "b"])
    assert " of another head (" in text
    change(tmp_path, {"roberta.encoder.layer.9.output.dense.weight": torch.ones(64, 64)})
    with pytest.raises(
        ConfigError, match=r"1 tensor that RobertaForSequenceClassification has not .*'roberta\.encoder"
    ):
        source_of(tmp_path, head=CLASSIFIER, causal=False, labels=["a", "b"]).require_weights({})


# ---- files --------------------------------------------------------------------------------------------------


def test_two_tensors_of_one_name_are_both_named(tmp_path):
    written(tmp_path)
    change(tmp_path, {"norm.weight": torch.ones(64)})  # as a base model without its head names it
    message = refused(tmp_path)
    assert "the checkpoint has 'model.norm.weight' and 'norm.weight', which are both 'model.norm.weight'" in message


@pytest.fixture
def sharded(tmp_path):
    model = written(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    return tmp_path / "sharded"


def test_a_tensor_that_the_index_does_not_name_is_read_as_transformers_reads_it(sharded):
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    built_of(sharded)
    shard = sharded / index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    save_file(load_file(shard) | {"model.extra": torch.ones(2)}, shard, metadata={"format": "pt"})
    assert "LlamaForCausalLM has not with its config.json, first 'model.extra'" in refused(sharded)


def test_a_tensor_in_two_files_is_named(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second, metadata={"format": "pt"})
    assert f"{first.name} and {second.name} both hold {name!r}" in refused(sharded)


def test_one_file_is_preferred_to_an_index_as_transformers_does(sharded):
    model = written(sharded, bos_token_id=3)
    built = built_of(sharded, r=4)
    for name, parameter in model.named_parameters():
        own = dict(built.module.named_parameters())
        assert torch.equal(own[name], parameter)


def test_experts_that_are_not_all_there_are_named(tmp_path):
    written(tmp_path, "mixtral", num_local_experts=4)
    change(tmp_path, less=["model.layers.0.block_sparse_moe.experts.2.w1.weight"])
    message = refused(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in message


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_config.json beside the weights" in refused(tmp_path)


def test_other_files_than_the_usual_ones_are_refused(tmp_path):
    written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    assert "transformers_weights=other.safetensors" in refused(tmp_path)
