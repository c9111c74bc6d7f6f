import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_experiments.data.steps.pack import flatten, pack
from tpu_experiments.data.tokens.tokenize import CUT, LEARN, Tokens

PAD = 999_999


def documents_of(masks):
    """One document for each list of flags; every token of all documents has an id of its own."""
    documents, following = [], 0
    for number, mask in enumerate(masks):
        ids = np.arange(following, following + len(mask), dtype=np.int32)
        following += len(mask)
        documents.append(Tokens(ids, np.array(mask, np.uint8), str(number)))
    return documents


def packed(masks, **values):
    values = {"pad_id": PAD, "packing": "best_fit", "long_documents": "split", **values}
    return pack(flatten(documents_of(masks)), **values)


def segments_of(rows):
    """Ids of every segment, in rows and then from left to right."""
    return [
        rows.ids_NT[row][rows.segments_NT[row] == segment].tolist()
        for row in range(rows.num_rows)
        for segment in range(1, rows.segments_NT[row].max() + 1)
    ]


flags_st = st.sampled_from([0, LEARN, CUT, LEARN | CUT])
masks_st = st.lists(st.lists(flags_st, min_size=1, max_size=40), max_size=30)
ways_st = st.sampled_from(
    [("best_fit", "split"), ("best_fit", "truncate"), ("best_fit", "drop"), ("pad", "truncate"), ("pad", "drop")]
)


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16))
def test_no_token_is_lost_or_doubled_but_counted_ones(masks, seq_len):
    result = packed(masks, seq_len=seq_len)
    segments = segments_of(result.rows)
    found = [token for segment in segments for token in segment]
    assert len(found) == len(set(found)), "no token is doubled"
    assert all(segment == list(range(segment[0], segment[-1] + 1)) for segment in segments), "a piece keeps its order"
    owner = np.repeat(np.arange(len(masks)), [len(mask) for mask in masks])
    assert all(owner[segment[0]] == owner[segment[-1]] for segment in segments), "a piece is of one document"
    lost = set(range(sum(map(len, masks)))) - set(found)
    assert len(lost) == result.counts["tokens_dropped"]
    assert result.counts["documents_split"] == sum(len(mask) > seq_len for mask in masks)
    assert sorted(set(owner[found].tolist())) == np.flatnonzero(result.kept_D).tolist()
    assert np.flatnonzero(result.learnt_L).tolist() == sorted(result.rows.ids_NT[result.rows.learn_NT].tolist())


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16))
def test_supervised_tokens_without_their_question_are_counted(masks, seq_len):
    result = packed(masks, seq_len=seq_len)
    flags = [flag for mask in masks for flag in mask]
    begins = set(np.cumsum([0, *map(len, masks)]).tolist())
    learnt = set(result.rows.ids_NT[result.rows.learn_NT].tolist())
    expected = 0
    for segment in segments_of(result.rows):
        for token in segment if segment[0] not in begins else []:
            if flags[token] & CUT:
                break
            expected += token in learnt
    assert result.counts["supervised_without_prompt"] == expected


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16))
def test_a_dropped_piece_has_nothing_to_learn(masks, seq_len):
    """Every learnt token is either in the rows and marked, or was the first of its piece."""
    rows = packed(masks, seq_len=seq_len).rows
    flags = np.array([flag for mask in masks for flag in mask], np.uint8)
    found = set(rows.ids_NT[rows.segments_NT > 0].tolist())
    marked = set(rows.ids_NT[rows.learn_NT].tolist())
    for token in np.flatnonzero(flags & LEARN).tolist():
        if token in found:
            row, column = (int(axis[0]) for axis in np.nonzero(rows.ids_NT == token))
            assert (token in marked) == (rows.positions_NT[row, column] > 0)
    assert all(flags[token] & LEARN for token in marked)


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16), ways=ways_st)
def test_rows_are_well_formed(masks, seq_len, ways):
    result = packed(masks, seq_len=seq_len, packing=ways[0], long_documents=ways[1])
    rows = result.rows
    flags = [flag for mask in masks for flag in mask]
    assert rows.ids_NT.shape == (rows.num_rows, seq_len)
    for ids, learn, positions, segments in zip(
        rows.ids_NT, rows.learn_NT, rows.positions_NT, rows.segments_NT, strict=True
    ):
        used = segments > 0
        assert used[0]
        assert not np.any(np.diff(used.astype(int)) > 0), "padding lies at the end"
        assert np.all(ids[~used] == PAD)
        assert not learn[~used].any()
        assert not positions[~used].any()
        assert set(np.diff(segments[used])) <= {0, 1}, "segments increase one by one"
        starts = np.diff(segments[used], prepend=0) > 0
        assert np.array_equal(positions[used] == 0, starts), "positions restart with a segment"
        assert np.all(np.diff(positions[used])[~starts[1:]] == 1)
        expected = [bool(flags[i] & LEARN) and not s for i, s in zip(ids[used], starts, strict=True)]
        assert learn[used].tolist() == expected
        assert learn.any(), "a row teaches something"
        assert ways[0] == "best_fit" or segments.max() == 1


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16), ways=ways_st)
def test_every_document_is_in_the_rows_or_counted(masks, seq_len, ways):
    result = packed(masks, seq_len=seq_len, packing=ways[0], long_documents=ways[1])
    left_out = result.counts["too_long"] + result.counts["nothing_to_learn"]
    assert int(result.kept_D.sum()) + left_out == len(masks)
    assert ways[1] == "drop" or result.counts["too_long"] == 0
    total = sum(map(len, masks))
    dropped = sum(len(mask) for mask in masks if len(mask) > seq_len) if ways[1] == "drop" else 0
    assert result.rows.num_tokens + result.counts["tokens_dropped"] + dropped == total


