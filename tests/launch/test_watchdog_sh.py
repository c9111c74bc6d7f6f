"""launch/watchdog.sh on a simulated clock: `sleep` moves a file that `date` and the uptime are read from."""

import os
import subprocess
from pathlib import Path

import pytest

WATCHDOG = Path(__file__).parents[2] / "launch" / "watchdog.sh"
TOKEN = "ya29.secretsecret"
CURL = """
for word; do last=$word; done
case "$*" in
    *DELETE*)
        cat >{folder}/headers; echo "$(cat {folder}/clock) $*" >>{folder}/deleted
        [ "$(cat {folder}/clock)" -ge "$(cat {folder}/works_at)" ] || exit 22
        echo over >{folder}/over ;;
    *tpuexp-project) printf p ;;
    *tpuexp-zone) printf z-a ;;
    *tpuexp-resource) printf ro1-0a1b2c ;;
    *tpuexp-seconds) cat {folder}/max ;;
    *tpuexp-idle-seconds) printf 300 ;;
    *instance/preempted)
        [ "$(cat {folder}/clock)" -lt "$(cat {folder}/preempted_at)" ] && printf FALSE || printf TRUE ;;
    *token) printf '{{"access_token":"{token}","expires_in":3599}}' ;;
    *) exit 22 ;;
esac
"""
SLEEP = """
[ ! -e {folder}/over ] || kill $PPID
echo $(($(cat {folder}/clock) + $1)) >{folder}/clock
echo "$(cat {folder}/clock) 1" >{folder}/uptime
lease={folder}/home/me/.tpu_experiments/lease
[ "$(cat {folder}/clock)" -ge "$(cat {folder}/lease_until)" ] || touch -d @"$(cat {folder}/clock)" $lease
[ "$(cat {folder}/clock)" -lt 100000 ] || kill $PPID
"""
SYSTEMCTL = """
case "$1" in
    is-active) [ "$(cat {folder}/clock)" -lt "$(cat {folder}/run_until)" ] ;;
    stop) echo "$(cat {folder}/clock) $*" >>{folder}/stopped ;;
esac
"""
FACTS = {"clock": 0, "max": 86400, "works_at": 0, "preempted_at": 10**9, "run_until": 0, "lease_until": 0}


class Machine:
    def __init__(self, folder: Path, **facts: int) -> None:
        self.folder = folder
        (folder / "home" / "me" / ".tpu_experiments").mkdir(parents=True)
        (folder / "bin").mkdir()
        for name, value in (FACTS | facts).items():
            (folder / name).write_text(str(value))
        (folder / "uptime").write_text("0 0")
        for name, body in (("curl", CURL), ("sleep", SLEEP), ("systemctl", SYSTEMCTL)):
            self.fake(name, body.format(folder=folder, token=TOKEN))
        self.fake("date", f"cat {folder}/clock")
        self.fake("who", "true")

    def fake(self, name: str, body: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def watch(self) -> "Machine":
        env = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "TPUEXP_UPTIME": str(self.folder / "uptime")}
        env |= {"TPUEXP_HOMES": str(self.folder / "home")}
        done = subprocess.run(["bash", str(WATCHDOG), "watch"], env=env, capture_output=True, text=True, timeout=120)
        self.said = done.stdout + done.stderr
        return self

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    @property
    def deleted_at(self) -> int:
        return int(self.lines("deleted")[-1].split()[0])


def test_a_machine_that_nobody_uses_deletes_itself(tmp_path: Path) -> None:
    machine = Machine(tmp_path).watch()
    assert machine.deleted_at == 300
    address = "https://tpu.googleapis.com/v2/projects/p/locations/z-a/queuedResources/ro1-0a1b2c?force=true"
    assert machine.lines("deleted")[0].endswith(address)


def test_a_run_keeps_it_until_it_has_ended(tmp_path: Path) -> None:
    assert Machine(tmp_path, run_until=600).watch().deleted_at == pytest.approx(900, abs=20)


def test_a_launcher_that_looks_keeps_it(tmp_path: Path) -> None:
    assert Machine(tmp_path, lease_until=500).watch().deleted_at == pytest.approx(800, abs=20)


def test_the_deadline_ends_even_a_run_which_is_stopped_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path, run_until=10**9, max=500).watch()
    assert machine.deleted_at == 500
    assert machine.lines("stopped")[-1] == "500 stop tpuexp-run"


def test_a_refused_deletion_is_tried_until_it_works(tmp_path: Path) -> None:
    machine = Machine(tmp_path, works_at=500).watch()
    assert machine.deleted_at == 500
    assert len(machine.lines("deleted")) > 10
    assert "refused" in machine.said


def test_a_reclaim_stops_the_run_at_the_next_look(tmp_path: Path) -> None:
    machine = Machine(tmp_path, run_until=10**9, preempted_at=505, max=1000).watch()
    assert machine.lines("stopped")[0] == "510 stop --no-block tpuexp-run"


def test_the_token_is_no_word_of_a_command(tmp_path: Path) -> None:
    machine = Machine(tmp_path).watch()
    assert TOKEN not in (tmp_path / "deleted").read_text() + machine.said
    assert machine.lines("headers") == [f"Authorization: Bearer {TOKEN}"]


def test_it_installs_itself_as_a_service(tmp_path: Path) -> None:
    machine = Machine(tmp_path, run_until=0)
    machine.fake("systemd-run", f'echo "$*" >{tmp_path}/unit')
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TPUEXP_HOME": str(tmp_path / "lib")}
    subprocess.run(["bash", str(WATCHDOG)], env=env, check=True, timeout=60)
    assert (tmp_path / "lib" / "watchdog.sh").read_bytes() == WATCHDOG.read_bytes()
    assert machine.lines("unit")[0].endswith(f"{tmp_path}/lib/watchdog.sh watch")
