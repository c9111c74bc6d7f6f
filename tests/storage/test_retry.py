"""Transient errors are waited out, lasting ones told at once, and what gcsfs has repeated is not repeated again."""

import errno

import aiohttp
import google.auth.exceptions
import pytest
from gcsfs.retry import HttpError

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths, retry
from tpu_experiments.storage.retry import complaint, kind_of, with_retries

KINDS = [
    (HttpError({"code": 429, "message": "slow down"}), "transient"),
    (HttpError({"code": 503, "message": ""}), "transient"),
    (HttpError({"code": "503", "message": ""}), "transient"),
    (HttpError({"code": 401, "message": "Invalid Credentials"}), "credentials"),
    (HttpError({"code": 400, "message": "bad"}), "lasting"),
    (OSError("Forbidden: https://storage.googleapis.com/b/x\nno"), "forbidden"),
    (FileNotFoundError("b/x"), "missing"),
    (PermissionError(errno.EACCES, "no"), "forbidden"),
    (OSError(errno.ENOSPC, "No space left on device"), "full"),
    (OSError(errno.EDQUOT, "quota"), "full"),
    (OSError(errno.EIO, "Input/output error"), "transient"),
    (OSError(errno.EROFS, "Read-only"), "lasting"),
    (ConnectionResetError(errno.ECONNRESET, "reset"), "transient"),
    (TimeoutError(), "transient"),
    (aiohttp.ServerDisconnectedError(), "transient"),
    (google.auth.exceptions.RefreshError("invalid_grant"), "credentials"),
    (google.auth.exceptions.RefreshError("metadata server", retryable=True), "transient"),
    (google.auth.exceptions.TransportError("no route"), "transient"),
    (google.auth.exceptions.DefaultCredentialsError("none"), "credentials"),
    (TypeError("a bug"), None),
    (ConfigError("a value"), None),
    (KeyError("a bug"), None),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=lambda value: str(value)[:30])
def test_kinds(error, kind):
    assert kind_of(error) == kind


class NoCredentialsError(Exception):
    """As botocore's, which is in no extra."""


class ClientError(Exception):
    """As botocore's, whose answer is a dict."""

    def __init__(self, status: int) -> None:
        super().__init__("An error occurred")
        self.response = {"Error": {"Code": "x"}, "ResponseMetadata": {"HTTPStatusCode": status}}


def test_kinds_of_s3():
    assert kind_of(NoCredentialsError("Unable to locate credentials")) == "credentials"
    kinds = {status: kind_of(ClientError(status)) for status in (400, 403, 404, 503)}
    assert kinds == {400: "lasting", 403: "forbidden", 404: "missing", 503: "transient"}


def test_what_was_said_for_a_user_is_what_it_was():
    error = ConfigError("bytes cannot be read")
    error.__cause__ = ConnectionResetError(errno.ECONNRESET, "reset")
    assert kind_of(error) == "transient"


class Failing:
    """Raises the errors in turn, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def tries(error: Exception, *, place: str, count: int = 2) -> tuple[int, list[float]]:
    """How often a call that raises `error` `count` times is made, and the waits."""
    waits: list[float] = []
    call = Failing(*[error] * count)
    try:
        assert with_retries(call, place=place, operation="read", wait=waits.append) == "done"
    except type(error):
        pass
    return call.calls, waits


def test_a_transient_error_is_waited_out_with_growing_waits():
    calls, waits = tries(ConnectionResetError(errno.ECONNRESET, "x"), place="memory://x", count=3)
    assert calls == 4
    assert [round(wait) for wait in waits] == pytest.approx([1, 2, 4], abs=1)
    assert tries(ConnectionError("x"), place="memory://x", count=100)[0] == len(retry.WAITS_SECONDS) + 1


@pytest.mark.parametrize(
    "error", [error for error, kind in KINDS if kind != "transient"], ids=lambda value: str(value)[:30]
)
def test_another_error_is_reported_at_once(error):
    assert tries(error, place="memory://x") == (1, [])


def test_what_gcsfs_has_repeated_is_not_repeated_again():
    assert tries(HttpError({"code": 503, "message": ""}), place="gs://bkt/x")[0] == 1
    assert tries(aiohttp.ServerDisconnectedError(), place="gs://bkt/x")[0] == 1
    assert tries(TimeoutError(), place="gs://bkt/x")[0] == 3  # gcsfs lets its own timeouts pass
    assert tries(google.auth.exceptions.TransportError("x"), place="gs://bkt/x")[0] == 3


def test_a_local_disk_is_not_waited_for_but_a_mounted_bucket_is(tmp_path):
    assert tries(OSError(errno.ENOSPC, "full"), place=str(tmp_path))[0] == 1
    assert tries(OSError("disk full"), place=str(tmp_path))[0] == 1
    assert tries(OSError(errno.EIO, "gone for the moment"), place=str(tmp_path))[0] == 3


def test_every_kind_has_a_remedy():
    for error, kind in KINDS:
        text = complaint(error, place="gs://bkt/runs")
        assert text.startswith("gs://bkt/runs; ")
        assert "\n" not in text
        assert text.endswith(".")
        if kind == "credentials":
            assert "gcloud auth application-default login" in text


def test_an_unreachable_place_is_not_an_empty_one(monkeypatch):
    from tests import faulty

    monkeypatch.setattr(retry, "WAITS_SECONDS", ())
    faulty.wipe()
    paths.write_text_atomic("faulty://bkt/x", "there")
    monkeypatch.setattr(faulty.FaultyFileSystem, "down", True)
    with pytest.raises(ConnectionError):
        paths.exists("faulty://bkt/x")
    with pytest.raises(ConnectionError):
        paths.list_names("faulty://bkt")
