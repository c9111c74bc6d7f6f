"""A written tokenizer is read back as the one that trained, beside every type of model, or the run refuses.

transformers has classes that split text by rules of their own; which of them reads a folder depends on the model type.
"""

import copy
import json
import logging

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.export.tokenizers_of_kinds import KINDS, SHIPPED, TEXTS, made
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import HARD_LINES, closing_texts, load_tokenizer
from tpu_experiments.export import tokenizer as exporting
from tpu_experiments.export.tokenizer import require_readable, write_tokenizer

TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"gemma4_assistant"})  # its config needs another model's
OFTEN = ("qwen2", "qwen3", "qwen3_5_moe_text", "llama", "gemma3_text", "phi3", "gpt2")
LINES = [
    *HARD_LINES,
    *TEXTS[:10],
    "",
    " ",
    "\n\n",
    "<s>a</s> b<|im_end|>\nc [SEP] d",
    "Bună  ziua, \t și noapte 12345!",
]


def config_beside(folder, model_type):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return CONFIG_MAPPING[model_type]()


def everything_of(tokenizer):
    """What a user of a tokenizer sees of it."""
    ids = [tokenizer(line, add_special_tokens=adds)["input_ids"] for line in LINES for adds in (False, True)]
    texts = [tokenizer.decode(each) for each in ids]
    return ids, texts, tokenizer.special_tokens_map, tokenizer.get_added_vocab(), tokenizer.chat_template


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", [OFTEN, pytest.param(TYPES, marks=pytest.mark.slow, id="all")])
def test_it_is_read_back_beside_the_config_of_a_model(tmp_path, kind, types):
    tokenizer = made(kind)
    expected = everything_of(tokenizer)
    for model_type in types:
        folder = tmp_path / model_type
        write_tokenizer(str(folder), tokenizer, config=config_beside(folder, model_type))
        assert everything_of(AutoTokenizer.from_pretrained(folder)) == expected, model_type
        again = load_tokenizer(str(folder), revision=None, chat_template_path=None)
        assert everything_of(again) == expected, f"{model_type}, as model.path of a later run"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_back_beside_an_adapter(tmp_path, kind):
    write_tokenizer(str(tmp_path), made(kind))
    assert not (tmp_path / "config.json").exists()
    assert everything_of(AutoTokenizer.from_pretrained(tmp_path)) == everything_of(made(kind))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", None])
def test_its_class_is_one_that_transformers_4_knows_too_where_it_may_be(tmp_path, model_type):
    config = None if model_type is None else config_beside(tmp_path, model_type)
    write_tokenizer(str(tmp_path), made("byte-level BPE, GPT-2's words"), config=config)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_class_that_reads_it_rightly_is_kept(tmp_path):
    write_tokenizer(str(tmp_path), made("Qwen2Tokenizer"), config=config_beside(tmp_path, "qwen2"))
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == "Qwen2Tokenizer"


def test_what_is_put_around_a_text_counts(tmp_path, monkeypatch):
    """A classifier's texts begin with BOS and end with EOS; a reader that leaves them out splits every line alike."""
    tokenizer = closing_texts(copy.deepcopy(made("byte-level BPE, Llama 3's words")))
    config = config_beside(tmp_path / "out", "llama")
    write_tokenizer(str(tmp_path / "out"), tokenizer, config=config)
    assert everything_of(AutoTokenizer.from_pretrained(tmp_path / "out")) == everything_of(tokenizer)
    bare = made("byte-level BPE, Llama 3's words")
    monkeypatch.setattr(exporting.AutoTokenizer, "from_pretrained", lambda *_, **__: bare)
    with pytest.raises(ConfigError, match="into other tokens"):
        require_readable(tokenizer, config=config)


def test_special_tokens_are_those_of_the_run_though_a_class_has_defaults_of_its_own(tmp_path):
    """Qwen2Tokenizer splits as this one and pads with <|endoftext|>, which is an ordinary control token here."""
    tokenizer = copy.deepcopy(made("byte-level BPE, Qwen 2's words and control tokens"))
    assert tokenizer.unk_token is None
    write_tokenizer(str(tmp_path), tokenizer, config=config_beside(tmp_path, "qwen2"))
    assert everything_of(AutoTokenizer.from_pretrained(tmp_path)) == everything_of(tokenizer)


