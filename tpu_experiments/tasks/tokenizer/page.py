"""Page of a trained tokenizer, report.html."""

from collections.abc import Sequence
from typing import Any

from tpu_experiments.pages.page import page
from tpu_experiments.tasks.tokenizer.measures import COLUMNS, Measures, row_of


def tokenizer_page(found: Sequence[Measures], *, title: str, facts: dict[str, Any]) -> str:
    """Return the HTML; the first of `found` is the tokenizer that was trained.

    Args:
        facts: the settings and data that it was made from, by name.
    """
    own = found[0]
    tiles = [
        ("Tokens per word", f"{own.tokens_per_word:.3f}", "fewer are shorter sequences"),
        ("Bytes per token", f"{own.bytes_per_token:.3f}", f"of {own.bytes:,} bytes of held-out text"),
        ("Unknown", f"{own.unknown_rate:.3%}", f"{own.unknown:,} of {own.tokens:,} tokens"),
        ("Exact round trips", f"{own.exact_rate:.2%}", f"{own.exact_lines:,} of {own.lines:,} lines"),
        ("Unused", f"{own.unused_rate:.1%}", f"of {own.entries:,} entries, in the held-out text"),
    ]
    return page(
        "tokenizer.html",
        title=title,
        about=f"Measured on {own.texts:,} held-out texts, {own.words:,} words.",
        tiles=tiles,
        columns=COLUMNS,
        rows=[row_of(each) for each in found],
        names=[each.name for each in found],
        hard=list(zip(*(each.hard for each in found), strict=True)),
        longest=[(each.name, each.longest) for each in found],
        facts=[(name, str(value)) for name, value in facts.items()],
    )
