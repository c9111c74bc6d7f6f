"""Where the answers lie in a rendered text, found once for each sequence of roles."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import templates
from tests.data.conversations import BUILT_IN, real
from tests.data.small_tokenizers import TURN_MARKERS, with_template
from tpu_experiments.data.tokens.chat import ChatRenderer, TemplateRefusal, render_by_prefixes
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS

PUBLISHED = ("ALPACA", "CHATML", "GEMMA3", "MISTRAL_V01", "MISTRAL_V02", "MISTRAL_V03", "PHI3", "QWEN25")
SHIPPED = sorted(path.stem for path in CHAT_FORMATS.glob("*.jinja"))


@pytest.fixture(scope="module")
def renderers(tokenizer):
    return {name: renderer(tokenizer, name) for name in [*PUBLISHED, *SHIPPED, "REWRITES"]}


def renderer(tokenizer, name):
    published = getattr(templates, name, None)
    template = published or (CHAT_FORMATS / f"{name}.jinja").read_text()
    return ChatRenderer(with_template(tokenizer, template, *TURN_MARKERS, "<|user|>", "<|endoftext|>"))


def up_to_the_last_answer(messages):
    return messages[: 1 + max(i for i, (role, _) in enumerate(messages) if role == "assistant")]


# Mistral's put the system text before the last question, and so rewrite a conversation with every turn.
@pytest.mark.parametrize(
    "name", [name for name in [*PUBLISHED, *SHIPPED] if name not in ("mistral_v3", "mistral_tekken")]
)
def test_one_rendering_finds_what_prefixes_find(tokenizer, name):
    chats = renderer(tokenizer, name)
    for messages in map(up_to_the_last_answer, BUILT_IN):
        rendered = chats.from_structure(messages)
        assert rendered is not None
        assert rendered == render_by_prefixes(messages, tokenizer=chats.tokenizer)


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_rendering_is_enough_for_real_conversations(shared_data, tokenizer, name):
    chats = renderer(tokenizer, name)
    for i, messages in enumerate(real(shared_data)):
        rendered = chats.from_structure(messages)
        assert rendered is not None
        if i % 10 == 0:
            assert rendered == render_by_prefixes(messages, tokenizer=chats.tokenizer)


# Blanks of every kind, and the starts of the literal pieces of the templates.
CONTENTS = st.text(st.sampled_from("ab \n\t\u2003ș🚀<|#[/\ufdd0")) | st.sampled_from(
    ["<|im_end|>", "<|", "</s>", "\n\n"]
)
ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=5).map(lambda roles: [*roles, "assistant"])


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_conversation_is_rendered_as_by_prefixes(renderers, data):
    chats = renderers[data.draw(st.sampled_from(sorted(renderers)))]
    roles = data.draw(ROLES)
    messages = tuple((role, data.draw(CONTENTS)) for role in roles)
    try:
        expected = render_by_prefixes(messages, tokenizer=chats.tokenizer)
    except TemplateRefusal:
        return
    assert chats(messages).answers == expected.answers
    assert chats(messages) == expected


def test_answers_and_cuts(tokenizer):
    system = (("system", "S"), ("user", "A"), ("assistant", "B"), ("assistant", "C"), ("user", "D"), ("assistant", "E"))
    rendered = renderer(tokenizer, "CHATML")(system)
    assert [rendered.text[slice(*answer)] for answer in rendered.answers] == [f"{x}<|im_end|>" for x in "BCE"]
    assert [rendered.text[cut:].split("\n")[:2] for cut in rendered.cuts] == [["<|im_start|>user", "D<|im_end|>"]]


def test_the_end_of_a_conversation_is_not_taken_for_the_start_of_a_turn(tokenizer):
    rendered = renderer(tokenizer, "PHI3")(BUILT_IN[2])
    text, answers = rendered.text, rendered.answers
    assert [text[slice(*answer)] for answer in answers] == ["Paris.<|end|>", "Paris.<|end|>\n<|endoftext|>"]
    assert [text[cut : cut + 8] for cut in rendered.cuts] == ["<|user|>"]


def test_contents_that_change_what_a_template_does(tokenizer):
    capitals = "{% for m in messages %}{{ m['role'] + ':' + (m['content'] | replace('ss', 'ß')) + '\n' }}{% endfor %}"
    chats = ChatRenderer(with_template(tokenizer, capitals))
    assert chats.from_structure((("user", "a"), ("assistant", "b"))) is not None
    changed = (("user", "Strasse"), ("assistant", "b"))
    assert chats.from_structure(changed) is None
    assert chats(changed).text == "user:Straße\nassistant:b\n"


def test_turns_that_are_rewritten(tokenizer):
    chats = renderer(tokenizer, "REWRITES")
    assert len(chats(BUILT_IN[2][:2]).answers) == 1
    assert chats(BUILT_IN[2]).faults == {0: "is rendered otherwise when turns follow it"}


def test_a_system_text_that_a_template_leaves_out(tokenizer):
    skips = "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    chats = ChatRenderer(with_template(tokenizer, skips))
    assert chats((("system", "S"), ("user", "U"), ("assistant", "A"))).text == "user:S\n\nU\nassistant:A\n"


def test_a_system_text_that_another_turn_has_too(tokenizer):
    messages = (("system", "Da"), ("user", "Da?"), ("assistant", "Da."))
    rendered = render_by_prefixes(messages, tokenizer=renderer(tokenizer, "MISTRAL_V03").tokenizer)
    assert rendered.text == "<s>[INST] Da\n\nDa?[/INST] Da.</s>"


def test_a_template_that_refuses_every_form(tokenizer):
    chats = ChatRenderer(with_template(tokenizer, "{{ raise_exception('three of them') }}"))
    with pytest.raises(TemplateRefusal, match=r"^2 turns \(user, assistant\), which .* refuses: three of them; mend"):
        chats(BUILT_IN[0])
