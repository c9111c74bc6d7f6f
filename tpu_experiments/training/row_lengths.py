"""Row length, rows per step and labels of a run, found in the tokenised documents where they are not set."""

import logging
from dataclasses import replace

from tpu_experiments.config.defaults import AUTO, SMALL_STEP_TOKENS, Lengths, Rows, is_open, rows_of, with_lengths
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.prepare import labels_of, lengths_of
from tpu_experiments.data.prepared import NotPrepared
from tpu_experiments.data.steps.labels import LABELS_SHOWN, labels_of_training
from tpu_experiments.training.batches import load_run_tokenizer, preparation_settings

log = logging.getLogger(__name__)


def measure_rows(config: Config, *, is_lookup: bool = False) -> Config:
    """Return the config with its row length and rows per step, measured on the documents where open.

    Args:
        is_lookup: tokenise nothing; for sources that are not prepared, use what is known of them beforehand.

    Raises:
        ConfigError: a source cannot be read, or is empty; never with `is_lookup`.
    """
    return measure_rows_and_totals(config, is_lookup=is_lookup)[0]


def measure_rows_and_totals(config: Config, *, is_lookup: bool) -> tuple[Config, dict[str, int | None]]:
    """Return the config with its rows (`measure_rows`), and the tokens of every source measured for it.

    With `objective=classify` also its labels, where they are left to the data.
    """
    config = with_labels(config, is_lookup=is_lookup)
    if not is_open(config):
        return config, {}
    if config.trainer.seq_len != AUTO and config.model.step_tokens <= SMALL_STEP_TOKENS:
        return with_lengths(config, {}), {}  # no length of the data changes it
    try:
        measured = lengths_of(
            config.data,
            data_size=config.data_size,
            preparation=preparation_settings(config, tokenizer=load_run_tokenizer(config), is_lookup=is_lookup),
        )
    except (NotPrepared, ConfigError) as error:
        if not is_lookup:
            raise
        why = f"data.{error} is not prepared (task=prepare)" if isinstance(error, NotPrepared) else str(error)
        rows = rows_of(config)
        log.warning("%s, assumed until the data is prepared: %s", rows_text(rows), why)
        return with_lengths(config, None), {}
    found = with_lengths(config, measured)
    log.info(
        "%s: %s",
        rows_text(rows_of(found)),
        "; ".join(_length_words(name, known, kind=config.data[name].kind) for name, known in measured.items()),
    )
    return found, {name: known.total for name, known in measured.items()}


def with_labels(config: Config, *, is_lookup: bool) -> Config:
    """Return the config with the labels of the training rows, where the objective has labels and none are set.

    Raises:
        ConfigError: a source cannot be read, or has less than two labels; never with `is_lookup`.
    """
    objective = config.objective
    if not objective.reads_labels or objective.known_labels() is not None:
        return config
    try:
        counts = labels_of(
            config.data,
            data_size=config.data_size,
            preparation=preparation_settings(config, tokenizer=load_run_tokenizer(config), is_lookup=is_lookup),
        )
        labels = labels_of_training(counts)
    except (NotPrepared, ConfigError) as error:
        if not is_lookup:
            raise
        why = f"data.{error} is not prepared (task=prepare)" if isinstance(error, NotPrepared) else str(error)
        log.warning("two labels, assumed until the data is prepared: %s", why)
        return config
    log.info("%d labels: %s", len(labels), ", ".join(labels[:LABELS_SHOWN]))
    return replace(config, objective=objective.with_labels(labels))


def rows_text(rows: Rows) -> str:
    """Format the rows of a step."""
    tokens = rows.global_rows * rows.seq_len
    return f"steps of {rows.global_rows:,} rows of {rows.seq_len:,} tokens, {tokens:,} in all"


def _length_words(name: str, lengths: Lengths, *, kind: str) -> str:
    if lengths.held is None:
        return f"data.{name} has no documents"
    held = "95 % of the documents" if kind == "text" else "99 % of the documents"
    return f"{held} of data.{name} have {lengths.held:,} tokens or fewer, all together {lengths.total:,}"
