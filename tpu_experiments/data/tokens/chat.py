"""Rendering of conversations with the tokenizer's own chat template, and the spans of the answers.

Spans. An answer begins where the generation prompt of the turns before it ends. It ends where the template closes it:
what follows its content when it is the last turn, or what stands before the prompt of a next answer (GPT-OSS closes the
last turn with `<|return|>` and earlier ones with `<|end|>`). Both are found by rendering prefixes of the conversation,
which works for any template that renders a turn the same whatever follows it.

Faults. An answer that the full text does not have as the model generates it, or without what the row says, has a fault:
its prompt is another once turns follow, it is closed in no way that its prefix is, it has no end, or its content, calls
or reasoning are not in its span. It is never learnt from that text; it may be learnt from a text that ends with it.

Structure cache. In the templates of today the positions of contents and answers depend on the roles alone. So each
sequence of roles is rendered by prefixes once, with placeholders. A conversation is then rendered once, and its text
compared, character for character, with the cached pieces and its own contents; where they differ it is rendered by
prefixes itself.

Tools. An assistant's turn is trained on with its calls and its end-of-turn marker, since the assistant writes them, as
in transformers' `return_assistant_tokens_mask` and TRL's training templates. Tool results are context only.

Reasoning is handed to a template under the name that it reads (`reasoning_content`, `thinking`, ...), found by
rendering a placeholder under each.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from jinja2.exceptions import TemplateError, TemplateRuntimeError
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import REASONING as CANONICAL
from tpu_experiments.data.tokens.sandbox import TRAINING_DAY, TemplateLimit, rendered

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
    faults: dict[int, str] = field(default_factory=dict)
    """By number of an answer, why it cannot be learnt from this text: `ends ...`, `is rendered ...`."""
    asked: list[tuple[int, int]] = field(default_factory=list, compare=False)
    """(begin, end) of what each user turn says; empty where the structure of the template does not tell."""


class TemplateRefusal(Exception):
    """The template cannot render a conversation faithfully; the message continues `line 3 of a.jsonl has`."""


def render(
    messages: Messages,
    *,
    tokenizer: PreTrainedTokenizerBase,
    ends_with: Literal["turn", "generation_prompt"],
    now: datetime = TRAINING_DAY,
) -> str:
    """Render a conversation as the tokenizer's `apply_chat_template` does, within limits (sandbox.py).

    Raises:
        TemplateError: of jinja2, when the template refuses the conversation or fails on it.
        ConfigError: the template exceeds the limits.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    return render_turns(turns, tools=None, tokenizer=tokenizer, ends_with=ends_with, now=now)