def test_several_templates_are_files_of_no_folder(tmp_path):
    tokenizer = copy.deepcopy(made("Unigram"))
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "x{{ messages[0].content }}"}
    write_tokenizer(str(tmp_path), tokenizer)
    assert not any(path.is_dir() for path in tmp_path.iterdir())
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_one_that_no_form_is_read_as_is_refused_in_a_sentence(tmp_path, monkeypatch):
    """As with a transformers that replaces the class of every folder (5.10)."""
    monkeypatch.setattr(exporting, "UNNAMED", "PreTrainedTokenizerFast")
    config = config_beside(tmp_path / "config", "qwen2")
    with pytest.raises(ConfigError) as caught:
        require_readable(made("Unigram"), config=config)
    text = str(caught.value)
    assert text.startswith("model.tokenizer_path=")
    assert "beside a config.json of model_type=qwen2, transformers reads this tokenizer otherwise" in text
    assert text.endswith(".")
    assert "\n" not in text
    with pytest.raises(ConfigError):
        write_tokenizer(str(tmp_path / "out"), made("Unigram"), config=config)
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_lines_of_the_run_are_compared_too(tmp_path, monkeypatch):
    """What the hard lines do not tell apart may differ in one line of the data: capitals here."""
    monkeypatch.setattr(exporting, "HARD_LINES", ("abc",))
    tokenizer = copy.deepcopy(made("Qwen2Tokenizer"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    config = config_beside(tmp_path / "config", "qwen2")
    for number, lines in enumerate(([], ["abc", "Abc"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tokenizer(str(folder), tokenizer, config=config, lines=lines)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == ("" if lines else "Qwen2Tokenizer")


def folder_of(place, tokenizer, *, model_type, named):
    """A folder as an earlier version of this program or transformers 4 left it."""
    tokenizer.save_pretrained(place)
    config_beside(place, model_type)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    settings |= {"tokenizer_class": named} if named is not None else {}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


def ids_of(tokenizer):
    return [tokenizer(line, add_special_tokens=False)["input_ids"] for line in LINES]


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "GPT2TokenizerFast"])
@pytest.mark.parametrize("kind", ["byte-level BPE, GPT-2's words", "SentencePiece's BPE"])
def test_a_file_is_taken_as_it_is_where_transformers_puts_another_class_in_place_of_the_named(
    tmp_path, caplog, kind, named
):
    """transformers 4, and this program's earlier exports, mean tokenizer.json."""
    folder = folder_of(tmp_path, made(kind), model_type="qwen2", named=named)
    assert ids_of(AutoTokenizer.from_pretrained(folder)) != ids_of(made(kind)), "else there is nothing to choose"
    with caplog.at_level(logging.WARNING):
        found = load_tokenizer(str(folder), revision=None, chat_template_path=None)
    assert ids_of(found) == ids_of(made(kind))
    assert found.chat_template == made(kind).chat_template
    (said,) = [record.getMessage() for record in caplog.records if "tokenizer" in record.name]
    assert f"names {named}, and transformers reads it as Qwen2Tokenizer" in said


@pytest.mark.parametrize("named", ["Qwen2Tokenizer", None])
def test_the_class_that_a_folder_names_or_leaves_to_its_type_is_taken_and_the_difference_is_said(
    tmp_path, caplog, named
):
    """Everybody who loads the folder gets it."""
    folder = folder_of(tmp_path, made("byte-level BPE, GPT-2's words"), model_type="qwen3", named=named)
    with caplog.at_level(logging.WARNING):
        found = load_tokenizer(str(folder), revision=None, chat_template_path=None)
    assert ids_of(found) == ids_of(AutoTokenizer.from_pretrained(folder))
    (said,) = [record.getMessage() for record in caplog.records if "tokenizer" in record.name]
    assert "splits" in said
    assert "otherwise than transformers' Qwen2Tokenizer" in said


def test_nothing_is_said_of_a_class_that_splits_as_its_file(tmp_path, caplog):
    folder = folder_of(tmp_path, made("Qwen2Tokenizer"), model_type="qwen2", named="Qwen2TokenizerFast")
    with caplog.at_level(logging.WARNING):
        load_tokenizer(str(folder), revision=None, chat_template_path=None)
        load_tokenizer(SHIPPED, revision=None, chat_template_path=None)
    assert not [record for record in caplog.records if record.name.startswith("tpu_experiments")]


RULES = {
    "digits": lambda words: words.replace(r"\p{N}{1,3}", r"\p{N}"),
    "blanks": lambda words: words.replace(r"\s+(?!\S)|", ""),
    "line ends": lambda words: words.replace(r"\s*[\r\n]+|", ""),
    "letters after a sign": lambda words: words.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{L}+"),
    "contractions": lambda words: words.replace("(?i:", "(?:"),
    "line ends after signs": lambda words: words.replace(r"[\r\n]*|", "|"),
}


@pytest.mark.parametrize("rule", RULES)
def test_hard_lines_tell_tokenizers_apart(rule):
    """Each rule of Llama 3's words, left out by itself, splits a hard line otherwise."""
    state = json.loads(made("byte-level BPE, Llama 3's words").backend_tokenizer.to_str())
    pattern = state["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    changed = RULES[rule](pattern["Regex"])
    assert changed != pattern["Regex"]
    words = [pre_tokenizers.Split(Regex(text), "isolated") for text in (pattern["Regex"], changed)]
    assert any(words[0].pre_tokenize_str(line) != words[1].pre_tokenize_str(line) for line in HARD_LINES)
