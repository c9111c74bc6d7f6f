"""Settings of classification."""

from dataclasses import dataclass, replace
from typing import ClassVar

from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class ClassifyConfig(ObjectiveConfig):
    """The label of a text, by an encoder with a head on top (BERT, arXiv 1810.04805)."""

    _target_: str = "tpu_experiments.objectives.classify.Classify"
    trains_encoders: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = True
    why_alone: ClassVar[str | None] = "objective=classify trains a head beside the adapter"
    labels: list[str] | None = None
    """Labels in the order of the logits; null takes those of the training rows (`data.<name>.label_field`), sorted."""

    def known_labels(self) -> list[str] | None:
        """Return the labels in the order of the logits; None where they are not known yet."""
        return self.labels

    def with_labels(self, labels: list[str]) -> ObjectiveConfig:
        """Return the settings with the labels of the training rows."""
        return replace(self, labels=labels)
