"""Conversations rendered with a tokenizer's own template, and where the answers lie in the text.

A span is found by rendering prefixes of the conversation as text, so that it holds for any template
that renders a turn the same whatever follows it; one that does not is refused, not mislearnt.
"""

from typing import Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError

Messages = tuple[tuple[str, str], ...]
"""(role, content) pairs; the roles are system, user and assistant."""


def render(
    messages: Messages,
    *,
    tokenizer: PreTrainedTokenizerBase,
    ends_with: Literal["turn", "generation_prompt"],
) -> str:
    """The text of a conversation; raises jinja2's TemplateError when the template refuses it."""
    text: str = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=ends_with == "generation_prompt",
    )
    return text


def render_conversation(
    messages: Messages, *, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and (begin, end) in characters of every assistant turn with its end marker.

    Raises:
        ConfigError: the template refuses the conversation, or rewrites earlier turns.
    """
    messages, text = _accepted(messages, tokenizer=tokenizer, where=where)
    spans = []
    for i, (role, content) in enumerate(messages):
        if role != "assistant":
            continue
        begin, end = _span(messages, i, text=text, tokenizer=tokenizer)
        if content.strip() not in text[begin:end]:
            raise ConfigError(
                f"{where}; the chat template of {tokenizer.name_or_path} renders turn {i + 1} of "
                f"{len(messages)} differently when turns follow it, so that it cannot be marked as "
                "learnt; set model.chat_template_path=FILE to a template that keeps every turn."
            )
        spans.append((begin, end))
    return text, spans


def _accepted(messages: Messages, *, tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[Messages, str]:
    """The conversation in the first form that the template renders without losing a system text.

    Mistral v0.1 and v0.2 refuse a system role and turns that do not alternate; the v0.3 template
    drops the system text of a conversation that ends with an answer.
    """
    refusal: TemplateError | None = None
    for form in (messages, _merged(messages), _merged(_folded(messages))):
        try:
            text = render(form, tokenizer=tokenizer, ends_with="turn")
        except TemplateError as error:
            refusal = error
            continue
        if all(content.strip() in text for role, content in form if role == "system"):
            return form, text
    raise ConfigError(
        f"{where}; the chat template of {tokenizer.name_or_path} refuses its {len(messages)} turns "
        f"({', '.join(role for role, _ in messages)}): {refusal}; mend the row, or set "
        "model.chat_template_path=FILE."
    ) from refusal


def _span(messages: Messages, i: int, *, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    begin = 0
    if i > 0:
        prompt = render(messages[:i], tokenizer=tokenizer, ends_with="generation_prompt")
        begin = len(prompt)
        if not text.startswith(prompt):
            asked = render(messages[:i], tokenizer=tokenizer, ends_with="turn")
            begin = _shared_length(asked, text)
    answered = render(messages[: i + 1], tokenizer=tokenizer, ends_with="turn")
    end = _shared_length(answered, text)
    # The white space after an end-of-turn marker is never generated.
    return begin, begin + len(text[begin:end].rstrip())


def _shared_length(prefix: str, text: str) -> int:
    """Characters that both begin with."""
    if text.startswith(prefix):
        return len(prefix)
    pairs = enumerate(zip(prefix, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prefix), len(text)))


def _merged(messages: Messages) -> Messages:
    """Neighbouring turns of one role joined by an empty line."""
    merged: list[tuple[str, str]] = []
    for role, content in messages:
        if merged and merged[-1][0] == role:
            content = f"{merged.pop()[1]}\n\n{content}"
        merged.append((role, content))
    return tuple(merged)


def _folded(messages: Messages) -> Messages:
    """System turns become user turns, so that merging puts their text before the question."""
    return tuple(("user" if role == "system" else role, content) for role, content in messages)
