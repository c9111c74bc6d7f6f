"""The sum of a sweep's plans."""

import json
from pathlib import Path

from tests.config.composing import composed
from tpu_experiments.sweeping.points import Point
from tpu_experiments.sweeping.totals import total_lines, write_total


def test_hours_and_dollars_are_added_and_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    config = composed("hw=v5e1", "task=plan", f"output_dir={tmp_path}")
    points = [Point(f"lora.r={r}", {"lora.r": str(r)}, (), config) for r in (8, 16, 32)]
    for point, hours in zip(points, (1.5, 2.25), strict=False):
        folder = tmp_path / "plans" / point.name
        folder.mkdir(parents=True)
        plan = {"fits": hours < 2, "hours": hours, "usd": {"on_demand": hours * 2, "spot": None}}
        (folder / "plan.json").write_text(json.dumps(plan))
    said, *table = total_lines(points, points_at_once=8)
    assert said.startswith("the whole sweep, 3 points; the points one after the other; 8 at once end in about 1/8 of")
    assert [line.split() for line in table[1:]] == [
        ["8", "v5e1", "yes", "1.50", "3.00"],
        ["16", "v5e1", "no", "2.25", "4.50"],
        ["32", "v5e1", "no", "plan"],
        ["total", "3.75", "7.50"],
    ]
    page = Path(write_total(points, folder=str(tmp_path))).read_text()
    assert "| total |  |  | 3.75 | 7.50 |  |" in page
