"""Which calls of a program are traced."""

import pytest

from tpu_experiments.runtime.replay import NUM_FIRST, Calls, Change


def calls_of(graphs: str, *, every: int) -> tuple[str, list[Change]]:
    """A program whose graph at each call is a letter: `t` for each call that was traced, and what was told."""
    calls: Calls[str] = Calls(every=every, differ=lambda a, b: None if a == b else f"{a} to {b}")
    done, told = "", []
    for graph in graphs:
        if calls.replayable() is None:
            change = calls.traced(graph)
            told += [change] if change is not None else []
            done += "t"
        else:
            calls.replayed()
            done += "."
    return done, told


def test_the_first_calls_and_then_every_nth_are_traced():
    assert calls_of("a" * 14, every=5) == ("ttt....t....t.", [])
    assert NUM_FIRST == 3


def test_every_call_is_traced_where_that_is_asked_for():
    assert calls_of("aaaaab", every=1) == ("tttttt", [])


@pytest.mark.parametrize(
    ("graphs", "traced", "told"),
    [
        ("abcdefgh", "tttttttt", Change("a to b", 0)),
        ("aaaaaaab" + "b" * 6, "ttt....ttttttt", Change("a to b", 4)),
        ("aaaaabbbbb", "ttt....ttt", Change("a to b", 4)),
    ],
)
def test_a_program_that_changed_is_traced_from_then_on_and_told_once(graphs, traced, told):
    assert calls_of(graphs, every=5) == (traced, [told])


def test_what_cannot_be_kept_is_traced_every_time():
    calls: Calls[str] = Calls(every=5, differ=lambda a, b: None)
    for _ in range(6):
        assert calls.replayable() is None
        assert calls.traced(None) is None
    assert not calls.is_recorded
    assert calls.num_traced == 6
