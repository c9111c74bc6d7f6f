import re

from tpu_experiments.data.audit.charts import bar_chart, histogram


def heights(svg):
    return [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]


def test_bars_are_as_long_as_their_values():
    svg = bar_chart([("a", 10.0, "10"), ("b", 5.0, "5"), ("c", 0.0, "0")], title="Bars")
    longest, half, none = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg))
    assert longest == 2 * half > 0
    assert none == 0
    assert 'aria-label="Bars: a: 10; b: 5; c: 0"' in svg


def test_the_histogram_leaves_out_empty_ends_and_names_both_edges_of_a_bar():
    svg = histogram([0, 2, 0, 8, 0], edges=[0, 512, 1024, 2048, 4096], title="Lengths")
    assert len(heights(svg)) == 3
    assert heights(svg)[2] == 4 * heights(svg)[0]
    assert 'aria-label="Lengths: 512 to 1k: 2; 1k to 2k: 0; 2k to 4k: 8"' in svg


def test_the_last_bar_may_have_no_upper_edge():
    assert "512 to more: 3" in histogram([0, 3], edges=[0, 512], title="Lengths")


def test_labels_are_escaped():
    svg = bar_chart([("<script>alert(1)</script>", 1.0, "<b>")], title='"><script>')
    assert "<script>" not in svg
    assert "<b>" not in svg
