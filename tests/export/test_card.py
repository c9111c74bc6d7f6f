"""The card of a form: the Hub reads its metadata, and its lines are Python that names what the files need."""

import ast
import re

import pytest
from huggingface_hub import ModelCard

from tpu_experiments.export.card import Card, index_page, page

COMPARISON = "# Parity with the trained model\n\n| form | verdict |\n| --- | --- |\n| x | ok |\n"
FORMS = ("peft", "merged", "int8", "nf4", "gguf")
ON_HUB = {"base": "mistralai/Mistral-7B-v0.1", "is_on_hub": True, "revision": "abc123"}


def written(form, *, place="/somewhere/export", files=(), subfolder=None, **more):
    card = Card(form, "ro", **({"base": "/data/base", "rank": 8} | more))
    return page(card, place=place, comparison=COMPARISON, files=files, subfolder=subfolder)


def code_of(text):
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return code


@pytest.mark.parametrize(
    ("form", "relation", "library", "tag"),
    [
        ("peft", "adapter", "peft", "lora"),
        ("merged", "finetune", "transformers", "merged"),
        ("int8", "quantized", "transformers", "int8"),
        ("nf4", "quantized", "transformers", "nf4"),
        ("gguf", "quantized", "gguf", "gguf"),
    ],
)
def test_the_hub_reads_its_metadata(form, relation, library, tag):
    data = ModelCard(written(form, datasets=["org/set"], languages=["ro"], **ON_HUB)).data
    assert (data.base_model, data.base_model_relation) == (ON_HUB["base"], relation)
    assert (data.library_name, data.pipeline_tag) == (library, "text-generation")
    assert data.tags == ["tpu_experiments", tag]
    assert (data.datasets, data.language) == (["org/set"], ["ro"])


@pytest.mark.parametrize("form", FORMS)
def test_what_the_run_does_not_know_is_left_out(form):
    found = ModelCard(written(form)).data.to_dict()
    assert found.keys() == {"library_name", "pipeline_tag", "tags"}


@pytest.mark.parametrize("subfolder", [None, "form"])
@pytest.mark.parametrize("form", FORMS[:-1])
def test_its_lines_name_place_and_base(form, subfolder):
    text = written(form, place="me/ro", subfolder=subfolder, **ON_HUB)
    code = code_of(text)
    ast.parse(code)
    assert code.count('"me/ro"') == 2
    assert code.count('subfolder="form"') == (2 if subfolder else 0)
    if form == "peft":
        assert 'from_pretrained("mistralai/Mistral-7B-v0.1", dtype="bfloat16", revision="abc123")' in code
        assert "--max-lora-rank 8 --lora-modules adapter=" in text
    else:
        assert "mistralai" not in code
    assert ("hf download me/ro" in text) == (subfolder is not None)
    assert text.endswith("## Parity with the trained model\n\n| form | verdict |\n| --- | --- |\n| x | ok |\n")


def test_an_adapter_over_nf4_loads_its_base_so():
    text = written("peft", held="nf4", double_quant=False, dtype="float32")
    assert "bnb_4bit_use_double_quant=False" in code_of(text)
    assert "quantization_config=nf4" in code_of(text)
    assert "trained over this base in NF4, and these lines load it so" in text


def test_an_adapter_over_int8_says_what_its_lines_load():
    text = written("peft", held="int8")
    assert "quantization_config" not in code_of(text)
    assert "in int8, one scale per output feature. These lines load the base in bfloat16" in text


def test_dora_is_not_for_vllm():
    assert "vllm serve" not in written("peft", is_dora=True, unfit="vLLM has no DoRA")
    assert "A DoRA adapter of rank 8" in written("peft", is_dora=True, unfit="vLLM has no DoRA")


def test_code_of_the_model_is_named():
    text = written("merged", runs_code=True)
    assert code_of(text).count("trust_remote_code=True") == 2
    assert "runs with your rights" in text
    assert "trust_remote_code" not in written("merged")


def test_a_local_base_is_said_to_be_local():
    sentence = "`/data/base` is a folder of the machine that wrote this"
    assert sentence in written("peft")
    assert sentence not in written("peft", **ON_HUB)


def test_files_in_cloud_storage_are_to_be_copied():
    assert "\n\nCopy `gs://bkt/x` to a local folder first" in written("merged", place="gs://bkt/x")
    assert "Copy" not in written("merged")


def test_gguf_names_its_files():
    text = written("gguf", files=("ro-q8_0.gguf", "ro-f16.gguf", "parity.md"))
    assert re.findall(r"llama-cli -m (\S+)", text) == [
        "/somewhere/export/ro-f16.gguf",
        "/somewhere/export/ro-q8_0.gguf",
    ]


def test_notes_stand_in_the_card():
    assert "\n\n2 weights stay.\n\n" in written("nf4", notes=["2 weights stay."])


def test_a_repository_of_several_forms_has_a_page_of_all():
    cards = [Card(form, "ro", **ON_HUB, rank=8) for form in ("peft", "int8")]
    text = index_page(cards, comparisons=[COMPARISON, COMPARISON])
    data = ModelCard(text).data
    assert data.base_model == ON_HUB["base"]
    assert data.to_dict().keys() == {"base_model", "pipeline_tag", "tags"}  # neither library nor relation is of all
    assert data.tags == ["tpu_experiments", "lora", "int8"]
    assert "## [peft](peft)" in text
    assert "## [int8](int8)" in text
    assert text.count("### Parity with the trained model") == 2


def test_a_secret_in_a_path_is_hidden():
    assert "s3cr3t" not in written("peft", base="https://user:s3cr3t@host/base")
