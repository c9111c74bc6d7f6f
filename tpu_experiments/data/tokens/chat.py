"""Conversations rendered with a tokenizer's own template, and where the answers lie in the text.

A span is found by rendering prefixes of the conversation as text, so that it holds for any template
that renders a turn the same whatever follows it; one that does not is refused, not mislearnt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2.exceptions import TemplateError, TemplateRuntimeError
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.sandbox import TemplateLimit, rendered

Messages = tuple[tuple[str, str], ...]
"""(role, content) pairs; the roles are system, user and assistant."""
FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What the expressions of a template raise, as those of Python do."""


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation; all positions are in characters."""

    text: str
    answers: list[tuple[int, int]]
    """(begin, end) of every assistant turn with its end-of-turn marker, in order."""
    cuts: list[int]
    """Where a user or system turn begins after an answer."""


class TemplateRefusal(Exception):
    """The template does not render a conversation as it is; the message goes on from `line 3 of a.jsonl has`."""


def render(
    messages: Messages,
    *,
    tokenizer: PreTrainedTokenizerBase,
    ends_with: Literal["turn", "generation_prompt"],
) -> str:
    """Render a conversation, as the tokenizer's `apply_chat_template` makes it, within limits (sandbox.py).

    Raises:
        TemplateError: of jinja2, when the template refuses it or fails over it.
        ConfigError: the template does more than any chat needs.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    return render_turns(turns, tools=None, tokenizer=tokenizer, ends_with=ends_with)


