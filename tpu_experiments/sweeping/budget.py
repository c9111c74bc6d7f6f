"""The dollars of a sweep's points at the price on demand, and their limit `sweeping.max_usd`."""

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.goodput import hourly_price

HOUR = 3600.0


def check_price(config: Config) -> None:
    """Refuse a limit in dollars for points whose machine has no price.

    Raises:
        ConfigError: there is none.
    """
    if config.sweeping.max_usd is not None and not hourly_price(config.hw)["on_demand"]:
        raise ConfigError(
            f"sweeping.max_usd={config.sweeping.max_usd:g}; hw={config.hw.name} has no price on demand to count with; "
            "set hw.price, or leave the limit out."
        )


def usd_of(config: Config, seconds: float) -> float:
    """Return what a point's machine costs in these seconds; 0 without a price."""
    return seconds / HOUR * (hourly_price(config.hw)["on_demand"] or 0.0)


def seconds_left(config: Config, *, spent_usd: float) -> float | None:
    """Return the seconds of a point's machine that the rest of the limit pays for; None without a limit."""
    limit = config.sweeping.max_usd
    return None if limit is None else max(0.0, limit - spent_usd) / usd_of(config, 1.0)
