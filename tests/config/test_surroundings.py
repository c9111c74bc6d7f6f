"""What the network, a server, the disk or the kernel does is no bug: errors of real libraries at a small local server.

Each gets one sentence (where, what, what to do) and an exit code; what this program did wrong stays a bug.
"""

import asyncio
import concurrent.futures
import datetime
import errno
import functools
import gc
import http.client
import http.server
import ipaddress
import json
import multiprocessing
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import fsspec
import httpx
import pytest
import requests
import torch
import urllib3
from huggingface_hub import hf_hub_download
from safetensors.torch import save_file

from tpu_experiments.config.bugs import bug_sentence
from tpu_experiments.config.surroundings import OF_SYSTEM, fault_of, sentence_of
from tpu_experiments.runtime.processes.faults import ending_of
from tpu_experiments.storage.retry import complaint, is_explained, kind_of

pytestmark = [  # clients that are left in the middle of an answer close their sockets when they are collected
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STATUSES = {
    400: (2, "the server refuses the request (HTTP 400)"),
    401: (2, "the server wants a login"),
    403: (2, "this account has no right to it"),
    404: (2, "there is no such file"),
    407: (2, "the proxy of this network wants a login"),
    412: (1, "another process changed it meanwhile"),
    418: (2, "the server refuses the request (HTTP 418)"),
    429: (1, "the server is busy or down (HTTP 429)"),
    451: (2, "its server may not give it out here"),
    502: (1, "the server is busy or down (HTTP 502)"),
}


class Answers(http.server.BaseHTTPRequestHandler):
    """`/status/N` answers with that status, other paths in the way that they name."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        what = self.path.strip("/").partition("?")[0].split("/")
        if what[0] == "status":
            self.say(int(what[1]), b"<html>no</html>")
        elif what[0] == "truncated":
            self.say(200, b"half", **{"Content-Length": "1000"})
            self.close_connection = True
        elif what[0] == "garbled":
            self.say(200, b"this is not gzip", **{"Content-Encoding": "gzip"})
        elif what[0] == "portal":
            self.say(200, b"<html>Welcome to the network: log in</html>", **{"Content-Type": "text/html"})
        elif what[0] == "slammed":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.say(503, b"")

    do_HEAD = do_POST = do_GET

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.fixture(scope="module")
def untrusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server behind a certificate that nobody has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now.replace(year=2099)
    )
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    pem = tmp_path_factory.mktemp("tls") / "own.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem.write_bytes(private + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as served:
        served.socket = context.wrap_socket(served.socket, server_side=True)
        served.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{served.server_port}"
        served.shutdown()


def by_requests(url: str) -> object:
    answer = requests.get(url, timeout=30)
    answer.raise_for_status()
    return answer.json()


def by_httpx(url: str) -> object:
    return httpx.get(url, timeout=30).raise_for_status().json()


def by_urllib3(url: str) -> object:
    return urllib3.PoolManager(retries=False).request("GET", url, timeout=30).json()


def by_urllib(url: str) -> object:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read()


def by_aiohttp(url: str) -> object:
    async def get() -> object:
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as answer:
            return await answer.json()

    return asyncio.run(get())


def by_fsspec(url: str) -> object:
    with fsspec.open(f"{url}?name=x", "rb", block_size=0) as file:
        return file.read()


CLIENTS = {call.__name__[3:]: call for call in (by_requests, by_httpx, by_urllib3, by_urllib, by_aiohttp, by_fsspec)}


def error_of(call: Callable[..., Any], *given: Any) -> Exception:
    try:
        call(*given)
    except Exception as error:
        return error
    raise AssertionError(f"{call} passed")


def require(error: Exception, *, code: int, words: str, tmp_path: Path) -> None:
    """One sentence with the words and the code, by the net of every command; never that it is a bug."""
    told, found = ending_of(error, config=None)
    assert words in told, (repr(error), told)
    assert found == code, told
    assert "\n" not in told
    assert "a bug in tpu_experiments" not in told
    assert Path(told.rpartition(" the traceback is in ")[2].removesuffix(".")).is_file()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Close what the clients have left before another file's tests run, which allow no warning."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("client", ["requests", "httpx", "urllib", "aiohttp"])
@pytest.mark.parametrize("status", STATUSES)
def test_statuses(server: str, client: str, status: int, tmp_path: Path) -> None:
    error = error_of(CLIENTS[client], f"{server}/status/{status}?token=hf_secret")
    code, words = STATUSES[status]
    require(error, code=code, words=words, tmp_path=tmp_path)
    assert kind_of(error) is not None
    found = fault_of(error)
    assert found is not None
    assert "hf_secret" not in found[0]


BROKEN = {
    "truncated": (CLIENTS, "the answer broke off"),
    "garbled": (("requests", "httpx", "urllib3", "aiohttp"), "the answer broke off"),
    "portal": (("requests", "httpx", "urllib3"), "as a network sends that wants a login first"),
    "slammed": (CLIENTS, ""),
}


@pytest.mark.parametrize(("way", "client"), [(way, name) for way, (names, _) in BROKEN.items() for name in names])
def test_answers_that_break_off_are_garbled_or_are_a_portals(
    server: str, way: str, client: str, tmp_path: Path
) -> None:
    error = error_of(CLIENTS[client], f"{server}/{way}")
    require(error, code=1, words=BROKEN[way][1], tmp_path=tmp_path)
    assert kind_of(error) == "transient", repr(error)
    assert is_explained(error, place="gs://bucket/runs")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_certificate_that_nobody_signed(untrusted: str, client: str, tmp_path: Path) -> None:
    error = error_of(CLIENTS[client], f"{untrusted}/x")
    require(error, code=2, words="the server cannot be trusted", tmp_path=tmp_path)
    assert kind_of(error) == "certificate"
    assert "SSL_CERT_FILE" in complaint(error, place="gs://bucket/runs")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_name_that_nobody_knows_and_a_port_where_nobody_listens(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = error_of(CLIENTS[client], f"http://127.0.0.1:{unused.getsockname()[1]}/x")
        require(error, code=1, words="does not answer", tmp_path=tmp_path)

    def unknown(*_: object, **__: object) -> None:  # as the resolver says it; asking it takes seconds where it is away
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = error_of(CLIENTS[client], "http://nowhere.invalid/x")
    require(error, code=1, words="the name of the server cannot be looked up", tmp_path=tmp_path)
    assert kind_of(error) == "transient"


@pytest.mark.parametrize("status", [401, 403, 407, 451])
def test_the_hub_s_own_client(server: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    call = functools.partial(
        hf_hub_download, "a/b", "config.json", endpoint=f"{server}/status/{status}", cache_dir=tmp_path / "hub"
    )
    require(error_of(call), code=2, words=STATUSES[status][1], tmp_path=tmp_path)


def killed(number: int) -> None:
    os.kill(os.getpid(), number)


def by_a_pool() -> None:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(killed, signal.SIGKILL).result()


def killed_by_rank(rank: int) -> None:
    killed(signal.SIGKILL)


def by_torch() -> None:
    torch.multiprocessing.start_processes(killed_by_rank, nprocs=1, start_method="fork")


def by_loader() -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            killed(signal.SIGKILL)
            return index

    next(iter(torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")))


def by_signal(number: int) -> None:
    subprocess.run([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"], check=True)


CHILDREN = {
    "SIGKILL": functools.partial(by_signal, signal.SIGKILL),
    "SIGBUS": functools.partial(by_signal, signal.SIGBUS),
    "SIGILL": functools.partial(by_signal, signal.SIGILL),
    "of a shell": lambda: subprocess.run(["bash", "-c", "bash -c 'kill -9 $$'; exit $?"], check=True),
    "of a pool": by_a_pool,
    "of a loader": by_loader,
    "of torch": by_torch,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads, for the sake of speed
@pytest.mark.parametrize("what", CHILDREN)
def test_a_child_that_the_kernel_ends(what: str, tmp_path: Path) -> None:
    words = what if what.startswith("SIG") else "as the kernel does when the memory is used up"
    require(error_of(CHILDREN[what]), code=1, words=words, tmp_path=tmp_path)


def full() -> None:
    with open(
        "/dev/full", "wb", buffering=0
    ) as file:  # nothing that renames may write there: it would replace the node
        file.write(b"x")


def too_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    held = []
    try:
        while True:
            held.append(open("/dev/null"))  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            file.close()


def too_large(write: Callable[[], object]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


SYSTEM: dict[str, tuple[Callable[[Path], object], str]] = {
    "a full disk": (lambda _: full(), "the disk is full"),
    "size, by Rust": (lambda folder: too_large(lambda: save_file({"x": torch.ones(9)}, folder / "x")), "`ulimit -f`"),
    "files": (lambda _: too_many_files(), "`ulimit -n 65536`"),
    "size": (lambda folder: too_large(lambda: (folder / "x").write_bytes(b"x" * 100)), "`ulimit -f`"),
}


@pytest.mark.parametrize("what", SYSTEM)
def test_the_disk_and_the_limits_of_this_machine(what: str, tmp_path: Path) -> None:
    call, words = SYSTEM[what]
    require(error_of(call, tmp_path), code=1, words=words, tmp_path=tmp_path)


@pytest.mark.parametrize("number", OF_SYSTEM, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [None, "/lab/result.json"])
def test_every_number_has_its_sentence_with_a_file_and_without(number: int, name: str | None, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), name) if name else OSError(number, os.strerror(number))
    require(error, code=1, words=OF_SYSTEM[number][1], tmp_path=tmp_path)
    if name:
        assert sentence_of(error)[0].startswith(f"{name}; ")


def while_handling() -> None:
    try:
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    except OSError:
        {}["host"]


def wrapped() -> None:
    try:
        full()
    except OSError as error:
        raise RuntimeError("the cache cannot be written") from error


BUGS: dict[str, Callable[[], object]] = {
    "a bug while an error of the network was handled": while_handling,
    "JSON of our own": lambda: json.loads("<html>"),
    "a text of our own": lambda: b"\xff".decode(),
    "a number": lambda: int("x"),
    "an attribute": lambda: SimpleNamespace().code,
    "a child's own exit": lambda: subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], check=True),
    "a child's abort": functools.partial(by_signal, signal.SIGABRT),
    "a segmentation fault": functools.partial(by_signal, signal.SIGSEGV),
    "a file that is not there": lambda: Path("/nowhere/at/all").read_text(),
    "an address of our own making": lambda: httpx.get("no address"),
    "another": lambda: requests.get("no address", timeout=1),
    "a wrong argument for a client": lambda: http.client.HTTPConnection("localhost:x"),
    "a wrong type for a client": lambda: requests.get("http://127.0.0.1:9", timeout="soon"),
}


@pytest.mark.parametrize("what", BUGS)
def test_what_is_no_fault_of_the_surroundings_stays_a_bug(what: str) -> None:
    error = error_of(BUGS[what])
    assert bug_sentence(error, config=None).startswith("a bug in tpu_experiments: "), repr(error)
    assert ending_of(error, config=None)[1] == 1


def test_an_error_with_a_cause_is_what_its_cause_is(tmp_path: Path) -> None:
    require(error_of(wrapped), code=1, words="the disk is full", tmp_path=tmp_path)
