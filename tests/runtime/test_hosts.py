"""What hosts tell each other, in processes of their own, and how each finds its place."""

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.processes import hosts
from tpu_experiments.runtime.processes.hosts import KEEPALIVE, HostLost, HostWatch, Place, _place, rendezvous

HOST = """
import os, sys
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.processes.hosts import KEEPALIVE, HostWatch
from tpu_experiments.runtime.processes.hosts import HostLost, rendezvous

hosts = rendezvous(HwConfig(num_hosts=3))
assert rendezvous(HwConfig(num_hosts=3)) is hosts
rank = hosts.rank
print(hosts.gather(f"of {rank}"), hosts.any(rank == 1), hosts.any(False), hosts.together(lambda: rank * 2))

def refuse():
    raise ConfigError("lora.r=-1; it is below 0.")

def fail():
    raise OSError("no room")

for action in (refuse, fail):
    for name in ("on_first_host", "together"):
        try:
            getattr(hosts, name)(action if rank == 0 else int)
        except Exception as error:
            print(name, type(error).__name__, error)
hosts.barrier()
if rank == 2:
    os._exit(9)
try:
    hosts.barrier()
except HostLost as error:
    print(error)
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}


def test_three_hosts_tell_each_other() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", HOST],
            env=ENVIRONMENT | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    printed = [host.communicate(timeout=120)[0].splitlines() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0, 9]
    lines = [[line for line in lines if not line.startswith("[Gloo]")] for lines in printed]
    for rank in range(3):
        assert lines[rank][0] == f"['of 0', 'of 1', 'of 2'] True False {rank * 2}"
        refused = "ConfigError lora.r=-1; it is below 0."
        failed = "OSError no room" if rank == 0 else "HostLost host 0 of 3 failed: no room"
        assert lines[rank][1:5] == [
            f"{name} {text}" for text in (refused, failed) for name in ("on_first_host", "together")
        ]
    for rank in range(2):
        assert lines[rank][5].startswith(f"host {rank} of 3 lost another (")
        assert lines[rank][5].endswith("that host's log says why.")
    assert len(lines[2]) == 5


WAITING = """
import os, time
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.processes.hosts import KEEPALIVE, HostWatch
from tpu_experiments.runtime.processes.hosts import rendezvous

hosts = rendezvous(HwConfig(num_hosts=3), lost_seconds=0.5)
hosts.barrier()
time.sleep(0.2)
if hosts.rank == 2:
    hosts.announce_end() if os.environ["END"] == "alike" else None
    os._exit(9)
