"""Names that data sets and chat templates give to fields, marks and roles.

Names are compared in `normal` form, so that `system_prompt`, `systemPrompt` and `System Prompt` are one name. The
sources are the readers of TRL, LLaMA-Factory, axolotl, ms-swift, torchtune and NeMo, the fine-tuning formats of OpenAI
and Mistral, and what vLLM and chat templates call reasoning.
"""

import re
from functools import lru_cache
from typing import NamedTuple

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "usr": "user",
    "instruction": "user",
    "input": "user",
    "question": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "chatgpt": "assistant",
    "chatbot": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "claude": "assistant",
    "output": "assistant",
    "response": "assistant",
    "answer": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "environment": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "tool_output": "tool",
    "function_response": "tool",
    "function_result": "tool",
    "function_output": "tool",
}
"""The role of a turn by what files call it."""

CALL_ROLES = ("function_call", "tool_call", "function_calls", "tool_calls", "function-call", "tool-call")
"""Roles of an assistant's turn whose content is the JSON of its calls (ShareGPT in LLaMA-Factory, ms-swift)."""


class Mark(NamedTuple):
    """A field of a turn that says whether it is learnt."""

    is_learnt: bool
    """Whether true, or 1, means learnt."""
    types: tuple[type, ...]
    """`bool`, `int` (0 or 1, also as 0.0 and 1.0), or either."""

    @property
    def values(self) -> tuple[str, str]:
        """JSON of the values for learnt and for only read."""
        yes, no = ("true", "false") if bool in self.types else ("1", "0")
        return (yes, no) if self.is_learnt else (no, yes)


_EITHER = (bool, int)
_MARKS = (
    (re.compile(r"train|training"), Mark(True, (bool,))),
    (re.compile(r"(loss|train|training|sample)(weight|scale)|weight"), Mark(True, (int,))),
    (re.compile(r"mask"), Mark(False, (bool,))),  # mask: 1 can mean either
    (
        re.compile(r"(is)?masked|(mask|ignore|skip|exclude|no)(from)?(loss|train|training)|ignored?|skip"),
        Mark(False, _EITHER),
    ),
    (
        re.compile(
            r"(is|do|to|has|use|should|with|compute|calculate|include|includein)?"
            r"(train|trainon|trained|trainable|learn|learnt|learned|learnable|supervised?|loss)|lossmask"
        ),
        Mark(True, _EITHER),
    ),
)
"""By normal form, the first that matches: axolotl has `train` and `training`, OpenAI and Mistral `weight`,
LLaMA-Factory `loss_weight`, ms-swift `loss`, torchtune `masked`; `loss_mask: 1` is learnt, as in Megatron and verl."""

_REASONING = re.compile(
    r"(deepseek|r1|qwen|gemini|claude|gpt|model|assistant|internal|inner|hidden|long|complex|generated|full|llm)*"
    r"(reasoning|thinking|thoughts?|think|cot|chainofthoughts?|rationale|scratchpad|monologue)"
    r"(content|text|traces?|trajectory|trajectories|process|chain|steps?)?"
)
_TOOLS = (
    r"(tools|functions)(json|list|schemas?|specs?|definitions?)?|(tool|function)(definition|schema|spec|declaration)s?"
)
_MEDIUM = re.compile(
    r"(image|img|picture|photo|video|audio|speech)s?(urls?|paths?|files?|filenames?|bytes|base64|b64|data|values?)?"
    r"|pixelvalues"
)
_OF_ROW = {
    "system": re.compile(r"system(prompt|message|msg|text|instructions?|content)?|sys(prompt|msg)"),
    "history": re.compile(
        r"(chat|conversation|dialog|dialogue|message)?history|(previous|past|prior|earlier)(turns|messages|dialogue|dialog)"
    ),
    "tools": re.compile(f"(available|given|allowed)?({_TOOLS})"),
    "reasoning": _REASONING,
    "medium": _MEDIUM,
    "choices": re.compile(r"(answer|multiple)?(choice|option)s?[a-h1-8]?|op[a-d]"),
    "template": re.compile(r"chattemplatekwargs"),
    "preference": re.compile(r"label|ktotag"),
}
_OF_TURN = {
    "reasoning": _REASONING,
    "calls": re.compile(r"(tool|function)calls?"),
    "tools": re.compile(_TOOLS),
    "medium": _MEDIUM,
    "refusal": re.compile(r"refusal"),
    "detail": re.compile(r"(train|training)details?"),
}

SETTINGS = ("on", "off", "yes", "no", "true", "false", "none", "low", "medium", "high", "minimal", "auto", "0", "1")
"""Values of a field named like reasoning that say how much of it is asked for, not what it is."""


@lru_cache(maxsize=4096)
def normal(name: str) -> str:
    """Return a name in lower case without anything but letters and digits."""
    return "".join(character for character in name.lower() if character.isalnum())


@lru_cache(maxsize=4096)
def meaning_in_row(name: str) -> str | None:
    """Return what a field of a row is beside a format's own fields: a key of `_OF_ROW`, or None."""
    return _meaning(name, _OF_ROW)


@lru_cache(maxsize=4096)
def meaning_in_turn(name: str) -> str | None:
    """Return what a field of a turn is beside role and content: a key of `_OF_TURN`, or None."""
    return _meaning(name, _OF_TURN)


@lru_cache(maxsize=4096)
def mark_of(name: str) -> Mark | None:
    """Return how to read a field of a turn that says whether it is learnt; None for other fields."""
    found = normal(name)
    return next((mark for pattern, mark in _MARKS if pattern.fullmatch(found)), None)


def is_reasoning(name: str) -> bool:
    """Return whether a field, or a type of a content part, is named as reasoning."""
    return _REASONING.fullmatch(normal(name)) is not None


def _meaning(name: str, patterns: dict[str, re.Pattern[str]]) -> str | None:
    found = normal(name)
    return next((meaning for meaning, pattern in patterns.items() if pattern.fullmatch(found)), None)