def render_turns(
    turns: Sequence[Mapping[str, Any]],
    *,
    tools: list[Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    ends_with: Literal["turn", "generation_prompt"],
    now: datetime = TRAINING_DAY,
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
            now=now,
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
    """Render the text that an answer follows, in the first form that keeps the system text, dated today.

    Raises:
        TemplateRefusal: the template refuses the conversation.
    """
    refusal: TemplateError | None = None
    for form in FORMS:
        changed = form(messages)
        try:
            text = render(changed, tokenizer=tokenizer, ends_with="generation_prompt", now=datetime.now())
            if _keeps_system_texts(changed, tokenizer=tokenizer):
                return text
        except TemplateError as error:
            refusal = error
    raise _refused(messages, refusal, tokenizer=tokenizer) from refusal


def render_by_prefixes(messages: Messages, *, tokenizer: PreTrainedTokenizerBase) -> RenderedChat:
    """Render a conversation, and two prefixes of it for every answer.

    Raises:
        TemplateRefusal: the template refuses the conversation.
    """
    messages, text = _accepted(messages, tokenizer=tokenizer)
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        return _Conversation(turns, tools=None, text=text, tokenizer=tokenizer).located()
    except TemplateError as error:  # of a part of the conversation, such as its system turn alone
        raise _refused(messages, error, tokenizer=tokenizer) from error


@dataclass(frozen=True)
class _Conversation:
    """Turns as a template takes them, and their full text."""

    turns: Sequence[Mapping[str, Any]]
    tools: list[Any] | None
    text: str
    tokenizer: PreTrainedTokenizerBase

    def located(self) -> RenderedChat:
        """Return the spans of all answers, with their faults.

        Raises:
            TemplateError: the template refuses a prefix.
        """
        answers: list[tuple[int, int]] = []
        cuts, faults = [], {}
        for i, turn in enumerate(self.turns):
            if turn["role"] != "assistant":
                continue
            begin, end, fault = self.answer(i)
            span = (begin, without_blanks(self.text, begin=begin, end=end))
            missing = None if fault else _missing(turn, self.text[slice(*span)])
            if fault or missing:
                faults[len(answers)] = fault or f"is rendered without its {missing}"
            answers.append(span)
            if i + 1 < len(self.turns) and self.turns[i + 1]["role"] not in ("assistant", "tool"):
                cuts.append(end)
        return RenderedChat(self.text, answers, cuts, faults)

    def answer(self, i: int) -> tuple[int, int, str | None]:
        """Return (begin, end) of turn `i` in the full text, blanks behind it included, and its fault.

        It begins behind the generation prompt; where that is no prefix of the text, or the turn is the first, behind
        the prompt's own text, or at its content: what a template writes before an answer, such as a default system
        text or the turn's header, is not the assistant's.
        """
        text, is_last = self.text, i + 1 == len(self.turns)
        answered = text if is_last else self._part(i + 1, "turn")
        prompt = self._part(i, "generation_prompt") if i else None
        fault = None
        if prompt is not None and text.startswith(prompt):
            begin = len(prompt)
            if prompt == self._part(i, "turn"):  # of what a tool answers, DiffusionGemma asks for no answer
                opening = self._opening()
                begin += len(opening) if text.startswith(opening, begin) else 0
        else:
            begin, is_asked = self._begin(i, prompt)
            if prompt is not None and answered.startswith(prompt):
                fault = OTHERWISE
            elif prompt is not None and not is_asked and not self._goes_on(prompt, begin):
                fault = UNASKED
        if text.startswith(answered):
            end = len(answered)
        else:
            closed = self._closed(i)
            end = len(closed) if closed and text.startswith(closed) else shared_end(answered, text, self.tokenizer)
            if not (closed and text.startswith(closed)):
                fault = OTHERWISE
        if fault is None and prompt is not None and (hidden := self._hidden(i)) is not None:
            fault = f"is asked for without turn {hidden + 1}, which is then learnt or lost"
        if fault is None and not is_last and not self._is_closed(i, begin=begin, end=end):
            fault = "has no end before the next turn"
        return begin, max(begin, end), fault

    def _part(self, number: int, ends_with: Literal["turn", "generation_prompt"]) -> str:
        return self._rendered(self.turns[:number], ends_with)

    def _rendered(self, turns: Sequence[Mapping[str, Any]], ends_with: Literal["turn", "generation_prompt"]) -> str:
        return render_turns(turns, tools=self.tools, tokenizer=self.tokenizer, ends_with=ends_with)

    def _hidden(self, i: int) -> int | None:
        """Return the first turn of another role that the prompt of turn `i` does not show; None if it shows all."""
        asked = [
            t if t["role"] == "assistant" else {**t, "content": placeholder(n)} for n, t in enumerate(self.turns[:i])
        ]
        prompt = self._rendered(asked, "generation_prompt")
        others = (n for n, turn in enumerate(asked) if turn["role"] != "assistant")
        return next((n for n in others if placeholder(n) not in prompt), None)

    def _goes_on(self, prompt: str, begin: int) -> bool:
        """Return whether an answer goes on where its prompt stops to be a prefix, but for the tags of reasoning.

        The prompts of models that think end with `<think>`, which answers without reasoning lack, or close at once.
        """
        at = shared_end(prompt, self.text, self.tokenizer)
        at = max(at, shared_length(prompt, self.text) if self.text[:begin].endswith(THINK_TAGS) else at)
        return at <= begin and not re.sub("|".join(THINK_TAGS), "", self.text[at:begin]).strip("\n /<>")

    def _begin(self, i: int, prompt: str | None) -> tuple[int, bool]:
        """Return where turn `i` begins, and if that is behind the text that asks for it (else at its first field)."""
        asked = self._part(i, "turn") if i else ""
        fields = (self._field_begin(i, kind) for kind in ("content", "reasoning"))
        begin = min((at for at in fields if at is not None), default=-1)
        if begin < 0:
            # The template rewrites the content, which is then not found in the span.
            return shared_end(asked, self.text, self.tokenizer) if i else len(self.text), True
        opening = self._opening() if prompt is None else prompt[shared_end(asked, prompt, self.tokenizer) :]
        at = self.text.rfind(opening, 0, begin) if opening.strip() else -1
        return (begin, False) if at < shared_length(asked, self.text) else (at + len(opening), True)

    def _field_begin(self, i: int, kind: str) -> int | None:
        """Return the start of a field of turn `i` in the full text; None if the template does not keep it."""
        turn = self.turns[i]
        name = kind if kind == "content" else next(filter(REASONING.search, turn), None)
        if name is None:
            return None
        marked = self._rendered([*self.turns[:i], {**turn, name: placeholder(i)}, *self.turns[i + 1 :]], "turn")
        return begin_of(placeholder(i), marked=marked, text=self.text)

    def _opening(self) -> str:
        """Return what the template asks for an answer with, behind the last turn of another role that it asks after."""
        for number in range(len(self.turns), 0, -1):
            if self.turns[number - 1]["role"] in ("user", "system"):
                asked, prompt = self._part(number, "turn"), self._part(number, "generation_prompt")
                return prompt[shared_end(asked, prompt, self.tokenizer) :]
        return ""

    def _closed(self, i: int) -> str | None:
        """Return the text up to and with turn `i` as it is before a next answer, without the prompt for that."""
        try:
            opening, closed = self._opening(), self._part(i + 1, "generation_prompt")
        except TemplateError:
            return None
        return closed.removesuffix(opening) if opening and closed.endswith(opening) else None

    def _is_closed(self, i: int, *, begin: int, end: int) -> bool:
        """Return whether the template writes something behind the fields of turn `i`."""
        turn = self.turns[i]
        if turn.get("tool_calls"):
            probe = [{"role": role, "content": placeholder(n)} for n, role in enumerate(("user", "assistant") * 2)]
            try:
                text = render_turns(probe, tools=None, tokenizer=self.tokenizer, ends_with="turn")
                return _Conversation(probe, None, text, self.tokenizer).answer(1)[2] is None
            except TemplateError:
                return True
        written = self.text[begin:end].rstrip()
        if not written.endswith(turn["content"].strip()):
            return True
        at = self._field_begin(i, "content")  # a content may be written like the end
        return at is not None and self.text[at:end].strip() != turn["content"].strip()


OTHERWISE = "is rendered otherwise when turns follow it"
UNASKED = "does not begin as the generation prompt asks for it"
THINK_TAGS = ("<think>", "</think>")
REASONING = re.compile(r"reason|think|thought|rationale|cot$", re.IGNORECASE)
"""Names of the fields that templates read a turn's reasoning from."""
THOUGHT = "<think>\n{}\n</think>\n\n{}"
"""Reasoning and content as one, as the models that think write them."""


def _missing(turn: Mapping[str, Any], span: str) -> str | None:
    """Return what of an answer its span does not have: its content, reasoning, or a call; None if it has all."""
    if any(REASONING.search(name) and str(value).strip() not in span for name, value in turn.items()):
        return "reasoning"
    content = turn["content"].strip()
    # Templates with a place for reasoning read it from the content too, and write its tags in their own way.
    if content not in span and not all(part.strip() in span for part in re.split(r"</?think>", content)):
        return "content"
    calls = [call["function"] for call in turn.get("tool_calls", [])]
    for number, call in enumerate(calls, start=1):
        same = [other["name"] for other in calls[:number]].count(call["name"])
        if span.count(call["name"]) < same or not all(
            _is_written(text, span) for text in _texts(call.get("arguments"))
        ):
            return f"call of {call['name']!r}"
    return None


def _is_written(content: str, text: str) -> bool:
    """Return whether a content is in a text: as it is, as JSON text, or, quoted otherwise, all of its words."""
    forms = (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
    return any(form in text for form in forms) or all(word in text for word in re.findall(r"\w+", content) or [content])


def _texts(value: Any) -> list[str]:
    """Return all names and strings of a JSON value; of arguments that are JSON text, none."""
    if isinstance(value, Mapping):
        return [
            text
            for name, item in value.items()
            for text in (name, *([item] if isinstance(item, str) else _texts(item)))
        ]
    if isinstance(value, list):
        return [text for item in value for text in ([item] if isinstance(item, str) else _texts(item))]
    return []


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


def shared_end(prefix: str, text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return `shared_length`, or the start of the added token within which the two first differ.

    Phi-3 closes a conversation with `<|endoftext|>`, which shares its `<|` with the `<|user|>` of a next turn.
    """
    at = shared_length(prefix, text)
    if at == len(prefix):
        return at
    around = ((at - k, token) for token in tokenizer.added_tokens_encoder for k in range(1, len(token)))
    either = (text, prefix)
    return min((k for k, token in around if k >= 0 and any(s.startswith(token, k) for s in either)), default=at)


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
        f"{tokenizer.name_or_path} refuses: {refusal or 'it drops the system text'}; mend the row, or "
        f"{remedy(tokenizer, needs='every turn')}"
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
    fault: str | None


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
        faults = {number: answer.fault for number, answer in enumerate(self.answers) if answer.fault}
        asked = [
            (end - len(trim(content)), end)
            for (role, content), trim, end in zip(messages, self.trims, ends[1:], strict=True)
            if role == "user"
        ]
        return RenderedChat(text, spans, cuts, faults, asked)


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
    chat = _Conversation([{"role": role, "content": text} for role, text in placeholders], None, text, tokenizer)
    for turn, (role, _) in enumerate(placeholders):
        if role == "assistant":
            try:
                begin, end, fault = chat.answer(turn)
            except TemplateError:  # the prefix alone is refused; reported when it is rendered by prefixes
                return None
            # Other contents could move a border within a content, and are rewritten in their own ways.
            if (
                fault == OTHERWISE
                or not ends[turn] <= begin <= begins[turn]
                or not ends[turn + 1] <= end <= begins[turn + 1]
            ):
                return None
            is_cut = turn + 1 < len(placeholders) and placeholders[turn + 1][0] != "assistant"
            answers.append(_Answer(turn, begin - ends[turn], end - ends[turn + 1], is_cut, fault))
    return _Structure(form, tuple(literals), tuple(trims), tuple(answers))


def _verbatim(content: str) -> str:
    return content


_TRIMS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (True, True): _verbatim,
    (True, False): str.rstrip,
    (False, True): str.lstrip,
    (False, False): str.strip,
}
"""By whether white space was kept before and after a placeholder."""


@dataclass(frozen=True)
class ToolChat:
    """A conversation with the template fields of its turns beside content; see `Document`."""

    messages: Messages
    extras: tuple[str, ...]
    tools: str

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns as dictionaries for a template; their reasoning is called `CANONICAL`."""
        extras = self.extras or ("",) * len(self.messages)
        return [
            {"role": role, "content": content, **(json.loads(extra) if extra else {})}
            for (role, content), extra in zip(self.messages, extras, strict=True)
        ]


def render_tool_chat(
    chat: ToolChat, *, tokenizer: PreTrainedTokenizerBase, fields: Mapping[bool, str | None]
) -> RenderedChat:
    """Render a conversation with tools or reasoning, and prefixes of it for every answer.

    Args:
        fields: what `reasoning_fields` finds.

    Raises:
        TemplateRefusal: the template refuses the conversation, or drops tools or tool results.
    """
    turns, tools = chat.turns, json.loads(chat.tools) if chat.tools else None
    for turn in turns:
        if CANONICAL in turn:
            own = fields[bool(turn.get("tool_calls"))] or CANONICAL
            reasoning = turn.pop(CANONICAL)
            turn[own] = THOUGHT.format(reasoning, turn["content"]) if own == "content" else reasoning
    try:
        text = render_turns(turns, tools=tools, tokenizer=tokenizer, ends_with="turn")
        _require_kept(turns, tools=tools, tokenizer=tokenizer)
        return _Conversation(turns, tools, text, tokenizer).located()
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise TemplateRefusal(
            f"{len(turns)} turns ({roles}), which the chat template of {tokenizer.name_or_path} refuses: {error}; "
            f"mend the row, or {remedy(tokenizer, needs='tools')}"
        ) from error


def reasoning_fields(tokenizer: PreTrainedTokenizerBase) -> dict[bool, str | None]:
    """Return the names that the template reads reasoning from, in turns without and with calls; None if it does not.

    A name of the template's source is such a one if text under it is rendered, once. It is `content` where the template
    speaks of `</think>` and keeps that in a content, as those of DeepSeek R1 for training.
    """
    source = tokenizer.get_chat_template()
    known = (CANONICAL, "reasoning", "thinking", "thought")
    written = sorted(name for name in set(re.findall(r"[A-Za-z_]\w*", source)) if REASONING.search(name))
    names = [*(name for name in known if name in written), *(name for name in written if name not in known)]
    names += ["content"] * ("</think>" in source)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    found: dict[bool, str | None] = {}
    shapes: dict[bool, dict[str, Any]] = {False: {"content": "!"}, True: {"content": "", "tool_calls": [call]}}
    for has_calls, turn in shapes.items():
        found[has_calls] = None
        for name in names:
            marked = THOUGHT.format(placeholder(0), turn["content"]) if name == "content" else placeholder(0)
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", **turn, name: marked}]
            try:
                text = render_turns(turns, tools=None, tokenizer=tokenizer, ends_with="turn")
            except TemplateError:
                continue
            if text.count(placeholder(0)) == 1:
                found[has_calls] = name
                break
    return found


def family(tokenizer: PreTrainedTokenizerBase, *, needs: "Needs") -> str | None:
    """Return the format of `model.chat_format` of the tokenizer's family that has a place for it, by its tokens."""
    added = tokenizer.get_added_vocab()
    if "<|im_start|>" in added:
        return "qwen2_5" if "You are Qwen" in str(tokenizer.chat_template) and "<think>" not in added else "qwen3"
    if "<|start_header_id|>" in added:
        return "llama3_1"
    if "[AVAILABLE_TOOLS]" in added and needs == "tools":
        return "mistral_v3" if "▁" in tokenizer.get_vocab() else "mistral_tekken"
    return None


Needs = Literal["tools", "reasoning", "every turn"]
"""What a template is refused for the lack of."""


def remedy(tokenizer: PreTrainedTokenizerBase, *, needs: Needs) -> str:
    """Return the end of a refusal: which template to take."""
    what = "that keeps every turn" if needs == "every turn" else f"with a place for {needs}"
    own = family(tokenizer, needs=needs)
    own_format = f"model.chat_format={own}, or " if own else ""
    return f"set {own_format}model.chat_template_path=FILE to a template {what}, or leave the row out."


def _require_kept(turns: list[dict[str, Any]], *, tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require tools, system texts and what tools answer in the text; by placeholders, as they may occur elsewhere too.

    Raises:
        TemplateRefusal: the template leaves one out.
    """
    named: dict[str, str] = {}

    def marked(text: str, name: str) -> str:
        named[placeholder(len(named))] = name
        return f"{text}{placeholder(len(named) - 1)}"

    turns = [
        {**turn, "content": marked(turn["content"], f"{OTHERS[turn['role']]} turn {number}")}
        if turn["role"] in OTHERS
        else turn
        for number, turn in enumerate(turns, start=1)
    ]
    text = render_turns(
        turns, tools=tools and [_marked_tool(t, marked) for t in tools], tokenizer=tokenizer, ends_with="turn"
    )
    lost = next((name for mark, name in named.items() if mark not in text), None)
    if lost is not None:
        raise TemplateRefusal(
            f"tools, and the chat template of {tokenizer.name_or_path} leaves out {lost}; "
            f"{remedy(tokenizer, needs='tools')}"
        )


OTHERS = {"tool": "what a tool answers in", "system": "the system text of"}
"""Roles whose contents must be in the text, as a refusal names them."""


def _marked_tool(tool: dict[str, Any], marked: Callable[[str, str], str]) -> dict[str, Any]:
    """Return a tool with marks in its name, its description and the names of its parameters."""
    function = dict(tool.get("function", tool))
    name = str(function["name"])
    function["name"] = marked(name, f"the tool {name!r}")
    if isinstance(function.get("description"), str) and function["description"].strip():
        function["description"] = marked(function["description"], f"the description of the tool {name!r}")
    schema = function.get("parameters")
    if isinstance(schema, Mapping) and isinstance(schema.get("properties"), Mapping):
        items = schema["properties"].items()
        properties = {marked(key, f"{key!r} of the tool {name!r}"): value for key, value in items}
        function["parameters"] = {**schema, "properties": properties}
    return {**tool, "function": function} if "function" in tool else function
