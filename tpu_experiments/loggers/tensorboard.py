"""Write TensorBoard event files to `<run>/tensorboard`, one per start of the run.

A resumed run opens with a purge event, so that TensorBoard shows one curve. For a remote run folder the files are
written locally and uploaded: on gs:// the writer would overwrite the file with every record.
"""

import logging
import struct
import time
from collections.abc import Callable
from typing import Any

from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.storage.retry import kind_of, shown
from tpu_experiments.storage.run_folder import config_yaml
from tpu_experiments.storage.spool import Mirror

FULL_SECONDS = 60.0  # period between retries on a full disk

log = logging.getLogger(__name__)


class TensorBoardLogger:
    """Log scalars, text, pictures, the config, and one row of the HPARAMS tab."""

    def __init__(self, context: LoggerContext) -> None:
        self._mirror = Mirror.of_folder(context.run_folder.path("tensorboard"))
        # A purge drops steps >= its own; from 0 it clears a run killed before its first checkpoint.
        purge_step = context.resume_step + 1 if context.resume_step > 0 else 0
        self._writer: Any = self._opened(purge_step=purge_step)
        self._full_since: float | None = None
        self._num_dropped = 0
        self._last_step = context.resume_step
        if context.resume_step == 0:
            self.text(0, tag="config", text=f"```yaml\n{config_yaml(context.config)}```")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add one scalar per value."""
        self._last_step = step

        def add(writer: Any) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._write(add)

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Add a Markdown text for the TEXT tab."""
        self._write(lambda writer: writer.add_text(tag, text, step))

    def image(self, step: int, *, tag: str, png: bytes) -> None:
        """Add a picture for the IMAGES tab."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = struct.unpack(">II", png[16:24])  # of the first chunk, IHDR (PNG, 11.2.2)
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        self._write(lambda writer: writer._get_file_writer().add_summary(summary, step))

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Add this run's row of the HPARAMS tab (`add_hparams` would create a sub-run)."""
        from torch.utils.tensorboard.summary import hparams

        shown_values = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}

        def add(writer: Any) -> None:
            for summary in hparams(shown_values, metrics):
                writer._get_file_writer().add_summary(summary)
            for name, value in metrics.items():
                writer.add_scalar(name, value, self._last_step)

        self._write(add)

    def finish(self) -> None:
        """Close the event file and upload it where the run folder is remote."""
        if self._writer is not None:
            self._writer.close()
        if self._num_dropped:
            log.warning("%s lacks %d records: the disk was full", self._mirror.local, self._num_dropped)
        self._mirror.close()

    def _opened(self, *, purge_step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        return SummaryWriter(str(self._mirror.local), purge_step=purge_step)

    def _write(self, add: Callable[[Any], None]) -> None:
        """Add a record and flush it; on a full disk, drop it.

        metrics.jsonl keeps dropped records. The writer's thread dies of the error, so a new file is opened once there
        is room.
        """
        if self._full_since is not None and time.monotonic() - self._full_since < FULL_SECONDS:
            self._num_dropped += 1
            return
        try:
            self._writer = self._writer or self._opened(purge_step=None)
            add(self._writer)
            self._writer.flush()
        except OSError as error:
            if kind_of(error) != "full":
                raise
            if self._full_since is None:
                log.warning("%s; %s: records are dropped until the disk has space", self._mirror.local, shown(error))
            self._full_since, self._writer = time.monotonic(), None
            self._num_dropped += 1
            return
        self._full_since = None
        self._mirror.upload_if_due()
