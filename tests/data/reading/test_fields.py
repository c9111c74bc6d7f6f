"""Every field of every row and turn is read, refused or named as not read."""

import json
from copy import deepcopy

import pytest

from tests.data.reading.test_formats import document, outcome, refused, turns
from tpu_experiments.data.cleaning.duplicates import exact_key
from tpu_experiments.data.documents import Document, Refused, SourceSpec
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.reading.raw_rows import RawRow

ASKED = {"role": "user", "content": "Salut"}
ANSWERED = {"role": "assistant", "content": "Bună!"}
CHAT = {"messages": [ASKED, ANSWERED]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Salut"}, {"from": "gpt", "value": "Bună!"}]}
TOOL = {"name": "vreme", "description": "Spune vremea.", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}
CALLED = {"type": "function", "function": {"name": "vreme", "arguments": {"oras": "Iași"}}}

ROWS = {  # one of every format, in which a system text, tools and others may be
    "messages": [CHAT, SHAREGPT],
    "alternating": [{"data": ["Salut", "Bună!"]}],
    "question_answer": [{"question": "Salut", "answer": "Bună!"}],
    "instruction": [{"instruction": "Salut", "output": "Bună!"}, {"instruction": "Salut", "response": "Bună!"}],
    "prompt_completion": [
        {"prompt": "Salut", "completion": "Bună!"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
    ],
    "llama2": [{"text": "<s>[INST] Salut [/INST] Bună! </s>"}],
    "human_assistant": [{"text": "### Human: Salut### Assistant: Bună!"}],
}
EVERY = [(layout, row) for layout, rows in ROWS.items() for row in rows]
SINGLE = [(layout, row) for layout, row in EVERY if layout in ("question_answer", "instruction", "prompt_completion")]


def with_answer(**fields):
    return {"messages": [ASKED, ANSWERED | fields]}


def extras(found):
    return [json.loads(extra) if extra else {} for extra in found.extras]


# ---- system ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["system", "system_prompt", "systemPrompt", "System Prompt", "system_message"])
@pytest.mark.parametrize(("layout", "row"), EVERY)
def test_a_rows_system_text_is_its_system_turn(layout, row, name):
    found = document(row | {name: "Ești bancher."}, layout)
    assert found.messages == (("system", "Ești bancher."), *turns("Salut", "Bună!"))
    assert found.unread == ()
    for empty in ("", " \n", None, []):
        assert document(row | {name: empty}, layout) == document(row, layout)


def test_two_system_texts_are_one_where_they_are_equal_and_refused_where_not():
    told = [{"role": "system", "content": "Ești bancher."}, ASKED, ANSWERED]
    assert document({"messages": told, "system": "Ești bancher. "}, "messages").messages[0] == (
        "system",
        "Ești bancher.",
    )
    other = {"messages": told, "system": "Ești pirat."}
    found = refused(other, "messages")
    assert (found.reason, found.is_bad_row) == ("two_systems", True)
    assert "has a system text in 'system' and another one in turn 1" in found.message
    assert "+data.x.fields.system=''" in found.message
    left = document(other, "messages", fields={"system": ""})
    assert (left.messages[0][1], left.unread) == ("Ești bancher.", ("system",))
    blank = [{"role": "system", "content": " "}, ASKED, ANSWERED]
    assert document({"messages": blank, "system": "A"}, "messages").messages[0] == ("system", "A")
    assert refused(CHAT | {"system": 3}, "messages").message.startswith("has int in 'system', not a string")


def test_the_system_text_may_have_another_name():
    row = CHAT | {"persona": "Ești bancher.", "system": "not this"}
    found = document(row, "messages", fields={"system": "persona"})
    assert (found.messages[0], found.unread) == (("system", "Ești bancher."), ("system",))


def test_rows_that_differ_in_what_is_read_are_no_duplicates():
    rows = [
        CHAT,
        CHAT | {"system": "A"},
        CHAT | {"system": "B"},
        CHAT | {"tools": [TOOL]},
        with_answer(reasoning="A"),
        with_answer(thinking="B"),
        {"messages": [ASKED, ANSWERED | {"loss": False}, ASKED, ANSWERED]},
        {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]},
    ]
    keys = [exact_key(document(row, "messages")) for row in rows]
    assert len(set(keys)) == len(rows)
    assert exact_key(document(CHAT | {"id": 3, "score": 0.5}, "messages")) == keys[0]


# ---- earlier turns --------------------------------------------------------------------------------------------

HISTORY = [["Câte grade sunt?", "Zece."], ["Și mâine?", "Opt."]]


@pytest.mark.parametrize(
    "history",
    [HISTORY, json.dumps(HISTORY), [{"role": "user", "content": q} for q in ()]],
    ids=["pairs", "text", "empty"],
)
@pytest.mark.parametrize(("layout", "row"), SINGLE)
def test_earlier_turns_come_before_the_question(layout, row, history):
    found = document(row | {"history": history, "system": "S"}, layout)
    earlier = turns("Câte grade sunt?", "Zece.", "Și mâine?", "Opt.") if history else ()
    assert found.messages == (("system", "S"), *earlier, *turns("Salut", "Bună!"))
    # As in LLaMA-Factory without mask_history; a completion is what its format learns.
    assert found.context == ((2, 4) if layout == "prompt_completion" and history else ())
    assert found.unread == ()


def test_earlier_turns_as_turns_and_what_is_none():
    row = {"instruction": "Q", "output": "A"}
    told = [{"role": "human", "content": "q", "score": 1}, {"role": "gpt", "content": "a", "train": False}]
    found = document(row | {"history": told}, "instruction")
    assert (found.messages, found.context, found.unread) == (turns("q", "a", "Q", "A"), (1,), ("history[].score",))
    for wrong in ([["q"]], [["q", 3]], ["q", "a"], {"q": "a"}, "earlier"):
        bad = refused(row | {"history": wrong}, "instruction")
        assert (bad.reason, "in 'history', not a list of [question, answer] pairs" in bad.message) == (
            "wrong_type",
            True,
        )


# ---- reasoning ------------------------------------------------------------------------------------------------

REASONING = ["reasoning_content", "reasoning", "thinking", "thought", "thoughts", "think", "reasoning_text", "cot"]
REASONING += ["reasoningContent", "chain_of_thought", "Complex_CoT", "rationale", "reasoning_trace", "r1_reasoning"]


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_of_a_turn_has_one_name(name):
    found = document(with_answer(**{name: "Fiindcă."}), "messages")
    assert (extras(found), found.unread) == ([{}, {"reasoning_content": "Fiindcă."}], ())
    assert found.messages == turns("Salut", "Bună!")
    assert document(with_answer(**{name: ""}), "messages") == document(CHAT, "messages")
    alone = document({"messages": [ASKED, {"role": "assistant", "content": None, name: "Fiindcă."}]}, "messages")
    assert (alone.messages, extras(alone)[1]) == (turns("Salut", ""), {"reasoning_content": "Fiindcă."})


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize(("layout", "row"), SINGLE)
def test_reasoning_of_a_row_is_its_answers(layout, row, name):
    found = document(row | {name: "Fiindcă.", "history": HISTORY}, layout)
    assert extras(found) == [{}] * 5 + [{"reasoning_content": "Fiindcă."}]
    assert found.unread == ()


@pytest.mark.parametrize("value", ["on", "off", True, 3, "high"])
def test_a_setting_is_no_reasoning(value):
    found = document({"instruction": "Q", "output": "A", "reasoning": value}, "instruction")
    assert (found.extras, found.unread) == ((), ("reasoning",))
    found = document(with_answer(thinking=value), "messages")
    assert (found.extras, found.unread) == ((), ("messages[].thinking",))


def test_reasoning_that_is_said_twice():
    found = document(with_answer(reasoning="A", reasoning_content="A"), "messages")
    assert (extras(found)[1], found.unread) == ({"reasoning_content": "A"}, ())
    found = document(with_answer(reasoning="A", thinking="B"), "messages")
    assert (extras(found)[1], found.unread) == ({"reasoning_content": "A"}, ("messages[].thinking",))


def test_reasoning_of_other_types_and_turns():
    assert extras(document(with_answer(thoughts=["A", "B"]), "messages"))[1] == {"reasoning_content": "A\nB"}
    assert "has dict in 'reasoning' of turn 2" in refused(with_answer(reasoning={"a": 1}), "messages").message
    found = document({"messages": [ASKED | {"reasoning": "A"}, ANSWERED]}, "messages")
    assert (found.extras, found.unread) == ((), ("messages[].reasoning",))
    found = document(CHAT | {"reasoning": "which turn's?"}, "messages")
    assert (found.extras, found.unread) == ((), ("reasoning",))


def test_the_recipes_reasoning_is_a_section_of_its_answer():
    row = {"question": "Q", "answer": "A", "reasoning": "R", "topic": "T", "thinking": "Fiindcă."}
    found = document(row, "question_answer")
    assert found.messages[1][1] == "### Topic: T\n\n### Reasoning:\nR\n\n### Answer:\nA"
    assert extras(found)[1] == {"reasoning_content": "Fiindcă."}


# ---- content parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        ["O mare ", "albastră."],
        [{"type": "text", "text": "O mare "}, {"text": "albastră."}],
        [{"type": "text", "content": "O mare "}, {"type": "text", "value": "albastră."}],
        [{"type": "output_text", "text": "O mare "}, {"type": "text", "text": "albastră.", "image": None}],
    ],
)
def test_parts_of_text_with_other_keys(parts):
    found = document(with_answer(content=parts), "messages")
    assert (found.messages[1][1], found.unread) == ("O mare albastră.", ())


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Fiindcă."},
        {"type": "reasoning", "text": "Fiindcă."},
        {"type": "reasoning", "value": "Fiindcă."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Fiindcă."}]},
    ],
)
def test_parts_of_reasoning(part):
    text = {"type": "text", "text": "Bună!"}
    found = document(with_answer(content=[part, text]), "messages")
    assert (found.messages[1][1], extras(found)[1]) == ("Bună!", {"reasoning_content": "Fiindcă."})
    assert refused(with_answer(content=[text, part]), "messages").reason == "bad_parts"
    assert refused({"messages": [ASKED | {"content": [part]}, ANSWERED]}, "messages").reason == "not_text"
    assert refused(with_answer(content=[part, text], reasoning="Altfel."), "messages").reason == "bad_reasoning"


