"""Conversations in which an assistant calls tools, rendered with the tokenizer's own template.

An assistant's turn is learnt with its calls and its end-of-turn marker, as transformers' `return_assistant_tokens_mask`
and TRL's training templates have it: the calls are what it writes. What a tool answers is read and never learnt.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.tokens.chat import (
    Messages,
    RenderedChat,
    TemplateRefusal,
    begin_of,
    placeholder,
    render_turns,
    shared_end,
    without_blanks,
)

REMEDY = "set model.chat_template_path=FILE to a template with tools, or leave the row out."


@dataclass(frozen=True)
class ToolChat:
    """A conversation with what its turns have beside their contents; see `Document`."""

    messages: Messages
    extras: tuple[str, ...]
    tools: str

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns as a template reads them."""
        extras = self.extras or ("",) * len(self.messages)
        return [
            {"role": role, "content": content, **(json.loads(extra) if extra else {})}
            for (role, content), extra in zip(self.messages, extras, strict=True)
        ]


def render_tool_chat(chat: ToolChat, *, tokenizer: PreTrainedTokenizerBase) -> RenderedChat:
    """Render a conversation, and 2 prefixes of it for every answer.

    Raises:
        TemplateRefusal: the template refuses the conversation, rewrites earlier turns, or leaves out tools, calls or
            what a tool answered.
    """
    turns, tools = chat.turns, json.loads(chat.tools) if chat.tools else None

    def text_of(part: list[dict[str, Any]], ends_with: Literal["turn", "generation_prompt"]) -> str:
        try:
            return render_turns(part, tools=tools, tokenizer=tokenizer, ends_with=ends_with)
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in part)
            raise TemplateRefusal(
                f"{len(part)} turns ({roles}), which the chat template of {tokenizer.name_or_path} refuses: {error}; "
                f"mend the row, or {REMEDY}"
            ) from error

    text = text_of(turns, "turn")
    _require_kept(text, turns=turns, tools=tools, tokenizer=tokenizer)
    answers, cuts = [], []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt = text_of(turns[:i], "generation_prompt") if i else None
        begin = None if prompt is None or not text.startswith(prompt) else len(prompt)
        if begin is None:  # as in render_by_prefixes
            marked = text_of([*turns[:i], turn | {"content": placeholder(i)}, *turns[i + 1 :]], "turn")
            begin = begin_of(placeholder(i), marked=marked, text=text)
        if begin is None:
            begin = shared_end(text_of(turns[:i], "turn") if i else text, text, tokenizer=tokenizer)
        end = shared_end(text_of(turns[: i + 1], "turn"), text, tokenizer=tokenizer)
        answers.append((begin, without_blanks(text, begin=begin, end=end)))
        wanted = [turn["content"].strip(), *(call["function"]["name"] for call in turn.get("tool_calls", []))]
        if not all(part in text[slice(*answers[-1])] for part in wanted):
            raise TemplateRefusal(
                f"{len(turns)} turns, and the chat template of {tokenizer.name_or_path} renders turn {i + 1} "
                "differently when turns follow it, or without its calls, so that it cannot be marked as learnt; "
                f"{REMEDY}"
            )
        if i + 1 < len(turns) and turns[i + 1]["role"] not in ("assistant", "tool"):
            cuts.append(end)
    return RenderedChat(text, answers, cuts)


def _require_kept(
    text: str, *, turns: list[dict[str, Any]], tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    lost = [f"the tool {name!r}" for name in map(_name_of, tools or []) if name not in text]
    lost += [
        f"what a tool answers in turn {i}"
        for i, turn in enumerate(turns, start=1)
        if turn["role"] in ("tool", "system") and turn["content"].strip() not in text
    ]
    if lost:
        raise TemplateRefusal(
            f"tools, and the chat template of {tokenizer.name_or_path} leaves out {lost[0]}; {REMEDY}"
        )


def _name_of(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool)["name"])
