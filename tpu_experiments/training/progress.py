"""Where a run is, as plain values: what a checkpoint stores beside the tensors."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class StageRecord:
    """What happened in one stage so far."""

    name: str
    steps: int = 0
    tokens: int = 0
    first_train_loss: float | None = None
    last_train_loss: float | None = None
    eval_loss: float | None = None
    """Held-out loss over all sources behind its last step, of the best evaluation where it ended with that."""
    eval_sources: dict[str, float] = field(default_factory=dict)
    best_loss: float | None = None
    """Lowest loss of its exit test so far."""
    num_worse: int = 0
    """Evaluations in a row that were no better."""
    held_step: int | None = None
    """Step of the run with the lowest one, whose checkpoint is kept until the stage ends with it."""
    restored_step: int | None = None
    """Step of the run whose parameters and optimizer state the stage ended with; None is its last."""
    ended_by: str | None = None
    """Why it ended before its last step."""


@dataclass
class GuardState:
    """What the guard over losses and gradients (training/guard.py) knows; steps are numbered from 1 over the run."""

    seen: int = 0
    """The last step whose report was looked at."""
    streak: list[int] = field(default_factory=list)
    """Steps without an update, up to `seen`; empty once a step after them was finite."""
    spikes: list[int] = field(default_factory=list)
    """Steps whose loss jumped, since values were read for a log record."""
    recent: list[float] = field(default_factory=list)
    """The last finite losses of this stage."""
    skipped: int = 0
    """Steps without an update so far."""
    rollbacks: int = 0
    passed_over: list[list[int]] = field(default_factory=list)
    """First and last of steps whose batches are left out; they count as steps all the same."""

    def passes_over(self, step: int) -> bool:
        """Whether this step's batch is left out."""
        return any(first <= step <= last for first, last in self.passed_over)


@dataclass
class Progress:
    """Position in the curriculum; the place in the data and the schedule follow from it by arithmetic."""

    stage: int = 0
    """Index of the stage that is running."""
    stage_step: int = 0
    """Optimizer steps done in that stage."""
    step: int = 0
    """Optimizer steps done in the run."""
    peak_lr: float = 0.0
    """Highest learning rate of these steps."""
    stages: list[StageRecord] = field(default_factory=list)
    eval_loss_before: float | None = None
    eval_sources_before: dict[str, float] = field(default_factory=dict)
    eval_measures_before: dict[str, float] = field(default_factory=dict)
    """Accuracy and bits per byte over all sources."""
    eval_source_measures_before: dict[str, dict[str, float]] = field(default_factory=dict)
    eval_loss: float | None = None
    eval_step: int = -1
    """Latest held-out loss, and after how many steps it was."""
    sample_before: str | None = None
    open_losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of the steps since the last log record, which the next record is a mean over as well."""
    data: dict[str, str] = field(default_factory=dict)
    """`<source>@<row length>` to the audit hash of what was trained on."""

    guard: GuardState = field(default_factory=GuardState)
    canary: dict[str, Any] | None = None
    """What the layout canary found; None where it was not asked."""

    @property
    def held_step(self) -> int | None:
        """Step whose checkpoint must stay, for the stage may end with it."""
        return self.stages[-1].held_step if self.stages else None

    @property
    def tokens(self) -> int:
        """Tokens trained on, padding not counted."""
        return sum(record.tokens for record in self.stages)

    def advance(self, stage_step: int) -> None:
        """Be after this many steps of the stage."""
        self.step, self.stage_step = self.step + stage_step - self.stage_step, stage_step
        self.stages[-1].steps = stage_step

    def left_out(self, num_steps: int) -> set[int]:
        """Steps of the stage, counted from 0, from here to its last that are passed over."""
        offset = self.step - self.stage_step + 1
        steps = range(self.stage_step, num_steps) if self.guard.passed_over else ()
        return {step for step in steps if self.guard.passes_over(offset + step)}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """The inverse of `to_dict`.

        Raises:
            TypeError, KeyError: these are the values of something else.
        """
        losses = [(step, loss) for step, loss in values.get("open_losses", [])]
        stages = [StageRecord(**record) for record in values["stages"]]
        guard = GuardState(**values.get("guard", {}))
        return cls(**{**values, "stages": stages, "guard": guard, "open_losses": losses})
