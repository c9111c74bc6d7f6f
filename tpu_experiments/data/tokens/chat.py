"""Rendering of conversations with the tokenizer's own chat template, and the spans of the answers.

A span is found by rendering prefixes of the conversation as text, which works for any template that renders a turn the
same whatever follows it. A template that does not is refused, so that no wrong token is trained on.

Structure cache. In the templates of today the positions of contents and answers depend on the roles alone. So each
sequence of roles is rendered by prefixes once, with placeholders. A conversation is then rendered once, and its text
compared, character for character, with the cached pieces and its own contents; where they differ it is rendered by
prefixes itself.

Tools. An assistant's turn is trained on with its calls and its end-of-turn marker, since the assistant writes them, as
in transformers' `return_assistant_tokens_mask` and TRL's training templates. Tool results are context only.
"""

import json
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
"""Exceptions that the expressions of a template raise, as Python's do."""


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation; all positions are in characters."""

    text: str
    answers: list[tuple[int, int]]
    """(begin, end) of every assistant turn with its end-of-turn marker, in order."""
    cuts: list[int]
    """Starts of user and system turns that follow an answer."""


class TemplateRefusal(Exception):
    """The template cannot render a conversation faithfully; the message continues `line 3 of a.jsonl has`."""


def render(
    messages: Messages,
    *,
    tokenizer: PreTrainedTokenizerBase,
    ends_with: Literal["turn", "generation_prompt"],
) -> str:
    """Render a conversation as the tokenizer's `apply_chat_template` does, within limits (sandbox.py).

    Raises:
        TemplateError: of jinja2, when the template refuses the conversation or fails on it.
        ConfigError: the template exceeds the limits.
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
    """Render turns with all fields that a template may read, and the tools offered; see `render`.

    Raises:
        TemplateError: of jinja2, when the template refuses the conversation or fails on it.
        ConfigError: the template exceeds the limits.
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
    """Render the text that an answer follows, in the first form that keeps the system text.

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
    """Render a conversation, and two prefixes of it for every answer.

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
    """Return (begin, end) of turn `i` in the full text, from the generation prompt to the next turn.

    It begins at its content where the generation prompt is no prefix of the text, or the turn is the first: what a
    template writes before an answer, such as a default system text or the turn's header, is not the assistant's.
    """
    prompt = render(messages[:i], tokenizer=tokenizer, ends_with="generation_prompt") if i else None
    begin = None if prompt is None or not text.startswith(prompt) else len(prompt)
    if begin is None:
        begin = _content_begin(messages, i, text=text, tokenizer=tokenizer)
    if begin is None:
        # The template rewrites the content. The caller refuses it unless it is found after the turns before it.
        asked = render(messages[:i], tokenizer=tokenizer, ends_with="turn") if i else text
        begin = shared_end(asked, text, tokenizer=tokenizer)
    answered = render(messages[: i + 1], tokenizer=tokenizer, ends_with="turn")
    return begin, shared_end(answered, text, tokenizer=tokenizer)


def _content_begin(messages: Messages, i: int, *, text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the start of turn `i`'s content in the full text; None if the template does not keep it."""
    marked = (*messages[:i], (messages[i][0], placeholder(i)), *messages[i + 1 :])
    return begin_of(placeholder(i), marked=render(marked, tokenizer=tokenizer, ends_with="turn"), text=text)


def begin_of(mark: str, *, marked: str, text: str) -> int | None:
    """Return the position in `text` of the mark in `marked`; None if the two differ before it."""
    before, found, _ = marked.partition(mark)
    return len(before) if found and text.startswith(before) else None


def shared_length(prefix: str, text: str) -> int:
    """Return the length of the common prefix."""
    if text.startswith(prefix):
        return len(prefix)
    pairs = enumerate(zip(prefix, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prefix), len(text)))


