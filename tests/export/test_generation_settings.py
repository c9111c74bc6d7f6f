"""generation_config.json of an export: a base's is kept, the learnt ends are added, one drawn at random has its own."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from tests.export.tokenizers_of_kinds import TEXTS, made
from tests.training.runs import finished
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.generation import end_ids, generation_config, model_config, turn_end_id
from tpu_experiments.models.huggingface import HuggingFaceModel

pytestmark = pytest.mark.xla
TOKENIZER = "tpu_experiments/samples/tokenizer"
SIZES = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL = ("hw.runtime=eager", "trainer.max_stage_steps=1", "debug=smoke", "data=sample_chat", "curriculum=single")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of transformers' whose config.json names one end."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, eos_token_id=2, pad_token_id=0)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def with_settings(folder, text):
    (folder / "generation_config.json").write_text(text)
    return HuggingFaceModel(ModelConfig(name="x", path=str(folder), dtype="float32"), seed=0)


def drawn(tokenizer_size=4096, **own):
    arch = {"model_type": "llama", **SIZES, "vocab_size": tokenizer_size, "bos_token_id": 1, "eos_token_id": 2, **own}
    return HuggingFaceModel(ModelConfig(name="x", init="random", arch=arch, dtype="float32"), seed=0)


def tokenizer_of(chat_format="tokenizer"):
    return load_tokenizer(TOKENIZER, revision=None, chat_template_path=None, chat_format=chat_format)


KEPT = {
    "a list": ([2, 17, 33], False, [2, 17, 33]),
    "a list, and turns": ([2, 17, 33], True, [2, 17, 33, 4]),
    "a list with the turn's end": ([4, 2], True, [4, 2]),
    "one": (2, False, 2),
    "one, and turns": (2, True, [2, 4]),
    "without the end of texts": (17, False, [17, 2]),
    "none": (None, False, 2),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_bases_ends_are_kept_and_the_learnt_ones_added(base, case):
    given, learns_turns, expected = KEPT[case]
    text = json.dumps({"eos_token_id": given, "temperature": 0.25, "do_sample": True, "x": "ș"})
    source = with_settings(base, text)
    found = generation_config(source, tokenizer=tokenizer_of("chatml"), learns_turns=learns_turns)
    assert json.loads(found) == json.loads(text) | {"eos_token_id": expected}
    assert (found == text) == (given == expected), "a file that is right is copied byte for byte"
    assert end_ids(found) == (expected if isinstance(expected, list) else [expected])


def test_a_base_without_such_a_file_gets_the_ids_of_its_config(base):
    (base / "generation_config.json").unlink(missing_ok=True)
    source = HuggingFaceModel(ModelConfig(name="x", path=str(base), dtype="float32"), seed=0)
    values = json.loads(generation_config(source, tokenizer=tokenizer_of("chatml"), learns_turns=True))
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (1, [2, 4], 0)
    assert model_config(source, tokenizer=tokenizer_of()) is source.config, "a checkpoint's config is its own"


@pytest.mark.parametrize(
    ("chat_format", "expected"), [("chatml", [2, 4]), ("plain", 2), ("llama2", 2), ("instruction_response", 2)]
)
def test_one_that_is_drawn_has_the_tokenizers_ends(chat_format, expected):
    values = json.loads(generation_config(drawn(), tokenizer=tokenizer_of(chat_format), learns_turns=True))
    assert values["eos_token_id"] == expected


def test_one_that_is_drawn_has_the_ids_of_another_tokenizer():
    """Not those of its class (1 and 2 for a Llama), nor of a recipe for the sample tokenizer."""
    tokenizer = made("SentencePiece's BPE")
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    source = drawn(len(tokenizer), bos_token_id=900, eos_token_id=901, pad_token_id=902)
    config = model_config(source, tokenizer=tokenizer)
    assert [config.bos_token_id, config.eos_token_id, config.pad_token_id] == ids
    assert source.config.eos_token_id == 901, "the model that is trained is left alone"
    values = json.loads(generation_config(source, tokenizer=tokenizer, learns_turns=False))
    assert [values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]] == ids


def test_a_model_that_writes_no_text_gets_none(base):
    assert generation_config(drawn(), tokenizer=tokenizer_of(), learns_turns=False, writes_text=False) is None
    source = with_settings(base, '{"eos_token_id": 7}')
    kept = generation_config(source, tokenizer=tokenizer_of(), learns_turns=True, writes_text=False)
    assert kept == '{"eos_token_id": 7}'


@pytest.mark.parametrize("text", ["[]", "no JSON", '{"eos_token_id": "</s>"}', '{"eos_token_id": [2, null]}'])
def test_settings_that_cannot_be_read_are_refused(base, text):
    with pytest.raises(ConfigError, match=r"generation_config\.json; it"):
        generation_config(with_settings(base, text), tokenizer=tokenizer_of(), learns_turns=False)


def test_no_turn_ends_where_there_is_no_template():
    tokenizer = made("byte-level BPE, Llama 3's words")
    assert turn_end_id(tokenizer) == tokenizer.eos_token_id
    bare = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)
    bare.chat_template = None
    assert turn_end_id(bare) is None


def test_a_model_trained_whole_is_read_as_it_was_trained_and_keeps_its_ends(tmp_path):
    """A qwen2 from nothing, with a tokenizer that transformers' class for qwen2 splits otherwise; then trained on."""
    own = tmp_path / "tokenizer"
    tokenizer = made("SentencePiece's BPE")
    tokenizer.save_pretrained(own)
    words = (*SMALL, "model.chat_format=chatml", "lora=none", "name=run")
    sizes = (f"model.tiny_arch.vocab_size={len(tokenizer)}",)
    finished(*words, "model=qwen05b", f"model.tokenizer_path={own}", *sizes, output_dir=tmp_path / "one")
    folder = tmp_path / "one" / "run" / "model"
    found = AutoTokenizer.from_pretrained(folder)
    expected = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert [found(text)["input_ids"] for text in TEXTS] == expected
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
    config = json.loads((folder / "config.json").read_text())
    assert [config["eos_token_id"], config["pad_token_id"]] == [ends[0], tokenizer.pad_token_id]
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == ends

    settings = {"eos_token_id": [ends[0], 17, 33, ends[1]], "temperature": 0.3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    later = ("model=tiny", "model.size=full", f"model.path={folder}", "model.tokenizer_path=null")
    finished(*SMALL, "lora=none", "name=later", *later, output_dir=tmp_path / "two")
    second = tmp_path / "two" / "later" / "model"
    assert (second / "generation_config.json").read_text() == json.dumps(settings)
    again = AutoTokenizer.from_pretrained(second)
    assert [again(text)["input_ids"] for text in TEXTS] == expected, "a later training does not change tokens"
    assert again.chat_template == found.chat_template
