"""Progress of a run as plain values, which a checkpoint stores as progress.json beside the tensors."""

import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

REQUIRED = ("stage", "stage_step", "step", "peak_lr", "stages", "data")
"""Keys that progress.json must have; missing others get the values of a fresh run."""


@dataclass
class EpochRecord:
    """Losses of one pass over the rows of a stage (training/epochs.py)."""

    epoch: int
    """Number of the pass, from 1."""
    steps: int = 0
    """Steps with an update."""
    supervised: float = 0.0
    """Supervised tokens of these steps."""
    loss_sum: float = 0.0
    """Loss sum over these tokens, in nats."""
    is_over: bool = False
    """Whether all rows of the pass were trained on."""

    @property
    def loss(self) -> float:
        """Return the mean loss in nats per supervised token; NaN without any."""
        return self.loss_sum / self.supervised if self.supervised else math.nan


@dataclass
class StageRecord:
    """Progress and results of one stage so far."""

    name: str
    steps: int = 0
    tokens: int = 0
    first_train_loss: float | None = None
    last_train_loss: float | None = None
    eval_loss: float | None = None
    """Held-out loss over all sources after its last step, or that of the best evaluation if it ended with that."""
    eval_sources: dict[str, float] = field(default_factory=dict)
    best_loss: float | None = None
    """Lowest loss of the exit test so far."""
    goal_loss: float | None = None
    """Loss that the exit test's patience compares with; replaced only by a loss lower by more than `min_delta`."""
    num_worse: int = 0
    """Consecutive evaluations that were not lower than `goal_loss` by more than `min_delta`."""
    held_step: int | None = None
    """Step of the run with `best_loss`, whose checkpoint is kept until the stage ends with it."""
    restored_step: int | None = None
    """Step of the run whose parameters and optimizer state the stage ended with; None is its last."""
    ended_by: str | None = None
    """Why it ended before its last step."""
    epochs: list[EpochRecord] | None = None
    """Passes over the stage's rows; None if an older version, which did not count them, trained some of its steps."""


@dataclass
class GuardState:
    """State of the guard (training/guard.py); steps are numbered from 1 over the run."""

    seen: int = 0
    """Last step whose report the guard has processed."""
    streak: list[int] = field(default_factory=list)
    """Steps without an update, up to `seen`; empty once a step after them was finite."""
    spikes: list[int] = field(default_factory=list)
    """Steps with a loss spike since the last log record."""
    recent: list[float] = field(default_factory=list)
    """The last finite losses of this stage."""
    skipped: int = 0
    """Steps without an update so far."""
    rollbacks: int = 0
    passed_over: list[list[int]] = field(default_factory=list)
    """First and last step of each range whose batches are skipped; the steps still count."""

    def is_skipped(self, step: int) -> bool:
        """Return whether this step's batch is skipped."""
        return any(first <= step <= last for first, last in self.passed_over)


@dataclass
class AnswersRecord:
    """Results of one set of questions (training/questions.py)."""

    asked: int
    right: int
    """Answers whose first sentence is the expected one."""
    whole: int
    """Answers that equal the expected one as a whole."""
    shown: list[str]
    """The first few answers."""