def test_parts_that_are_calls():
    text = {"type": "text", "text": "Mă uit."}
    for part in (
        {"type": "tool_call", "value": json.dumps({"name": "vreme", "arguments": {"oras": "Iași"}})},
        {"type": "tool_use", "name": "vreme", "input": {"oras": "Iași"}},
    ):
        found = document(with_answer(content=[text, part]), "messages")
        assert (found.messages[1][1], extras(found)[1]) == ("Mă uit.", {"tool_calls": [CALLED]})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image", "image": "a.png"}, "a part of type 'image' in turn 2"),
        ({"type": "tool_result", "content": "12"}, "a part of type 'tool_result' in turn 2"),
        ({"type": "text", "text": 3}, "a part without a text of type str in turn 2; it has type (str), text (int)"),
        ({"text": "a", "image": "a.png"}, "has 'image' in turn 2; only text is trained on"),
        ({}, "a part of type 'dict' in turn 2"),
        (3, "a part of type 'int' in turn 2"),
    ],
)
def test_parts_that_are_no_text(part, words):
    found = refused(with_answer(content=[part]), "messages")
    assert found.reason == "not_text"
    assert words in found.message


# ---- marks ----------------------------------------------------------------------------------------------------

NOT_LEARNT = [{name: False} for name in ("train", "training", "trainable", "loss", "learn", "supervised")]
NOT_LEARNT += [{"weight": 0}, {"loss_weight": 0.0}, {"lossWeight": 0}, {"loss_mask": 0}, {"loss": 0}]
NOT_LEARNT += [{"should_train": False}, {"trainOn": 0}, {"no_loss": 1}, {"train_weight": 0}, {"compute_loss": False}]
NOT_LEARNT += [{"masked": True}, {"mask": True}, {"masked": 1}, {"ignore_loss": True}]


