"""Read prompts from the command, a file or the terminal, and tokenize them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import GenerateTaskConfig
from tpu_experiments.data.reading.names import ROLES
from tpu_experiments.data.tokens.chat import Messages, TemplateRefusal, render_prompt
from tpu_experiments.data.tokens.tokenizer import require_chat_template
from tpu_experiments.storage import paths
from tpu_experiments.tasks.generate.origin import Origin
from tpu_experiments.training.evaluation import text_ids

WANTED = "`prompt` (text), `messages` (a list of role and content, the last of them the user's), or `instruction`"


@dataclass(frozen=True)
class Prompt:
    """Conversation to answer; plain text is a single turn."""

    messages: Messages
    place: str

    @property
    def shown(self) -> str:
        """Return the text of the last turn."""
        return self.messages[-1][1]


def kind_of(origin: Origin, tokenizer: PreTrainedTokenizerBase, *, format: str, system: str | None) -> str:
    """Return `chat` or `text`.

    Raises:
        ConfigError: `chat` without a chat template, or `text` with a system text.
    """
    if format == "auto":
        trained_chat = origin.kinds is None or not origin.kinds <= {"text"}
        kind = "chat" if trained_chat and tokenizer.chat_template else "text"
    else:
        kind = format
    if kind == "chat" and not tokenizer.chat_template:
        require_chat_template(tokenizer, source="task.format")
    if kind == "text" and system is not None:
        raise ConfigError("task.system= with plain text; only a conversation has a system text; use task.format=chat.")
    return kind


def given_prompts(task: GenerateTaskConfig) -> list[Prompt]:
    """Return the prompts of the command or its file; none for the terminal.

    Raises:
        ConfigError: the file is missing, empty or malformed.
    """
    if task.prompt is not None:
        return [user_turn(task.prompt, task, place="task.prompt")]
    if task.prompts_file is None:
        return []
    try:
        lines = paths.read_text(task.prompts_file).split("\n")
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"task.prompts_file={task.prompts_file}; it cannot be read ({type(error).__name__}); name a .txt or .jsonl "
            "file in UTF-8."
        ) from error
    numbered = [(f"line {n} of {task.prompts_file}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"task.prompts_file={task.prompts_file}; it holds no prompt; write one a line.")
    if task.prompts_file.endswith(".txt"):
        return [user_turn(line.rstrip("\r"), task, place=place) for place, line in numbered]
    return [_prompt_from_object(line, task, place=place) for place, line in numbered]


def user_turn(text: str, task: GenerateTaskConfig, *, place: str, given: str | None = None) -> Prompt:
    """Return a user's turn, joined with its input as `data.<name>.format=instruction` does."""
    about = given or task.input
    turn = f"{text}\n\n{about}" if about else text
    system = () if task.system is None else (("system", task.system),)
    return Prompt((*system, ("user", turn)), place)


def _prompt_from_object(line: str, task: GenerateTaskConfig, *, place: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}; it is not JSON ({error}); write one object a line.") from error
    fields = fields if isinstance(fields, dict) else {}
    text, messages = fields.get("prompt", fields.get("instruction")), fields.get("messages")
    given = fields.get("input") or fields.get("context")
    if isinstance(text, str) and text.strip() and isinstance(given, str | None):
        return user_turn(text, task, place=place, given=given)
    turns = [_turn(turn) for turn in messages] if isinstance(messages, list) else []
    if not turns or None in turns or turns[-1][0] != "user":  # type: ignore[index]  # checked for None before
        raise ConfigError(f"{place}; it needs {WANTED}; mend the line.")
    if task.system is not None and turns[0] is not None and turns[0][0] != "system":
        turns = [("system", task.system), *turns]
    return Prompt(tuple(turn for turn in turns if turn is not None), place)


def _turn(turn: Any) -> tuple[str, str] | None:
    fields = turn if isinstance(turn, dict) else {}
    role, content = ROLES.get(str(fields.get("role", "")).lower()), fields.get("content")
    return (role, content) if role and isinstance(content, str) else None


def ids_of(prompt: Prompt, *, kind: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        ConfigError: the chat template refuses it, it is empty or invalid Unicode, or the model has no embedding for one
            of its tokens.
    """
    try:
        "".join(text for _, text in prompt.messages).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{prompt.place}; it has half of a surrogate pair ({error.object[error.start]!a}), which is no character; "
            "write the whole pair."
        ) from error
    if kind == "text":
        if len(prompt.messages) > 1:
            raise ConfigError(f"{prompt.place}; it is a conversation and task.format=text; use task.format=chat.")
        ids = text_ids(tokenizer, prompt.shown)
    else:
        try:
            text = render_prompt(prompt.messages, tokenizer=tokenizer)
        except TemplateRefusal as error:
            raise ConfigError(f"{prompt.place}; it has {error}") from error
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ConfigError(f"{prompt.place}; it is empty; write something to continue.")
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"{prompt.place}; it has token id {max(ids)} and the model has {vocab_size} embeddings; set "
            "model.tokenizer_path to the tokenizer this model was trained with."
        )
    return ids


def typed(read: Iterator[str]) -> Iterator[str]:
    """Yield lines up to `exit` or `quit`, skipping empty ones."""
    for line in read:
        if line.strip().lower() in ("exit", "quit"):
            return
        if line.strip():
            yield line.strip()
