"""Load the held-out documents that task=evaluate scores, before a device is used."""

import logging
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.held_out import HeldOut, held_out_documents
from tpu_experiments.models.parts.rope import row_limits
from tpu_experiments.objectives.base import Computing, model_source, objective_class, objective_of, writes_text
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.tasks.evaluate.ngrams import Ngrams, counted
from tpu_experiments.tasks.evaluate.subject import Subject, task_of
from tpu_experiments.tasks.setup import check_ids
from tpu_experiments.training.batches import (
    RunInputs,
    load_run_tokenizer,
    preparation_settings,
    prepare_sources,
)
from tpu_experiments.training.evaluation import Exchange, decoded_documents, exchanges

log = logging.getLogger(__name__)


class NothingHeldOut(ConfigError):
    """No source holds a document back for the split."""


@dataclass(frozen=True)
class EvaluationInputs:
    """Inputs of every evaluating process; picklable."""

    splits: dict[str, HeldOut]
    exchanges: dict[str, list[Exchange]]
    """Exchanges of the chat sources to answer."""
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    seq_len: int
    ngrams: Ngrams | None = None
    """Guesses of masked tokens; None for other objectives."""


def evaluation_inputs(subject: Subject, stages: list[Stage], *, vocab_size: int) -> EvaluationInputs:
    """Return the held-out documents of every source and what is needed to score them.

    Raises:
        ConfigError: there are none, or the prepared data differ from those of training.
    """
    config = subject.config
    task = task_of(config)
    check_pseudo_perplexity(config)
    tokenizer = load_run_tokenizer(config)
    inputs = RunInputs(tokenizer, prepare_sources(config, tokenizer=tokenizer, stages=stages), stages)
    check_ids(config, inputs, vocab_size=vocab_size)
    check_audit(subject, inputs)
    seq_len = task.seq_len or inputs.eval_seq_len
    found = held_out_of(config, tokenizer=tokenizer)
    splits = {name: held_out.cut(seq_len) for name, held_out in found.items()}
    if not any(held_out.flat.num_documents for held_out in splits.values()):
        raise NothingHeldOut(f"task.seq_len={seq_len}; no held-out pair fits a row of so many tokens; raise it.")
    splits = {name: held_out for name, held_out in splits.items() if held_out.flat.num_documents}
    check_length(config, seq_len)
    if task.generate and not writes_text(config):
        raise ConfigError(
            f"task.generate={task.generate} with objective={config.objective.name}; task=evaluate compares the answers "
            "of causal decoders alone; leave it out."
        )
    if task.generate and task.max_new_tokens >= seq_len:
        raise ConfigError(
            f"task.max_new_tokens={task.max_new_tokens}; it leaves no room for the prompt in the {seq_len} tokens of a "
            "row; use less, or a larger task.seq_len."
        )
    if task.documents is not None:
        write_documents(splits, tokenizer=tokenizer, file=task.documents)
    chats = {name: held_out for name, held_out in splits.items() if held_out.kind == "chat" and task.generate}
    asked = {name: exchanges(held_out, tokenizer=tokenizer, num=task.generate) for name, held_out in chats.items()}
    return EvaluationInputs(splits, asked, tokenizer, stages[0].geometry, seq_len, ngrams=ngrams_of(config, inputs))


def ngrams_of(config: Config, inputs: RunInputs) -> Ngrams | None:
    """Count the tokens of the training split of all sources, for masked language models; None for other models."""
    objective = objective_of(config, Computing(), tokenizer=inputs.tokenizer)
    if not objective.masks_in_turn:
        return None
    stores = [source.store("train", inputs.eval_seq_len) for source in inputs.sources.values()]
    return counted(stores, vocabulary=objective.vocabulary)


def check_pseudo_perplexity(config: Config) -> None:
    """Refuse pseudo-perplexity of a model that predicts no masked tokens.

    Raises:
        ConfigError: `task.pseudo_perplexity_documents` is set for another objective.
    """
    wanted = task_of(config).pseudo_perplexity_documents
    if wanted and not objective_class(config).masks_in_turn:
        raise ConfigError(
            f"task.pseudo_perplexity_documents={wanted} with objective={config.objective.name}; tokens are masked in "
            "turn for runs of objective=mlm alone; leave it out."
        )


def check_length(config: Config, seq_len: int) -> None:
    """Refuse rows longer than the model's maximum.

    Raises:
        ConfigError: `task.seq_len` exceeds it.
    """
    source = model_source(config)
    for name, limit in row_limits(source.config).items():
        if seq_len > limit:
            raise ConfigError(
                f"task.seq_len={seq_len} is longer than model={config.model.name} allows ({name}={limit}); use {limit} "
                "or less."
            )


def write_documents(splits: dict[str, HeldOut], *, tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """Write the documents of all sources as text, one JSON object per line."""
    records = [record for held_out in splits.values() for record in decoded_documents(held_out, tokenizer=tokenizer)]
    paths.make_dirs(paths.folder_of(file))
    paths.write_text_atomic(file, "".join(strict_json.dumps(record) + "\n" for record in records))
    log.info("%d documents: %s", len(records), file)


def held_out_of(config: Config, *, tokenizer: PreTrainedTokenizerBase) -> dict[str, HeldOut]:
    """Return the documents of every source that has some in the split.

    Raises:
        NothingHeldOut: no source has.
    """
    task, preparation = task_of(config), preparation_settings(config, tokenizer=tokenizer, is_lookup=True)
    found = {
        name: held_out_documents(
            name,
            source,
            split=task.split,
            data_size=config.data_size,
            preparation=preparation,
            max_documents=task.max_documents,
            seed=config.seed,
            by=task.by,
        )
        for name, source in config.data.items()
    }
    found = {name: held_out for name, held_out in found.items() if _has_documents(held_out, config)}
    if not found:
        raise NothingHeldOut(
            f"task.split={task.split}; no source holds a document back for it ({_fractions(config)}); raise the "
            "fraction before you train, name files of your own (data.<name>.test_path=, eval_path=), or take the other "
            "split."
        )
    if task.by is not None and all(held_out.values is None for held_out in found.values()):
        raise ConfigError(f"task.by={task.by}; no source has such a field in its rows; name one that is there.")
    return found


def _has_documents(held_out: HeldOut, config: Config) -> bool:
    """Return whether there is something to evaluate; log a warning if not."""
    if held_out.flat.num_documents:
        return True
    log.warning("data.%s has no document in the %s split: the source is skipped", held_out.name, task_of(config).split)
    return False


def _fractions(config: Config) -> str:
    name = {"test": "test_fraction", "evaluation": "eval_fraction"}[task_of(config).split]
    return ", ".join(f"data.{source}.{name}={getattr(values, name)}" for source, values in config.data.items())


def check_audit(subject: Subject, inputs: RunInputs) -> None:
    """Refuse data other than the training data, whose held-out documents may have been trained on.

    Raises:
        ConfigError: the audit hash of a source differs.
    """
    if subject.audit is None or task_of(subject.config).data == "selected":
        log.warning(
            "the training data of %s is unknown: these documents may be part of it", subject.place or "the base"
        )
        return
    changed = [key for key, value in inputs.audit_hashes.items() if subject.audit.get(key) != value]
    if changed:
        shown = ", ".join(f"{key} {subject.audit.get(key)} then, {inputs.audit_hashes[key]} now" for key in changed)
        raise ConfigError(
            f"{subject.place}; it was trained on other data (audit hash of {shown}), so that documents held out now "
            "may be among what it has learnt; restore the files, tokenizer and rules of data preparation, or evaluate "
            "it on other data with task.data=selected data=NAME."
        )