@pytest.mark.parametrize("mark", NOT_LEARNT, ids=str)
def test_an_answer_that_is_marked_is_only_read(mark):
    [(name, value)] = mark.items()
    learnt = {name: not value if isinstance(value, bool) else 1 - value}
    found = document({"messages": [ASKED, ANSWERED | mark, ASKED, ANSWERED | learnt]}, "messages")
    assert (found.context, found.unread) == ((1,), ())
    contrary = {"train": True} if name != "train" else {"weight": 1}
    assert refused(with_answer(**mark, **contrary), "messages").reason == "bad_mark"
    # On others, a mark says what is so; one that wants them learnt is not followed, and is named.
    shown = document({"messages": [ASKED | mark, ANSWERED]}, "messages")
    assert (shown.context, shown.unread) == ((), ())
    wanted = document({"messages": [ASKED | learnt, ANSWERED]}, "messages")
    assert (wanted.context, wanted.unread) == ((), (f"messages[].{name}",))


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"loss_weight": 0.5}, "has loss_weight: 0.5 in turn 2; an answer is learnt (loss_weight: 1) or only read"),
        ({"loss": "no"}, 'has loss: "no" in turn 2; an answer is learnt (loss: true) or only read (loss: false)'),
        ({"mask": 1}, "has mask: 1 in turn 2; an answer is learnt (mask: false) or only read (mask: true)"),
        ({"loss": 2}, "has loss: 2 in turn 2"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}, "has 'train_detail' in turn 2"),
    ],
)
def test_marks_that_cannot_be_followed(mark, words):
    found = refused({"messages": [ASKED, ANSWERED | mark, ASKED, ANSWERED]}, "messages")
    assert found.reason == "bad_mark"
    assert words in found.message


