"""All chat templates that TRL ships: the end of every answer is learnt, and what TRL's generation marks say."""

import functools
import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.data.small_tokenizers import byte_level, with_template
from tpu_experiments.data.documents import Document, Refused
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer, Tokens, tokenize_apart

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm4moe": "</s>",
    "glm4moe_training": "<|user|>",
    "gptoss": ("<|end|>", "<|return|>"),
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "muse_glimmer": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": ("<|end|>", "<|end|>\n</s>"),
    "qwen": "<|im_end|>",
}
"""By the start of a template's name (the longest counts), what closes an answer: each, or the first and the last. Where
the template writes nothing it is the tokenizer's EOS."""
WANTS_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take contents as lists of parts, and render none of a text: refused."""
UNLEARNT = {
    "deepseek": ("<｜Assistant｜>", "<｜Assistant｜><think>\n", "<｜tool▁outputs▁end｜>"),
    "gptoss": ("<|start|>assistant",),
    "muse_glimmer": ("<|start|>assistant",),
    "nemotron": ("<think></think>", "<think>\n"),
    "qwen3_5_nothink": ("<think>\n\n</think>\n\n", "<think>\n"),
    "qwen3_5_think": ("<think>\n",),
    "qwen3_6": ("<think>\n",),
    "qwen3_8": ("<think>\n",),
}
"""Beginnings that TRL marks as generated and no model generates, since the generation prompt writes them (the empty
block of Nemotron's with enable_thinking=false)."""

NO_CALLS = (*WANTS_PARTS, "cohere", "deepseek", "gemma", "lfm2_t", "llama3_t", "phi3", "qwen2_5_vl")
NO_REASONING = (*NO_CALLS, "lfm2_v2", "qwen2_5", "qwen3_instruct", "qwen3_vl")
WITHOUT = {
    "system": WANTS_PARTS,
    "calls": NO_CALLS,
    "reasoning": (*(name for name in NO_REASONING if name != "deepseek"), "deepseekv3"),
    "calls and reasoning": NO_REASONING,
}
"""By conversation, the templates with generation marks that have no place for it: refused."""

SYSTEM = (("system", "Ești scurt."),)
TWO = (
    ("user", " Salut, ce faci? "),
    ("assistant", "Bine! 👍🏽 "),
    ("user", "Șase țări?"),
    ("assistant", "Da.\n\n1. România\n"),
)


def files():
    trl = find_spec("trl")  # not imported: that takes seconds
    if trl is None:
        return {}
    folder = Path(trl.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


TEMPLATES = files()
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="trl is not installed")


def of(table, name, default=None):
    return table.get(max((start for start in table if name.startswith(start)), key=len, default=""), default)


BASE = functools.cache(byte_level)


@functools.cache
def tokenizer_of(name):
    """A small tokenizer with the markers of the template, which are one token each in the model's own."""
    template = re.sub(r"strftime_now\(.*?\)", "'2026-11-28'", TEMPLATES[name])
    markers = re.findall(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<[a-z]+_of_[a-z]+>", template)
    return with_template(BASE(), template, *sorted(set(markers)))


def runs(flags, ids, *, tokenizer):
    pairs = itertools.groupby(zip(flags, ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for is_learnt, run in pairs if is_learnt]


def learnt(document, tokenizer):
    found = []
    for _, tokens in tokenize_apart([document], tokenizer=DocumentTokenizer(tokenizer), rewritten="split"):
        if isinstance(tokens, Refused):
            return tokens
        found += runs(tokens.flags & LEARN, tokens.ids, tokenizer=tokenizer)
    return found


@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "no system"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_both_answers_is_learnt(name, system):
    found = learnt(Document("d", messages=system + TWO), tokenizer_of(name))
    if name.startswith(WANTS_PARTS):
        assert isinstance(found, Refused)
        assert re.search("is asked for without turn|refuses:", found.message)
        return
    ends = of(ENDS, name)
    first, last = ends if isinstance(ends, tuple) else (ends, ends)
    assert [text.split("!")[0].endswith("Bine") for text in found] == [True, False]
    assert found[0].removesuffix(first).endswith(("👍🏽", "👍🏽 "))
    assert found[0].endswith(first)
    assert found[1].removesuffix(last).rstrip().endswith("România")
    assert found[1].endswith(last)


CALL = {"type": "function", "function": {"name": "caută", "arguments": {"z": "<Iași> & 'țară'", "n": 2}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "caută",
            "description": "Caută în bază",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
CALLS = [
    {"role": "user", "content": "Salut"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "caută", "content": "douăsprezece"},
    {"role": "assistant", "content": "Da."},
]
THINKS = [
    {"role": "user", "content": "Cât fac 2 ori 3?"},
    {"role": "assistant", "reasoning_content": "2*3 = 6.", "content": "6."},
    {"role": "user", "content": "Și ori 2?"},
    {"role": "assistant", "reasoning_content": "6*2 = 12.", "content": "12."},
]
CONVERSATIONS = {
    "system": ([{"role": role, "content": content.replace("👍🏽", "da")} for role, content in SYSTEM + TWO], None),
    "calls": (CALLS, TOOLS),
    "reasoning": (THINKS, None),
    "calls and reasoning": ([CALLS[0], {**CALLS[1], "reasoning_content": "Trebuie să caut."}, *CALLS[2:]], TOOLS),
}


def document_of(turns, tools):
    beside = [{k: v for k, v in turn.items() if k not in ("role", "content")} for turn in turns]
    return Document(
        "d",
        messages=tuple((turn["role"], turn["content"]) for turn in turns),
        extras=tuple(json.dumps(b, ensure_ascii=False) if b else "" for b in beside) if any(beside) else (),
        tools=json.dumps(tools, ensure_ascii=False) if tools else "",
    )


def trls(turns, tools, *, name, tokenizer):
    """TRL's ids and mask; of each learnt run, not the beginning that the prompt writes, nor blanks at its borders."""
    field = "thinking" if name.startswith(("gptoss", "lfm2_2_5")) else "reasoning_content"
    turns = [{field if key == "reasoning_content" else key: value for key, value in turn.items()} for turn in turns]
    if name.startswith("deepseek") and field in turns[1]:
        turns = [
            {**t, "content": f"<think>\n{t[field]}\n</think>\n\n{t['content']}"} if field in t else t for t in turns
        ]
    given = tokenizer.apply_chat_template(
        turns, tools=tools, return_assistant_tokens_mask=True, return_dict=True, tokenizer_kwargs={"verbose": False}
    )
    ids, mask = np.array(given["input_ids"]), np.array(given["assistant_masks"], np.uint8)
    return ids, narrowed(mask, ids, tokenizer=tokenizer, beginnings=of(UNLEARNT, name, ()))


def narrowed(mask, ids, *, tokenizer, beginnings=()):
    mask = mask.copy()
    steps = np.diff(mask.astype(np.int8), prepend=0, append=0)
    for first, last in zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1), strict=True):
        decoded = [tokenizer.decode(ids[first:k]).strip() for k in range(first, last)]
        written = [decoded.index(text.strip()) for text in beginnings if text.strip() in decoded]
        mask[first : first + max(written, default=0)] = 0
        blank = np.array([tokenizer.decode(ids[k]).strip() == "" for k in range(first, last)])
        mask[first:last][np.logical_and.accumulate(blank | (mask[first:last] == 0))] = 0
        mask[first:last][np.logical_and.accumulate(blank[::-1])[::-1]] = 0
    return mask


MARKED = [name for name, text in TEMPLATES.items() if re.search(r"{%-?\s*generation", text)]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", MARKED)
def test_the_mask_is_that_of_the_generation_marks(name, conversation):
    """Both of the template with marks and of its plain twin, where that renders the same."""
    turns, tools = CONVERSATIONS[conversation]
    if name == "gemma_training" and conversation == "system":
        turns = turns[1:]  # it refuses a system turn, which then becomes the user's
    tokenizer, plain = tokenizer_of(name), tokenizer_of(name.removesuffix("_training"))
    made = tokenize_apart([document_of(turns, tools)], tokenizer=DocumentTokenizer(tokenizer), rewritten="split")
    for part, tokens in made:
        if isinstance(tokens, Refused):
            assert name.startswith(WITHOUT[conversation])
            assert re.search("refuses:|leaves out|without (its content|its reasoning|its call|turn)", tokens.message)
            assert "=FILE to a template" in tokens.message
            continue
        assert not name.startswith(WITHOUT[conversation])
        ids, mask = trls(turns[: len(part.messages)], tools, name=name, tokenizer=tokenizer)
        assert tokens.ids.tolist() == ids.tolist()
        ours = narrowed(tokens.flags & LEARN, ids, tokenizer=tokenizer)
        if part.context:  # TRL marks the answers before, too
            mask[: np.flatnonzero(ours)[0]] = 0
        if name.startswith("diffusion_gemma") and tools and len(part.messages) > 1:
            # A call ends with <|tool_response>, where its generation_config stops and TRL's marks do not.
            mask[np.flatnonzero(ids == tokenizer.convert_tokens_to_ids("<|tool_response>"))] = 1
        assert runs(mask, ids, tokenizer=tokenizer) == runs(ours, ids, tokenizer=tokenizer)
        assert mask.tolist() == ours.tolist()
        [(_, other)] = tokenize_apart([part], tokenizer=DocumentTokenizer(plain), rewritten="split")[:1]
        if isinstance(other, Tokens) and other.ids.tolist() == ids.tolist():
            assert other.flags.tolist() == tokens.flags.tolist()
