"""Schema of the curriculum: its stages, what each trains on, for how long, and when it may end before."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number


@dataclass
class ScheduleConfig:
    """Learning rate over the steps of one stage, as a multiple of the peak."""

    name: str = choice("constant", "linear", "cosine", "wsd")
    """`wsd`: warm-up, constant, then linear decay (arXiv 2404.06395)."""
    warmup_steps: int | None = number(default=None, at_least=0)
    """Steps of linear rise from 0 to the peak; null takes 3 % of the stage, at most 1,000."""
    floor: float = number(default=0.0, at_least=0, at_most=1)
    """Multiple of the peak at the end of the decay."""
    decay_fraction: float = number(default=0.2, above=0, at_most=1)
    """Share of the stage's steps that decay; `wsd` only."""


@dataclass
class StageScheduleConfig:
    """Schedule of one stage; null takes the run's own value (`schedule.*`)."""

    name: str | None = choice("constant", "linear", "cosine", "wsd", default=None)
    """Shape of the decay."""
    warmup_steps: int | None = number(default=None, at_least=0)
    """Steps of linear rise from 0 to the peak."""
    floor: float | None = number(default=None, at_least=0, at_most=1)
    """Multiple of the peak at the end of the decay."""
    decay_fraction: float | None = number(default=None, above=0, at_most=1)
    """Share of the stage's steps that decay; `wsd` only."""


@dataclass
class ExitTestConfig:
    """Test that ends a stage early, after every evaluation (`trainer.eval_every_steps`).

    Its loss is the mean over `sources` of each one's held-out loss, nats per token.
    """

    eval_loss: float | None = number(default=None, above=0)
    """Ends the stage once the loss is at most this."""
    patience: int | None = number(default=None, at_least=1)
    """Ends the stage after this many evaluations in a row that were not lower by `min_delta`."""
    min_delta: float = number(default=0.0, at_least=0)
    """What `patience` asks of a loss: lower by more than this than the last that was, nats per token. The best
    evaluation is the lowest, by however little."""
    sources: list[str] = field(default_factory=list)
    """Held-out sources that are looked at, by name; empty takes the stage's own, without replayed ones."""
    ends_with: str = choice("last", "best", default="last")
    """Parameters and optimizer state that the stage ends with: those of its last step, or of its best evaluation."""


@dataclass
class StageConfig:
    """One stage of the curriculum; null takes the run's own value."""

    kind: str = choice("text", "chat", "any", default="any")
    """Takes every selected source of this kind."""
    sources: list[str] = field(default_factory=list)
    """Takes these sources instead, by name; empty goes by `kind`."""
    replay: float = number(default=0.0, at_least=0, below=1)
    """Share of the rows that come from `replay_sources`, exact at every step: of the first n rows floor(n x replay)."""
    replay_sources: list[str] = field(default_factory=list)
    """Sources that are replayed, by name; empty takes those of all stages before that this one does not have."""
    learn: str = choice("answers", "all", default="answers")
    """Tokens in the loss: of conversations the assistant's turns (of texts everything), or every token."""
    steps: int | None = number(default=None, at_least=1)
    """Optimizer steps; at most one of `steps`, `tokens` and `epochs` is set. With none of them a stage passes over its
    rows as often as its data suits: the smallest `data.<name>.epochs` of its sources."""
    tokens: int | None = number(default=None, at_least=1)
    """Tokens to train on, replayed ones and no padding counted: as many steps as make them with rows of mean length."""
    epochs: float | None = number(default=None, above=0)
    """Passes over the stage's own rows."""
    seq_len: int | None = number(default=None, at_least=8, at_most=2**24)
    """Tokens per row."""
    shorter: int = number(default=1, at_least=1)
    """Rows are this many times shorter, and a batch has as many times more of them: the tokens of a step stay."""
    global_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per optimizer step over all devices."""
    lr: float | None = number(default=None, above=0)
    """Peak learning rate."""
    schedule: StageScheduleConfig = field(default_factory=StageScheduleConfig)
    """Schedule of this stage, which begins and ends with it."""
    optimizer: str = choice("carry", "fresh", default="carry")
    """`carry` keeps the moments of the stage before, `fresh` starts them at zero."""
    trainable: list[str] = field(default_factory=list)
    """Shell patterns over names of trainable parameters, `*.layers.1?.*` or `*_proj.lora_B`: these alone are updated
    (their moments too), the others stay; empty updates all."""
    exit: ExitTestConfig = field(default_factory=ExitTestConfig)
    """When the stage ends before its last step."""


@dataclass
class CurriculumConfig:
    """Stages in the order they run, keyed by name."""

    name: str = MISSING
    """Name of the curriculum; the file name in conf/curriculum."""
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """A stage for which no source of its kind is selected is left out, and the log says so."""
