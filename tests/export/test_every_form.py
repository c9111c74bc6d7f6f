"""Every form is read back, of every shape of decoder, with the run's tokenizer, template and end tokens beside it."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiers import only
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.config.task_schema import FORMS, GGUF_TYPES, ExportTaskConfig, QuantizeTaskConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.calibrated import Stored
from tpu_experiments.export.calibration import calibrated
from tpu_experiments.export.generation import generation_config, model_config
from tpu_experiments.export.gguf import ARCHITECTURES, file_name
from tpu_experiments.export.quantised import chosen_weights
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.tasks.export.forms import WRITERS, Copy, write_layout
from tpu_experiments.tasks.export.parity import MAX_PERPLEXITY_RATIO
from tpu_experiments.tasks.export.subject import Subject
from tpu_experiments.tasks.generate.origin import Origin
from tpu_experiments.tasks.quantize import _read, form_of, host_source

pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("plain_attention"),
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:You passed `quantization_config`:UserWarning"
    ),
]
TOKENIZER = "tpu_experiments/samples/tokenizer"
TURN_END, ENDS = 4, [2, 17, 33]
SAMPLING = {
    "eos_token_id": ENDS,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 7,
}
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, tied": ("qwen2", {"tie_word_embeddings": True}),
    "biases, untied": ("qwen2", {"tie_word_embeddings": False}),
    "norms of heads, tied": ("qwen3", {"tie_word_embeddings": True}),
    "norms of heads, untied": ("qwen3", {"tie_word_embeddings": False}),
    "norms of heads, local layers": ("gemma3_text", {"query_pre_attn_scalar": 16, "sliding_window": 64}),
    "plain, untied": ("llama", {"tie_word_embeddings": False}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "plain, tied": ("mistral", {"tie_word_embeddings": True, "sliding_window": None}),
}
QUANTIZE = {
    "rtn": {"bits": 8, "group": 32},
    "gptq": {"bits": 8, "group": 32},
    "vptq": {"vector": 2, "codebook": 256, "residual": 256, "outliers": 0.05, "outlier_codebook": 16},
}
METHODS = tuple(QUANTIZE)
IDS = list(range(5, 45))
WHOLE = ("peft", "merged", "gguf")
NEAR = {"peft": 2e-4, "merged": 2e-4, "gguf": 1e-3, "int8": 0.03, "nf4": 0.2, "rtn": 0.03, "gptq": 0.03, "vptq": 0.2}
"""Largest difference of a log-probability from the trained model's, of forms in a few bits the mean one. Of Gemma in
GGUF ten times as much, for GELU's table."""


@dataclass
class Made:
    """A checkpoint with biases and norms away from their start, and an adapter on it."""

    config: Any
    folder: Path
    lora: LoraConfig
    trained: dict[str, torch.Tensor]
    log_probs: torch.Tensor
    """Of the model with its adapter, (T, V), by this program."""


@pytest.fixture(scope="module", params=only(["biases, tied", "norms of heads, untied"], MODELS))
def made(request, tmp_path_factory):
    kind, own = MODELS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SIZES | own)), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name:
                parameter.mul_(3)  # so that a bias or norm left out is seen in the logits
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(SAMPLING))
    settings = ModelConfig(name="x", path=str(folder), tokenizer_path=TOKENIZER, dtype="float32", attention="sdpa")
    lora = LoraConfig(r=2, alpha=4.0, targets=["all-linear"])
    source = HuggingFaceModel(settings, seed=0)
    module, _ = describe(source, lora=lora)
    trained = {n: torch.randn(p.shape) * 0.05 for n, p in module.named_parameters() if "lora_" in n}
    frozen = build_frozen(source, lora=lora, trained=trained, place=lambda tensor, name: tensor)
    return Made(settings, folder, lora, trained, log_probs_of(frozen))


@torch.no_grad()
def log_probs_of(module):
    row = torch.tensor([IDS], dtype=torch.int32)
    batch = {"ids": row, "positions": torch.arange(len(IDS), dtype=torch.int32)[None], "segments": torch.ones_like(row)}
    return torch.log_softmax(logits_of(module, {}, batch)[0], -1)


