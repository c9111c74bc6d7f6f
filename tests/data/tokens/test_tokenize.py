"""Which tokens are learnt, under the templates of the supported models."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import small_tokenizers, templates
from tests.data.conversations import BUILT_IN, documents, real
from tests.data.small_tokenizers import TURN_MARKERS
from tpu_experiments.data.documents import Document, Refused
from tpu_experiments.data.tokens import tokenize
from tpu_experiments.data.tokens.chat import RenderedChat
from tpu_experiments.data.tokens.tokenize import CUT, LEARN, DocumentTokenizer, Tokens, flags_of, tokenize_apart

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
        markers = TURN_MARKERS if name in ("GEMMA3", "MISTRAL_V03") else ()  # plain text in v0.1 and v0.2
        return small_tokenizers.with_template(tokenizer, getattr(templates, name), *markers)

    return change


def one(tokenizer, document):
    [tokens] = DocumentTokenizer(tokenizer).tokenize([document])
    return tokens


def chat(messages, *, tokenizer):
    return one(tokenizer, Document("d1", messages=messages, place="line 3 of a.jsonl"))


def learnt(tokens, *, tokenizer):
    """Text of every run of learnt tokens."""
    pairs = itertools.groupby(zip(tokens.flags & LEARN, tokens.ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for is_learnt, run in pairs if is_learnt]


def test_text_is_learnt_but_for_bos(tokenizer):
    tokens = one(tokenizer, Document("d1", text="Bună ziua."))
    assert tokenizer.decode(tokens.ids) == "<s>Bună ziua.</s>"
    assert tokens.flags.tolist() == [0] + [LEARN] * (len(tokens.ids) - 1)
    assert tokens.document_id == "d1"
    assert (tokens.ids.dtype, tokens.flags.dtype) == (np.int32, np.uint8)


def test_bos_and_eos_in_a_text_are_not_doubled(tokenizer):
    document_tokenizer = DocumentTokenizer(tokenizer)
    marked, plain = document_tokenizer.tokenize([Document("d1", text="<s>Bună</s>"), Document("d2", text="Bună")])
    assert marked.ids.tolist() == plain.ids.tolist()
    assert tokenizer.decode(plain.ids) == "<s>Bună</s>"
    assert not document_tokenizer.counts


def test_text_without_bos_in_the_tokenizer(with_template):
    bare = with_template("CHATML")
    bare.bos_token = None
    tokens = one(bare, Document("d1", text="Bună"))
    assert bare.decode(tokens.ids) == "Bună</s>"
    assert (tokens.flags == LEARN).all()
    bare.eos_token = None
    assert one(bare, Document("d1", text="", place="line 3")) == Refused(
        "nothing_to_learn", "line 3", "has no token to learn.", is_bad_row=False
    )


def test_batches_change_nothing(tokenizer, monkeypatch):
    mixed = [d for pair in zip(documents(BUILT_IN), map(text_document, BUILT_IN), strict=True) for d in pair]
    mixed.append(Document("none", messages=(("user", "?"),), place="line 9"))
    at_once = DocumentTokenizer(tokenizer).tokenize(mixed)
    monkeypatch.setattr(tokenize, "_CALL_CHARACTERS", 30)
    in_parts = DocumentTokenizer(tokenizer).tokenize(mixed)
    assert len(at_once) == len(mixed)
    for document, first, second in zip(mixed[:-1], at_once, in_parts, strict=False):
        assert first.document_id == second.document_id == document.id
        assert first.ids.tolist() == second.ids.tolist() == one(tokenizer, document).ids.tolist()
        assert first.flags.tolist() == second.flags.tolist()
    assert at_once[-1] == in_parts[-1]
    assert DocumentTokenizer(tokenizer).tokenize([]) == []


def text_document(messages):
    return Document("text", text=" ".join(content for _, content in messages))


def test_options_of_an_earlier_call_do_not_linger(tokenizer):
    document = Document("d1", text="un text mai lung decât patru cuvinte")
    expected = one(tokenizer, document).ids.tolist()
    tokenizer("a b c", truncation=True, max_length=2, padding="max_length", split_special_tokens=True)
    assert one(tokenizer, document).ids.tolist() == expected


def test_pieces_may_begin_at_questions_after_an_answer(with_template):
    tokenizer = with_template("CHATML")
    tokens = chat((SYSTEM, *TWO_QUESTIONS), tokenizer=tokenizer)
    [cut] = np.flatnonzero(tokens.flags & CUT)
    assert tokenizer.decode(tokens.ids[cut:]).startswith("<|im_start|>user\nDar a Franței?")
    assert not np.any(one(tokenizer, Document("d1", text="a b c")).flags & CUT)


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
        assert tokens.ids.tolist().count(tokenizer.bos_token_id) == 1
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


def apart(document, *, tokenizer, rewritten="split"):
    """The learnt texts of each document that a document becomes, and the counts."""
    made = DocumentTokenizer(tokenizer)
    parts = tokenize_apart([document], tokenizer=made, rewritten=rewritten)
    return [(part.id, learnt(tokens, tokenizer=tokenizer)) for part, tokens in parts], +made.counts


def test_eos_is_learnt_without_an_end_marker(with_template):
    tokenizer = with_template("ALPACA")
    refused = chat(TWO_QUESTIONS, tokenizer=tokenizer)
    assert "the answer of turn 2 has no end before the next turn, so that it cannot be learnt" in refused.message
    found, counts = apart(Document("d", messages=TWO_QUESTIONS), tokenizer=tokenizer)
    assert found == [("d#2", ["București, pe Dâmbovița.</s>"]), ("d", ["Paris.</s>"])]
    assert counts == {"rewritten_answer_learnt_apart": 1, "answer_as_context": 1}


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
    refused = chat((SYSTEM, ("user", "?")), tokenizer=tokenizer)
    assert (refused.reason, refused.place, refused.is_bad_row) == ("no_answer", "line 3 of a.jsonl", False)
    assert refused.message.startswith("has no assistant turn to learn: its 2 turns are by system, user; ")


def test_template_that_refuses(with_template):
    refused = chat((("assistant", "Da."),), tokenizer=with_template("MISTRAL_V01"))
    assert (refused.reason, refused.place, refused.is_bad_row) == ("template", "line 3 of a.jsonl", True)
    assert refused.message.startswith("has 1 turns (assistant), which the chat template of ")
    assert "must alternate" in refused.message


def test_template_that_rewrites_earlier_turns(with_template):
    tokenizer = with_template("REWRITES")
    assert chat(TWO_QUESTIONS[:2], tokenizer=tokenizer).flags[-2] == LEARN
    refused = chat(TWO_QUESTIONS, tokenizer=tokenizer)
    assert (refused.reason, refused.is_bad_row) == ("template", True)
    assert "the answer of turn 2 is rendered otherwise when turns follow it" in refused.message
    found, _ = apart(Document("d", messages=TWO_QUESTIONS), tokenizer=tokenizer)
    assert found == [
        ("d#2", ["<think>\n\n</think>\n\nBucurești, pe Dâmbovița.<|im_end|>"]),
        ("d", ["<think>\n\n</think>\n\nParis.<|im_end|>"]),
    ]
    found, counts = apart(Document("d", messages=TWO_QUESTIONS), tokenizer=tokenizer, rewritten="context")
    assert found == [("d", ["<think>\n\n</think>\n\nParis.<|im_end|>"])]
    assert counts == {"rewritten_answer_not_learnt": 1, "answer_as_context": 1}


@pytest.mark.parametrize("name", ["CHATML", "MISTRAL_V02", "GEMMA3"])
def test_real_conversations(shared_data, with_template, name):
    tokenizer = with_template(name)
    marker = MARKERS[name][0]
    conversations = list(real(shared_data))[::20]
    for messages, tokens in zip(
        conversations, DocumentTokenizer(tokenizer).tokenize(documents(conversations)), strict=True
    ):
        answers = [text.strip() for role, text in messages if role == "assistant"]
        runs = learnt(tokens, tokenizer=tokenizer)
        assert [run.removesuffix(marker).strip() for run in runs] == answers
        assert all(run.endswith(marker) for run in runs)


TEXTS = st.text(st.sampled_from("abC ăș\n\t日🚀.</"), min_size=1, max_size=30)


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.mistral, small_tokenizers.gemma])
def test_flags_are_those_of_the_offsets(make):
    backend = make().backend_tokenizer

    @settings(deadline=None)
    @given(text=TEXTS, data=st.data())
    def check(text, data):
        borders = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=4, unique=True)))
        answers = [(begin, end) for begin, end in itertools.pairwise(borders) if begin < end][::2]
        encoding = backend.encode(text, add_special_tokens=False)
        flags = flags_of(encoding, rendered=RenderedChat(text, answers, []))
        # By definition: a token is learnt that shares a character with an answer. One without
        # characters of its own goes with the tokens around it.
        for (begin, end), flag in zip(encoding.offsets, flags.tolist(), strict=True):
            if begin < end:
                assert bool(flag) == any(begin < stop and end > start for start, stop in answers)

    check()


def test_one_answer_after_another_shares_no_token_with_a_question(tokenizer):
    tokens = one(tokenizer, Document("d1", messages=BUILT_IN[2]))
    assert isinstance(tokens, Tokens)
    assert not np.any((tokens.flags & LEARN > 0) & (tokens.flags & CUT > 0))


FIRST = (("assistant", "Bună ziua!"), ("user", "Care este capitala?"), ("assistant", "București."))


@pytest.mark.parametrize("name", ["CHATML", "QWEN25", "PHI3", "GENERATES_OTHERWISE"])
@pytest.mark.parametrize("has_system", [False, True])
def test_nothing_before_the_first_answer_is_learnt(with_template, name, has_system):
    tokenizer = with_template(name)
    messages = (SYSTEM, *FIRST) if has_system else FIRST
    runs = learnt(chat(messages, tokenizer=tokenizer), tokenizer=tokenizer)
    assert len(runs) == 2
    assert runs[0].startswith("Bună ziua!<|")
    assert runs[1].startswith("București.<|")


def test_conversations_that_begin_with_an_answer_are_counted(tokenizer):
    tokenize = DocumentTokenizer(tokenizer)
    tokenize.tokenize(documents([FIRST, (SYSTEM, *FIRST), FIRST[1:]]))
    assert +tokenize.counts == {"begins_with_answer": 2}


def test_a_part_of_a_conversation_that_a_template_refuses(tokenizer):
    asks = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found') }}{% endif %}" + templates.CHATML
    )
    tokenizer = small_tokenizers.with_template(tokenizer, asks, *TURN_MARKERS)
    refused = chat((SYSTEM, *FIRST), tokenizer=tokenizer)
    assert (refused.reason, refused.is_bad_row) == ("template", True)
    assert "No user query found" in refused.message


@pytest.mark.parametrize("name", ["CHATML", "QWEN25", "MISTRAL_V02", "GEMMA3"])
@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_answer_is_not_learnt(with_template, name, blank):
    tokenizer = with_template(name)
    tokenize = DocumentTokenizer(tokenizer)
    messages = (*TWO_QUESTIONS[:1], ("assistant", blank), *TWO_QUESTIONS[2:], ("user", "?"), ("assistant", blank))
    [tokens] = tokenize.tokenize(documents([messages]))
    assert learnt(tokens, tokenizer=tokenizer) == [f"Paris.{MARKERS[name][0]}"]
    assert +tokenize.counts == {"blank_answer_not_learnt": 1}, "the last turn is not even read"


def test_blank_answers_alone_are_none(tokenizer):
    refused = chat((("user", "?"), ("assistant", " ")), tokenizer=tokenizer)
    assert refused.reason == "no_answer"


@pytest.mark.parametrize("name", ["CHATML", "MISTRAL_V02", "GEMMA3"])
def test_an_answer_of_context_is_read_and_not_learnt(with_template, name):
    tokenizer = with_template(name)
    tokenize = DocumentTokenizer(tokenizer)
    [whole] = tokenize.tokenize(documents([TWO_QUESTIONS]))
    [tokens] = tokenize.tokenize([Document("0", messages=TWO_QUESTIONS, context=(1,))])
    assert tokens.ids.tolist() == whole.ids.tolist()
    assert learnt(tokens, tokenizer=tokenizer) == [f"Paris.{MARKERS[name][0]}"]
    assert +tokenize.counts == {"answer_as_context": 1}
    [short] = tokenize.tokenize([Document("0", messages=TWO_QUESTIONS, context=(3,))])
    assert learnt(short, tokenizer=tokenizer) == [f"București, pe Dâmbovița.{MARKERS[name][0]}"]
    [none] = tokenize.tokenize([Document("0", messages=TWO_QUESTIONS, context=(1, 3))])
    assert none.reason == "no_answer"


def test_joined_answers_are_learnt_when_all_of_them_are(with_template):
    tokenizer = with_template("MISTRAL_V02")
    messages = (("user", "?"), ("assistant", "A"), ("assistant", "B"), ("user", "?"), ("assistant", "C"))
    tokenize = DocumentTokenizer(tokenizer)
    found = [
        learnt(tokens, tokenizer=tokenizer)
        for tokens in tokenize.tokenize(
            [
                Document("0", messages=messages),
                Document("1", messages=messages, context=(1,)),
                Document("2", messages=tuple((r, " " if c == "A" else c) for r, c in messages)),
            ]
        )
    ]
    assert found == [["A\n\nB</s>", "C</s>"], ["C</s>"], ["B</s>", "C</s>"]]
