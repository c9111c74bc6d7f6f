"""Read run folders for a report: config, records, result and starts, of finished and unfinished runs."""

import glob
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.redaction import redacted
from tpu_experiments.config.yaml_bounds import OF_VALUES, require_bounded
from tpu_experiments.metrics.goodput import Life, account
from tpu_experiments.metrics.ranking import rank, ranking_measure
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.paths import is_glob
from tpu_experiments.storage.run_folder import RESULT
from tpu_experiments.storage.strict_json import BENCHMARKS, RECORD, TEST, shaped
from tpu_experiments.storage.strict_json import RESULT as RESULT_SHAPE

log = logging.getLogger(__name__)
Curve = list[tuple[int, float]]
"""(step, value) pairs in the order of the steps."""
IDENTITY = "identity.json"
TEST_RESULTS = "test_results.json"
HARNESS_RESULTS = "harness_results.json"
SPEED_WINDOW = 10
"""Log records that a speed is averaged over."""


@dataclass(frozen=True)
class Run:
    """Content of a run folder."""

    label: str
    folder: str
    config: dict[str, Any]
    """Flattened config, `key.sub` to value; empty where it cannot be read."""
    records: list[dict[str, Any]]
    result: dict[str, Any] | None
    """Content of result.json; None where the run is not finished."""
    test: dict[str, Any] | None
    """Newest result of task=evaluate; None where there is none."""
    account: dict[str, Any] | None
    """Seconds, shares and dollars over all starts (metrics/goodput.py); None where unknown."""
    benchmarks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Newest figures of lm-evaluation-harness, by task and figure: `value`, and `low` and `high` of its interval."""

    def curve(self, key: str) -> Curve:
        """Return the finite values of a record's key."""
        return [(record["step"], float(record[key])) for record in self.records if _is_number(record.get(key))]

    def speed(self) -> Curve:
        """Return tokens per second, averaged over `SPEED_WINDOW` records, weighted by their seconds.

        A single record's speed is as uneven as the arrival of values from the device.
        """
        known = [
            (record["step"], float(record["perf/tokens_per_second"]), float(record["perf/step_seconds"]))
            for record in self.records
            if _is_number(record.get("perf/tokens_per_second")) and record.get("perf/step_seconds")
        ]
        found = []
        for end, (step, _, _) in enumerate(known, start=1):
            window = known[max(end - SPEED_WINDOW, 0) : end]
            found.append((step, sum(rate * s for _, rate, s in window) / sum(s for _, _, s in window)))
        return found[min(SPEED_WINDOW, len(found)) - 1 :]

    @property
    def held_out(self) -> tuple[tuple[str, ...], float] | None:
        """Return sources of the final evaluation and the number of pairs, answers, texts or tokens; None if unknown.

        Losses over different sources or numbers are not comparable.
        """
        result = self.result or {}
        names = ("eval_pairs", "eval_answers", "eval_texts", "eval_tokens")
        number = next((result[name] for name in names if result.get(name) is not None), None)
        return None if number is None else (tuple(sorted(result.get("eval_sources") or ())), number)

    @property
    def measure(self) -> tuple[str, float] | None:
        """Return name and value of the held-out measure that ranks the run; None where its loss does."""
        return ranking_measure(self.result or {})

    @property
    def rank(self) -> tuple[float, float]:
        """Return a sort key, lowest for the best."""
        return rank(None if self.measure is None else self.measure[1], self.value("eval_loss"))

    @property
    def last_step(self) -> int:
        """Return the step of the newest record."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def status(self) -> str:
        """Return `finished`, or the last step."""
        return "finished" if self.result is not None else f"not finished, step {self.last_step}"

    def value(self, name: str) -> float | None:
        """Return a number of result.json or, for an unfinished run, of its records."""
        if self.result is not None:
            found = self.result.get(name)
            return float(found) if found is not None and _is_number(found) else None
        curve = self.curve("eval/loss")
        known = {"eval_loss_before": curve[:1], "eval_loss": curve[1:][-1:]}
        known["tokens_per_second"] = self.speed()[-1:]
        return known[name][0][1] if known.get(name) else None


def find_runs(given: Sequence[str]) -> list[Run]:
    """Return the runs in the given folders and patterns, each once, in that order.

    Raises:
        ConfigError: one of them has no run.
    """
    folders: dict[str, None] = {}
    for name in given:
        found = [run for place in places(name) for run in run_folders(place)]
        if not found:
            raise ConfigError(
                f"task.runs={name}; there is no run in it (a folder with {IDENTITY}); name a run folder, a sweep's "
                "folder or a pattern such as 'outputs/tiny_*'."
            )
        folders |= dict.fromkeys(found)
    return [read_run(folder, label=label) for folder, label in zip(folders, labels(list(folders)), strict=True)]


def places(name: str) -> list[str]:
    """Return the folders that match a name or pattern."""
    if not is_glob(name) or paths.exists(name):  # a folder may be called so
        return [name]
    if not paths.is_remote(name):
        return sorted(glob.glob(name))
    filesystem, key = paths.filesystem_of(name)
    protocol = name.partition("://")[0]
    return sorted(f"{protocol}://{found}" for found in filesystem.glob(key))


def run_folders(place: str) -> list[str]:
    """Return the folder itself if it is a run's, else the run folders in it."""
    if paths.exists(paths.join(place, IDENTITY)):
        return [place]
    try:
        children = [paths.join(place, name) for name in sorted(paths.list_names(place), key=by_numbers)]
    except NotADirectoryError:
        return []
    return [child for child in children if paths.exists(paths.join(child, IDENTITY))]


