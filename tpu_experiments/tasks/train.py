"""task=train: prepare the inputs, start the processes, train, and report.

User errors are found before the run folder is created and before a device is used.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tpu_experiments.callbacks.base import Ended
from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.store import COMMIT, latest_step, verify_newest
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.defaults import is_open
from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.hardware import LIBTPU_INIT_ARGS
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.loggers.base import LoggerContext, Loggers, MetricLogger
from tpu_experiments.loggers.closing_lines import print_if_finished, summary
from tpu_experiments.loggers.plan_estimates import PlanEstimates
from tpu_experiments.loggers.provenance import provenance, write_provenance
from tpu_experiments.loggers.runlog import start_run_log, stop_run_log
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.rewards.pool import source_sha256
from tpu_experiments.runtime.base import Runtime, device_name
from tpu_experiments.runtime.processes.env import change_flags
from tpu_experiments.runtime.processes.faults import is_lost
from tpu_experiments.runtime.processes.hosts import HostLost, Hosts, rendezvous
from tpu_experiments.runtime.processes.launch import launch
from tpu_experiments.storage import lease, retry
from tpu_experiments.storage.process import started_seconds
from tpu_experiments.storage.retry import StorageFailed, complaint, explain_storage_errors, is_explained
from tpu_experiments.storage.run_folder import RunFolder, has_begun, has_other_length, open_run, with_settings_of_run
from tpu_experiments.storage.spool import Spool, key_of, set_spill_folder
from tpu_experiments.tasks.open_settings import with_open_settings
from tpu_experiments.tasks.setup import require_same_data, require_shared, set_up
from tpu_experiments.training.alone import Alone
from tpu_experiments.training.batches import RunInputs, expected_programs, num_steps, prepared_folder
from tpu_experiments.training.callbacks import Callbacks
from tpu_experiments.training.length import NewLength, lengthen, new_length
from tpu_experiments.training.lives import Ledger, Shares
from tpu_experiments.training.outputs import RunOutputs, write_pages
from tpu_experiments.training.rl import trainer_class
from tpu_experiments.training.stop import STOPPED_EXIT_CODE, StoppedByRequest, ending_in_time, parting

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Train; exit code 0 finished, 2 refused, 75 stopped on request (the same command resumes), 1 failed.

    Raises:
        ConfigError: something the user can fix; nothing was written.
    """
    hosts = Hosts()
    try:
        hosts = rendezvous(config.hw)
        train(config, hosts)
    except HostLost as error:
        print(f"error: {error} The same command, on every host, resumes the run.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # a regular exit would wait for programs that run over all hosts
    except ConfigError:
        hosts.announce_end()
        raise
    except SystemExit as ending:
        if ending.code == STOPPED_EXIT_CODE:
            hosts.announce_end()
        raise
    hosts.announce_end()


@dataclass
class Start:
    """A run whose inputs are there and checked; nothing of it is written yet."""

    config: Config
    folder: RunFolder
    inputs: RunInputs
    length: NewLength | None
    """Where the command changes the length of a run that exists; otherwise None."""
    seconds: dict[str, float]
    """Time taken so far, by what it was for."""
    arguments: Sequence[str]
    """Command line of the run, without the program."""


def train(config: Config, hosts: Hosts) -> None:
    """Train on every host; only the first one writes."""
    start_run_log(None, rank=hosts.rank)
    start = start_of(config, hosts)
    if start is None:
        return
    with ending_in_time(), ExitStack() as stack:
        hold(start, hosts, stack)
        with parting(config.checkpoint.grace_seconds):
            launch(train_process, start.config, start, started_seconds())
    hosts.barrier()
    if hosts.rank == 0:
        print(for_terminal(closing_lines(start)))


def start_of(
    config: Config, hosts: Hosts, *, arguments: Sequence[str] | None = None, said: set[str] | None = None
) -> Start | None:
    """Return the run, ready to be begun; None where it is finished, which is said.

    Args:
        arguments: its command line, where that is not this process's.
        said: findings of the audit that another run of this process has logged (`set_up`).

    Raises:
        ConfigError: something the user can fix; nothing was written.
    """
    watch, prepared_for = Stopwatch(), config.hw
    with watch.measure("setup"), explain_storage_errors(prepared_folder(config), full="failed"):
        config = hosts.together(lambda: with_rows(config))
    change_flags(prepared_for, config.hw)
    if config.hw.device == "tpu":
        log.info("flags of libtpu: %s", os.environ.get(LIBTPU_INIT_ARGS, ""))
    with explain_storage_errors(config.output_dir):
        folder = hosts.together(lambda: open_run(config, may_lengthen=True))
        is_longer = hosts.together(lambda: has_other_length(folder, config))
        if folder.finished() is not None and not is_longer:  # with one host, run.py has checked this before
            hosts.on_first_host(lambda: print_if_finished(config))
            return None
        hosts.on_first_host(lambda: lease.refuse_if_held(folder.path(), name=folder.name))
    with watch.measure("setup"):
        with explain_storage_errors(config.output_dir):
            verify_newest(folder.path("checkpoints"), hosts)
        with explain_storage_errors(prepared_folder(config), full="failed"):
            inputs = hosts.together(lambda: set_up(config, folder, said=said))
            length = hosts.together(lambda: new_length(folder, inputs, config)) if is_longer else None
        require_same_data(hosts, inputs)
    return Start(config, folder, inputs, length, dict(watch.seconds), sys.argv[1:] if arguments is None else arguments)


def hold(start: Start, hosts: Hosts, stack: ExitStack) -> None:
    """Take the run's lease until `stack` ends, and create its folder."""
    folder = start.folder
    held = lease.hold(folder.path(), name=folder.name, on_lost=exit_after_losing_lease)
    hosts.on_first_host(lambda: stack.enter_context(held))
    with explain_storage_errors(start.config.output_dir):
        hosts.on_first_host(lambda: begin(folder, start.config, start.length))
        hosts.together(lambda: require_shared(folder, hosts))


def closing_lines(start: Start, *, said: set[str] | None = None) -> str:
    """Return the summary of a run that has ended.

    Args:
        said: findings that the summary of another run of this process has; receives those of this one.
    """
    result = start.folder.finished()
    assert result is not None, "the run ended without result.json"
    if said is not None:
        new = [finding for finding in result["findings"] if finding["message"] not in said]
        said.update(finding["message"] for finding in new)
        result = {**result, "findings": new}
    return summary(result, folder=start.folder, arguments=start.arguments)


def with_rows(config: Config) -> Config:
    """Return the config with its rows and speed settings.

    A resumed run keeps its own. Otherwise, where the command leaves them open, the rows fit the data and the settings
    are the fastest known for them.

    Raises:
        ConfigError: a source cannot be read, or the rows are known not to fit into the chips' memory.
    """
    with explain_storage_errors(config.output_dir):
        found, is_begun = with_settings_of_run(config), has_begun(config)
    found = with_open_settings(found, is_begun=is_begun)
    if config.hw.chip is not None and is_open(config):
        from tpu_experiments.planning.check import check_memory

        check_memory(found)
    return found


def begin(folder: RunFolder, config: Config, length: NewLength | None) -> None:
    """Create the run folder, and upload what an earlier process spilled to this machine.

    A spill is left here by a process that was killed during a storage outage.
    """
    if length is not None:
        spool_of(folder).deliver()
        lengthen(folder, config, length)
    folder.create(config)
    spool_of(folder).deliver()


def exit_after_losing_lease() -> None:
    """Exit immediately: another process owns the run, so nothing may be written, not even a checkpoint."""
    os._exit(1)


def spool_of(folder: RunFolder) -> Spool:
    """Return the local spill of the run's checkpoints, used while its folder is unreachable."""
    key = key_of(folder.path(), identity=folder.identity_path)
    return Spool(folder.path("checkpoints"), key=key, marker=COMMIT)


def train_process(
    runtime: Runtime,
    config: Config,
    start: Start,
    began: float,
    seat: Alone | None = None,
) -> None:
    """Train in one process of the run.

    Args:
        began: start of the first process, in seconds since boot.
        seat: the run's place in a pack, in whose thread it is.
    """
    folder = start.folder
    watch = Stopwatch()
    watch.seconds.update(start.seconds)
    outputs: RunOutputs | None = None
    argv = [sys.argv[0], *start.arguments]
    kind = trainer_class(config)
    seat = seat or Alone()
    ended: Ended = "failed"
    why = ""
    close_log: Callable[[], None] = stop_run_log
    try:
        close_log = seat.open_log(folder, rank=runtime.rank)
        outputs = make_outputs(
            runtime, config, start.inputs, folder, watch=watch, began=began, argv=argv, shares=seat.shares
        )
        trainer = kind(config, runtime, inputs=start.inputs, outputs=outputs, watch=watch)
        trainer.seat = seat
        trainer.run()
        ended = "finished"
    except StoppedByRequest as request:
        ended, why = "stopped", str(request) or "on request"
        end(runtime, outputs, folder=folder, close_log=close_log, ended=ended, why=why)
        by = f"by {request}" if str(request) else "on request"
        print_once(runtime, f"stopped {by}; the same command resumes from {folder.path('checkpoints')}")
        sys.exit(STOPPED_EXIT_CODE)
    except (TrainingStopped, StorageFailed) as error:
        why = str(error)
        print_once(runtime, f"error: {error}")
        sys.exit(1)
    except Exception as error:
        why = one_line(error)
        if is_lost(error):
            with suppress(Exception):  # the storage may be gone too
                step = resume_step(folder)
                newest = (
                    f"the newest complete checkpoint is that of step {step}" if step else "no checkpoint is complete"
                )
                print_once(runtime, newest)
        if not is_explained(error, place=folder.path()):
            raise
        print_once(runtime, f"error: {complaint(error, place=folder.path())} The same command resumes.")
        sys.exit(1)
    finally:
        end(runtime, outputs, folder=folder, close_log=close_log, ended=ended, why=why)


def end(
    runtime: Runtime,
    outputs: RunOutputs | None,
    *,
    folder: RunFolder,
    close_log: Callable[[], None],
    ended: Ended = "failed",
    why: str = "",
) -> None:
    """Close all outputs; storage that is still unreachable is reported in one sentence.

    Callbacks are told last but for run.log, so that the records are whole by then.
    """
    retry.only_uploads_remain()
    complaints: list[str] = []
    closing = [] if outputs is None else [lambda: outputs.close(ended), lambda: outputs.tell_end(ended, why)]
    for close in (*closing, close_log):
        try:
            close()
        except StorageFailed as error:
            complaints.append(str(error))
        except Exception as error:
            if not is_explained(error, place=folder.path()):
                raise
            complaints.append(complaint(error, place=folder.path()))
    if complaints:
        print_once(runtime, f"error: {complaints[0]}")


def make_outputs(
    runtime: Runtime,
    config: Config,
    inputs: RunInputs,
    folder: RunFolder,
    *,
    watch: Stopwatch,
    began: float,
    argv: list[str],
    shares: Shares | None = None,
) -> RunOutputs:
    """Return loggers, ledger, provenance and plan of the run; only rank 0 writes.

    Args:
        shares: of the machine's time, where other runs are in the same program.
    """
    facts = provenance(config, device=device_name(runtime), argv=argv)
    facts["start"] = inputs.start.lineage() if inputs.start is not None else None
    if config.objective.samples_rollouts:
        facts["rewards"] = {name: source_sha256(reward) for name, reward in config.rollout.rewards.items()}
    estimates = plan_estimates(config, inputs.stages, rank=runtime.rank)
    loggers = make_loggers(config, folder, inputs) if runtime.rank == 0 else None
    spool = spool_of(folder)
    set_spill_folder(spool.records, run=folder.path())
    if loggers is not None:
        write_provenance(folder, facts)
        write_pages(folder, inputs=inputs, estimates=estimates, loggers=loggers, is_new=not resume_step(folder))
        if num_programs := expected_programs(inputs, config):
            log.info("expecting %d compiled programs in all", num_programs)

    def compile_seconds() -> float:
        return runtime.counters().compile_seconds

    ledger, callbacks = None, None
    if runtime.rank == 0:
        ledger = Ledger(folder, config.hw, watch=watch, began=began, compile_seconds=compile_seconds, shares=shares)
        if config.callbacks:
            callbacks = Callbacks(config, folder, total_steps=total_steps(inputs, config), ledger=ledger)
    return RunOutputs(
        config,
        folder,
        inputs=inputs,
        loggers=loggers,
        provenance=facts,
        estimates=estimates,
        ledger=ledger,
        spool=spool,
        reopen_loggers=lambda: make_loggers(config, folder, inputs),
        callbacks=callbacks,
    )


def plan_estimates(config: Config, stages: Sequence[Stage], *, rank: int) -> PlanEstimates:
    """Return the plan's estimates; without a chip to plan for, nothing is imported for them."""
    if config.hw.chip is None or rank > 0:
        return PlanEstimates(reason=f"hw={config.hw.name} has no chip to plan for")
    from tpu_experiments.planning.estimates import estimates_of

    return estimates_of(config, stages)


def print_once(runtime: Runtime, text: str) -> None:
    """Print once, whatever the number of processes."""
    if runtime.rank == 0:
        print(text, file=sys.stderr)


def make_loggers(config: Config, folder: RunFolder, inputs: RunInputs) -> Loggers:
    """Return every selected logger, initialised with the run's length and resume step.

    One with `on_error = "drop"` that cannot start is left out.
    """
    total, resumed = total_steps(inputs, config), resume_step(folder)
    context = LoggerContext(run_folder=folder, config=config, total_steps=total, resume_step=resumed)
    made: dict[str, MetricLogger] = {}
    for name, logger in config.logger.items():
        kind = locate(logger._target_, key=f"logger.{name}")
        try:
            made[name] = kind(context, **logger.options)
        except ConfigError:
            raise
        except Exception as error:
            if getattr(kind, "on_error", "raise") != "drop":
                raise
            log.warning("logger=%s cannot start and is left out; the run continues without it", name, exc_info=error)
    return Loggers(made)


def total_steps(inputs: RunInputs, config: Config) -> int:
    """Return the optimizer steps of all stages."""
    return sum(num_steps(inputs, stage, config=config) for stage in inputs.stages)


def resume_step(folder: RunFolder) -> int:
    """Return the step of the newest complete checkpoint, 0 without one."""
    return latest_step(folder.path("checkpoints"))