def test_the_role_that_a_row_masks():
    assert document(SHAREGPT | {"mask": "User"}, "messages").unread == ()
    assert refused(SHAREGPT | {"mask": "Assistant"}, "messages").reason == "bad_mark"


# ---- tools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [WRAPPED]},
        {"tools": [TOOL]},
        {"tools": json.dumps([WRAPPED])},
        {"tools": [json.dumps(TOOL)]},
        {"tools": TOOL},
        {"functions": [TOOL]},
        {"available_tools": json.dumps(TOOL)},
        {"tools": [{"type": "function", **TOOL}]},
        {"tools": [{("input_schema" if name == "parameters" else name): value for name, value in TOOL.items()}]},
    ],
    ids=str,
)
@pytest.mark.parametrize(("layout", "row"), EVERY)
def test_tools_in_every_spelling(layout, row, given):
    found = document(row | given, layout)
    assert (json.loads(found.tools), found.unread) == ([WRAPPED], ())


def test_tools_of_a_system_turn():
    told = {"messages": [{"role": "system", "content": "S", "functions": json.dumps([TOOL])}, ASKED, ANSWERED]}
    assert json.loads(document(told, "messages").tools) == [WRAPPED]
    assert json.loads(document(told | {"tools": [TOOL]}, "messages").tools) == [WRAPPED]
    assert refused(told | {"tools": [TOOL | {"name": "maree"}]}, "messages").reason == "bad_tools"


ANSWERS = [{"role": "function", "name": "vreme", "content": "12"}, {"role": "assistant", "content": "12 grade."}]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "", "function_call": {"name": "vreme", "arguments": '{"oras": "Iași"}'}},
        {"content": None, "function_call": json.dumps({"name": "vreme", "arguments": {"oras": "Iași"}})},
        {"content": None, "tool_calls": [{"name": "vreme", "parameters": {"oras": "Iași"}}]},
        {"content": "", "tool_calls": [json.dumps(CALLED)], "function_call": None},
        {"content": "", "tool_calls": [CALLED], "function_call": CALLED["function"]},
        {"content": None, "toolCalls": json.dumps([CALLED])},
        {"role": "function_call", "content": '{"name": "vreme", "arguments": {"oras": "Iași"}}'},
        {"role": "tool_call", "content": json.dumps([CALLED["function"]])},
    ],
    ids=str,
)
def test_calls_in_every_spelling(fields):
    found = document({"messages": [ASKED, {"role": "assistant"} | fields, *ANSWERS]}, "messages")
    assert found.messages == (("user", "Salut"), ("assistant", ""), ("tool", "12"), ("assistant", "12 grade."))
    assert extras(found) == [{}, {"tool_calls": [CALLED]}, {"name": "vreme"}, {}]
    assert (found.unread, found.context) == ((), ())


