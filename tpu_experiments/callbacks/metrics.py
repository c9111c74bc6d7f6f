"""Watch logged values, such as norms of gradients and updates by kind of module."""

import logging
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from tpu_experiments.callbacks.base import Callback, Moment, is_count, is_number
from tpu_experiments.config.errors import ConfigError

log = logging.getLogger(__name__)


class WatchMetrics(Callback):
    """Warns of logged values outside a range or, where they stay there, ends or stops the run."""

    def __init__(
        self,
        *,
        metrics: Sequence[str],
        above: float | None = None,
        below: float | None = None,
        times: int = 1,
        then: Literal["warn", "end", "stop"] = "warn",
    ) -> None:
        """Take what is watched.

        Args:
            metrics: shell patterns over the names of values in metrics.jsonl, such as `norms/grad_*`.
            above: a value above it is outside; null: none is too large.
            below: a value below it is outside; null: none is too small.
            times: records in a row in which a value is outside, of those that have it, after which it counts.
            then: `warn` says so, once until it is back inside; `end` and `stop` end the run, as their names of Moment.
        """
        if isinstance(metrics, str) or not metrics or not all(isinstance(pattern, str) for pattern in metrics):
            raise ConfigError(f"metrics={metrics!r}; write patterns over names of values as a list.")
        for name, bound in {"above": above, "below": below}.items():
            if bound is not None and not is_number(bound):
                raise ConfigError(f"{name}={bound}; it must be a number, or null.")
        if above is None and below is None:
            raise ConfigError("above=null and below=null; every value is inside; set one of both.")
        if not is_count(times):
            raise ConfigError(f"times={times}; it must be a whole number, at least 1.")
        if then not in ("warn", "end", "stop"):
            raise ConfigError(f"then={then}; write warn, end or stop.")
        self._patterns, self._above, self._below = list(metrics), above, below
        self._times, self._then = times, then
        self._seen: dict[str, int] = {}
        """Step of each value that was looked at last, by its name."""
        self._outside: dict[str, int] = {}
        """Records in a row in which a value was outside, by its name."""

    def on_step_end(self, run: Moment) -> None:
        """Look at the values of training that are new."""
        new = {name: step for name, step in run.metric_steps.items() if self._seen.get(name) != step}
        if new:
            self._seen |= new
            self._look(run, {name: run.metrics[name] for name in new if not name.startswith("eval/")})

    def on_evaluate(self, run: Moment, values: Mapping[str, float]) -> None:
        """Look at an evaluation."""
        self._look(run, values)

    def on_end(self, run: Moment, ended: str, why: str) -> None:
        """Say which pattern matched nothing, since its name may be misspelt."""
        for pattern in self._patterns:
            if run.metrics and not any(fnmatchcase(name, pattern) for name in run.metrics):
                log.warning("callbacks.%s: no logged value has a name like %s", run.callback, pattern)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"outside": self._outside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counts of a checkpoint."""
        self._outside, self._seen = {str(name): int(count) for name, count in state["outside"].items()}, {}

    def _look(self, run: Moment, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not any(fnmatchcase(name, pattern) for pattern in self._patterns):
                continue
            bound = self._left_by(value)
            self._outside[name] = self._outside.get(name, 0) + 1 if bound else 0
            if self._outside[name] != self._times:
                continue
            rows = f", {self._times} records in a row" if self._times > 1 else ""
            why = f"{name}={value:.4g} is {bound}{rows}"
            log.warning("callbacks.%s: step %d: %s", run.callback, run.metric_steps.get(name, run.step), why)
            if self._then != "warn":
                (run.end if self._then == "end" else run.stop)(why)

    def _left_by(self, value: float) -> str | None:
        """Return which bound a value is beyond; None where it is inside."""
        if math.isnan(value):
            return "no number"
        if self._above is not None and value > self._above:
            return f"above {self._above:g}"
        if self._below is not None and value < self._below:
            return f"below {self._below:g}"
        return None
