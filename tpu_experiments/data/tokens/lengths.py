"""Splitting and truncation of documents longer than a row."""

from typing import Literal

import numpy as np

from tpu_experiments.data.tokens.tokenize import CUT, LEARN, Tokens

Kind = Literal["whole", "whole_turns", "in_turn"]


def truncate(tokens: Tokens, *, max_tokens: int) -> tuple[Tokens, Kind]:
    """Truncate a document to at most `max_tokens`; return it and the kind of its end.

    `whole`: not truncated. `whole_turns`: a conversation, up to the end of the last answer that fits.
    `in_turn`: cut at `max_tokens`, as a text always is; a conversation whose question alone is
    longer has no trainable token left.
    """
    if len(tokens.ids) <= max_tokens:
        return tokens, "whole"
    is_learnt = (tokens.flags & LEARN) > 0
    answer_ends = np.flatnonzero(is_learnt[:max_tokens] & ~is_learnt[1 : max_tokens + 1]) + 1
    num_kept = int(answer_ends[-1]) if len(answer_ends) else max_tokens
    kept = Tokens(tokens.ids[:num_kept], tokens.flags[:num_kept], tokens.document_id)
    return kept, "whole_turns" if len(answer_ends) else "in_turn"


def split_points(tokens: Tokens, *, max_tokens: int) -> list[tuple[int, int]]:
    """Return (begin, end) of consecutive pieces of at most `max_tokens` that cover the document.

    A piece ends before the last turn that does not fit, and so contains as many whole turns as it can; a
    turn longer than a piece is cut inside, as a text is everywhere.
    """
    borders = np.append(np.flatnonzero(tokens.flags & CUT), len(tokens.ids))
    pieces, begin = [], 0
    while begin < len(tokens.ids):
        within = borders[(borders > begin) & (borders <= begin + max_tokens)]
        end = int(within[-1]) if len(within) else begin + max_tokens
        pieces.append((begin, end))
        begin = end
    return pieces
