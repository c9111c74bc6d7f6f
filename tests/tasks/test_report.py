"""task=report: which runs it finds, what it says of them, and the page it writes."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.tasks.report_runs import made
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks import report
from tpu_experiments.tasks.report import tables
from tpu_experiments.tasks.report.charts import Line, line_chart, smoothed, thinned, ticks
from tpu_experiments.tasks.report.page import report_page
from tpu_experiments.tasks.report.runs import find_runs, labels

VOID = {"meta", "br", "link", "input"}


class Balanced(HTMLParser):
    """Every element that opens closes in its place; collects classes and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_runs_are_found_by_folder_pattern_and_sweep(tmp_path: Path) -> None:
    for name in ("tiny_a", "tiny_b", "other"):
        made(tmp_path / name)
    for r in (16, 4, 8):
        made(tmp_path / "sweeps" / "ranks" / f"lora.r={r}", f"lora.r={r}")
    found = find_runs([f"{tmp_path}/other", f"{tmp_path}/tiny_*", f"{tmp_path}/other", f"{tmp_path}/sweeps/ranks"])
    assert [run.label for run in found] == ["other", "tiny_a", "tiny_b", "lora.r=4", "lora.r=8", "lora.r=16"]
    assert [run.config["lora.r"] for run in found[-3:]] == [4, 8, 16]
    with pytest.raises(ConfigError, match=r"task\.runs=.*/none; there is no run in it"):
        find_runs([f"{tmp_path}/none"])
    with pytest.raises(ConfigError, match="there is no run in it"):
        find_runs([f"{tmp_path}/other/metrics.jsonl"])


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    place = made(tmp_path / "tried[1]" / "a")
    assert [run.folder for run in find_runs([place])] == [place]


def test_runs_of_a_bucket_are_read_alike() -> None:
    made("memory://report-test/runs/a", "lora.r=4")
    made("memory://report-test/runs/b", is_finished=False)
    listed = find_runs(["memory://report-test/runs"])
    assert [(run.label, run.status) for run in listed] == [("a", "finished"), ("b", "not finished, step 20")]
    assert [run.label for run in find_runs(["memory://report-test/runs/b*"])] == ["b"]


def test_labels_are_as_long_as_it_takes_to_tell_runs_apart() -> None:
    assert labels(["x/a", "y/b/"]) == ["a", "b"]
    assert labels(["x/s/a", "y/t/a", "y/t/b"]) == ["s/a", "t/a", "t/b"]


def test_a_run_that_is_not_finished_says_what_its_records_say(tmp_path: Path) -> None:
    made(tmp_path / "open", loss=4.0, is_finished=False)
    (run,) = find_runs([f"{tmp_path}/open"])
    assert run.status == "not finished, step 20"
    assert (run.value("eval_loss_before"), run.value("eval_loss")) == (5.0, 4.0)
    assert run.value("tokens_per_second") == pytest.approx(150)
    assert run.value("num_trainable") is None
    assert run.account is not None
    assert (run.account["wall_seconds"], run.account["usd"]["on_demand"]) == (20.0, 20.0)


def test_tables_say_what_differs_and_what_came_out(tmp_path: Path) -> None:
    made(tmp_path / "a", loss=3.0)
    made(tmp_path / "b", "optim.lr=0.01", "lora.r=4", loss=2.5)
    made(tmp_path / "c", loss=2.0, is_finished=False)
    runs = find_runs([str(tmp_path)])
    assert tables.differences(runs) == [("lora.r", ["16", "4", "16"]), ("optim.lr", ["null", "0.01", "null"])]
    titles, lines = tables.results(runs, baseline=runs[0])
    column = titles.index("held-out loss")
    cells = [line[column] for line in lines]
    assert [(cell.text, cell.note, cell.is_best) for cell in cells] == [
        ("3.0000", "", False),
        ("2.5000", "-0.5000", True),
        ("2.0000", "-1.0000", False),  # lower, but not at its end
    ]
    assert "$ spot" not in titles
    assert lines[0][titles.index("$ on demand")].text == "20.00"
    assert tables.time_parts(runs[0]) == [("setup", 4.0), ("compile", 6.0), ("step", 10.0)]
    assert tables.stage_borders(runs) == [8]


