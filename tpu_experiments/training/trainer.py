"""The trainer: one loop for LoRA, full fine-tuning and all curriculum stages.

A custom trainer is a subclass of `Trainer` that overrides `row_loss`, `build_optimizer` or `evaluate`, selected by
`trainer._target_`; see conf/README.md, "Add a model, a data set, a trainer".
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

from torch import Tensor, nn

from tpu_experiments.callbacks.base import Requests
from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.progress import AnswersRecord, Progress, StageRecord
from tpu_experiments.checkpoint.proof import InitialTensors, LossComparison
from tpu_experiments.checkpoint.saver import Saver
from tpu_experiments.checkpoint.state import (
    Snapshot,
    boxes_needed,
    flat,
    read_state,
    snapshot,
    zero_state,
)
from tpu_experiments.checkpoint.store import latest_step, remove_after, verify_newest
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.defaults import Intervals, costs_of, intervals_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.batches import Batch
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.data.tokens.widths import widths_of
from tpu_experiments.metrics.flops import flops_by_length
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.metrics.norms import grouped
from tpu_experiments.models.adapters.padded import with_adapters
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.bitnet import layers_of, ternary_weights
from tpu_experiments.models.passes.loss import Scores
from tpu_experiments.models.stack.recomputed import is_recomputed
from tpu_experiments.objectives.base import (
    Objective,
    measured_by,
    model_source,
    objective_class,
    objective_of,
    reports,
    samples,
    writes_text,
)
from tpu_experiments.optim.base import Optimizer, State
from tpu_experiments.optim.ema import Averages
from tpu_experiments.optim.muon import Muon, spread_over
from tpu_experiments.optim.updates import Updates, optimizer_of, updates_of
from tpu_experiments.runtime.base import Runtime, UnexpectedProgram
from tpu_experiments.runtime.stacked import is_stack
from tpu_experiments.training.alone import Alone
from tpu_experiments.training.batches import (
    BatchedRows,
    RunInputs,
    StepInfo,
    evaluation_batches,
    has_noise,
    prepared_folder,
    program_shapes,
    referred_rows,
    stage_rows,
    stage_steps,
    stage_tokens,
    step_batches,
    steps_by_stage,
    weights_text,
)
from tpu_experiments.training.canary import HostModel, check_first_gradients
from tpu_experiments.training.epochs import Passes, count
from tpu_experiments.training.evaluation import Evaluation, Evaluator
from tpu_experiments.training.exit_test import apply_exit_test
from tpu_experiments.training.exporting import export_trained, stored_parameters, take_averages
from tpu_experiments.training.forward_canary import check_losses
from tpu_experiments.training.guard import Guard, RollBack
from tpu_experiments.training.merged import MergedCopy
from tpu_experiments.training.meters import Meters, Pending, Reading, Window
from tpu_experiments.training.outputs import RunOutputs
from tpu_experiments.training.profiler import Profiler
from tpu_experiments.training.questions import skill_fields
from tpu_experiments.training.reference import add_reference
from tpu_experiments.training.result import Ending
from tpu_experiments.training.sampling import Prompted
from tpu_experiments.training.start import load_start
from tpu_experiments.training.step import (
    Rows,
    StepOutput,
    TrainStep,
    commit,
    computing_of,
    seed_of,
    stage_tensors,
)
from tpu_experiments.training.stop import StopFlag, StoppedByRequest

log = logging.getLogger(__name__)


Hook = Callable[[Stage, bool], None]
"""What happens between steps: it takes the stage, and whether the step was its last."""
CLOSE_STEPS = 10
"""Steps between log records below which the loop waits for a record before it queues the next step. A read that finds
the next step queued waits for that step too; a short interval would then measure only the dispatch (2.7 million
tokens/s instead of 4,000), and a longer one would be off by a step. The wait costs the trace of one step per record."""


class Trainer:
    """One run in one process; with several processes each has one and only rank 0 writes.

    A plan builds the same parts on placeholders (`build`) and runs nothing.
    """

    seat = Alone()
    """Place in the process: for itself, or, where a pack sets it, among the runs of one program."""

    def __init__(
        self, config: Config, runtime: Runtime, *, inputs: RunInputs, outputs: RunOutputs, watch: Stopwatch
    ) -> None:
        self.config, self.runtime, self.inputs, self.outputs, self.watch = config, runtime, inputs, outputs, watch
        self.objective = self.build_objective()
        if config.objective.reads_reference():
            inputs.reference = {}
        self.stop = StopFlag(config.checkpoint.grace_seconds, agree=runtime.any_process)
        self.saver: Saver
        self.progress = Progress(data=inputs.audit_hashes)
        self.window = Window()
        self.guard = Guard(config.trainer.guard, process=runtime.share)
        self.train_compile_seconds = 0.0  # part of the training time, subtracted for the throughput
        self.train_tokens = 0  # trained by this process; `progress` includes those of earlier processes

    # ---- overridable by custom trainers ---------------------------------------------------------------------

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of supervised tokens of every row, (R,) each."""
        return self.objective.row_loss(module, parameters, rows)

    def token_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return evaluation's token scores for the loss of `row_loss`; unused where that is overridden."""
        return self.objective.scores(module, parameters, rows)

    def build_objective(self) -> Objective:
        """Create the objective named by `objective._target_`, for this trainer's runtime."""
        how = computing_of(self.config, self.runtime)
        return objective_of(self.config, how, tokenizer=self.inputs.tokenizer)

    def build_optimizer(self) -> Optimizer:
        """Create the optimizer named by `optim._target_`; rates, decay and clipping are none of its own."""
        return optimizer_of(self.config)

    def evaluate(self) -> Evaluation:
        """Return the held-out evaluation of the current parameters."""
        return self.evaluator.run(self.held_out)

    @cached_property
    def held_out(self) -> dict[str, list[Batch]]:
        """Return the rows of every evaluation, read once, since storage may be unreachable later."""
        return {name: list(found) for name, found in evaluation_batches(self.inputs, self.config).items()}

    @cached_property
    def intervals(self) -> Intervals:
        """Return the steps between log records, evaluations and checkpoints."""
        steps = steps_by_stage(self.inputs, config=self.config)
        total = max(1, sum(steps.values()))
        shapes = {stage.name: stage.geometry for stage in self.inputs.stages}
        trained = sum(num * shapes[name].global_rows * shapes[name].seq_len for name, num in steps.items())
        held_out = [batch for batches in self.held_out.values() for batch in batches]
        num_rows = sum(int((batch.segments_GT > 0).any(axis=1).sum()) for batch in held_out)
        costs = costs_of(
            self.config,
            step_tokens=max(1, trained) / total,
            eval_tokens=num_rows * self.inputs.eval_seq_len,
            num_stages=len(steps),
            writes_samples=samples(self.config),
        )
        found = intervals_of(self.config, total_steps=sum(steps.values()), costs=costs)
        if found.capped:
            log.info("evaluations: %s", found.capped)
        return found

    # ---- building -------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Create model and optimizer state on the device, and the programs of a run."""
        config, runtime = self.config, self.runtime
        self.model = self.seat.build(self)
        self.model.module.train()
        self.parameters = self.model.trainable
        self.updates = self.build_updates(self.parameters)
        self.state = self.fresh_state()
        self.norm_groups = grouped(list(self.parameters)) if config.trainer.norms_every_steps else {}
        self.ternary = ternary_weights(self.model.module) if config.trainer.norms_every_steps else []
        lengths = {stage.geometry.seq_len for stage in self.inputs.stages}
        recomputed = any(map(is_stack, self.parameters)) or is_recomputed(self.model.module)
        flops = flops_by_length(
            lambda length: objective_class(config).flops(config, self.model.source.config, seq_len=length),
            seq_lens=lengths,
            is_recomputed=recomputed,
        )
        self.meters = Meters(runtime, config.hw, flops, examples=config.objective.examples)
        self.step = TrainStep(
            self.model.module,
            updates=self.updates,
            sum_over_processes=runtime.sum_over_processes,
            row_loss=self.row_loss,
            count=self.objective.count,
            loop=runtime.loop,
            constrain=runtime.constrain,
            norm_groups=self.norm_groups,
            ternary=self.ternary,
            reported=self.objective.reported_loss if self.reports else None,
        )
        self.step_program = self.seat.step_program(self)
        self.evaluator = self.build_evaluator()
        self.prompted = Prompted(
            self.model.module,
            config,
            runtime=runtime,
            evaluated=self.evaluated_parameters,
            copy=lambda: self.copy,
            inputs=self.inputs,
            watch=self.watch,
            between=self.leave_if_requested,
        )
        log.info("%s", self.model.report)
        if config.optim.is_averaged:
            key = f"optim.ema={config.optim.ema:g}" if config.optim.ema else "a schedule-free optimizer"
            log.info("%s: evaluations, samples and the export are of averaged parameters", key)
        self.seat.wait("built")

    @property
    def reports(self) -> bool:
        """Return whether steps report sums of the objective; not beside an overridden `row_loss`."""
        return type(self).row_loss is Trainer.row_loss and reports(self.objective)

    def build_evaluator(self) -> Evaluator:
        """Create the evaluator; with an overridden `row_loss`, or an objective without scores, it reports the loss."""
        is_own = type(self).row_loss is not Trainer.row_loss
        has_scores = self.objective.has_scores and not is_own
        tokenizer = self.inputs.tokenizer  # None in a plan
        return Evaluator(
            self.model.module,
            runtime=self.runtime,
            row_loss=self.row_loss,
            parameters=self.evaluated_parameters,
            token_scores=self.token_scores if has_scores else None,
            draws=self.objective.draws,
            measured=None if is_own else measured_by(self.objective),
            inputs=self.config.objective.inputs(),
            # Bytes are those of the tokens that decoders predict.
            widths=widths_of(tokenizer) if tokenizer is not None and writes_text(self.config) else None,
            between=self.leave_if_requested,
        )

    def build_saver(self) -> Saver:
        """Create the saver, which verifies on held-out rows of the first source that has some."""
        batches = (next(iter(found), None) for found in self.held_out.values())
        loss_comparison = LossComparison(
            self.evaluator, next(batches, None), runtime=self.runtime, parameters=self.parameters
        )
        start = InitialTensors(self.model.fingerprints, self.model.initial, is_adapter=self.config.lora.r > 0)
        spool = self.outputs.spool
        settings = replace(self.config.checkpoint, every_steps=self.intervals.save)
        return Saver(settings, spool, runtime=self.runtime, start=start, loss_comparison=loss_comparison)

    def build_updates(self, parameters: Mapping[str, Tensor]) -> Updates:
        """Return the optimizer with the facts of every parameter."""
        groups = self.objective.parameter_groups(list(parameters), clip_norm=self.config.optim.clip_norm)
        optimizer = self.build_optimizer()
        if isinstance(optimizer, Muon):
            optimizer.spread = spread_over(self.runtime)
        return updates_of(self.config, parameters, optimizer=optimizer, groups=groups)

    def model_source(self) -> HuggingFaceModel:
        """Return the source of the model's config, module and weights."""
        return model_source(self.config)

    def fresh_state(self) -> State:
        """Return zero optimizer state, each slot placed as its parameter."""
        return zero_state(self.updates, self.parameters, zeros=self.runtime.zeros)

    @cached_property
    def evaluated_parameters(self) -> Mapping[str, Tensor]:
        """Parameters that evaluations and samples use: the averages, where the run keeps such."""
        own = Averages(self.parameters, self.state) if self.config.optim.is_averaged else self.parameters
        return self.seat.evaluated(own)

    @cached_property
    def copy(self) -> MergedCopy:
        """Return the copy of the weights that text is written with."""
        evaluated = self.evaluated_parameters
        averages = None if evaluated is self.parameters else evaluated
        return MergedCopy(self.model, lora=self.seat.lora(self), runtime=self.runtime, averages=averages)

    def step_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a step changes: parameters, and optimizer state by `<parameter>/<slot>`."""
        return {**self.parameters, **flat(self.state)}

    def step_in_place(self, batch: Mapping[str, Tensor]) -> StepOutput:
        """Run one optimizer step and update the device's tensors in place."""
        parameters, state, output, weights = self.stepped(batch)
        commit(self.parameters, self.state, new=(parameters, state))
        self.model.keep_weights(weights)
        return output

    def stepped(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], State, StepOutput, Mapping[str, Tensor]]:
        """Return the new values of one optimizer step, and the padded weights that it wrote (adapters/padded.py)."""
        weights = self.model.weights_with_adapters()
        with with_adapters(weights):
            return *self.step(self.parameters, self.state, batch), weights

    # ---- the run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load, evaluate, train every stage, evaluate, export."""
        self.stop.install()
        self.seat.watch(self)
        with self.watch.measure("load"):
            self.build()
            self.saver = self.build_saver()
        self.runtime.expect(program_shapes(self.inputs, self.config, world_size=self.runtime.share[1]))
        try:
            self.restore_checked()
            self.outputs.begin(step=self.progress.step, meters=self.meters)
            if self.outputs.callbacks is not None:
                self.outputs.callbacks.start(self.progress)
            self.heed_callbacks(ends_stage=self.is_inside_stage)
            place = self.outputs.folder.path("profile")
            self.profiler = Profiler(self.config.trainer.profile, self.runtime, folder=place, idle=self.idle)
            if self.progress.eval_loss_before is None:
                self.evaluate_before()
            while self.progress.stage < len(self.inputs.stages) and (
                self.progress.ended_by is None or self.progress.stage_step > 0  # a stage that was left is ended too
            ):
                try:
                    self.run_stage(self.inputs.stages[self.progress.stage])
                except RollBack as request:
                    self.roll_back(request)
            if not self.is_saved:  # ended behind the last stage's save
                self.save(ends_stage=True)
            self.finish_run()
        except UnexpectedProgram as error:
            self.stop_on_recompile(error)
        finally:
            self.saver.close()
            self.tell_saves()

    def restore_checked(self) -> None:
        """Restore a checkpoint or the warm start, and run the canaries: that of losses in every life of a run."""
        host = HostModel(self)
        self.leave_if_requested()
        with self.watch.measure("canary"):
            losses = check_losses(self, host)
        self.leave_if_requested()
        with self.watch.measure("load"):
            self.restore()
        if self.progress.step > 0:
            self.take_reference()
            return
        with self.watch.measure("canary"):
            gradients = check_first_gradients(self, host)
        found = (gradients or {}) | ({} if losses is None else {"losses": losses})
        self.progress.canary = found or None
        self.leave_if_requested()
        self.load_warm_start()
        self.take_reference()

    def take_reference(self) -> None:
        """Give rows the values by the model as it starts, if the objective reads them."""
        if self.inputs.reference is None:
            return
        with self.watch.measure("load"):
            add_reference(self, referred_rows(self.inputs, self.config), folder=prepared_folder(self.config))
        vars(self).pop("held_out", None)  # read without them

    def run_stage(self, stage: Stage) -> None:
        """Train one stage from the current position to its last step."""
        self.leave_if_requested()
        rows = stage_rows(self.inputs, stage, config=self.config)
        num_steps = stage_steps(rows, stage, inputs=self.inputs, config=self.config)
        if len(self.progress.stages) == stage.index:  # a checkpoint from before the first step may have the record
            self.progress.stages.append(StageRecord(stage.name, epochs=[]))
            self.progress.guard.recent = []
            if stage.optimizer == "fresh" and stage.index > 0:
                if self.updates.is_schedule_free:  # the average is what was trained, and a fresh one begins there
                    take_averages(self, stored=stored_parameters(self))
                self.state.update(self.fresh_state())
        step, begun = self.progress.step, self.progress.stage_step > 0
        text = f"stage {stage.name}: {num_steps} steps over {rows.num_rows} rows of {', '.join(stage.sources)}"
        if stage.tokens_per_parameter is not None:
            tokens = stage_tokens(stage, num_parameters=self.inputs.num_parameters)
            text = f"{text}: {stage.tokens_per_parameter:g} tokens a parameter, {tokens:,.0f}"
        weights = weights_text(rows, stage, num_steps=num_steps)
        text = f"{text}: {weights}" if weights else text
        log.info("%s", text)
        if not begun:
            self.outputs.stage_border(step, text)
        if begun and self.evaluates_after(step) and self.progress.eval_step != step:
            self.evaluate_stage(stage)  # a request to stop preceded the evaluation of this step
        if self.progress.stages[-1].ended_by is None:
            self.train_stage(stage, rows, num_steps=num_steps)
        else:
            self.window.carry([], [])  # no further record of this stage could include them
        self.end_stage(stage)
        self.heed_callbacks()
        self.progress.stage, self.progress.stage_step = stage.index + 1, 0
        self.save(ends_stage=True)
        self.heed_callbacks()  # what on_save asked for, or its error

    def train_stage(self, stage: Stage, rows: ReplayedRows, *, num_steps: int) -> None:
        """Train the remaining steps of a stage, up to its exit test if it has one."""
        offset = self.progress.step - self.progress.stage_step
        self.passes = Passes(rows, stage.geometry.global_rows, num_steps=num_steps, offset=offset)
        with self.watch.measure("train"), self.count_work():
            self.meters.begin(stage.geometry)
            self.feed_steps(stage, rows, num_steps=num_steps, stop=num_steps)
            self.wait_and_record()
            self.raise_requested_rollback()

    def feed_steps(self, stage: Stage, rows: BatchedRows, *, num_steps: int, stop: int) -> None:
        """Train a stage from the current position up to step `stop` of its `num_steps`, or to its exit test."""
        skipped_steps = self.progress.skipped_steps(num_steps)
        batches = step_batches(
            rows,
            stage,
            num_steps=num_steps,
            config=self.config,
            first=self.progress.stage_step,
            stop=stop,
            process=self.runtime.share,
            added=stage_tensors(stage, self.parameters, stages=self.inputs.stages),
            draws=has_noise(self.config, self.model.module),
            skipped_steps=skipped_steps,
        )
        with self.runtime.feed(batches, rows_dim=1, settings=self.config.loader) as feed:
            for info, batch in self.meters.timed(feed):
                self.profiler.before(self.progress.step + 1)
                self.queue_step(info, batch)
                self.profiler.after(self.progress.step, last=info.is_last)
                self.between_steps(stage, last=info.is_last)
                if self.progress.stages[-1].ended_by:
                    self.read_unrecorded()
                    break
            else:
                done = range(self.progress.stage_step, stop)
                assert skipped_steps.issuperset(done), "the feed ended before its last step"
                self.progress.advance(stop)

    def queue_step(self, info: StepInfo, batch: Mapping[str, Tensor]) -> None:
        """Queue one step; nothing here waits for the device."""
        self.is_saved = False
        self.progress.advance(info.stage_step)
        self.runtime.seed(seed_of(self.config.seed, self.progress.step, self.runtime.share[0]))
        step = self.progress.step + 1
        due = step % self.intervals.log == 0 or info.is_last
        pending = Pending(step, info.lr, info.labels, info.num_tokens, None, self.meters.mark(), info.examples)
        self.window.pending.append(pending)
        self.outputs.rows(step, info.global_labels)
        steps = self.window.close() if due else []

        def read(output: StepOutput) -> None:
            pending.output = output
            self.window.read(steps)

        pending.output = self.step_program(batch, on_output=read if due else None)
        if due and self.intervals.log < CLOSE_STEPS:
            self.runtime.wait()
        self.progress.advance(info.stage_step + 1)
        self.progress.peak_lr = max(self.progress.peak_lr, info.lr)
        self.progress.stages[-1].tokens += info.num_tokens

    def between_steps(self, stage: Stage, *, last: bool) -> None:
        """Do what is due after a step of `stage`, in the order of `hooks`."""
        for every, action in self.hooks:
            if every and self.progress.step % every == 0:
                action(stage, last)

    @cached_property
    def hooks(self) -> list[tuple[int, Hook]]:
        """Return what happens between steps, in order: (every so many steps of the run, the action).

        Processes agree on errors, rollbacks and the clock of saves at log records only, since that waits for all.
        """
        has_callbacks = bool(self.config.callbacks)
        return [
            (1, lambda stage, last: self.record(self.window.drain())),
            (int(has_callbacks), self.call_back),  # before any save of this step, which keeps what they have counted
            (1, lambda stage, last: self.leave_if_requested()),
            (self.intervals.evaluate, self.evaluate_inside),
            (self.agree_every, lambda stage, last: self.saver.raise_background_error()),
            (self.agree_every, lambda stage, last: self.raise_requested_rollback()),
            (1, self.save_if_due),
            (self.agree_every * has_callbacks, self.heed_between),
        ]

    @cached_property
    def agree_every(self) -> int:
        """Return the steps between those at which all processes agree."""
        return 1 if self.runtime.world_size == 1 else self.intervals.log

    def evaluate_inside(self, stage: Stage, last: bool) -> None:
        """Evaluate between two steps of a stage; behind its last step `end_stage` does."""
        if last:
            return
        self.save_before_compiling()
        with self.idle():
            self.evaluate_stage(stage)

    def save_if_due(self, stage: Stage, last: bool) -> None:
        """Save a checkpoint where one is due; behind a stage's last step there is one anyway."""
        step, is_evaluated = self.progress.step, not last and self.evaluates_after(self.progress.step)
        is_best = is_evaluated and self.progress.stages[-1].held_step == step
        agrees = step % self.agree_every == 0
        due = self.saver.is_due(step, is_evaluated=is_evaluated, is_best=is_best, agrees=agrees)
        if due and not last and self.is_sound():
            self.save(is_interval=True)

    # ---- callbacks ------------------------------------------------------------------------------------------

    def call_back(self, stage: Stage, last: bool) -> None:
        """Tell the callbacks of a step that was queued, and of checkpoints that are complete by now."""
        callbacks = self.outputs.callbacks
        if callbacks is not None:
            self.tell_saves()
            callbacks.step_end(self.progress)

    def tell_saves(self) -> None:
        """Tell the callbacks of checkpoints that were completed since the last call."""
        callbacks, completed = self.outputs.callbacks, self.saver.completed
        while completed:
            step, path = completed.popleft()
            if callbacks is not None:
                callbacks.saved(self.progress, step=step, path=path)

    def heed_between(self, stage: Stage, last: bool) -> None:
        """Do between two steps what a callback asked for."""
        self.heed_callbacks(ends_stage=not last)

    def heed_callbacks(self, *, ends_stage: bool = False) -> None:
        """Do what a callback asked for; all processes call it at the same points and agree.

        Args:
            ends_stage: whether the current stage has further steps, which it then does not train.

        Raises:
            StoppedByRequest: the run is to be stopped and resumed.
            TrainingStopped: a callback failed.
        """
        if not self.config.callbacks:
            return
        asked = self.outputs.callbacks.requests if self.outputs.callbacks is not None else Requests()
        agree = self.runtime.any_process
        if not agree(asked.kind is not None):
            return
        is_end, is_stop = agree(asked.kind == "end"), agree(asked.kind == "stop")
        why = asked.why or "a callback of process 0 asked for it"
        if not is_end:
            self.saver.join()
            if not self.is_saved:
                self.save()
            if is_stop:
                raise StoppedByRequest(why)
            raise TrainingStopped(
                f"stopped after step {self.progress.step}: {why}; run.log has the traceback. The checkpoints stay, and "
                "the same command resumes; mend it, or let the run go on without it by on_error=warn."
            )
        if self.progress.step == 0 or self.progress.ended_by is not None:
            return  # without a step there is nothing to export: it is asked again behind the first
        self.progress.ended_by, self.is_saved = why, False
        if ends_stage:
            self.progress.stages[-1].ended_by = why
        log.info("the run ends after step %d: %s", self.progress.step, why)

    @property
    def is_inside_stage(self) -> bool:
        """Return whether the run is between two steps of a stage."""
        steps = steps_by_stage(self.inputs, config=self.config)
        return 0 < self.progress.stage_step < steps[self.progress.stages[-1].name]

    def roll_back(self, request: RollBack) -> None:
        """Restore the last good checkpoint and mark the bad steps to be skipped."""
        folder, before = self.outputs.folder.path("checkpoints"), self.progress.guard
        self.saver.join()
        target = self.guard.checkpoint_step(request, before, folder=folder)
        self.window.clear()
        done = self.progress.step
        self.restore(before=target + 1)
        self.progress.guard = self.guard.after_rollback(request, found=self.progress.guard, before=before)
        self.runtime.barrier("rolled back")
        if self.runtime.rank == 0:
            remove_after(folder, self.progress.step)
        steps = range(self.progress.step + 1, done + 1)
        self.outputs.rewind(self.progress.step, num_lost=sum(not before.is_skipped(step) for step in steps))

    def has_saved(self) -> bool:
        """Return whether a complete checkpoint has the last step; another thread asks."""
        return self.is_saved and not (hasattr(self, "saver") and self.saver.is_writing)

    def leave_if_requested(self) -> None:
        """Stop on request with a checkpoint of the last step; all processes call it at the same points.

        An evaluation or a sample that it leaves is repeated when the run goes on: nothing of it is reported yet.
        """
        if not self.stop.agreed():
            return
        if self.is_saved:
            self.saver.join()
        else:
            self.save(leaves=True)
        self.stop.grace.only_uploads_remain()
        raise StoppedByRequest

    # ---- before and after -----------------------------------------------------------------------------------

    def evaluate_before(self) -> None:
        """Evaluate and sample the untrained model."""
        evaluation, answered, texts = self.timed_evaluation(), self.prompted.answers(), self.prompted.texts()
        self.has_evaluated = True
        self.progress.eval_loss_before = evaluation.loss
        self.progress.eval_sources_before = evaluation.sources
        self.progress.eval_measures_before = evaluation.measures
        self.progress.eval_source_measures_before = evaluation.source_measures
        self.report_evaluation(evaluation)
        self.report_answers(answered)
        self.progress.skill_before = answered
        self.progress.sample_before = self.report_samples(texts, "before")

    def finish_run(self) -> None:
        """Evaluate, sample, export, and write result.json."""
        self.leave_if_requested()
        self.stop.grace.only_uploads_remain()  # all training is saved: a request to stop needs no checkpoint now
        evaluation = self.evaluated or self.timed_evaluation()
        answered = self.prompted.answers() if self.answered is None else self.answered
        texts = self.prompted.texts()
        self.leave_if_requested()
        if self.progress.eval_step != self.progress.step:
            self.report_evaluation(evaluation)
        self.guard.require_finite_end(evaluation.loss, self.progress.guard)
        if self.answered is None:
            self.report_answers(answered)
        sample = self.report_samples(texts, "after")
        with self.watch.measure("checkpoint"):
            proof = export_trained(self)
        seconds = dict(self.watch.seconds)
        ending = Ending(
            progress=self.progress,
            evaluation=evaluation,
            sample_after=sample,
            skill=skill_fields(self.inputs.questions, before=self.progress.skill_before, after=answered),
            report=self.model.report,
            counters=self.runtime.counters(),
            device_memory_gib=self.runtime.memory_gib(),
            peak_device_memory_gib=self.runtime.peak_memory_gib(),
            meters=self.meters.means(),
            seconds=seconds,
            tokens_per_second=self.train_tokens / max(seconds.get("train", 0) - self.train_compile_seconds, 1e-9),
            proof=proof,
        )
        self.outputs.result(ending)

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def save(self, *, is_interval: bool = False, ends_stage: bool = False, leaves: bool = False) -> None:
        """Write a checkpoint of everything that changes (see `Saver`) once all queued steps are done.

        With `is_interval` it may be written by another thread while the run continues; otherwise it is complete on
        return, with `leaves` on the local disk if the run folder is remote.
        """
        self.wait_and_record()
        self.guard_unread_steps()
        progress = self.progress
        progress.open_losses, progress.open_supervised, progress.open_reported = self.window.open()
        if self.outputs.callbacks is not None:
            progress.callbacks = self.outputs.callbacks.state()
        with self.watch.measure("checkpoint"), self.meters.excluded():
            step = self.progress.step
            if leaves:
                self.saver.save_on_stop(self.snapshot)
            else:
                self.saver.save(self.snapshot, step=step, is_interval=is_interval, ends_stage=ends_stage)
            self.runtime.barrier("saved")
        self.is_saved = True
        self.tell_saves()

    def save_before_compiling(self) -> None:
        """Save before the first evaluation of a process, unless the last step is saved.

        Python sees no signal while it waits for a compiler, which may take longer than `checkpoint.grace_seconds`.
        """
        if not (self.is_saved or self.has_evaluated) and self.is_sound():
            self.save()

    def snapshot(self) -> Snapshot:
        """Return everything that a step changes, uncopied."""
        return snapshot(self.progress, parameters=self.parameters, state=self.state)

    def restore(self, *, before: int | None = None) -> None:
        """Resume from the newest complete checkpoint (of a step below `before`), if there is one."""
        found = self.read_checkpoint(before=before)
        if found is not None:
            found.reopen(steps_by_stage(self.inputs, config=self.config))
            self.progress = found
            if self.outputs.callbacks is not None:
                self.outputs.callbacks.load(found.callbacks)
            self.window.carry(found.open_losses, found.open_supervised, found.open_reported)
            self.saver.use_start_fingerprints(found.start_marks)
            log.info("resumed at step %d (stage %d, step %d)", found.step, found.stage, found.stage_step)

    def load_warm_start(self) -> None:
        """Load the tensors of the warm start, if there is one; call it after the canary, which assumes none."""
        point = self.inputs.start
        if point is None:
            return
        with self.watch.measure("load"):
            marks = load_start(
                point,
                self.model,
                parameters=self.parameters,
                state=self.state,
                runtime=self.runtime,
                max_held_bytes=self.config.checkpoint.max_copy_gib * 2**30,
            )
            if point.take == "weights":
                self.state.update(self.fresh_state())  # after the parameters, the order in which a resume places them
        self.progress.start, self.progress.start_marks = point.lineage(), marks
        self.saver.use_start_fingerprints(marks)

    def stop_on_recompile(self, error: UnexpectedProgram) -> NoReturn:
        """Save what is done, then end the run with the reason for the unexpected compilation.

        With several processes nothing is saved, since the others may not have met it and would not take part.

        Raises:
            TrainingStopped: always.
        """
        step, kept = self.progress.step, "the checkpoints stay"
        if step > 0 and self.runtime.world_size == 1:
            self.save()
            kept = "a checkpoint of this step is saved, and the same command resumes from it"
        value = error.explain()
        raise TrainingStopped(f"stopped after step {step}: {error}{value and f': {value}'}; {kept}.") from error

    # ---- evaluations and early stopping -------------------------------------------------------------------------

    is_saved = True
    """Whether the last step is in a checkpoint, complete or being written; also before the first step."""
    has_evaluated = False
    """Whether this process has evaluated and sampled, and so has compiled what that takes."""
    evaluated: Evaluation | None = None
    """Evaluation of the current parameters; None if they have changed since."""
    answered: dict[str, AnswersRecord] | None = None
    """Question results of the current parameters; None if they have changed since."""

    def timed_evaluation(self) -> Evaluation:
        """Evaluate, timed apart from training."""
        with self.watch.measure("eval"):
            return self.evaluate()

    def report_evaluation(self, evaluation: Evaluation) -> None:
        """Pass an evaluation to the loggers and callbacks."""
        self.progress.eval_loss, self.progress.eval_step = evaluation.loss, self.progress.step
        values = self.outputs.evaluation(self.progress.step, evaluation)
        if self.outputs.callbacks is not None:
            self.outputs.callbacks.evaluated(self.progress, values)

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after this step of the run."""
        every = self.intervals.evaluate
        return bool(every) and step % every == 0

    def evaluate_stage(self, stage: Stage) -> None:
        """Evaluate a stage, report it, apply the stage's exit test, and write samples.

        Everything is computed before anything is reported, so that a stop leaves no half of it.
        """
        evaluation, answered = self.timed_evaluation(), self.prompted.answers()
        texts = self.prompted.texts() if self.intervals.samples else []
        self.has_evaluated = True
        self.report_evaluation(evaluation)
        record = self.progress.stages[-1]
        record.eval_loss, record.eval_sources = evaluation.loss, evaluation.sources
        if stage.watches:
            apply_exit_test(record, evaluation, stage=stage, step=self.progress.step)
            if record.ended_by:
                log.info("stage %s ends after %d steps: %s", stage.name, record.steps, record.ended_by)
        self.evaluated, self.answered = evaluation, answered
        self.report_answers(answered)
        self.report_samples(texts, "during")

    def report_samples(self, texts: list[str], when: str) -> str | None:
        """Log the samples; return that of `sample.prompt`."""
        if not texts:
            return None
        self.outputs.sample(self.progress.step, texts, when=when)
        return texts[0]

    def report_answers(self, answered: dict[str, AnswersRecord]) -> None:
        """Log the results of every set of questions."""
        if answered:
            self.outputs.answers(self.progress.step, answered)

    def end_stage(self, stage: Stage) -> None:
        """Evaluate after the last step, and restore the best evaluation's step if the stage ends with it."""
        if self.progress.eval_step != self.progress.step:
            self.save_before_compiling()
            self.evaluate_stage(stage)
        record = self.progress.stages[-1]
        best, record.held_step = record.held_step, None
        if best is None or best == self.progress.step:
            return
        self.saver.join()  # a background save may be about to complete that checkpoint
        folder = self.outputs.folder.path("checkpoints")
        if self.runtime.any_process(latest_step(folder, before=best + 1) != best):
            log.warning(
                "stage %s: there is no checkpoint of step %d, its best; it ends with its last step", stage.name, best
            )
            return
        self.read_checkpoint(before=best + 1)
        assert record.best_loss is not None
        record.restored_step, record.eval_loss, record.eval_sources = best, record.best_loss, {}
        self.evaluated = self.answered = None
        log.info(
            "stage %s ends with the parameters of step %d, whose exit loss %.4f is its best",
            stage.name,
            best,
            record.best_loss,
        )

    def read_checkpoint(self, *, before: int | None = None) -> Progress | None:
        """Restore tensors from the newest complete checkpoint (of a step below `before`).

        Raises:
            ConfigError: the hosts found checkpoints of different steps.
        """
        self.saver.join()
        folder, hosts = self.outputs.folder.path("checkpoints"), self.runtime.hosts
        verify_newest(folder, hosts, before=before)
        found = self._read_checkpoint(folder, before=before)
        self.is_saved = True
        steps = hosts.gather(None if found is None else found.step)
        if len(set(steps)) > 1:
            raise ConfigError(
                f"{folder}; the hosts read the checkpoints of steps {', '.join(map(str, steps))}, by host; another "
                "program changes that folder, or they see different ones; start again when only this run writes there."
            )
        return found

    def _read_checkpoint(self, folder: str, *, before: int | None) -> Progress | None:
        """Restore this process's tensors, as `read_checkpoint`."""
        return read_state(
            folder,
            parameters=self.parameters,
            state=self.state,
            place=self.runtime.place,
            order=self.model.order,
            stages=steps_by_stage(self.inputs, config=self.config),
            before=before,
            max_held_bytes=self.config.checkpoint.max_copy_gib * 2**30,
            boxes=boxes_needed(self.runtime),
        )

    # ---- reports of steps -----------------------------------------------------------------------------------------

    passes: Passes
    """Passes over the rows of the current stage."""

    def record(self, readings: list[Reading]) -> None:
        """Log readings, apply the guard, and keep the stage's first and last loss."""
        for reading in readings:
            if self.guard.request is not None:
                return  # later readings will be rolled back, and differ between processes
            stage = self.progress.stages[-1]
            if reading.losses:
                if stage.first_train_loss is None:
                    stage.first_train_loss = reading.losses[0][1]
                stage.last_train_loss = reading.losses[-1][1]
            self.guard.observe(reading, self.progress)
            self.guard.decide(reading, self.progress.guard)
            meters = self.meters_of(reading)
            measures = self.measures_of(reading)
            self.outputs.training(
                reading,
                stage=stage.name,
                meters=meters,
                groups=list(self.norm_groups),
                layers=layers_of(self.ternary),
                measures=measures,
            )
            if any(map(math.isnan, reading.supervised)):
                stage.epochs = None
            if stage.epochs is not None:
                for epoch in count(reading, stage.epochs, self.passes):
                    self.outputs.epoch(reading.step, epoch)

    def meters_of(self, reading: Reading) -> dict[str, float]:
        """Return the meters of the steps of a record."""
        return self.meters.values(reading)

    def measures_of(self, reading: Reading) -> dict[str, float]:
        """Return the objective's own measures of the steps of a record."""
        measures = self.objective.measures(sums) if any(sums := reading.reported_sums) else {}
        measures.pop("loss", None)  # the record has the mean of the steps' losses
        return measures

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait until the device is idle, and leave the block out of the steps' time."""
        self.wait_and_record()
        with self.meters.excluded():
            yield

    def wait_and_record(self) -> None:
        """Wait for the device, and record the steps it has done."""
        self.runtime.wait()
        self.record(self.window.drain())

    def read_unrecorded(self) -> None:
        """Read the steps since the last record, if a stage ends before one is due."""
        steps = self.window.close()
        if steps:
            self.window.read(steps)

    def raise_requested_rollback(self) -> None:
        """Leave the stage if any process's guard requests a rollback; all call it at the same step.

        Raises:
            RollBack: the same in every process.
        """
        if self.runtime.any_process(self.guard.request is not None):
            self.wait_and_record()  # so that every process has read the same reports
            assert self.guard.request is not None, "two processes have read different losses"
            raise self.guard.request

    def is_sound(self) -> bool:
        """Return whether the last step's update was applied.

        A checkpoint within a streak of skipped updates would push out a good one.
        """
        self.wait_and_record()
        self.guard_unread_steps()
        return not self.progress.guard.streak

    def guard_unread_steps(self) -> None:
        """Pass all steps so far to the guard, whether a record is due or not; call it after `wait_and_record`."""
        reading = self.window.unread()
        if reading is not None:
            self.guard.observe(reading, self.progress)

    @contextmanager
    def count_work(self) -> Iterator[None]:
        """Count compilation and tokens of a stage, also if it is left early."""
        compiling, tokens = self.runtime.counters().compile_seconds, self.progress.tokens
        try:
            yield
        finally:
            self.train_compile_seconds += self.runtime.counters().compile_seconds - compiling
            self.train_tokens += self.progress.tokens - tokens
