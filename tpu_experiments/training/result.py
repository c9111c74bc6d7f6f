"""The fields of result.json, which loggers/closing_lines.py prints at the end of a run."""

from dataclasses import asdict, dataclass
from typing import Any

from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.config.identity import config_hash
from tpu_experiments.config.model_schema import rounded_settings
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.result import peak_host_rss_gib
from tpu_experiments.models.adapters.lora import ParameterReport
from tpu_experiments.objectives.base import objective_class, writes_text
from tpu_experiments.runtime.base import Counters
from tpu_experiments.training.epochs import perplexity
from tpu_experiments.training.evaluation import Evaluation


@dataclass(frozen=True)
class Ending:
    """Facts that the trainer knows at the end of a run."""

    progress: Progress
    evaluation: Evaluation
    sample_after: str | None
    skill: dict[str, Any] | None
    """Shares of right answers before and after training (training/questions.py); None without questions."""
    report: ParameterReport
    counters: Counters
    device_memory_gib: float | None
    peak_device_memory_gib: float | None
    meters: dict[str, float | None]
    """Means over the measured steps of this process (training/meters.py); None for unknown values."""
    seconds: dict[str, float]
    """Exclusive wall seconds by activity; the seconds in `counters` are included in `train` and `eval`."""
    tokens_per_second: float
    """Tokens that this process trained on per second of training, without compilation."""
    proof: dict[str, Any] | None = None
    """Results of the export's verification; None if it was not verified."""


def result_fields(ending: Ending, *, config: Config, provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the content of result.json, except what only the adapter's writer knows."""
    progress, counters = ending.progress, ending.counters
    return {
        "status": "finished",
        "name": config.name,
        "task": config.task.name,
        "model": config.model.name,
        "data": list(config.data),
        "data_audit": progress.data,
        "start": progress.start,
        "hw": config.hw.name,
        "stages": [_stage(record, config=config) for record in progress.stages],
        **_quality(ending, predicts=config.objective.predicts),
        "writes_text": writes_text(config),
        **({} if objective_class(config).has_perplexity else {"has_perplexity": False}),
        **({} if config.objective.is_evaluated else {"is_evaluated": False}),
        **({} if config.objective.ranked_by is None else {"ranked_by": config.objective.ranked_by}),
        **({"rounded": rounded} if (rounded := rounded_settings(config.model)) else {}),
        "num_trainable": ending.report.trainable,
        "num_parameters": ending.report.total,
        "canary": progress.canary,
        "guard": {name: getattr(progress.guard, name) for name in ("skipped", "rollbacks", "passed_over")},
        "tokens": progress.tokens,
        "tokens_per_second": ending.tokens_per_second,
        "meters": ending.meters,
        "seconds": ending.seconds | {"trace": counters.trace_seconds, "compile": counters.compile_seconds},
        "num_compiles": counters.num_compiles,
        "compiles_after_warmup": counters.compiles_after_warmup,
        "compile_cache": asdict(counters.cache) if counters.cache is not None else None,
        "peak_host_rss_gib": peak_host_rss_gib(),
        "device_memory_gib": ending.device_memory_gib,
        "peak_device_memory_gib": ending.peak_device_memory_gib,
        "proof": ending.proof,
        "config_hash": config_hash(config),
        "git_commit": provenance["git_commit"],
        "versions": provenance["versions"],
    }


def _stage(record: StageRecord, *, config: Config) -> dict[str, Any]:
    """Return the results of a stage, with the mean loss of each pass over its rows."""
    epochs, is_perplexity = None, objective_class(config).has_perplexity
    counted = "supervised_tokens" if config.objective.predicts == "tokens" else "predictions"
    if record.epochs is not None:
        epochs = [
            {
                "epoch": each.epoch,
                "is_over": each.is_over,
                "steps": each.steps,
                counted: each.supervised,
                "train_loss": each.loss,
                "train_perplexity": perplexity(each.loss) if is_perplexity else None,
            }
            for each in record.epochs
        ]
    return asdict(record) | {"epochs": epochs}


def _quality(ending: Ending, *, predicts: str) -> dict[str, Any]:
    """Return held-out losses and samples, before and after training, and what `predicts` says the loss is of."""
    progress, evaluation = ending.progress, ending.evaluation
    return {
        "eval_loss_before": progress.eval_loss_before,
        "eval_loss": evaluation.loss,
        "eval_tokens": evaluation.num_tokens,
        f"eval_{predicts}": evaluation.num_predictions,
        "eval_sources_before": progress.eval_sources_before,
        "eval_sources": evaluation.sources,
        "perplexity": evaluation.perplexity,
        "eval_measures_before": progress.eval_measures_before,
        "eval_measures": evaluation.measures,
        "eval_source_measures_before": progress.eval_source_measures_before,
        "eval_source_measures": evaluation.source_measures,
        "sample_before": progress.sample_before,
        "sample_after": ending.sample_after,
        "skill": ending.skill,
    }
