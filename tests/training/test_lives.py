"""The ledger of a run's lives: one file each, steps done again, kills, broken files."""

import json
from pathlib import Path

import pytest

from tests.config.composing import composed
from tpu_experiments.metrics import goodput
from tpu_experiments.metrics.goodput import Stopwatch, account
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training import lives as module
from tpu_experiments.training.lives import Ledger, Shares, read_lives

HW = composed("hw=v6e8", "model=mistral7b", "data=uk_law").hw


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """Every clock of the ledger, as a list of one number."""
    clock = [100.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module, "boot_seconds", lambda: clock[0])
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(module.time, "time", lambda: clock[0] + 1e9)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def opened(tmp_path: Path, now: list[float], *, step: int) -> tuple[Ledger, Stopwatch]:
    watch = Stopwatch()
    ledger = Ledger(RunFolder(str(tmp_path), "x"), HW, watch=watch, began=now[0] - 10)
    ledger.begin(step=step, input_wait=lambda: 0.0)
    return ledger, watch


def stored(tmp_path: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted((tmp_path / "x" / "lives").iterdir())]


def test_steps_done_again_after_a_kill_are_lost(tmp_path, now):
    first, watch = opened(tmp_path, now, step=0)
    with watch.measure("train"):
        for step in range(10, 60, 10):
            now[0] += 20
            values = first.update(step)
    assert values["goodput/step_percent"] == pytest.approx(100 * 100 / 110)
    now[0] += 500  # killed here, and a new machine comes up; its newest checkpoint is of step 30
    second, watch = opened(tmp_path, now, step=30)
    with watch.measure("train"):
        for step in (40, 50, 60, 70):
            now[0] += 30
            second.update(step)
    totals = second.totals()
    assert totals["lives"] == 2
    assert totals["lost_steps"] == 20
    assert totals["seconds"]["lost"] == pytest.approx(60.0)
    assert totals["seconds"]["step"] == pytest.approx(100.0 + 60.0)
    assert totals["seconds"]["setup"] == pytest.approx(20.0)
    assert totals["down_seconds"] == pytest.approx(490.0)
    assert totals["wall_seconds"] == pytest.approx(sum(totals["seconds"].values()))
    assert totals["usd"]["on_demand"] == pytest.approx(8 * 2.97 * (110 + 130) / 3600)
    second.close("finished")
    second.close("failed")
    before, after = stored(tmp_path)
    assert (before["ended"], before["step"], before["resumed_step"]) == (None, 50, 0)
    assert (after["ended"], after["step"], after["resumed_step"]) == ("finished", 70, 30)
    assert before["id"].startswith("0001_")
    assert after["id"].startswith("0002_")


def test_an_interval_that_is_half_new_is_half_lost(tmp_path, now):
    first, watch = opened(tmp_path, now, step=0)
    with watch.measure("train"):
        now[0] += 5
        first.update(5)
    second, watch = opened(tmp_path, now, step=0)
    with watch.measure("train"):
        now[0] += 10
        second.update(10)
    assert second.totals()["seconds"]["lost"] == pytest.approx(5.0)


def test_steps_that_a_rollback_throws_away_are_lost(tmp_path, now):
    ledger, watch = opened(tmp_path, now, step=0)
    with watch.measure("train"):
        for step in range(10, 60, 10):
            now[0] += 20
            ledger.update(step)
        now[0] += 4  # two more steps that no record was due for
    now[0] += 7  # restoring
    ledger.roll_back(35, num_lost=17)
    with watch.measure("train"):
        for step in (50, 60):
            now[0] += 30
            ledger.update(step)
    ledger.close("finished")
    totals = ledger.totals()
    assert totals["lost_steps"] == 17
    assert totals["seconds"]["lost"] == pytest.approx(10 + 20 + 4)
    assert totals["seconds"]["step"] == pytest.approx(70 + 60)
    assert totals["wall_seconds"] == pytest.approx(sum(totals["seconds"].values()))
    following, watch = opened(tmp_path, now, step=60)  # nothing is done again
    with watch.measure("train"):
        now[0] += 20
        following.update(70)
    assert following.totals()["lost_steps"] == 17


