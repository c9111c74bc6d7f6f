"""The trainer: LoRA, full fine-tuning and every curriculum stage are this one loop.

A trainer of your own subclasses `Trainer`, overrides what it needs among `row_loss`, `build_optimizer` and
`evaluate`, and is picked by `trainer._target_`; see README, "Add a trainer".
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.checkpoint.store import load_latest, save_checkpoint
from tpu_experiments.config.build import locate
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.stopwatch import Stopwatch
from tpu_experiments.models.build import build_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.optim.base import Optimizer, State
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.evaluate import Evaluation, Evaluator
from tpu_experiments.training.inputs import (
    RunInputs,
    StepInfo,
    evaluation_batches,
    stage_rows,
    stage_steps,
    step_batches,
)
from tpu_experiments.training.outputs import RunOutputs
from tpu_experiments.training.progress import Progress, StageRecord
from tpu_experiments.training.sample import Sampler, prompt_ids
from tpu_experiments.training.saved import flat, from_host, to_host
from tpu_experiments.training.step import Rows, StepOutput, TrainStep, commit, next_token_loss, seed_of
from tpu_experiments.training.stop import StopFlag
from tpu_experiments.training.summary import Ending
from tpu_experiments.training.window import Pending, Reading, Window

log = logging.getLogger(__name__)


class StoppedByRequest(Exception):
    """The run was asked to stop, saved a checkpoint and did."""


class Trainer:
    """One run in one process; with several processes each has one and only rank 0 writes."""

    def __init__(
        self, config: Config, runtime: Runtime, *, inputs: RunInputs, outputs: RunOutputs, watch: Stopwatch
    ) -> None:
        self.config, self.runtime, self.inputs, self.outputs, self.watch = config, runtime, inputs, outputs, watch
        self.stop = StopFlag()
        self.progress = Progress(data=inputs.audit_hashes)
        self.window = Window()
        self.train_compile_seconds = 0.0  # part of the training time, taken off the throughput
        self.train_tokens = 0  # of this process's life; `progress` counts those of earlier lives too

    # ---- what a trainer of your own may override ------------------------------------------------------------

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Loss sum in nats and number of supervised tokens of every row, both (R,)."""
        chunk, runtime = self.config.trainer.loss_chunk_tokens, self.runtime
        return next_token_loss(module, parameters, rows, chunk_tokens=chunk, loop=runtime.loop, lay=runtime.lay)

    def build_optimizer(self) -> Optimizer:
        """The optimizer that `optim._target_` names, with the settings of `optim`."""
        settings = asdict(self.config.optim)
        for name in ("_target_", "lr", "clip_norm"):
            settings.pop(name)
        optimizer: Optimizer = locate(self.config.optim._target_, key="optim")(**settings)
        return optimizer

    def evaluate(self) -> Evaluation:
        """Held-out loss of the current parameters."""
        return self.evaluator.run(evaluation_batches(self.inputs, self.config))

    # ---- the run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load, evaluate, train every stage, evaluate, export."""
        self.stop.install()
        with self.watch.measure("load"):
            self.build()
            self.restore()
        if self.progress.eval_loss_before is None:
            self.look_before()
        for stage in self.inputs.stages[self.progress.stage :]:
            self.run_stage(stage)
        self.look_after()

    def build(self) -> None:
        """Model and optimizer state on the device, and the three programs of a run."""
        config, runtime = self.config, self.runtime
        self.model = build_model(
            self.model_source(),
            lora=config.lora,
            seed=config.seed,
            place=runtime.place,
            layer_loop=runtime.loop if runtime.device.type == "xla" else None,
            lay=runtime.lay,
        )
        self.model.module.train()
        self.parameters = self.model.trainable
        self.optimizer = self.build_optimizer()
        self.state = self.fresh_state()
        self.step = TrainStep(
            self.model.module,
            optimizer=self.optimizer,
            clip_norm=config.optim.clip_norm,
            sum_over_processes=runtime.sum_over_processes,
            row_loss=self.row_loss,
            loop=runtime.loop,
        )
        self.step_program = runtime.program(self.step_in_place, name="train")
        parts: dict[str, Any] = {"runtime": runtime, "parameters": self.parameters}
        self.evaluator = Evaluator(self.model.module, row_loss=self.row_loss, **parts)
        self.sampler = Sampler(
            self.model.module,
            tokenizer=self.inputs.tokenizer,
            window=config.sample.window,
            temperature=config.sample.temperature,
            seed=config.seed,
            **parts,
        )
        log.info("%s", self.model.report)

    def model_source(self) -> HuggingFaceModel:
        """Where the model's config, module and weights come from."""
        source: HuggingFaceModel = locate(self.config.model._target_, key="model")(
            self.config.model, seed=self.config.seed
        )
        return source

    def fresh_state(self) -> State:
        """Optimizer state at zero, each slot where its parameter lives."""
        shapes = {name: torch.empty(p.shape, device="meta") for name, p in self.parameters.items()}
        return {
            name: {slot: self.runtime.zeros(t.shape, name=f"{name}/{slot}") for slot, t in slots.items()}
            for name, slots in self.optimizer.init(shapes).items()
        }

    def step_in_place(self, batch: Mapping[str, Tensor]) -> StepOutput:
        """One optimizer step on the tensors that live on the device."""
        parameters, state, output = self.step(self.parameters, self.state, batch)
        commit(self.parameters, self.state, new=(parameters, state))
        return output

    def run_stage(self, stage: Stage) -> None:
        """Train one stage from where the progress stands to its last step."""
        rows = stage_rows(self.inputs, stage, config=self.config)
        num_steps = stage_steps(rows, stage, config=self.config)
        if self.progress.stage_step == 0:
            self.progress.stages.append(StageRecord(stage.name))
            if stage.optimizer == "fresh" and stage.index > 0:
                self.state.update(self.fresh_state())
        log.info(
            "stage %s: %d steps over %d rows of %s", stage.name, num_steps, rows.num_rows, ", ".join(stage.sources)
        )
        compiling = self.runtime.counters().compile_seconds
        tokens = self.progress.tokens
        process = (self.runtime.rank, self.runtime.world_size)
        batches = step_batches(rows, stage, config=self.config, first=self.progress.stage_step, process=process)
        with self.watch.measure("train"):
            with self.runtime.feed(batches, rows_dim=1, settings=self.config.loader) as feed:
                for info, batch in feed:
                    self.train_one(info, batch)
                    self.between_steps(last=info.is_last)
            assert self.progress.stage_step == num_steps, "the feed ended before the stage"
            self.runtime.wait()
            self.record(self.window.drain())
        self.train_compile_seconds += self.runtime.counters().compile_seconds - compiling
        self.train_tokens += self.progress.tokens - tokens
        self.progress.stage, self.progress.stage_step = stage.index + 1, 0
        self.save()

    def train_one(self, info: StepInfo, batch: Mapping[str, Tensor]) -> None:
        """Queue one step; nothing here waits for the device."""
        self.runtime.seed(seed_of(self.config.seed, self.progress.step, self.runtime.rank))
        step = self.progress.step + 1
        due = step % self.config.trainer.log_every_steps == 0 or info.is_last
        pending = Pending(step, info.lr, info.labels, info.num_tokens)
        self.window.pending.append(pending)
        steps = self.window.close() if due else []

        def read(output: StepOutput) -> None:
            pending.output = output
            self.window.read(steps)

        pending.output = self.step_program(batch, then=read if due else None)
        self.progress.step, self.progress.stage_step = step, info.stage_step + 1
        self.progress.stages[-1].steps = info.stage_step + 1
        self.progress.stages[-1].tokens += info.num_tokens

    def between_steps(self, *, last: bool) -> None:
        """Log what has arrived; evaluate, save or stop when that is due."""
        config, step = self.config, self.progress.step
        self.record(self.window.drain())
        every = config.trainer.eval_every_steps
        if every and step % every == 0 and not last:
            self.report_evaluation(self.timed_evaluation())
        due = step % config.trainer.log_every_steps == 0
        if (due or self.runtime.world_size == 1) and self.runtime.any_process(self.stop.requested):
            self.save()
            raise StoppedByRequest
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0 and not last:
            self.save()

    def record(self, readings: list[Reading]) -> None:
        """Hand log records to the loggers and keep the stage's first and last loss."""
        for reading in readings:
            stage = self.progress.stages[-1]
            if stage.first_train_loss is None:
                stage.first_train_loss = reading.losses[0][1]
            stage.last_train_loss = reading.losses[-1][1]
            self.outputs.training(reading, stage=stage.name)

    # ---- before and after -----------------------------------------------------------------------------------

    def look_before(self) -> None:
        """Held-out loss and a sample of the untrained model."""
        evaluation = self.timed_evaluation()
        self.progress.eval_loss_before = evaluation.loss
        self.progress.eval_sources_before = evaluation.sources
        self.report_evaluation(evaluation)
        self.progress.sample_before = self.write_sample("before")

    def look_after(self) -> None:
        """Held-out loss, a sample, the export and result.json."""
        evaluation = self.timed_evaluation()
        self.report_evaluation(evaluation)
        sample = self.write_sample("after")
        with self.watch.measure("checkpoint"):
            self.outputs.export(self.model)
        self.runtime.barrier("exported")
        seconds = dict(self.watch.seconds)
        ending = Ending(
            progress=self.progress,
            evaluation=evaluation,
            sample_after=sample,
            report=self.model.report,
            counters=self.runtime.counters(),
            device_memory_gib=self.runtime.memory_gib(),
            seconds=seconds,
            tokens_per_second=self.train_tokens / max(seconds.get("train", 0) - self.train_compile_seconds, 1e-9),
        )
        self.outputs.result(ending)

    def timed_evaluation(self) -> Evaluation:
        """Evaluate outside the training time."""
        with self.watch.measure("eval"):
            return self.evaluate()

    def report_evaluation(self, evaluation: Evaluation) -> None:
        """Hand an evaluation to the loggers."""
        self.outputs.evaluation(self.progress.step, evaluation)

    def write_sample(self, when: str) -> str | None:
        """A continuation of `sample.prompt`, logged."""
        settings = self.config.sample
        if not settings.max_new_tokens:
            return None
        with self.watch.measure("eval"):
            ids = prompt_ids(self.inputs.tokenizer, settings.prompt, kind=self.inputs.prompt_kind)
            text = self.sampler.run(ids, max_new_tokens=settings.max_new_tokens)
        self.outputs.sample(self.progress.step, text, when=when)
        return text

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of everything that changes (rank 0) once all queued steps are done."""
        with self.watch.measure("checkpoint"):
            self.runtime.wait()
            self.record(self.window.drain())
            if self.runtime.rank == 0:
                save_checkpoint(
                    self.outputs.folder.path("checkpoints"),
                    step=self.progress.step,
                    groups={"parameters": to_host(self.parameters), "optimizer": to_host(flat(self.state))},
                    progress=self.progress.to_dict(),
                    keep_last=self.config.checkpoint.keep_last,
                )
            self.runtime.barrier("saved")

    def restore(self) -> None:
        """Go on from the newest complete checkpoint of the run folder, if there is one."""
        found = load_latest(self.outputs.folder.path("checkpoints"))
        if found is None:
            return
        values, tensors = found
        self.progress = Progress.from_dict(values)
        from_host(tensors, parameters=self.parameters, state=self.state, place=self.runtime.place)
        log.info(
            "resumed at step %d (stage %d, step %d)", self.progress.step, self.progress.stage, self.progress.stage_step
        )
