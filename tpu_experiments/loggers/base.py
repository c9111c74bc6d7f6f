"""Interface and context of metric loggers, and the fan-out that the trainer holds.

Loggers receive host values only; nothing here reads from a device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tpu_experiments.config.schema import Config
from tpu_experiments.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """Destination of metrics; a subclass does nothing with what it has no method for.

    Optional members of a class:

    * `image(step, *, tag, png)` receives pictures of the run, as PNG files.
    * `rows(step, labels)` receives `source:row` of every row of the global batch when a step is queued. A step may
      be repeated when the run is killed before its next checkpoint.
    * `ends(ended)` is told just before `finish` how the run ends: finished, stopped (it can go on later) or failed.
    * `check(config, **options)`, a static method, refuses settings before anything is written.
    * `on_error = "drop"`: a logger that raises is logged and dropped, and the run continues.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log values after optimizer step `step`, by name: `train/loss`, `perf/tokens_per_second`."""

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Log a text, such as a sample of the model."""

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Log the run's settings (flat) and its final metrics; called once, at the end."""

    def finish(self) -> None:
        """Flush and close everything; nothing is logged afterwards."""


@dataclass(frozen=True)
class LoggerContext:
    """First argument of every logger's constructor; the run folder exists by then."""

    run_folder: RunFolder
    config: Config
    total_steps: int
    """Optimizer steps of the whole run, over all stages."""
    resume_step: int
    """Optimizer steps already done and kept; 0 for a fresh start."""


class Loggers:
    """Fan-out to several loggers; empty on processes that log nothing."""

    def __init__(self, loggers: dict[str, MetricLogger]) -> None:
        self._loggers = dict(loggers)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """See MetricLogger."""
        self._each(lambda logger: logger.scalars(step, values))

    def text(self, step: int, *, tag: str, text: str) -> None:
        """See MetricLogger."""
        self._each(lambda logger: logger.text(step, tag=tag, text=text))

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """See MetricLogger."""
        self._each(lambda logger: logger.hparams(values, metrics))

    def takes_images(self) -> bool:
        """Return whether any logger accepts pictures."""
        return any(hasattr(logger, "image") for logger in self._loggers.values())

    def image(self, step: int, *, tag: str, png: bytes) -> None:
        """See MetricLogger."""
        self._each(lambda logger: logger.image(step, tag=tag, png=png) if hasattr(logger, "image") else None)

    def rows(self, step: int, labels: list[str]) -> None:
        """See MetricLogger."""
        self._each(lambda logger: logger.rows(step, labels) if hasattr(logger, "rows") else None)

    def finish(self, ended: str = "failed") -> None:
        """Finish every logger, also after one of them failed, then raise the first error.

        A second call does nothing, so that a `finally` may repeat it.
        """

        def end(logger: MetricLogger) -> None:
            if hasattr(logger, "ends"):
                logger.ends(ended)
            logger.finish()

        try:
            self._each(end)
        finally:
            self._loggers.clear()

    def _each(self, call: Callable[[MetricLogger], None]) -> None:
        """Call every logger; raise the first error of those that are not dropped, after all were called."""
        first: Exception | None = None
        for name, logger in list(self._loggers.items()):
            try:
                call(logger)
            except Exception as error:
                if getattr(logger, "on_error", "raise") == "drop":
                    log.warning("logger=%s failed and is disabled; training continues without it", name, exc_info=error)
                    del self._loggers[name]
                else:
                    first = first or error
        if first is not None:
            raise first
