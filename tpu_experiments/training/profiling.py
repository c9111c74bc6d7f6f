"""A profile of some steps of a run, in TensorBoard's layout."""

import logging

from tpu_experiments.config.schema import ProfileConfig
from tpu_experiments.io.mirror import Mirror
from tpu_experiments.runtime.base import Runtime

log = logging.getLogger(__name__)


class Profiler:
    """Profiler of the steps in `trainer.profile`, on rank 0 only."""

    def __init__(self, settings: ProfileConfig, runtime: Runtime, *, folder: str) -> None:
        self._runtime, self._folder = runtime, folder
        start = settings.start_step if runtime.rank == 0 else None
        self._steps = range(start, start + settings.num_steps) if start is not None else range(0)
        self._mirror: Mirror | None = None

    def starts_at(self, step: int) -> bool:
        """Return whether the profile begins with this step."""
        return bool(self._steps) and step == self._steps[0] and self._mirror is None

    def ends_after(self, step: int) -> bool:
        """Return whether this step is the profile's last."""
        return self._mirror is not None and step >= self._steps[-1]

    def start(self) -> None:
        """Start the profile; the device must be idle."""
        self._mirror = Mirror.of_folder(self._folder)
        self._runtime.start_profile(str(self._mirror.local))

    def stop(self) -> None:
        """Stop a running profile and write it; the device must be idle."""
        if self._mirror is None:
            return
        self._runtime.stop_profile()
        self._mirror.close()
        self._mirror, self._steps = None, range(0)
        log.info("profile: tensorboard --logdir %s (with the plugin xprof)", self._folder)
