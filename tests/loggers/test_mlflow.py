"""MLflow for real: its SQLite file, and a server in a process of its own that goes away and comes back."""

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_hosts import free_port
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.base import LoggerContext, Loggers
from tpu_experiments.loggers.mlflow import MlflowLogger, tracking_uri
from tpu_experiments.loggers.tracked_run import stored_id

MakeContext = Callable[..., LoggerContext]
WHOLE = importlib.util.find_spec("flask") is not None  # mlflow-skinny has the program too, and no server
SERVER = os.environ.get("MLFLOW_SERVER") or (
    shutil.which("mlflow", path=str(Path(sys.executable).parent)) if WHOLE else None
)
"""The program `mlflow` of an environment with the whole package; MLFLOW_SERVER names one of another environment."""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
needs_client = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="the extra mlflow is not installed"
)
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(uri: str, run: str, name: str = "train/loss") -> list[tuple[int, float]]:
    return sorted((each.step, each.value) for each in client(uri).get_metric_history(run, name))


@needs_client
def test_without_a_server_all_is_in_a_file_and_a_resumed_run_goes_on(make_context: MakeContext) -> None:
    context = make_context("optim.lr=0.125")
    logger = MlflowLogger(context, experiment="tests")
    uri = tracking_uri(context.config, None)
    for step in (1, 2, 3):
        logger.scalars(step, {"train/loss": 4.0 - step, "eval/loss_a+b": float("nan")})
    logger.text(1, tag="sample", text="Dunărea")
    logger.image(3, tag="loss", png=PNG)
    logger.finish()
    run = stored_id(context.run_folder, "mlflow")
    assert run is not None
    first = client(uri).get_run(run)
    assert first.info.status == "KILLED"
    assert first.info.run_name == context.run_folder.name
    assert first.data.params["optim.lr"] == "0.125"
    again = MlflowLogger(replace(context, resume_step=1), experiment="tests")
    assert client(uri).get_run(run).info.status == "RUNNING"
    for step in (2, 3, 4):
        again.scalars(step, {"train/loss": 4.0 - step})
    again.scalars(3, {"train/loss": 9.0})  # a rollback, after which it is another
    again.hparams({"lora.r": 4}, {"hparam/eval_loss": 1.25})
    Loggers({"mlflow": again}).finish("finished")
    assert history(uri, run) == [(1, 3.0), (2, 2.0), (3, 1.0), (3, 9.0), (4, 0.0)]
    last = client(uri).get_run(run)
    assert last.info.status == "FINISHED"
    assert last.data.metrics["hparam/eval_loss"] == 1.25
    (text,) = Path(context.config.output_dir, "mlflow_artifacts").rglob("sample/*.md")
    assert text.read_text() == "Dunărea"
    (picture,) = Path(context.config.output_dir, "mlflow_artifacts").rglob("loss/*.png")
    assert picture.read_bytes() == PNG
    for ended, status in (("failed", "FAILED"), ("stopped", "KILLED")):
        broken = MlflowLogger(replace(context, resume_step=4), experiment="tests")
        broken.hparams({}, {"hparam/eval_loss": 1.25})  # and what comes after the last step fails
        Loggers({"mlflow": broken}).finish(ended)
        assert client(uri).get_run(run).info.status == status
    client(uri).delete_run(run)
    anew = MlflowLogger(replace(context, resume_step=1), experiment="tests")
    anew.finish()
    assert stored_id(context.run_folder, "mlflow") != run


