"""Pictures of a run: what their lines and bars stand for, not how they look."""

import math
import struct

import pytest

from tpu_experiments.training.pictures import NUM_MEANS, audit_figure, loss_figure, png_of


def record(step, **values):
    return {"step": step, **{name.replace("__", "/"): value for name, value in values.items()}}


def lines_of(axes):
    return {line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in axes.get_lines()}


def split(documents, rows, tokens, learnt, *, lengths):
    histogram = {"edges": [0, 16, 32, 64], "documents": lengths}
    numbers = {"documents": documents, "rows": rows, "tokens": tokens, "supervised_tokens": learnt}
    return numbers | {"length_histogram": histogram}


def test_a_run_of_two_stages_with_two_sources():
    records = [
        record(0, eval__loss=3.0, eval__loss_a=2.5, eval__loss_b=3.5),
        record(5, train__loss=2.0),
        record(10, train__loss=1.0, eval__loss=2.0, eval__loss_a=1.5, eval__loss_b=2.5),
    ]
    (axes,) = loss_figure(records, stages={"text": 4, "chat": 6}, title="run").axes
    lines = lines_of(axes)
    assert lines.pop("training") == [[5, 10], [2.0, 1.0]]
    assert lines.pop("held out: a") == [[0, 10], [2.5, 1.5]]
    assert lines.pop("held out: b") == [[0, 10], [3.5, 2.5]]
    (border,) = lines.values()
    assert border[0] == [4, 4]
    assert [text.get_text() for text in axes.texts] == ["text", "chat"]


def test_shares_of_right_answers_have_axes_of_their_own():
    records = [record(0, skill__facts=0.1), record(5, train__loss=None), record(9, skill__facts=0.9, train__loss=1.0)]
    losses, shares = loss_figure(records, stages={"only": 9}, title="run").axes
    assert lines_of(losses)["training"] == [[9], [1.0]]
    assert lines_of(shares) == {"facts": [[0, 9], [10.0, 90.0]]}


def test_a_mean_is_laid_over_many_records_and_keeps_their_mean():
    records = [record(step, train__loss=float(step % 7)) for step in range(1, 141)]
    (axes,) = loss_figure(records, stages={"only": 140}, title="run").axes
    _, means = lines_of(axes)["its mean"]
    assert len(means) == NUM_MEANS
    assert sum(means) / NUM_MEANS == pytest.approx(3.0, abs=0.2)


def test_the_data_of_two_sources():
    chat = {"source": "chat", "seq_len": 64, "splits": {"train": split(30, 10, 480, 160, lengths=[0, 20, 10])}}
    text = {"source": "text", "seq_len": 32, "splits": {"train": split(9, 10, 320, 320, lengths=[9, 0, 0])}}
    text["splits"]["test"] = split(0, 0, 0, 0, lengths=[0, 0, 0])
    lengths, tokens, other_lengths, other_tokens = audit_figure([chat, text]).axes
    assert [bar.get_height() for bar in lengths.patches] == [20, 10]
    assert [label.get_text() for label in lengths.get_xticklabels()] == ["to 32", "to 64"]
    assert [bar.get_width() for bar in tokens.patches] == [25.0, 50.0, 25.0]
    assert [bar.get_height() for bar in other_lengths.patches] == [9]
    assert [bar.get_width() for bar in other_tokens.patches] == [100.0, 0.0, 0.0], "a split without rows has no bar"


def test_losses_that_are_not_finite_are_gaps():
    records = [record(step, train__loss=loss) for step, loss in enumerate((1.0, math.inf, math.nan, 2.0))]
    figure = loss_figure(records, stages={"only": 4}, title="run")
    assert png_of(figure).startswith(b"\x89PNG")
    low, high = figure.axes[0].get_ylim()
    assert 0.5 < low < 1.0
    assert 2.0 < high < 2.5


def test_a_run_without_a_record_and_a_source_without_documents_are_drawn():
    empty = {"source": "none", "seq_len": 64, "splits": {}}
    for figure in (loss_figure([], stages={"only": 0}, title="run"), audit_figure([empty])):
        png = png_of(figure)
        assert png.startswith(b"\x89PNG")
        assert struct.unpack(">II", png[16:24]) == (900, 400)
