"""Tables of plain text that commands print, and lines of Markdown tables."""

import re
from collections.abc import Sequence

BAR = re.compile(r"(?<!\\)\|")
"""A bar that is not escaped already, as `config.escaping.for_markdown` does."""


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Align columns to their widest cell: the first to the left, the others to the right."""
    width = max(len(line[0]) for line in lines)
    return "\n".join(right_aligned([[line[0].ljust(width), *line[1:]] for line in lines]))


def right_aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Align columns to their widest cell, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def markdown_line(cells: Sequence[str]) -> str:
    """Return a line of a GitHub-flavoured Markdown table; a renderer collapses spaces, so one is kept."""
    return "| " + " | ".join(BAR.sub(r"\|", " ".join(cell.split())) for cell in cells) + " |"
