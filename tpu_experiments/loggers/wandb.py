"""Log to Weights & Biases; off by default, and offline unless WANDB_MODE or `mode` says otherwise."""

import html
import io
import os
from pathlib import Path
from typing import Any, Literal

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.redaction import redacted
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.tracked_run import run_id
from tpu_experiments.storage.spool import Mirror


class WandbLogger:
    """W&B run with an id of the run folder's own, so that a resumed run continues it and no other run does."""

    package = "wandb"
    on_error: Literal["raise", "drop"] = "drop"

    def __init__(self, context: LoggerContext, *, project: str, mode: str | None = None) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError(
                "logger=wandb needs the package wandb; pip install wandb or leave it out of logger=."
            ) from error
        self._html, self._image = wandb.Html, wandb.Image
        self._mirror = Mirror.of_folder(context.run_folder.path("wandb"))
        mode = mode or os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=project,
            id=run_id(context.run_folder),
            name=context.run_folder.name,
            dir=str(Path(self._mirror.local).parent),  # wandb adds the folder "wandb" itself
            mode=mode,  # type: ignore[arg-type]
            resume="allow" if mode == "online" else None,  # offline it only warns
            config=redacted(flatten(context.config)),
            # run.log has the text, and capturing would wrap the bar. The runs of a pack are in one process.
            # W&B's record of the environment has the command line with its secrets; provenance.json has none.
            settings=wandb.Settings(console="off", reinit="create_new", x_disable_meta=True),
        )
        # W&B drops steps below its last one, which a resumed run repeats; a step metric of our own is kept.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._exit_code = 1

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log one history row."""
        self._run.log({"step": step, **values})

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Log a media panel with preformatted text."""
        self._run.log({"step": step, tag: self._html(f"<pre>{html.escape(text)}</pre>")})

    def image(self, step: int, *, tag: str, png: bytes) -> None:
        """Log a media panel with the picture."""
        from PIL import Image

        self._run.log({"step": step, tag: self._image(Image.open(io.BytesIO(png)))})

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write settings to the run's config and results to its summary."""
        self._run.config.update(values, allow_val_change=True)
        self._run.summary.update(metrics)

    def ends(self, ended: str) -> None:
        """Note how the run ends: W&B has finished and failed alone, and a stopped run is not finished."""
        self._exit_code = 0 if ended == "finished" else 1

    def finish(self) -> None:
        """End the W&B run and upload its files to a remote run folder."""
        self._run.finish(exit_code=self._exit_code)
        self._mirror.close()