def test_a_turn_for_each_call_is_one_turn():
    calls = [{"role": "tool_call", "content": json.dumps(CALLED["function"])}] * 2
    told = [ASKED, {"role": "assistant", "content": "Mă uit.", "reasoning": "R"}, *calls, *ANSWERS]
    found = document({"messages": told}, "messages")
    assert [role for role, _ in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert extras(found)[1] == {"reasoning_content": "R", "tool_calls": [CALLED, CALLED]}
    thought = [told[1], calls[0] | {"reasoning": "R2"}]
    apart = document({"messages": [ASKED, *thought, *ANSWERS]}, "messages")
    assert [extra.get("reasoning_content") for extra in extras(apart)] == [None, "R", "R2", None, None]
    apart = document({"messages": [ASKED, ANSWERED | {"train": False}, *calls, *ANSWERS]}, "messages")
    assert [role for role, _ in apart.messages] == ["user", "assistant", "assistant", "tool", "assistant"]
    assert apart.context == (1,)


def test_calls_that_differ_are_refused_and_their_other_fields_named():
    other = {"name": "maree", "arguments": {}}
    found = refused(with_answer(tool_calls=[CALLED], function_call=other), "messages")
    assert (found.reason, "has other calls in 'function_call'" in found.message) == ("bad_call", True)
    found = document(with_answer(tool_calls=[CALLED | {"index": 1, "type": "builtin"}]), "messages")
    assert found.unread == ("messages[].tool_calls[].index", "messages[].tool_calls[].type")
    assert refused(with_answer(function_calls="vreme(oras='Iași')"), "messages").reason == "bad_call"


def test_names_of_calls_that_are_no_text_are_named():
    told = {"role": "tool", "content": "12", "name": 3, "tool_call_id": 4}
    found = document({"messages": [ASKED, ANSWERED | {"tool_calls": [CALLED | {"id": 4}]}, told, ANSWERED]}, "messages")
    assert found.unread == ("messages[].name", "messages[].tool_call_id", "messages[].tool_calls[].id")
    part = {"type": "tool_call", "value": CALLED | {"index": 0}, "rank": 1}
    found = document(with_answer(content=[part]), "messages")
    assert found.unread == ("messages[].content[].rank", "messages[].content[].value.index")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("developer", "system"),
        ("Human", "user"),
        ("input", "user"),
        ("chatgpt", "assistant"),
        ("AI", "assistant"),
        ("bard", "assistant"),
        ("output", "assistant"),
        ("observation", "tool"),
        ("ipython", "tool"),
        ("tool_response", "tool"),
    ],
)
def test_roles_of_other_readers(name, role):
    found = document({"messages": [ASKED, {"role": name, "content": "a"}, ANSWERED]}, "messages")
    assert found.messages[1] == (role, "a")


# ---- what cannot be kept --------------------------------------------------------------------------------------

REFUSED = [({name: ["a.jpg"]}, "not_text") for name in ("images", "image", "audio", "audios", "video", "videos")]
REFUSED += [({"image_url": "a.jpg"}, "not_text"), ({"Image": {"bytes": "aa"}}, "not_text")]
REFUSED += [
    ({"choices": ["a", "b"]}, "choices"),
    ({"options": {"A": "a"}}, "choices"),
    ({"A": "a", "B": "b"}, "choices"),
]
REFUSED += [({"label": True}, "preference"), ({"kto_tag": False}, "preference")]
REFUSED += [({"chat_template_kwargs": {"enable_thinking": False}}, "template_settings")]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=str)
@pytest.mark.parametrize(("layout", "row"), EVERY)
def test_what_changes_the_meaning_is_refused_by_name(layout, row, fields, reason):
    found = refused(row | fields, layout)
    assert (found.reason, found.is_bad_row) == (reason, True)
    assert next(iter(fields)) in found.message
    for empty in (None, "", [], {}, [None], {"bytes": None, "path": ""}):
        assert document(row | dict.fromkeys(fields, empty), layout) == document(row, layout)
    if reason != "preference":
        left = document(row | fields, layout, fields=dict.fromkeys(fields, ""))
        assert (left.unread, left.content) == (tuple(sorted(fields)), document(row, layout).content)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"images": ["a.jpg"]}, "not_text"),
        ({"audio": {"id": "a"}}, "not_text"),
        ({"refusal": "Nu pot."}, "refusal"),
        ({"channel": "analysis"}, "bad_channel"),
    ],
    ids=str,
)
def test_what_changes_the_meaning_of_a_turn_is_refused_by_name(fields, reason):
    assert refused(with_answer(**fields), "messages").reason == reason
    assert document(with_answer(**dict.fromkeys(fields)), "messages") == document(CHAT, "messages")