def tokenizer_of_run():
    """The tokenizer of a run with a token and a chat template of its own."""
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None, chat_format="chatml")
    tokenizer.chat_template = "{# the run's #}" + tokenizer.chat_template
    return tokenizer


def subject(make_config, folder, *, model, lora, trained, task):
    config = make_config()
    config = replace(config, model=model, lora=lora)
    source = HuggingFaceModel(model, seed=config.seed)
    tokenizer = tokenizer_of_run()
    whole = whole_model(source, lora=lora, trained=trained)
    whole = replace(whole, config=model_config(source, tokenizer=tokenizer))
    generation = generation_config(source, tokenizer=tokenizer, learns_turns=True)
    origin = Origin(config, kinds=frozenset({"chat"}), lora=lora, trained=trained, text="here")
    return Subject(config, task, origin, source, whole, tokenizer, str(folder), generation)


def write(form, place, subject):
    """Write a form; return how it is read."""
    place.mkdir(parents=True)
    if form in WRITERS:
        return WRITERS[form](str(place), subject).copies[0]
    how = form_of(subject.task)
    chosen, source = chosen_weights(subject.model, how), host_source(subject)
    names = ("ids", "positions", "segments")
    rows = [{name: random_batch(5)[name][0, index : index + 1] for name in names} for index in range(3)]
    layers = place.with_name(f"{form}_layers")
    layers.mkdir()
    given = {"rows": rows if how.needs_inputs else [], "folder": str(layers), "seed": 0}
    made = calibrated(subject.model, source, how, chosen=chosen, **given)
    write_layout(str(place), Stored(how, made), subject)
    return Copy(form, lambda folder, dtype: _read(folder, dtype, method=form))


def task_of(form):
    if form in METHODS:
        return QuantizeTaskConfig(name="quantize", method=form, **QUANTIZE[form])
    return ExportTaskConfig(name="export", forms=[form], gguf_types=["f32"])


def checked(folder, *, ends, ids, form):
    """Compare what others read beside the weights with the run's."""
    run = tokenizer_of_run()
    if form == "gguf":
        gguf_has(folder / file_name("f32"), run, ends)
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == run.chat_template
    assert tokenizer.special_tokens_map == run.special_tokens_map
    assert tokenizer.get_added_vocab() == run.get_added_vocab()
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == ends
    assert {name: getattr(generation, name) for name in ids} == ids
    if form != "peft":
        values = json.loads((folder / "config.json").read_text())
        assert [values.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == [1, 2, 0]


def gguf_has(file, tokenizer, ends):
    from gguf import GGUFReader

    fields = GGUFReader(file).fields

    def value(name):
        return fields[f"tokenizer.{name}"].contents()

    assert value("chat_template") == tokenizer.chat_template
    first, *further = [2, *(index for index in ends if index != 2)]
    assert value("ggml.eos_token_id") == first
    found = [value(f"ggml.{name}_token_id") for name in ("eot", "eom") if f"tokenizer.ggml.{name}_token_id" in fields]
    assert found == further[:2]
    assert value("ggml.bos_token_id") == tokenizer.bos_token_id
    assert value("ggml.padding_token_id") == tokenizer.pad_token_id
    assert [value("ggml.token_type")[index] for index in range(5)] == [3] * 5, "control tokens"
    assert value("ggml.tokens")[TURN_END] == "<|im_end|>"


@pytest.mark.parametrize("form", [*(form for form in FORMS if form not in ("bitnet", "lr_qat")), *METHODS])
def test_a_form_is_read_back_with_everything_beside_it(make_config, tmp_path, made, form):
    exported = subject(
        make_config, tmp_path, model=made.config, lora=made.lora, trained=made.trained, task=task_of(form)
    )
    copy_ = write(form, tmp_path / form, exported)
    reader = copy_.read(str(tmp_path / form), torch.float32)
    found = reader.log_probs(IDS)[:, : made.log_probs.shape[1]]
    near = NEAR[form] * (10 if form == "gguf" and "gemma" in exported.source.config.model_type else 1)
    apart = (found - made.log_probs).abs()
    assert float(apart.max() if form in WHOLE else apart.mean()) < near
    sampling = {name: value for name, value in SAMPLING.items() if name != "eos_token_id"}
    checked(tmp_path / form, ends=[*ENDS, TURN_END], ids=sampling, form=form)
    if form in ("merged", "int8", *METHODS):  # what this program takes as model.path
        source = HuggingFaceModel(replace(made.config, path=str(tmp_path / form)), seed=0)
        own = build_frozen(source, lora=LoraConfig(r=0), trained={}, place=lambda tensor, name: tensor)
        torch.testing.assert_close(log_probs_of(own), found, atol=1e-4, rtol=0)

    else:
        expected = {"nf4": "its weights are quantised by bitsandbytes, which is not decoded here"}
        with pytest.raises(ConfigError, match=expected.get(form, "no config.json there")):
            HuggingFaceModel(replace(made.config, path=str(tmp_path / form)), seed=0)


OTHER_CODES = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors float-quantized": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "no known method": {"bits": 4},
}


