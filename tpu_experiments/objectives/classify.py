"""The objective of classifiers: the label of a text (BERT, arXiv 1810.04805, section 4.1).

Legend: R rows, T tokens, K places of a row for texts, C labels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.config.escaping import as_code
from tpu_experiments.config.schema import Config
from tpu_experiments.data.steps.labels import LABELS
from tpu_experiments.metrics.flops import FlopsPerToken, classifier_flops
from tpu_experiments.metrics.labels import accuracy, f1_of_labels, macro_f1, majority_rate
from tpu_experiments.models.families.classification import class_logits, texts_of
from tpu_experiments.models.passes.loss import Scores
from tpu_experiments.objectives.base import ASSUMED_LABELS, Computing, Objective, Rows, Summary


class Classify(Objective):
    """Cross-entropy of texts' labels in nats, a mean over texts.

    A text is read without the place of its label, the last one (data/steps/labels.py). A row may hold several
    texts; none sees another, and each has the logits that it has alone.
    """

    arrays = (LABELS,)
    has_perplexity = False
    causal = False
    head = "sequence_classification"
    metrics_of_card = (("accuracy", "accuracy", "accuracy"), ("macro_f1", "f1", "macro F1"))
    words_of_evaluation = "majority: the accuracy of giving every text the most frequent label"

    def __init__(self, *, labels: Sequence[str] | None = None, computing: Computing | None = None) -> None:
        """Take the labels, in the order of the logits; a plan may have none."""
        self.labels = tuple(labels or ASSUMED_LABELS)

    @classmethod
    def flops(cls, config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
        """Return the FLOPs of an encoder and the head over its texts."""
        if not config.objective.reads_labels:
            return super().flops(config, arch, seq_len=seq_len)
        return classifier_flops(arch, seq_len=seq_len, labels=len(config.objective.known_labels() or ()), config=config)

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return the number of texts and the labels."""
        labels = ", ".join(map(as_code, config.objective.known_labels() or ()))
        return f"Over {num_predictions:,} texts that were not trained on. Labels: {labels}"

    def count(self, rows: Rows) -> Tensor:
        """Return the number of texts."""
        return texts_of(rows).weights_RK.sum()

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of texts of every row."""
        texts = texts_of(rows)
        losses_RK = self._losses(class_logits(module, parameters, texts), texts.labels_RK) * texts.weights_RK
        return losses_RK.sum(1), texts.weights_RK.sum(1)

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return loss and, for every label, the texts predicted rightly, predicted, and labelled so, (1 + 3 C,)."""
        texts = texts_of(rows)
        with torch.no_grad():
            logits_RKC = class_logits(module, parameters, texts)
            loss = (self._losses(logits_RKC, texts.labels_RK) * texts.weights_RK).sum()
            number_C = torch.arange(len(self.labels), dtype=torch.int32, device=logits_RKC.device)
            chosen_RKC = _first_largest(logits_RKC)[..., None] == number_C
            is_label_RKC = texts.labels_RK[..., None] == number_C
            weights_RK1 = texts.weights_RK[..., None]
            counts = [
                (each_RKC * weights_RK1).sum((0, 1))
                for each_RKC in (chosen_RKC & is_label_RKC, chosen_RKC, is_label_RKC)
            ]
        return torch.cat([loss[None], *counts])

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return mean loss, accuracy, macro F1, and the accuracy of always saying the most frequent label."""
        loss, count = sums[0], len(self.labels)
        right, predicted, labelled = (sums[1 + part * count : 1 + (part + 1) * count] for part in range(3))
        total = sum(labelled)
        if not total:
            return Summary(math.nan, 0, {})
        scores = f1_of_labels(right, predicted, labelled)
        measures = {
            "accuracy": accuracy(right, labelled),
            "macro_f1": macro_f1(scores),
            "majority": majority_rate(labelled),
        }
        return Summary(loss / total, round(total), {name: float(value) for name, value in measures.items()})

    def document_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss in nats and the number of the predicted label, at the position before each label; 0 elsewhere."""
        texts = texts_of(rows)
        with torch.no_grad():
            logits_RKC = class_logits(module, parameters, texts)
            losses_RK = self._losses(logits_RKC, texts.labels_RK) * texts.weights_RK
            chosen_RK = _first_largest(logits_RKC).to(torch.float32)
            spread = [
                torch.roll((texts.at_RKT.to(torch.float32) * each_RK[..., None]).sum(1), -1, dims=1)
                for each_RK in (losses_RK, chosen_RK, texts.weights_RK)
            ]
        return Scores(losses_RK.sum(1), texts.weights_RK.sum(1), *spread)

    @staticmethod
    def _losses(logits_RKC: Tensor, labels_RK: Tensor) -> Tensor:
        flat = F.cross_entropy(logits_RKC.flatten(0, 1), labels_RK.flatten().long(), reduction="none")
        return flat.view(labels_RK.shape)


def _first_largest(logits_RKC: Tensor) -> Tensor:
    """Return the number of the largest logit, the first of equal ones."""
    return logits_RKC.argmax(-1).to(torch.int32)