def test_without_the_package_the_error_says_what_to_do(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install mlflow-skinny or leave it out of logger="):
        MlflowLogger(make_context(), experiment="tests")


def test_a_bucket_needs_a_server(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("name=x", "output_dir=memory://runs")
    with pytest.raises(ConfigError, match="output_dir=memory://runs; MLflow's own file cannot be in a bucket"):
        MlflowLogger.check(config, experiment="tests")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    MlflowLogger.check(config, experiment="tests")
    assert tracking_uri(config, "http://other:2") == "http://other:2"


BAD_PLACES = {
    "mlflow.lab": "write http://mlflow.lab:5000, or file:///FOLDER.",
    "localhost:5000": "write http://localhost:5000,",
    "htp://host:5000": "write http://host:5000,",
    "databricks.lab": "write http://databricks.lab:5000,",
    "runs.db": "it names no server and no database;",
    "http://": "it names no server and no database;",
    "sqlite://runs.db": "it names no server and no database;",
}
GOOD_PLACES = (
    *("http://127.0.0.1:1", "https://mlflow.lab/at/it", "sqlite:///runs.db", "sqlite:////a/runs.db", "file:///a/runs"),
    *(
        "/a/runs",
        "postgresql://a@b/c",
        "mysql+pymysql://a@b/c",
        "mssql+pyodbc://a",
        "sqlite+pysqlite:///a.db",
        "databricks",
        "databricks://mine",
    ),
)


@pytest.mark.parametrize("place", BAD_PLACES)
def test_a_place_that_is_none_of_mlflows_is_refused(
    place: str, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("name=x")
    with pytest.raises(ConfigError, match=r"^logger\.mlflow\.options\.uri=") as refused:
        MlflowLogger.check(config, experiment="tests", uri=place)
    assert BAD_PLACES[place] in str(refused.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI="):
        MlflowLogger.check(config, experiment="tests")


@needs_client
def test_a_place_of_mlflows_is_taken_and_a_refused_one_is_shown_without_its_password(
    make_config: Callable[..., Config],
) -> None:
    config = make_config("name=x")
    for place in GOOD_PLACES:
        MlflowLogger.check(config, experiment="tests", uri=place)
    with pytest.raises(ConfigError) as refused:
        MlflowLogger.check(config, experiment="tests", uri="htp://me:hunter2secret9@host")
    assert "hunter2secret9" not in str(refused.value)


TOGETHER = """
import os, pickle, sys
from tpu_experiments.loggers.mlflow import MlflowLogger
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow.store.tracking.sqlalchemy_store
children = []
for context in pickle.load(sys.stdin.buffer):
    if not (child := os.fork()):
        MlflowLogger(context, experiment="tests").finish()
        os._exit(0)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


@needs_client
def test_runs_that_begin_together_in_a_new_file_are_all_in_it(make_context: MakeContext) -> None:
    """MLflow makes its tables at the first request; without a lock others fail meanwhile at a duplicate column."""
    contexts = [make_context(f"name=run{number}") for number in range(3)]
    done = subprocess.run([sys.executable, "-c", TOGETHER], input=pickle.dumps(contexts), stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    uri = tracking_uri(contexts[0].config, None)
    for context in contexts:
        found = client(uri).get_run(str(stored_id(context.run_folder, "mlflow")))
        assert found.info.run_name == context.run_folder.name


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Start the server at one address as often as asked; its records outlive it."""
    if SERVER is None or importlib.util.find_spec("mlflow") is None:
        pytest.skip("no mlflow server: install mlflow, or set MLFLOW_SERVER=.../bin/mlflow")
    port, started = free_port(), list[subprocess.Popen[bytes]]()
    place = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    command = [SERVER, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *place]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PYTHON"))}

    def start() -> "subprocess.Popen[bytes]":
        with (tmp_path / "server.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=env | {"MLFLOW_DISABLE_TELEMETRY": "true"}, stdout=log, stderr=log, process_group=0
            )
        started.append(process)
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return process
            except OSError:
                time.sleep(0.3)

    start.uri = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield start
    for process in started:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End the server with its workers, which are a process group of their own."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
    process.wait()


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(
    server: Any, make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    process, uri = server(), server.uri
    context = make_context()
    logger = MlflowLogger(context, experiment="tests", uri=uri)
    logger.scalars(1, {"train/loss": 3.0})
    run = stored_id(context.run_folder, "mlflow")
    assert run is not None
    deadline = time.monotonic() + 30
    while not history(uri, run):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    kill(process)
    began = time.monotonic()
    for step in (2, 3):
        logger.scalars(step, {"train/loss": 4.0 - step})
    logger.text(3, tag="sample", text="Dunărea")
    assert time.monotonic() - began < 1.0, "no step waits for the server"
    deadline = time.monotonic() + 60
    while "its records are kept and sent again" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    server()
    logger.hparams({}, {"hparam/eval_loss": 1.5})
    Loggers({"mlflow": logger}).finish("finished")
    assert history(uri, run) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert client(uri).get_run(run).info.status == "FINISHED"
    assert [each.path for each in client(uri).list_artifacts(run)] == ["sample"]
    kill(process)


@pytest.mark.slow
def test_a_server_that_stays_away_ends_nothing(
    server: Any, make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    process = server()
    logger = MlflowLogger(make_context(), experiment="tests", uri=server.uri)
    kill(process)
    logger.scalars(1, {"train/loss": 3.0})
    began = time.monotonic()
    logger.finish()
    assert time.monotonic() - began < 60
    assert "logger=mlflow lacks 2 records" in caplog.text


def test_its_failure_never_stops_a_run() -> None:
    assert MlflowLogger.on_error == "drop"