@pytest.mark.parametrize("kind", OTHER_CODES)
def test_weights_in_codes_of_others_are_refused_by_their_kind(tmp_path, kind):
    """Those of fp8 have the names and shapes of dense ones, and scales beside them."""
    values = CONFIG_MAPPING["llama"](**SIZES).to_diff_dict() | {"quantization_config": OTHER_CODES[kind]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=rf"its weights are quantised by {kind}, which is not decoded here"):
        HuggingFaceModel(ModelConfig(name="x", path=str(tmp_path)), seed=0)


@pytest.mark.parametrize("form", ["bitnet", "lr_qat", "merged"])
def test_forms_of_trained_codes_have_everything_beside_them(make_config, tmp_path, form):
    linear, lora = ("lr_qat", "lora=all_linear_r8") if form == "lr_qat" else ("bitnet", "lora=none")
    words = ["model=llama_mini", "model.size=tiny", "model.dtype=float32", f"model.linear={linear}", lora]
    config = make_config(*words, "hw.runtime=eager", "model.attention=sdpa")
    run = Run(config, EagerRuntime(config.hw))
    run.losses([random_batch(3)])
    trained = {name: tensor.detach() for name, tensor in run.parameters.items()}
    exported = subject(make_config, tmp_path, model=config.model, lora=config.lora, trained=trained, task=task_of(form))
    write(form, tmp_path / form, exported)
    checked(tmp_path / form, ends=[2, TURN_END], ids={"bos_token_id": 1, "pad_token_id": 0}, form=form)


def test_every_form_is_in_this_file():
    assert {*NEAR, "bitnet", "lr_qat"} == {*FORMS, *METHODS}
    assert set(METHODS) <= set(MAX_PERPLEXITY_RATIO)
    assert {form for form in MAX_PERPLEXITY_RATIO if form not in GGUF_TYPES} <= {*FORMS, *METHODS}
    assert set(WRITERS) == set(FORMS)
    assert {"Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(ARCHITECTURES)


def test_biases_of_vectors_are_the_checkpoints(make_config, tmp_path, made):
    """A model of random biases: each is in the file, and in the model that is read."""
    from tpu_experiments.export.vector_model import VectorLinear, read_vector_model

    exported = subject(make_config, tmp_path, model=made.config, lora=LoraConfig(r=0), trained={}, task=task_of("vptq"))
    write("vptq", tmp_path / "vptq", exported)
    stored = load_file(made.folder / "model.safetensors")
    found = dict(read_vector_model(str(tmp_path / "vptq")).named_modules())
    linears = {name: part for name, part in found.items() if isinstance(part, VectorLinear)}
    assert linears
    for name, part in linears.items():
        bias = stored.get(f"{name}.bias")
        assert (part.bias is None) == (bias is None)
        assert bias is None or torch.equal(part.bias, bias)
    broken = copy.deepcopy(load_file(tmp_path / "vptq" / "model.safetensors"))
    bias = next((name for name in broken if name.endswith("_proj.bias")), None)
    if bias is not None:
        from safetensors.torch import save_file

        del broken[bias]
        save_file(broken, tmp_path / "vptq" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"first {bias}"):
            read_vector_model(str(tmp_path / "vptq"))
