"""The terminal while an answer is written: nothing cuts it."""

import logging
import subprocess
import sys
from contextlib import suppress

import pytest

from tpu_experiments.loggers.runlog import start_run_log, stop_run_log
from tpu_experiments.tasks.generate.answers import Screen

log = logging.getLogger("tpu_experiments.somewhere")
SCRIPT = """
import logging
from tpu_experiments.loggers.runlog import start_run_log
from tpu_experiments.tasks.generate.answers import Screen
start_run_log(None, rank=0)
log = logging.getLogger("somewhere")
with Screen() as screen:
    log.info("read: compiled")
    screen.show("Ioana bea")
    log.info("write: compiled")
    screen.show("Ioana bea cafea.")
    screen.end(["Ioana bea cafea."])
    log.info("1 answers")
"""


@pytest.mark.slow
def test_a_line_of_the_log_does_not_cut_an_answer():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    words = [line.split(" ", 1)[1] if ":" in line[:3] else line for line in done.stdout.splitlines()]
    assert words == ["read: compiled", "Ioana bea cafea.", "write: compiled", "1 answers"]


@pytest.mark.usefixtures("root_logger")
def test_an_answer_that_is_interrupted_lets_the_log_go_on(capsys):
    start_run_log(None, rank=0)
    with suppress(KeyboardInterrupt), Screen() as screen:
        screen.show("Ioana")
        log.info("meanwhile")
        raise KeyboardInterrupt
    log.info("after")
    stop_run_log()
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["meanwhile", "after"]
