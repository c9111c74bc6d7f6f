"""What would keep a run from starting on a TPU is refused before torch is loaded.

Whole commands run on a pretended host, a private mount and network namespace: a chip on its PCI bus, a node in its
/dev, an /etc/hosts, and a metadata server on port 80.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import pretended
from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.processes import chips, env, libtpu
from tpu_experiments.runtime.processes import metadata as asked
from tpu_experiments.runtime.processes.metadata import metadata_problem

REPOSITORY = Path(__file__).parents[2]
HOST = r"""
import fcntl, socket, struct, subprocess, sys, threading
answer, holds, *command = sys.argv[1:]
with socket.socket() as control:  # `ip link set lo up`
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x41))
if answer != "nobody":
    server = socket.create_server(("127.0.0.1", 80))
    def serve():
        while True:
            client, _ = server.accept()
            client.recv(4096)
            status, _, body = answer.partition(" ")
            head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            client.sendall((head + body).encode())
            client.close()
    threading.Thread(target=serve, daemon=True).start()
holding = None
if holds == "by me":
    file = open("/dev/vfio/0")
if holds == "held":
    code = "import time; file = open('/dev/vfio/0'); print(flush=True); time.sleep(100)"
    holding = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    holding.stdout.readline()
done = subprocess.run(command)
if holding is not None:
    print("holder", holding.pid)
    holding.kill()
sys.exit(done.returncode)
"""
KNOWN_HOST = "127.0.0.1 metadata.google.internal\n"
TPU_ENV = "200 ACCELERATOR_TYPE: 'v6e-1'\nWORKER_ID: '0'\n"


needs_namespaces = pytest.mark.skipif(pretended.problem() is not None, reason=str(pretended.problem()))


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def on_host(
    words: Sequence[str],
    tmp_path: Path,
    *,
    answer: str = "nobody",
    hosts: str = KNOWN_HOST,
    holds: str = "free",
    exported: Mapping[str, str] | None = None,
) -> Ended:
    """Run run.py there; the metadata server answers `STATUS BODY`, or is not there (nobody)."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("TPU_", "PJRT_", "XLA_", "http"))}
    environment |= {"HF_HUB_OFFLINE": "1", **(exported or {})}
    command = [sys.executable, str(REPOSITORY / "run.py"), "hw=v6e1", "model=tiny", "data=[sample_text]", *words]
    host = [sys.executable, "-c", HOST, answer, holds, *command]
    there = pretended.on_host(host, files={"/etc/hosts": tmp_path / "hosts"}, has_network=False)
    done = subprocess.run(there, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    return Ended(done.returncode, done.stdout, done.stderr)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nobody answers": (
        {"answer": "nobody"},
        "hw=v6e1; metadata.google.internal does not answer (Connection refused), and torch_xla waits until it says "
        "which TPU this is; a container needs its host's network: `docker run --network=host`, on Kubernetes "
        "hostNetwork: true; without a metadata server `export TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v6e-1 "
        "TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost TPU_HOST_BOUNDS=1,1,1 TPU_CHIPS_PER_HOST_BOUNDS=1,1,1`.",
    ),
    "another libtpu": (
        {"answer": TPU_ENV, "exported": {"TPU_LIBRARY_PATH": "/bin/true"}},
        "hw=v6e1; TPU_LIBRARY_PATH=/bin/true is libtpu of an unknown version, and 0.0.21 is wanted; `unset "
        "TPU_LIBRARY_PATH` and install libtpu==0.0.21",
    ),
    "a stray variable": (
        {"answer": TPU_ENV, "exported": {"XLA_USE_BF16": "1"}},
        "hw=v6e1; XLA_USE_BF16=1 is exported; `unset XLA_USE_BF16`: float32 is computed in bfloat16",
    ),
}


@needs_namespaces
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    given, said = CASES[case]
    ended = on_host([f"output_dir={tmp_path}/outputs"], tmp_path, **given)
    assert said in ended.err
    assert ended.code == 2
    assert ended.err.count("error: ") == 1
    assert "Traceback" not in ended.err
    assert not (tmp_path / "outputs").exists()


@needs_namespaces
def test_a_chip_that_another_process_holds(tmp_path: Path) -> None:
    ended = on_host([f"output_dir={tmp_path}/outputs"], tmp_path, answer=TPU_ENV, holds="held")
    pid = ended.out.split("holder ")[1].strip()
    assert (
        f"error: hw=v6e1; it takes 1 of this host's 1 chips, and 0 are free: process {pid} ({sys.executable} -c) holds "
        f"/dev/vfio/0; wait for its end, or end it: `kill {pid}`."
    ) in ended.err
    assert ended.code == 2
    assert not (tmp_path / "outputs").exists()


