"""The live page of task=report, by a real server and client: it has the runs as they are now, and nothing else."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.tasks.report_runs import made
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ReportTaskConfig
from tpu_experiments.storage import paths
from tpu_experiments.tasks.report import built
from tpu_experiments.tasks.report.watch import Built, Live, server_of


@contextmanager
def served(*words: str, seconds: float = 1.0) -> Iterator[int]:
    config = composed("task=report", "task.watch=true", "task.port=0", *words)
    task = config.task
    assert isinstance(task, ReportTaskConfig)
    task.seconds = seconds / 1000
    with server_of(task, lambda: built(config, task)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def asked(port: int, path: str = "/", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"localhost:{port}"})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


@pytest.mark.parametrize("remote", [False, True], ids=["local", "memory"])
def test_the_page_goes_on_with_its_runs(tmp_path: Path, remote: bool) -> None:
    place = f"memory://{tmp_path.name}" if remote else str(tmp_path)
    with served(f"output_dir={place}") as port:
        code, text, _ = asked(port)
        assert code == 200
        assert "there is no run in it" in text
        folder = made(paths.join(place, "first"), steps=20, is_finished=False)
        code, text, headers = asked(port)
        assert (code, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert float(headers["refresh"]) > 0
        assert "first" in text
        assert "4.2500" not in text
        made(paths.join(place, "second"), loss=4.25)
        paths.write_text_atomic(paths.join(folder, "audit.html"), "<p>audit of the first</p>")
        code, text, _ = asked(port)
        assert "4.2500" in text
        assert '<a href="/first/audit.html">' in text
        code, text, headers = asked(port, "/first/audit.html")
        assert (code, text) == (200, "<p>audit of the first</p>")
        assert headers["content-security-policy"].startswith("sandbox")


def test_nothing_else_is_served(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    (tmp_path / "secret").write_text("secret")
    (Path(folder) / "audit.html").symlink_to("/dev/zero")
    with served(f"output_dir={tmp_path}") as port:
        asked(port)
        for path in ("/a/config.yaml", "/a/..%2F..%2Fsecret", "/a/../secret", "/b/audit.html", "/a", "/a/audit.html"):
            code, text, _ = asked(port, path)
            assert (code, text) == (404, "there is no such page\n"), path
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            assert asked(port, host=host or " ")[0] == 403
        assert asked(port, host=f"127.0.0.1:{port}")[0] == 200


def test_what_cannot_be_read_is_answered_too(tmp_path: Path) -> None:
    folder = Path(made(tmp_path / "a"))
    (folder / "audit.html").mkdir()
    with served(f"output_dir={tmp_path}") as port:
        assert asked(port)[0] == 200
        assert asked(port, "/a/audit.html")[0] == 404
        assert asked(port, host="[")[0] == 403
        assert asked(port, "http://[/")[0] == 403

    def denied() -> Built:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    assert f"Permission denied: &#x27;{tmp_path}" in Live(denied, seconds=1.0).page()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with served(f"output_dir={tmp_path}") as port:
        config = composed("task=report", "task.watch=true", f"task.port={port}")
        assert isinstance(config.task, ReportTaskConfig)
        with pytest.raises(ConfigError, match=f"task.port={port}; nothing can listen there"):
            server_of(config.task, lambda: built(config, config.task))  # type: ignore[arg-type]
