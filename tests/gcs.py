"""gs:// in tests: an emulator of Cloud Storage in a thread of this process.

pytest_plugins = ("tests.gcs",)
def test_it(gcs_bucket): ...
"""

import logging
from collections.abc import Iterator

import gcsfs
import pytest
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.server import RequestHandler, Server, create_server

BUCKET = "bkt"
read_body = emulator._read_raw_data


def whole_body(request: RequestHandler) -> bytes | None:
    """What a request holds.

    Raises:
        ConnectionError: the client was killed while it sent it. Cloud Storage then keeps the object it has; the
            emulator by itself stores what came, and a record at its end was missing in one run of the tests of many.
    """
    body, length = read_body(request), int(request.headers.get("Content-Length") or 0)
    if length and len(body or b"") < length:
        raise ConnectionError(f"{len(body or b'')} of {length} bytes")
    return body


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Server]:
    """The emulator, with an empty bucket `bkt`."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    emulator._read_raw_data = whole_body
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    # It answers one connection after another, and its socket keeps 5 waiting: of 256 reads at once the others were
    # dropped by the kernel, and a run waited for 40 s and more (0.6 s at most with room for all).
    server._api._httpd.socket.listen(1024)
    # A reader that stops early closes its connection; the server would print a trace for each.
    server._api._httpd.handle_error = lambda request, client_address: None
    yield server
    server.stop()


@pytest.fixture
def gcs_bucket(gcs_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`gs://bkt`, emptied before every test."""
    host, port = gcs_server._api._httpd.server_address
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcs_server.wipe(keep_buckets=True)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield f"gs://{BUCKET}"
    gcsfs.GCSFileSystem.clear_instance_cache()
