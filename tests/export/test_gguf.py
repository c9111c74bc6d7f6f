"""GGUF files: llama.cpp reads from them what transformers computes, and splits text as the tokenizer does."""

import ctypes
import hashlib
import importlib.util
import json
import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.export.test_weights import KINDS, trained
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.task_schema import ExportTaskConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export import gguf_tokenizer
from tpu_experiments.export.gguf import (
    ADAPTER,
    Conversion,
    Metadata,
    file_name,
    is_exact,
    write_adapter_file,
    write_models,
)
from tpu_experiments.export.weights import WholeModel, whole_model
from tpu_experiments.storage.gguf import llama_cpp, splits
from tpu_experiments.storage.gguf.llama_cpp import LlamaCppModel
from tpu_experiments.tasks.export.forms import WRITERS, _license
from tpu_experiments.tasks.export.subject import Subject
from tpu_experiments.tasks.generate.origin import Origin

pytestmark = pytest.mark.xla
SAMPLES = Path("tpu_experiments/samples")
METADATA = Metadata("tiny", "owner/base", license="apache-2.0")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4100,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The sample tokenizer has 4,096 tokens: four rows of the embedding have none."""
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}


@dataclass(frozen=True)
class Case:
    """One model."""

    name: str
    model_type: str
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


GEMMA = {"sliding_window": 8, "num_key_value_heads": 1, "query_pre_attn_scalar": 16}
CASES = (
    Case("Mistral", "mistral", {"sliding_window": None}),
    Case("Mistral, tied", "mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    Case("Llama 3", "llama", {"rope_parameters": LLAMA3}),
    Case("Llama, linear RoPE, biases", "llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
    Case("Llama, YaRN", "llama", {"rope_parameters": YARN}),
    Case("Llama, full heads", "llama", {"num_key_value_heads": 4}),
    Case("Qwen 2", "qwen2", {"tie_word_embeddings": True}),
    Case("Qwen 2, YaRN", "qwen2", {"rope_parameters": YARN}),
    Case("Qwen 3", "qwen3"),
    Case("Gemma 3", "gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    Case(
        "Gemma 3, scales of its own",
        "gemma3_text",
        GEMMA
        | {
            "query_pre_attn_scalar": 5,
            "final_logit_softcapping": 4.0,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
)
KEPT = ("Mistral", "Llama 3", "Qwen 2", "Qwen 3", "Gemma 3", "Gemma 3, scales of its own")


def made(case: Case, **values: Any) -> Any:
    """A model whose every parameter matters: biases are not 0, norms not 1, and logits spread over some 10."""
    kind = CONFIG_MAPPING[case.model_type]
    settable = {name: value for name, value in SIZES.items() if not isinstance(getattr(kind, name, None), property)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**settable | case.values | values), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def whole(model: Any) -> WholeModel:
    weights = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    return WholeModel(
        model.config, type(model).__name__, weights, frozenset(), False, lambda effect, dtype: iter(weights.items())
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(SAMPLES / "tokenizer"), revision=None, chat_template_path=None)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Lines of the samples, and hard ones."""
    found = (SAMPLES / "wiki_ro.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    found += (SAMPLES / "uk_law.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    found += [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()][:60]
    return [
        *found,
        "Știință și tehnică: „țară”, «înțeles», ăâîșț ĂÂÎȘȚ, ŞŢşţ",
        "日本語のテキスト、中文文本、한국어 텍스트 нещо на Български कार्य",
        "🚀 👩‍👩‍👧 naïve café — ½ ≠ ⅓ … 😶‍🌫️",
        "    if x == 3.14159:\treturn [1, 22, 333, 4444, 55555]  # 1,234,567.89",
        "  \t leading and trailing  \t ",
        "I'VE we'll DON'T 'tis ''' ``` \"\"\" ..... !!!!!! ------",
        "a\n\nb\r\n\r\n   c\n\t\td",
        " ",
    ]


def log_probs(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


IDS = np.random.Generator(np.random.Philox(key=1)).integers(5, 4000, 150).tolist()
"""More than one call of `llama_decode`, and more than Gemma's window."""


class GeluInFloat16(torch.nn.Module):
    """GELU as ggml looks it up on a CPU (`GGML_GELU_FP16`): both its argument and its value are float16."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0, torch.where(x >= 10, x, rounded))


def as_ggml_computes(model: Any) -> Any:
    """The model with the activation of ggml; only Gemma's is another."""
    if model.config.model_type == "gemma3_text":
        for layer in model.model.layers:
            layer.mlp.act_fn = GeluInFloat16()
    return model


# ---- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", only(KEPT, CASES), ids=str)
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, tokenizer: Any, case: Case) -> None:
    model = made(case)
    written = write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f32"], metadata=METADATA)
    read = LlamaCppModel(str(tmp_path / file_name("f32")))
    as_ggml_computes(model)
    ids = IDS[:126]
    theirs, ours = read.log_probs(ids), log_probs(model, ids)
    assert theirs.shape == ours.shape == (126, 4100)
    assert float(ours.max() - ours.min()) > 3
    # Sums in another order: largest seen 3e-5. With Gemma's GELU in float16 the last bit of a sum may round its value
    # to a neighbour, 2**-11 away: largest seen 9e-4, on average 4e-5.
    is_gemma = case.model_type == "gemma3_text"
    torch.testing.assert_close(theirs, ours, atol=3e-3 if is_gemma else 1e-4, rtol=0)
    assert float((theirs - ours).abs().mean()) < 1e-4
    longer = ids[:20]
    for _ in range(6):
        longer.append(int(log_probs(model, longer)[-1].argmax()))
    assert read.greedy(ids[:20], num=6) == longer[20:]
    assert written.digests == {file_name("f32"): sha256(tmp_path / file_name("f32"))}


@pytest.mark.parametrize("case", only(("Gemma 3",), [case for case in CASES if "Gemma" in case.name]), ids=str)
def test_gemma_is_exact_but_for_its_gelu(tmp_path: Path, tokenizer: Any, case: Case) -> None:
    model = made(case)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f32"], metadata=METADATA)
    read = LlamaCppModel(str(tmp_path / file_name("f32")))
    torch.testing.assert_close(read.log_probs(IDS[:126]), log_probs(model, IDS[:126]), atol=1e-4, rtol=0)
    assert not is_exact("f32", type(model).__name__)
    assert is_exact("f32", "MistralForCausalLM")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_longer_text_than_one_call_takes(tmp_path: Path, tokenizer: Any) -> None:
    model = made(CASES[0], max_position_embeddings=256)
    write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f32"], metadata=METADATA)
    read = LlamaCppModel(str(tmp_path / file_name("f32")))
    torch.testing.assert_close(read.log_probs(IDS), log_probs(model, IDS), atol=1e-4, rtol=0)
    first = int(log_probs(model, IDS)[-1].argmax())
    assert read.greedy(IDS, num=2) == [first, int(log_probs(model, [*IDS, first])[-1].argmax())]


@pytest.mark.parametrize(
    ("kind", "bound"),
    # Relative to the largest value of a row: float16 rounds by 2**-11 of a value, bfloat16 by 2**-8 (half a unit of
    # the last place), Q8_0 by half a step of 1/127 of the largest of 32, whose float16 scale adds 2**-11.
    [("f32", 0.0), ("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 0.5 / 127 + 2**-11)],
)
def test_the_types_hold_the_weights(tmp_path: Path, tokenizer: Any, kind: str, bound: float) -> None:
    model = made(CASES[3], intermediate_size=84)  # biases of 336 bytes are padded
    written = write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=[kind], metadata=METADATA)
    assert written.digests == {file_name(kind): sha256(tmp_path / file_name(kind))}
    reader = gguf.GGUFReader(tmp_path / file_name(kind))
    found = {tensor.name: tensor for tensor in reader.tensors}
    weights = dict(model.named_parameters())
    asked = gguf.GGMLQuantizationType[kind.upper()]
    assert found["token_embd.weight"].tensor_type == found["blk.0.ffn_up.weight"].tensor_type == asked
    assert found["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    # Rows of 84 values are no whole number of Q8_0's blocks of 32.
    narrow = gguf.GGMLQuantizationType.F16 if kind == "q8_0" else asked
    assert found["blk.1.ffn_down.weight"].tensor_type == narrow
    for name, outer in (("blk.0.attn_v", "self_attn.v_proj"), ("blk.0.ffn_down", "mlp.down_proj")):
        tensor = found[f"{name}.weight"]
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        weight = weights[f"model.layers.0.{outer}.weight"].detach()
        assert float((values.reshape(weight.shape) - weight).abs().max()) <= bound * float(weight.abs().max())
    assert (
        reader.fields["general.file_type"].contents()
        == gguf.LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{kind.upper()}")]
    )


def test_q8_0_keeps_the_perplexity(tmp_path: Path, tokenizer: Any) -> None:
    """All types are written in one pass, and none is further from the model than its limit."""
    model = AutoModelForCausalLM.from_pretrained(SAMPLES / "tiny_base").eval()
    kinds = {"f16": 1.002, "bf16": 1.002, "q8_0": 1.005}
    written = write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=list(kinds), metadata=METADATA)
    text = "\n".join(
        json.loads(line)["text"] for line in (SAMPLES / "wiki_ro.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    )
    ids = tokenizer(text)["input_ids"][:400]
    following = torch.tensor(ids[1:])[:, None]
    ours = log_probs(model, ids)[:-1].gather(1, following).mean()
    for kind, limit in kinds.items():
        read = LlamaCppModel(str(tmp_path / file_name(kind)))
        ratio = math.exp(float(ours - read.log_probs(ids)[:-1].gather(1, following).mean()))
        assert 1 / limit < ratio < limit, kind
    assert written.digests == {file_name(kind): sha256(tmp_path / file_name(kind)) for kind in kinds}


def test_a_tied_embedding_is_written_once(tmp_path: Path, tokenizer: Any) -> None:
    names = {}
    for is_tied in (True, False):
        model = made(CASES[0], tie_word_embeddings=is_tied)
        write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f16"], metadata=METADATA)
        names[is_tied] = {tensor.name for tensor in gguf.GGUFReader(tmp_path / file_name("f16")).tensors}
    assert names[False] - names[True] == {"output.weight"}


def test_the_file_says_where_it_comes_from(tmp_path: Path, tokenizer: Any) -> None:
    write_models(str(tmp_path), model=whole(made(CASES[0])), tokenizer=tokenizer, types=["f16"], metadata=METADATA)
    fields = gguf.GGUFReader(tmp_path / file_name("f16")).fields
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "tiny",
        "general.license": "apache-2.0",
        "general.base_model.0.name": "base",
        "general.base_model.0.organization": "owner",
        "llama.context_length": 128,
        "llama.attention.head_count_kv": 2,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    assert {name: fields[name].contents() for name in expected} == expected


def test_a_sliding_window_that_llama_cpp_lacks_is_named(tmp_path: Path, tokenizer: Any) -> None:
    notes = {
        window: Conversion(made(CASES[0], sliding_window=window).config, "MistralForCausalLM").notes
        for window in (None, 128, 64)
    }
    assert notes[None] == notes[128] == []
    assert "one of 64 tokens in a context of 128" in notes[64][0]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("", "gpt2"), "models of class GPT2LMHeadModel are not written"),
        (Case("", "llama", {"hidden_act": "gelu"}), "its activation is gelu"),
        (Case("", "qwen2", {"rope_parameters": LLAMA3}), "its RoPE is of type llama3"),
        (Case("", "llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}), "its RoPE is of type dynamic"),
        (Case("", "llama", {"rope_parameters": YARN | {"attention_factor": 2.0}}), "YaRN RoPE has attention_factor"),
        (Case("", "gemma3_text", {"attn_logit_softcapping": 50.0}), "attn_logit_softcapping=50.0"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, tokenizer: Any, case: Case, problem: str
) -> None:
    model = made(case, max_position_embeddings=128)
    with pytest.raises(ConfigError, match=problem):
        write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f16"], metadata=METADATA)
    assert not list(tmp_path.iterdir())


def test_a_weight_beyond_float16_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    model = made(CASES[0])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 7e4
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_up\.weight has the value 7e\+04, and float16 ends at 65504"):
        write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f16"], metadata=METADATA)


# ---- the adapter --------------------------------------------------------------------------------------------


class WithAdapter(LlamaCppModel):
    """A model to which llama.cpp itself adds an adapter."""

    def __init__(self, file: str, adapter: str) -> None:
        super().__init__(file)
        lib = self._lib
        lib.llama_adapter_lora_init.restype = ctypes.c_void_p
        lib.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.adapter = lib.llama_adapter_lora_init(self._model, adapter.encode())
        assert self.adapter

    @contextmanager
    def context(self, length: int):
        with super().context(length) as made:
            adapters, scales = (ctypes.c_void_p * 1)(self.adapter), (ctypes.c_float * 1)(1.0)
            function = self._lib.llama_set_adapters_lora
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
            assert function(made, adapters, 1, scales) == 0
            yield made


OWN_VALUES: dict[str, Any] = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 9.0}}


@pytest.mark.parametrize(
    ("scaling", "patterns"),
    [("alpha_over_r", {}), ("alpha_over_sqrt_r", {}), ("alpha_over_r", OWN_VALUES), ("alpha_over_sqrt_r", OWN_VALUES)],
)
@pytest.mark.parametrize("case", only(("Llama 3",), [CASES[2], CASES[6], CASES[9]]), ids=str)
def test_llama_cpp_adds_the_adapter(
    tmp_path: Path, tokenizer: Any, case: Case, scaling: str, patterns: dict[str, Any]
) -> None:
    model = made(case)
    lora = LoraConfig(r=4, alpha=6.0, scaling=scaling, **patterns)
    torch.manual_seed(2)
    parameters = {}
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear) and name != "lm_head":
            rank = 2 if patterns and name.endswith("q_proj") else 4
            parameters[f"{name}.lora_A"] = 0.1 * torch.randn(rank, part.in_features)
            parameters[f"{name}.lora_B"] = 0.1 * torch.randn(part.out_features, rank)
    write_models(str(tmp_path), model=whole(model), tokenizer=tokenizer, types=["f32"], metadata=METADATA)
    digests = write_adapter_file(
        str(tmp_path),
        config=model.config,
        architecture=type(model).__name__,
        parameters=parameters,
        lora=lora,
        metadata=METADATA,
    )
    assert digests == {ADAPTER: sha256(tmp_path / ADAPTER)}
    base = LlamaCppModel(str(tmp_path / file_name("f32"))).log_probs(IDS[:40])
    adapted = WithAdapter(str(tmp_path / file_name("f32")), str(tmp_path / ADAPTER)).log_probs(IDS[:40])
    with torch.no_grad():
        for name, part in model.named_modules():
            if f"{name}.lora_A" in parameters:
                rank, alpha = len(parameters[f"{name}.lora_A"]), 9.0 if patterns and name.endswith("k_proj") else 6.0
                scale = alpha / (rank if scaling == "alpha_over_r" else rank**0.5)
                part.weight += scale * parameters[f"{name}.lora_B"] @ parameters[f"{name}.lora_A"]
    as_ggml_computes(model)
    atol = 3e-3 if case.model_type == "gemma3_text" else 1e-4
    torch.testing.assert_close(adapted, log_probs(model, IDS[:40]), atol=atol, rtol=0)
    assert float((adapted - base).abs().max()) > 0.5


def subject_of_run(make_config: Any, folder: Path, tokenizer: Any, *words: str) -> Subject:
    """What task=export would export after two steps of training."""
    config, run, tensors = trained(make_config, "mistral7b", "model.dtype=float32", *words)
    task = ExportTaskConfig(name="export", run=str(folder / "run_7"), gguf_types=["f32"])
    source, lora = run.model.source, config.lora
    seed = config.seed if lora.init == "pissa" else None
    origin = Origin(config, lora=lora, trained=tensors, reduced_with_seed=seed, text="here")
    model = whole_model(source, lora=lora, trained=tensors, reduced_with_seed=seed)
    return Subject(config, task, origin, source, model, tokenizer, str(folder))


@pytest.mark.parametrize("kind", only(("plain", "PiSSA"), ("plain", "PiSSA", "rsLoRA")))
def test_the_adapter_of_a_run_on_its_base_is_the_merged_model(
    make_config: Any, tmp_path: Path, tokenizer: Any, kind: str
) -> None:
    subject = subject_of_run(make_config, tmp_path, tokenizer, *KINDS[kind])
    written = WRITERS["gguf"](str(tmp_path), subject)
    assert set(written.digests) == {ADAPTER, "model-f32.gguf"}
    assert written.digests == {name: sha256(tmp_path / name) for name in written.digests}
    notes = written.notes
    assert written.facts == {"adapter": ADAPTER, "base": "dense", "smaller": COMMAND}
    assert "one of 48 tokens in a context of 1024" in str(notes)
    (copy,) = written.copies
    assert (copy.label, copy.is_exact) == ("f32", True)
    ids = tokenizer("O propoziție despre România.")["input_ids"]
    merged = copy.read(str(tmp_path), torch.float32).log_probs(ids)
    assert gguf.GGUFReader(tmp_path / "model-f32.gguf").fields["general.name"].contents() == "run_7"
    source = subject.source
    bases = {item.name: item.tensor for item in source.weights(list(subject.model.shapes))}
    base = replace(subject.model, read=lambda effect, dtype: iter(bases.items()))
    (tmp_path / "base").mkdir()
    write_models(str(tmp_path / "base"), model=base, tokenizer=tokenizer, types=["f32"], metadata=METADATA)
    file = str(tmp_path / "base" / "model-f32.gguf")
    adapted = WithAdapter(file, str(tmp_path / ADAPTER)).log_probs(ids)
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=0)
    assert float((adapted - LlamaCppModel(file).log_probs(ids)).abs().max()) > 1e-3


COMMAND = "llama-quantize model-f32.gguf model-Q4_K_M.gguf Q4_K_M"


def test_an_adapter_that_llama_cpp_lacks_is_left_out_with_the_reason(
    make_config: Any, tmp_path: Path, tokenizer: Any
) -> None:
    subject = subject_of_run(make_config, tmp_path, tokenizer, *KINDS["DoRA"])
    written = WRITERS["gguf"](str(tmp_path), replace(subject, task=replace(subject.task, gguf_types=["q8_0"])))
    assert written.facts["adapter"] == "not written: llama.cpp has no DoRA"
    saved = subject_of_run(make_config, tmp_path, tokenizer, "lora.modules_to_save=[norm]")
    other = WRITERS["gguf"](str(tmp_path), replace(saved, task=replace(saved.task, gguf_types=["q8_0"])))
    assert str(other.facts["adapter"]).startswith("not written: modules were trained whole")
    assert set(written.digests) == {"model-q8_0.gguf"}
    assert written.facts["smaller"] == "llama-quantize --allow-requantize model-q8_0.gguf model-Q4_K_M.gguf Q4_K_M"


@pytest.mark.parametrize(("head", "expected"), [("license: mit", "mit"), ("license: [", None), ("tags: [x]", None)])
def test_the_licence_is_that_of_the_bases_model_card(
    make_config: Any, tmp_path: Path, tokenizer: Any, head: str, expected: str | None
) -> None:
    subject = subject_of_run(make_config, tmp_path, tokenizer)
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# A model\n", encoding="utf-8")
    subject.source.folder = tmp_path
    assert _license(subject) == expected


# ---- llama.cpp ----------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_off_is_refused_with_llama_cpps_reason(tmp_path: Path, tokenizer: Any) -> None:
    write_models(str(tmp_path), model=whole(made(CASES[0])), tokenizer=tokenizer, types=["f16"], metadata=METADATA)
    file = tmp_path / file_name("f16")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="not within the file bounds"):
        LlamaCppModel(str(file))
    with pytest.raises(OSError, match="no_such_file"):
        LlamaCppModel(str(tmp_path / "no_such_file.gguf"))


