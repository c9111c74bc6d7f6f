"""The end of a run: the fields of result.json and the closing lines on the terminal."""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from tpu_experiments.config.identity import config_hash
from tpu_experiments.config.schema import Config
from tpu_experiments.io import paths
from tpu_experiments.io.folder import RunFolder
from tpu_experiments.logging.promise import promise_line
from tpu_experiments.logging.result import peak_host_rss_gib
from tpu_experiments.metrics.goodput import goodput_lines
from tpu_experiments.models.lora import ParameterReport
from tpu_experiments.runtime.base import Counters
from tpu_experiments.training.evaluate import Evaluation
from tpu_experiments.training.progress import Progress


@dataclass(frozen=True)
class Ending:
    """What the trainer knows when it is done."""

    progress: Progress
    evaluation: Evaluation
    sample_after: str | None
    report: ParameterReport
    counters: Counters
    device_memory_gib: float | None
    peak_device_memory_gib: float | None
    meters: dict[str, float | None]
    """Means over the measured steps of this process's life (training/meters.py)."""
    seconds: dict[str, float]
    """Exclusive wall seconds by activity; those of `counters` lie inside `train` and `eval`."""
    tokens_per_second: float
    """Tokens trained on in this process's life per second of training, compilation taken off."""
    proof: dict[str, Any] | None = None
    """What was looked at of the export; None where nothing was."""


def result_fields(ending: Ending, *, config: Config, provenance: dict[str, Any]) -> dict[str, Any]:
    """The content of result.json, without what only the writer of the adapter knows."""
    progress, counters = ending.progress, ending.counters
    return {
        "status": "finished",
        "name": config.name,
        "task": config.task.name,
        "model": config.model.name,
        "data": list(config.data),
        "data_audit": progress.data,
        "hw": config.hw.name,
        "stages": [asdict(record) for record in progress.stages],
        **_quality(ending),
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


def _quality(ending: Ending) -> dict[str, Any]:
    """Held-out losses and samples, before and after."""
    progress, evaluation = ending.progress, ending.evaluation
    return {
        "eval_loss_before": progress.eval_loss_before,
        "eval_loss": evaluation.loss,
        "eval_tokens": evaluation.num_tokens,
        "eval_sources_before": progress.eval_sources_before,
        "eval_sources": evaluation.sources,
        "perplexity": evaluation.perplexity,
        "eval_measures_before": progress.eval_measures_before,
        "eval_measures": evaluation.measures,
        "eval_source_measures_before": progress.eval_source_measures_before,
        "eval_source_measures": evaluation.source_measures,
        "sample_before": progress.sample_before,
        "sample_after": ending.sample_after,
    }


def summary(result: dict[str, Any], *, folder: RunFolder) -> str:
    """The closing lines: what came out, where it lies, what to do next."""
    before, after = result["eval_loss_before"], result["eval_loss"]
    seconds = result["seconds"]
    times = ", ".join(
        f"{name} {seconds[name]:.1f}" for name in ("setup", "load", "compile", "train", "eval") if name in seconds
    )
    sources = result["eval_sources"].items() if len(result["eval_sources"]) > 1 else ()
    lines = [
        f"finished {result['name']}",
        f"  held-out loss   {_loss(before)} -> {_loss(after)}  (perplexity {_loss(result['perplexity'], digits=2)})",
        *_measure_lines(result),
        *(f"    {name:<13} {_loss(result['eval_sources_before'].get(name))} -> {_loss(end)}" for name, end in sources),
        *(line for stage in result["stages"] for line in _stage_lines(stage)),
        *_guard_lines(result["guard"]),
        f"  trained         {result['num_trainable']:,} of {result['num_parameters']:,} parameters",
        f"  speed           {result['tokens_per_second']:,.0f} tokens/s; seconds: {times}",
        *promise_line(result.get("plan")),
        *_step_lines(result["meters"]),
        *goodput_lines((result.get("goodput") or {}).get("run")),
        f"  programs        {result['num_compiles']} compiled, {result['compiles_after_warmup']} after warm-up"
        + _cache_text(result["compile_cache"]),
        f"  sample before   {result['sample_before']!r}",
        f"  sample after    {result['sample_after']!r}",
        f"  run folder      {folder.path()}",
        f"  adapter         {result['adapter_path']}",
        "next:",
        f"  tensorboard --logdir {shlex.quote(paths.join(folder.path(), 'tensorboard'))}{_remote_flag(folder)}",
        "  python run.py " + shlex.quote(f"name={result['name']}_r32") + " lora=all_linear_r32   # rank 32 instead",
    ]
    return "\n".join(lines)


def _stage_lines(stage: dict[str, Any]) -> list[str]:
    """What became of a stage, and why it ended where that was not its last step."""
    line = (
        f"  stage {stage['name']:<10} {stage['steps']} steps, {stage['tokens']:,} tokens, train loss "
        f"{_loss(stage['first_train_loss'])} -> {_loss(stage['last_train_loss'])}, held-out {_loss(stage['eval_loss'])}"
    )
    notes = [stage["ended_by"]] if stage["ended_by"] else []
    notes += [f"it ends with step {stage['restored_step']}, its best"] if stage["restored_step"] else []
    return [line, *(f"    {note}" for note in notes)]


def _measure_lines(result: dict[str, Any]) -> list[str]:
    """Accuracy and bits per byte, where they are known."""
    before, after = result.get("eval_measures_before", {}), result.get("eval_measures", {})
    parts = [f"{name.replace('_', ' ')} {_loss(before.get(name))} -> {_loss(value)}" for name, value in after.items()]
    return [f"    {', '.join(parts)}"] if parts else []


def _step_lines(meters: dict[str, float | None]) -> list[str]:
    """Where the time of a step went, and the share of the peak where the hardware has one."""
    seconds = meters["step_seconds"]
    if not seconds:
        return []
    parts = [
        f"{100 * (meters[f'{name}_seconds'] or 0) / seconds:.0f} % {words}"
        for name, words in (("trace", "tracing"), ("input_wait", "waiting for input"), ("rest", "device and rest"))
    ]
    shares = [f"{name.upper()} {100 * share:.1f} %" for name in ("mfu", "hfu") if (share := meters[name]) is not None]
    return [f"  a step          {1000 * seconds:,.0f} ms: {', '.join([*parts, *shares])}"]


def _guard_lines(guard: dict[str, Any]) -> list[str]:
    """Steps that came to nothing, where there were any."""
    parts = []
    if guard["skipped"]:
        parts.append(f"{guard['skipped']} updates left out, their loss or gradient was not finite")
    if guard["rollbacks"]:
        steps = ", ".join(f"{first} to {last}" for first, last in guard["passed_over"])
        parts.append(f"rolled back {guard['rollbacks']} times, steps {steps} passed over")
    return [f"  guard           {'; '.join(parts)}"] if parts else []


def _remote_flag(folder: RunFolder) -> str:
    """TensorBoard's fast loader has a client for gs:// of its own; the slow one reads through fsspec, as we do."""
    return " --load_fast=false" if paths.is_remote(folder.path()) else ""


def _cache_text(cache: dict[str, Any] | None) -> str:
    if cache is None:
        return ""
    unreadable = f", {cache['unreadable']} could not be read" if cache["unreadable"] else ""
    return f"; of the compile cache {cache['hits']} hits, {cache['misses']} misses{unreadable}"


def _loss(value: float | None, *, digits: int = 4) -> str:
    """A figure; result.json has null in the place of one that is not finite."""
    return "-" if value is None else f"{value:.{digits}f}"