@needs_namespaces
def test_a_notebook_that_holds_the_chip_itself(tmp_path: Path) -> None:
    words = ["task=doctor", "task.checks=[devices]"]
    ended = on_host(words, tmp_path, answer=TPU_ENV, holds="by me")
    assert "it has started this command, as a notebook's kernel does" in " ".join(ended.out.split())
    assert ended.code == 1


@needs_namespaces
@pytest.mark.slow
def test_a_tpu_that_does_not_start(tmp_path: Path) -> None:
    """The pinned libtpu itself, on a host whose chip is none."""
    exported = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
    }
    ended = on_host([f"output_dir={tmp_path}/outputs"], tmp_path, exported=exported)
    assert "error: hw=v6e1; the TPU did not start (" in ended.err
    assert "`python run.py task=doctor hw=v6e1` says why" in ended.err
    assert ended.code == 2


@needs_namespaces
def test_the_doctor_fails_where_a_run_would(tmp_path: Path) -> None:
    given, _ = CASES["another libtpu"]
    ended = on_host(["task=doctor", "task.checks=[devices]"], tmp_path, **given)
    assert ended.out.startswith("devices          failed       TPU_LIBRARY_PATH=/bin/true is libtpu of an unknown")
    assert ended.code == 1


@needs_namespaces
def test_a_plain_cpu_run_asks_as_well(tmp_path: Path) -> None:
    """Importing torch_xla asks wherever it sees a chip."""
    ended = on_host(["hw=cpu"], tmp_path, hosts="")
    assert "error: hw=cpu; metadata.google.internal does not answer (" in ended.err
    assert ended.code == 2


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[str, str] | None]]:
    """What is wrong with a metadata server that answers so."""
    answers: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, _, body = answers[-1].partition(" ")
            assert self.headers["Metadata-Flavor"] == "Google"
            if status == "silence":
                released.wait(20)
                return
            self.send_response(int(status))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(asked, "TPU_ENV", f"http://127.0.0.1:{server.server_port}/tpu-env")
    for name in ("TPU_SKIP_MDS_QUERY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)

    def problem(answer: str) -> tuple[str, str] | None:
        answers.append(answer)
        return metadata_problem(composed("hw=v6e8").hw, seconds=0.5)

    yield problem
    released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (TPU_ENV, None),
        ("200 ACCELERATOR_TYPE: v5litepod-8\n", None),
        ("200 ACCELERATOR_TYPE: 'n1'", "tpu-env of metadata.google.internal has 'n1', which torch_xla cannot read"),
        ("200 ZONE: 'here'", "tpu-env of metadata.google.internal does not say which TPU"),
        ("404 no", "metadata.google.internal has no tpu-env (HTTP 404)"),
        ("silence", "metadata.google.internal does not answer (no answer in time)"),
    ],
)
def test_answers_of_a_metadata_server(
    answer: str, said: str | None, ask: Callable[[str], tuple[str, str] | None]
) -> None:
    problem = ask(answer)
    assert (problem is None) == (said is None)
    if problem is not None:
        assert said is not None
        assert problem[0].startswith(said)
        assert "TPU_ACCELERATOR_TYPE=v6e-8" in problem[1]
        assert "TPU_CHIPS_PER_HOST_BOUNDS=2,4,1" in problem[1]


@pytest.mark.parametrize(
    ("accelerator", "said"),
    [("v6e-8", None), ("v5litepod-16", None), ("tpu7x-8", None), ("v6e", "has 'v6e'"), (None, ", which it needs")],
)
def test_variables_in_its_place(accelerator: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator or "")
    problem = metadata_problem(composed("hw=v6e8").hw)
    assert (problem is None) == (said is None)
    assert said is None or (problem is not None and "TPU_ACCELERATOR_TYPE" in problem[0] and said in problem[0])


def test_variables_that_processes_of_one_chip_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla raises a TypeError or AttributeError for each that is missing."""
    hw = composed("hw=v6e8", "hw.parallel=spawn").hw
    for name in ("CLOUD_TPU_TASK_ID", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"):
        monkeypatch.delenv(name, raising=False)
    values = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_WORKER_ID": "0"}
    values |= {"TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert metadata_problem(hw) is None
    for name in ("TPU_WORKER_ID", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"):
        with monkeypatch.context() as without:
            without.delenv(name)
            problem = metadata_problem(hw)
            assert problem is not None
            assert f"without {name}, which it needs" in problem[0]


def test_variables_of_the_config_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    given = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_LIBRARY_PATH": "/nowhere"}
    hw = replace(composed("hw=v6e8").hw, env=given)
    assert metadata_problem(hw) is None
    assert libtpu.libtpu_problem(hw) == ("TPU_LIBRARY_PATH=/nowhere is no file", "`unset TPU_LIBRARY_PATH`")


def test_a_proxy_that_does_not_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    problem = metadata_problem(composed("hw=v6e8").hw)
    assert problem is not None
    assert problem[0].endswith("through a proxy (http_proxy), which does not give it (Connection refused)")
    assert problem[1] == "`export NO_PROXY=metadata.google.internal`"


def test_nothing_is_asked_without_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    if chips.num_pci_chips() == 0:
        assert metadata_problem(composed().hw) is None
        assert metadata_problem(composed("hw=v6e1").hw, is_planned=True) is None
    assert metadata_problem(composed("hw=v6e1").hw) is not None


def test_a_device_for_virtual_machines_is_no_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is handed to a virtual machine has a node in /dev/vfio too."""
    (tmp_path / "vfio").mkdir()
    for name in ("0", "vfio"):
        (tmp_path / "vfio" / name).touch()
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    if chips.num_pci_chips() == 0:
        assert chips.device_nodes(tmp_path) == ()
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-1")
    assert chips.device_nodes(tmp_path) == (str(tmp_path / "vfio" / "0"),)


