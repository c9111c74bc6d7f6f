"""TensorBoard event files in <run>/tensorboard, one per start of the run.

A resumed run opens with a purge event, so TensorBoard shows one curve. For a remote run folder the
files are written locally and uploaded: on gs:// the writer would overwrite the file per record.
"""

from typing import Any

from tpu_experiments.io.folder import config_yaml
from tpu_experiments.io.mirror import Mirror
from tpu_experiments.logging.base import LoggerContext


class TensorBoardLogger:
    """Scalars, text, the config, and one row of the HPARAMS tab."""

    def __init__(self, context: LoggerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds, and not every run wants it

        self._mirror = Mirror.of_folder(context.run_folder.path("tensorboard"))
        # A purge drops steps >= its own; from 0 it clears a run killed before its first checkpoint.
        purge_step = context.resume_step + 1 if context.resume_step > 0 else 0
        self._writer = SummaryWriter(str(self._mirror.local), purge_step=purge_step)
        self._last_step = context.resume_step
        if context.resume_step == 0:
            self.text(0, tag="config", text=f"```yaml\n{config_yaml(context.config)}```")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """One scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._last_step = step
        self._flush()

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Shown as Markdown under the TEXT tab."""
        self._writer.add_text(tag, text, step)
        self._flush()

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """One row of the HPARAMS tab, in this run (`add_hparams` would make a sub-run of it)."""
        from torch.utils.tensorboard.summary import hparams

        shown = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
        for summary in hparams(shown, metrics):
            self._writer._get_file_writer().add_summary(summary)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, self._last_step)
        self._flush()

    def finish(self) -> None:
        """Close the event file and upload it where the run folder is remote."""
        self._writer.close()
        self._mirror.close()

    def _flush(self) -> None:
        self._writer.flush()
        self._mirror.upload_if_due()
