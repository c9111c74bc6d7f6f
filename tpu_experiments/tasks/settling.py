"""What a command leaves to its data and to the table of plans: rows, and the settings that only change speed."""

from tpu_experiments.config.schema import Config
from tpu_experiments.planning.tuned import tuned
from tpu_experiments.training.row_lengths import settled_with_totals


def settled_run(config: Config, *, is_lookup: bool = False, is_begun: bool = False) -> Config:
    """The config with the rows that its data asks for, and the fastest known settings for them (conf/tuned.yaml).

    Args:
        is_lookup: tokenises nothing; what is not there is counted with what is known of the source beforehand.
        is_begun: the run goes on, and keeps the settings that belong to its identity.

    Raises:
        ConfigError: a source that cannot be read, or is empty; with `is_lookup` none.
    """
    found, totals = settled_with_totals(config, is_lookup=is_lookup)
    return tuned(found, totals=totals, is_begun=is_begun)
