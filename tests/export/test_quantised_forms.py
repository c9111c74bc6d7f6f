"""The forms int8 and nf4 hold what compressed-tensors and bitsandbytes themselves make, and transformers reads both."""

import copy
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.training.tiny import random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.calibrated import GridForm
from tpu_experiments.export.card import Card, page
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.export.quantised import Int8Layout, NF4Layout, write_quantised
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.adapters.lora import adapter_weights
from tpu_experiments.models.adapters.quantised import Format
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.quantisation.grid import Grid
from tpu_experiments.tasks.export.readers import TransformersModel

pytestmark = [
    pytest.mark.xla,
    # transformers reports its own deprecated names to PEFT, and bitsandbytes imports what torch 2.9 calls deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
FORMS = ("int8", "nf4")
MODELS = ("mistral7b", "qwen05b", "gemma3_270m")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


def merged(make_config, model, *words):
    """A tiny model with adapters of random B merged into it."""
    config = make_config(f"model={model}", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", *words)
    source = HuggingFaceModel(config.model, seed=config.seed)
    generator = torch.Generator().manual_seed(7)
    trained = {}
    plain = whole_model(source, lora=make_config("lora=none").lora, trained={})
    for item in source.weights(sorted(plain.linears)):
        for part in adapter_weights(item, lora=config.lora, seed=config.seed, is_transposed=False):
            if "lora_" in part.name:
                trained[part.name] = torch.randn(part.tensor.shape, generator=generator) * 0.02
    return whole_model(source, lora=config.lora, trained=trained)


def written(folder, form, model, tokenizer, *, dtype=torch.float32, **more):
    layout = Int8Layout() if form == "int8" else NF4Layout(dtype)
    return write_quantised(str(folder), layout, model=model, dtype=dtype, tokenizer=tokenizer, **more)


def decoded(model, form, *, left=()):
    """The model's weights after codes: what a reader should compute with."""
    weights = {}
    for name, tensor in model.tensors():
        if name in model.linears and name not in left:
            tensor = Format(form).decode(Format(form).quantise(tensor), dtype=torch.float32)
        weights[name] = tensor
    return weights


def of_transformers(model, weights):
    """The same class of transformers over given weights, in float32."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"  # which makes masks of its own
    made = getattr(transformers, model.architecture)(config)
    missing, unexpected = made.to(torch.float32).load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    made.tie_weights()
    return made.eval()


def scope_of(text):
    """What the lines of code of a card define."""
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(code, scope)
    return scope


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_transformers_computes_with_the_decoded_weights(make_config, tmp_path, tokenizer, model, form):
    whole = merged(make_config, model)
    made = written(tmp_path, form, whole, tokenizer)
    assert (made.quantised, made.left, made.note) == (len(whole.linears), [], "")
    assert sorted(made.digests) == ["model.safetensors"]
    ids = random_batch(9)["ids"][0, 0].tolist()
    reader = TransformersModel(str(tmp_path), dtype=torch.float32)
    expected = of_transformers(whole, decoded(whole, form))
    with torch.no_grad():
        logits = expected(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(reader.log_probs(ids), logits.log_softmax(-1), atol=1e-5, rtol=0)
    unquantised = of_transformers(whole, dict(whole.tensors()))
    with torch.no_grad():
        other = unquantised(input_ids=torch.tensor([ids])).logits[0]
    assert (logits - other).abs().max() > 1e-4  # the codes are what it computes with
    greedy, given = reader.greedy(ids[:9], num=4), ids[:9]
    with torch.no_grad():
        for token in greedy:
            assert token == int(expected(input_ids=torch.tensor([given])).logits[0, -1].argmax())
            given = [*given, token]
    assert reader.model.config.tie_word_embeddings == whole.config.tie_word_embeddings


@pytest.mark.parametrize("form", FORMS)
def test_the_lines_of_its_card_load_it(make_config, tmp_path, tokenizer, form):
    whole = merged(make_config, "qwen05b")
    written(tmp_path, form, whole, tokenizer)
    scope = scope_of(page(Card(form, "ro", base="org/base", rank=8), place=str(tmp_path), comparison="# Parity"))
    held = scope["model"].model.layers[0].mlp.up_proj.weight if form == "nf4" else None
    assert held is None or held.quant_state.quant_type == "nf4"
    assert scope["model"].dtype == torch.float32
    assert scope["tokenizer"].decode(scope["tokenizer"]("Bine")["input_ids"]) == "Bine"


class Rounded(GridForm):
    def encode(self, name, weight_NK):
        parts, _ = super().encode(weight_NK, None, seed=0)
        return {f"{name}{end}": part for end, part in parts.items()}


def test_the_lines_of_a_card_load_integers_of_any_bits(make_config, tmp_path, tokenizer):
    """compressed-tensors takes 2, 3 and 5 bits for plain int8 tensors where a group does not name the layout."""
    whole = merged(make_config, "qwen05b")
    layout = Rounded(Grid(3, 32), form="rtn", feedback=False)
    write_quantised(str(tmp_path), layout, model=whole, dtype=torch.float32, tokenizer=tokenizer)
    scope = scope_of(page(Card("rtn", "ro", base="org/base"), place=str(tmp_path), comparison="# Parity"))
    ids = list(range(5, 25))
    with torch.no_grad():
        log_probs = scope["model"](torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = TransformersModel(str(tmp_path), dtype=torch.float32).log_probs(ids)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_the_lines_of_an_adapter_over_nf4_load_its_base_so(make_config, tmp_path, tokenizer):
    config = make_config("model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")
    whole = merged(make_config, "qwen05b")
    base = of_transformers(whole, dict(whole.tensors()))
    base.save_pretrained(tmp_path / "base")
    names = [name.removesuffix(".weight") for name in whole.linears]
    shapes = {name: tuple(whole.shapes[f"{name}.weight"].shape) for name in names}
    parameters = {f"{name}.lora_A": torch.zeros(8, columns) for name, (_, columns) in shapes.items()}
    parameters |= {f"{name}.lora_B": torch.zeros(rows, 8) for name, (rows, _) in shapes.items()}
    write_adapter(
        str(tmp_path / "peft"),
        parameters=parameters,
        initial={},
        lora=config.lora,
        base_path=str(tmp_path / "base"),
        revision=None,
        tokenizer=tokenizer,
    )
    card = Card("peft", "ro", base=str(tmp_path / "base"), held="nf4", dtype="float32", rank=8)
    scope = scope_of(page(card, place=str(tmp_path / "peft"), comparison="# Parity"))
    layer = scope["model"].base_model.model.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.quant_state.nested
    assert layer.lora_A["default"].weight.shape == (8, 64)


def test_int8_is_what_compressed_tensors_makes_of_the_same_weights(make_config, tmp_path, tokenizer):
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    whole = merged(make_config, "qwen05b")
    written(tmp_path, "int8", whole, tokenizer)
    found = load_file(tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(settings)
    assert set(settings) - {"version"} <= set(config.model_dump())
    (scheme,) = config.config_groups.values()
    codes = different = 0
    for name, weight in whole.tensors():
        if name not in whole.linears:
            assert torch.equal(found.pop(name), weight), name
            continue
        ours = {part: found.pop(f"{name}_{part}") for part in ("packed", "scale", "shape")}
        parts = {"weight": weight, "weight_scale": ours["scale"]}
        theirs = PackedQuantizationCompressor.compress(parts, scheme)
        assert torch.equal(ours["shape"], theirs["weight_shape"])
        assert (ours["packed"].dtype, ours["packed"].shape) == (torch.int32, theirs["weight_packed"].shape)
        one, other = (
            PackedQuantizationCompressor.decompress(parts | {f"weight_{n}": t for n, t in packed.items()}, scheme)
            for packed in (ours, {"packed": theirs["weight_packed"], "shape": ours["shape"]})
        )
        steps = ((one["weight"] - other["weight"]) / ours["scale"]).abs()
        # It divides by the scale and we multiply by 127 / absmax: of values half way between two codes, either.
        assert steps.max() < 1.001
        codes, different = codes + steps.numel(), different + int((steps > 0.5).sum())
    assert not found
    assert different <= 1e-4 * codes


def test_nf4_is_what_bitsandbytes_saves(make_config, tmp_path, tokenizer):
    """Tensor by tensor the file of `save_pretrained`, and the settings that it needs to be read."""
    whole = merged(make_config, "mistral7b")
    written(tmp_path / "ours", "nf4", whole, tokenizer)
    of_transformers(whole, dict(whole.tensors())).save_pretrained(tmp_path / "dense")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, quantization_config=settings)
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (load_file(tmp_path / place / "model.safetensors") for place in ("ours", "theirs"))
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert (one[name].dtype, one[name].shape) == (tensor.dtype, tensor.shape), name
        if not name.endswith(".absmax"):
            assert torch.equal(one[name], tensor), name
    # Of a scale half way between two 8-bit values (to 3e-5 of the largest) its library for CPUs takes either: 1 in 700.
    steps = torch.cat([(one[name].int() - other[name].int()).abs() for name in one if name.endswith(".absmax")])
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.01
    ours, saved = (
        json.loads((tmp_path / place / "config.json").read_text())["quantization_config"]
        for place in ("ours", "theirs")
    )
    ours = {name: value for name, value in ours.items() if name != "llm_int8_skip_modules"}
    assert ours == {name: saved[name] for name in ours}


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_rounded_once(make_config, tmp_path, tokenizer, form):
    """What is not quantised is in bfloat16; codes are of the merged float32 weights, not of rounded ones."""
    whole = merged(make_config, "qwen05b")
    written(tmp_path, form, whole, tokenizer, dtype=torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    name = min(whole.linears)
    weight = dict(whole.tensors())[name]
    parts = Format(form).quantise(weight)
    if form == "int8":
        assert torch.equal(found[f"{name}_packed"].view(torch.uint8) ^ 128, parts["weight"].view(torch.uint8))
        assert torch.equal(found[f"{name}_scale"][:, 0], parts["weight_scale"])
    else:
        assert torch.equal(found[name].flatten(), parts["weight"].flatten())
    assert found["model.embed_tokens.weight"].dtype == found["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    ids = random_batch(9)["ids"][0, 0].tolist()
    narrow = TransformersModel(str(tmp_path), dtype=torch.float32)
    expected = of_transformers(
        whole, {n: t if n in whole.linears else t.bfloat16().float() for n, t in decoded(whole, form).items()}
    )
    with torch.no_grad():
        logits = expected(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(narrow.log_probs(ids), logits.log_softmax(-1), atol=1e-5, rtol=0)
    # As a user loads it, in bfloat16: 8 bits of every product and of every scale.
    with torch.no_grad():
        as_loaded = loaded(input_ids=torch.tensor([ids])).logits[0]
    assert as_loaded.dtype == torch.bfloat16
    assert (as_loaded - logits).abs().max() < 0.05 * logits.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_shards(make_config, tmp_path, tokenizer, form):
    whole = merged(make_config, "qwen05b")
    one, several = tmp_path / "one", tmp_path / "several"
    written(one, form, whole, tokenizer)
    digests = written(several, form, whole, tokenizer, max_shard_bytes=3e4).digests
    assert len(digests) > 2
    index = json.loads((several / "model.safetensors.index.json").read_text())
    files = {name: load_file(several / name) for name in digests}
    joined = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    whole_file = load_file(one / "model.safetensors")
    assert joined.keys() == whole_file.keys() == index["weight_map"].keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in whole_file.items())
    assert all(name in files[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole_file.values())
    ids = random_batch(9)["ids"][0, 0].tolist()
    read = [TransformersModel(str(folder), dtype=torch.float32).log_probs(ids) for folder in (one, several)]
    assert torch.equal(*read)


@pytest.mark.parametrize(("form", "width"), [("nf4", 96), ("int8", 90)])
def test_widths_that_a_library_cannot_read_stay_as_they_are(make_config, tmp_path, tokenizer, form, width):
    whole = merged(make_config, "mistral7b", f"model.tiny_arch.intermediate_size={width}")
    made = written(tmp_path, form, whole, tokenizer)
    left = [name for name in whole.linears if name.endswith("down_proj.weight")]
    assert sorted(made.left) == sorted(left)
    assert made.quantised == len(whole.linears) - len(left)
    assert f"{len(left)} weights of the layers stay in float32" in made.note
    ids = random_batch(9)["ids"][0, 0].tolist()
    expected = of_transformers(whole, decoded(whole, form, left=left))
    with torch.no_grad():
        logits = expected(input_ids=torch.tensor([ids])).logits[0]
    reader = TransformersModel(str(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(reader.log_probs(ids), logits.log_softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_without_linear_layers_is_refused(tmp_path, tokenizer, form):
    arch = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64}
    source = HuggingFaceModel(ModelConfig(name="x", path="", init="random", arch=arch, dtype="float32"), seed=0)
    whole = whole_model(source, lora=LoraConfig(r=0), trained={})
    with pytest.raises(ConfigError, match=rf"the form {form}; 0 of the .* GPT2LMHeadModel"):
        written(tmp_path / "form", form, whole, tokenizer)
    assert not (tmp_path / "form").exists()
