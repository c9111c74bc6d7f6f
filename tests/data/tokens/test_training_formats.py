"""The shipped templates of families: ids and masks of TRL's, prompts of the models' own, places for reasoning."""

import pytest

from tests.config.composing import composed
from tests.data.conversations import BUILT_IN
from tests.data.small_tokenizers import with_template
from tests.data.tokens.test_templates_of_trl import (
    BASE,
    CALLS,
    CONVERSATIONS,
    SYSTEM,
    TEMPLATES,
    THINKS,
    TOOLS,
    TWO,
    document_of,
    learnt,
    narrowed,
    tokenizer_of,
    trls,
)
from tpu_experiments.data.documents import Refused
from tpu_experiments.data.tokens.chat import render_turns
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS, load_tokenizer

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="trl is not installed")
MARKED = {"qwen2_5": "qwen2_5", "qwen3": "qwen3", "llama3": "llama3", "gemma3": "gemma3"}
"""Formats, and TRL's templates with generation marks."""
OWN = {**MARKED, "llama3_1": "llama3_1"}
NO_TOOLS, NO_REASONING = ("llama3", "gemma3"), ("gemma3",)


def turns_of(messages):
    return [{"role": role, "content": content} for role, content in messages]


def ours(name):
    """The small tokenizer of TRL's template with ours of the same family."""
    trl = f"{OWN[name]}_training" if f"{OWN[name]}_training" in TEMPLATES else OWN[name]
    return with_template(tokenizer_of(trl), (CHAT_FORMATS / f"{name}.jinja").read_text())


OTHERS = {
    "in turns": (turns_of(SYSTEM + TWO), None),
    "without a system": (turns_of(TWO), None),
    "a call": (CALLS, TOOLS),
    "a call after a system text, with text": (
        [*turns_of(SYSTEM), CALLS[0], {**CALLS[1], "content": "Caut."}, *CALLS[2:]],
        TOOLS,
    ),
    "two calls, two results, and a question": (
        [
            CALLS[0],
            {**CALLS[1], "tool_calls": CALLS[1]["tool_calls"] * 2},
            CALLS[2],
            CALLS[2],
            *CALLS[3:],
            *turns_of(TWO),
        ],
        TOOLS,
    ),
    "calls without tools": (CALLS, None),
    "tools without calls": (turns_of(TWO), TOOLS),
    "reasoning": CONVERSATIONS["reasoning"],
    "calls and reasoning": CONVERSATIONS["calls and reasoning"],
    "reasoning in the content": (
        turns_of((("user", "?"), ("assistant", "<think>\nDa?\n</think>\n\nDa."), *TWO)),
        None,
    ),
    "a first answer": (turns_of((("assistant", "Bună!"), *TWO)), None),
    **{f"built in {i}": (turns_of(messages), None) for i, messages in enumerate(BUILT_IN)},
}


def last_answer(turns):
    return 1 + max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")


@pytest.mark.parametrize("conversation", OTHERS)
@pytest.mark.parametrize("name", MARKED)
def test_ids_and_masks_are_trls(name, conversation):
    turns, tools = OTHERS[conversation]
    turns = turns[: last_answer(turns)]
    has_reasoning = any("reasoning_content" in turn for turn in turns)
    [tokens] = DocumentTokenizer(ours(name)).tokenize([document_of(turns, tools)])
    uses_tools = tools or any("tool_calls" in turn for turn in turns)
    refused = (name in NO_TOOLS and uses_tools) or (name in NO_REASONING and has_reasoning)
    if refused or (name == "gemma3" and conversation == "a first answer"):
        assert isinstance(tokens, Refused)
        return
    if has_reasoning and name != "qwen3":
        return  # TRL's drops it
    marked = tokenizer_of(f"{MARKED[name]}_training")
    ids, mask = trls(turns, tools, name=f"{name}_training", tokenizer=marked)
    assert tokens.ids.tolist() == ids.tolist()
    assert narrowed(tokens.flags & LEARN, ids, tokenizer=marked).tolist() == mask.tolist()


@pytest.mark.parametrize("conversation", OTHERS)
@pytest.mark.parametrize("name", OWN)
def test_texts_and_prompts_are_the_models_own(name, conversation):
    turns, tools = OTHERS[conversation]
    if any("reasoning_content" in turn for turn in turns) and name != "qwen3":
        turns = [{k: v for k, v in turn.items() if k != "reasoning_content"} for turn in turns]
    own, made = tokenizer_of(OWN[name]), ours(name)
    for number in range(1, len(turns) + 1):
        for ends_with in ("turn", "generation_prompt"):
            texts = []
            for tokenizer in (own, made):
                try:
                    texts.append(render_turns(turns[:number], tools=tools, tokenizer=tokenizer, ends_with=ends_with))
                except Exception as error:
                    texts.append(type(error))
            answers = [i for i in range(number) if turns[i]["role"] == "assistant"]
            questions = [i for i in range(number) if turns[i]["role"] == "user"]
            if name == "qwen3" and answers and (not questions or ends_with == "turn" or answers[0] < questions[-1]):
                continue  # Qwen 3's own drops the reasoning of earlier turns
            if name == "qwen3" and any("reasoning_content" not in turns[i] for i in answers):
                continue  # and writes no empty block before the last turn
            assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2_5", ["<think>\n2*3 = 6.\n</think>\n\n6.<|im_end|>", "<think>\n6*2 = 12.\n</think>\n\n12.<|im_end|>"]),
        ("llama3", ["<think>\n2*3 = 6.\n</think>\n\n6.<|eot_id|>", "<think>\n6*2 = 12.\n</think>\n\n12.<|eot_id|>"]),
        ("llama3_1", ["<think>\n2*3 = 6.\n</think>\n\n6.<|eot_id|>", "<think>\n6*2 = 12.\n</think>\n\n12.<|eot_id|>"]),
    ],
)
def test_reasoning_of_families_whose_own_templates_drop_it(name, expected):
    tokenizer = ours(name)
    assert [text.removesuffix("</s>").strip() for text in learnt(document_of(THINKS, None), tokenizer)] == expected
    if name != "llama3":
        found = learnt(document_of(*CONVERSATIONS["calls and reasoning"]), tokenizer)
        assert found[0].strip().startswith("<think>\nTrebuie să caut.\n</think>\n\n")
        assert '"name": "caută"' in found[0]


