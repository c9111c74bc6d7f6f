"""Prompts of preference pairs that are longer than a row, cut from the left by as much in both conversations.

A single answer with a label is a pair whose other half is one token, which is not learnt (data/tokens/tokenize.py).

Legend: D documents, each a pair, chosen first (data/tokens/tokenize.py); L tokens of all of them.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import Array
from tpu_experiments.data.steps.pack import FlatTokens
from tpu_experiments.data.tokens.tokenize import BODY, LEARN, SECOND

MARGIN = Array("margin", "float32", per="token")
"""The margin of a pair's scores at its last token, 0 elsewhere; with `objective.reads_margin()`."""


def with_margins(flat: FlatTokens, margins_D: NDArray[np.float32]) -> FlatTokens:
    """Return pairs with their margins as an array of their tokens."""
    margins_L = np.zeros(len(flat.ids_L), np.float32)
    margins_L[np.cumsum(flat.lengths_D) - 1] = margins_D
    return replace(flat, more={**flat.more, MARGIN.name: margins_L})


def cut_prompts(flat: FlatTokens, *, max_tokens: int) -> tuple[FlatTokens, dict[str, int]]:
    """Cut the prompts of pairs of more than `max_tokens`; pairs whose answers do not fit stay as long as they are.

    What stands before the first user turn's text stays: BOS, the system turn, the header of the user's turn. Behind it
    the fewest whole turns are left out with which the pair fits, up to the text of a later user turn. Where no whole
    turns are enough, those before the last user turn and the beginning of its own text are. The answers, and what
    stands between the question and them, are never cut. A pair is not cut either where the template's structure does
    not tell where the texts are (with tools, or reasoning).

    Returns:
        The pairs, and the counts `documents_truncated`, `documents_truncated_in_turn` and `tokens_dropped`.
    """
    begin_D = np.cumsum(flat.lengths_D) - flat.lengths_D
    stays_L = np.ones(len(flat.ids_L), np.bool_)
    lengths_D = flat.lengths_D.copy()
    num_in_turn = 0
    for index in np.flatnonzero(flat.lengths_D > max_tokens).tolist():
        own = slice(int(begin_D[index]), int(begin_D[index] + flat.lengths_D[index]))
        found = _cut(flat.ids_L[own], flat.flags_L[own], max_tokens=max_tokens)
        if found is None:
            continue
        first, last, halves, is_whole = found
        for half in halves:
            stays_L[own.start + half + first : own.start + half + last] = False
        lengths_D[index] -= len(halves) * (last - first)
        num_in_turn += not is_whole
    num_cut = int(np.count_nonzero(lengths_D != flat.lengths_D))
    more = {name: array_L[stays_L] for name, array_L in flat.more.items()}
    cut = replace(flat, ids_L=flat.ids_L[stays_L], flags_L=flat.flags_L[stays_L], lengths_D=lengths_D, more=more)
    counts = {"documents_truncated": num_cut, "documents_truncated_in_turn": num_in_turn}
    return cut, {**counts, "tokens_dropped": int(len(stays_L) - np.count_nonzero(stays_L))}


def _cut(
    ids_L: NDArray[np.int32], flags_L: NDArray[np.uint8], *, max_tokens: int
) -> tuple[int, int, list[int], bool] | None:
    """Return (first, last) token of a prompt to leave out, where its halves begin, and if whole turns go."""
    second = int(np.flatnonzero(flags_L & SECOND)[0])
    parts = [(0, ids_L[:second], flags_L[:second]), (second, ids_L[second:], flags_L[second:])]
    parts = [part for part in parts if np.any(part[2] & LEARN)]
    begins = [begin for begin, _, _ in parts]
    halves = [(ids, flags) for _, ids, flags in (parts[0], parts[-1])]  # a single answer twice
    shared = min(len(ids) for ids, _ in halves)
    differ = np.flatnonzero(halves[0][0][:shared] != halves[1][0][:shared])
    answers = (int(np.flatnonzero(flags & LEARN)[0]) for _, flags in halves)
    shared = min(int(differ[0]) if len(differ) else shared, *answers)
    borders, others = (np.flatnonzero(flags & BODY).tolist() for _, flags in halves)
    is_one_prompt = borders == others and bool(borders) and borders[-1] <= shared
    starts = borders[:-1] if is_one_prompt else [border for border in borders if border < shared]
    if not starts:
        return None
    first, wanted = starts[0], -(-(len(ids_L) - max_tokens) // len(begins))
    for border in starts[1:]:
        if border - first >= wanted:
            return first, border, begins, True
    return (first, first + wanted, begins, False) if is_one_prompt and first + wanted < borders[-1] else None
