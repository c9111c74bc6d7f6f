"""Log to MLflow: to a server, or to an SQLite file beside the run folders.

A resumed run goes on in its MLflow run, whose id is in the run folder. MLflow keeps all values of a step, so values
that it has already, as of steps that a resumed run repeats, are not sent again; after a rollback both are there.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.redaction import redacted, redacted_text
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.outbox import Outbox
from tpu_experiments.loggers.tracked_run import store_id, stored_id
from tpu_experiments.storage import paths

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"
MAX_PARAMS = 100
"""Parameters of one request (MLflow's limit)."""
MAX_CHARACTERS = 6000
"""Characters of a parameter's value (MLflow's limit)."""
REFUSED = {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "PERMISSION_DENIED",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
}
"""Error codes of a request that would fail again."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. :/]")
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
SQLITE = "sqlite:///"
PLACE = re.compile(
    r"https?://[^/]|sqlite(\+\w+)?:///.|(postgresql|mysql|mssql)(\+\w+)?://.|file:.|/|databricks(-uc)?(:|$)|uc:."
)
"""Beginnings of what MLflow takes as the place of its records; any other text is to it a folder's name."""


class MlflowLogger:
    """MLflow run of the run folder; records are sent by a thread, so that no step waits for the server."""

    package = "mlflow"
    on_error: Literal["raise", "drop"] = "drop"

    def __init__(self, context: LoggerContext, *, experiment: str, uri: str | None = None) -> None:
        # Read when MLflow is imported. It reports its use to its authors by default, and waits minutes for a server.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ModuleNotFoundError as error:
            raise ConfigError(
                "logger=mlflow needs the package mlflow-skinny; pip install mlflow-skinny or leave it out of logger=."
            ) from error
        self._metric, self._error, folder = Metric, MlflowException, context.run_folder
        place = tracking_uri(context.config, uri)
        is_file = place.startswith(SQLITE)
        artifacts = Path(paths.absolute(paths.join(context.config.output_dir, ARTIFACTS))).as_uri() if is_file else None
        self._known: set[tuple[str, int, str]] = set()
        """Name, step and value of what the MLflow run has already."""
        with _alone_with(place):
            self._client = MlflowClient(tracking_uri=place)
            self._id = self._resumed(stored_id(folder, "mlflow"))
            number = self._experiment(experiment, artifacts) if self._id is None else ""
        if self._id is None:
            tags = {"folder": redacted_text(paths.absolute(folder.path()))}
            self._id = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
            store_id(folder, "mlflow", self._id)
            values = {
                _name(key): str(value)[:MAX_CHARACTERS] for key, value in redacted(flatten(context.config)).items()
            }
            params = [Param(key, value) for key, value in values.items()]
            for begin in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._id, params=params[begin : begin + MAX_PARAMS])
        self._last_step, self._status = context.resume_step, STATUS["stopped"]
        self._outbox = Outbox("mlflow", is_refused=self._is_refused)

    @staticmethod
    def check(config: Config, *, experiment: str, uri: str | None = None) -> None:
        """Refuse a config without a place for the records, before anything is written.

        Raises:
            ConfigError: there is none, or its name is none of MLflow's.
        """
        place = tracking_uri(config, uri)
        own = {each.name for each in importlib.metadata.entry_points(group="mlflow.tracking_store")}
        if not PLACE.match(place) and place.partition(":")[0] not in own:
            host = redacted_text(place).rpartition("://")[2]
            raise ConfigError(
                f"{'logger.mlflow.options.uri' if uri else 'MLFLOW_TRACKING_URI'}={redacted_text(place)}; it names no "
                f"server and no database; write http://{host}{'' if ':' in host else ':5000'}, or file:///FOLDER."
            )
        lacking = [name for name in ("sqlalchemy", "alembic") if importlib.util.find_spec(name) is None]
        if place.startswith("sqlite:") and lacking:
            raise ConfigError(
                f"logger=mlflow writes to {place} with the packages sqlalchemy and alembic; pip install "
                f"{' '.join(lacking)}, or name a server: logger.mlflow.options.uri=http://HOST:PORT."
            )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Send one batch of metrics."""
        self._last_step, now = step, int(1000 * time.time())
        named = {_name(key): float(value) for key, value in values.items()}
        new = {key: value for key, value in named.items() if (key, step, repr(value)) not in self._known}
        metrics = [self._metric(key, value, now, step) for key, value in new.items()]
        if metrics:
            self._outbox.put(lambda: self._client.log_batch(self._id, metrics=metrics))

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Send a text as a file among the run's artifacts."""
        self._outbox.put(lambda: self._client.log_text(self._id, text, f"{_name(tag)}/{step:08d}.md"))

    def image(self, step: int, *, tag: str, png: bytes) -> None:
        """Send a picture as a file among the run's artifacts."""

        def send() -> None:
            with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as folder:
                file = Path(folder) / f"{step:08d}.png"
                file.write_bytes(png)
                self._client.log_artifact(self._id, str(file), _name(tag))

        self._outbox.put(send)

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Send the results; the settings are the run's parameters already."""
        self.scalars(self._last_step, metrics)

    def ends(self, ended: str) -> None:
        """Note how the run ends."""
        self._status = STATUS[ended]

    def finish(self) -> None:
        """Say how the run ended, and wait a while for all to arrive."""
        self._outbox.put(lambda: self._client.set_terminated(self._id, self._status))
        self._outbox.close()

    def _is_refused(self, error: Exception) -> bool:
        return isinstance(error, self._error) and getattr(error, "error_code", None) in REFUSED

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of an experiment, which is made where it is missing, perhaps by another run meanwhile."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except self._error:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _resumed(self, number: str | None) -> str | None:
        """Return the id of the run that is continued; None without one, as at another server."""
        if number is None:
            return None
        try:
            found = self._client.get_run(number)
        except self._error as error:
            if self._is_refused(error):
                return None
            raise
        if found.info.lifecycle_stage != "active":
            return None
        for key in found.data.metrics:
            self._known |= {(key, each.step, repr(each.value)) for each in self._client.get_metric_history(number, key)}
        self._client.update_run(number, status="RUNNING")
        return number


@contextmanager
def _alone_with(place: str) -> Iterator[None]:
    """Hold the lock of an SQLite file; MLflow makes its tables at the first request, and two at once break them."""
    if not place.startswith(SQLITE):
        yield
        return
    with open(f"{place.removeprefix(SQLITE).partition('?')[0]}.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tracking_uri(config: Config, uri: str | None) -> str:
    """Return where MLflow's records go: the option, MLFLOW_TRACKING_URI, or a file beside the run folders.

    Raises:
        ConfigError: none is named, and the run folders are in a bucket.
    """
    named = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if named:
        return named
    if paths.is_remote(config.output_dir):
        raise ConfigError(
            f"logger=mlflow with output_dir={config.output_dir}; MLflow's own file cannot be in a bucket; name a "
            "server: logger.mlflow.options.uri=http://HOST:PORT, or export MLFLOW_TRACKING_URI."
        )
    return f"sqlite:///{paths.absolute(paths.join(config.output_dir, DATABASE))}"


def _name(key: str) -> str:
    return NOT_IN_NAMES.sub("_", key)
