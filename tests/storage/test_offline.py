"""The Hub that is out of reach is noticed once, and only where something is asked of it."""

import os
import socket
from collections.abc import Callable

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.storage.offline import SETTINGS, go_offline_if_unreachable

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> int:
    """No settings and no proxy; the Hub's address is a port of this machine that nobody listens on."""
    for name in (*SETTINGS, "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    return port


@pytest.mark.parametrize("named", ["data=uk_law", "model.tokenizer_path=owner/name"])
def test_what_only_the_hub_has_is_not_asked_for_again(
    named: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    go_offline_if_unreachable(make_config(named))
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "warning: 127.0.0.1 is unreachable ([Errno 111] Connection refused)" in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_refused_before_anything_is_loaded(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ConfigError, match=r"model.path=owner/name; it is no local folder, 127.0.0.1 is unreachable"):
        go_offline_if_unreachable(make_config("model=qwen05b", "model.path=owner/name"))
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    go_offline_if_unreachable(make_config("model=qwen05b", "model.path=owner/name", "model.init=random"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    go_offline_if_unreachable(make_config("model=qwen05b", "model.path=owner/name", "task=plan"))


def test_a_hub_that_answers_is_asked(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        go_offline_if_unreachable(make_config("model=qwen05b"))
        server.accept()[0].close()
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize("setting", [*SETTINGS, "HTTPS_PROXY"])
def test_nothing_is_asked_where_the_user_has_said_so_or_behind_a_proxy(
    setting: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(setting, "0")
    go_offline_if_unreachable(make_config("model=qwen05b"))
    assert os.environ.get("HF_HUB_OFFLINE") != "1"
    assert capsys.readouterr().err == ""


def test_the_shipped_samples_ask_nothing(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    go_offline_if_unreachable(make_config())
    assert "HF_HUB_OFFLINE" not in os.environ
    assert capsys.readouterr().err == ""
