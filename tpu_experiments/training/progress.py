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
    eval_loss: float | None = None
    eval_step: int = -1
    """Latest held-out loss, and after how many steps it was."""
    sample_before: str | None = None
    data: dict[str, str] = field(default_factory=dict)
    """`<source>@<row length>` to the audit hash of what was trained on."""

    @property
    def tokens(self) -> int:
        """Tokens trained on, padding not counted."""
        return sum(record.tokens for record in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """The inverse of `to_dict`.

        Raises:
            TypeError, KeyError: these are the values of something else.
        """
        return cls(**{**values, "stages": [StageRecord(**record) for record in values["stages"]]})
