"""Signals to a process that runs a command: its child gets each once, and a request is remembered."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
from tpu_experiments.runtime.processes.stopping import Relay
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


def test_a_child_gets_its_own_variables_cores_and_file(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    told = "import os; print(os.environ['TPU_VISIBLE_CHIPS'], os.environ['HOME'], *os.sched_getaffinity(0), flush=True)"
    output = tmp_path / "child.log"
    output.write_text("before\n")
    starting = (
        "import os, sys; from pathlib import Path; from tpu_experiments.runtime.processes.stopping import Relay\n"
        f"child = Relay().start([sys.executable, '-c', {told!r}], env={{'TPU_VISIBLE_CHIPS': '3'}}, cores={{{core}}}, "
        f"output=Path({str(output)!r}))\n"
        "child.wait(); print(os.environ.get('TPU_VISIBLE_CHIPS'))"
    )
    done = subprocess.run([sys.executable, "-c", starting], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    assert output.read_text() == f"before\n3 {os.environ['HOME']} {core}\n"


def test_no_python_code_runs_between_fork_and_exec() -> None:
    """JAX warns at a fork that would run any, wherever it is imported: that failed a test of launch/on_vm.py."""
    starting = (
        "import os, sys; from tpu_experiments.runtime.processes.stopping import Relay\n"
        "os.register_at_fork(before=lambda: print('forked', flush=True))\n"
        "print(Relay().run([sys.executable, '-c', 'raise SystemExit(7)']))"
    )
    done = subprocess.run([sys.executable, "-c", starting], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


def test_a_command_that_is_not_there_ends_as_in_a_shell() -> None:
    starting = (
        "from tpu_experiments.runtime.processes.stopping import Relay; print(Relay().run(['/no/such/command', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", starting], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("127\n", "/no/such/command: No such file or directory\n")