def test_runs_of_preferences_are_ranked_by_accuracy_and_then_by_loss(tmp_path: Path) -> None:
    for name, loss, accuracy in (("a", 0.2, 0.8), ("b", 0.5, 0.9), ("c", 0.4, 0.9)):
        made(tmp_path / name, loss=loss)
        file = tmp_path / name / "result.json"
        measured = {"ranked_by": "rewards/accuracies", "eval_measures": {"rewards/accuracies": accuracy}}
        file.write_text(json.dumps(json.loads(file.read_text()) | measured))
        record = {"step": 9, "time": 9.0, "eval/rewards/accuracies": accuracy}
        with (tmp_path / name / "metrics.jsonl").open("a") as records:
            records.write(json.dumps(record) + "\n")
    runs = find_runs([str(tmp_path)])
    titles, lines = tables.results(runs, baseline=runs[0])
    assert [line[titles.index("rewards/accuracies")].is_best for line in lines] == [False, True, True]
    assert [line[titles.index("held-out loss")].is_best for line in lines] == [False, False, True]
    page = report_page(runs, baseline=runs[0], title="x")
    assert "Best held-out rewards/accuracies" in page
    assert "Best held-out loss" not in page
    assert "Held-out rewards/accuracies" in page, "a chart of what they are ranked by"
    assert "Training rewards/accuracies" not in page, "no record has it"


def test_runs_that_were_evaluated_on_different_text_are_not_ranked(tmp_path: Path) -> None:
    made(tmp_path / "a", loss=3.0)
    made(tmp_path / "b", "optim.lr=0.01", loss=2.5, tokens=98)
    runs = find_runs([str(tmp_path)])
    titles, lines = tables.results(runs, baseline=runs[0])
    cell = lines[1][titles.index("held-out loss")]
    assert (cell.text, cell.note, cell.is_best) == ("2.5000", "", False)
    page = report_page(runs, baseline=runs[0], title="x")
    assert "<b>not ranked</b>" in page
    assert "Held-out figures are not ranked: the runs were evaluated on different sources or tokens." in page
    assert "Best held-out loss" not in page


def test_runs_are_compared_on_the_same_number_of_pairs(tmp_path: Path) -> None:
    for name, counts in {"old": {"eval_tokens": 24}, "new": {"eval_tokens": 98, "eval_pairs": 24}}.items():
        made(tmp_path / name, loss=3.0)
        file = tmp_path / name / "result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | counts))
    assert tables.is_comparable(find_runs([str(tmp_path)]))


def test_one_run_is_compared_with_nothing(tmp_path: Path) -> None:
    made(tmp_path / "a")
    (run,) = find_runs([str(tmp_path)])
    page = report_page([run], baseline=run, title="x")
    assert "One run. Made " in page
    assert "compared with" not in page
    assert "against a" not in page


def test_a_source_a_stage_or_a_model_is_one_line_of_what_differs(tmp_path: Path) -> None:
    made(tmp_path / "a", "data=[sample_text]", "curriculum=single")
    made(tmp_path / "b", "data=[sample_text,sample_chat]", "curriculum=single", "model=qwen05b")
    found = dict(tables.differences(find_runs([str(tmp_path)])))
    assert found["data.sample_chat"] == ["-", "yes"]
    assert found["model.name"] == ["tiny", "qwen05b"]
    assert not [key for key in found if key.startswith(("data.sample_chat.", "model.arch.", "model.tiny_arch."))]
    assert set(found) <= {"data.sample_chat", "sample.prompt"} | {key for key in found if key.startswith("model.")}