def render_turns(
    turns: Sequence[Mapping[str, Any]],
    *,
    tools: list[Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    ends_with: Literal["turn", "generation_prompt"],
) -> str:
    """As `render`, of turns with whatever a template may read of them, and of the tools that it may tell of.

    Raises:
        TemplateError: of jinja2, when the template refuses it or fails over it.
        ConfigError: the template does more than any chat needs.
    """
    try:
        return rendered(
            tokenizer.get_chat_template(tools=tools),
            messages=turns,
            tools=tools,
            add_generation_prompt=ends_with == "generation_prompt",
            more=tokenizer.special_tokens_map,
        )
    except TemplateLimit as error:
        raise ConfigError(
            f"model.tokenizer_path={tokenizer.name_or_path}; its chat template, or that of model.chat_template_path=, "
            f"{error}, which no chat needs; read it, or take another with model.chat_template_path=FILE or "
            "model.chat_format=chatml."
        ) from error
    except FAILURES as error:
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


def render_prompt(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text after which an answer follows, in the first form that the template renders with its system text.

    Raises:
        TemplateRefusal: the template refuses the conversation.
    """
    refusal: TemplateError | None = None
    for form in FORMS:
        changed = form(messages)
        try:
            text = render(changed, tokenizer=tokenizer, ends_with="generation_prompt")
            if _keeps_system_texts(changed, tokenizer=tokenizer):
                return text
        except TemplateError as error:
            refusal = error
    raise _refused(messages, refusal, tokenizer=tokenizer) from refusal


def render_by_prefixes(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> RenderedChat:
    """Render a conversation, and 2 prefixes of it for every answer.

    Raises:
        TemplateRefusal: the template refuses the conversation, or rewrites earlier turns.
    """
    messages, text = _accepted(messages, tokenizer=tokenizer)
    answers, cuts = [], []
    for i, (role, content) in enumerate(messages):
        if role != "assistant":
            continue
        try:
            begin, end = _answer_with_blanks(messages, i, text=text, tokenizer=tokenizer)
        except TemplateError as error:  # a part of the conversation, such as its system turn alone
            raise _refused(messages[: i + 1], error, tokenizer=tokenizer) from error
        answers.append((begin, without_blanks(text, begin=begin, end=end)))
        if content.strip() not in text[slice(*answers[-1])]:
            raise TemplateRefusal(
                f"{len(messages)} turns, and the chat template of {tokenizer.name_or_path} renders turn {i + 1} "
                "differently when turns follow it, so that it cannot be marked as learnt; set "
                "model.chat_template_path=FILE to a template that keeps every turn."
            )
        if i + 1 < len(messages) and messages[i + 1][0] != "assistant":
            cuts.append(end)
    return RenderedChat(text, answers, cuts)


def _answer_with_blanks(
    messages: Messages, i: int, *, text: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """(begin, end) of turn `i` in the text of all, from the generation prompt to the next turn.

    From its content where there is no prompt, since it is the first, or another one: what a template writes before an
    answer, a system text of its own or the turn's header, is not the assistant's.
    """
    prompt = render(messages[:i], tokenizer=tokenizer, ends_with="generation_prompt") if i else None
    begin = None if prompt is None or not text.startswith(prompt) else len(prompt)
    if begin is None:
        begin = _content_begin(messages, i, text=text, tokenizer=tokenizer)
    if begin is None:
        # The template rewrites it. The caller refuses it where it is not found after the turns before it.
        asked = render(messages[:i], tokenizer=tokenizer, ends_with="turn") if i else text
        begin = shared_end(asked, text, tokenizer=tokenizer)
    answered = render(messages[: i + 1], tokenizer=tokenizer, ends_with="turn")
    return begin, shared_end(answered, text, tokenizer=tokenizer)


def _content_begin(messages: Messages, i: int, *, text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Where the content of turn `i` begins in the text of all; None where the template does not keep it."""
    marked = (*messages[:i], (messages[i][0], placeholder(i)), *messages[i + 1 :])
    return begin_of(placeholder(i), marked=render(marked, tokenizer=tokenizer, ends_with="turn"), text=text)


def begin_of(mark: str, *, marked: str, text: str) -> int | None:
    """Where in a text that stands for which `marked` has the mark; None where they differ before it."""
    before, found, _ = marked.partition(mark)
    return len(before) if found and text.startswith(before) else None


def shared_length(prefix: str, text: str) -> int:
    """Characters that both begin with."""
    if text.startswith(prefix):
        return len(prefix)
    pairs = enumerate(zip(prefix, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prefix), len(text)))


def shared_end(prefix: str, text: str, *, tokenizer: PreTrainedTokenizerBase) -> int:
    """`shared_length`, or the start of the added token inside which the two begin to differ.

    Phi-3 closes a conversation with `<|endoftext|>`, which shares its `<|` with the `<|user|>` of a next turn.
    """
    at = shared_length(prefix, text)
    if at == len(prefix):
        return at
    around = ((at - k, token) for token in tokenizer.added_tokens_encoder for k in range(1, len(token)))
    return min((begin for begin, token in around if begin >= 0 and text.startswith(token, begin)), default=at)


def without_blanks(text: str, *, begin: int, end: int) -> int:
    """End of an answer: the white space after an end-of-turn marker is never generated."""
    return begin + len(text[begin:end].rstrip())


def _accepted(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> tuple[Messages, str]:
    """The conversation in the first form that the template renders without losing a system text."""
    refusal: TemplateError | None = None
    for form in FORMS:
        changed = form(messages)
        try:
            text = render(changed, tokenizer=tokenizer, ends_with="turn")
        except TemplateError as error:
            refusal = error
            continue
        if _keeps_system_texts(changed, tokenizer=tokenizer):
            return changed, text
    raise _refused(messages, refusal, tokenizer=tokenizer) from refusal


def _refused(
    messages: Messages, refusal: TemplateError | None, *, tokenizer: PreTrainedTokenizerBase
) -> TemplateRefusal:
    return TemplateRefusal(
        f"{len(messages)} turns ({', '.join(role for role, _ in messages)}), which the chat template of "
        f"{tokenizer.name_or_path} refuses: {refusal or 'it drops the system text'}; mend the row, or set "
        "model.chat_template_path=FILE."
    )


def _keeps_system_texts(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Seen from placeholders, since a system text may also be part of another turn."""
    marked = tuple((role, placeholder(i) if role == "system" else text) for i, (role, text) in enumerate(messages))
    if marked == messages:
        return True
    text = render(marked, tokenizer=tokenizer, ends_with="turn")
    return all(content in text for role, content in marked if role == "system")


def placeholder(turn: int) -> str:
    """What the content of a turn is found by: Unicode non-characters, in no template and no vocabulary."""
    return f"\ufdd0{turn}\ufdd1"


def _as_they_are(messages: Messages) -> Messages:
    return messages


def _merged(messages: Messages) -> Messages:
    """Neighbouring turns of one role joined by an empty line, without those that are blank."""
    merged: list[tuple[str, str]] = []
    for role, content in messages:
        if merged and merged[-1][0] == role:
            content = "\n\n".join(part for part in (merged.pop()[1], content) if part.strip())
        merged.append((role, content))
    return tuple(merged)


def _folded(messages: Messages) -> Messages:
    """System turns become user turns, so that merging puts their text before the question."""
    return _merged(tuple(("user" if role == "system" else role, content) for role, content in messages))


FORMS: tuple[Callable[[Messages], Messages], ...] = (_as_they_are, _merged, _folded)
"""Tried in turn. Mistral v0.1 and v0.2 refuse a system role and turns that do not alternate; the
v0.3 template drops the system text of a conversation that ends with an answer."""
