"""Labels of texts: their counts by split, and their place in the rows.

A labelled text has one more place than it has tokens: the last one, the only one that is learnt, whose id is 0. There
the rows' array `label` has the number of its label, so that each text of a packed row has its own. The objective takes
the place out of the text again (objectives/classify.py). Legend: D documents, L tokens of all of them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.masking import LABEL
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.rows import Array, Rows
from tpu_experiments.data.steps.blocks import BlockIndex
from tpu_experiments.data.steps.pack import FlatTokens

Counts = Mapping[str, Mapping[str, int]]
"""Split to label to number of documents."""
INTEGER = re.compile(r"0|-?[1-9][0-9]*")
LABELS_SHOWN = 12
LABELS = Array(LABEL, "int32", per="token")
"""The number of a text's label at its last place, 0 elsewhere."""


@dataclass(frozen=True)
class Labelling:
    """Labels of all sources of a run, in the order of their numbers."""

    names: tuple[str, ...]
    num_closing: int
    """Special tokens with which the tokenizer closes a text; a text that is cut keeps them."""

    def numbers(self, block: BlockIndex) -> NDArray[np.int32]:
        """Return the label number (D,) of a block's documents; `require_known` has seen them."""
        assert block.labels_D is not None, "texts were read with their labels"
        number = {name: index for index, name in enumerate(self.names)}
        own = np.array([number.get(name, -1) for name in block.label_names], np.int32)
        found: NDArray[np.int32] = own[block.labels_D]
        return found


def with_labels(flat: FlatTokens, labels_D: NDArray[np.int32]) -> FlatTokens:
    """Return texts with their labels' numbers as an array of their tokens."""
    labels_L = np.zeros(len(flat.ids_L), np.int32)
    labels_L[np.cumsum(flat.lengths_D) - 1] = labels_D
    return replace(flat, more={**flat.more, LABEL: labels_L})


def with_labels_of_ids(rows: Rows) -> Rows:
    """Return rows that were prepared before labels were an array: the label's number was the id of its place."""
    return replace(rows, ids_NT=rows.ids_NT * ~rows.learn_NT, more={**rows.more, LABEL: rows.ids_NT * rows.learn_NT})


def label_counts(blocks: Iterable[BlockIndex], *, code_D: NDArray[np.int8]) -> dict[str, Counter[str]]:
    """Count the labels of every split's documents.

    Args:
        code_D: what the selection says of the blocks' documents (`Selection.code_D`); duplicates are of no split.
    """
    found = {split: Counter[str]() for split in SPLITS}
    first = 0
    for block in blocks:
        assert block.labels_D is not None, "texts were read with their labels"
        own_D = code_D[first : first + len(block.labels_D)]
        first += len(block.labels_D)
        for code, split in enumerate(SPLITS):
            numbers = np.bincount(block.labels_D[own_D == code], minlength=len(block.label_names))
            pairs = zip(block.label_names, numbers.tolist(), strict=True)
            found[split].update({name: count for name, count in pairs if count})
    return found


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Return the labels in order: by value if all are integers, otherwise by letter.

    >>> sorted_labels({"10", "9"}), sorted_labels({"10", "9", "x"})
    (['9', '10'], ['10', '9', 'x'])
    """
    listed = sorted(names)
    return sorted(listed, key=int) if all(INTEGER.fullmatch(name) for name in listed) else listed


def labels_of_training(counts: Mapping[str, Counts]) -> list[str]:
    """Return the labels of the training splits of all sources, sorted.

    Args:
        counts: `label_counts` of every source.

    Raises:
        ConfigError: there are less than two.
    """
    found = sorted_labels({name for own in counts.values() for name in own["train"]})
    if len(found) < 2:
        fields = ", ".join(f"data.{name}.label_field" for name in counts)
        total = sum(sum(own["train"].values()) for own in counts.values())
        raise ConfigError(
            f"{fields}; the {total:,} training texts have {len(found)} label ({', '.join(found)}), and a classifier "
            "tells two or more apart; name another field, or add rows of another label."
        )
    return found


def require_known(counts: Counts, *, labels: Sequence[str], name: str, vocab_size: int) -> None:
    """Require every label of a source's splits to be one of the run's.

    Raises:
        ConfigError: one is not, a label is given twice, or there are more than the vocabulary has tokens.
    """
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice or len(labels) < 2:
        what = f"{twice[0]!r} is there twice" if twice else f"it has {len(labels)} label"
        raise ConfigError(f"objective.labels={list(labels)[:LABELS_SHOWN]}; {what}; name two or more, each once.")
    if len(labels) > vocab_size:
        raise ConfigError(
            f"data.{name}.label_field; its training texts have {len(labels):,} labels, more than the vocabulary has "
            f"tokens ({vocab_size:,}); name a field that has the same value in many rows."
        )
    for split in SPLITS:
        unknown = {label: count for label, count in counts[split].items() if label not in labels}
        if unknown:
            first = next(iter(unknown))
            raise ConfigError(
                f"data.{name}.label_field; {sum(unknown.values()):,} of {sum(counts[split].values()):,} texts of the "
                f"{split} split have a label that the model does not have, first {first!r}. {suggest(first, labels)} "
                f"Leave such rows out (data.{name}.keep), or name every label: 'objective.labels=[...]'."
            )


def label_text(counts: Mapping[str, int], *, labels: Sequence[str]) -> str:
    """Format counts as `basic 14, advanced 7`, those of the most frequent labels where there are many."""
    shown = list(labels) if len(labels) <= LABELS_SHOWN else sorted(labels, key=lambda name: -counts.get(name, 0))
    rest = f" and {len(labels) - LABELS_SHOWN} others" if len(labels) > LABELS_SHOWN else ""
    return ", ".join(f"{name} {counts.get(name, 0):,}" for name in shown[:LABELS_SHOWN]) + rest


def cut_texts(flat: FlatTokens, *, max_tokens: int, num_closing: int) -> tuple[FlatTokens, dict[str, int]]:
    """Cut labelled texts to at most `max_tokens`; the closing tokens and the label stay.

    Returns:
        The texts, and the counts `documents_truncated` and `tokens_dropped`.
    """
    num_kept = num_closing + 1
    lengths_L = np.repeat(flat.lengths_D, flat.lengths_D)
    within_L = np.arange(len(flat.ids_L)) - np.repeat(np.cumsum(flat.lengths_D) - flat.lengths_D, flat.lengths_D)
    stays_L = (within_L < max_tokens - num_kept) | (within_L >= lengths_L - num_kept)
    more = {name: array_L[stays_L] for name, array_L in flat.more.items()}
    short = FlatTokens(flat.ids_L[stays_L], flat.flags_L[stays_L], np.minimum(flat.lengths_D, max_tokens), more)
    num_cut = int(np.count_nonzero(flat.lengths_D > max_tokens))
    return short, {"documents_truncated": num_cut, "tokens_dropped": len(flat.ids_L) - len(short.ids_L)}
