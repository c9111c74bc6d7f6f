"""Profile of the steps in `trainer.profile`."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from tpu_experiments.config.schema import ProfileConfig
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.storage.spool import Mirror

log = logging.getLogger(__name__)


class Profiler:
    """Profiler of the steps in `trainer.profile`, on rank 0 only."""

    def __init__(
        self,
        settings: ProfileConfig,
        runtime: Runtime,
        *,
        folder: str,
        idle: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take the settings; the device is idle in a block of `idle`."""
        self._runtime, self._folder, self._idle = runtime, folder, idle
        start = settings.start_step if runtime.rank == 0 else None
        self._steps = range(start, start + settings.num_steps) if start is not None else range(0)
        self._mirror: Mirror | None = None

    def before(self, step: int) -> None:
        """Start the profile before its first step."""
        if self._steps and step == self._steps[0] and self._mirror is None:
            with self._idle():
                self._mirror = Mirror.of_folder(self._folder)
                self._runtime.start_profile(str(self._mirror.local))

    def after(self, step: int, *, last: bool) -> None:
        """Write a running profile after its last step, or the stage's."""
        if self._mirror is None or not (last or step >= self._steps[-1]):
            return
        with self._idle():
            self._runtime.stop_profile()
            self._mirror.close()
        self._mirror, self._steps = None, range(0)
        log.info("profile: tensorboard --logdir %s (with the plugin xprof)", self._folder)
