"""Storage that does not answer is named in the log, given up after a while, and never cut while bytes move."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import gcsfs
import pytest

from tests import faulty
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths, retry, spool
from tpu_experiments.storage.retry import NoAnswer, explain_storage_errors
from tpu_experiments.storage.spool import Spool
from tpu_experiments.storage.streams import ByteStream, UnreadableError

PLACE = "gs://bkt/runs/a.bin"
SILENT = 1.0
LARGE = 32 * 2**20


class Server(ThreadingHTTPServer):
    """Cloud Storage that answers in one of several ways; `mode` is looked at by every request."""

    daemon_threads = True
    mode = "hangs"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.over = threading.Event()
        self.num_bytes = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is no error."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version: ClassVar[str] = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        mode, body = self.server.mode, bytes(LARGE)
        if mode == "hangs":
            self.server.over.wait()
            return
        if "alt=media" not in self.path:
            self._answer(json.dumps({"name": "runs/a.bin", "bucket": "bkt", "size": str(LARGE)}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Length", str(LARGE))
        self.end_headers()
        self.wfile.write(body[: LARGE // 4])
        if mode == "stalls":
            self.server.over.wait()
            return
        for start in range(LARGE // 4, LARGE, LARGE // 16):
            time.sleep(SILENT / 4)
            self.wfile.write(body[start : start + LARGE // 16])

    def do_POST(self) -> None:
        if "uploadType=resumable" in self.path:
            self.send_response(200)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/upload/here")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            if self.server.mode == "stalls" and self.server.num_bytes > LARGE // 8:
                self.server.over.wait()
                return
            piece = self.rfile.read(min(left, 2**20))
            left -= len(piece)
            self.server.num_bytes += len(piece)
            if self.server.mode == "slow":
                time.sleep(SILENT / 10)
        if self.server.mode == "hangs":
            self.server.over.wait()
            return
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(retry, "LOG_AFTER_SECONDS", SILENT / 3)
    monkeypatch.setattr(retry, "SILENT_SECONDS", SILENT)
    monkeypatch.setattr(retry, "_grace", None)
    monkeypatch.setattr(retry, "WAITS_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(paths, "WAITS_SECONDS", (0.01, 0.01))
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    gcsfs.GCSFileSystem.clear_instance_cache()


OPERATIONS = {
    "look up": lambda: paths.exists(PLACE),
    "list": lambda: paths.list_names("gs://bkt/runs"),
    "read": lambda: paths.read_bytes(PLACE),
    "write": lambda: paths.write_bytes_atomic(PLACE, b"x"),
    "remove": lambda: paths.remove_tree(PLACE),
}


@pytest.mark.parametrize("operation", only(["read", "write"], OPERATIONS))
def test_what_is_never_answered_is_reported_and_given_up(operation, server, caplog):
    with pytest.raises(NoAnswer, match=rf"{operation}: no answer for \d+ s"):
        OPERATIONS[operation]()
    lines = [text for text in caplog.messages if text.startswith("waiting for gs://bkt/runs")]
    assert len(lines) == 2, "one line a try, and one further try"
    assert all(re.search(rf": {operation}, no answer for \d+ s; it times out after \d+ s$", line) for line in lines)


@pytest.mark.parametrize("call", [lambda: paths.size_of(PLACE), lambda: paths.read_range(PLACE, 0, 9)])
def test_parts_of_a_file_are_refused_in_a_sentence(call, server):
    with pytest.raises(
        ConfigError, match=r"^gs://bkt/runs/a\.bin; .* cannot be read in 2 tries: NoAnswer: .*no answer"
    ):
        call()


def test_data_in_a_bucket_that_does_not_answer(server):
    with pytest.raises(NoAnswer):
        paths.remote_files("gs://bkt/data")
    with pytest.raises(UnreadableError, match="no answer"):
        next(iter(ByteStream(PLACE)))


@pytest.mark.parametrize(
    "call", [lambda: paths.read_bytes(PLACE), lambda: paths.write_bytes_atomic(PLACE, bytes(LARGE))]
)
def test_a_body_that_stops_in_the_middle_is_given_up(call, server):
    server.mode = "stalls"
    with pytest.raises(NoAnswer):
        call()


def test_an_upload_is_not_cut_while_bytes_move(server):
    server.mode = "slow"
    began = time.monotonic()
    paths.write_bytes_atomic(PLACE, bytes(LARGE))
    assert time.monotonic() - began > 2 * SILENT, "the limit was never passed"
    assert server.num_bytes >= LARGE


def test_a_download_is_not_cut_while_bytes_move(server):
    server.mode = "slow"
    began = time.monotonic()
    assert len(paths.read_bytes(PLACE)) == LARGE
    assert time.monotonic() - began > 2 * SILENT


def test_before_a_run_it_is_one_sentence(server):
    sentence = r"^gs://bkt/runs; .*no answer for \d+ s: storage does not answer"
    with pytest.raises(ConfigError, match=sentence), explain_storage_errors("gs://bkt/runs"):
        paths.exists("gs://bkt/runs/a/identity.json")


@pytest.mark.parametrize("at", range(6))
def test_a_save_that_hangs_is_made_on_the_local_disk(at, monkeypatch, tmp_path, caplog):
    """From its n-th request on the bucket hangs; when it is back everything arrives."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(retry, "LOG_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(retry, "UNSEEN_SECONDS", 0.15)
    monkeypatch.setattr(retry, "_grace", None)
    monkeypatch.setattr(spool, "FIRST_WAIT_SECONDS", 3600.0)
    faulty.wipe()
    kept = Spool("faulty://bkt/checkpoints", key="x", marker="COMMIT.json")

    def write(folder: str) -> str:
        target = paths.join(folder, "step_00000002")
        paths.make_dirs(target)
        for name in ("a.safetensors", "progress.json", "COMMIT.json"):
            if paths.exists(paths.join(target, name)):
                paths.remove_tree(paths.join(target, name))
            paths.write_text_atomic(paths.join(target, name), "2")
        return folder

    with faulty.going_wrong("hangs", at):
        assert kept.save(write) == str(kept.local)
        assert kept.is_unreachable
        assert any(text.startswith("waiting for faulty://bkt/checkpoints/step_00000002") for text in caplog.messages)
        assert any("Training continues; checkpoints are spilled to" in text for text in caplog.messages)
    kept.close()
    assert sorted(name.rpartition("/")[2] for name in faulty.snapshot()) == [
        "COMMIT.json",
        "a.safetensors",
        "progress.json",
    ]
    faulty.wipe()
