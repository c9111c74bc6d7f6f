"""Which calls of a program are traced."""

import threading

import pytest

from tpu_experiments.runtime.xla.replay import NUM_FIRST, Calls, Change, OutputReader


def calls_of(graphs: str, *, every: int) -> tuple[str, list[Change]]:
    """A program whose graph at each call is a letter: `t` for each call that was traced, and what was told."""
    calls = Calls(every=every, differ=lambda a, b: None if a == b else f"{a} to {b}")
    done, told = "", []
    for graph in graphs:
        if calls.replayable("train") is None:
            change = calls.traced(graph, "train")
            told += [change] if change is not None else []
            done += "t"
        else:
            calls.replayed()
            done += "."
    return done, told


def gaps(done: str) -> list[int]:
    """Calls from one trace to the next, behind the first traces."""
    return [len(part) + 1 for part in done[NUM_FIRST:].split("t")[:-1]]


def test_the_first_calls_are_traced_and_then_one_in_n_at_irregular_intervals():
    done, told = calls_of("a" * 2000, every=10)
    assert done.startswith("ttt.")
    assert told == []
    found = gaps(done)
    assert set(found) == set(range(5, 16)), "from half of the interval to three halves"
    assert sum(found) / len(found) == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("period", [2, 5, 7, 10, 25, 50])
def test_a_change_with_a_period_is_met(period):
    """With traces at a fixed distance of 50, one that divides it would never be."""
    _, told = calls_of("".join("b" if (i + 1) % period == 0 else "a" for i in range(20_000)), every=50)
    assert len(told) == 1


def test_the_first_call_behind_another_program_is_traced():
    calls, traced = Calls(every=50, differ=lambda a, b: None if a == b else f"{a} to {b}"), []
    for call, after in enumerate(["train"] * 5 + ["evaluate", "train", "evaluate", "sample", "evaluate"]):
        if calls.replayable(after) is None:
            assert calls.traced("a", after) is None
            traced.append(call)
        else:
            calls.replayed()
    assert traced == [0, 1, 2, 5, 8]


def test_every_call_is_traced_where_that_is_asked_for():
    assert calls_of("aaaaab", every=1) == ("tttttt", [])


@pytest.mark.parametrize(
    ("graphs", "traced", "told"),
    [
        ("abcdefgh", "tttttttt", Change("a to b", 0)),
        ("aaaaaaab" + "b" * 6, "ttt...t.....tt", Change("a to b", 5)),
        ("aaaaabbbbb", "ttt...tttt", Change("a to b", 3)),
    ],
)
def test_a_program_that_changed_is_traced_from_then_on_and_reported_once(graphs, traced, told):
    assert calls_of(graphs, every=5) == (traced, [told])


def test_what_cannot_be_kept_is_traced_every_time():
    calls = Calls(every=5, differ=lambda a, b: None)
    for _ in range(6):
        assert calls.replayable("train") is None
        assert calls.traced(None, "train") is None
    assert not calls.is_recorded
    assert calls.num_traced == 6


def test_calls_are_one_ahead_of_what_is_read_and_no_more():
    reader, seen = OutputReader(), []
    for call in range(5):
        reader.wait(call)  # nothing is read, nothing is waited for
    read = reader.wrap(5, seen.append)
    reader.wait(6)
    ahead = threading.Thread(target=lambda: (reader.wait(7), seen.append("call 7")))
    ahead.start()
    assert seen == []
    read("outputs of 5")
    ahead.join(60)
    assert seen == ["outputs of 5", "call 7"]


def test_a_reader_that_fails_is_not_waited_for():
    reader = OutputReader()

    def fails(out: str) -> None:
        raise ValueError(out)

    with pytest.raises(ValueError, match="lost"):
        reader.wrap(1, fails)("lost")
    reader.wait(9)
