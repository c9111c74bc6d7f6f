"""Tables of plain text that commands print, and lines of Markdown tables."""

import re
from collections.abc import Sequence

BAR = re.compile(r"(?<!\\)\|")
"""A bar that is not escaped already, as `config.escaping.for_markdown` does."""


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Align columns to their widest cell: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def markdown_line(cells: Sequence[str]) -> str:
    """Return a line of a GitHub-flavoured Markdown table; a renderer collapses spaces, so one is kept."""
    return "| " + " | ".join(BAR.sub(r"\|", " ".join(cell.split())) for cell in cells) + " |"
