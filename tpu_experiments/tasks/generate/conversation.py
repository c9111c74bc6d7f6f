"""Conversations at the terminal and in the browser: turns that a prompt holds, the oldest left out where it is full."""

import logging
import sys
from collections.abc import Iterator

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import GenerateTaskConfig
from tpu_experiments.data.tokens.chat import Messages
from tpu_experiments.tasks.generate.answers import Answers, Reader
from tpu_experiments.tasks.generate.prompts import Prompt, typed, user_turn

log = logging.getLogger(__name__)


FIRST_TRY = 32
"""Newest parts, each from a user's turn to the next, that are tried before more of a longer conversation."""


def fitted(messages: Messages, *, reader: Reader, place: str) -> tuple[Prompt, list[int], int]:
    """Return prompt and ids of the newest turns that fit the longest bucket, and the number of turns left out.

    A system text stays. What is left begins with a user's turn. The number is found by doubling and bisection, so that
    the work grows with what fits and hardly with what is left out (10,001 turns took 350 s one part at a time).

    Raises:
        ConfigError: the last turn does not fit by itself, or the chat template refuses the turns.
    """
    system = messages[: messages[0][0] == "system"]
    turns = messages[len(system) :]
    begins = [0, *(n for n, (role, _) in enumerate(turns) if n and role == "user")]
    last, size = len(begins) - 1, FIRST_TRY
    low, high, best = 0, last, None  # parts before `low` are too many
    while best is None or low < high:
        if low:
            index = (low + high) // 2
        else:
            index, size = max(0, len(begins) - size), size * 4
        prompt = Prompt((*system, *turns[begins[index] :]), place)
        ids = reader.ids(prompt)
        if index == last or len(ids) <= reader.buckets[-1]:
            high, best = index, (prompt, ids, begins[index])
        else:
            low = index + 1
    reader.bucket(best[1], place=place)
    return best


class Conversation:
    """Turns of a user and the model so far."""

    def __init__(self, *, system: str | None) -> None:
        self.system = system
        self.turns: Messages = ()

    def asked(self, text: str, *, reader: Reader) -> tuple[Prompt, list[int]]:
        """Return the prompt for a new turn; turns that do not fit are forgotten, with a line that says so.

        Raises:
            ConfigError: the turn does not fit by itself, or the chat template refuses it; nothing is forgotten.
        """
        system = () if self.system is None else (("system", self.system),)
        prompt, ids, num_left_out = fitted((*system, *self.turns, ("user", text)), reader=reader, place="this prompt")
        if num_left_out:
            self.turns = self.turns[num_left_out:]
            print(
                f"note: the oldest {num_left_out} turns are left out: prompts have at most {reader.buckets[-1]} tokens",
                file=sys.stderr,
            )
        return prompt, ids

    def answered(self, text: str, answer: str) -> None:
        """Keep a turn and its answer."""
        self.turns = (*self.turns, ("user", text), ("assistant", answer))

    def commanded(self, line: str) -> bool:
        """Follow `/new` or `/system TEXT`, and return whether the line is one of them."""
        command, _, text = line.partition(" ")
        if command == "/new" and not text:
            self.turns = ()
        elif command == "/system":
            self.system = text.strip() or None
        else:
            return False
        return True


def answer_typed_lines(answers: Answers, task: GenerateTaskConfig) -> None:
    """Answer typed lines, in the chat format as turns of one conversation; print an error for one that is refused.

    Ctrl-C ends an answer, which is forgotten, and between answers the conversation.
    """
    reader = answers.reader
    is_chat = reader.kind == "chat"
    conversation = Conversation(system=task.system)
    for line in typed(_lines(is_conversation=is_chat and task.keep_turns)):
        if is_chat and conversation.commanded(line):
            continue
        turn = user_turn(line, task, place="this prompt")
        try:
            prompt, ids = conversation.asked(turn.shown, reader=reader)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        try:
            written = [answer.text for _, answer in answers.answer_all([(prompt, ids)], live=True)]
        except KeyboardInterrupt:
            print(flush=True)
        else:
            if is_chat and task.keep_turns:
                conversation.answered(turn.shown, written[0])
        log.info("%s", answers.latest_account())


def _lines(*, is_conversation: bool) -> Iterator[str]:
    """Yield typed lines, up to the end of the input or Ctrl-C."""
    sign = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives input() its line editing

        sign = "> "
        more = "/new begins anew, /system TEXT sets the system text, " if is_conversation else ""
        print(f"one prompt a line; {more}exit or quit ends", file=sys.stderr)
    while True:
        try:
            yield input(sign)
        except (EOFError, KeyboardInterrupt):
            return
