"""Rows of a sweep: how they are kept, ranked, shown, and given to TensorBoard."""

import csv
import io
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.sweeping import leaderboard
from tpu_experiments.sweeping.hparams import write_session
from tpu_experiments.sweeping.leaderboard import (
    FAILED,
    FINISHED,
    PRUNED,
    RUNNING,
    STOPPED,
    Row,
    best_of,
    ranked,
    read_rows,
    write_rows,
)


def row(r: int, status: str = FINISHED, **values: object) -> Row:
    """A point of a sweep over lora.r."""
    made = Row(f"lora.r={r}", {"lora.r": str(r)}, ["seed=1", f"lora.r={r}"], f"out/sweeps/s/lora.r={r}", status)
    for name, value in values.items():
        setattr(made, name, value)
    return made


ROWS = [
    row(4, FAILED, exit_code=2),
    row(8, eval_loss_before=5.0, eval_loss=3.25, tokens_per_second=1234.5, num_trainable=1000, seconds=61.25),
    row(16, PRUNED, eval_loss=2.0, step=20),
    row(32, eval_loss_before=5.0, eval_loss=3.0, adapter_path="out/adapter", num_trainable=2000, seconds=60.0),
    row(64, RUNNING, step=7),
    row(128, eval_loss=None),
]


def test_points_lead_by_the_measure_of_their_objective_and_then_by_their_loss() -> None:
    rows = [row(r) for r in (8, 16, 32, 64)]
    for each, loss, accuracy in zip(rows, (0.5, 0.3, 0.2, 0.1), (0.9, 0.9, 0.8, None), strict=True):
        measured = (
            {}
            if accuracy is None
            else {"ranked_by": "rewards/accuracies", "eval_measures": {"rewards/accuracies": accuracy}}
        )
        each.fill_from_result({"eval_loss": loss, **measured})
    assert [each.changed["lora.r"] for each in ranked(rows)] == ["16", "8", "32", "64"]
    table = leaderboard.cells(rows)
    assert table[1][table[0].index("rewards/accuracies")] == "0.9000"
    assert "held-out rewards/accuracies 0.9000, held-out loss 0.3000" in leaderboard.best(rows, name="s")[0]
    assert "measure" in leaderboard.csv_text(rows).split("\n")[0]
    assert "measure" not in leaderboard.csv_text(ROWS).split("\n")[0]


def test_finished_points_lead_by_their_held_out_loss() -> None:
    assert [each.changed["lora.r"] for each in ranked(ROWS)] == ["32", "8", "128", "64", "16", "4"]
    best = best_of(ROWS)
    assert best is not None
    assert best.name == "lora.r=32"
    assert best_of([row(4, PRUNED, eval_loss=1.0), row(8)]) is None


def test_the_table_shows_what_is_known() -> None:
    shown = [" ".join(line.split()) for line in leaderboard.lines(ROWS)]
    assert shown == [
        "# lora.r eval loss before eval loss tokens/s trainable seconds status",
        "1 32 5.0000 3.0000 2,000 60.0 finished",
        "2 8 5.0000 3.2500 1,234 1,000 61.2 finished",
        "128 finished",
        "64 running at step 7",
        "5 16 2.0000 pruned at step 20",
        "4 failed (exit code 2)",
    ]
    priced = leaderboard.lines([*ROWS, row(256, eval_loss=2.5, usd_on_demand=1.5, usd_spot=0.5)])
    assert "$ on demand  $ spot" in priced[0]
    assert "1.50    0.50" in priced[1]


def test_files_are_written_whole_with_the_command_of_the_best(tmp_path: Path) -> None:
    leaderboard.write(ROWS, name="s", folder=str(tmp_path))
    page = (tmp_path / "leaderboard.md").read_text()
    assert "Best: lora.r=32, held-out loss 3.0000\nIts model: out/adapter\n" in page
    assert "\n    python run.py seed=1 lora.r=32 name=s_best\n" in page
    place = f"output_dir={tmp_path.parent.parent}"
    assert f"\n    python run.py task=report 'task.runs=[{tmp_path}]' name=s {place}\n" in page
    table = list(csv.DictReader(io.StringIO((tmp_path / "leaderboard.csv").read_text())))
    assert [line["lora.r"] for line in table] == ["32", "8", "128", "64", "16", "4"]
    assert table[1]["tokens_per_second"] == "1234.5"
    assert (table[4]["status"], table[4]["step"], table[4]["eval_loss"]) == ("pruned", "20", "2.0")
    assert (table[5]["status"], table[5]["exit_code"]) == ("failed", "2")
    assert {path.name for path in tmp_path.iterdir()} == {"leaderboard.md", "leaderboard.csv"}


@pytest.mark.parametrize("place", ["local", "memory://sweeps-test/s"])
def test_rows_survive_the_process(tmp_path: Path, place: str) -> None:
    folder = str(tmp_path) if place == "local" else place
    assert read_rows(folder) == {}
    write_rows(folder, ROWS)
    again = read_rows(folder)
    assert list(again) == [each.name for each in ROWS]
    assert again["lora.r=8"] == ROWS[1]
    assert again["lora.r=64"].status == STOPPED  # nobody runs it any more
    leaderboard.write(list(again.values()), name="s", folder=folder)
    write_session(again["lora.r=8"], folder=folder)


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"points": [{"changed": {}}]}')
    with pytest.raises(ConfigError, match=r"sweep\.json; it cannot be read"):
        read_rows(str(tmp_path))


def test_tensorboard_reads_the_values_and_the_metrics_of_each_point(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for each in ROWS:
        write_session(each, folder=str(tmp_path))
        write_session(each, folder=str(tmp_path))  # a sweep that goes on
    sessions = tmp_path / "tensorboard"
    assert {path.name for path in sessions.iterdir()} == {"lora.r=8", "lora.r=16", "lora.r=32", "lora.r=128"}
    assert len(list((sessions / "lora.r=8").iterdir())) == 1
    events = EventAccumulator(str(sessions / "lora.r=8")).Reload()
    assert events.Scalars("eval_loss")[0].value == 3.25
    assert events.Scalars("num_trainable")[0].value == 1000
    contents = events.PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(contents["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["lora.r"].number_value == 8
    experiment = HParamsPluginData.FromString(contents["_hparams_/experiment"]).experiment
    assert [info.name for info in experiment.hparam_infos] == ["lora.r"]
    assert "eval_loss" in [info.name.tag for info in experiment.metric_infos]


def test_its_page_renders_whatever_the_values_are() -> None:
    """Every line that begins as one of a table becomes one."""
    changed = {"a|b": "x|y\n| z", "model.path": "`|`", "c": "|"}
    rows = [Row(f"p{n}", dict(changed), [], "/lab", FINISHED, eval_loss=1.0) for n in range(2)]
    page = leaderboard.markdown(rows, name="t", folder="/lab/a|b")
    rendered = MarkdownIt("commonmark").enable("table").render(page)
    assert rendered.count("<tr>") == 3
    assert len(re.findall("<td", rendered)) == 2 * len(re.findall("<th[ >]", rendered))
    assert not re.search(r"^\|", re.sub(r"<(td|code).*?</\1>", "", rendered, flags=re.DOTALL), re.MULTILINE)
