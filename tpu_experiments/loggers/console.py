"""Show progress on stderr: a bar on a terminal, elsewhere one fixed-width line per record.

run.log receives the lines in both cases: those that the bar replaces are marked `shown_by_bar`, and the console
handler of runlog.py omits them.
"""

import logging
import math
import sys
import time
from datetime import timedelta
from typing import Any, Literal

from tqdm import tqdm

from tpu_experiments.loggers.base import LoggerContext, MetricLogger

log = logging.getLogger(__name__)
LOSS = "eval/loss_"
"""Prefix of the held-out loss of a source."""


class ConsoleLogger(MetricLogger):
    """Show loss, learning rate, speed and time left, and evaluations in full.

    The trainer logs samples itself, so that run.log has them with any logger; the end of the run prints its result.
    """

    def __init__(self, context: LoggerContext, *, style: Literal["auto", "bar", "lines"] = "auto") -> None:
        self._total, self._objective = context.total_steps, context.config.objective
        self._pace = Pace(context.resume_step)
        self._bar: tqdm[Any] | None = None
        if style == "bar" or (style == "auto" and sys.stderr.isatty()):
            self._bar = tqdm(
                total=context.total_steps,
                initial=context.resume_step,
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Advance the bar or print a line for a training record; print a line for an evaluation."""
        if "train/loss" in values:
            self._pace.advance(step, is_steady="perf/tokens_per_second" in values)
            log.info(self._line(step, values), extra={"shown_by_bar": self._bar is not None})
            if self._bar is not None:
                self._bar.set_postfix_str(_postfix(values), refresh=False)
                self._bar.update(step - self._bar.n)
        if "eval/loss" in values:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in self._of_evaluation(values).items())
            log.info("step %d/%d  %s", step, self._total, shown)

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Count the time of the first steps from their stage's beginning."""
        if tag == "stage":
            self._pace.begin()

    def finish(self) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _of_evaluation(self, values: dict[str, float]) -> dict[str, float]:
        """Return an evaluation's values for a line: of each source the loss alone, and nothing where there is one.

        Other loggers have all of them.
        """
        sources = [name.removeprefix(LOSS) for name in values if name.startswith(LOSS)]
        of_sources = {
            f"{name}_{source}" for name in values for source in sources if len(sources) < 2 or name != "eval/loss"
        }
        for_files = tuple(f"eval/{name}" for name in self._objective.for_files)
        return {
            name: value
            for name, value in values.items()
            if name.startswith("eval/") and name not in for_files and name not in of_sources
        }

    def _line(self, step: int, values: dict[str, float]) -> str:
        width = len(str(self._total))
        seconds_left = self._pace.seconds_per_step * (self._total - step)
        milliseconds = values.get("perf/step_seconds", self._pace.last_seconds_per_step) * 1000
        columns = [
            f"step {step:>{width}}/{self._total}",
            f"loss {values['train/loss']:8.4f}",
            f"lr {_number(values, 'train/lr', '9.2e')}",
            f"grad {_number(values, 'train/grad_norm', '9.3f')}",
            *(f"{name} {values[f'train/{name}']:6.4f}" for name in self._reported(values)),
            f"{_number(values, 'perf/tokens_per_second', '9,.0f')} tok/s",
            f"{milliseconds:8.1f} ms/step",
            *([f"mfu {100 * values['perf/mfu']:4.1f} %"] if "perf/mfu" in values else []),
            f"left {_clock(seconds_left)}",
        ]
        return "  ".join(columns)

    def _reported(self, values: dict[str, float]) -> list[str]:
        """Return the measure that ranks the run, where a training record has it."""
        name = self._objective.ranked_by
        return [name] if name is not None and f"train/{name}" in values else []


class Pace:
    """Wall-clock seconds per step: of the last record, and of all whose interval holds no compilation.

    No time left is said before there is one: with the compilation in it, the first would say hours for minutes.
    So would it with the loading of the model and the evaluation before the first step.
    """

    def __init__(self, step: int) -> None:
        self._last, self._has_begun = (step, time.monotonic()), False
        self._steps, self._seconds = 0, 0.0
        self.last_seconds_per_step = math.nan

    @property
    def seconds_per_step(self) -> float:
        """Return the mean over the records without compilation; NaN before the first."""
        return self._seconds / self._steps if self._steps else math.nan

    def begin(self) -> None:
        """Note that the first steps begin now; later stages begin within the time of the steps."""
        if not self._has_begun:
            self._last, self._has_begun = (self._last[0], time.monotonic()), True

    def advance(self, step: int, *, is_steady: bool) -> None:
        """Note a record at `step`, made now; `is_steady` where nothing compiled since the last."""
        now = (step, time.monotonic())
        steps, seconds = step - self._last[0], now[1] - self._last[1]
        self.last_seconds_per_step = seconds / steps if steps > 0 else math.nan
        if is_steady:
            self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._last, self._has_begun = now, True


def _number(values: dict[str, float], key: str, spec: str) -> str:
    """Format the value by `spec`, or return a dash of the same width."""
    return format(values[key], spec) if key in values else f"{'-':>{spec[0]}}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "-:--:--"


def _postfix(values: dict[str, float]) -> str:
    parts = [f"loss {values['train/loss']:.4f}"]
    if "train/lr" in values:
        parts.append(f"lr {values['train/lr']:.2e}")
    if "perf/tokens_per_second" in values:
        parts.append(f"{values['perf/tokens_per_second']:,.0f} tok/s")
    return ", ".join(parts)