def shared_end(prefix: str, text: str, *, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return `shared_length`, or the start of the added token within which the two first differ.

    Phi-3 closes a conversation with `<|endoftext|>`, which shares its `<|` with the `<|user|>` of a next turn.
    """
    at = shared_length(prefix, text)
    if at == len(prefix):
        return at
    around = ((at - k, token) for token in tokenizer.added_tokens_encoder for k in range(1, len(token)))
    return min((begin for begin, token in around if begin >= 0 and text.startswith(token, begin)), default=at)


def without_blanks(text: str, *, begin: int, end: int) -> int:
    """Return the end of an answer without trailing white space, which is never generated after a marker."""
    return begin + len(text[begin:end].rstrip())


def _accepted(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> tuple[Messages, str]:
    """Return the conversation in the first form that renders without losing a system text, and its text."""
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
    """Return whether all system texts are rendered.

    Placeholders are rendered instead, since a system text may also occur in another turn.
    """
    marked = tuple((role, placeholder(i) if role == "system" else text) for i, (role, text) in enumerate(messages))
    if marked == messages:
        return True
    text = render(marked, tokenizer=tokenizer, ends_with="turn")
    return all(content in text for role, content in marked if role == "system")


def placeholder(turn: int) -> str:
    """Return a marker for a turn's content: Unicode non-characters, in no template and no vocabulary."""
    return f"\ufdd0{turn}\ufdd1"


def _unchanged(messages: Messages) -> Messages:
    return messages


def _merged(messages: Messages) -> Messages:
    """Join adjacent turns of one role with an empty line, dropping blank ones."""
    merged: list[tuple[str, str]] = []
    for role, content in messages:
        if merged and merged[-1][0] == role:
            content = "\n\n".join(part for part in (merged.pop()[1], content) if part.strip())
        merged.append((role, content))
    return tuple(merged)


def _folded(messages: Messages) -> Messages:
    """Turn system turns into user turns, so that merging puts their text before the question."""
    return _merged(tuple(("user" if role == "system" else role, content) for role, content in messages))


FORMS: tuple[Callable[[Messages], Messages], ...] = (_unchanged, _merged, _folded)
"""Tried in order. Mistral v0.1 and v0.2 refuse a system role and turns that do not alternate; the
v0.3 template drops the system text of a conversation that ends with an answer."""


_BLANK = "\u2003"
"""White space around a placeholder, to detect trimming; no template writes an em space itself."""


@dataclass(frozen=True)
class _Answer:
    turn: int
    begin: int
    """Characters from the end of the preceding content."""
    end: int
    """Characters from the end of its own content, white space included."""
    is_cut: bool
    """Whether a turn of another role follows."""


@dataclass(frozen=True)
class _Structure:
    """Rendering of one sequence of n roles by a template."""

    form: Callable[[Messages], Messages]
    literals: tuple[str, ...]
    """The n + 1 pieces around the contents."""
    trims: tuple[Callable[[str], str], ...]
    """Trimming of each content."""
    answers: tuple[_Answer, ...]

    def place(self, messages: Messages, *, text: str) -> RenderedChat | None:
        """Return the spans in `text`, or None if it is not composed of these pieces and contents."""
        parts, ends, length = [self.literals[0]], [0], len(self.literals[0])
        for (_, content), trim, literal in zip(messages, self.trims, self.literals[1:], strict=True):
            trimmed = trim(content)
            parts += (trimmed, literal)
            ends.append(length + len(trimmed))
            length += len(trimmed) + len(literal)
        if length != len(text) or "".join(parts) != text:
            return None
        spans, cuts = [], []
        for answer in self.answers:
            begin, end = ends[answer.turn] + answer.begin, ends[answer.turn + 1] + answer.end
            spans.append((begin, without_blanks(text, begin=begin, end=end)))
            if answer.is_cut:
                cuts.append(end)
        return RenderedChat(text, spans, cuts)


class ChatRenderer:
    """Renderer of conversations with one tokenizer's template; caches the structure of each role sequence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._structures: dict[tuple[str, ...], _Structure | None] = {}

    def __call__(self, messages: Messages) -> RenderedChat:
        """Return the same as `render_by_prefixes`, usually with a single rendering.

        Raises:
            TemplateRefusal: the template refuses the conversation, or rewrites earlier turns.
        """
        return self.from_structure(messages) or render_by_prefixes(messages, tokenizer=self.tokenizer)

    def from_structure(self, messages: Messages) -> RenderedChat | None:
        """Render once, by the cached structure; None if that is not possible."""
        roles = tuple(role for role, _ in messages)
        if roles not in self._structures:
            self._structures[roles] = _structure_of(messages, tokenizer=self.tokenizer)
        structure = self._structures[roles]
        if structure is None:
            return None
        messages = structure.form(messages)
        try:
            text = render(messages, tokenizer=self.tokenizer, ends_with="turn")
        except TemplateError:  # it refuses these contents, not these roles
            return None
        return structure.place(messages, text=text)


def _structure_of(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> _Structure | None:
    """Return the template's structure for these roles; None if placeholders cannot reveal it."""
    for form in FORMS:
        roles = [role for role, _ in form(messages)]
        placeholders = tuple((role, f"{_BLANK}{placeholder(i)}{_BLANK}") for i, role in enumerate(roles))
        try:
            text = render(placeholders, tokenizer=tokenizer, ends_with="turn")
        except TemplateError:
            continue
        if all(placeholder(i) in text for i, role in enumerate(roles) if role == "system"):
            return _decomposed(text, placeholders, form=form, tokenizer=tokenizer)
    return None


def _decomposed(
    text: str, placeholders: Messages, *, form: Callable[[Messages], Messages], tokenizer: PreTrainedTokenizerBase
) -> _Structure | None:
    literals, trims, begins, ends = [], [], [], [0]
    for turn in range(len(placeholders)):
        at = text.find(placeholder(turn), ends[-1])
        if at < 0 or text.count(placeholder(turn)) != 1:
            return None
        after = at + len(placeholder(turn))
        blanks = (text[at - 1] == _BLANK, text[after : after + 1] == _BLANK)
        begins.append(at - blanks[0])
        literals.append(text[ends[-1] : begins[-1]])
        trims.append(_TRIMS[blanks])
        ends.append(after + blanks[1])
    literals.append(text[ends[-1] :])
    begins.append(len(text))
    answers = []
    for turn, (role, _) in enumerate(placeholders):
        if role == "assistant":
            limits = begins[turn], begins[turn + 1]
            borders = _fixed_borders(placeholders, turn, text=text, limits=limits, tokenizer=tokenizer)
            if borders is None or borders[0] < ends[turn] or borders[1] < ends[turn + 1]:
                return None
            begin, end = borders
            is_cut = turn + 1 < len(placeholders) and placeholders[turn + 1][0] != "assistant"
            answers.append(_Answer(turn, begin - ends[turn], end - ends[turn + 1], is_cut))
    return _Structure(form, tuple(literals), tuple(trims), tuple(answers))


def _fixed_borders(
    placeholders: Messages, turn: int, *, text: str, limits: tuple[int, int], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int] | None:
    """Return (begin, end) of an answer as in `render_by_prefixes`; None if other contents could move them.

    They are fixed where a prefix is a whole one, or differs from the text before `limits`, the starts of
    this content and of the next.
    """
    first_limit, last_limit = limits
    begin = first_limit
    try:
        if turn > 0:
            prompt = render(placeholders[:turn], tokenizer=tokenizer, ends_with="generation_prompt")
            begin = shared_length(prompt, text)
            if begin < len(prompt):
                if begin >= first_limit:
                    return None
                begin = first_limit
        answered = render(placeholders[: turn + 1], tokenizer=tokenizer, ends_with="turn")
    except TemplateError:  # the prefix alone is refused; reported when it is rendered by prefixes
        return None
    end = shared_length(answered, text)
    if begin > first_limit or (end == last_limit and end < len(answered)) or end > last_limit:
        return None
    return begin, shared_end(answered, text, tokenizer=tokenizer)


def _verbatim(content: str) -> str:
    return content


_TRIMS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (True, True): _verbatim,
    (True, False): str.rstrip,
    (False, True): str.lstrip,
    (False, False): str.strip,
}
"""By whether white space was kept before and after a placeholder."""


REMEDY = "set model.chat_template_path=FILE to a template with tools, or leave the row out."


@dataclass(frozen=True)
class ToolChat:
    """A conversation with the template fields of its turns beside content; see `Document`."""

    messages: Messages
    extras: tuple[str, ...]
    tools: str

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns as dictionaries for a template."""
        extras = self.extras or ("",) * len(self.messages)
        return [
            {"role": role, "content": content, **(json.loads(extra) if extra else {})}
            for (role, content), extra in zip(self.messages, extras, strict=True)
        ]


def render_tool_chat(chat: ToolChat, *, tokenizer: PreTrainedTokenizerBase) -> RenderedChat:
    """Render a conversation with tools, and two prefixes of it for every answer.

    Raises:
        TemplateRefusal: the template refuses the conversation, rewrites earlier turns, or drops tools, calls or tool
            results.
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