def test_chips_on_the_pci_bus(tmp_path: Path) -> None:
    for number, (vendor, device) in enumerate([("0x1ae0", "0x006f"), ("0x1ae0", "0x0042"), ("0x10de", "0x006f")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "device").write_text(f"{device}\n")
    assert chips.num_pci_chips(tmp_path) == 1


def installed_at(folder: Path, version: str) -> Path:
    """A libtpu.so in an environment that has this version."""
    file = folder / "libtpu" / "libtpu.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\x7fELF")
    (folder / f"libtpu-{version}.dist-info").mkdir()
    return file


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.0.21", None),
        ("0.0.21.1", None),
        ("0.0.17", "is libtpu 0.0.17, and 0.0.21"),
        ("0.0.210", "is libtpu 0.0.210"),
    ],
)
def test_a_libtpu_elsewhere(version: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(installed_at(tmp_path, version)))
    hw = composed("hw=v6e1").hw
    problem = libtpu.libtpu_problem(hw)
    assert (problem is None) == (said is None)
    assert said is None or (problem is not None and said in problem[0])
    monkeypatch.setenv("TPU_EXPERIMENTS_ANY_LIBTPU", "1")
    assert libtpu.libtpu_problem(hw) is None


def test_the_installed_libtpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import exports its own path, which a notebook hands on; torchtpu wants another version."""
    own = Path(str(metadata.distribution("libtpu").locate_file("libtpu/libtpu.so")))
    hw = composed("hw=v6e1").hw
    (tmp_path / "libtpu.so").symlink_to(own)
    for path in (None, str(own), str(tmp_path / "libtpu.so")):
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        if path is not None:
            monkeypatch.setenv("TPU_LIBRARY_PATH", path)
        assert libtpu.libtpu_problem(hw) is None
    problem = libtpu.libtpu_problem(composed("hw=v6e1", "hw.runtime=torchtpu").hw)
    assert problem is not None
    assert problem[0].startswith(f"libtpu {metadata.version('libtpu')} is installed, and 0.0.5")


@pytest.fixture
def host_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "vfio").mkdir()
    for number in range(4):
        (tmp_path / "vfio" / str(number)).touch()
    nodes = [str(tmp_path / "vfio" / str(number)) for number in range(4)]
    for module in (env, chips):
        monkeypatch.setattr(module, "device_nodes", lambda: tuple(nodes))
    return nodes


def test_one_chip_of_several_is_taken_unless_one_was_chosen(
    host_of_four: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the commands that a run on all chips prints at its end: task=generate hw=v6e1."""
    taken = env.variables(composed("hw=v6e1").hw)
    assert taken["TPU_VISIBLE_CHIPS"] == "0"
    assert taken["TPU_PROCESS_BOUNDS"] == taken["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert "TPU_VISIBLE_CHIPS" not in env.variables(composed("hw=v6e4").hw)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "2")
    assert "TPU_VISIBLE_CHIPS" not in env.variables(composed("hw=v6e1").hw)


def test_a_point_of_a_sweep_starts_beside_the_others(host_of_four: list[str]) -> None:
    """Each has one chip; a run on the whole host waits for them, and is refused."""
    holding = "import sys, time; files = [open(name) for name in sys.argv[1:]]; print(flush=True); time.sleep(100)"
    command = [sys.executable, "-c", holding, *host_of_four[:3]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        env.require_free_chips(composed("hw=v6e1").hw, seconds=0)
        assert env.variables(composed("hw=v6e1").hw)["TPU_VISIBLE_CHIPS"] == "3"
        with pytest.raises(
            ConfigError, match=rf"takes 4 of this host's 4 chips, and 1 are free: process {process.pid} "
        ):
            env.require_free_chips(composed("hw=v6e4").hw, seconds=0)
        process.kill()
    env.require_free_chips(composed("hw=v6e4").hw, seconds=0)