@pytest.mark.parametrize("preset", ["qwen3_06b", "qwen3_8b", "qwen3_30b_a3b"])
@pytest.mark.parametrize("conversation", ["a call", "reasoning", "calls and reasoning", "in turns"])
def test_the_presets_of_qwen3_train_tools_and_reasoning(preset, conversation):
    """As they are, equal to TRL's, all answers in one document."""
    config = composed(f"model={preset}", "data=sample_chat", "hw=cpu")
    made = load_tokenizer(
        "tpu_experiments/samples/tokenizer",
        revision=None,
        chat_template_path=config.model.chat_template_path,
        chat_format=config.model.chat_format,
    )
    turns, tools = OTHERS[conversation]
    [tokens] = DocumentTokenizer(made).tokenize([document_of(turns, tools)])
    marked = with_template(made, TEMPLATES["qwen3_training"])
    ids, mask = trls(turns, tools, name="qwen3_training", tokenizer=marked)
    assert tokens.ids.tolist() == ids.tolist()
    assert narrowed(tokens.flags & LEARN, ids, tokenizer=marked).tolist() == mask.tolist()


MISTRAL = {"mistral_v3": " ", "mistral_tekken": ""}
"""Formats, and the blank behind each mark, which is `·` below."""
VOICES = [
    {"role": "system", "content": "Ești scurt."},
    {"role": "user", "content": "Salut"},
    {"role": "assistant", "content": "Bună!"},
    {"role": "user", "content": "Vremea?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_abcdefghi",
                "type": "function",
                "function": {"name": "caută", "arguments": {"z": 'Iași "x"'}},
            }
        ],
    },
    {"role": "tool", "name": "caută", "tool_call_id": "call_abcdefghi", "content": "douăsprezece"},
    {"role": "assistant", "content": "Da."},
]
ONE_TOOL = [{"type": "function", "function": {"name": "caută", "description": "Caută în bază", "parameters": {}}}]
CALLED = (
    '[TOOL_CALLS]·[{"name": "caută", "arguments": {"z": "Iași \\"x\\""}, "id": "abcdefghi"}]</s>'
    '[TOOL_RESULTS]·{"content": "douăsprezece", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
)
OFFERED = (
    '[AVAILABLE_TOOLS]·[{"type": "function", "function": {"name": "caută", "description": "Caută în bază", '
    '"parameters": {}}}][/AVAILABLE_TOOLS][INST]·Ești scurt.\n\n'
)


@pytest.mark.parametrize("name", MISTRAL)
def test_mistrals_prompts(name):
    """As `MistralTokenizer.v3()` of mistral-common 1.13.1 encodes the same requests, with and without Tekken."""
    tokenizer = with_template(BASE(), (CHAT_FORMATS / f"{name}.jinja").read_text())
    expected = {
        2: f"<s>{OFFERED}Salut[/INST]",
        4: f"<s>[INST]·Salut[/INST]·Bună!</s>{OFFERED}Vremea?[/INST]",
        6: f"<s>[INST]·Salut[/INST]·Bună!</s>{OFFERED}Vremea?[/INST]{CALLED}",
        8: f"<s>[INST]·Salut[/INST]·Bună!</s>[INST]·Vremea?[/INST]{CALLED}·Da.</s>{OFFERED}Și?[/INST]",
    }
    turns = [*VOICES, {"role": "user", "content": "Și?"}]
    for number, text in expected.items():
        prompt = render_turns(turns[:number], tools=ONE_TOOL, tokenizer=tokenizer, ends_with="generation_prompt")
        assert prompt == text.replace("·", MISTRAL[name])


@pytest.mark.parametrize("name", MISTRAL)
def test_mistrals_answers(name):
    """The first is learnt after a prompt of its own, which has the tools and the system text."""
    blank = MISTRAL[name]
    markers = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    tokenizer = with_template(BASE(), (CHAT_FORMATS / f"{name}.jinja").read_text(), *markers)
    assert learnt(document_of(VOICES, ONE_TOOL), tokenizer) == [
        f"{blank}Bună!</s>",
        CALLED.split("[TOOL_RESULTS]")[0].replace("·", blank),
        f"{blank}Da.</s>",
    ]
    refused = learnt(document_of(THINKS, None), tokenizer)
    assert "the answer of turn 2 is rendered without its reasoning" in refused.message
