"""End a run at a number of hours or dollars."""

from collections.abc import Mapping
from typing import Literal

from tpu_experiments.callbacks.base import Callback, Moment, is_number
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config


class StopAfter(Callback):
    """Ends a run once its processes together have had so many hours, or cost so many dollars."""

    def __init__(
        self,
        *,
        hours: float | None = None,
        usd: float | None = None,
        price: Literal["on_demand", "spot"] = "on_demand",
        then: Literal["end", "stop"] = "end",
    ) -> None:
        """Take the limits.

        Args:
            hours: by the clock, from the start of each process to its end.
            usd: those hours by the price of conf/hw.
            price: which of both prices.
            then: `end` evaluates and exports what is trained; `stop` saves a checkpoint, from which the same command
                goes on with a higher limit.
        """
        limits = {"hours": hours, "usd": usd}
        for name, limit in limits.items():
            if limit is not None and not (is_number(limit) and limit > 0):
                raise ConfigError(f"{name}={limit}; it must be a number above 0.")
        if hours is None and usd is None:
            raise ConfigError("hours=null and usd=null; there is no limit; set one of both.")
        if price not in ("on_demand", "spot"):
            raise ConfigError(f"price={price}; write on_demand or spot.")
        if then not in ("end", "stop"):
            raise ConfigError(f"then={then}; write end or stop.")
        self._hours, self._usd, self._price, self._then = hours, usd, price, then

    def check(self, config: Config) -> None:
        """Refuse dollars of a machine without a price."""
        price = config.hw.price
        known = price is not None and (self._price == "on_demand" or price.usd_per_chip_hour_spot is not None)
        if self._usd is not None and not known:
            raise ConfigError(f"usd={self._usd:g}; hw={config.hw.name} has no price {self._price}; set hours=.")

    def on_step_end(self, run: Moment) -> None:
        """Compare hours and dollars with the limits."""
        dollars = run.usd.get(self._price)
        if self._hours is not None and run.hours >= self._hours:
            self._ask(run, f"{run.hours:.3g} hours have reached hours={self._hours:g}")
        elif self._usd is not None and dollars is not None and dollars >= self._usd:
            self._ask(run, f"{dollars:.2f} dollars have reached usd={self._usd:g}")

    def on_evaluate(self, run: Moment, values: Mapping[str, float]) -> None:
        """Compare once more, since an evaluation takes a while."""
        self.on_step_end(run)

    def _ask(self, run: Moment, why: str) -> None:
        (run.end if self._then == "end" else run.stop)(why)
