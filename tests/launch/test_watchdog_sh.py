"""launch/watchdog.sh on a simulated clock: `sleep` moves a file that `date` and the uptime are read from."""

import os
import subprocess
import time
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
    *worker-network-endpoints) [ -e {folder}/endpoints ] && cat {folder}/endpoints || exit 22 ;;
    *agent-worker-number) printf 1 ;;
    *:29502/seconds)
        [ "$(cat {folder}/clock)" -ge "$(cat {folder}/peer_until)" ] || {{ echo 0; exit; }}
        [ ! -e {folder}/peer_is_dumb ] || exit 7
        echo $(($(cat {folder}/clock) - $(cat {folder}/peer_until))) ;;
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
# As logind lists and shows them: of 3 the connection is gone, 4 is a service's.
LOGINCTL = """
[ "$(cat {folder}/clock)" -lt "$(cat {folder}/login_until)" ] && state=active || state=closing
case "$1" in
    list-sessions) printf '      3 1001 me  -  \\n      4 1002 you -  \\n' ;;
    show-session) printf 'Remote=yes\\nState=%s\\n\\nRemote=no\\nState=active\\n' $state ;;
esac
"""
FACTS = {"clock": 0, "max": 86400, "works_at": 0, "preempted_at": 10**9, "run_until": 0, "lease_until": 0}
FACTS |= {"login_until": 0, "peer_until": 0, "hand_until": 0}
ENDPOINTS = "a:1:10.0.0.4,b:2:10.0.0.5,c:3:10.0.0.6"


class Machine:
    def __init__(self, folder: Path, **facts: int) -> None:
        self.folder = folder
        (folder / "home" / "me" / ".tpu_experiments").mkdir(parents=True)
        (folder / "bin").mkdir()
        for name, value in (FACTS | facts).items():
            (folder / name).write_text(str(value))
        (folder / "uptime").write_text("0 0")
        for name, body in (("curl", CURL), ("sleep", SLEEP), ("systemctl", SYSTEMCTL), ("loginctl", LOGINCTL)):
            self.fake(name, body.format(folder=folder, token=TOKEN))
        self.fake("date", f"cat {folder}/clock")
        self.fake("who", "true")
        self.fake("pgrep", f'[ "$(cat {folder}/clock)" -lt "$(cat {folder}/hand_until)" ]')
        self.fake("systemd-run", f'echo "$*" >{folder}/unit')

    def fake(self, name: str, body: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def watch(self) -> "Machine":
        env = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "TPUEXP_UPTIME": str(self.folder / "uptime")}
        env |= {"TPUEXP_HOMES": str(self.folder / "home"), "TPUEXP_HOME": str(self.folder / "lib")}
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


@pytest.mark.slow
def test_a_launcher_that_looks_keeps_it(tmp_path: Path) -> None:
    assert Machine(tmp_path, lease_until=500).watch().deleted_at == pytest.approx(800, abs=20)


@pytest.mark.parametrize(("code", "deleted_at"), [("0", 2000), ("1", 300)])
def test_the_only_copy_of_a_result_keeps_it_until_its_limit(tmp_path: Path, code: str, deleted_at: int) -> None:
    machine = Machine(tmp_path, max=2000)
    state = tmp_path / "home" / "me" / ".tpu_experiments"
    (state / "only_copy").touch()
    (state / "exit").write_text(f"{code}\n")
    assert machine.watch().deleted_at == pytest.approx(deleted_at, abs=20)


def test_a_reboot_does_not_start_the_deadline_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path, max=10_000, clock=9_000, run_until=10**9)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "began").write_text("100\n")
    assert machine.watch().deleted_at == pytest.approx(10_100, abs=20)


@pytest.mark.slow
def test_a_login_without_a_terminal_keeps_it(tmp_path: Path) -> None:
    """VS Code and tunnels; what such a session left running behind does not."""
    assert Machine(tmp_path, login_until=600).watch().deleted_at == pytest.approx(900, abs=20)


@pytest.mark.slow
def test_a_run_that_was_started_by_hand_keeps_it(tmp_path: Path) -> None:
    assert Machine(tmp_path, hand_until=600).watch().deleted_at == pytest.approx(900, abs=20)


@pytest.mark.slow
def test_a_slice_stays_while_one_of_its_machines_is_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path, peer_until=600)
    (tmp_path / "endpoints").write_text(ENDPOINTS)
    assert machine.watch().deleted_at == pytest.approx(900, abs=20)
    assert machine.said.count("10.0.0.4 of this slice is used") == 1
    assert "10.0.0.5" not in machine.said, "its own address"
    unit = machine.lines("unit")[0]
    assert unit.endswith(f"python3 -m http.server 29502 --bind 10.0.0.5 --directory {tmp_path}/lib/unused")
    assert "DynamicUser=yes" in unit


@pytest.mark.slow
def test_a_slice_with_a_machine_that_does_not_answer_stays_until_its_deadline(tmp_path: Path) -> None:
    machine = Machine(tmp_path, max=2000)
    (tmp_path / "endpoints").write_text(ENDPOINTS)
    (tmp_path / "peer_is_dumb").touch()
    assert machine.watch().deleted_at == 2000
    assert "10.0.0.4 of this slice does not say whether it is used" in machine.said


def test_a_machine_tells_the_others_for_how_long_it_was_unused(tmp_path: Path) -> None:
    """The very command that it gives to systemd, asked by the real curl."""
    machine = Machine(tmp_path, login_until=100, max=250)
    (tmp_path / "endpoints").write_text("a:1:127.0.0.2,b:2:127.0.0.3")
    assert machine.watch().deleted_at == 250
    command = machine.lines("unit")[0].split(" DynamicUser=yes ")[1].split()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        curl = ["curl", "-sf", "-m", "5", "http://127.0.0.3:29502/seconds"]
        for _ in range(100):
            done = subprocess.run(curl, capture_output=True, text=True)
            if done.returncode == 0:
                break
            time.sleep(0.1)
        server.terminate()
    assert int(done.stdout) == pytest.approx(160, abs=20)


@pytest.mark.slow
def test_who_logs_in_while_a_deletion_is_refused_keeps_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, works_at=600)
    machine.fake("who", f'[ "$(cat {tmp_path}/clock)" -lt 500 ] || [ "$(cat {tmp_path}/clock)" -gt 700 ] || echo me')
    assert machine.watch().deleted_at == pytest.approx(1000, abs=20)


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
