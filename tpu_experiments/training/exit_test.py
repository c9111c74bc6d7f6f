"""The test that ends a stage early, or chooses the step whose parameters it ends with (`exit` of a stage)."""

import math

from tpu_experiments.checkpoint.progress import StageRecord
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.training.evaluation import Evaluation


def apply_exit_test(record: StageRecord, evaluation: Evaluation, *, stage: Stage, step: int) -> None:
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