@dataclass
class Progress:
    """Position in the curriculum; data position and schedule follow from it by arithmetic."""

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
    """Step of `eval_loss`, the latest held-out loss; -1 before the first."""
    sample_before: str | None = None
    skill_before: dict[str, AnswersRecord] = field(default_factory=dict)
    """Results of each set of questions before training; empty without questions."""
    open_losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of the steps since the last log record; the next record's mean includes them."""
    open_supervised: list[float] = field(default_factory=list)
    """Supervised tokens of each of these steps."""
    open_reported: list[list[float]] = field(default_factory=list)
    """Sums that the objective reports of each of these steps; empty if it reports none, or they are not known."""
    data: dict[str, str] = field(default_factory=dict)
    """Audit hash of the training data by `<source>@<row length>`."""

    reference: dict[str, list[str]] = field(default_factory=dict)
    """File and SHA-256 of the reference (training/reference.py) by `<source>/<split>/<row length>`."""
    rollouts: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every rollout that was trained on (training/rl.py), by the steps of the run before it."""
    start: dict[str, Any] | None = None
    """Lineage of the warm start (training/start.py); None without one."""
    start_marks: dict[str, str] = field(default_factory=dict)
    """Fingerprint (models/adapters/lora.py) of every tensor taken from the warm start's source."""
    guard: GuardState = field(default_factory=GuardState)
    callbacks: dict[str, Any] = field(default_factory=dict)
    """What each callback wants kept (callbacks/base.py), by its name."""
    ended_by: str | None = None
    """Why the run ends before the last step of its stages, where a callback asked for it."""
    canary: dict[str, Any] | None = None
    """Findings of the gradients' canary, and under `losses` of the losses'; None if neither ran."""

    @property
    def held_step(self) -> int | None:
        """Return the step whose checkpoint must be kept, since the stage may end with it."""
        return self.stages[-1].held_step if self.stages else None

    @property
    def tokens(self) -> int:
        """Return the tokens trained on, without padding."""
        return sum(record.tokens for record in self.stages)

    def advance(self, stage_step: int) -> None:
        """Set the position to after `stage_step` steps of the stage."""
        self.step, self.stage_step = self.step + stage_step - self.stage_step, stage_step
        self.stages[-1].steps = stage_step

    def reopen(self, stages: Mapping[str, int]) -> None:
        """Reopen the last, completed stage if it has more steps now (training/length.py).

        `stages` has the steps of each stage by name. A callback that asked the run to end behind the step that was the
        last is not heeded any more.
        """
        last = self.stages[-1] if self.stages else None
        if last is None or last.ended_by is not None or last.steps >= stages[last.name]:
            return
        self.ended_by = None
        if self.stage == len(self.stages):
            self.stage, self.stage_step = self.stage - 1, last.steps

    def skipped_steps(self, num_steps: int) -> set[int]:
        """Return the remaining steps of the stage, counted from 0, that are skipped."""
        offset = self.step - self.stage_step + 1
        steps = range(self.stage_step, num_steps) if self.guard.passed_over else ()
        return {step for step in steps if self.guard.is_skipped(offset + step)}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        """Build from the values of `to_dict` as read from JSON, checking types and position.

        Raises:
            ValueError: they are invalid; the text names the key and the value.
        """
        lacking = [key for key in REQUIRED if key not in values]
        if lacking:
            raise ValueError(f"it lacks {', '.join(lacking)}")
        found: Progress = _typed(values, cls, key="")
        found._require_place()
        return found

    def require_stages(self, stages: Mapping[str, int]) -> None:
        """Require the position to exist in a curriculum, given its stages' names and maximum steps.

        Raises:
            ValueError: it does not; the text names the key and the value.
        """
        names = list(stages)
        if self.stage > len(names):
            raise ValueError(f"stage={self.stage}, and the curriculum has {len(names)} stages ({', '.join(names)})")
        for index, record in enumerate(self.stages):
            name = names[index] if index < len(names) else "no stage"
            if record.name != name:
                raise ValueError(f"stages[{index}].name={record.name!r}, and the curriculum has {name} there")
            if record.steps > stages[name]:
                raise ValueError(f"stages[{index}].steps={record.steps}, and stage {name} has {stages[name]} steps")

    def _require_place(self) -> None:
        """Refuse inconsistent numbers; raises as `from_dict` does."""
        counts = {"stage": self.stage, "stage_step": self.stage_step, "step": self.step}
        for index, record in enumerate(self.stages):
            counts |= {f"stages[{index}].{key}": getattr(record, key) for key in ("steps", "tokens", "num_worse")}
        counts |= {f"guard.{key}": getattr(self.guard, key) for key in ("seen", "skipped", "rollbacks")}
        for key, value in counts.items():
            if value < 0:
                raise ValueError(f"{key}={value} is below 0")
        if not 0 <= self.peak_lr < math.inf:
            raise ValueError(f"peak_lr={self.peak_lr} is no learning rate")
        done = sum(record.steps for record in self.stages)
        if done != self.step:
            raise ValueError(f"step={self.step}, and the steps of its stages are {done} together")
        # A stage has a record from the start of its first step; it is empty if the run stopped before that was done.
        if not self.stage <= len(self.stages) <= self.stage + 1:
            raise ValueError(f"stage={self.stage}, and there are records of {len(self.stages)} stages")
        begun = self.stages[self.stage].steps if len(self.stages) > self.stage else 0
        if begun != self.stage_step:
            raise ValueError(f"stage_step={self.stage_step}, and the record of its stage has {begun} steps")
        if not -1 <= self.eval_step <= self.step:
            raise ValueError(f"eval_step={self.eval_step}, and step={self.step}")
        for step, loss in self.open_losses:
            if not 0 < step <= self.step or not math.isfinite(loss):
                raise ValueError(f"open_losses has {loss} of step {step}, and step={self.step}")


def _typed(value: Any, kind: Any, *, key: str) -> Any:
    """Convert a JSON value to a type; null stands for a float that is NaN (storage/strict_json.py).

    Raises:
        ValueError: it has another type; the text names the key.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not type(None))
        return None if value is None else _typed(value, inner, key=key)
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        unknown = [str(name) for name in value if name not in {each.name for each in fields(kind)}]
        if unknown:
            raise ValueError(f"{key}{'.' if key else ''}{unknown[0][:80]} is no key of it")
        prefix = f"{key}." if key else ""
        try:
            found = {name: _typed(item, hints[name], key=prefix + name) for name, item in value.items()}
            return kind(**found)  # type: ignore[operator]  # a class, not one of its objects
        except TypeError as error:
            raise ValueError(f"{key}={str(value)[:80]!r} lacks a key ({error})") from error
    if origin is dict and isinstance(value, Mapping):
        return {name: _typed(item, parts[1], key=f"{key}.{str(name)[:80]}") for name, item in value.items()}
    if origin is list and isinstance(value, list):
        return [_typed(item, parts[0], key=f"{key}[{index}]") for index, item in enumerate(value)]
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(parts):
        return tuple(_typed(item, part, key=key) for item, part in zip(value, parts, strict=True))
    if kind is float and (value is None or type(value) is float or (type(value) is int and abs(value) < 2**53)):
        return math.nan if value is None else float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{key}={str(value)[:80]!r} is of another type")
