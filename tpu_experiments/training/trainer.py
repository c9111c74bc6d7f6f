"""The trainer: LoRA, full fine-tuning and every curriculum stage are this one loop.

A trainer of your own subclasses `Trainer`, overrides what it needs among `row_loss`, `build_optimizer` and
`evaluate`, and is picked by `trainer._target_`; see README, "Add a trainer".
"""

import logging
from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from tpu_experiments.checkpoint.store import remove_after
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.runtime.base import UnexpectedProgram
from tpu_experiments.training.canary import sing
from tpu_experiments.training.chosen import choice_of
from tpu_experiments.training.ending import Ending
from tpu_experiments.training.epochs import Passes
from tpu_experiments.training.guard import RollBack
from tpu_experiments.training.inputs import (
    StepInfo,
    program_shapes,
    stage_rows,
    stage_steps,
    step_batches,
    steps_by_stage,
    weights_text,
)
from tpu_experiments.training.profiling import Profiler
from tpu_experiments.training.progress import StageRecord
from tpu_experiments.training.questions import skill_fields
from tpu_experiments.training.saved import Snapshot, snapshot
from tpu_experiments.training.staged import Staged
from tpu_experiments.training.start import load_start
from tpu_experiments.training.step import StepOutput, seed_of
from tpu_experiments.training.stop import StoppedByRequest
from tpu_experiments.training.window import Pending, TrainingStopped

log = logging.getLogger(__name__)
CLOSE_STEPS = 10
"""Records closer than this are waited for before another step is queued: a read that finds the next step queued waits
for that too, so the time of a short interval would be that of handing over (2.7 million tokens/s where 4,000 are true),
and of a longer one wrong by a step. What it costs is the trace of one step a record."""


