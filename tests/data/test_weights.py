"""Sources drawn by weights: shares exact at every step, each source in epochs of its own, a batch of its step alone."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.preparing import prepared, text_source, write_lines
from tests.data.test_batches import rows_of
from tpu_experiments.data.batches import StageRows
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.data.weights import WeightedRows, row_shares

WEIGHTS = st.lists(st.decimals("0.01", "9.99", places=2).map(float), min_size=2, max_size=5)


def weighted(counts, shares, *, seed=0):
    parts = [
        StageRows([rows_of(100 * i, count)], names=[f"s{i}"], seed=seed, stage_index=1000 * i)
        for i, count in enumerate(counts)
    ]
    return WeightedRows(parts, shares=[Fraction(share) for share in shares])


def sources_of(labels):
    return Counter(label.partition(":")[0] for label in labels)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 10_000))
def test_shares_are_exact_after_any_number_of_rows(weights, num_rows):
    shares = row_shares(weights, tokens_per_row=[Fraction(1)] * len(weights))
    rows = weighted([7] * len(weights), shares)
    before, after = rows.drawn(num_rows), rows.drawn(num_rows + 1)
    assert sum(before) == num_rows
    assert all(
        abs(count - num_rows * share) <= i + 1 for i, (count, share) in enumerate(zip(before, shares, strict=True))
    )
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(weights) - 1) + [1]


def test_shares_go_by_tokens():
    """Rows of one source are twice as full, so half as many of them have as many tokens."""
    assert row_shares([0.5, 0.5], tokens_per_row=[Fraction(100), Fraction(50)]) == [Fraction(1, 3), Fraction(2, 3)]
    assert row_shares([0.3, 0.1], tokens_per_row=[Fraction(8), Fraction(8)]) == [Fraction(3, 4), Fraction(1, 4)]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([("1/4", "3/4"), ("1/10", "3/5", "3/10")]))
def test_every_source_goes_through_its_rows_before_it_repeats_one(global_rows, num_steps, shares):
    counts = (5, 3, 4)[: len(shares)]
    rows = weighted(counts, shares)
    labels = [label for step in range(num_steps) for label in rows.batch(step, global_rows=global_rows).labels]
    drawn = rows.drawn(len(labels))
    assert [sources_of(labels)[f"s{i}"] for i in range(len(shares))] == drawn
    for i, (part, count) in enumerate(zip(rows.parts, counts, strict=True)):
        own = [label for label in labels if label.startswith(f"s{i}:")]
        assert own == part.between(0, len(own))[1]
        for first in range(0, len(own) - count + 1, count):
            assert len(set(own[first : first + count])) == count


@pytest.mark.parametrize("global_rows", [1, 3, 8])
def test_a_batch_is_of_its_step_alone_and_the_same_on_other_processes(global_rows):
    def batch(step, seed=0):
        return weighted((9, 4), ("2/3", "1/3"), seed=seed).batch(step, global_rows=global_rows)

    rows = weighted((9, 4), ("2/3", "1/3"))
    for step in range(20):
        assert rows.batch(step, global_rows=global_rows).labels == batch(step).labels
    assert any(batch(step, seed=1).labels != batch(step).labels for step in range(20))
    whole = batch(5)
    for world_size in (n for n in (1, 2, 4) if global_rows % n == 0):
        parts = [whole.slice_process(rank, world_size) for rank in range(world_size)]
        assert [label for part in parts for label in part.labels] == whole.labels
    ids = {f"s{i}:{row}": 100 * i + row for i, count in enumerate((9, 4)) for row in range(count)}
    assert whole.ids_GT[:, 0].tolist() == [ids[label] for label in whole.labels]


def test_an_epoch_has_as_many_rows_as_the_sources_together():
    rows = weighted((8, 2), ("1/2", "1/2"))
    total, steps = rows.total_for(1.5), rows.steps_for(1.5, global_rows=4)
    assert (rows.num_rows, total, steps) == (10, 15, 4)
    labels = [label for step in range(steps) for label in rows.batch(step, global_rows=4, num_total=total).labels]
    assert labels.count("-") == 1
    found = sources_of(label for label in labels if label != "-")
    assert found == {"s0": 7, "s1": 8}, "the small one came up four times, the large one in part"


def test_replayed_rows_come_beside_weighted_ones():
    rows = ReplayedRows(weighted((8, 4), ("3/4", "1/4")), weighted((5,), ("1",)), Fraction(1, 4))
    labels = [label for step in range(8) for label in rows.batch(step, global_rows=4).labels]
    assert sources_of(labels) == {"s0": 18 + 8, "s1": 6}, "8 of 32 are replayed, from the s0 of the other"


def test_sources_of_other_lengths_come_to_the_share_of_the_tokens(tmp_path, tokenizer):
    """Of rows that are half empty as many more are drawn."""
    short = write_lines(tmp_path / "short.jsonl", [{"text": f"Marea {i}."} for i in range(300)])
    long = write_lines(tmp_path / "long.jsonl", [{"text": f"{i} " + "marea e mare " * 9} for i in range(300)])
    sources = {"short": text_source(short), "long": text_source(long)}
    settings = {"packing": "pad", "long_documents": "truncate"}
    made = prepared(sources, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[48], **settings)
    splits = [made[name].manifests[48]["splits"]["train"] for name in sources]
    shares = row_shares([1, 3], tokens_per_row=[Fraction(split["tokens"], split["rows"]) for split in splits])
    parts = [
        StageRows([source.store("train", 48)], names=[name], seed=0, stage_index=i)
        for i, (name, source) in enumerate(made.items())
    ]
    rows = WeightedRows(parts, shares=shares)
    tokens = Counter()
    for step in range(40):
        batch = rows.batch(step, global_rows=16)
        for label, used in zip(batch.labels, (batch.segments_GT > 0).sum(axis=1).tolist(), strict=True):
            tokens[label.partition(":")[0]] += used
    assert tokens["long"] / tokens.total() == pytest.approx(0.75, abs=0.01)
