"""Which tokens are learnt, token by token: against transformers' own masks, and for any contents."""

import functools
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data import templates
from tests.data.conftest import TOKENIZER
from tests.data.conversations import BUILT_IN, documents, real
from tests.data.small_tokenizers import TURN_MARKERS, byte_level, gemma, mistral, with_template
from tests.tiers import only
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens.chat import FORMS
from tpu_experiments.data.tokens.tokenize import CUT, LEARN, DocumentTokenizer, Tokens
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS, load_tokenizer

MARKERS = [*TURN_MARKERS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
OWN = ("CHATML", "MISTRAL_V01", "MISTRAL_V02", "MISTRAL_V03")
# Of TRL's template: which blanks it counts as the assistant's. No model generates either: the first is
# in the generation prompt, the last comes after the end-of-turn marker, where generation stops.
TRL = {"gemma3": "last", "llama3": "none", "qwen2_5": "first and last", "qwen3": "last"}


def test_masks_are_transformers_own_on_built_in_conversations(tokenizer):
    for name in (*OWN, *TRL):
        assert_same_masks(name, tokenizer, BUILT_IN)


@pytest.mark.parametrize("name", only([*list(OWN)[:2], "qwen3"], [*OWN, *TRL]))
def test_masks_are_transformers_own_on_real_conversations(shared_data, tokenizer, name):
    assert_same_masks(name, tokenizer, list(real(shared_data)))


@pytest.mark.parametrize("make", [byte_level, mistral, gemma])
@pytest.mark.parametrize("name", [*OWN, *TRL])
def test_masks_are_transformers_own_with_other_tokenizers(make, name):
    if (make, name) == (byte_level, "MISTRAL_V03"):
        pytest.skip("transformers learns nothing here: it looks for the answer's first character, a trimmed blank")
    if make is mistral and name in ("gemma3", "qwen2_5", "qwen3") and not version("transformers").startswith("5.23."):
        pytest.skip("transformers 5.24 also learns the piece of a blank that SentencePiece puts behind the end marker")
    assert_same_masks(name, make(), BUILT_IN)


def test_an_answer_that_begins_with_a_blank_in_no_tokens_characters():
    tokenizer = with_template(byte_level(), templates.MISTRAL_V03, *MARKERS)
    [tokens] = DocumentTokenizer(tokenizer).tokenize(documents(BUILT_IN[:1]))
    assert tokenizer.decode(tokens.ids[(tokens.flags & LEARN) > 0]) == " București, pe Dâmbovița.</s>"


def assert_same_masks(name, tokenizer, conversations):
    plain, tagged = pair_of_templates(name)
    ours, theirs = with_template(tokenizer, plain, *MARKERS), with_template(tokenizer, tagged, *MARKERS)
    for document, tokens in zip(conversations, DocumentTokenizer(ours).tokenize(documents(conversations)), strict=True):
        assert isinstance(tokens, Tokens)
        last = 1 + max(i for i, (role, _) in enumerate(document) if role == "assistant")
        form = FORMS[2] if "MISTRAL" in name else FORMS[0]
        expected = theirs.apply_chat_template(
            [{"role": role, "content": content} for role, content in form(document[:last])],
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
        )
        assert expected["input_ids"] == tokens.ids.tolist()
        mask = without_blanks(expected["assistant_masks"], tokens.ids, tokenizer=ours, which=TRL.get(name, "none"))
        assert mask.tolist() == (tokens.flags & LEARN).tolist()


def pair_of_templates(name):
    """The template that we read, and the one with tags that transformers reads."""
    if name in OWN:
        return getattr(templates, name), getattr(templates, f"{name}_TAGGED")
    # Not imported: that takes seconds, and imports torch_xla through accelerate.
    trl = find_spec("trl")
    if trl is None:
        pytest.skip("trl is not installed; its templates have tags around what an assistant generates")
    folder = Path(trl.submodule_search_locations[0]) / "chat_templates"
    tagged = (folder / f"{name}_training.jinja").read_text()
    # Qwen3's own template drops what an assistant thought as soon as another turn follows.
    return tagged if name == "qwen3" else (folder / f"{name}.jinja").read_text(), tagged


def without_blanks(mask, ids, *, tokenizer, which):
    """Their mask without the one blank token at the borders of each run that TRL includes."""
    mask = np.array(mask, np.uint8)
    steps = np.diff(mask.astype(np.int8), prepend=0, append=0)
    for first, last in zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1) - 1, strict=True):
        for border, token in (("first", first), ("last", last)):
            if border in which:
                assert tokenizer.decode([ids[token]]).strip() == ""
                mask[token] = 0
    return mask


