"""Which tokens are learnt, under the templates of the supported models."""

import copy
import itertools

import pytest

from tests.data import templates
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Document
from tpu_experiments.data.sources import SourceSpec, read_documents
from tpu_experiments.data.tokenize import tokenize_document

TWO_QUESTIONS = (
    ("user", "Care este capitala?"),
    ("assistant", "București, pe Dâmbovița."),
    ("user", "Dar a Franței?"),
    ("assistant", "Paris."),
)
SYSTEM = ("system", "Răspunde scurt.")

# Template, end-of-turn marker, what comes before an answer within its span.
MARKERS = {
    "CHATML": ("<|im_end|>", ""),
    "QWEN25": ("<|im_end|>", ""),
    "MISTRAL_V01": ("</s>", ""),
    "MISTRAL_V02": ("</s>", ""),
    "MISTRAL_V03": ("</s>", " "),
    "GEMMA3": ("<end_of_turn>", ""),
}


@pytest.fixture
def with_template(tokenizer):
    def change(name):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = getattr(templates, name)
        turn_markers = ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
        if name in ("GEMMA3", "MISTRAL_V03"):  # plain text in v0.1 and v0.2
            changed.add_special_tokens({"additional_special_tokens": turn_markers})
        return changed

    return change


def chat(messages, *, tokenizer):
    return tokenize_document(Document("d1", messages=messages), tokenizer=tokenizer, source="x")


def learnt(tokens, *, tokenizer):
    """Text of every run of learnt tokens."""
    pairs = itertools.groupby(zip(tokens.learn, tokens.ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for is_learnt, run in pairs if is_learnt]


def test_text_is_learnt_but_for_bos(tokenizer):
    tokens = tokenize_document(Document("d1", text="Bună ziua."), tokenizer=tokenizer)
    assert tokenizer.decode(tokens.ids) == "<s>Bună ziua.</s>"
    assert tokens.learn == [False] + [True] * (len(tokens.ids) - 1)
    assert tokens.document_id == "d1"


def test_bos_and_eos_in_a_text_are_not_doubled(tokenizer):
    tokens = tokenize_document(Document("d1", text="<s>Bună</s>"), tokenizer=tokenizer)
    assert tokenizer.decode(tokens.ids) == "<s>Bună</s>"


def test_text_without_bos_in_the_tokenizer(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = None
    tokens = tokenize_document(Document("d1", text="Bună"), tokenizer=bare)
    assert bare.decode(tokens.ids) == "Bună</s>"
    assert all(tokens.learn)


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("has_system", [False, True], ids=["plain", "system"])
def test_answers_and_their_end_markers_are_learnt(with_template, name, has_system):
    tokenizer = with_template(name)
    marker, before = MARKERS[name]
    messages = (SYSTEM, *TWO_QUESTIONS) if has_system else TWO_QUESTIONS
    tokens = chat(messages, tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer) == [
        f"{before}București, pe Dâmbovița.{marker}",
        f"{before}Paris.{marker}",
    ]
    text = tokenizer.decode(tokens.ids)
    assert text.count("Răspunde scurt.") == has_system
    if "bos_token" in tokenizer.chat_template:
        assert tokens.ids.count(tokenizer.bos_token_id) == 1
        assert tokens.ids[0] == tokenizer.bos_token_id
    else:
        assert tokenizer.bos_token_id not in tokens.ids


@pytest.mark.parametrize("name", ["MISTRAL_V01", "MISTRAL_V02", "MISTRAL_V03"])
def test_system_text_is_put_before_the_first_question(with_template, name):
    tokenizer = with_template(name)
    text = tokenizer.decode(chat((SYSTEM, *TWO_QUESTIONS), tokenizer=tokenizer).ids)
    assert text.startswith("<s>[INST] Răspunde scurt.\n\nCare este capitala?")


@pytest.mark.parametrize("name", ["MISTRAL_V01", "GEMMA3"])
def test_turns_of_one_role_are_merged_where_they_must_alternate(with_template, name):
    tokenizer = with_template(name)
    twice = (("user", "Una."), ("user", "Alta."), ("assistant", "Da."), ("assistant", "Nu."))
    tokens = chat(twice, tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer) == [f"Da.\n\nNu.{MARKERS[name][0]}"]
    assert "Una.\n\nAlta." in tokenizer.decode(tokens.ids)


def test_turns_of_one_role_stay_where_they_may(with_template):
    tokenizer = with_template("CHATML")
    tokens = chat((("user", "Da?"), ("assistant", "Da."), ("assistant", "Nu.")), tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer) == ["Da.<|im_end|>", "Nu.<|im_end|>"]


def test_eos_is_learnt_without_an_end_marker(with_template):
    tokenizer = with_template("ALPACA")
    tokens = chat(TWO_QUESTIONS, tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer) == ["București, pe Dâmbovița.", "Paris.</s>"]


def test_shipped_template(tokenizer):
    tokens = chat(TWO_QUESTIONS, tokenizer=tokenizer)
    assert tokenizer.decode(tokens.ids) == (
        "<s><|im_start|>user\nCare este capitala?<|im_end|>\n"
        "<|im_start|>assistant\nBucurești, pe Dâmbovița.<|im_end|>\n"
        "<|im_start|>user\nDar a Franței?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
    )
    assert learnt(tokens, tokenizer=tokenizer)[1] == "Paris.<|im_end|>"


def test_an_answer_that_repeats_the_question(tokenizer):
    echo = (("user", "Paris."), ("assistant", "Paris."), ("user", "Paris."))
    tokens = chat(echo, tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer) == ["Paris.<|im_end|>"]
    assert tokenizer.decode(tokens.ids).count("Paris.") == 2  # the open question is left out


def test_several_tokens_of_one_character_are_learnt(tokenizer):
    tokens = chat((("user", "?"), ("assistant", "🚀日本")), tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer) == ["🚀日本<|im_end|>"]


def test_conversation_that_begins_with_an_answer(tokenizer):
    tokens = chat((("assistant", "Bună!"),), tokenizer=tokenizer)
    assert learnt(tokens, tokenizer=tokenizer)[0].endswith("Bună!<|im_end|>")


def test_no_assistant_turn(tokenizer):
    with pytest.raises(ConfigError, match=r"^data\.x; document d1 has no assistant turn to learn: "):
        chat((SYSTEM, ("user", "?")), tokenizer=tokenizer)


def test_template_that_refuses(with_template):
    with pytest.raises(ConfigError, match=r"document d1; .* refuses its 1 turns .*must alternate"):
        chat((("assistant", "Da."),), tokenizer=with_template("MISTRAL_V01"))


def test_template_that_rewrites_earlier_turns(with_template):
    tokenizer = with_template("REWRITES")
    assert chat(TWO_QUESTIONS[:2], tokenizer=tokenizer).learn[-2]
    with pytest.raises(ConfigError, match=r"renders turn 2 of 4 differently .*chat_template_path"):
        chat(TWO_QUESTIONS, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["CHATML", "MISTRAL_V02", "GEMMA3"])
def test_real_conversations(shared_data, with_template, name):
    tokenizer = with_template(name)
    marker = MARKERS[name][0]
    spec = SourceSpec("x", str(shared_data / "chat_messages.jsonl"), format="messages")
    for document in itertools.islice(read_documents(spec), 0, None, 20):
        tokens = tokenize_document(document, tokenizer=tokenizer)
        answers = [text.strip() for role, text in document.messages if role == "assistant"]
        runs = learnt(tokens, tokenizer=tokenizer)
        assert [run.removesuffix(marker).strip() for run in runs] == answers
        assert all(run.endswith(marker) for run in runs)
