"""Checkpoints that transformers wrote load with the same weights and the same logits; broken ones end in a sentence."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.hub import REPOSITORY, HubServer
from tests.storage.test_refusing_places import mounted
from tests.training.tiny import ARCHITECTURES
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.models.huggingface import HuggingFaceModel, config_from_arch
from tpu_experiments.models.passes.forward import attention_masks, logits_of
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
TIED = {"mistral7b": False, "gemma3_270m": True, "qwen05b": True}


def save_random(folder, config, *, dtype="float32", max_shard_size="50GB"):
    """A random model written by transformers itself."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def load(folder, *, dtype="float32", r=0):
    source = HuggingFaceModel(ModelConfig(name="x", path=str(folder), dtype=dtype), seed=0)
    runtime = EagerRuntime(
        HwConfig(name="cpu", device="cpu", runtime="eager", parallel="inline", num_devices=1, num_threads=1)
    )
    return build_model(source, lora=LoraConfig(r=r, targets=["q_proj"] if r else []), seed=0, place=runtime.place)


def batch():
    ids = torch.randint(5, 4000, (2, 64), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    positions = torch.arange(64, dtype=torch.int32).expand(2, 64)
    return {"ids": ids, "positions": positions, "segments": torch.ones_like(ids)}


@pytest.fixture
def tiny_arch(make_config):
    def make(model):
        config = make_config(f"model={model}", "model.size=tiny").model
        return config_from_arch({**config.arch, **config.tiny_arch})

    return make


@pytest.fixture
def qwen(tmp_path, tiny_arch):
    """A tied checkpoint in several shards."""
    save_random(tmp_path / "qwen", tiny_arch("qwen05b"), max_shard_size="200KB")
    return tmp_path / "qwen"


@pytest.fixture
def whole(tmp_path, tiny_arch):
    """A checkpoint in one file."""
    save_random(tmp_path / "whole", tiny_arch("qwen05b"))
    return tmp_path / "whole"


@pytest.mark.parametrize("model", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_same_logits_as_from_pretrained(tmp_path, tiny_arch, model, dtype, layout):
    size = "50GB" if layout == "whole" else "200KB"
    save_random(tmp_path, tiny_arch(model), dtype=dtype, max_shard_size=size)
    assert (tmp_path / INDEX).exists() == (layout == "sharded")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    built = load(tmp_path, dtype=dtype, r=4)  # B is zero: the adapter adds exact zeros
    rows = batch()
    with torch.no_grad():
        masks = attention_masks(rows["segments"], config=theirs.config)
        expected = theirs(input_ids=rows["ids"], attention_mask=masks, use_cache=False).logits
        got = logits_of(built.module.eval(), built.trainable, rows)
    assert got.dtype == getattr(torch, dtype)
    reference = dict(theirs.named_parameters())
    frozen = {n: p for n, p in built.module.named_parameters() if n not in built.trainable}
    assert frozen.keys() == reference.keys()
    assert all(torch.equal(p, reference[n]) for n, p in frozen.items())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_tied_embeddings_stay_one_tensor(tmp_path, tiny_arch, model):
    save_random(tmp_path, tiny_arch(model))
    module = load(tmp_path, r=2).module
    head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    assert (head is embedding) == TIED[model]
    assert ("lm_head.weight" in load_file(tmp_path / WHOLE)) == (not TIED[model])


def test_rank_zero_trains_the_weights_of_the_checkpoint_in_float32(qwen):
    built = load(qwen, dtype="bfloat16")
    reference = dict(AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16).named_parameters())
    assert built.trainable.keys() == reference.keys()
    assert all(p.dtype == torch.float32 for p in built.trainable.values())
    assert all(torch.equal(p, reference[n].float()) for n, p in built.trainable.items())


@pytest.mark.parametrize("stored", [torch.float16, torch.float64, torch.bfloat16])
def test_a_checkpoint_in_another_data_type_is_converted(whole, stored):
    original = load_file(whole / WHOLE)
    save_file({n: t.to(stored) for n, t in original.items()}, whole / WHOLE, metadata={"format": "pt"})
    built = load(whole, r=2)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(built.module.get_parameter(name), original[name].to(stored).to(torch.float32))


def test_a_checkpoint_of_the_model_without_its_head_loads(whole):
    """Published GPT-2, for one, names its parameters without the model's prefix."""
    expected = load(whole, r=2).module.state_dict()
    original = load_file(whole / WHOLE)
    save_file({n.removeprefix("model."): t for n, t in original.items()}, whole / WHOLE, metadata={"format": "pt"})
    got = load(whole, r=2).module.state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in got.items() if "lora_" not in n)


def refused(folder, **overrides):
    with pytest.raises(ConfigError) as caught:
        load(folder, **overrides)
    message = str(caught.value)
    assert message.startswith("model")
    assert message.endswith(".")
    return message


def test_no_such_folder(tmp_path):
    assert "there is no such folder" in refused(tmp_path / "nothing")


def test_a_folder_without_config(whole):
    (whole / "config.json").unlink()
    assert "no config.json there" in refused(whole)


