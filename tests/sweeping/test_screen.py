"""The table under the lines of a sweep, on a terminal and in a file."""

import pytest

from tpu_experiments.sweeping.screen import Screen


def test_a_file_gets_the_table_when_a_point_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(is_live=False)
    screen.show(["a", "b"], has_ended=False)
    screen.say("started")
    screen.show(["a", "c"], has_ended=True)
    assert capsys.readouterr().out == "started\na\nc\n"


def test_on_a_terminal_it_stays_under_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(is_live=True)
    screen.show(["a", "b"], has_ended=False)
    screen.say("hot", warning=True)
    screen.show(["a", "c"], has_ended=False)
    screen.close(["a", "d"])
    screen.say("end")
    shown = capsys.readouterr()
    over = "\x1b[2F\x1b[0J"
    assert shown.out == f"a\nb\n{over}a\nb\n{over}a\nc\n{over}a\nd\nend\n"
    assert shown.err == "hot\n"


def test_what_does_not_fit_on_the_terminal_is_cut_until_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "4")
    monkeypatch.setenv("LINES", "4")
    screen = Screen(is_live=True)
    screen.show(["abcdef", "b", "c"], has_ended=False)
    screen.close(["abcdef", "b", "c"])
    assert capsys.readouterr().out == "abc\nb\n\x1b[2F\x1b[0Jabcdef\nb\nc\n"
