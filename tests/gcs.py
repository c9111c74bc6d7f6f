"""gs:// in tests: an emulator of Cloud Storage in a thread of this process.

pytest_plugins = ("tests.gcs",)
def test_it(gcs_bucket): ...
"""

import logging
from collections.abc import Iterator

import gcsfs
import pytest
from gcp_storage_emulator.server import Server, create_server

BUCKET = "bkt"


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Server]:
    """The emulator, with an empty bucket `bkt`."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
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