@settings(deadline=None)
@given(masks=masks_st)
def test_packing_is_deterministic(masks):
    first, second = (packed(masks, seq_len=8).rows for _ in range(2))
    for name in ("ids_NT", "learn_NT", "positions_NT", "segments_NT"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_best_fit_fills_the_fullest_row():
    rows = packed([[LEARN] * n for n in (4, 6, 2, 3, 5)], seq_len=10).rows
    # 6, then 5, then 4 beside the 6, then 3 and 2 beside the 5.
    lengths = [np.bincount(row[row > 0])[1:].tolist() for row in rows.segments_NT]
    assert lengths == [[6, 4], [5, 3, 2]]


def test_a_long_conversation_is_split_between_turns():
    turn = [CUT, 0, LEARN, LEARN]
    rows = packed([[0, 0, LEARN, LEARN, *turn, *turn]], seq_len=10).rows
    assert sorted(segments_of(rows)) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]


def test_one_document_a_row():
    masks = [[0, LEARN, LEARN], [0, LEARN], [0] + [LEARN] * 9]
    result = packed(masks, seq_len=4, packing="pad", long_documents="truncate")
    assert segments_of(result.rows) == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    assert (result.counts["documents_truncated"], result.counts["tokens_dropped"]) == (1, 6)
    dropped = packed(masks, seq_len=4, packing="pad", long_documents="drop")
    assert segments_of(dropped.rows) == [[0, 1, 2], [3, 4]]
    assert dropped.counts["too_long"] == 1


@pytest.mark.parametrize("masks", [[], [[LEARN]], [[0, 0, 0]]])
def test_nothing_to_pack(masks):
    result = packed(masks, seq_len=8)
    assert result.rows.num_rows == 0
    assert result.counts["nothing_to_learn"] == len(masks)


def test_a_hundred_thousand_documents_fill_their_rows():
    lengths = np.random.default_rng(0).integers(2, 400, size=100_000)
    one = np.full(400, LEARN, np.uint8)
    flat = flatten([Tokens(np.ones(n, np.int32), one[:n], "") for n in lengths.tolist()])
    rows = pack(flat, seq_len=1024, pad_id=0).rows
    assert rows.num_tokens / rows.ids_NT.size > 0.99


def test_long_documents_fill_the_gaps():
    """Conversations around one row's length: best fit alone fills 93 %, since most pieces find no partner."""
    generator = np.random.default_rng(3)
    masks = []
    for _ in range(600):
        turns = generator.integers(60, 420, size=generator.integers(2, 6))
        flags = [[CUT] + [0] * (n // 3) + [LEARN] * (n - n // 3 - 1) for n in turns.tolist()]
        masks.append([flag for turn in flags for flag in turn])
    result = packed(masks, seq_len=1024)
    rows = result.rows
    assert rows.num_tokens / rows.ids_NT.size > 0.985
    starts = rows.ids_NT[(rows.positions_NT == 0) & (rows.segments_NT > 0)]
    flags = np.concatenate([np.array(mask) for mask in masks])
    borders = np.cumsum([0, *(len(mask) for mask in masks)])[:-1]
    begins_turn = (flags[starts] & CUT > 0) | np.isin(starts, borders)
    assert begins_turn.mean() > 0.8, "few pieces begin inside a turn"
    assert rows.num_tokens + result.counts["tokens_dropped"] == len(flags)


def test_short_documents_are_never_cut():
    masks = [[LEARN] * n for n in (7, 7, 7, 7, 25)]
    rows = packed(masks, seq_len=10).rows
    whole = [segment for segment in segments_of(rows) if segment[0] < 28]
    assert sorted(whole) == [list(range(7 * i, 7 * i + 7)) for i in range(4)]
    assert rows.num_rows == 6
