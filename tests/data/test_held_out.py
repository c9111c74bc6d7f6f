"""Held-out documents in rows: every token once, known by its document, nothing of another document before it."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.preparing import chat_source, prepared, write_lines
from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data import held_out
from tpu_experiments.data.held_out import HeldOut, held_out_documents, rows_of_documents, windows
from tpu_experiments.data.prepare import Preparation
from tpu_experiments.data.steps.pack import flatten, pack
from tpu_experiments.data.tokens.tokenize import LEARN, SECOND, Tokens


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
    laid_out = rows_of_documents(given_documents, seq_len=16, pad_id=0)
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
    laid_out = rows_of_documents(documents([5, 3, 20], share=1.0), seq_len=8, pad_id=0)
    starts = np.concatenate([np.ones((laid_out.rows.num_rows, 1)), np.diff(laid_out.rows.segments_NT)], axis=1) > 0
    assert (laid_out.rows.positions_NT[starts] == 0).all()
    assert (np.diff(laid_out.rows.positions_NT)[~starts[:, 1:] & (laid_out.token_NT[:, 1:] >= 0)] == 1).all()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_document_without_a_learnt_token_takes_no_room(share):
    laid_out = rows_of_documents(documents([7, 1], share=share), seq_len=8, pad_id=0)
    assert laid_out.rows.num_rows == (1 if share else 0)
    assert laid_out.rows.num_supervised == (6 if share else 0)


TYPES = ("irac", "statute", "client")


def typed(tmp_path, count=60):
    rows = [
        {
            "sample_type": TYPES[i % 3],
            "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": TYPES[i % 3]}],
        }
        for i in range(count)
    ]
    rows[5]["sample_type"] = None
    return write_lines(tmp_path / "a.jsonl", rows)


def documents_by(tmp_path, tokenizer, by, **values):
    source = chat_source(typed(tmp_path), eval_fraction=0.3, test_fraction=0.3, **values)
    prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, workers=1)
    preparation = Preparation(PrepareConfig(workers=1), str(tmp_path / "p"), tokenizer, {}, None, True)
    return held_out_documents(
        "a", source, split="test", data_size="full", preparation=preparation, max_documents=10, seed=0, by=by
    )


@pytest.mark.parametrize("values", [{}, {"keep": {"sample_type": ["irac", "client"]}}])
def test_each_document_has_its_rows_value(tmp_path, tokenizer, values):
    found = documents_by(tmp_path, tokenizer, "sample_type", **values)
    assert 2 < found.flat.num_documents <= 10
    assert found.values is not None
    for (ids, _), value in zip(found.documents(), found.values, strict=True):
        text = tokenizer.decode(ids)
        assert [kind for kind in TYPES if f"\n{kind}" in text] == ([value] if value != "null" else ["client"])
    assert not values or "statute" not in found.values


def test_values_of_test_files_of_ones_own(tmp_path, tokenizer):
    (tmp_path / "own").mkdir()
    found = documents_by(tmp_path, tokenizer, "sample_type", test_path=str(typed(tmp_path / "own", count=9)))
    assert found.values is not None
    assert sorted(found.values) == ["client"] * 2 + ["irac"] * 3 + ["null"] + ["statute"] * 3


def test_a_field_that_no_row_has_is_named(tmp_path, tokenizer, caplog):
    assert documents_by(tmp_path, tokenizer, "sampl_type").values is None
    assert "no held-out row has the field 'sampl_type' (task.by). Did you mean 'sample_type'?" in caplog.text


def test_a_field_with_too_many_values_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(held_out, "MAX_VALUES", 2)
    with pytest.raises(
        ConfigError, match=r"task\.by=messages; it has \d+ values in the held-out rows of data\.a, and 2"
    ):
        documents_by(tmp_path, tokenizer, "messages")


def pairs(lengths, *, values=None):
    """Pairs of two conversations of these lengths, the last two tokens of each learnt."""
    halves = []
    for one, other in lengths:
        flags = np.zeros(one + other, np.uint8)
        flags[[one - 2, one - 1, -2, -1]] = LEARN
        flags[one] = SECOND
        halves.append(Tokens(np.arange(one + other, dtype=np.int32), flags, "pair"))
    return HeldOut("some", "preference", flatten(halves), len(lengths), values)


def test_pairs_are_two_segments_as_in_training():
    given_pairs = pairs([(5, 6), (4, 4), (7, 3), (3, 3)])
    rows = rows_of_documents(given_pairs, seq_len=24, pad_id=0).rows
    trained = pack(given_pairs.flat, seq_len=24, pad_id=0, long_documents="drop").rows
    for name in ("ids", "learn", "positions", "segments"):
        np.testing.assert_array_equal(rows.array(name), trained.array(name))


def test_a_pair_is_two_texts():
    assert [len(ids) for ids in pairs([(5, 6), (4, 3)]).texts()] == [5, 6, 4, 3]
    assert [len(ids) for ids in documents([3, 1]).texts()] == [3, 1]


def test_a_single_answer_is_one_text():
    good, bad = (np.array(flags, np.uint8) for flags in ([0, LEARN, LEARN, SECOND], [0, SECOND, LEARN, LEARN]))
    found = [Tokens(np.arange(4, dtype=np.int32) + first, flags, "") for first, flags in ((0, good), (4, bad))]
    assert [ids.tolist() for ids in HeldOut("a", "preference", flatten(found), 2).texts()] == [[0, 1, 2], [5, 6, 7]]


def test_values_of_segments_come_to_their_pair():
    given_pairs = pairs([(5, 6), (4, 4), (7, 3), (3, 3)])
    laid_out = rows_of_documents(given_pairs, seq_len=24, pad_id=0)
    rows = laid_out.rows
    lengths_NS = [[np.count_nonzero(rows.segments_NT[row] == s) for s in range(1, 5)] for row in range(rows.num_rows)]
    learnt_NS = laid_out.segment_lengths()
    assert learnt_NS.shape == (2, 4), "the fullest row has two pairs"
    assert learnt_NS.sum() == 16
    values_NP2 = np.array(lengths_NS, float).reshape(rows.num_rows, -1, 2)
    assert laid_out.per_pair(values_NP2, given_pairs).tolist() == [[5, 6], [4, 4], [7, 3], [3, 3]]


def test_pairs_longer_than_a_row_are_left_out_with_their_value(caplog):
    caplog.set_level("INFO")
    found = pairs([(5, 6), (20, 9), (4, 4)], values=("a", "b", "c")).cut(24)
    assert found.flat.lengths_D.tolist() == [11, 8]
    assert found.values == ("a", "c")
    assert "1 pairs that do not fit are left out" in caplog.text
