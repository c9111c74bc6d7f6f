"""Signals to a process that runs a command: its child gets each once, and a request is remembered."""

import signal
import subprocess
import sys

import psutil
import pytest

CHILD = """
import signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: got.append(number))
print("child", flush=True)
deadline = time.monotonic() + 30
while not got and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.3)  # for one too many
print(*map(int, got), flush=True)
sys.exit(75)
"""
PARENT = f"""
import sys
from tpu_experiments.runtime.child import Relay
relay = Relay()
code = relay.run([sys.executable, "-c", {CHILD!r}])
print("ended", code, relay.asked, flush=True)
"""


def started() -> "subprocess.Popen[str]":
    """The parent in a group of its own, as a shell starts it, its child waiting for a signal."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    assert process.stdout.readline() == "child\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_reaches_the_child_once(number: signal.Signals) -> None:
    with started() as process:
        subprocess.run(["kill", f"-{number.name[3:]}", "--", f"-{process.pid}"], check=True)
        output, _ = process.communicate(timeout=60)
    assert output.splitlines() == [str(int(number)), "ended 75 True"]
    assert process.returncode == 0


def test_the_child_dies_with_its_parent() -> None:
    with started() as process:
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        assert psutil.wait_procs([child], timeout=20)[1] == []
