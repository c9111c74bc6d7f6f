r"""Text from files for places that interpret it: a terminal, Markdown. HTML pages escape by themselves (pages/page.py).

Names of files, tensors, fields and bases come from whoever made them, and may hold what clears a screen, turns the
direction of writing, or is HTML.

>>> for_terminal("a\x1b[2Jb\r\u202ec"), for_markdown("<b>*a*"), as_code("a`b|c")
('a\\x1b[2Jb\\r\\u202ec', '&lt;b&gt;\\*a\\*', '``a`b|c``')
"""

import re

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of a terminal but line feed and tab, ends of lines, directions of writing, and halves of pairs."""
MARKUP = re.compile(r"([\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])|~~|^#)")


def for_terminal(text: str) -> str:
    """Return text whose controls are written as escapes, for a terminal or a log."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_markdown(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    text = for_terminal(" ".join(text.split("\n")))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKUP.sub(r"\\\1", text)


def as_code(text: str) -> str:
    """Return text as code within a line of Markdown; a table's writer escapes its bars."""
    text = for_terminal(" ".join(text.split("\n")))
    ticks = "`" * (1 + longest_run(text))
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return ticks + room + text + room + ticks


def fenced(text: str, *, language: str) -> str:
    """Return lines as a block of code in Markdown, which nothing in them ends."""
    ticks = "`" * max(3, 1 + longest_run(text))
    return f"{ticks}{language}\n{for_terminal(text)}\n{ticks}"


def longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
