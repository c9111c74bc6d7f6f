"""The emulator of Cloud Storage as the tests use it: what a killed client sent half of does not become the object."""

import socket
from urllib.parse import urlsplit

import pytest

from tpu_experiments.storage import paths

pytest_plugins = ("tests.gcs",)


@pytest.mark.parametrize("sent", [0, 5, 90])
def test_half_an_upload_leaves_the_object_as_it_is(gcs_bucket, gcs_server, sent):
    place = f"{gcs_bucket}/runs/events"
    paths.write_bytes_atomic(place, b"the first record")
    address = urlsplit("http://{}:{}".format(*gcs_server._api._httpd.server_address))
    boundary = "--b\r\nContent-Type: application/json\r\n\r\n"
    body = f'{boundary}{{"name": "runs/events"}}\r\n--b\r\nContent-Type: text/plain\r\n\r\nthe first record and more'
    whole = f"{body}\r\n--b--\r\n".encode()
    head = (
        "POST /upload/storage/v1/b/bkt/o?uploadType=multipart HTTP/1.1\r\nHost: bucket\r\n"
        f"Content-Type: multipart/related; boundary=b\r\nContent-Length: {len(whole)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + whole[:sent])
    assert paths.read_bytes(place) == b"the first record"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + whole)
        assert b"200" in client.recv(100)
    assert paths.read_bytes(place) == b"the first record and more"
