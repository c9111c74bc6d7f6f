"""What a callback is, and what it may read: values that are on the host already, so that no call waits for a device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu_experiments.config.schema import Config
from tpu_experiments.storage.run_folder import RunFolder

EVENTS = ("on_start", "on_step_end", "on_evaluate", "on_save", "on_end")
Ended = Literal["finished", "stopped", "failed"]


def is_number(value: Any) -> bool:
    """Return whether an option is a finite number; YAML has `ten` and `30s` as texts."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Return whether an option is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass
class Requests:
    """What callbacks have asked of their run and it has not done yet; of several requests the first counts."""

    kind: Literal["end", "stop", "fail"] | None = None
    why: str = ""

    def ask(self, kind: Literal["end", "stop", "fail"], why: str) -> None:
        """Note a request, unless there is one."""
        if self.kind is None:
            self.kind, self.why = kind, why


@dataclass(frozen=True)
class Moment:
    """The run at a call. Steps are counted when they are queued; the device may be a few behind."""

    callback: str
    """Name of the called one, that of `callbacks.<name>`."""
    step: int
    """Optimizer steps of the run, those of earlier processes included."""
    total_steps: int
    """Optimizer steps that the run has if nothing ends it early."""
    stage: str
    """Name of the curriculum's stage; empty before the first."""
    stage_step: int
    """Optimizer steps of that stage."""
    tokens: int
    """Tokens trained on, without padding."""
    metrics: Mapping[str, float]
    """Latest logged value of every name, as in metrics.jsonl; empty until this process has logged some."""
    metrics_step: int
    """Step of the latest record of training; -1 before the first."""
    metric_steps: Mapping[str, int]
    """Step of every value of `metrics`: not every record has all, norms are logged more rarely."""
    hours: float
    """Hours of all processes of the run so far, as in goodput/wall_hours."""
    usd: Mapping[str, float | None]
    """Dollars of these hours, `on_demand` and `spot`; null where conf/hw has no price."""
    run_folder: RunFolder
    config: Config
    """A copy: what a callback changes in it has no effect."""
    _requests: Requests = field(repr=False, default_factory=Requests)

    def end(self, why: str) -> None:
        """Ask the run to end as if its steps were over: it evaluates, exports and writes result.json.

        With several processes they agree on it at the next log record.
        """
        self._requests.ask("end", f"callbacks.{self.callback}: {why}")

    def stop(self, why: str) -> None:
        """Ask the run to save a checkpoint and stop with exit code 75; the same command goes on."""
        self._requests.ask("stop", f"callbacks.{self.callback}: {why}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of the run folder, verified as `checkpoint.prove` says."""

    step: int
    path: str
    """Its folder, local or in a bucket; `checkpoint.keep_last` removes it after later ones."""


class Callback:
    """A callback; every method is optional, and a class need not derive from this one.

    It is created with the keyword arguments of `callbacks.<name>.options` by process 0 of a run, and once before the
    run folder is made, to check them; so a constructor opens nothing.
    """

    def check(self, config: Config) -> None:
        """Refuse a config by raising ConfigError, before anything is written."""

    def on_start(self, run: Moment) -> None:
        """Note that training begins or, with `run.step` above 0, goes on."""

    def on_step_end(self, run: Moment) -> None:
        """Note that a step was queued; called at the steps that `callbacks.<name>.every` divides."""

    def on_evaluate(self, run: Moment, values: Mapping[str, float]) -> None:
        """Take the values of an evaluation, by the names they are logged under."""

    def on_save(self, run: Moment, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint is complete; of one written in the background, after a later step."""

    def on_end(self, run: Moment, ended: Ended, why: str) -> None:
        """Note how this process ended; `why` is empty for a finished run."""

    def state_dict(self) -> dict[str, Any]:
        """Return values for JSON that a checkpoint keeps; of them tuples alone come back changed, as lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what the checkpoint has that the run resumes from or is rolled back to."""
