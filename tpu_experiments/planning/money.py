"""Length of a whole run in seconds, and its cost at the dated prices of conf/hw, spot and on demand."""

from dataclasses import dataclass

from tpu_experiments.config.hardware import PriceConfig
from tpu_experiments.planning.timing import Calibration, StepTime

HOUR = 3600.0


@dataclass(frozen=True)
class StageLength:
    """One stage of the curriculum in optimizer steps and seconds."""

    name: str
    steps: int
    step_seconds: float
    tokens: int
    """Tokens of all its rows, padding included."""
    epochs: float | None = None
    """Passes over its rows; null where the number of rows is not known."""

    @property
    def seconds(self) -> float:
        """Seconds of training alone."""
        return self.steps * self.step_seconds


@dataclass(frozen=True)
class RunLength:
    """Everything a machine is paid for between its start and its end, in seconds."""

    stages: tuple[StageLength, ...]
    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    compile_seconds: float = 0.0
    setup_seconds: float = 0.0
    """Seconds in which the chips are idle: environment, download and loading of the weights."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the figures, one sentence each."""
    reference_seconds: float = 0.0
    """Seconds of the pass before the first step whose values a loss compares with."""
    rollout_seconds: float = 0.0
    """Seconds in which answers are written, rewarded and scored, in all iterations."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by activity."""
        return {
            "training": sum(stage.seconds for stage in self.stages),
            **({"rollouts": self.rollout_seconds} if self.rollout_seconds else {}),
            "evaluation": self.eval_seconds,
            **({"reference": self.reference_seconds} if self.reference_seconds else {}),
            "checkpoints": self.checkpoint_seconds,
            "compiling": self.compile_seconds,
            "idle set-up": self.setup_seconds,
        }

    @property
    def seconds(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return sum(stage.tokens for stage in self.stages)

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def epochs(self) -> float | None:
        """Passes over the rows, weighted by stage; null where one is not known."""
        if not self.stages or any(not stage.epochs for stage in self.stages):
            return None
        one_pass = sum(stage.tokens / (stage.epochs or 1.0) for stage in self.stages)
        return self.tokens / one_pass if one_pass else None


@dataclass(frozen=True)
class Dollars:
    """One amount at both prices; null where there is no price."""

    spot: float | None
    on_demand: float | None

    def times(self, factor: float) -> "Dollars":
        """Return both amounts multiplied by `factor`."""
        return Dollars(
            None if self.spot is None else self.spot * factor,
            None if self.on_demand is None else self.on_demand * factor,
        )


@dataclass(frozen=True)
class Span:
    """Lowest and highest amount over all regions and the calibration's error; null without a range."""

    spot: tuple[float, float] | None
    on_demand: tuple[float, float] | None


@dataclass(frozen=True)
class Cost:
    """Hours and dollars of a whole run on all its chips, everything in RunLength included."""

    hours: float
    hours_range: tuple[float, float] | None
    """Lowest and highest by the calibration's relative error; null where it has none."""
    usd: Dollars
    usd_range: Span
    usd_per_epoch: Dollars
    """Dollars of the whole run divided by its epochs; null where they are not known."""
    hourly: Dollars
    """Price of all chips for one hour."""
    price: PriceConfig | None

    @property
    def spot_saving(self) -> float | None:
        """Share of the on-demand price that spot saves, 0 to 1."""
        if self.hourly.spot is None or not self.hourly.on_demand:
            return None
        return 1 - self.hourly.spot / self.hourly.on_demand


def chip_hour(price: PriceConfig | None) -> Dollars:
    """Return the two prices of one chip-hour."""
    if price is None:
        return Dollars(None, None)
    return Dollars(price.usd_per_chip_hour_spot, price.usd_per_chip_hour_on_demand)


def usd_per_million_tokens(step: StepTime, *, price: PriceConfig | None) -> Dollars:
    """Return dollars per million trained tokens in steady state, whatever the length of the run."""
    return chip_hour(price).times(1e6 / step.tokens_per_second_per_chip / HOUR)


def cost_of(run: RunLength, *, price: PriceConfig | None, num_devices: int, calibration: Calibration) -> Cost:
    """Return hours and dollars of `run`; the dollars are null without a price."""
    hours = run.seconds / HOUR
    hourly = chip_hour(price).times(num_devices)
    usd = hourly.times(hours)
    error = calibration.relative_error
    # The error is that of a step; compiling, set-up and checkpoints are taken as assumed.
    uncertain = (run.parts["training"] + run.rollout_seconds + run.eval_seconds + run.reference_seconds) / HOUR
    span = None if error is None else (hours - error * uncertain, hours + error * uncertain)
    low, high = span or (hours, hours)
    spot = _amounts(price.spot_range if price else [], low=low * num_devices, high=high * num_devices)
    listed = _amounts(price.on_demand_range if price else [], low=low * num_devices, high=high * num_devices)
    return Cost(
        hours=hours,
        hours_range=span,
        usd=usd,
        usd_range=Span(spot, listed),
        usd_per_epoch=usd.times(1 / run.epochs) if run.epochs else Dollars(None, None),
        hourly=hourly,
        price=price,
    )


def _amounts(prices: list[float], *, low: float, high: float) -> tuple[float, float] | None:
    """Return the lowest price of the fewest chip-hours and the highest of the most."""
    return (min(prices) * low, max(prices) * high) if prices else None
