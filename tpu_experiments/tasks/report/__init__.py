"""task=report: compare runs on one HTML page; needs no device and loads no torch."""

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ReportTaskConfig
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.report.page import report_page
from tpu_experiments.tasks.report.runs import Run, find_runs

REPORTS = "reports"


def run(config: Config) -> None:
    """Write `<output_dir>/reports/<name>/report.html` and print its path.

    Raises:
        ConfigError: `task.runs` has no runs, or none is called `task.baseline`.
    """
    settings = config.task
    assert isinstance(settings, ReportTaskConfig)
    with explain_storage_errors(config.output_dir):
        runs = find_runs(settings.runs or [config.output_dir])
        baseline = chosen_baseline(runs, settings.baseline)
        title = str(config.name) if settings.runs else f"Runs of {config.output_dir}"
        folder = paths.join(config.output_dir, REPORTS, str(config.name))
        paths.make_dirs(folder)
        file = paths.join(folder, "report.html")
        paths.write_text_atomic(file, report_page(runs, baseline=baseline, title=title))
    for each in runs:
        loss = each.value("eval_loss")
        print(for_terminal(f"  {each.label}: {each.status}") + ("" if loss is None else f", held-out loss {loss:.4f}"))
    print(f"report: {file}")


def chosen_baseline(runs: list[Run], name: str | None) -> Run:
    """Return the run of that name, else the first.

    Raises:
        ConfigError: no run or several have that name.
    """
    if name is None:
        return runs[0]
    found = [run for run in runs if name in (run.label, run.config.get("name"))]
    if len(found) != 1:
        known = ", ".join(run.label for run in runs)
        raise ConfigError(f"task.baseline={name}; {len(found)} of the runs are called so; name one of: {known}.")
    return found[0]
