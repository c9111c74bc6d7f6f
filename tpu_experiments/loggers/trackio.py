"""Log to trackio: to its local files, or to a server or Space of its own that TRACKIO_SERVER_URL or an option names.

trackio sends from a thread of its own, and keeps what a server does not take. Steps that a resumed run repeats are in
its records twice, with the same values.
"""

import contextlib
import io
import math
from typing import Any, Literal

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.redaction import redacted
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.tracked_run import run_id


class TrackioLogger:
    """trackio run, named by an id of the run folder's own, so that a resumed run continues it and no other run does."""

    package = "trackio"
    on_error: Literal["raise", "drop"] = "drop"

    def __init__(
        self, context: LoggerContext, *, project: str, space_id: str | None = None, server_url: str | None = None
    ) -> None:
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise ConfigError(
                "logger=trackio needs the package trackio; pip install trackio or leave it out of logger=."
            ) from error
        self._markdown, self._image, self._last_step = trackio.Markdown, trackio.Image, context.resume_step
        self._current = trackio.context_vars.current_run
        with contextlib.redirect_stdout(io.StringIO()):  # it greets, and closing lines are for people
            self._run: Any = trackio.init(
                project=project,
                name=run_id(context.run_folder, "trackio"),
                space_id=space_id,
                server_url=server_url,
                config=redacted(flatten(context.config)),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log one row of values."""
        self._last_step = step
        self._run.log({key: value if math.isfinite(value) else None for key, value in values.items()}, step=step)

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Log a text."""
        self._run.log({tag: self._markdown(text)}, step=step)

    def image(self, step: int, *, tag: str, png: bytes) -> None:
        """Log a picture."""
        from PIL import Image

        self._run.log({tag: self._image(Image.open(io.BytesIO(png)))}, step=step)

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Log the results; the settings are in the run's config already."""
        self.scalars(self._last_step, metrics)

    def finish(self) -> None:
        """Wait until trackio has written all, or as long as it waits for its server."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
        if self._current.get() is self._run:
            self._current.set(None)  # else trackio finishes it once more when the process ends, and says so
