"""task=evaluate: score held-out documents with the trained model and its base.

Measures are loss, perplexity, bits per byte and accuracy, of classifiers also F1, of preference pairs loss, accuracy
and margin. The base is the model as built: its adapter has no effect yet (for full training, its weights are the
initial ones). Of a run whose loss compares with the model that it started from, it is that model. The trained tensors
then replace its parameters in the same compiled program.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import EvaluateTaskConfig
from tpu_experiments.data.tokens.widths import Widths, widths_of
from tpu_experiments.loggers.runlog import start_run_log, terminal_log
from tpu_experiments.metrics.bootstrap import Sums
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.metrics.held_out import (
    FURTHER,
    LabelPairs,
    Measure,
    Resampling,
    answer_scores,
    as_bounds,
    compared_answers,
    compared_by_source,
    compared_by_value,
    compared_labels,
    compared_measures,
    without,
)
from tpu_experiments.objectives.base import Computing, objective_class, objective_of, writes_text
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.processes.launch import launch
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.run_folder import with_settings_of_run
from tpu_experiments.tasks.evaluate import harness
from tpu_experiments.tasks.evaluate.base_and_trained import ModelAndBase
from tpu_experiments.tasks.evaluate.inputs import EvaluationInputs, evaluation_inputs
from tpu_experiments.tasks.evaluate.report import Results, as_text, facts
from tpu_experiments.tasks.evaluate.subject import Subject, subject_of, task_of
from tpu_experiments.tasks.setup import check_model
from tpu_experiments.training.batches import stages_with_data
from tpu_experiments.training.evaluation import Exchange
from tpu_experiments.training.row_lengths import measure_rows

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Print the table and write `<run>/test_results.json`.

    Raises:
        ConfigError: something the user can fix; nothing was written.
    """
    with terminal_log():
        subject = subject_of(with_settings_of_run(config))
        if task_of(config).harness:
            harness.run(subject)
            return
        subject = replace(subject, config=measure_rows(subject.config))
        stages = stages_with_data(subject.config)
        vocab_size = check_model(subject.config, stages)
        inputs = evaluation_inputs(subject, stages, vocab_size=vocab_size)
        launch(evaluate_process, subject.config, subject, inputs)


def evaluate_process(runtime: Runtime, config: Config, subject: Subject, inputs: EvaluationInputs) -> None:
    """Evaluate in every process; rank 0 prints and writes."""
    start_run_log(None, rank=runtime.rank)
    watch, task = Stopwatch(), task_of(config)
    with watch.measure("load"):
        model = ModelAndBase(
            runtime,
            config,
            subject=subject,
            tokenizer=inputs.tokenizer,
            shape=(inputs.geometry.micro_rows * inputs.geometry.num_shards, inputs.seq_len),
            max_new_tokens=task.max_new_tokens,
            max_prompts=max(map(len, inputs.exchanges.values()), default=0),
            ngrams=inputs.ngrams,
        )
    measured = measure(model, inputs, task=task, widths=_widths(config, inputs), watch=watch)
    results = compared(measured, inputs, config=config)
    if runtime.rank == 0:
        in_split = {name: held_out.num_in_split for name, held_out in inputs.splits.items()}
        fields = facts(subject, results, num_in_split=in_split) | {
            "seq_len": inputs.seq_len,
            "seconds": watch.seconds,
            "num_compiles": runtime.counters().num_compiles,
        }
        paths.make_dirs(paths.folder_of(subject.results))
        paths.write_text_atomic(subject.results, strict_json.dumps(fields, indent=1) + "\n")
        print(for_terminal(as_text(subject, results)))


def _widths(config: Config, inputs: EvaluationInputs) -> Widths | None:
    """Return the bytes of every token; None where bits per byte are not measured."""
    if not (writes_text(config) or objective_class(config).has_bound):
        return None
    widths = widths_of(inputs.tokenizer)
    if widths is None:
        log.warning(
            "bits per byte is not reported: this tokenizer is neither byte-level nor has SentencePiece's blanks"
        )
    return widths


@dataclass
class Measured:
    """What was measured of the base, and of the trained model if there is one: `base` or `trained` to source to it."""

    sums: dict[str, dict[str, Sums]] = field(default_factory=dict)
    answers: dict[str, dict[str, Sums]] = field(default_factory=dict)
    labels: dict[str, dict[str, LabelPairs]] = field(default_factory=dict)
    further: dict[str, dict[str, dict[str, Sums]]] = field(default_factory=dict)
    """With the name of a measure in between."""


def measure(
    model: ModelAndBase, inputs: EvaluationInputs, *, task: EvaluateTaskConfig, widths: Widths | None, watch: Stopwatch
) -> Measured:
    """Measure the base, and then the trained model."""
    found = Measured()
    for state in model.states():
        with watch.measure("score"):
            found.sums[state] = {name: model.sums(held_out, widths=widths) for name, held_out in inputs.splits.items()}
            for held_out in inputs.splits.values() if task.pseudo_perplexity_documents else ():
                model.mask_in_turn(held_out, num_documents=task.pseudo_perplexity_documents)
            found.labels[state], found.further[state] = dict(model.labels), model.further
        with watch.measure("write"):
            found.answers[state] = {name: written_scores(model, wanted) for name, wanted in inputs.exchanges.items()}
    return found


def compared(measured: Measured, inputs: EvaluationInputs, *, config: Config) -> Results:
    """Return every figure with its interval, of the base and of the trained model, and their difference."""
    task = task_of(config)
    how = Resampling(task.resamples, task.confidence, config.seed)
    own = measure_of(config, tokenizer=inputs.tokenizer)
    sources = compared_by_source(measured.sums["base"], measured.sums.get("trained"), resampling=how, measure=own)
    values = {name: held_out.values for name, held_out in inputs.splits.items() if held_out.values is not None}
    sides = (measured.sums["base"], measured.sums.get("trained"))
    by_value = compared_by_value(*sides, values=values, resampling=how, measure=own)
    if not objective_class(config).has_perplexity:
        named = as_bounds if objective_class(config).has_bound else partial(without, measure="perplexity")
        sources = {name: named(each) for name, each in sources.items()}
        by_value = {name: {value: named(each) for value, each in own.items()} for name, own in by_value.items()}
    written = measured.answers.get("trained", {})
    answers = {
        name: compared_answers(scores, written.get(name), resampling=how)
        for name, scores in measured.answers["base"].items()
    }
    labels = {}
    if config.objective.reads_labels:
        names = config.objective.known_labels() or ()
        labels = compared_labels(measured.labels["base"], measured.labels.get("trained"), labels=names, resampling=how)
    more = measured.further.get("trained", {})
    further = {
        name: compared_measures(sums_D, more.get(name), measure=FURTHER[name], resampling=how)
        for name, sums_D in measured.further["base"].items()
    }
    return Results(sources, answers, by_value, labels, further)


def measure_of(config: Config, *, tokenizer: PreTrainedTokenizerBase) -> Measure | None:
    """Return what the objective makes of its own sums of documents; None where tokens are scored."""
    if not config.objective.reads_pairs:
        return None
    objective = objective_of(config, Computing(), tokenizer=tokenizer)
    return lambda sums_RK: objective.measures([*sums_RK[:, 2:].T])


def written_scores(model: ModelAndBase, wanted: list[Exchange]) -> Sums:
    """Return the scores (N, 4) of the model's answers (metrics/held_out.py)."""
    written = model.write([exchange.prompt_ids for exchange in wanted])
    return answer_scores(written, [exchange.reference for exchange in wanted])
