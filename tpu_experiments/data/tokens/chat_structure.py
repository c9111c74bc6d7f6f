"""Conversations rendered once each, from what was learnt about their sequence of roles.

Where a template puts the contents and the answers' borders depends on the roles alone, for the
templates of today. So each sequence of roles is rendered by prefixes once, with placeholders. A
conversation is then rendered once, and its text compared, character for character, with the pieces
found and its own contents; where they differ it is rendered by prefixes itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.tokens.chat import (
    FORMS,
    Messages,
    RenderedChat,
    placeholder,
    render,
    render_by_prefixes,
    shared_end,
    shared_length,
    without_blanks,
)

_BLANK = "\u2003"
"""White space around a placeholder shows whether it is trimmed; no template writes an em space itself."""


@dataclass(frozen=True)
class _Answer:
    turn: int
    begin: int
    """Characters from the end of the content before it."""
    end: int
    """Characters from the end of its own content; white space included."""
    is_cut: bool
    """Whether another role's turn follows."""


@dataclass(frozen=True)
class _Structure:
    """What a template makes of one sequence of n roles."""

    form: Callable[[Messages], Messages]
    literals: tuple[str, ...]
    """The n + 1 pieces around the contents."""
    trims: tuple[Callable[[str], str], ...]
    """What becomes of each content."""
    answers: tuple[_Answer, ...]

    def place(self, messages: Messages, *, text: str) -> RenderedChat | None:
        """The borders in `text`, or None when it is not made of these pieces and contents."""
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
    """Renders conversations with one tokenizer's template; remembers the sequences of roles it saw."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._structures: dict[tuple[str, ...], _Structure | None] = {}

    def __call__(self, messages: Messages) -> RenderedChat:
        """The same as `render_by_prefixes`.

        Raises:
            TemplateRefusal: the template refuses the conversation, or rewrites earlier turns.
        """
        return self.from_structure(messages) or render_by_prefixes(messages, tokenizer=self.tokenizer)

    def from_structure(self, messages: Messages) -> RenderedChat | None:
        """Rendered once; None when that is not enough."""
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
    """What the template makes of these roles; None when that cannot be told from placeholders."""
    for form in FORMS:
        roles = [role for role, _ in form(messages)]
        placeholders = tuple((role, f"{_BLANK}{placeholder(i)}{_BLANK}") for i, role in enumerate(roles))
        try:
            text = render(placeholders, tokenizer=tokenizer, ends_with="turn")
        except TemplateError:
            continue
        if all(placeholder(i) in text for i, role in enumerate(roles) if role == "system"):
            return _taken_apart(text, placeholders, form=form, tokenizer=tokenizer)
    return None


def _taken_apart(
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
    """(begin, end) of an answer as `render_by_prefixes` finds them; None where other contents could move them.

    They cannot where a prefix is a whole one, or differs from the text before `limits`, the starts of
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
    except TemplateError:  # the prefix alone is refused; said where it is rendered by prefixes
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
"""By whether the white space before and after a placeholder was kept."""