class Trainer(Staged):
    """Training loop of one process; with several processes, only rank 0 writes."""

    # ---- the run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load, evaluate, train every stage, evaluate, export."""
        self.stop.install()
        with self.watch.measure("load"):
            self.build()
            self.saver = self.build_saver()
            self.restore()
        self.outputs.begin(step=self.progress.step, meters=self.meters)
        place = self.outputs.folder.path("profile")
        self.profiler = Profiler(self.config.trainer.profile, self.runtime, folder=place)
        self.runtime.expect(program_shapes(self.inputs, self.config, world_size=self.runtime.share[1]))
        try:
            if self.progress.step == 0:
                with self.watch.measure("canary"):
                    self.progress.canary = sing(self)
                self.take_start()
            if self.progress.eval_loss_before is None:
                self.look_before()
            while self.progress.stage < len(self.inputs.stages):
                try:
                    self.run_stage(self.inputs.stages[self.progress.stage])
                except RollBack as wish:
                    self.roll_back(wish)
            self.look_after()
        except UnexpectedProgram as error:
            self.stop_for(error)
        finally:
            self.saver.close()

    def run_stage(self, stage: Stage) -> None:
        """Train one stage from the current position to its last step."""
        self.leave_if_asked()
        rows = stage_rows(self.inputs, stage, config=self.config)
        num_steps = stage_steps(rows, stage, inputs=self.inputs, config=self.config)
        if len(self.progress.stages) == stage.index:  # else a checkpoint from before its first step has one
            self.progress.stages.append(StageRecord(stage.name, epochs=[]))
            self.progress.guard.recent = []
            if stage.optimizer == "fresh" and stage.index > 0:
                self.state.update(self.fresh_state())
        step, begun = self.progress.step, self.progress.stage_step > 0
        text = f"stage {stage.name}: {num_steps} steps over {rows.num_rows} rows of {', '.join(stage.sources)}"
        weights = weights_text(rows, stage, num_steps=num_steps)
        text = f"{text}: {weights}" if weights else text
        log.info("%s", text)
        if not begun:
            self.outputs.border(step, text)
        if begun and self.evaluates_after(step) and self.progress.eval_step != step:
            self.evaluate_stage(stage)  # a request to stop came first
        if self.progress.stages[-1].ended_by is None:
            self.train_stage(stage, rows, num_steps=num_steps)
        else:
            self.window.carry([], [])  # no step follows whose record would have them
        self.end_stage(stage)
        self.progress.stage, self.progress.stage_step = stage.index + 1, 0
        self.save(ends_stage=True)

    def train_stage(self, stage: Stage, rows: ReplayedRows, *, num_steps: int) -> None:
        """Train the remaining steps of a stage, up to its exit test if it has one."""
        first, left_out = self.progress.stage_step, self.progress.left_out(num_steps)
        offset = self.progress.step - first
        self.passes = Passes(rows, stage.geometry.global_rows, num_steps=num_steps, offset=offset)
        batches = step_batches(
            rows,
            stage,
            num_steps=num_steps,
            config=self.config,
            first=first,
            process=self.runtime.share,
            choice=choice_of(stage.trainable, self.parameters, stages=self.inputs.stages),
            left_out=left_out,
        )
        with self.watch.measure("train"), self.counted():
            self.meters.begin(stage.geometry)
            with self.runtime.feed(batches, rows_dim=1, settings=self.config.loader) as feed:
                for info, batch in self.meters.timed(feed):
                    self.profile_from_here()
                    self.train_one(info, batch)
                    self.profile_up_to_here(last=info.is_last)
                    self.between_steps(stage, last=info.is_last)
                    if self.progress.stages[-1].ended_by:
                        self.read_rest()
                        break
                else:
                    done = range(self.progress.stage_step, num_steps)
                    assert left_out.issuperset(done), "the feed ended before the stage"
                    self.progress.advance(num_steps)
            self.settle()
            self.heed_guard()

    def train_one(self, info: StepInfo, batch: Mapping[str, Tensor]) -> None:
        """Queue one step; nothing here waits for the device."""
        self.progress.advance(info.stage_step)
        self.runtime.seed(seed_of(self.config.seed, self.progress.step, self.runtime.share[0]))
        step = self.progress.step + 1
        due = step % self.intervals.log == 0 or info.is_last
        pending = Pending(step, info.lr, info.labels, info.num_tokens, mark=self.meters.mark())
        self.window.pending.append(pending)
        self.outputs.rows(step, info.global_labels)
        steps = self.window.close() if due else []

        def read(output: StepOutput) -> None:
            pending.output = output
            self.window.read(steps)

        pending.output = self.step_program(batch, then=read if due else None)
        if due and self.intervals.log < CLOSE_STEPS:
            self.runtime.wait()
        self.progress.advance(info.stage_step + 1)
        self.progress.peak_lr = max(self.progress.peak_lr, info.lr)
        self.progress.stages[-1].tokens += info.num_tokens

    def between_steps(self, stage: Stage, *, last: bool) -> None:
        """Log what has arrived; evaluate, save or stop when that is due."""
        step = self.progress.step
        self.record(self.window.drain())
        if self.stop.agreed():  # before an evaluation, which may take longer than there is time
            self.save(leaves=True)
            self.stop.grace.leave()
            raise StoppedByRequest
        is_evaluated = not last and self.evaluates_after(step)
        if is_evaluated:
            self.settle()
            with self.meters.aside():
                self.evaluate_stage(stage)
        agrees = step % self.intervals.log == 0 or self.runtime.world_size == 1
        self.saver.look(agrees=agrees)
        if agrees:
            self.heed_guard()
        is_best = is_evaluated and self.progress.stages[-1].held_step == step
        due = self.saver.is_due(step, is_evaluated=is_evaluated, is_best=is_best, agrees=agrees)
        if due and not last and self.is_sound():
            self.save(is_interval=True)

    def roll_back(self, wish: RollBack) -> None:
        """Restore the last good checkpoint and mark the bad steps to be skipped."""
        folder, before = self.outputs.folder.path("checkpoints"), self.progress.guard
        self.saver.join()
        target = self.guard.target(wish, before, folder=folder)
        self.window.clear()
        done = self.progress.step
        self.restore(before=target + 1)
        self.progress.guard = self.guard.went_back(wish, found=self.progress.guard, before=before)
        self.runtime.barrier("rolled back")
        if self.runtime.rank == 0:
            remove_after(folder, self.progress.step)
        steps = range(self.progress.step + 1, done + 1)
        self.outputs.rewind(self.progress.step, num_lost=sum(not before.passes_over(step) for step in steps))

    def leave_if_asked(self) -> None:
        """Stop on request; call it where everything done is saved."""
        if self.stop.agreed():
            self.stop.grace.leave()
            raise StoppedByRequest

    def profile_from_here(self) -> None:
        """Start the profile before its first step."""
        if self.profiler.starts_at(self.progress.step + 1):
            self.settle()
            with self.meters.aside():
                self.profiler.start()

    def profile_up_to_here(self, *, last: bool) -> None:
        """Write the profile after its last step, or the stage's."""
        if last or self.profiler.ends_after(self.progress.step):
            self.settle()
            with self.meters.aside():
                self.profiler.stop()

    # ---- before and after -----------------------------------------------------------------------------------

    def look_before(self) -> None:
        """Evaluate and sample the untrained model."""
        evaluation = self.timed_evaluation()
        self.progress.eval_loss_before = evaluation.loss
        self.progress.eval_sources_before = evaluation.sources
        self.progress.eval_measures_before = evaluation.measures
        self.progress.eval_source_measures_before = evaluation.source_measures
        self.report_evaluation(evaluation)
        self.progress.skill_before = self.ask()
        self.progress.sample_before = self.write_sample("before")

    def look_after(self) -> None:
        """Evaluate, sample, export, and write result.json."""
        self.leave_if_asked()
        self.stop.grace.leave()  # a request from here on finds everything trained saved
        evaluation = self.evaluated or self.timed_evaluation()
        if self.progress.eval_step != self.progress.step:
            self.report_evaluation(evaluation)
        answered = self.ask() if self.answered is None else self.answered
        self.guard.last_word(evaluation.loss, self.progress.guard)
        sample = self.write_sample("after")
        with self.watch.measure("checkpoint"):
            self.outputs.export(self.model)
            self.runtime.barrier("exported")
            proof = self.proof_of_export()
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
        """Write a checkpoint of everything that changes (rank 0) once all queued steps are done.

        With `is_interval` it may be written by another thread while the run continues; otherwise it is complete on
        return, with `leaves` on the local disk if the run folder is remote.
        """
        self.settle()
        self.look_at_unread()
        self.progress.open_losses, self.progress.open_supervised = self.window.open()
        with self.watch.measure("checkpoint"), self.meters.aside():
            step = self.progress.step
            if leaves:
                self.saver.leave(self.snapshot)
            else:
                self.saver.save(self.snapshot, step=step, is_interval=is_interval, ends_stage=ends_stage)
            self.runtime.barrier("saved")

    def snapshot(self) -> Snapshot:
        """Return everything that a step changes, uncopied."""
        return snapshot(self.progress, parameters=self.parameters, state=self.state)

    def restore(self, *, before: int | None = None) -> None:
        """Resume from the newest complete checkpoint (of a step below `before`), if there is one."""
        found = self.read_checkpoint(before=before)
        if found is not None:
            found.reopen(steps_by_stage(self.inputs, config=self.config))
            self.progress = found
            self.window.carry(found.open_losses, found.open_supervised)
            self.saver.begins_with(found.start_marks)
            log.info("resumed at step %d (stage %d, step %d)", found.step, found.stage, found.stage_step)

    def take_start(self) -> None:
        """Begin with what another run has trained, where `start.run` names one; behind the canary, which knows none."""
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
                self.state.update(self.fresh_state())  # behind the parameters, in the order of a resume
        self.progress.start, self.progress.start_marks = point.lineage(), marks
        self.saver.begins_with(marks)

    def stop_for(self, error: UnexpectedProgram) -> NoReturn:
        """Save what is done, then end the run with the reason for the unexpected compilation.

        With several processes nothing is saved, since the others may not have met it and would not take part.

        Raises:
            TrainingStopped: always.
        """
        step, kept = self.progress.step, "the checkpoints stay"
        if step > 0 and self.runtime.world_size == 1:
            self.save()
            kept = "a checkpoint of this step is saved, and the same command goes on from it"
        value = error.explain()
        raise TrainingStopped(f"stopped after step {step}: {error}{value and f': {value}'}; {kept}.") from error