def by_numbers(name: str) -> list[tuple[float, str]]:
    """Return a sort key that puts `lora.r=4` before `lora.r=16`."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", name)
    return [(float(part), "") if at % 2 else (0.0, part) for at, part in enumerate(parts)]


def labels(folders: Sequence[str]) -> list[str]:
    """Return the shortest path suffixes, of equal depth, that are unique."""
    parts = [folder.rstrip("/").split("/") for folder in folders]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(found):
            return found
    return list(folders)


def read_run(folder: str, *, label: str) -> Run:
    """Read a run folder; missing or incomplete files count as empty."""
    config = _config(paths.join(folder, "config.yaml"))
    records = []
    for line in (_text(paths.join(folder, "metrics.jsonl")) or "").split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the last line of a run that writes
            continue
        found = shaped(record, RECORD)
        if found and "step" in found:
            records.append(found)
    result = shaped(_json(paths.join(folder, RESULT)), RESULT_SHAPE)
    if result is not None and result.get("status") != "finished":
        result = None
    kept = ((result or {}).get("goodput") or {}).get("run")
    test = shaped(_json(paths.join(folder, TEST_RESULTS)), TEST)
    told = (shaped(_json(paths.join(folder, HARNESS_RESULTS)), BENCHMARKS) or {}).get("benchmarks") or {}
    benchmarks = {name: found for name, each in told.items() if (found := each.get("trained") or each.get("base"))}
    known = redacted(flatten(config))
    return Run(label, folder, known, records, result, test, kept or _account(folder), benchmarks)


def _config(file: str) -> Any:
    """Return a run's config.yaml as plain data; nothing is resolved or imported, and its size is bounded.

    Raises:
        ConfigError: expanded, it is larger than any config.
    """
    try:
        text = _text(file) or ""
        require_bounded(text, place=file)
        return yaml.safe_load(text) or {}
    except ConfigError:
        raise
    except (yaml.YAMLError, *OF_VALUES) as error:
        log.warning("%s is skipped: it is not YAML (%s)", file, str(error).partition("\n")[0])
        return {}


def _account(folder: str) -> dict[str, Any] | None:
    """Return the account of an unfinished run, from the starts recorded so far."""
    lives = []
    for name in paths.list_names(paths.join(folder, "lives")):
        try:
            lives.append(Life.of(_json(paths.join(folder, "lives", name))))
        except (TypeError, ValueError):  # torn, or changed
            continue
    return account(lives) if lives else None


def _text(file: str) -> str | None:
    try:
        return paths.read_bytes(file).decode("utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return None


def _json(file: str) -> dict[str, Any] | None:
    text = _text(file)
    try:
        value = None if text is None else strict_json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