def test_a_folder_without_weights(whole):
    (whole / WHOLE).unlink()
    assert f"no {WHOLE} and no {INDEX}" in refused(whole)


def test_an_index_that_names_a_missing_shard(qwen):
    shard = sorted(qwen.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{INDEX} names {shard.name} which is not there" in refused(qwen)


def test_an_index_and_a_shard_of_different_versions(qwen):
    first, second = sorted(qwen.glob("model-*.safetensors"))[:2]
    shutil.copyfile(first, second)
    assert f"says that {second.name} holds" in refused(qwen)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_an_index_that_is_none(qwen, text):
    (qwen / INDEX).write_text(text)
    assert f"{INDEX} is not a readable index" in refused(qwen)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_shard_cut_short(whole, keep):
    content = (whole / WHOLE).read_bytes()
    (whole / WHOLE).write_bytes(content[:keep])
    assert f"{WHOLE} is not a complete safetensors file" in refused(whole)


def rewrite(folder, change):
    tensors = load_file(folder / WHOLE)
    change(tensors)
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


def test_a_missing_parameter(whole):
    rewrite(whole, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = refused(whole)
    assert "the checkpoint lacks 1 of" in message
    assert "'model.layers.1.mlp.up_proj.weight'" in message


def test_a_wrong_shape(whole):
    rewrite(whole, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    assert "has model.norm.weight as (7,), its config.json says (64,)" in refused(whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("r", [0, 2])
def test_weights_that_are_no_numbers_are_named(qwen, dtype, value, r):
    """By file, tensor and how many, whether they are trained or not."""
    name = "model.layers.1.mlp.up_proj.weight"
    shard = qwen / json.loads((qwen / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name][3, :5] = value
    save_file(tensors, shard, metadata={"format": "pt"})
    told = f"{shard.name} has 5 of {tensors[name].numel():,} values of {name} that are NaN or infinite as {dtype}; "
    assert told in refused(qwen, dtype=dtype, r=r)


def test_a_number_that_the_chosen_type_cannot_hold_is_named(whole):
    rewrite(whole, lambda tensors: tensors.update({"model.norm.weight": torch.full((64,), 1e300, dtype=torch.float64)}))
    assert f"{WHOLE} has 64 of 64 values of model.norm.weight that are NaN or infinite as float32" in refused(whole)


def test_a_start_that_is_drawn_without_bounds_is_named(tiny_arch):
    config = tiny_arch("qwen05b").to_dict()
    kept = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    arch = {key: config[key] for key in kept} | {"initializer_range": 1e39}
    source = HuggingFaceModel(ModelConfig(name="x", path="nowhere", init="random", arch=arch, dtype="float32"), seed=0)
    with pytest.raises(ConfigError, match=r"^model=x; drawn at random, .* are NaN or infinite as float32; .*\.$"):
        list(source.weights(["model.embed_tokens.weight"]))


def test_quantised_weights(whole):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(whole, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert "holds weights as F8_E4M3, a quantised format" in refused(whole)


@pytest.mark.parametrize("model_type", ["mistrall", "vit"])
def test_a_model_type_that_is_no_decoder(whole, model_type):
    (whole / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert model_type in refused(whole)


def test_a_config_that_is_no_json(whole):
    (whole / "config.json").write_text("{")
    assert "transformers cannot use its config.json" in refused(whole)


def test_an_unknown_model_type_in_arch():
    with pytest.raises(ConfigError, match=r"model.arch.model_type='qwen22'.*Did you mean 'qwen2'"):
        config_from_arch({"model_type": "qwen22"})


def test_a_hub_id_while_offline():
    message = refused("nobody/nothing-at-all")
    assert "not a local folder, and the Hub did not give it" in message
    assert "set model.path=FOLDER" in message


def test_a_disk_that_is_full_before_the_weights_are_here(qwen, tmp_path):
    """It is not the login that is missing; the disk of a TPU VM has 100 GB."""
    code = (
        "from tpu_experiments.config.errors import ConfigError\n"
        "from tpu_experiments.config.model_schema import ModelConfig\n"
        "from tpu_experiments.models.huggingface import HuggingFaceModel\n"
        f"try: HuggingFaceModel(ModelConfig(name='x', path={REPOSITORY!r}), seed=0)\n"
        "except ConfigError as error: print(error)\n"
    )
    with mounted(tmp_path / "disk", "size=16k") as disk, HubServer(qwen) as hub:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env={**os.environ, **hub.environment(disk)}, capture_output=True, text=True, check=True
        )
    assert done.stdout == (
        f"model.path={REPOSITORY}; its weights do not fit on the disk of the Hub's cache ({disk}/hub), which is full; "
        "free some space, or `export HF_HOME=FOLDER` of a larger disk.\n"
    )


def test_the_config_is_that_of_the_folder(qwen):
    source = HuggingFaceModel(ModelConfig(name="x", path=str(qwen)), seed=0)
    expected = AutoConfig.from_pretrained(qwen)
    assert (source.config.hidden_size, source.config.model_type) == (expected.hidden_size, "qwen2")
    assert source.config.use_cache is True  # an export must not carry our own switch; logits_of passes it
