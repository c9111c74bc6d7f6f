"""Settings that every objective has, and what the config must know of it before torch is imported."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from tpu_experiments.config.data_schema import PrepareConfig


@dataclass
class ObjectiveConfig:
    """What the model learns from its rows."""

    name: str = MISSING
    _target_: str = MISSING
    """Swap point: class derived from `Objective` (tpu_experiments/objectives/base.py)."""

    is_evaluated: ClassVar[bool] = True
    """Whether task=evaluate scores its runs."""
    trains_encoders: ClassVar[bool] = False
    """Whether its models are encoders, none of which has ternary weights (`model.linear=bitnet`)."""
    takes_rounded_weights: ClassVar[bool] = False
    """Whether `model.linear=lr_qat` goes with it."""
    reads_labels: ClassVar[bool] = False
    """Whether a text comes with a label (`data.<name>.label_field`)."""
    reads_pairs: ClassVar[bool] = False
    """Whether it compares the two answers of preference pairs (`data.<name>.kind=preference`)."""
    reads_single: ClassVar[bool] = False
    """Whether it also reads single answers with a label (`format=unpaired`); only where it reads pairs."""
    samples_rollouts: ClassVar[bool] = False
    """Whether its rows are answers that the model writes in training (`rollout`)."""
    lr_factor: ClassVar[float] = 1.0
    """Factor of `model.lr`, where `optim.lr` is null."""
    asks_questions: ClassVar[bool] = True
    """Whether its runs answer the questions of their data, or refuse them; False leaves them out."""
    counts_flops: ClassVar[bool] = True
    """Whether its class says its FLOPs; those of a causal decoder are known before torch is imported."""
    ranked_by: ClassVar[str | None] = None
    """Measure of held-out rows that ranks runs, the highest first, and then the loss; None: the loss alone."""
    for_files: ClassVar[tuple[str, ...]] = ()
    """Measures of evaluations that have no room in a line on the console; every other logger has them."""
    why_alone: ClassVar[str | None] = None
    """Why its runs share no program with others (config/packs.py)."""

    @property
    def examples(self) -> str | None:
        """Return what its rows hold, as records call it; None of tokens alone."""
        return ("answers" if self.reads_single else "pairs") if self.reads_pairs else None

    @property
    def predicts(self) -> str:
        """Return what its loss is a mean over, as result.json calls it."""
        return self.examples or ("texts" if self.reads_labels else "tokens")

    def known_labels(self) -> list[str] | None:
        """Return the labels in the order of their numbers; None where it has none, or they are not known yet.

        Without `reads_labels` they are the names of a head's outputs in the model's config.
        """
        return None

    def with_labels(self, labels: list[str]) -> "ObjectiveConfig":
        """Return the settings with the labels of the training rows; only where labels are read."""
        raise NotImplementedError

    def reads_reference(self) -> bool:
        """Return whether rows carry log-probabilities by the model as it starts (training/reference.py)."""
        return False

    def teacher_entries(self) -> int:
        """Return the stored predictions of a teacher that every token of a row carries (data/teacher.py); 0: none."""
        return 0

    def teacher_temperature(self) -> float:
        """Return the temperature of those predictions."""
        return 1.0

    def converts_temperature(self) -> bool:
        """Return whether they are needed up to a factor alone, so that any temperature gives that of another."""
        return False

    def reads_margin(self) -> bool:
        """Return whether every pair comes with a margin of scores, the field `margin` of its row."""
        return False

    def on_data_of(self, other: "ObjectiveConfig") -> "ObjectiveConfig":
        """Return the settings for data that was selected beside `other`, which says what its rows carry."""
        return self

    def reads_start(self) -> bool:
        """Return whether answers are compared with the model as the run starts; with `samples_rollouts`."""
        return False

    def planned_as(self) -> "ObjectiveConfig | None":
        """Return settings whose lines of conf/tuned.yaml hold as well; None where the step has another cost.

        Its own lines hold in any case.
        """
        return None

    def inputs(self) -> dict[str, float]:
        """Return the values of settings that rows carry into programs: other values need no other program.

        A float32 of every row by the setting's name, 0 at padding; the points of a pack may differ in them.
        """
        return {}

    def problems(self, prepare: PrepareConfig) -> list[str]:
        """Return what is wrong with the settings together with those of data preparation."""
        return []


@dataclass
class OwnObjectiveConfig(ObjectiveConfig):
    """An objective of the user's own."""

    is_evaluated: ClassVar[bool] = False
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the class, as its argument `options`."""