time.sleep(60 if os.environ["END"] == "lost" else 3)
print("waited")
"""


@pytest.mark.parametrize("end", only(["lost"], ["lost", "alike"]))
def test_a_host_that_is_gone_ends_those_that_wait_for_something_else(end: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "END": end}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", WAITING],
            env=ENVIRONMENT | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [host.communicate(timeout=50) for host in hosts]
    codes = [host.returncode for host in hosts]
    if end == "alike":
        assert codes == [0, 0, 9], outputs
        assert all("waited" in out for out, _ in outputs[:2])
        return
    assert codes == [1, 1, 9], outputs
    # The second sees the third through the first.
    for rank, lost in ((0, 2), (1, 0)):
        assert f"error: host {rank} of 3 lost host {lost}; that host's log says why. The same" in outputs[rank][1]


def test_a_machine_that_is_gone_is_asked_for() -> None:
    """A VM that is taken away ends no connection: the kernel asks, and after 90 s reports the connection dead."""
    watch, other = HostWatch(0, 2, lost_seconds=1.0), HostWatch(1, 2, lost_seconds=1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = watch.listen(taken.getsockname()[1])
        assert port != taken.getsockname()[1]
    thread = threading.Thread(target=watch.accept, kwargs={"seconds": 20.0})
    thread.start()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1")
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):  # it has not read all of it
            assert stranger.recv(1) == b""
    other.connect("127.0.0.1", port, seconds=20.0)
    thread.join()
    for peer in (*watch._peers, *other._peers):
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        asked = [peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE]
        assert asked[0] + asked[1] * asked[2] == 90
    watch.announce_end()
    other.announce_end()
    for thread in threading.enumerate():
        if thread.name.startswith("host "):
            thread.join(20)
    for peer in (*watch._peers, *other._peers):
        peer.close()


def test_nobody_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HostLost, match=rf"hw.num_hosts=2; host 0 did not meet the others at 127.0.0.1:{port} \("):
        rendezvous(HwConfig(num_hosts=2), seconds=1)


def test_a_host_must_know_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous(HwConfig()).size == 1
    nobody = r"hw.num_hosts=2 with hw.device=cpu; the rank of this host is unknown \(it is no worker of a slice\); set"
    with pytest.raises(ConfigError, match=nobody):
        rendezvous(HwConfig(num_hosts=2, device="cpu"))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"the rank of this host is unknown \('RANK'\)"):
        rendezvous(HwConfig(num_hosts=2))
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match=r"the rank of this host is unknown \(invalid literal"):
        rendezvous(HwConfig(num_hosts=2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match=r"hw.num_hosts=2; this is host 3 of 4; choose the hw= of this slice"):
        rendezvous(HwConfig(num_hosts=2))
    assert _place(HwConfig(num_hosts=4)) == Place(3, "10.0.0.1", 29500)


def test_workers_of_gke_are_in_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "job-0.pods,job-1.pods,job-2.pods,job-3.pods")
    assert _place(HwConfig(num_hosts=4, device="tpu")) == Place(2, "job-0.pods")


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A metadata server of a VM: its attributes."""
    attributes: dict[str, str] = {}

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = attributes.get(self.path.rpartition("/")[2])
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(hosts, "METADATA", f"http://127.0.0.1:{server.server_port}/instance/attributes")
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    yield attributes
    server.shutdown()
    thread.join()
    server.server_close()


def test_workers_of_a_vm_are_in_its_metadata(metadata: dict[str, str]) -> None:
    hw = HwConfig(num_hosts=4, device="tpu")
    with pytest.raises(ConfigError, match=r"the rank of this host is unknown \(404 Client Error"):
        _place(hw)
    metadata["agent-worker-number"] = "3"
    metadata["worker-network-endpoints"] = ",".join(f"unknown:unknown:10.164.0.{n}" for n in (7, 5, 9, 6))
    assert _place(hw) == Place(3, "10.164.0.7")


WHOLE = """
import torch, torch_xla
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.runtime.processes import hosts
from tpu_experiments.runtime.xla.device import XlaRuntime

spec = torch_xla._XLAC._get_xla_sharding_spec
hw = HwConfig(name="x", device="cpu", runtime="xla", parallel="spmd", num_devices=2)
runtime = XlaRuntime(hw, sharding=ShardingConfig(name="x"))
batch = runtime.put({"x": torch.ones(4, 3)}, rows_dim=0)
state = runtime.zeros(torch.Size([3]), name="w")

def step(batch):
    state.copy_(state + batch["x"].sum(0))
    return {"rows": batch["x"].sum(1)}

for size in (1, 2):
    runtime.hosts = hosts.Hosts(0, size)
    found = runtime.program(step, name="step", held=lambda: {"w": state})(batch)["rows"]
    runtime.wait()
    print(size, spec(found), spec(state), found.cpu().tolist())
"""


def test_results_are_whole_on_every_host() -> None:
    """What XLA leaves split, as it does on one host, another host's chips have."""
    env = ENVIRONMENT | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", WHOLE], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "1 {devices=[2]0,1} {replicated} [3.0, 3.0, 3.0, 3.0]",
        "2 {replicated} {replicated} [3.0, 3.0, 3.0, 3.0]",
    ]
