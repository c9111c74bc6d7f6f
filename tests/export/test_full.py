"""A whole model and a tokenizer written in Hugging Face's layout load with transformers and compute the same."""

import hashlib
import json
import math

import pytest
import torch
from safetensors.torch import load, load_file, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.tiny import ARCHITECTURES, Run, random_batch
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.full import write_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import attention_masks, logits_of
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.conversion import stored_tensors
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


@pytest.mark.parametrize(
    ("model", "max_shard_bytes"), [*((name, math.inf) for name in ARCHITECTURES), ("qwen05b", 1e5)]
)
def test_a_fully_trained_model_loads_with_transformers(make_config, tmp_path, tokenizer, model, max_shard_bytes):
    overrides = (f"model={model}", "model.size=tiny", "model.dtype=float32", "lora=none", "hw.runtime=eager")
    config = make_config(*overrides)
    run = Run(config, EagerRuntime(config.hw))
    run.losses([random_batch(i) for i in range(2)])
    (tmp_path / "model.safetensors").write_text("of an export before")  # transformers would take it, not the index
    digests = write_model(
        str(tmp_path),
        tensors=iter(run.parameters.items()),
        shapes=run.parameters,
        max_shard_bytes=max_shard_bytes,
        config=run.model.source.config,
        architecture=type(run.model.module).__name__,
        dtype=torch.float32,
        tokenizer=tokenizer,
    )
    is_one_file_as_the_library_writes_it(tmp_path, digests) if len(digests) == 1 else is_indexed(tmp_path, digests)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    masks = attention_masks(rows["segments"], config=loaded.config)
    with torch.no_grad():
        ours = logits_of(run.model.module.eval(), run.parameters, rows)
        theirs = loaded(input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=masks).logits
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def is_one_file_as_the_library_writes_it(folder, digests):
    content = (folder / "model.safetensors").read_bytes()
    assert content == save(load(content), metadata={"format": "pt"})
    assert digests == {"model.safetensors": hashlib.sha256(content).hexdigest()}
    assert not list(folder.glob("*.index.json"))


def is_indexed(folder, digests):
    """As `save_pretrained` writes it, which the reader of this program takes too."""
    assert len(digests) >= 3
    assert sorted(p.name for p in folder.glob("*.safetensors")) == sorted(digests)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: file for file in digests for name in load_file(folder / file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]
    assert stored_tensors(folder).keys() == held.keys()


@pytest.fixture
def base(make_config, tmp_path, tokenizer):
    """The drawn base of a LoRA run in bf16, as the main job writes it beside the adapter."""
    config = make_config("model=qwen05b", "model.size=tiny", "lora=all_linear_r8", "hw.runtime=eager")
    source = HuggingFaceModel(config.model, seed=config.seed)
    names = [name for name, _ in source.empty().named_parameters()]
    write_model(
        str(tmp_path),
        tensors=((weight.name, weight.tensor) for weight in source.weights(names)),
        config=source.config,
        architecture="Qwen2ForCausalLM",
        dtype=source.dtype,
        tokenizer=tokenizer,
    )
    return tmp_path, Run(config, EagerRuntime(config.hw)), config


def test_the_base_of_a_run_on_drawn_weights_loads_with_transformers(base):
    folder, run, _ = base
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.bfloat16
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    masks = attention_masks(rows["segments"], config=loaded.config)
    with torch.no_grad():
        ours = logits_of(run.model.module.eval(), run.parameters, rows)  # B is zero
        theirs = loaded(input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=masks).logits
    assert torch.equal(ours, theirs)


def test_the_base_of_a_run_on_drawn_weights_is_a_checkpoint_of_ours(base):
    folder, run, config = base
    again = HuggingFaceModel(ModelConfig(name="again", path=str(folder)), seed=1)
    place = EagerRuntime(config.hw).place
    module = build_model(again, lora=config.lora, seed=config.seed, place=place).module
    expected = dict(run.model.module.named_parameters())
    frozen = {name: p for name, p in module.named_parameters() if "lora_" not in name}
    assert all(torch.equal(p, expected[name]) for name, p in frozen.items())


def test_a_written_model_keeps_its_cache_and_names_its_class(base):
    values = json.loads((base[0] / "config.json").read_text())
    assert values["architectures"] == ["Qwen2ForCausalLM"]
    assert values["dtype"] == "bfloat16"
    assert values.get("use_cache", True)
    assert "lm_head.weight" not in load_file(base[0] / "model.safetensors")  # tied: one tensor


def test_the_tokenizer_loads_with_transformers(base, tokenizer):
    again = AutoTokenizer.from_pretrained(base[0])
    text = "Ce este Dunărea? Un fluviu, „țară” după țară."
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": "Salut"}, {"role": "assistant", "content": "Bună"}]
    assert again.apply_chat_template(turns, tokenize=False) == tokenizer.apply_chat_template(turns, tokenize=False)
