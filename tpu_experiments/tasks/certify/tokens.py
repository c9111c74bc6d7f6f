"""The tokenizer and the chat template of a model, as training reads texts, conversations, tools and reasoning."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import REASONING, Document, Refused
from tpu_experiments.data.tokens.chat import TRAINING_DAY, render
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer, Tokens, tokenize_apart
from tpu_experiments.data.tokens.tokenizer import HARD_LINES, text_end_ids
from tpu_experiments.export.generation import Ends, ends_of
from tpu_experiments.export.tokenizer import require_readable
from tpu_experiments.tasks.certify.checks import NotChecked, Seen, Wrong

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Iași"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TURNS = (
    ("system", "Answer briefly."),
    ("user", " Which two colours? "),
    ("assistant", "Red and blue."),
    ("user", "Șase țări?"),
    ("assistant", "Yes.\n\n1. România"),
)
WITH_TOOLS = Document(
    "tools",
    messages=(
        ("user", "How is the weather in Iași?"),
        ("assistant", ""),
        ("tool", '{"sky": "rain"}'),
        ("assistant", "It rains."),
    ),
    extras=("", json.dumps({"tool_calls": [CALL]}), json.dumps({"name": "weather"}), ""),
    tools=json.dumps(TOOLS),
)
WITH_REASONING = Document(
    "reasoning",
    messages=(("user", "What is 2 + 3?"), ("assistant", "It is 5.")),
    extras=("", json.dumps({REASONING: "Two and three make five."})),
)


def look_at_texts(tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig) -> Seen:
    """Compare the tokens of hard texts with transformers', require their ends to be learnt and the files readable.

    Raises:
        ConfigError: no form of the tokenizer's files, beside the model's config.json, is read as this tokenizer.
        Wrong: the tokens differ, an end is not learnt, or a token of theirs has no embedding.
    """
    require_readable(tokenizer, config=config)
    begin, end = text_end_ids(tokenizer)
    made = DocumentTokenizer(tokenizer).tokenize([Document(str(n), text=line) for n, line in enumerate(HARD_LINES)])
    for line, tokens in zip(HARD_LINES, made, strict=True):
        if isinstance(tokens, Refused):
            raise Wrong(f"the text {line[:40]!r} is refused: {tokens.message}")
        around = [[] if one is None else [one] for one in (begin, end)]
        inner = tokenizer(line, add_special_tokens=False)["input_ids"]
        if tokens.ids.tolist() != [*around[0], *inner, *around[1]]:
            raise Wrong(f"the text {line[:40]!r} has other tokens than transformers gives it")
        if end is not None and not tokens.flags[-1] & LEARN:
            raise Wrong(f"the end of the text {line[:40]!r} is not learnt")
        _require_embedded(tokens, config=config)
    size, rows = len(tokenizer), int(config.vocab_size)
    more = f"; {size - rows} tokens have no embedding, and rows with one are refused" if size > rows else ""
    closed = "no token ends a text" if end is None else f"each ends with {tokenizer.convert_ids_to_tokens(end)!r}"
    said = f"{len(HARD_LINES)} hard texts have transformers' tokens, {closed}, and the files are read back as they are"
    return Seen(f"{said}{more}", {"tokens": size, "embeddings": rows, "end": end})


def look_at_turns(tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig, folder: Path | None) -> Seen:
    """Require every answer of a conversation to be learnt with an end at which answers stop.

    Raises:
        NotChecked: there is no chat template.
        ConfigError: it refuses a conversation.
        Wrong: one is not, or the text is another than that of transformers' `apply_chat_template`.
    """
    _require_template(tokenizer)
    ends = _ends(tokenizer, config=config, folder=folder)
    found: list[str] = []
    for turns in (TURNS, TURNS[1:]):
        try:
            found += _learnt_ends(Document("chat", messages=turns), tokenizer, ends=ends, config=config, answers=2)
        except NotChecked as error:
            raise ConfigError(f"model.tokenizer_path={tokenizer.name_or_path}; {error}") from error
    _compare_texts(tokenizer)
    shown = " and ".join(map(repr, dict.fromkeys(found)))
    return Seen(f"every answer is learnt with its end {shown}, at which answers stop", {"ends": found})


def look_at_tools(tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig, folder: Path | None) -> Seen:
    """Require a call and the answer behind its result to be learnt with their ends.

    Raises:
        NotChecked: there is no chat template, or it has no place for tools.
        Wrong: one is not.
    """
    return _look_at(WITH_TOOLS, tokenizer, config=config, folder=folder, has=("weather", "Iași"), answers=2)


def look_at_reasoning(tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig, folder: Path | None) -> Seen:
    """Require an answer to be learnt with its reasoning and its end.

    Raises:
        NotChecked: there is no chat template, or it has no place for reasoning.
        Wrong: it is not.
    """
    has = ("Two and three make five.", "It is 5.")
    return _look_at(WITH_REASONING, tokenizer, config=config, folder=folder, has=has, answers=1)


def _look_at(
    document: Document,
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: PretrainedConfig,
    folder: Path | None,
    has: Sequence[str],
    answers: int,
) -> Seen:
    _require_template(tokenizer)
    ends = _ends(tokenizer, config=config, folder=folder)
    found = _learnt_ends(document, tokenizer, ends=ends, config=config, answers=answers)
    text = "".join(tokenizer.decode(run) for run in _runs(document, tokenizer, config=config))
    missing = next((part for part in has if part not in text and json.dumps(part)[1:-1] not in text), None)
    if missing is not None:
        raise Wrong(f"{missing!r} is not learnt")
    shown = " and ".join(map(repr, dict.fromkeys(found)))
    return Seen(f"{document.id} of an answer is learnt, with its end {shown}", {"ends": found})


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise NotChecked("there is no chat template; conversations need model.chat_format=chatml, or another format")


def _ends(tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig, folder: Path | None) -> Ends:
    return ends_of(tokenizer, kind="chat", config=config, folder=folder)


def _runs(document: Document, tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig) -> list[list[int]]:
    """Return the learnt tokens of each answer; an answer that a template rewrites later is a document of its own.

    Raises:
        NotChecked: the template refuses the conversation.
    """
    runs: list[list[int]] = []
    for _, tokens in tokenize_apart([document], tokenizer=DocumentTokenizer(tokenizer), rewritten="split"):
        if isinstance(tokens, Refused):
            raise NotChecked(f"such rows are refused: a conversation {tokens.message}")
        _require_embedded(tokens, config=config)
        pairs = zip((tokens.flags & LEARN).tolist(), tokens.ids.tolist(), strict=True)
        grouped = itertools.groupby(pairs, key=lambda pair: pair[0])
        runs += [[token for _, token in run] for is_learnt, run in grouped if is_learnt]
    return runs


def _learnt_ends(
    document: Document, tokenizer: PreTrainedTokenizerBase, *, ends: Ends, config: PretrainedConfig, answers: int
) -> list[str]:
    """Return the text that ends each answer.

    Raises:
        NotChecked: the template refuses the conversation.
        Wrong: there are other answers, or one has no end at which `task=generate` and an export stop.
    """
    runs = _runs(document, tokenizer, config=config)
    if len(runs) != answers:
        raise Wrong(f"{len(runs)} of {answers} answers are learnt")
    found = []
    for number, run in enumerate(runs, start=1):
        # A call ends in its own way (Llama 3.1's <|eom_id|>), which is learnt too.
        is_call = document.tools and number == 1
        last = tokenizer.convert_ids_to_tokens(run[-1])
        is_end = run[-1] in ends.ids or (is_call and run[-1] in tokenizer.added_tokens_decoder)
        if not is_end and not (ends.marker and tokenizer.decode(run).rstrip().endswith(ends.marker)):
            raise Wrong(f"answer {number} is learnt up to {last!r}, which ends no answer")
        found.append(last if is_end else ends.marker)
    return found


def _require_embedded(tokens: Tokens, *, config: PretrainedConfig) -> None:
    largest = int(tokens.ids.max(initial=0))
    if largest >= int(config.vocab_size):
        raise Wrong(f"token {largest} has no embedding: the model has {int(config.vocab_size)}")


def _compare_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare the rendered text with transformers', unless the template refuses it or reads the day.

    Raises:
        Wrong: they differ.
    """
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        return
    turns = TURNS[1:]
    try:
        ours = render(turns, tokenizer=tokenizer, ends_with="turn", now=TRAINING_DAY)
        theirs = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns], tokenize=False
        )
    except TemplateError:
        return
    if ours != theirs:
        raise Wrong("the chat template is rendered otherwise than by transformers' apply_chat_template")
