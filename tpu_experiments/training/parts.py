"""What a trainer is made of: model, optimizer, the step and its programs, meters; and what a subclass may change."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from tpu_experiments.config.build import locate
from tpu_experiments.config.intervals import Intervals, intervals_of
from tpu_experiments.config.schema import Config
from tpu_experiments.data.batches import Batch
from tpu_experiments.data.tokens.widths import widths_of
from tpu_experiments.metrics.flops import flops_by_length
from tpu_experiments.metrics.norms import grouped
from tpu_experiments.metrics.stopwatch import Stopwatch
from tpu_experiments.models.build import build_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.scoring import Scores, next_token_scores
from tpu_experiments.optim.base import Optimizer, State
from tpu_experiments.optim.build import optimizer_of
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.stacked import is_stack
from tpu_experiments.training.evaluate import Evaluation, Evaluator
from tpu_experiments.training.exported import Export
from tpu_experiments.training.guard import Guard
from tpu_experiments.training.inputs import RunInputs, evaluation_batches, steps_by_stage
from tpu_experiments.training.meters import Meters
from tpu_experiments.training.outputs import RunOutputs
from tpu_experiments.training.progress import Progress
from tpu_experiments.training.proof import Answers, Start
from tpu_experiments.training.questions import Asker
from tpu_experiments.training.sample import Sampler
from tpu_experiments.training.saved import flat, zero_state
from tpu_experiments.training.saving import Saver
from tpu_experiments.training.step import Rows, StepOutput, TrainStep, commit, loss_settings, next_token_loss
from tpu_experiments.training.stop import StopFlag
from tpu_experiments.training.window import Window

log = logging.getLogger(__name__)


class Parts:
    """Base of `Trainer`: builds all parts and runs nothing. A plan builds the same parts on placeholders."""

    def __init__(
        self, config: Config, runtime: Runtime, *, inputs: RunInputs, outputs: RunOutputs, watch: Stopwatch
    ) -> None:
        self.config, self.runtime, self.inputs, self.outputs, self.watch = config, runtime, inputs, outputs, watch
        self.stop = StopFlag(config.checkpoint.grace_seconds, agree=runtime.any_process)
        self.saver: Saver
        self.progress = Progress(data=inputs.audit_hashes)
        self.window = Window()
        self.guard = Guard(config.trainer.guard, process=runtime.share)
        self.train_compile_seconds = 0.0  # part of the training time, taken off the throughput
        self.train_tokens = 0  # of this process's life; `progress` counts those of earlier lives too

    # ---- what a trainer of your own may override ------------------------------------------------------------

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of supervised tokens of every row, (R,) each."""
        return next_token_loss(module, parameters, rows, **loss_settings(self.config, self.runtime))

    def token_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return evaluation's token scores for the loss of `row_loss`; unused where that is overridden."""
        return next_token_scores(module, parameters, rows, **loss_settings(self.config, self.runtime))

    def build_optimizer(self) -> Optimizer:
        """Create the optimizer named by `optim._target_`, with the settings of `optim`."""
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
        total = sum(steps_by_stage(self.inputs, config=self.config).values())
        return intervals_of(self.config, total_steps=total)

    # ---- building -------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Create model and optimizer state on the device, and the programs of a run."""
        config, runtime = self.config, self.runtime
        self.model = build_model(
            self.model_source(),
            lora=config.lora,
            seed=config.seed,
            place=runtime.place,
            folding=runtime.folding,
        )
        self.model.module.train()
        self.parameters = self.model.trainable
        self.optimizer = self.build_optimizer()
        self.state = self.fresh_state()
        self.norm_groups = grouped(list(self.parameters)) if config.trainer.norms_every_steps else {}
        lengths = {stage.geometry.seq_len for stage in self.inputs.stages}
        is_folded = any(map(is_stack, self.parameters))
        flops = flops_by_length(config, self.model.source.config, seq_lens=lengths, is_folded=is_folded)
        self.meters = Meters(runtime, config.hw, flops)
        self.step = TrainStep(
            self.model.module,
            optimizer=self.optimizer,
            clip_norm=config.optim.clip_norm,
            sum_over_processes=runtime.sum_over_processes,
            row_loss=self.row_loss,
            loop=runtime.loop,
            lay=runtime.lay,
            norm_groups=self.norm_groups,
        )
        self.step_program = runtime.program(self.step_in_place, name="train", held=self.held)
        parts: dict[str, Any] = {"runtime": runtime, "parameters": self.parameters}
        self.evaluator = self.build_evaluator()
        self.sampler = Sampler(
            self.model.module,
            tokenizer=self.inputs.tokenizer,
            settings=config.sample,
            seed=config.seed,
            **parts,
        )
        self.asker = Asker(self.model.module, tokenizer=self.inputs.tokenizer, settings=config.sample, **parts)
        log.info("%s", self.model.report)

    def build_evaluator(self) -> Evaluator:
        """Create the evaluator; with an overridden `row_loss` it reports the loss alone."""
        is_own = type(self).row_loss is not Parts.row_loss
        tokenizer = self.inputs.tokenizer  # a plan has none
        return Evaluator(
            self.model.module,
            runtime=self.runtime,
            row_loss=self.row_loss,
            parameters=self.parameters,
            token_scores=None if is_own else self.token_scores,
            widths=widths_of(tokenizer) if tokenizer is not None else None,
        )

    def build_saver(self) -> Saver:
        """Create the saver, which verifies on held-out rows of the first source that has some."""
        batches = (next(iter(found), None) for found in self.held_out.values())
        answers = Answers(self.evaluator, next(batches, None), runtime=self.runtime, parameters=self.parameters)
        start = Start(self.model.fingerprints, self.model.initial, is_adapter=self.config.lora.r > 0)
        spool = self.outputs.spool
        settings = replace(self.config.checkpoint, every_steps=self.intervals.save)
        return Saver(settings, spool, runtime=self.runtime, start=start, answers=answers)

    def proof_of_export(self) -> dict[str, Any] | None:
        """Return the verification of the written adapter or model; every process takes part."""
        if not self.config.checkpoint.prove:
            return None
        folder = self.outputs.folder.path("adapter" if self.config.lora.r > 0 else "model")
        export = Export(
            folder,
            digests=self.outputs.export_digests,
            model=self.model,
            start=self.saver.start,
            max_held_bytes=self.config.checkpoint.max_copy_gib * 2**30,
        )
        return export.proof(self.progress, answers=self.saver.answers, runtime=self.runtime)

    def model_source(self) -> HuggingFaceModel:
        """Return the source of the model's config, module and weights."""
        source: HuggingFaceModel = locate(self.config.model._target_, key="model")(
            self.config.model, seed=self.config.seed
        )
        return source

    def fresh_state(self) -> State:
        """Return zero optimizer state, each slot placed as its parameter."""
        return zero_state(self.optimizer, self.parameters, zeros=self.runtime.zeros)

    def held(self) -> dict[str, Tensor]:
        """Return the tensors that a step changes: parameters, and optimizer state by `<parameter>/<slot>`."""
        return {**self.parameters, **flat(self.state)}

    def step_in_place(self, batch: Mapping[str, Tensor]) -> StepOutput:
        """Run one optimizer step and update the device's tensors in place."""
        parameters, state, output = self.step(self.parameters, self.state, batch)
        commit(self.parameters, self.state, new=(parameters, state))
        return output
