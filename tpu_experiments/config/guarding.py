"""Schema of `trainer.guard` and `trainer.canary`: what is done about steps, and devices, whose numbers are wrong."""

from dataclasses import dataclass

from tpu_experiments.config.fields import choice, number


@dataclass
class GuardConfig:
    """Reaction to steps whose loss or gradient is not finite, and to losses that jump.

    The update of a step that is not finite is left out on the device, whatever is chosen here; what follows is decided
    when values are read, every `trainer.log_every_steps`.
    """

    action: str = choice("skip", "stop", default="skip")
    """`skip` logs the step with its rows and goes on; `stop` ends the run."""
    max_skipped: int = number(default=3, at_least=0)
    """Steps in a row that may be left out. When more were, and the last one read is among them, the run rolls back to
    the last checkpoint from before and passes over the batches of these steps."""
    max_rollbacks: int = number(default=2, at_least=0)
    """Times a run may roll back; then it stops."""
    before_steps: int = number(default=1, at_least=0)
    """Steps before the first bad one whose batches are passed over as well: the last update that was applied may have
    brought the parameters there (PaLM, arXiv 2204.02311, passes over batches before a spike and during it)."""
    spike_factor: float | None = number(default=3.0, above=1)
    """A loss above this multiple of the median of the last `spike_window` ones of its stage is a spike; null looks for
    none."""
    spike_window: int = number(default=50, at_least=3)
    """Losses that the median is of; there is no spike before there are so many."""
    spike_action: str = choice("warn", "rollback", default="warn")
    """`warn` logs the step with its rows; `rollback` also rolls back to before it and passes over its batch."""


@dataclass
class CanaryConfig:
    """Comparison of the first gradients on several devices with a float32 host reference, before step 1.

    The training program itself runs once on a few short rows, and what it leaves in the optimizer's state is compared
    with what the same step leaves there in plain torch on one CPU device; then everything is put back.
    """

    when: str = choice("auto", "always", "never", default="auto")
    """`auto`: on TPUs, with several devices, and where the reference fits into the host's free memory."""
    max_tokens: int = number(default=512, at_least=8)
    """Tokens of the reference, shared out over the devices."""
