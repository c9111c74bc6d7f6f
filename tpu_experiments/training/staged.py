"""What a trainer does with the evaluations of a stage: report them, and end the stage by them."""

import logging
import math

from tpu_experiments.checkpoint.store import latest_step
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.training.evaluate import Evaluation
from tpu_experiments.training.inputs import steps_by_stage
from tpu_experiments.training.progress import AnswersRecord, Progress, StageRecord
from tpu_experiments.training.sample import prompt_ids
from tpu_experiments.training.saved import read_state
from tpu_experiments.training.watched import Watched

log = logging.getLogger(__name__)


class Staged(Watched):
    """Base of `Trainer` that evaluates stages and ends them; every process decides the same."""

    evaluated: Evaluation | None = None
    """Of the parameters as they are."""
    answered: dict[str, AnswersRecord] | None = None
    """Likewise."""

    def timed_evaluation(self) -> Evaluation:
        """Evaluate, timed apart from training."""
        with self.watch.measure("eval"):
            return self.evaluate()

    def report_evaluation(self, evaluation: Evaluation) -> None:
        """Pass an evaluation to the loggers."""
        self.progress.eval_loss, self.progress.eval_step = evaluation.loss, self.progress.step
        self.outputs.evaluation(self.progress.step, evaluation)

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after this step of the run."""
        every = self.intervals.evaluate
        return bool(every) and step % every == 0

    def evaluate_stage(self, stage: Stage) -> None:
        """Evaluate a stage, report it, apply the stage's exit test, and write samples."""
        evaluation = self.timed_evaluation()
        self.report_evaluation(evaluation)
        record = self.progress.stages[-1]
        record.eval_loss, record.eval_sources = evaluation.loss, evaluation.sources
        if stage.watches:
            judge(record, evaluation, stage=stage, step=self.progress.step)
            if record.ended_by:
                log.info("stage %s ends after %d steps: %s", stage.name, record.steps, record.ended_by)
        self.evaluated = evaluation
        self.answered = self.ask()
        self.write_sample("during")

    def write_sample(self, when: str) -> str | None:
        """Log a continuation of every prompt; return that of `sample.prompt`."""
        settings, inputs = self.config.sample, self.inputs
        if not settings.max_new_tokens or (when == "during" and settings.at == "ends"):
            return None
        with self.watch.measure("eval"):
            prompts = [prompt_ids(inputs.tokenizer, each, kind=inputs.prompt_kind) for each in settings.all_prompts]
            texts = self.sampler.run(prompts, max_new_tokens=settings.max_new_tokens)
        self.outputs.sample(self.progress.step, texts, when=when)
        return texts[0]

    def ask(self) -> dict[str, AnswersRecord]:
        """Ask and log every set of questions; return the results."""
        if not self.inputs.questions:
            return {}
        with self.watch.measure("eval"):
            found = self.asker.ask(self.inputs.questions)
        self.outputs.answers(self.progress.step, found)
        return found

    def end_stage(self, stage: Stage) -> None:
        """Evaluate after the last step, and restore the best evaluation's step if the stage ends with it."""
        if self.progress.eval_step != self.progress.step:
            self.evaluate_stage(stage)
        record = self.progress.stages[-1]
        best, record.held_step = record.held_step, None
        if best is None or best == self.progress.step:
            return
        self.saver.join()  # it may be about to be complete
        folder = self.outputs.folder.path("checkpoints")
        if self.runtime.any_process(latest_step(folder, before=best + 1) != best):
            log.warning(
                "stage %s: there is no checkpoint of step %d, its best; it ends with its last", stage.name, best
            )
            return
        self.read_checkpoint(before=best + 1)
        assert record.best_loss is not None
        record.restored_step, record.eval_loss, record.eval_sources = best, record.best_loss, {}
        self.evaluated = self.answered = None
        log.info("stage %s ends with step %d, whose exit loss %.4f is its best", stage.name, best, record.best_loss)

    def read_checkpoint(self, *, before: int | None = None) -> Progress | None:
        """Restore tensors from the newest complete checkpoint (of a step below `before`)."""
        self.saver.join()
        return read_state(
            self.outputs.folder.path("checkpoints"),
            parameters=self.parameters,
            state=self.state,
            place=self.runtime.place,
            order=self.model.order,
            stages=steps_by_stage(self.inputs, config=self.config),
            before=before,
            max_held_bytes=self.config.checkpoint.max_copy_gib * 2**30,
        )


def judge(record: StageRecord, evaluation: Evaluation, *, stage: Stage, step: int) -> None:
    """Compare an evaluation with the stage's earlier ones, and note in `record` if it ends the stage."""
    test = stage.exit
    loss = exit_loss(evaluation, stage=stage)
    if math.isfinite(loss) and (record.best_loss is None or loss < record.best_loss):
        record.best_loss = loss
        record.held_step = step if test.ends_with == "best" else None
    if math.isfinite(loss) and (record.goal_loss is None or loss < record.goal_loss - test.min_delta):
        record.goal_loss, record.num_worse = loss, 0
    else:
        record.num_worse += 1
    if test.eval_loss is not None and loss <= test.eval_loss:
        record.ended_by = f"its held-out loss {loss:.4f} is at most {test.eval_loss} (exit.eval_loss)"
    elif test.patience is not None and record.num_worse >= test.patience:
        record.ended_by = (
            f"{record.num_worse} evaluations in a row were not better than {record.goal_loss or math.nan:.4f}"
            f"{f' by more than {test.min_delta}' if test.min_delta else ''} (exit.patience)"
        )


def exit_loss(evaluation: Evaluation, *, stage: Stage) -> float:
    """Return the mean of the counted sources' held-out losses, nats per token.

    If none of them has one, the loss over all tokens.
    """
    sources = stage.exit.sources or stage.sources
    losses = [evaluation.sources[name] for name in sources if name in evaluation.sources]
    return sum(losses) / len(losses) if losses else evaluation.loss