def test_pictures_beside_a_text():
    assert refused({"text": "a", "images": ["a.jpg"]}, "text", kind="text").reason == "not_text"
    found = document({"text": "a", "image_url": "a.jpg", "choices": [1], "system": "s"}, "text", kind="text")
    assert found.unread == ("choices", "image_url", "system")


# ---- near misses in types -------------------------------------------------------------------------------------


def test_an_instruction_is_asked_as_the_config_says():
    row = {"instruction": "Add {input}.", "input": "1 {instruction}", "output": "2"}
    how = {"asked_as": "Do {instruction} with {input}:\n", "asked_alone_as": "Do {instruction}:\n"}
    assert document(row, "instruction", **how).messages == turns("Do Add {input}. with 1 {instruction}:\n", "2")
    assert document(row | {"input": " "}, "instruction", **how).messages == turns("Do Add {input}.:\n", "2")
    assert document(row, "instruction", asked_alone_as="x{instruction}").messages == turns(
        "Add {input}.\n\n1 {instruction}", "2"
    )
    renamed = {"fields": {"instruction": "ask", "input": ""}}
    alone = document({"ask": "A", "input": "B", "output": "C"}, "instruction", **how, **renamed)
    assert alone.messages == turns("Do A:\n", "C")


def test_an_empty_instruction_leaves_no_blank_lines():
    assert document({"instruction": "", "input": "Salut", "output": "Bună"}, "instruction").messages == turns(
        "Salut", "Bună"
    )
    assert document({"instruction": "Salut", "input": [], "output": "Bună"}, "instruction").messages == turns(
        "Salut", "Bună"
    )


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"messages": json.dumps(CHAT["messages"])}, "messages"),
        ({"data": json.dumps(CHAT["messages"])}, "messages"),
        ({"data": json.dumps(["Salut", "Bună!"])}, "alternating"),
        ({"prompt": json.dumps([ASKED]), "completion": json.dumps([ANSWERED])}, "prompt_completion"),
    ],
)
def test_json_text_in_a_cell(row, layout):
    assert document(row, layout).messages == turns("Salut", "Bună!")


def test_a_prompt_that_is_json_but_no_turns_is_text():
    assert document({"prompt": "[1, 2]", "completion": '["a"]'}, "prompt_completion").messages == turns(
        "[1, 2]", '["a"]'
    )


# ---- the rest is named ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "row"), [*EVERY, ("text", {"text": "a"})])
def test_what_is_not_read_is_named(layout, row):
    values = {"kind": "text"} if layout == "text" else {}
    fields = {"id": 7, "source": "web", "score": 0.0, "flag": False, "nothing": None, "blank": " ", "none": [{}]}
    found = document(row | fields, layout, **values)
    assert found.unread == ("flag", "id", "score", "source")
    assert found.content == document(row, layout, **values).content


def test_fields_that_the_config_names_are_read():
    row = {"text": "a", "topic": "t", "tree": "x", "label": "l", "rest": 1}
    found = document(row, "text", kind="text", keep={"topic": ["t"]}, group_field="tree", label_field="label")
    assert found.unread == ("rest",)


def test_fields_of_turns_parts_and_renamed_rows_are_named():
    part = {"type": "text", "text": "Bună!", "cache_control": {"type": "ephemeral"}}
    row = {
        "chat": [ASKED | {"name": "Ana"}, {"role": "assistant", "content": [part], "score": 1, "value": "other"}],
        "messages": "not this",
        "a\ud800\n": 1,
    }
    found = document(row, "messages", fields={"messages": "chat"})
    assert found.unread == (
        "a\\ud800 ",
        "chat[].content[].cache_control",
        "chat[].name",
        "chat[].score",
        "chat[].value",
        "messages",
    )


