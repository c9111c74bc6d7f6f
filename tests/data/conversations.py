"""Conversations for the tests of templates and masks: a few built in, and the real ones where they are."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens.chat import Messages

BUILT_IN: tuple[Messages, ...] = (
    (("user", "Care este capitala?"), ("assistant", "București, pe Dâmbovița.")),
    (
        ("system", "Răspunde scurt."),
        ("user", "Care este capitala?"),
        ("assistant", "București, pe Dâmbovița."),
        ("user", "Dar a Franței?"),
        ("assistant", "Paris."),
    ),
    (("user", "Paris."), ("assistant", "Paris."), ("user", "Paris."), ("assistant", "Paris.")),
    (("user", "🚀日本 \t x\n\n"), ("assistant", "```py\nfor x in y:\n    print(x)\n```"), ("user", "?")),
    (("user", "{{ bos_token }} {% if %}"), ("assistant", "{# nimic #}")),
)


def documents(conversations: Iterable[Messages]) -> list[Document]:
    return [Document(str(i), messages=messages) for i, messages in enumerate(conversations)]


def real(folder: Path) -> Iterator[Messages]:
    """Those of chat_messages.jsonl and ro_chat.jsonl, in order."""
    for row in rows(folder / "chat_messages.jsonl"):
        yield tuple((message["role"], message["content"]) for message in row["messages"])
    for row in rows(folder / "ro_chat.jsonl"):
        yield tuple((("user", "assistant")[i % 2], content) for i, content in enumerate(row["data"]))


def rows(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
