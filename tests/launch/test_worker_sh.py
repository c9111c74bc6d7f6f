"""launch/worker.sh, run for real in a folder with fakes of sudo, systemctl and curl; shellcheck on both scripts."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import pytest

from launch.tpu_vm.vm import MAX_LOG_BYTES, STATUS_LINE

LAUNCH = Path(__file__).parents[2] / "launch"
RUN_PY = """
import os, resource, signal, sys, time
if "task=doctor" in sys.argv:
    print("doctor", sys.argv[1:], resource.getrlimit(resource.RLIMIT_MEMLOCK)[1], flush=True)
    if os.path.exists("slow_devices"):
        time.sleep(60)
    sys.exit(int(os.path.exists("no_devices")))
print("limits", *(resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)))
print("words", sys.argv[1:], flush=True)
print("token", os.environ.get("HF_TOKEN"), flush=True)
def stopped(number, frame):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stopped)
if "wait" in sys.argv:
    print("training", flush=True)
    time.sleep(60)
sys.exit(3 if "fail" in sys.argv else 0)
"""


# As systemd: a unit has the limits of its properties, and without one a low default, whatever the caller's are.
SYSTEMD_RUN = """
memlock=64 nofile=512
while [ "$1" != bash ]; do
    echo "$1" >>{folder}/unit
    case $1 in
        LimitMEMLOCK=infinity) memlock= ;;
        LimitNOFILE=*) nofile=${{1#*=}} ;;
    esac
    shift
done
[ -z "$memlock" ] || ulimit -l $memlock
[ $nofile -gt $(ulimit -Hn) ] || ulimit -n $nofile
"$@" >/dev/null 2>&1 & echo $! >{folder}/pid
"""


class Vm:
    """A checkout on a machine without systemd: its units are started by systemd-run's words and kept by their pid."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.state = folder / "code", folder / "bin", folder / "state"
        (self.root / "launch").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(LAUNCH / "worker.sh", self.root / "launch")
        (self.root / "run.py").write_text(RUN_PY)
        self.fake("sudo", 'exec "$@"')
        self.fake("curl", "exit 22")
        pid = folder / "pid"
        (self.root / "launch" / "__init__.py").touch()
        self.is_machine("cpu")
        self.fake("systemd-run", SYSTEMD_RUN.format(folder=folder))
        # `stop` waits until the unit has ended, as systemd's does; a child of init cannot be waited for.
        stop = f"kill -TERM $(cat {pid}); while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.05; done"
        alive = f'[ -e {pid} ] && kill -0 "$(cat {pid})" 2>/dev/null'
        self.fake("systemctl", f"case $1 in is-active) {alive} ;; stop) {stop} ;; esac")

    def is_machine(self, hw: str) -> None:
        """Has on_vm.py find this machine in conf/hw."""
        (self.root / "launch" / "on_vm.py").write_text(f"print({hw!r})")

    def fake(self, name: str, body: str) -> None:
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def __call__(self, *words: str, stdin: bytes = b"") -> bytes:
        env = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}", "TPUEXP_STATE": str(self.state)}
        env |= {"TPUEXP_PYTHON": sys.executable, "HOME": str(self.root.parent)}
        command = ["bash", "launch/worker.sh", *words]
        done = subprocess.run(command, cwd=self.root, env=env, input=stdin, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def look(self, offset: int = 0) -> tuple[tuple[str, ...], str]:
        text = self("look", str(offset)).decode()
        match = STATUS_LINE.search(text)
        assert match is not None, text
        return match.groups(), text[match.end() + 1 :]

    def until(self, state: str) -> tuple[tuple[str, ...], str]:
        for _ in range(300):
            facts, text = self.look()
            if facts[1] == state:
                return facts, text
            time.sleep(0.05)
        raise AssertionError(facts)


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def test_a_run_gets_its_words_and_secrets_and_leaves_its_code(vm: Vm) -> None:
    assert vm.look()[0] == ("0", "none", "-", "no", "FALSE", "0", "-")
    vm("keep-secrets", stdin=b"HF_TOKEN='it'\"'\"'s secret'\n")
    assert oct((vm.state / "secrets").stat().st_mode)[-3:] == "600"
    vm("start", "a-1-1", "name=x y", "fail", "data=[a,b]")
    facts, text = vm.until("exited")
    assert facts[:4] == ("0", "exited", "3", "no")
    assert "words ['name=x y', 'fail', 'data=[a,b]']" in text
    assert "token it's secret" in text
    assert int(facts[5]) == len(text.encode())


def test_the_unit_has_the_limits_of_a_login(vm: Vm) -> None:
    """systemd gives a unit 8 MiB of locked memory, with which libtpu fails or hangs."""
    vm("start", "a-1-1")
    _, text = vm.until("exited")
    memlock, nofile = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    allowed = 100_000 if nofile == -1 else min(100_000, nofile)
    assert f"limits {memlock} {allowed}\n" in text
    properties = (vm.root.parent / "unit").read_text().splitlines()
    assert {"LimitMEMLOCK=infinity", "LimitNOFILE=100000", "KillMode=mixed", "TimeoutStopSec=110"} <= set(properties)


def test_the_devices_are_started_in_the_unit_before_the_run(vm: Vm) -> None:
    vm.is_machine("v6e8")
    vm("start", "a-1-1", "hw=v6e1", "sweeping.points_at_once=8", "fail")
    facts, text = vm.until("exited")
    looked, _, rest = text.partition("\n")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    words = ["task=doctor", "task.checks=[memlock,devices]", "hw=v6e8", "trainer.global_batch_rows=256"]
    assert looked == f"doctor {words} {memlock}"
    assert "words ['hw=v6e1', 'sweeping.points_at_once=8', 'fail']" in rest
    assert facts[2] == "3"


def test_a_run_whose_devices_do_not_start_in_the_unit_is_not_begun(vm: Vm) -> None:
    vm.is_machine("v6e8")
    (vm.root / "no_devices").touch()
    vm("start", "a-1-1")
    facts, text = vm.until("exited")
    assert facts[2] == "1"
    assert "words" not in text


def test_a_stop_while_the_devices_are_looked_at_is_a_stop(vm: Vm) -> None:
    vm.is_machine("v6e8")
    (vm.root / "slow_devices").touch()
    vm("start", "a-1-1")
    deadline = time.monotonic() + 30
    while "doctor" not in vm.look()[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    vm("stop")
    facts, text = vm.look()
    assert facts[:4] == ("0", "exited", "75", "asked")
    assert "words" not in text


def test_the_same_id_is_started_once_and_another_begins_anew(vm: Vm) -> None:
    vm("start", "a-1-1", "fail")
    vm.until("exited")
    vm("start", "a-1-1", "fail")
    assert vm.look()[0][2] == "3"
    vm("start", "a-1-2")
    assert vm.until("exited")[0][2] == "0"


def test_results_on_this_disk_are_the_only_copy_until_they_are_fetched(vm: Vm) -> None:
    vm("start", "a-1-1", "output_dir=outputs")
    assert (vm.state / "only_copy").exists()
    vm("fetched")
    assert not (vm.state / "only_copy").exists()
    vm("start", "a-1-2", "output_dir=outputs")
    vm("start", "a-1-3", "output_dir=gs://bucket/runs")
    assert not (vm.state / "only_copy").exists()


def test_stop_lets_the_run_save_and_is_remembered(vm: Vm) -> None:
    vm("start", "a-1-1", "wait")
    while "training" not in vm.look()[1]:
        time.sleep(0.05)
    assert vm.look()[0][1] == "running"
    vm("stop")
    facts, text = vm.look()
    assert facts[:4] == ("0", "exited", "75", "asked")
    assert text.endswith("saved\n")


def test_another_run_is_stopped_before_the_next_is_started(vm: Vm) -> None:
    """Of a slice: one VM was restarted, and here the run of before goes on."""
    vm("start", "a-1-1", "wait")
    while "training" not in vm.look()[1]:
        time.sleep(0.05)
    first = int((vm.root.parent / "pid").read_text())
    vm("start", "a-1-2", "fail")
    facts, text = vm.until("exited")
    assert (facts[2], facts[3]) == ("3", "no")
    assert float(facts[6]) == pytest.approx((vm.state / "exit").stat().st_mtime, abs=0.01)
    assert "saved" not in text
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_run_that_stop_had_to_kill_has_ended_with_137(vm: Vm) -> None:
    vm("start", "a-1-1", "wait")
    pid = int((vm.root.parent / "pid").read_text())
    while "training" not in vm.look()[1]:
        time.sleep(0.05)
    (child,) = map(int, subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split())
    kill = f"kill -KILL {pid} {child}; while kill -0 {pid} 2>/dev/null; do sleep 0.05; done"
    vm.fake("systemctl", f"case $1 in is-active) kill -0 {pid} 2>/dev/null ;; stop) {kill} ;; esac")
    vm("stop")
    assert vm.look()[0][:4] == ("0", "exited", "137", "asked")


def test_a_machine_that_was_restarted_has_lost_its_run(vm: Vm) -> None:
    vm("start", "a-1-1", "wait")
    while "training" not in vm.look()[1]:
        time.sleep(0.05)
    pid = int((vm.root.parent / "pid").read_text())
    child = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    for process in (pid, *map(int, child)):
        os.kill(process, signal.SIGKILL)
    assert vm.until("lost")[0][2] == "-"


def test_a_long_log_is_shown_in_pieces(vm: Vm) -> None:
    vm.state.mkdir()
    (vm.state / "log").write_bytes(b"x" * MAX_LOG_BYTES + b"end\n")
    facts, text = vm.look()
    assert (facts[5], len(text)) == (str(MAX_LOG_BYTES + 4), MAX_LOG_BYTES)
    assert vm.look(MAX_LOG_BYTES)[1] == "end\n"
    assert vm.look(MAX_LOG_BYTES + 4)[1] == ""


def test_results_are_packed_and_nothing_else(vm: Vm) -> None:
    run = vm.root / "outputs" / "ro1"
    (run / "adapter").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "adapter" / "adapter_config.json").write_text("{}")
    (run / "result.json").write_text("{}")
    with tarfile.open(fileobj=BytesIO(vm("pack", "outputs/ro1"))) as tar:
        assert sorted(tar.getnames()) == ["adapter", "adapter/adapter_config.json", "result.json"]
    (vm.root / "outputs" / "empty").mkdir()
    with tarfile.open(fileobj=BytesIO(vm("pack", "outputs/empty"))) as tar:
        assert tar.getnames() == []


@pytest.mark.parametrize("script", ["worker.sh", "watchdog.sh"])
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, str(LAUNCH / script)], capture_output=True, text=True)
    assert done.stdout == ""