def test_measures_and_the_test_split_are_shown_where_they_are_known(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b")
    file = tmp_path / "a" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eval_measures": {"bits_per_byte": 0.75}}))
    estimates = {"loss": {"value": 2.5, "low": 2.25, "high": 2.75}}
    sources = {"one": {"base": {}, "trained": None}, "all": {"base": {"loss": {"value": 9}}, "trained": estimates}}
    tested = {"split": "test", "loss": 2.5, "sources": sources}
    (tmp_path / "a" / "test_results.json").write_text(json.dumps(tested))
    runs = find_runs([str(tmp_path)])
    titles, lines = tables.results(runs, baseline=runs[0])
    assert lines[0][titles.index("bits per byte")].text == "0.7500"
    shown = [line[titles.index("test loss")] for line in lines]
    assert [(cell.text, cell.note) for cell in shown] == [("2.5000", "2.2500 to 2.7500"), ("", "")]
    assert "accuracy" not in titles


def test_long_curves_keep_their_peaks() -> None:
    points = [(step, float(step % 7)) for step in range(10_000)]
    points[5003] = (5003, 99.0)
    points[7001] = (7001, -99.0)
    kept = thinned(points)
    assert len(kept) <= 410
    assert {(5003, 99.0), (7001, -99.0), points[0], points[-1]} <= set(kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert thinned(points[:400]) == points[:400]


def test_smoothing_keeps_the_mean_and_leaves_short_curves_alone() -> None:
    assert smoothed([(1, 1.0), (2, 9.0)]) == [(1, 1.0), (2, 9.0)]
    wave = [(step, 5.0 + (-1) ** step) for step in range(1000)]
    values = [value for _, value in smoothed(wave)]
    assert max(abs(value - 5.0) for value in values) < 0.1
    cliff = [(step, 1.0 if step <= 500 else 9.0) for step in range(1, 1001)]
    assert smoothed(cliff, borders=[500]) == cliff


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (6.38, 6.56), (0.0, 3e6), (1e-5, 1e-3), (-2.0, 7.0), (4.0, 4.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    if high > low:
        step = found[1] - found[0]
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5, 10)


def test_a_chart_is_whole_and_carries_its_values() -> None:
    lines = [Line(0, "a<b", [(0, 5.0), (10, 4.0)]), Line(9, "one", [(10, 4.5)]), Line(3, "none", [])]
    root = ElementTree.fromstring(line_chart(lines, title="Loss", form=".2f", borders=[4]))
    groups = [each for each in root.iter("g") if "line" in str(each.get("class"))]
    assert [group.get("data-run") for group in groups] == ["0", "9"]
    assert groups[1].get("class") == "line c1 dashed"
    assert root.get("aria-label") == "Loss: a<b ends at 4.00; one ends at 4.50"
    told = json.loads(str(root.get("data-chart")))
    assert told["lines"][0]["points"] == [[0, 5.0, "5.00"], [10, 4.0, "4.00"]]
    assert told["x"] == [0, 10]
    numbers = [float(x) for x in re.findall(r"[\d.]+", str(groups[0].find("path").get("d")))]  # type: ignore[union-attr]
    assert all(0 <= value <= 520 for value in numbers)
    assert numbers[1] < numbers[3]  # the lower loss is further down


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", "optim.lr=0.01", is_finished=False)
    runs = find_runs([str(tmp_path)])
    page = report_page(runs, baseline=runs[0], title="<x> & y")
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert "http" not in page
    assert "&lt;b&gt;Dunărea&lt;/b&gt;" in page
    assert "<title>&lt;x&gt; &amp; y</title>" in page
    assert "2 runs, 1 of them not finished; compared with a." in page
    for heading in ("Training loss", "Held-out loss", "Learning rate", "Speed", "What came out", "What differs"):
        assert heading in page
    assert page.count('class="plot"') == 4


def test_a_run_without_records_is_shown_all_the_same(tmp_path: Path) -> None:
    made(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tmp_path / "a" / "result.json").unlink()
    runs = find_runs([str(tmp_path)])
    page = report_page(runs, baseline=runs[0], title="x")
    assert "not finished, step 0" in page
    assert "None of these runs has written metrics.jsonl." in page


def test_the_task_writes_the_page_and_compares_with_the_named_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", "optim.lr=0.01", loss=2.5)
    command = ("task=report", "name=both", f"output_dir={tmp_path}")
    report.run(composed(*command, "task.baseline=b"))
    page = (tmp_path / "reports" / "both" / "report.html").read_text()
    assert "2 runs; compared with b." in page
    assert "b: finished, held-out loss 2.5000" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"task\.baseline=c; 0 of the runs are called so; name one of: a, b\."):
        report.run(composed(*command, "task.baseline=c"))
    report.run(composed("task=report", f"output_dir={tmp_path}"))
    assert (tmp_path / "reports" / "report" / "report.html").exists()
    report.run(composed(*command, f"task.runs=[{tmp_path}/a]"))
    assert "1 runs" not in (tmp_path / "reports" / "both" / "report.html").read_text()
