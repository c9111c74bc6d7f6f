"""task=report: compare runs on one HTML page; needs no device and loads no torch."""

from contextlib import suppress

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ReportTaskConfig
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.report.page import report_page
from tpu_experiments.tasks.report.runs import Run, find_runs
from tpu_experiments.tasks.report.watch import server_of

REPORTS = "reports"


def run(config: Config) -> None:
    """Write `<output_dir>/reports/<name>/report.html` and print its path; with `task.watch` serve it until Ctrl-C.

    Raises:
        ConfigError: `task.runs` has no runs, or none is called `task.baseline`.
    """
    settings = config.task
    assert isinstance(settings, ReportTaskConfig)
    if settings.watch:
        watch(config, settings)
        return
    with explain_storage_errors(config.output_dir):
        text, runs = built(config, settings)
        folder = paths.join(config.output_dir, REPORTS, str(config.name))
        paths.make_dirs(folder)
        file = paths.join(folder, "report.html")
        paths.write_text_atomic(file, text)
    for each in runs:
        loss = each.value("eval_loss")
        print(for_terminal(f"  {each.label}: {each.status}") + ("" if loss is None else f", held-out loss {loss:.4f}"))
    print(f"report: {file}")


def built(config: Config, settings: ReportTaskConfig) -> tuple[str, list[Run]]:
    """Return the page of the runs as they are now, and the runs.

    Raises:
        ConfigError: as `run`.
    """
    runs = find_runs(settings.runs or [config.output_dir])
    title = str(config.name) if settings.runs else f"Runs of {config.output_dir}"
    return report_page(runs, baseline=chosen_baseline(runs, settings.baseline), title=title), runs


def watch(config: Config, settings: ReportTaskConfig) -> None:
    """Serve the page until Ctrl-C; runs that begin meanwhile are on it."""

    def build() -> tuple[str, list[Run]]:
        with explain_storage_errors(config.output_dir):
            return built(config, settings)

    with server_of(settings, build) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


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
