"""Documents longer than a row."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_experiments.data.tokens.lengths import split_points, truncate
from tpu_experiments.data.tokens.tokenize import CUT, LEARN, Tokens


def text(length):
    return Tokens(np.arange(length, dtype=np.int32), np.array([0] + [LEARN] * (length - 1), np.uint8), "t")


def chat(*turns):
    """(prompt tokens, answer tokens) of each turn; a blank after each answer is not learnt."""
    flags = []
    for i, (asked, answered) in enumerate(turns):
        flags += [CUT if i else 0, *[0] * (asked - 1), *[LEARN] * answered, 0]
    return Tokens(np.arange(len(flags), dtype=np.int32), np.array(flags, np.uint8), "c")


def test_a_document_that_fits_is_whole():
    tokens = chat((3, 2), (3, 2))
    assert truncate(tokens, max_tokens=12) == (tokens, "whole")
    assert split_points(tokens, max_tokens=12) == [(0, 12)]


@pytest.mark.parametrize(
    ("max_tokens", "kept", "kind"),
    [(11, 11, "whole_turns"), (10, 5, "whole_turns"), (5, 5, "whole_turns"), (4, 4, "in_turn"), (2, 2, "in_turn")],
)
def test_a_conversation_ends_after_its_last_whole_answer(max_tokens, kept, kind):
    truncated, how = truncate(chat((3, 2), (3, 2)), max_tokens=max_tokens)
    assert (len(truncated.ids), how) == (kept, kind)
    assert len(truncated.flags) == kept


def test_a_text_is_cut_where_the_row_ends():
    truncated, how = truncate(text(10), max_tokens=4)
    assert (truncated.ids.tolist(), how) == ([0, 1, 2, 3], "in_turn")
    assert split_points(text(10), max_tokens=4) == [(0, 4), (4, 8), (8, 10)]


def test_a_piece_holds_as_many_whole_turns_as_fit():
    tokens = chat((3, 2), (3, 2), (3, 2), (3, 2))  # of 6 tokens each
    assert split_points(tokens, max_tokens=13) == [(0, 12), (12, 24)]
    assert split_points(tokens, max_tokens=6) == [(0, 6), (6, 12), (12, 18), (18, 24)]


def test_a_turn_longer_than_a_row_is_cut_inside():
    tokens = chat((1, 1), (3, 14), (1, 1))  # of 3, 18 and 3 tokens
    assert split_points(tokens, max_tokens=8) == [(0, 3), (3, 11), (11, 19), (19, 24)]


DOCUMENTS = st.integers(1, 60).map(text) | st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8
).map(lambda turns: chat(*turns))


@given(tokens=DOCUMENTS, max_tokens=st.integers(1, 40))
def test_no_token_is_lost_or_doubled(tokens, max_tokens):
    pieces = split_points(tokens, max_tokens=max_tokens)
    assert [i for begin, end in pieces for i in range(begin, end)] == list(range(len(tokens.ids)))
    assert all(0 < end - begin <= max_tokens for begin, end in pieces)
    cuts = {0, len(tokens.ids), *np.flatnonzero(tokens.flags & CUT).tolist()}
    for (begin, end), _ in itertools.pairwise(pieces):
        assert end in cuts or (end - begin == max_tokens and not cuts & set(range(begin + 1, end)))


@given(tokens=DOCUMENTS, max_tokens=st.integers(1, 40))
def test_a_truncated_document_is_a_prefix(tokens, max_tokens):
    truncated, how = truncate(tokens, max_tokens=max_tokens)
    kept = len(truncated.ids)
    assert kept <= max_tokens
    assert truncated.ids.tolist() == tokens.ids[:kept].tolist()
    assert truncated.flags.tolist() == tokens.flags[:kept].tolist()
    assert (how == "whole") == (kept == len(tokens.ids))
    if how == "whole_turns":
        assert tokens.flags[kept - 1] & LEARN
        assert not tokens.flags[kept] & LEARN
    if how == "in_turn":
        assert kept == max_tokens
