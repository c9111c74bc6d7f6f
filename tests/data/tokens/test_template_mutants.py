"""Templates with a fault put into them: the row is refused, or its answers are learnt from texts that have none."""

import re

import pytest

from tests.data.small_tokenizers import with_template
from tests.data.tokens.test_templates_of_trl import BASE, CALL, CALLS, SYSTEM, THINKS, TOOLS, TWO, document_of, learnt
from tpu_experiments.data.documents import Refused
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS

QWEN3, CHATML, MISTRAL = ((CHAT_FORMATS / f"{name}.jinja").read_text() for name in ("qwen3", "chatml", "mistral_v3"))
TURNS = [{"role": role, "content": content.strip()} for role, content in SYSTEM + TWO]
PLAIN, THOUGHT, TOOL = (TURNS, None), (THINKS, None), (CALLS, TOOLS)
REASONED = ([CALLS[0], {**CALLS[1], "reasoning_content": "Trebuie să caut."}, *CALLS[2:]], TOOLS)
OTHER = {**CALL, "function": {**CALL["function"], "arguments": {"z": "Cluj", "n": 3}}}
TWICE = ([CALLS[0], {**CALLS[1], "tool_calls": [CALL, OTHER]}, CALLS[2], CALLS[2], CALLS[3]], TOOLS)
SPOKEN = ([CALLS[0], {**CALLS[1], "content": "Caut."}, *CALLS[2:]], TOOLS)

STRIPPED, CONTENT, CALLED = r"thought.strip('\n')", "message['content']", "message['tool_calls'] or []"
PROMPTED = r"""'<|im_start|>assistant\n' }}
{%- endif"""
ANSWERED = r"""{{ '<|im_start|>user' if loop.first or messages[loop.index0 - 1]['role'] != 'tool' else '' }}
        {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1]['role'] != 'tool' else '' }}"""
HELD = QWEN3.replace(r"content.lstrip('\n')", r"held.text ~ content.lstrip('\n')")
HELD = "{%- set held = namespace(text='') -%}" + HELD

REFUSED = {
    "reasoning is dropped": (QWEN3, STRIPPED, "''", THOUGHT, "without its reasoning"),
    "reasoning is cut": (QWEN3, STRIPPED, "thought[:4]", THOUGHT, "without its reasoning"),
    "reasoning of calls is dropped": (
        QWEN3,
        STRIPPED,
        "('' if message['tool_calls'] else thought)",
        REASONED,
        "without its reasoning",
    ),
    "an answer is cut": (CHATML, CONTENT, CONTENT + "[:12]", PLAIN, "without its content"),
    "an answer is changed": (CHATML, CONTENT, CONTENT + " | replace('Da.', 'Nu.')", PLAIN, "without its content"),
    "a question is dropped": (
        CHATML,
        CONTENT,
        "(message['content'] if message['role'] != 'user' else '')",
        PLAIN,
        "is asked for without turn 2",
    ),
    "a call is dropped": (QWEN3, CALLED, "[]", TOOL, "without its call of 'caută'"),
    "a second call is dropped": (QWEN3, CALLED, f"({CALLED})[:1]", TWICE, "without its call of 'caută'"),
    "arguments are dropped": (
        QWEN3,
        "else function['arguments'] | tojson",
        "else '{}'",
        TOOL,
        "without its call of 'caută'",
    ),
    "calls are of another tool": (
        MISTRAL,
        "call['function'] | tojson",
        "{'name': 'f', 'arguments': {}} | tojson",
        TOOL,
        "without its call of 'caută'",
    ),
    "the text beside a call is dropped": (
        QWEN3,
        r"content.lstrip('\n')",
        "('' if message['tool_calls'] else content)",
        SPOKEN,
        "without its content",
    ),
    "tools are dropped": (QWEN3, "for tool in tools", "for tool in []", TOOL, "leaves out the tool 'caută'"),
    "what a tool is for is dropped": (
        QWEN3,
        "tool | tojson",
        "tool['function']['name']",
        TOOL,
        "leaves out the description of the tool 'caută'",
    ),
    "parameters of a tool are dropped": (
        QWEN3,
        "tool | tojson",
        "tool['function']['name'] ~ tool['function']['description']",
        TOOL,
        "leaves out 'z' of the tool 'caută'",
    ),
    "what a tool answers is dropped": (
        QWEN3,
        "' ~ content ~ '\\n</tool",
        "\\n</tool",
        TOOL,
        "leaves out what a tool answers in turn 3",
    ),
    "what a tool answers is shown in the answer alone": (
        HELD,
        ANSWERED,
        "{%- set held.text = content -%}",
        TOOL,
        "is asked for without turn 3",
    ),
    "the prompt asks for another role": (
        CHATML,
        PROMPTED,
        PROMPTED.replace("assistant", "user"),
        PLAIN,
        "does not begin as the generation prompt asks for it",
    ),
    "the prompt asks in other words": (
        CHATML,
        PROMPTED,
        PROMPTED.replace("im_start|>assistant", "assistant|>"),
        PLAIN,
        "does not begin as the generation prompt asks for it",
    ),
    "turns are written backwards": (CHATML, "in messages", "in messages | reverse", PLAIN, "the answer of turn 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    template, old, new, conversation, message = REFUSED[name]
    assert old in template
    sound = learnt(document_of(*conversation), with_template(BASE(), template))
    assert not isinstance(sound, Refused), "without the fault it is learnt"
    found = learnt(document_of(*conversation), with_template(BASE(), template.replace(old, new)))
    assert isinstance(found, Refused), found
    assert re.search(message, found.message), found.message
    assert "model.chat_template_path=FILE" in found.message


ENDED = r"{{ '<|im_end|>\n' }}"
APART = {
    "earlier answers have no end": (
        CHATML,
        r"~ '<|im_end|>\n' }}",
        r"~ ('<|im_end|>\n' if loop.last or message['role'] != 'assistant' else '') }}",
        PLAIN,
    ),
    "earlier answers end with blanks": (
        CHATML,
        r"~ '<|im_end|>\n' }}",
        r"~ ('<|im_end|>\n' if loop.last or message['role'] != 'assistant' else '\n\n') }}",
        PLAIN,
    ),
    "calls have no end before what the tool answers": (
        QWEN3,
        ENDED,
        ENDED.replace("' }}", "' if loop.last or not message['tool_calls'] else '' }}"),
        TOOL,
    ),
    "earlier reasoning is dropped": (QWEN3, STRIPPED, f"({STRIPPED} if loop.last else '')", THOUGHT),
    "what a tool answers stands in the turn of the call": (
        QWEN3,
        r"'}\n</tool_call>' }}",
        r"'}\n</tool_call>' ~ (messages[2]['content'] if messages[2] is defined else '') }}",
        TOOL,
    ),
}


@pytest.mark.parametrize("name", APART)
def test_every_answer_is_learnt_as_without_the_fault(name):
    """Each from a text that ends with it."""
    template, old, new, conversation = APART[name]
    assert old in template
    expected = learnt(document_of(*conversation), with_template(BASE(), template))
    found = learnt(document_of(*conversation), with_template(BASE(), template.replace(old, new)))
    assert found == expected
    assert not any("douăsprezece" in text for text in found)
