"""Wall time in parts that add up, over lives of which some were killed, and their dollars."""

import pytest

from tests.config.composing import composed
from tpu_experiments.metrics import goodput
from tpu_experiments.metrics.goodput import PARTS, Life, Stopwatch, account, goodput_lines, hourly_price, scalars, split


def life(started: float, price: float | None = 3.6, **seconds: float) -> Life:
    usd = {"on_demand": price, "spot": None if price is None else price / 3}
    return Life("x", "vm", started, 8, usd, seconds={part: 0.0 for part in PARTS} | seconds)


def test_the_parts_add_up_to_the_wall_time():
    seconds = {"setup": 5.0, "load": 3.0, "eval": 40.0, "train": 200.0, "checkpoint": 7.0}
    compiled = {"train": 50.0, "eval": 30.0}
    parts = split(300.0, seconds=seconds, compiled=compiled, input_wait=12.0, lost=20.0)
    assert parts == {
        "setup": 53.0, "compile": 80.0, "input_wait": 12.0, "step": 118.0, "evaluation": 10.0, "save": 7.0, "lost": 20.0
    }  # fmt: skip
    assert sum(parts.values()) == 300.0
    assert tuple(parts) == PARTS


def test_no_part_is_negative_when_clocks_overlap():
    """A compiler in another thread may work while something else is measured."""
    parts = split(10.0, seconds={"train": 5.0, "eval": 1.0}, compiled={"train": 6.0}, input_wait=1.0, lost=9.0)
    assert all(value >= 0 for value in parts.values())
    assert parts["step"] == parts["lost"] == 0.0


def test_lives_are_added_up_with_the_time_between_them():
    lives = [life(1000.0, setup=10.0, step=50.0), life(1100.0, setup=20.0, step=100.0, lost=20.0)]
    totals = account(lives)
    assert (totals["lives"], totals["wall_seconds"], totals["down_seconds"]) == (2, 200.0, 40.0)
    assert totals["seconds"]["step"] == 150.0
    assert sum(totals["seconds"].values()) == totals["wall_seconds"]
    assert sum(totals["shares"].values()) == pytest.approx(1.0)
    assert totals["shares"]["lost"] == 0.1
    assert totals["usd"]["on_demand"] == pytest.approx(0.2)
    values = scalars(totals)
    assert sum(value for name, value in values.items() if name.endswith("_percent")) == pytest.approx(100.0)
    assert values["goodput/usd_spot"] == pytest.approx(0.2 / 3)
    (line,) = goodput_lines(totals)
    assert "200.0 s over 2 processes, 40 s between them" in line
    assert "step 150.0" in line
    assert "$0.20 on demand, $0.07 spot" in line


def test_clocks_of_two_machines_make_no_negative_time():
    assert account([life(1000.0, step=100.0), life(1050.0, step=1.0)])["down_seconds"] == 0.0


def test_without_a_price_there_are_no_dollars():
    totals = account([life(0.0, step=3600.0), life(1e4, price=None, step=3600.0)])
    assert totals["usd"] == {"on_demand": None, "spot": None}
    assert not [name for name in scalars(totals) if "usd" in name]
    assert "$" not in goodput_lines(totals)[0]
    assert hourly_price(composed("hw=cpu").hw) == {"on_demand": None, "spot": None}


def test_the_price_is_that_of_all_chips():
    assert hourly_price(composed("hw=v6e8", "model=mistral7b", "data=uk_law").hw) == {
        "on_demand": pytest.approx(8 * 2.97),
        "spot": pytest.approx(8 * 1.782),
    }


def test_the_stopwatch_is_exclusive_and_tells_compilation_apart(monkeypatch):
    now, compiled = [0.0], [0.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.watch_compiler(lambda: compiled[0])
    now[0] = 1.0  # nothing is measured
    with watch.measure("train"):
        now[0], compiled[0] = 5.0, 3.0
        with watch.measure("eval"):
            now[0], compiled[0] = 7.0, 3.5
        now[0] = 8.0
        watch.settle()
        assert watch.seconds == {"train": 5.0, "eval": 2.0}  # in the middle of it
        now[0] = 10.0
    assert watch.seconds == {"train": 7.0, "eval": 2.0}
    assert watch.compiled == {"train": 3.0, "eval": 0.5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("owed_steps", "3"),
        ("owed_steps", [""]),
        ("step", float("nan")),
        ("step", 10**30),
        ("seconds", 2),
        ("seconds", {"step": {}}),
        ("usd_per_hour", {"on_demand": "1"}),
        ("ended", ["failed"]),
        ("started", ""),
        ("num_devices", True),
    ],
)
def test_an_entry_of_another_kind_makes_no_life(name, value):
    stored = life(1000.0, step=50.0).to_dict()
    assert Life.of(stored) == life(1000.0, step=50.0)
    assert Life.of(stored | {"of a later version": 1}) == life(1000.0, step=50.0)
    with pytest.raises(ValueError, match=name):
        Life.of(stored | {name: value})
    with pytest.raises(ValueError, match="no JSON object"):
        Life.of([stored])
