"""Settle what a command leaves open: the rows that fit its data, and the fastest known settings."""

from tpu_experiments.config.schema import Config
from tpu_experiments.planning.tuned import tuned
from tpu_experiments.training.row_lengths import measure_rows_and_totals


def with_open_settings(config: Config, *, is_lookup: bool = False, is_begun: bool = False) -> Config:
    """Return the config with rows that fit its data and the fastest known settings (conf/tuned.yaml).

    Args:
        is_lookup: tokenise nothing; for sources that are not prepared, use what is known of them beforehand.
        is_begun: the run is resumed, and keeps the settings that belong to its identity.

    Raises:
        ConfigError: a source cannot be read, or is empty; never with `is_lookup`.
    """
    found, totals = measure_rows_and_totals(config, is_lookup=is_lookup)
    return tuned(found, totals=totals, is_begun=is_begun)
