"""task=doctor: check whether training with this config would start on this machine.

It leaves nothing behind and holds no device.
"""

import dataclasses
import logging
import sys
import textwrap
from collections.abc import Sequence

from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.doctor.examination import Result, examine, would_start

WIDTH = 118
NAMES = 17
VERDICTS = 13


def run(config: Config) -> None:
    """Print the report; exit code 0 training would start, 1 it would not.

    Raises:
        ConfigError: `task.json` cannot be written.
    """
    task = config.task
    assert isinstance(task, DoctorTaskConfig), "conf/task/doctor.yaml has this schema"
    logging.disable(logging.WARNING)  # the report shows as verdicts what the called code would log
    try:
        results = examine(config, task)
    finally:
        logging.disable(logging.NOTSET)
    print(for_terminal(report(results, config=config)))
    if task.json is not None:
        with explain_storage_errors(task.json):
            paths.make_dirs(task.json.rpartition("/")[0] or ".")
            paths.write_text_atomic(task.json, strict_json.dumps(fields(results, config=config), indent=1) + "\n")
    if not would_start(results):
        sys.exit(1)


def report(results: Sequence[Result], *, config: Config) -> str:
    """Return one or more lines for each check, then the conclusion."""
    lines = []
    for result in results:
        finding = result.finding
        head = f"{result.name:<{NAMES}}{finding.verdict:<{VERDICTS}}"
        text = f"{finding.seen}{'. -> ' + finding.remedy if finding.remedy else ''}"
        wrapped = textwrap.wrap(text, WIDTH - len(head), break_on_hyphens=False, break_long_words=False)
        lines.append(head + f"\n{' ' * len(head)}".join(wrapped))
    return "\n".join([*lines, conclusion(results, config=config)])


def conclusion(results: Sequence[Result], *, config: Config) -> str:
    """Return the conclusion in one sentence."""
    bad = [result.name for result in results if result.finding.verdict == "failed"]
    if bad:
        return f"training with this config would not start on this machine: {', '.join(bad)}"
    left_out = [result.name for result in results if result.finding.verdict == "not checked"]
    unsure = f" (not checked: {', '.join(left_out)})" if left_out else ""
    return f"nothing found that would keep name={config.name} from starting{unsure}"


def fields(results: Sequence[Result], *, config: Config) -> dict[str, object]:
    """Return the content of the JSON report."""
    checks = {r.name: dataclasses.asdict(r.finding) | {"seconds": round(r.seconds, 2)} for r in results}
    return {"would_start": would_start(results), "name": config.name, "hw": config.hw.name, "checks": checks}