def test_a_second_field_of_one_meaning_is_named_unless_it_says_the_same():
    row = {"instruction": "Q", "output": "A", "response": "A", "input": "I", "context": "C"}
    found = document(row, "instruction")
    assert (found.messages, found.unread) == (turns("Q\n\nI", "A"), ("context",))
    assert document(row | {"response": "B"}, "instruction").unread == ("context", "response")


FULL = [
    (
        "messages",
        {
            "id": "x",
            "system": "S",
            "tools": [TOOL],
            "lang": "ro",
            "messages": [
                ASKED | {"name": "Ana", "weight": 0},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "R", "signature": "s"}, {"type": "text", "text": "T"}],
                    "tool_calls": [CALLED | {"id": "c1", "index": 0}],
                    "train": False,
                },
                {"role": "tool", "name": "vreme", "tool_call_id": "c1", "content": "12", "is_error": False},
                {"role": "assistant", "content": "B", "reasoning": "R2", "score": 0.5, "weight": 1},
            ],
        },
    ),
    (
        "messages",
        {
            "conversations": [
                {"from": "human", "value": "Vremea?"},
                {"from": "gpt", "value": "Mă uit.", "thinking": "R"},
                {"from": "function_call", "value": {"function": CALLED["function"] | {"strict": True}, "id": 3}},
                {"from": "observation", "value": "12", "name": 4},
                {"from": "gpt", "value": [{"type": "tool_call", "value": CALLED, "rank": 1}]},
            ],
            "functions": json.dumps([TOOL]),
        },
    ),
    (
        "instruction",
        {
            "instruction": "Q",
            "input": "I",
            "context": "C",
            "output": "A",
            "history": HISTORY,
            "system_prompt": "S",
            "thinking": "R",
            "url": "u",
        },
    ),
    (
        "question_answer",
        {"question": "Q", "answer": "A", "topic": "T", "difficulty": "D", "reasoning": "R", "case_citation": "C"},
    ),
    ("question_answer", {"question": "Q", "answer": "A", "topic": "T", "functions": [TOOL], "cot": "R"}),
    ("prompt_completion", {"prompt": [ASKED], "completion": "A", "system": "S", "history": HISTORY, "date": "d"}),
    ("alternating", {"data": ["a", "b"], "system": "S", "title": "t"}),
]


def leaves(value, path=()):
    """Paths of the texts, numbers and truth values in a row."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in items:
            yield from leaves(member, (*path, key))
    else:
        yield path, value


def changed(row, path, value):
    new = deepcopy(row)
    place = new
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = not value if isinstance(value, bool) else f"{value}q" if isinstance(value, str) else value + 1
    return new


@pytest.mark.parametrize(("layout", "row"), FULL)
def test_no_value_can_change_without_a_word(layout, row):
    before = document(row, layout)
    for path, value in leaves(row):
        after = outcome(changed(row, path, value), layout)
        name = "".join("[]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
        named = () if isinstance(after, Refused) else {*before.unread, *after.unread}
        is_named = any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in named)
        assert isinstance(after, Refused) or after.content != before.content or is_named, path


@pytest.mark.parametrize(("layout", "row"), [*EVERY, *FULL])
def test_empty_fields_do_not_matter(layout, row):
    names = ["id", "system", "history", "tools", "functions", "reasoning_content", "images", "choices", "label", "mask"]
    for empty in (None, "", [], {}):
        new = dict.fromkeys(names, empty) | row
        assert document(new, layout) == document(row, layout)


def test_members_of_a_column_that_are_null_in_this_row_are_none():
    turn = dict.fromkeys(["function_call", "images", "loss", "refusal", "thinking", "channel"])
    row = {"messages": [ASKED | turn, ANSWERED | turn], "image": {"bytes": None, "path": None}, "score": None}
    spec = SourceSpec("x", "rows.parquet", kind="chat", format="messages")
    found = document_of(RawRow(row, "rows.parquet", "row", 1), spec=spec)
    assert isinstance(found, Document)
    assert (found.messages, found.unread, found.extras) == (turns("Salut", "Bună!"), (), ())
