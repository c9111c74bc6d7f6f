"""Trip counts of loops, in the forms that compilers give counters."""

import pytest

from tests.planning.hlo_programs import computation, cost, counting_loop, elements, module
from tpu_experiments.planning.hlo import scalars
from tpu_experiments.planning.hlo.program import read_program

LESS = "compare(%i, %n), direction=LT"


def trips(hlo: str) -> int:
    (loop,) = read_program(hlo).loops
    return loop.trip_count


@pytest.mark.parametrize(
    ("start", "step", "goes_on", "expected"),
    [
        ("constant(0)", "add(%i, %one)", LESS, 5),
        ("constant(1)", "add(%i, %one)", LESS, 4),
        ("constant(0)", "add(%i, %two)", LESS, 3),
        ("constant(0)", "add(%i, %one)", "compare(%i, %n), direction=LE", 6),
        ("constant(9)", "subtract(%i, %one)", "compare(%i, %n), direction=GT", 4),
        ("constant(0)", "add(%two, %i)", "compare(%n, %i), direction=NE", None),
        ("constant(5)", "add(%i, %one)", LESS, 0),
        ("constant(-2)", "add(%i, %one)", LESS, 7),
        ("constant(1)", "multiply(%i, %two)", LESS, 3),
        ("constant(0)", "add(%i, %n)", LESS, 1),
    ],
)
def test_the_counter_is_run(
    monkeypatch: pytest.MonkeyPatch, start: str, step: str, goes_on: str, expected: int | None
) -> None:
    monkeypatch.setattr(scalars, "MAX_TRIPS", 100)
    hlo = counting_loop(start=start, step=step, goes_on=goes_on, cycles=10)
    if expected is None:
        with pytest.raises(ValueError, match="loop=loop; it still runs after 100 trips"):
            trips(hlo)
    else:
        assert trips(hlo) == expected
        assert read_program(hlo).cycles == 10 * expected


def test_what_the_compiler_states_goes_first() -> None:
    stated = ', backend_config={"known_trip_count":{"n":"24"}}'
    assert trips(counting_loop(start="copy(%seed)", step="add(%i, %one)", goes_on=LESS, settings=stated)) == 24


def test_a_condition_that_is_a_fusion_is_followed() -> None:
    hlo = counting_loop(start="constant(2)", step="add(%i, %one)", goes_on="fusion(%n, %i), kind=kLoop, calls=%fused")
    fused = computation(
        "fused", "b = s32[] parameter(0)", "a = s32[] parameter(1)", "ROOT c = pred[] compare(%a, %b), direction=LT"
    )
    assert trips(hlo.replace("%condition (", fused + "\n%condition (", 1)) == 3


def nested(*, inner_bound: str) -> str:
    """A loop of 4 trips around another; the inner one runs to %n (4, unchanged) or to the outer counter %i."""
    pair = "p = (s32[], s32[]) parameter(0)"
    one, less = "one = s32[] constant(1)", "ROOT c = pred[] compare(%i, %n), direction=LT"
    step, result = "next = s32[] add(%i, %one)", "ROOT t = (s32[], s32[]) tuple(%next, %n)"
    work = f"work = f32[8] copy(%i){cost(10)}"
    start = ["zero = s32[] constant(0)", "first = (s32[], s32[]) tuple(%zero, %n)"]
    inner_start = f"second = (s32[], s32[]) tuple(%zero, {inner_bound})"
    inner = "inner = (s32[], s32[]) while(%second), condition=%condition, body=%inner_body"
    outer = "ROOT outer = (s32[], s32[]) while(%first), condition=%condition, body=%outer_body"
    return module(
        computation("condition", pair, *elements(), less),
        computation("inner_body", pair, *elements(), one, work, step, result),
        computation("outer_body", pair, *elements(), one, *start, inner_start, inner, work, step, result),
        computation("main", "n = s32[] constant(4)", *start, outer, entry=True),
    )


def test_a_nested_loop_takes_its_bound_from_outside() -> None:
    program = read_program(nested(inner_bound="%n"))
    assert {loop.name: (loop.trip_count, loop.cycles) for loop in program.loops} == {"inner": (4, 10), "outer": (4, 50)}
    assert program.cycles == 4 * (4 * 10 + 10)


def test_a_nested_loop_whose_bound_changes_is_an_error_not_a_guess() -> None:
    with pytest.raises(ValueError, match="loop=inner; its trip count cannot be determined"):
        read_program(nested(inner_bound="%i"))


def test_unsigned_counters_wrap() -> None:
    hlo = counting_loop(start="constant(0)", step="subtract(%i, %one)", goes_on="compare(%i, %n), direction=LT")
    assert trips(hlo.replace("s32[]", "u32[]")) == 1
