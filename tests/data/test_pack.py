import time
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_experiments.data.pack import flatten, pack, pack_flat
from tpu_experiments.data.tokenize import Tokens

PAD = 999_999


def documents_of(masks):
    """One document for each mask; every token of all documents has an id of its own."""
    documents, following = [], 0
    for number, mask in enumerate(masks):
        ids = list(range(following, following + len(mask)))
        following += len(mask)
        documents.append(Tokens(ids, list(mask), str(number)))
    return documents


masks_st = st.lists(st.lists(st.booleans(), min_size=1, max_size=40), max_size=30)


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16))
def test_no_token_is_lost_or_doubled_but_counted_ones(masks, seq_len):
    documents = documents_of(masks)
    packed = pack_flat(flatten(documents), seq_len=seq_len, pad_id=PAD)
    rows = packed.rows
    pieces = [
        (document.ids[start : start + seq_len], document.learn[start : start + seq_len])
        for document in documents
        for start in range(0, len(document.ids), seq_len)
    ]
    kept = [ids for ids, learn in pieces if any(learn[1:])]
    found = [
        rows.ids_NT[row][rows.segments_NT[row] == segment].tolist()
        for row in range(rows.num_rows)
        for segment in range(1, rows.segments_NT[row].max() + 1)
    ]
    assert sorted(found) == sorted(kept)
    assert packed.num_dropped_pieces == len(pieces) - len(kept)
    assert packed.num_dropped_tokens == sum(map(len, masks)) - rows.num_tokens
    assert packed.num_split == sum(len(mask) > seq_len for mask in masks)


@settings(deadline=None)
@given(masks=masks_st, seq_len=st.integers(2, 16))
def test_rows_are_well_formed(masks, seq_len):
    rows = pack(documents_of(masks), seq_len=seq_len, pad_id=PAD)
    learn_of_id = [learn for mask in masks for learn in mask]
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
        expected = [learn_of_id[i] and not s for i, s in zip(ids[used], starts, strict=True)]
        assert learn[used].tolist() == expected


@settings(deadline=None)
@given(masks=masks_st)
def test_packing_is_deterministic(masks):
    first, second = (pack(documents_of(masks), seq_len=8, pad_id=PAD) for _ in range(2))
    for name in ("ids_NT", "learn_NT", "positions_NT", "segments_NT"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_best_fit_fills_the_fullest_row():
    lengths = [4, 6, 2, 3, 5]
    rows = pack(documents_of([[True] * n for n in lengths]), seq_len=10, pad_id=PAD)
    filled = [Counter(row[row > 0].tolist()) for row in rows.segments_NT]
    # 6, then 5, then 4 beside the 6, then 3 and 2 beside the 5.
    assert [list(counts.values()) for counts in filled] == [[6, 4], [5, 3, 2]]


def test_nothing_to_pack():
    assert pack([], seq_len=8, pad_id=PAD).num_rows == 0
    assert pack(documents_of([[True]]), seq_len=8, pad_id=PAD).num_rows == 0


def test_a_hundred_thousand_documents_take_seconds():
    lengths = np.random.default_rng(0).integers(2, 400, size=100_000)
    documents = (Tokens([1] * n, [True] * n, "") for n in lengths.tolist())
    started = time.perf_counter()
    rows = pack(documents, seq_len=1024, pad_id=0)
    assert time.perf_counter() - started < 30
    assert rows.num_tokens / rows.ids_NT.size > 0.99
