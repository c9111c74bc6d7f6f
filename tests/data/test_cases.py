"""The development cases of rows, small files that were once read wrongly, beside the repository: each read right."""

import pytest

from tests.data.readers import recognised, rows_of, spec_for
from tests.data.small_tokenizers import byte_level, with_template
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.cleaning.duplicates import exact_key
from tpu_experiments.data.documents import Document, Refused
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer, Tokens
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS


@pytest.fixture
def cases(shared_data):
    folder = shared_data.parent / "cases" / "rows"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; it holds cases that are not part of the repository")
    return folder


@pytest.fixture
def qwen3():
    return with_template(byte_level(), (CHAT_FORMATS / "qwen3.jinja").read_text(), "<|im_start|>", "<|im_end|>")


def documents_in(path, kind="chat"):
    """The documents and refused rows of a file whose format is recognised."""
    spec = recognised(spec_for(path, kind=kind, format="auto"))
    return [row if isinstance(row, Refused) else document_of(row, spec=spec) for row in rows_of(spec)]


def turns_in(path):
    found = documents_in(path)
    assert all(isinstance(document, Document) for document in found), found
    return [document.messages for document in found]


def learnt(tokenizer, document):
    """The text of each run of learnt tokens."""
    [tokens] = DocumentTokenizer(tokenizer).tokenize([document])
    assert isinstance(tokens, Tokens), tokens
    runs, before = [], False
    for token, flag in zip(tokens.ids.tolist(), (tokens.flags & LEARN).tolist(), strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = bool(flag)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("name", "system"), [("sharegpt_row_system", "Ești piratul 0."), ("messages_row_system", "Ești")]
)
def test_a_rows_system_text_is_a_turn(cases, name, system):
    role, content = turns_in(cases / f"{name}.jsonl")[0][0]
    assert role == "system"
    assert content.startswith(system)


def test_earlier_turns_come_before_the_instruction(cases):
    assert turns_in(cases / "alpaca_system_history.jsonl")[0] == (
        ("system", "Ești meteorolog."),
        ("user", "Câte grade sunt la Sibiu?"),
        ("assistant", "1 grade."),
        ("user", "Și la Brașov, ora 0?"),
        ("assistant", "0 grade."),
    )


def test_reasoning_is_learnt(cases, qwen3):
    first, *_ = documents_in(cases / "reasoning_content.jsonl")
    assert learnt(qwen3, first) == ["<think>\n0*3 = 0.\n</think>\n\n0.<|im_end|>"]


def test_reasoning_before_a_call_is_learnt(cases, qwen3):
    call, answer = learnt(qwen3, *documents_in(cases / "tools_reasoning.jsonl"))
    assert call.startswith("<think>\nTrebuie să caut.\n</think>\n\n<tool_call>\n")
    assert call.endswith("</tool_call><|im_end|>")
    assert answer.endswith("Bună!<|im_end|>")


@pytest.mark.parametrize("name", ["turn_loss", "turn_loss_weight", "turn_trainable"])
def test_a_marked_answer_is_not_learnt(cases, qwen3, name):
    [answer] = learnt(qwen3, *documents_in(cases / f"{name}.jsonl"))
    assert answer.endswith("Doi.<|im_end|>")


def test_an_old_function_call_is_a_call_of_a_tool(cases, qwen3):
    [document] = documents_in(cases / "legacy_function_call.jsonl")
    assert [role for role, _ in document.messages] == ["user", "assistant", "tool", "assistant"]
    call, answer = learnt(qwen3, document)
    assert '"name": "vreme"' in call
    assert '"oras": "Iași"' in call
    assert answer.endswith("12 grade.<|im_end|>")


@pytest.mark.parametrize(("name", "field"), [("images", "'images'"), ("question_choices_answer", "'choices'")])
def test_what_cannot_be_kept_is_refused_by_name(cases, name, field):
    [refused] = documents_in(cases / f"{name}.jsonl")
    assert isinstance(refused, Refused)
    assert field in refused.message


def test_both_answers_have_their_end(cases, qwen3):
    first, second = learnt(qwen3, *documents_in(cases / "two_answers.jsonl"))
    assert first.endswith("Bine! 👍🏽 <|im_end|>")
    assert second.endswith("1. România\n<|im_end|>")


def test_calls_are_learnt_and_results_are_not(cases, qwen3):
    call, answer = learnt(qwen3, *documents_in(cases / "tools.jsonl"))
    assert '"name": "caută"' in call
    assert "ș" not in answer.removesuffix("Bună!<|im_end|>")


def test_turns_as_text_in_a_cell_are_read(cases):
    assert turns_in(cases / "messages_as_json_text.csv")[0] == (("user", "Salut, tu"), ("assistant", "Bună 0"))


def test_a_number_is_named_with_its_type(cases):
    [refused] = documents_in(cases / "output_is_a_number.jsonl")
    assert isinstance(refused, Refused)
    assert "int in 'output'" in refused.message


def test_an_empty_instruction_leaves_no_blank_lines(cases):
    assert turns_in(cases / "empty_instruction.jsonl") == [(("user", "Salut"), ("assistant", "Bună"))]


def test_rows_that_differ_in_their_system_text_are_no_duplicates(cases):
    found = documents_in(cases / "differ_in_system_alone.jsonl")
    assert len({exact_key(document) for document in found}) == len(found) > 1


def test_a_chat_rendered_as_text_is_no_chat(cases):
    with pytest.raises(ConfigError, match="kind=text"):
        documents_in(cases / "rendered_chat_as_text.jsonl")
