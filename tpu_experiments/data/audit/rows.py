"""Decoded rows of the audit page: one span per token, trained tokens marked, segments separated."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.audit.findings import counted
from tpu_experiments.data.rows import Rows, RowSource

PLACES, ROWS_AT_A_PLACE = 4, 64
"""Rows are sampled from a few runs, since a store in a bucket is read shard by shard."""
TOKENS_SHOWN = 4096
PAIRS_SHOWN, CHARACTERS_SHOWN = 8, 600
TOKENS_OF_A_CHARACTER = 8
"""Tokens without a complete character after which they are shown undecoded; UTF-8 has at most 4 bytes a character."""

_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class TokenGroup:
    """Tokens `begin` to `end` (exclusive) that form complete characters; nearly always one token."""

    begin: int
    end: int
    text: str
    is_special: bool = False


def decode_groups(ids_L: Sequence[int], *, tokenizer: PreTrainedTokenizerBase) -> list[TokenGroup]:
    """Decode tokens in order and without gaps; tokens that share a character form one group."""
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    groups: list[TokenGroup] = []
    context = begin = 0  # tokens from `context` are decoded together, since a blank may depend on the token before it
    for i, token_id in enumerate(ids_L):
        if token_id in special_ids:
            if begin < i:
                groups.append(TokenGroup(begin, i, _text_after(ids_L[context:i], begin - context, tokenizer)))
            groups.append(TokenGroup(i, i + 1, str(tokenizer.convert_ids_to_tokens(token_id)), is_special=True))
            context = begin = i + 1
            continue
        text = _text_after(ids_L[context : i + 1], begin - context, tokenizer)
        if (text and not text.endswith(_UNFINISHED)) or i + 1 - begin == TOKENS_OF_A_CHARACTER:
            groups.append(TokenGroup(begin, i + 1, text))
            context, begin = begin, i + 1
    if begin < len(ids_L):
        groups.append(TokenGroup(begin, len(ids_L), _text_after(ids_L[context:], begin - context, tokenizer)))
    return groups


def _text_after(ids_L: Sequence[int], num_known: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the tokens after the first `num_known` add."""

    def decode(part: Sequence[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode(ids_L)[len(decode(ids_L[:num_known])) :] if num_known else decode(ids_L)


def choose_rows(store: RowSource, *, num_rows: int) -> list[tuple[int, str]]:
    """Choose representative rows; return (index, reason) of each, the same for the same store.

    The row with the most segments, the first, the middle one and the one with the smallest supervised share; then
    others. The two chosen by count are searched for among 256 rows at most: 64 at the start, at the end and at two
    places between.
    """
    total = store.num_rows
    if total == 0:
        return []
    starts_P = np.linspace(0, max(total - ROWS_AT_A_PLACE, 0), PLACES).astype(np.int64)
    looked_at = np.unique(starts_P[:, None] + np.arange(min(ROWS_AT_A_PLACE, total)))
    rows = store.take(looked_at)
    share_N = rows.learn_NT.sum(axis=1) / np.maximum((rows.segments_NT > 0).sum(axis=1), 1)
    fullest = looked_at[np.argsort(-rows.segments_NT.max(axis=1, initial=0), kind="stable")].tolist()
    least = looked_at[np.argsort(share_N, kind="stable")].tolist()
    chosen: dict[int, str] = {}
    for why, candidates in (
        ("with the most segments", fullest),
        ("the first", [0]),
        ("from the middle", [total // 2]),
        ("with the smallest supervised share", least),
        *[("another", looked_at[::-1].tolist())] * num_rows,
    ):
        index = next((i for i in candidates if i not in chosen and i < total), None)
        if index is not None:
            chosen[index] = why
    return list(chosen.items())[:num_rows]


def shown_pairs(store: RowSource, *, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, ...]]:
    """Return the prompt, both answers and their lengths of some preference pairs, for a table.

    The first pairs of `PAIRS_SHOWN` rows at even distances. A prompt is what both segments begin with.
    """
    index = np.unique(np.linspace(0, store.num_rows - 1, PAIRS_SHOWN).astype(np.int64))
    rows = store.take(index)
    found = []
    for ids_T, learn_T, segments_T in zip(rows.ids_NT, rows.learn_NT, rows.segments_NT, strict=True):
        sides = [ids_T[(segments_T == number) & learn_T] for number in (1, 2)]
        prompt, chosen, rejected = (
            " ".join(str(tokenizer.decode(part.tolist(), skip_special_tokens=False)).split())
            for part in (ids_T[(segments_T == (1 if len(sides[0]) else 2)) & ~learn_T], *sides)
        )
        shown = (
            "…" * (len(prompt) > CHARACTERS_SHOWN) + prompt[-CHARACTERS_SHOWN:],
            *map(_beginning, (chosen, rejected)),
        )
        found.append((*shown, " and ".join(f"{len(side):,}" for side in sides)))
    return found


def _beginning(text: str) -> str:
    return text[:CHARACTERS_SHOWN] + "…" * (len(text) > CHARACTERS_SHOWN)


def row_html(rows: Rows, *, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] = ()) -> str:
    """Return the HTML of one row (N=1): a strip of its segments, then its tokens.

    Args:
        labels: names of the labels of texts; the last token of each is the number of its own.
    """
    ids_T, learn_T = rows.ids_NT[0].tolist(), rows.learn_NT[0].tolist()
    positions_T, segments_T = rows.positions_NT[0].tolist(), rows.segments_NT[0]
    parts = [_strip(segments_T, rows.learn_NT[0])]
    num_tokens = int(np.count_nonzero(segments_T))
    bounds = np.flatnonzero(np.diff(segments_T, prepend=0, append=0)).tolist()
    for begin, end in pairwise(bounds):
        if segments_T[begin] == 0 or begin >= TOKENS_SHOWN:
            continue
        shown = slice(begin, min(end, TOKENS_SHOWN))
        mark = f"segment {segments_T[begin]} · from position {positions_T[begin]} · {counted(end - begin, 'token')}"
        if labels and end <= TOKENS_SHOWN:
            mark += f" · label {escape(labels[ids_T[end - 1]])}"
            shown = slice(begin, end - 1)
        tokens = tokens_html(ids_T[shown], learn_T[shown], positions_T[shown], tokenizer=tokenizer)
        parts.append(f'<div class="segment"><span class="mark">{mark}</span>{tokens}</div>')
    if num_tokens > TOKENS_SHOWN:
        more = counted(num_tokens - TOKENS_SHOWN, "token")
        parts.append(f'<div class="pad"><span>and {more} more, not shown</span></div>')
    if num_tokens < len(ids_T):
        padding = counted(len(ids_T) - num_tokens, "token")
        parts.append(f'<div class="pad"><span>{padding} of padding</span></div>')
    return "\n".join(parts)


def tokens_html(
    ids_L: Sequence[int], learn_L: Sequence[bool], positions_L: Sequence[int], *, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return one span per token; the class `learnt` marks trained tokens."""
    parts = []
    for group in decode_groups(ids_L, tokenizer=tokenizer):
        spans = []
        for i in range(group.begin, group.end):
            kind = "t" + " special" * group.is_special + " learnt" * learn_L[i]
            title = f"id {ids_L[i]}, position {positions_L[i]}" + ", learnt" * learn_L[i]
            if group.end - group.begin > 1:
                title += f"; part {i - group.begin + 1} of {group.end - group.begin} of “{group.text}”"
            text = _visible(group.text) if i == group.end - 1 else ""
            spans.append(f'<span class="{kind}" title="{escape(title)}">{text}</span>')
        joined = "".join(spans)
        parts.append(f'<span class="together">{joined}</span>' if len(spans) > 1 else joined)
    return "".join(parts)


def _visible(text: str) -> str:
    """Escape text for HTML, with line ends and control characters made visible."""
    parts = []
    for character in text:
        if character == "\n":
            parts.append('<i class="sign">↵</i>\n')
        elif character == "\t":
            parts.append('<i class="sign">⇥</i>\t')
        elif ord(character) < 32 or ord(character) == 127:
            parts.append(f'<i class="sign">{chr(0x2421 if ord(character) == 127 else 0x2400 + ord(character))}</i>')
        else:
            parts.append(escape(character))
    return "".join(parts)


def _strip(segments_T: NDArray[np.int32], learn_T: NDArray[np.bool_]) -> str:
    """Draw the row as a band: segments separated, trained stretches coloured, padding empty."""
    total = segments_T.shape[0]
    state_T = segments_T.astype(np.int64) * 2 + learn_T
    bounds = [0, *(np.flatnonzero(np.diff(state_T)) + 1).tolist(), total]
    parts = []
    for begin, end in pairwise(bounds):
        if segments_T[begin]:
            kind = "learnt" if learn_T[begin] else "context"
            parts.append(f'<rect class="{kind}" x="{begin}" y="0" width="{end - begin}" height="10"/>')
    for begin in (np.flatnonzero(np.diff(segments_T)) + 1).tolist():
        parts.append(f'<line x1="{begin}" y1="-2" x2="{begin}" y2="12"/>')
    num_segments, num_learnt = int(segments_T.max(initial=0)), int(learn_T.sum())
    label = f"{total} tokens, {num_segments} segments, {num_learnt} learnt"
    return (
        f'<svg class="strip" viewBox="0 -2 {total} 14" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )
