"""task=train: prepare the inputs, start the processes, train, report.

Everything a user can get wrong is found before the run folder is made and before a device is touched.
"""

import importlib.util
import inspect
import logging
import os
import sys
from typing import Any

from tpu_experiments.checkpoint.store import COMMIT, latest_progress, latest_step
from tpu_experiments.config.build import locate
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.schema import Config
from tpu_experiments.data.steps.epochs import write_epochs
from tpu_experiments.io import grace, lease
from tpu_experiments.io.folder import RunFolder, open_run
from tpu_experiments.io.mirror import keep_in
from tpu_experiments.io.process import started_seconds
from tpu_experiments.io.retry import StorageFailed, complaint, is_told, told
from tpu_experiments.io.spool import Spool, key_of
from tpu_experiments.logging.base import LoggerContext, Loggers
from tpu_experiments.logging.promise import Promise
from tpu_experiments.logging.provenance import provenance, write_provenance
from tpu_experiments.logging.runlog import start_run_log, stop_run_log
from tpu_experiments.metrics.stopwatch import Stopwatch
from tpu_experiments.models.build import describe, shapes_of_base
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.launch import launch
from tpu_experiments.runtime.sharding import ShardingTable, check_heads
from tpu_experiments.training.chosen import require_choices
from tpu_experiments.training.inputs import RunInputs, expected_programs, num_steps, stage_rows
from tpu_experiments.training.lives import Ledger
from tpu_experiments.training.outputs import RunOutputs
from tpu_experiments.training.pages import write_pages
from tpu_experiments.training.sources import prepare_sources, prepared_folder, stages_of, tokenizer_for
from tpu_experiments.training.stop import STOPPED_EXIT_CODE, StoppedByRequest, ending_in_time, parting
from tpu_experiments.training.summary import summary
from tpu_experiments.training.window import TrainingStopped

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Train; exit code 0 finished, 2 refused, 75 stopped on request (the same command goes on), 1 failed.

    Raises:
        ConfigError: something the user can mend; nothing was written.
    """
    watch = Stopwatch()
    with told(config.output_dir):
        folder = open_run(config)
        finished = folder.finished()
        lease.refuse_if_held(folder.path(), name=folder.name)
    if finished is not None:
        print(summary(finished, folder=folder))
        print(f"name={config.name} was finished before; nothing was run. Give another name= to train again.")
        return
    start_run_log(None, rank=0)
    with watch.measure("setup"):
        check_loggers(config)
        vocab_size = check_model(config)
        inputs = make_inputs(config)
        check_ids(config, inputs, vocab_size=vocab_size)
        check_data(folder, inputs)
        for stage in inputs.stages:
            stage_rows(inputs, stage, config=config)  # refuses too few written epochs
    with ending_in_time(), lease.held(folder.path(), name=folder.name, on_lost=end_at_once):
        with told(config.output_dir):
            folder.create(config)
            spool_of(folder).deliver()  # what a life that was killed in an outage had left on this machine
        with parting(config.checkpoint.grace_seconds):
            launch(train_process, config, inputs, folder, dict(watch.seconds), started_seconds())
    result = folder.finished()
    assert result is not None, "the run ended without result.json"
    print(summary(result, folder=folder))


def end_at_once() -> None:
    """The run belongs to another process: nothing more may be written, not even a checkpoint."""
    os._exit(1)


def spool_of(folder: RunFolder) -> Spool:
    """Where the checkpoints of the run are kept while its folder is out of reach."""
    key = key_of(folder.path(), identity=folder.identity_path)
    return Spool(folder.path("checkpoints"), key=key, marker=COMMIT)


def make_inputs(config: Config) -> RunInputs:
    """Tokenizer, prepared rows of every source at every length, written epochs, and the stages."""
    stages = stages_of(config)
    tokenizer = tokenizer_for(config)
    sources = prepare_sources(config, tokenizer=tokenizer, stages=stages)
    written = {}
    if config.loader.order == "written":
        folder = prepared_folder(config)
        for stage in stages:
            written[stage.index] = write_epochs(
                stage, sources=sources, settings=config.prepare, seed=config.seed, folder=folder
            )
    return RunInputs(tokenizer, sources, stages, written)


def check_model(config: Config) -> int:
    """What only the model's own config can tell: lengths, adapter targets, sharding rules; returns its vocabulary.

    Raises:
        ConfigError: one of them does not go with the model.
    """
    source = locate(config.model._target_, key="model")(config.model, seed=config.seed)
    limit = getattr(source.config, "max_position_embeddings", None)
    for stage in resolve_stages(config):
        if limit is not None and stage.geometry.seq_len > limit:
            raise ConfigError(
                f"trainer.seq_len={stage.geometry.seq_len} (stage {stage.name}) is longer than "
                f"model.path={config.model.path} allows (max_position_embeddings={limit}); use {limit} or less."
            )
    module, report = describe(source, lora=config.lora)
    source.require_weights(shapes_of_base(module))
    require_choices(resolve_stages(config), [name for name, p in module.named_parameters() if p.requires_grad])
    log.info("%s: %s", config.model.name, report)
    if config.hw.parallel == "spmd":
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        mesh = mesh_of(config.hw, config.sharding)
        ShardingTable(config.sharding, mesh=mesh).check(shapes)
        check_heads(mesh, source.config)
    return int(source.config.vocab_size)


def check_ids(config: Config, inputs: RunInputs, *, vocab_size: int) -> None:
    """Refuse rows with a token the model has no embedding for: on XLA it would be read as another one, silently.

    Raises:
        ConfigError: tokenizer and model do not belong together.
    """
    for name, source in inputs.sources.items():
        if source.max_token_id >= vocab_size:
            raise ConfigError(
                f"data.{name} has token id {source.max_token_id} and model={config.model.name} has {vocab_size} "
                "embeddings; set model.tokenizer_path to the tokenizer this model was trained with."
            )


def check_data(folder: RunFolder, inputs: RunInputs) -> None:
    """Refuse to go on with other data than the newest checkpoint was trained on.

    Raises:
        ConfigError: the audit hash of a source differs from the one in the checkpoint.
    """
    found = latest_progress(folder.path("checkpoints"))
    if found is None:
        return
    step, progress = found
    before, now = progress["data"], inputs.audit_hashes
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        shown = ", ".join(f"{key} {before.get(key)} then, {now.get(key)} now" for key in changed)
        raise ConfigError(
            f"name={folder.name}; its checkpoint of step {step} was trained on other data (audit hash of {shown}); "
            "restore the files, tokenizer and rules of data preparation, or choose another name=."
        )


def train_process(
    runtime: Runtime, config: Config, inputs: RunInputs, folder: RunFolder, seconds: dict[str, float], began: float
) -> None:
    """What every process of the run does; `began`: when the first of them did, in seconds since the boot."""
    watch = Stopwatch()
    watch.seconds.update(seconds)
    start_run_log(folder, rank=runtime.rank)
    outputs = make_outputs(runtime, config, inputs, folder, watch=watch, began=began)
    trainer: Any = locate(config.trainer._target_, key="trainer")
    try:
        trainer(config, runtime, inputs=inputs, outputs=outputs, watch=watch).run()
    except StoppedByRequest:
        end(runtime, outputs, ended="stopped")
        say(runtime, f"stopped on request; the same command goes on from {folder.path('checkpoints')}")
        sys.exit(STOPPED_EXIT_CODE)
    except (TrainingStopped, StorageFailed) as error:
        say(runtime, f"error: {error}")
        sys.exit(1)
    except Exception as error:
        if not is_told(error, place=config.output_dir):
            raise
        say(runtime, f"error: {complaint(error, place=folder.path())} The same command goes on.")
        sys.exit(1)
    finally:
        end(runtime, outputs)


def end(runtime: Runtime, outputs: RunOutputs, *, ended: str = "failed") -> None:
    """Close everything that is open; storage that is out of reach even now is told in one sentence."""
    grace.leave()
    told_of: list[str] = []
    for close in (lambda: outputs.close(ended), stop_run_log):
        try:
            close()
        except StorageFailed as error:
            told_of.append(str(error))
        except Exception as error:
            if not is_told(error, place=outputs.folder.path()):
                raise
            told_of.append(complaint(error, place=outputs.folder.path()))
    if told_of:
        say(runtime, f"error: {told_of[0]}")


def make_outputs(
    runtime: Runtime, config: Config, inputs: RunInputs, folder: RunFolder, *, watch: Stopwatch, began: float
) -> RunOutputs:
    """Loggers, ledger and what the run is told before it begins; only rank 0 writes."""
    facts = provenance(config, device=str(runtime.device), argv=sys.argv)
    promise = promised(config, rank=runtime.rank)
    loggers = make_loggers(config, folder, inputs) if runtime.rank == 0 else None
    spool = spool_of(folder)
    keep_in(spool.records, run=folder.path())
    if loggers is not None:
        write_provenance(folder, facts)
        write_pages(folder, inputs=inputs, promise=promise, loggers=loggers, is_new=not resume_step(folder))
        log.info("expecting %d compiled programs in all", expected_programs(inputs, config))
    return RunOutputs(
        config,
        folder,
        inputs=inputs,
        loggers=loggers,
        provenance=facts,
        promise=promise,
        ledger=make_ledger(runtime, config, folder, watch=watch, began=began) if runtime.rank == 0 else None,
        spool=spool,
        reopened=lambda: make_loggers(config, folder, inputs),
    )


def make_ledger(runtime: Runtime, config: Config, folder: RunFolder, *, watch: Stopwatch, began: float) -> Ledger:
    """The account of this life's wall time."""

    def compile_seconds() -> float:
        return runtime.counters().compile_seconds

    return Ledger(folder, config.hw, watch=watch, began=began, compile_seconds=compile_seconds)


def promised(config: Config, *, rank: int) -> Promise:
    """What is planned of this run; a machine without a chip to plan for loads nothing for it."""
    if config.hw.chip is None or rank > 0:
        return Promise(reason=f"hw={config.hw.name} has no chip to plan for")
    from tpu_experiments.planning.promising import promise_of

    return promise_of(config)


def say(runtime: Runtime, text: str) -> None:
    """Print once, whatever the number of processes."""
    if runtime.rank == 0:
        print(text, file=sys.stderr)


def check_loggers(config: Config) -> None:
    """Refuse a logger whose package is missing or whose options it does not take, before anything is written."""
    for name, logger in config.logger.items():
        kind = locate(logger._target_, key=f"logger.{name}")
        package = getattr(kind, "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger={name} needs the package {package}; pip install {package}, or leave it out.")
        try:
            inspect.signature(kind).bind(None, **logger.options)
        except TypeError as error:
            raise ConfigError(f"logger.{name}.options={logger.options}; {kind.__name__} says: {error}.") from error


def make_loggers(config: Config, folder: RunFolder, inputs: RunInputs) -> Loggers:
    """Every selected logger, told how long the run is and where it resumes."""
    total = sum(num_steps(inputs, stage, config=config) for stage in inputs.stages)
    context = LoggerContext(run_folder=folder, config=config, total_steps=total, resume_step=resume_step(folder))
    return Loggers(
        {
            name: locate(logger._target_, key=f"logger.{name}")(context, **logger.options)
            for name, logger in config.logger.items()
        }
    )


def resume_step(folder: RunFolder) -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    return latest_step(folder.path("checkpoints"))