# Of each template, independent of how it is read: the text around a user's and an assistant's content.
LAYOUTS = {
    "CHATML": ("", ("<|im_start|>user\n", "<|im_end|>\n"), ("<|im_start|>assistant\n", "<|im_end|>\n")),
    "MISTRAL_V02": ("<s>", ("[INST] ", " [/INST]"), ("", "</s>")),
    "GEMMA3": (
        "<s>",
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
    ),
    "instruction_response": ("<s>", ("### Instruction:\n", "\n\n"), ("### Response:\n", "</s>\n\n")),
    "plain": ("<s>", ("User: ", "\n"), ("Assistant: ", "</s>\n")),
    "raw": ("<s>", ("", ""), ("", "</s>")),
}
WRITTEN = ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "<s>", "<end_of_turn>", "[INST]", "\ufdd2", "ș", "🚀", "\n"]
CONTENTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.lists(
    st.sampled_from([*WRITTEN, "a", " ", "Ț"]), max_size=6
).map("".join)


@functools.cache
def prepared(name):
    tokenizer = load_tokenizer(str(TOKENIZER), revision=None, chat_template_path=None)
    template = getattr(templates, name, None) or (CHAT_FORMATS / f"{name}.jinja").read_text()
    changed = with_template(tokenizer, template, *(TURN_MARKERS if name == "GEMMA3" else ()))
    return changed, DocumentTokenizer(changed)


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(sorted(LAYOUTS)), pairs=st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3))
@example(name="CHATML", pairs=[("<|im_end|>\n<|im_start|>assistant\nDa", "<|im_start|>")])
@example(name="GEMMA3", pairs=[(" <end_of_turn>", "\n"), ("", "🚀")])
@example(name="CHATML", pairs=[("?", "Da"), ("?", " ")])
def test_answers_are_learnt_and_nothing_else_whatever_they_contain(name, pairs):
    tokenizer, document_tokenizer = prepared(name)
    trim = str.strip if name == "GEMMA3" else str
    if name == "raw":  # nothing stands between a prompt and its answer: a prompt that a source writes ends its line
        pairs = [(f"{question}:\n", answer.lstrip()) for question, answer in pairs]
    while pairs and not pairs[-1][1].strip():  # nothing is learnt from there on
        pairs = pairs[:-1]
    if not pairs:
        return
    text, asked, learnt, blank = LAYOUTS[name][0], [], [], []
    for question, answer in pairs:
        for content, kind in ((trim(question), 1), (trim(answer), 2)):
            before, after = LAYOUTS[name][kind]
            begin = len((text + before).encode())
            text += before + content + after
            end = begin + len((content + after.rstrip() * (kind == 2)).encode())
            (asked if kind == 1 else learnt if content.strip() else blank).append((begin, end))
    messages = tuple((role, c) for pair in pairs for role, c in zip(("user", "assistant"), pair, strict=True))
    [tokens] = document_tokenizer.tokenize([Document("d", messages=messages)])
    lengths_L = np.array([byte_length(token, tokenizer=tokenizer) for token in tokens.ids.tolist()])
    assert tokenizer.decode(tokens.ids) == text
    flag_of_byte = np.repeat(tokens.flags & LEARN, lengths_L)
    is_special = np.repeat(np.isin(tokens.ids, tokenizer.all_special_ids), lengths_L)
    assert len(flag_of_byte) == len(text.encode())
    for begin, end in learnt:
        assert flag_of_byte[begin:end].all()
    for begin, end in asked:
        assert not flag_of_byte[begin:end].any()
        assert not is_special[begin:end].any()
    for begin, end in blank:
        assert not flag_of_byte[begin:end].any()
    # Tokens of the marks around may share no more than blanks with an answer.
    for begin, end in learnt:
        flag_of_byte[begin:end] = 0
    assert bytes(np.frombuffer(text.encode(), np.uint8)[flag_of_byte > 0]).strip() == b""
    assert np.count_nonzero(tokens.flags & CUT) == len(pairs) - 1


def byte_length(token_id, *, tokenizer):
    """Bytes of a token; a byte-level vocabulary writes each byte as one character."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    return len(token.encode()) if token_id in tokenizer.all_special_ids else len(token)
