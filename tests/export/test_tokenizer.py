"""The adapter's folder by itself gives the tokenizer and the chat template that were trained with."""

import shutil

import pytest
from transformers import AutoTokenizer

from tests.tiers import only
from tests.training.runs import finished
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens.tokenize import DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS, load_tokenizer, template_hash, tokenizer_hash

pytestmark = [
    pytest.mark.xla,
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
SMALL = ("hw.runtime=eager", "trainer.max_stage_steps=1", "debug=smoke", "data=sample_chat", "curriculum=single")
TOKENIZER = "tpu_experiments/samples/tokenizer"
OWN = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '> ' + m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Care este capitala?"},
    {"role": "assistant", "content": "București."},
    {"role": "user", "content": "Dar a Franței?"},
    {"role": "assistant", "content": "Paris."},
]


@pytest.mark.parametrize("given", only(["file"], ["tokenizer", "plain", "llama2", "file"]))
def test_the_template_beside_the_adapter_is_the_trained_one(tmp_path, given):
    template = tmp_path / "own.jinja"
    template.write_text(OWN, encoding="utf-8")
    word = f"model.chat_template_path={template}" if given == "file" else f"model.chat_format={given}"
    finished(*SMALL, word, "name=run", output_dir=tmp_path / "out")
    alone = tmp_path / "elsewhere"
    shutil.move(tmp_path / "out" / "run" / "adapter", alone)
    template.unlink()
    trained = load_tokenizer(
        TOKENIZER,
        revision=None,
        chat_template_path=None,
        chat_format="tokenizer" if given == "file" else given,
    )
    if given == "file":
        trained.chat_template = OWN
    found = AutoTokenizer.from_pretrained(alone)
    golden = {"file": OWN, "plain": (CHAT_FORMATS / "plain.jinja").read_text(encoding="utf-8")}
    assert found.chat_template == golden.get(given, trained.chat_template)
    assert (template_hash(found), tokenizer_hash(found)) == (template_hash(trained), tokenizer_hash(trained))
    conversation = Document("x", messages=tuple((turn["role"], turn["content"]) for turn in CHAT))
    [tokens] = DocumentTokenizer(trained).tokenize([conversation])
    assert found.apply_chat_template(CHAT, return_dict=False) == tokens.ids.tolist()


def test_peft_takes_model_and_tokenizer_from_that_folder_alone(tmp_path):
    from peft import AutoPeftModelForCausalLM

    result = finished(*SMALL, "name=run", output_dir=tmp_path)
    model = AutoPeftModelForCausalLM.from_pretrained(result["adapter_path"])
    tokenizer = AutoTokenizer.from_pretrained(result["adapter_path"])
    ids = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert model(input_ids=ids).logits.shape[1] == ids.shape[1]
