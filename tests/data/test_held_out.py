"""Held-out documents in rows: every token once, known by its document, nothing of another document before it."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_experiments.data import held_out
from tpu_experiments.data.held_out import HeldOut, lay_out, windows
from tpu_experiments.data.steps.pack import flatten
from tpu_experiments.data.tokens.tokenize import LEARN, Tokens


def documents(lengths, *, seed=0, share=0.7):
    """Random documents of these lengths; the id of a token says its place."""
    generator = np.random.default_rng(seed)
    ends = np.cumsum(lengths)
    tokens = [
        Tokens(np.arange(end - n, end, dtype=np.int32), (generator.random(n) < share).astype(np.uint8) * LEARN, str(i))
        for i, (n, end) in enumerate(zip(lengths, ends.tolist(), strict=True))
    ]
    return HeldOut("some", "text", flatten(tokens), len(lengths))


def test_the_examples_of_windows_are_right():
    assert doctest.testmod(held_out).attempted == 2
    assert doctest.testmod(held_out).failed == 0


@given(length=st.integers(1, 200), seq_len=st.integers(2, 40))
def test_windows_have_every_token_but_the_first_new_once(length, seq_len):
    found = list(windows(length, seq_len=seq_len))
    assert [i for _, end, new in found for i in range(new, end)] == list(range(1, length))
    assert all(start < new and end - start <= seq_len for start, end, new in found if new < end)
    if length > seq_len:
        assert all(end - start == seq_len for start, end, _ in found)


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_every_learnt_token_is_predicted_once_after_tokens_of_its_own_document(lengths, seed):
    given_documents = documents(lengths, seed=seed)
    laid_out = lay_out(given_documents, seq_len=16, pad_id=0)
    rows, flat = laid_out.rows, given_documents.flat
    firsts = np.cumsum(lengths) - lengths
    expected = (flat.flags_L & LEARN) > 0
    expected[firsts] = False
    ids_NT = np.where(laid_out.token_NT >= 0, laid_out.token_NT, 0)
    np.testing.assert_array_equal(rows.ids_NT, ids_NT)
    learnt = laid_out.token_NT[rows.learn_NT]
    assert sorted(learnt.tolist()) == np.flatnonzero(expected).tolist()
    assert not rows.learn_NT[:, 0].any()
    before = laid_out.token_NT[:, :-1][rows.learn_NT[:, 1:]]
    np.testing.assert_array_equal(before, laid_out.token_NT[:, 1:][rows.learn_NT[:, 1:]] - 1)
    assert (rows.segments_NT[:, 1:] == rows.segments_NT[:, :-1])[rows.learn_NT[:, 1:]].all()
    values_NT = np.roll(rows.ids_NT, -1, axis=1).astype(np.float32)
    found_L = laid_out.per_token(values_NT, num_tokens=len(expected))
    np.testing.assert_array_equal(found_L, np.where(expected, np.arange(len(expected)), 0))


def test_positions_count_from_the_start_of_a_window():
    laid_out = lay_out(documents([5, 3, 20], share=1.0), seq_len=8, pad_id=0)
    starts = np.concatenate([np.ones((laid_out.rows.num_rows, 1)), np.diff(laid_out.rows.segments_NT)], axis=1) > 0
    assert (laid_out.rows.positions_NT[starts] == 0).all()
    assert (np.diff(laid_out.rows.positions_NT)[~starts[:, 1:] & (laid_out.token_NT[:, 1:] >= 0)] == 1).all()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_document_without_a_learnt_token_takes_no_room(share):
    laid_out = lay_out(documents([7, 1], share=share), seq_len=8, pad_id=0)
    assert laid_out.rows.num_rows == (1 if share else 0)
    assert laid_out.rows.num_supervised == (6 if share else 0)
