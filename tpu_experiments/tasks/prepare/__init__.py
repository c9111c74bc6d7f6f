"""task=prepare: write every selected source as rows on disk, with an audit as table, JSON and HTML.

With `task.teacher` it also writes what a teacher predicts of the rows (teacher.py).
"""

from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.data.audit.page import audit_pages, write_audit_pages
from tpu_experiments.data.audit.summary import Manifest, audit_json, audit_table
from tpu_experiments.data.prepared import PreparedSource
from tpu_experiments.data.steps.epochs import write_epochs
from tpu_experiments.data.steps.workers import start_server
from tpu_experiments.loggers.runlog import terminal_log
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.prepare.teacher import teacher_of, write_predictions
from tpu_experiments.tasks.setup import prompts_of
from tpu_experiments.training.batches import (
    RunInputs,
    load_run_tokenizer,
    prepare_sources,
    prepared_folder,
    stages_with_data,
)
from tpu_experiments.training.row_lengths import measure_rows


def run(config: Config) -> None:
    """Prepare, audit and print the table; a repeated command reuses what is on disk.

    Raises:
        ConfigError: something the user can fix.
        StorageFailed: the disk is full.
    """
    folder = prepared_folder(config)
    with terminal_log(), explain_storage_errors(folder, full="failed"):
        subject = teacher_of(config)
        config, inputs, manifests, page = _prepare(config, folder)
        print(for_terminal(audit_table(manifests)))
        _print_folders(inputs.sources, page=page)
        write_predictions(config, inputs, subject)


def _prepare(config: Config, folder: str) -> tuple[Config, RunInputs, list[Manifest], str]:
    """Return the config with measured rows, the prepared sources, their manifests and the path of the audit's page."""
    if config.prepare.engine == "local":
        start_server()  # its imports overlap with loading the tokenizer here
    config = measure_rows(config)
    stages = stages_with_data(config)
    tokenizer = load_run_tokenizer(config)
    sources = prepare_sources(config, tokenizer=tokenizer, stages=stages, verify="all")
    prompts_of(config, stages, tokenizer=tokenizer)
    for stage in stages:
        write_epochs(stage, sources=sources, settings=config.prepare, seed=config.seed, folder=folder)
    manifests: list[Manifest] = [m for source in sources.values() for m in source.manifests.values()]
    stores = {(s.name, length): s.store("train", length) for s in sources.values() for length in s.manifests}
    name, target = str(config.name), paths.join(folder, "audit")
    pages = audit_pages(manifests, stores=stores, tokenizer=tokenizer, name=name)
    write_audit_pages(target, pages)
    paths.write_text_atomic(
        paths.join(target, f"{name}.json"), strict_json.dumps(audit_json(manifests), indent=1) + "\n"
    )
    return config, RunInputs(tokenizer, sources, stages), manifests, paths.join(target, f"{name}.html")


def _print_folders(sources: dict[str, PreparedSource], *, page: str) -> None:
    for source in sources.values():
        for length, folder in source.folders.items():
            print(for_terminal(f"data.{source.name}, rows of {length}: {folder}"))
    print(f"audit: {page}")