def test_without_xllamacpp_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp._library.cache_clear()
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ImportError) as caught:
        LlamaCppModel("model.gguf")
    assert caught.value.name == "xllamacpp"


def test_a_build_of_another_layout_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp._library.cache_clear()
    monkeypatch.setitem(llama_cpp.DEFAULTS, "n_ctx", 4096)
    with pytest.raises(ImportError) as caught:
        LlamaCppModel("model.gguf")
    assert str(caught.value.name).startswith("xllamacpp 2026.10 (there is 2026")


def test_without_the_package_gguf_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any
) -> None:
    model = whole(made(CASES[0]))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ConfigError, match=r"the package gguf is not installed; `pip install 'tpu_experiments\[export\]"
    ):
        write_models(str(tmp_path), model=model, tokenizer=tokenizer, types=["f16"], metadata=METADATA)


# ---- tokenizers ---------------------------------------------------------------------------------------------


def fast(backend: Tokenizer, **specials: str) -> PreTrainedTokenizerFast:
    names = {"bos_token": "<s>", "eos_token": "</s>"} | specials
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend.to_str()), **names)


def byte_level(texts: list[str], pre_tokenizer: Any, *, ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE that splits text by `pre_tokenizer`."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(["<tool>"])
    return backend


def sentencepiece_like(texts: list[str]) -> dict[str, Any]:
    """tokenizer.json of BPE with byte fallback and every merge that its tokens allow, as converted from SentencePiece.

    It puts a blank before the text, as Mistral's does.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=specials + gguf_tokenizer.BYTES, show_progress=False)
    backend.train_from_iterator((word for text in texts for word in text.split(" ")), trainer)
    spec = json.loads(backend.to_str())
    vocab = spec["model"]["vocab"]
    pieces = {text: -float(index) for text, index in vocab.items() if text not in specials}
    spec["model"]["merges"] = [list(merge) for merge in generate_merges(vocab, pieces)]
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in specials]
    return spec


def tokens_in_llama_cpp(folder: Path, tokenizer: Any, lines: list[str], **values: Any) -> list[list[int]]:
    model = made(CASES[0], num_hidden_layers=1, vocab_size=len(tokenizer) + 3, **values)
    written = write_models(str(folder), model=whole(model), tokenizer=tokenizer, types=["f16"], metadata=METADATA)
    read = LlamaCppModel(str(folder / file_name("f16")), drops_blank=written.doubles_blank)
    return [read.ids(line) for line in lines]


def bare(tokenizer: Any, lines: list[str]) -> list[list[int]]:
    return [list(tokenizer(line, add_special_tokens=False)["input_ids"]) for line in lines]


def split_by(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
PRE_TOKENIZERS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "smollm": (DIGITS, False),
    "llama-bpe": (split_by(splits.LLAMA3), True),
    "dbrx": (split_by(splits.LLAMA3), False),
    "qwen2": (split_by(splits.QWEN2), False),
    "qwen35": (split_by(splits.QWEN35), False),
    "gpt-4o": (split_by(splits.GPT4O), False),
    "tekken": (split_by(splits.TEKKEN), True),
}


@pytest.mark.parametrize("name", ["tokenizer", "stories/tokenizer"])
def test_the_samples_tokenizers_split_alike(tmp_path: Path, lines: list[str], name: str) -> None:
    tokenizer = load_tokenizer(str(SAMPLES / name), revision=None, chat_template_path=None)
    assert tokens_in_llama_cpp(tmp_path, tokenizer, lines) == bare(tokenizer, lines)


def texts_in(value: Any) -> list[str]:
    """Every line of every string of a JSON value."""
    if isinstance(value, str):
        return [line for line in value.splitlines() if line.strip()]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [line for part in parts for line in texts_in(part)]


def test_the_sample_tokenizer_splits_real_text_alike(tmp_path: Path, tokenizer: Any, shared_data: Path) -> None:
    found: list[str] = []
    for name in ("ro_text", "ro_chat", "uk_law"):
        with (shared_data / f"{name}.jsonl").open(encoding="utf-8") as file:
            found += [text for _, line in zip(range(40), file, strict=False) for text in texts_in(json.loads(line))]
    assert len(found) > 200
    assert tokens_in_llama_cpp(tmp_path, tokenizer, found) == bare(tokenizer, found)


@pytest.mark.slow
def test_mistrals_own_tokenizer_splits_alike(tmp_path: Path, lines: list[str]) -> None:
    """SentencePiece's file of Mistral 7B v0.1, which the package mistral-common has."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("mistral-common, which holds the file, or sentencepiece, which reads it, is not installed")
    data = Path(str(found.submodule_search_locations[0])) / "data" / "tokenizer.model.v1"
    (tmp_path / "tokenizer.model").write_bytes(data.read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 32000
    asked = [line for line in lines if line.strip()]
    assert tokens_in_llama_cpp(tmp_path, tokenizer, asked) == bare(tokenizer, asked)


@pytest.mark.parametrize("pre", only(("llama-bpe", "qwen2", "smollm"), PRE_TOKENIZERS))
def test_byte_level_bpe_splits_alike(tmp_path: Path, lines: list[str], pre: str) -> None:
    kind, ignore_merges = PRE_TOKENIZERS[pre]
    tokenizer = fast(byte_level(lines, kind, ignore_merges=ignore_merges))
    vocabulary = gguf_tokenizer.vocabulary_of(tokenizer, config=made(CASES[0]).config)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", pre)
    if pre in splits.APPROXIMATE:
        assert any("capitals" in note for note in vocabulary.notes)
    assert tokens_in_llama_cpp(tmp_path, tokenizer, lines) == bare(tokenizer, lines)


def test_a_table_of_every_name_is_tested() -> None:
    assert set(PRE_TOKENIZERS) == set(splits.PRE_TOKENIZERS.values())


@pytest.mark.parametrize("kind", ["Mistral", "Gemma", "Metaspace"])
def test_bpe_with_byte_fallback_splits_alike(tmp_path: Path, lines: list[str], kind: str) -> None:
    spec = sentencepiece_like(lines)
    if kind == "Gemma":
        spec["normalizer"] = spec["normalizer"]["normalizers"][1]
    if kind == "Metaspace":
        spec["normalizer"] = None
        spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
        lines = [line for line in lines if line.strip()]
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.add_tokens([AddedToken("▁▁▁▁", normalized=False), AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    tokenizer = fast(backend, unk_token="<unk>")
    vocabulary = gguf_tokenizer.vocabulary_of(tokenizer, config=made(CASES[0]).config)
    assert (vocabulary.model, vocabulary.add_space_prefix) == ("llama", kind != "Gemma")
    assert vocabulary.adds == {"bos": True, "eos": False}
    assert bool(vocabulary.notes) == vocabulary.doubles_blank == (kind == "Metaspace")
    types = {vocabulary.tokens[index]: kind for index, kind in enumerate(vocabulary.types)}
    assert types["<0x41>"] == gguf.TokenType.BYTE
    assert types["<unk>"] == gguf.TokenType.UNKNOWN
    assert types["<s>"] == gguf.TokenType.CONTROL
    assert types["<tool>"] == gguf.TokenType.USER_DEFINED
    assert types["▁▁▁▁"] == gguf.TokenType.NORMAL
    assert tokens_in_llama_cpp(tmp_path, tokenizer, lines) == bare(tokenizer, lines)


def test_merges_that_llama_cpp_would_not_follow_are_counted(lines: list[str]) -> None:
    spec = sentencepiece_like(lines)
    pairs = [tuple(merge) for merge in spec["model"]["merges"]]
    vocab = spec["model"]["vocab"]
    merged = ["".join(pair) for pair in pairs]
    assert gguf_tokenizer._differences(merged, vocab=vocab, pairs=pairs) == []
    note = gguf_tokenizer._differences(sorted(set(merged)), vocab=vocab, pairs=pairs[:-3])
    assert note[0].startswith("llama.cpp also joins 3 pairs of tokens that are no merges")


def test_tokens_of_padding_are_unused_and_ids_are_the_tokenizers(tmp_path: Path, tokenizer: Any) -> None:
    write_models(str(tmp_path), model=whole(made(CASES[0])), tokenizer=tokenizer, types=["f16"], metadata=METADATA)
    fields = gguf.GGUFReader(tmp_path / file_name("f16")).fields
    types = fields["tokenizer.ggml.token_type"].contents()
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(types) == len(tokens) == 4100
    assert set(types[4096:]) == {gguf.TokenType.UNUSED}
    assert types[: len(tokenizer.all_special_ids)] == [gguf.TokenType.CONTROL] * len(tokenizer.all_special_ids)
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos")}
    assert ids == {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False


def test_added_tokens_beyond_the_embedding_are_left_out(tmp_path: Path, lines: list[str]) -> None:
    """As Gemma 3's <image_soft_token> is with a model of text alone."""
    backend = sample_spec()
    backend.add_special_tokens(["<image>"])
    tokenizer = fast(backend)
    vocabulary = gguf_tokenizer.vocabulary_of(tokenizer, config=made(CASES[0], vocab_size=4096).config)
    assert len(vocabulary.tokens) == 4096
    assert vocabulary.notes == ("1 added tokens, first <image>, are beyond the model's embedding and left out.",)


def test_a_tokenizer_without_bos_takes_the_models(lines: list[str]) -> None:
    """llama.cpp would take token 11 for it."""
    tokenizer = fast(byte_level(lines, PRE_TOKENIZERS["qwen2"][0]))
    tokenizer.bos_token = None
    vocabulary = gguf_tokenizer.vocabulary_of(tokenizer, config=made(CASES[0], bos_token_id=7).config)
    assert vocabulary.ids["bos"] == 7
    assert vocabulary.adds == {"bos": False, "eos": False}


def sample_spec(**values: Any) -> Tokenizer:
    """The sample tokenizer with other values in its tokenizer.json."""
    spec = json.loads((SAMPLES / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    spec["model"] |= values.pop("model", {})
    return Tokenizer.from_str(json.dumps(spec | values))


SPACED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
REFUSED = {
    "its model is WordPiece, not BPE": lambda: Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    r"splits by '\\\\w\+' with ignore_merges=false": lambda: byte_level(["a word"], split_by(r"\w+")),
    "splits by .* with ignore_merges=true": lambda: sample_spec(model={"ignore_merges": True}),
    'its pre-tokenizer is {"type": "ByteLevel", "add_prefix_space": true': lambda: sample_spec(pre_tokenizer=SPACED),
    'its normalizer is {"type": "Lowercase"}': lambda: sample_spec(normalizer={"type": "Lowercase"}),
    "it falls back to bytes and has no token <0x00>": lambda: sample_spec(model={"byte_fallback": True}),
    "it has token 4095, and the model's embedding ends at 4094": sample_spec,
}


@pytest.mark.parametrize("problem", REFUSED)
def test_other_tokenizers_are_refused(problem: str) -> None:
    size = 4095 if "4094" in problem else 4100
    with pytest.raises(ConfigError, match=f"task.forms has gguf, and llama.cpp has no such tokenizer: .*{problem}"):
        gguf_tokenizer.vocabulary_of(fast(REFUSED[problem]()), config=made(CASES[0], vocab_size=size).config)