def test_kills_and_rollbacks_lose_what_was_done_less_what_counts(tmp_path, now):
    """One second a step: whatever is thrown away, seconds of steps are the steps that count in the end."""
    first, watch = opened(tmp_path, now, step=0)
    with watch.measure("train"):
        train(first, now, range(5, 55, 5))
    second, watch = opened(tmp_path, now, step=30)  # 20 steps are done again
    with watch.measure("train"):
        train(second, now, range(35, 50, 5))
        second.roll_back(40, num_lost=5)  # 5 of them
        train(second, now, (42,))
        second.roll_back(35, num_lost=7)
        train(second, now, (40,))
    opened(tmp_path, now, step=0)[0].life.step = 0  # killed before it came to train
    third, watch = opened(tmp_path, now, step=38)
    with watch.measure("train"):
        train(third, now, range(40, 62, 2))
    done = 50 + 15 + 2 + 5 + 22
    totals = third.totals()
    assert totals["lost_steps"] == done - 60
    assert totals["seconds"]["lost"] == pytest.approx(done - 60)
    assert totals["seconds"]["step"] == pytest.approx(60)
    third.close("finished")


def train(ledger: Ledger, now: list[float], steps) -> None:
    """A second a step, to records at these."""
    for step in steps:
        now[0] += step - ledger.life.step
        ledger.update(step)


def test_a_life_that_cannot_be_read_is_named_and_left_out(tmp_path, now, caplog):
    opened(tmp_path, now, step=0)
    (tmp_path / "x" / "lives" / "0002_torn.json").write_text('{"id": ')
    (tmp_path / "x" / "lives" / "0003_other.json").write_text('{"id": "a", "unknown": 1}')
    ledger, _ = opened(tmp_path, now, step=0)
    assert ledger.totals()["lives"] == 2
    assert "0002_torn.json" in caplog.text
    assert "0003_other.json" in caplog.text
    assert ledger.life.id.startswith("0004_")


def test_a_full_disk_does_not_stop_the_run(tmp_path, now, monkeypatch, caplog):
    ledger, _ = opened(tmp_path, now, step=0)
    monkeypatch.setattr(module.paths, "write_text_atomic", _full)
    for step in (1, 2, 3):
        now[0] += 1
        ledger.update(step)
    assert caplog.text.count("cannot be written") == 1


def _full(path: str, text: str) -> None:
    raise OSError(28, "No space left on device")


def test_runs_that_share_a_machine_share_its_time_and_price(tmp_path, now):
    """Points that end one after the other have together had the pack's seconds and dollars, whatever their lengths."""
    began = now[0] - 40
    whole = Ledger(RunFolder(str(tmp_path), "x"), HW, watch=Stopwatch(), began=began)
    shares = Shares(4, began=began)
    parts = []
    for number in range(4):
        folder = RunFolder(str(tmp_path), f"p{number}")
        parts.append(Ledger(folder, HW, watch=Stopwatch(), began=began, shares=shares))
    for number, part in enumerate(parts):
        now[0] += 60.0 * number
        part.close("finished")
        shares.leave()
    whole.close("finished")
    packed = [part.totals() for part in parts]
    assert whole.totals()["wall_seconds"] == 400.0
    assert [round(each["wall_seconds"]) for each in packed] == [10, 30, 90, 270]
    assert [each["process_seconds"] for each in packed] == [40.0, 100.0, 220.0, 400.0]
    for kind, dollars in whole.totals()["usd"].items():
        assert sum(each["usd"][kind] for each in packed) == pytest.approx(dollars)
    assert "30.0 s, its share of 100.0 s: " in goodput.goodput_lines(packed[1])[0]
    (stored,) = read_lives(RunFolder(str(tmp_path), "p2").path("lives"))
    assert account([stored])["wall_seconds"] == pytest.approx(90.0)
