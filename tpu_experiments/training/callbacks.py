"""The callbacks of a run, called by process 0 in its loop's thread, with host values alone."""

import copy
import logging
import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tpu_experiments.callbacks.base import Checkpoint, Ended, Moment, Requests
from tpu_experiments.checkpoint.progress import Progress
from tpu_experiments.config.errors import one_line
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.storage import strict_json
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training.lives import Ledger

SLOW_SECONDS = 1.0
"""Time of one on_step_end above which it is warned of, once: no step is queued meanwhile."""
FLOAT = "__float__"
"""Name under which a checkpoint keeps a float that JSON has no number for."""

log = logging.getLogger(__name__)


def to_json(value: Any, *, key: str) -> Any:
    """Return a value of `state_dict` as JSON gives it back, a float that is not finite as `{FLOAT: its name}`.

    Raises:
        TypeError: JSON would change it; `key` says where it is.
    """
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{key} has the name {name!r}, and JSON has texts alone; use str({name!r})")
        return {name: to_json(item, key=f"{key}[{name!r}]") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, key=f"{key}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(float(value))}
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{key} is of type {type(value).__name__}, which JSON has not; return lists, texts or numbers")
    return value


def from_json(value: Any) -> Any:
    """Return what `to_json` was given, tuples as lists."""
    if isinstance(value, dict):
        if list(value) == [FLOAT] and value[FLOAT] in ("inf", "-inf", "nan"):
            return float(value[FLOAT])
        return {name: from_json(item) for name, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


class Callbacks:
    """Fan-out to the callbacks of a run.

    An error of one is logged with its traceback. With `on_error: stop` the run then saves and ends; with `warn` it goes
    on, and the callback is called again at the next event.
    """

    def __init__(self, config: Config, folder: RunFolder, *, total_steps: int, ledger: Ledger) -> None:
        self._made = {
            name: locate(each._target_, key=f"callbacks.{name}")(**each.options)
            for name, each in config.callbacks.items()
        }
        self._folder, self._config, self._total, self._ledger = folder, copy.deepcopy(config), total_steps, ledger
        self._settings = config.callbacks
        self._progress = Progress()
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._metric_steps: Mapping[str, int] = MappingProxyType({})
        self._metrics_step = -1
        self._state: dict[str, Any] = {}
        self._slow = set[str]()
        self.requests = Requests()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a log record, which are floats of the host."""
        self._metrics = MappingProxyType({**self._metrics, **values})
        self._metric_steps = MappingProxyType({**self._metric_steps, **dict.fromkeys(values, step)})
        if "train/lr" in values:
            self._metrics_step = step

    def rewind(self) -> None:
        """Forget the values of steps that were rolled back."""
        self._metrics, self._metric_steps, self._metrics_step = MappingProxyType({}), MappingProxyType({}), -1

    def start(self, progress: Progress) -> None:
        """Tell all that training begins or goes on."""
        self._call("on_start", progress)

    def step_end(self, progress: Progress) -> None:
        """Tell those that are due that a step was queued."""
        for name, each in self._settings.items():
            if progress.step % each.every == 0:
                self._call("on_step_end", progress, only=name)

    def evaluated(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Tell all of an evaluation."""
        self._call("on_evaluate", progress, MappingProxyType(dict(values)))

    def saved(self, progress: Progress, *, step: int, path: str) -> None:
        """Tell all of a complete checkpoint."""
        self._call("on_save", progress, Checkpoint(step, path))

    def end(self, ended: Ended, why: str) -> None:
        """Tell all how this process ended; no error of theirs changes it."""
        self._call("on_end", self._progress, ended, why)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of each; of one that fails, what it said last."""
        for name in self._made:
            found = self._call("state_dict", self._progress, only=name, is_event=False)
            if found is None:
                continue
            try:
                self._state[name] = strict_json.loads(strict_json.dumps(to_json(found, key="state")).encode())
            except Exception as error:
                self._failed(name, "state_dict", error)
        return dict(self._state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Give each what a checkpoint has of it."""
        self._state = dict(state)
        for name in self._made:
            if name in state:
                self._call("load_state_dict", self._progress, from_json(state[name]), only=name, is_event=False)

    def _call(
        self, method: str, progress: Progress, *arguments: Any, only: str | None = None, is_event: bool = True
    ) -> Any:
        """Call a method of all, or of the one named `only`, and return what the last returned."""
        self._progress, found = progress, None
        for name, callback in self._made.items():
            function = getattr(callback, method, None)
            if function is None or only not in (None, name):
                continue
            began = time.perf_counter()
            try:
                found = function(*([self._moment(name)] if is_event else []), *arguments)
            except (Exception, SystemExit) as error:  # a sys.exit would end the run unsaved, with its exit code
                self._failed(name, method, error)
            seconds = time.perf_counter() - began
            if method == "on_step_end" and seconds > SLOW_SECONDS and name not in self._slow:
                self._slow.add(name)
                log.warning(
                    "callbacks.%s: on_step_end took %.1f s, in which no step is queued; raise callbacks.%s.every, or "
                    "work in a thread",
                    name,
                    seconds,
                    name,
                )
        return found

    def _moment(self, name: str) -> Moment:
        progress = self._progress
        hours, usd = self._ledger.spent()
        return Moment(
            callback=name,
            step=progress.step,
            total_steps=self._total,
            stage=progress.stages[-1].name if progress.stages else "",
            stage_step=progress.stage_step,
            tokens=progress.tokens,
            metrics=self._metrics,
            metrics_step=self._metrics_step,
            metric_steps=self._metric_steps,
            hours=hours,
            usd=MappingProxyType(usd),
            run_folder=self._folder,
            config=self._config,
            _requests=self.requests,
        )

    def _failed(self, name: str, method: str, error: BaseException) -> None:
        sentence = f"callbacks.{name}: {method} failed ({one_line(error)})"
        if self._settings[name].on_error == "warn" or method == "on_end":
            log.warning("%s; the run goes on", sentence, exc_info=error)
            return
        log.error("%s", sentence, exc_info=error)
        self.requests.ask("fail", sentence)
