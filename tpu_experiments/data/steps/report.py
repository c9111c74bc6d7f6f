"""Every row that is not in the prepared data, with its place and the reason: reported.jsonl, and counts by reason."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_experiments.data.documents import Refused
from tpu_experiments.data.steps.blocks import read_report
from tpu_experiments.data.steps.selection import Selection
from tpu_experiments.data.steps.tokenized import TokenizedSource
from tpu_experiments.io import paths

REPORTED = "reported.jsonl"
NUM_EXAMPLES = 3  # of each reason, for the audit
Examples = dict[str, list[dict[str, str]]]


def write_report(
    folder: str, *, tokens: TokenizedSource, selection: Selection, records: Sequence[dict[str, Any]]
) -> tuple[Counter[str], Examples]:
    """Write `<folder>/reported.jsonl`; returns counts and the first examples, by reason."""
    counts: Counter[str] = Counter()
    examples: Examples = {}
    with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as scratch:
        local = Path(scratch) / REPORTED
        with local.open("w", encoding="utf-8") as file:
            for refused in _reported(tokens, selection=selection, records=records):
                entry = {"place": refused.place, "message": refused.message}
                file.write(json.dumps({"reason": refused.reason, **entry}, ensure_ascii=False) + "\n")
                counts[refused.reason] += 1
                if counts[refused.reason] <= NUM_EXAMPLES:
                    examples.setdefault(refused.reason, []).append(entry)
        paths.copy_file(str(local), paths.join(folder, REPORTED))
    return counts, examples


def _reported(tokens: TokenizedSource, *, selection: Selection, records: Sequence[dict[str, Any]]) -> Iterator[Refused]:
    """In reading order: rows that became no document, and documents that no row holds."""
    unpacked = {index: reason for reason in ("too_long", "nothing_to_learn") for r in records for index in r[reason]}
    place_of = _places(tokens, wanted=np.unique(selection.first_D[selection.first_D >= 0]))
    first = 0
    for name in tokens.block_names:
        places, refused = read_report(tokens.folder, name)
        yield from refused
        for index, place in enumerate(places, start=first):
            earlier = int(selection.first_D[index])
            if earlier >= 0:
                kind = "near_duplicate" if selection.is_near_D[index] else "exact_duplicate"
                kind = "held_out_copy" if selection.is_own_D[earlier] else kind
                yield Refused(kind, place, f"repeats {place_of[earlier]}.", is_bad_row=False)
            elif index in unpacked:
                yield Refused(unpacked[index], place, _MESSAGES[unpacked[index]], is_bad_row=False)
        first += len(places)


_MESSAGES = {
    "too_long": "is longer than a row, and prepare.long_documents=drop.",
    "nothing_to_learn": "has no token to learn in what fits into a row.",
}


def _places(tokens: TokenizedSource, *, wanted: "np.ndarray[Any, np.dtype[np.int64]]") -> dict[int, str]:
    """Where the documents with these indices were read."""
    found: dict[int, str] = {}
    first = 0
    for name in tokens.block_names if len(wanted) else []:
        places, _ = read_report(tokens.folder, name)
        inside = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + len(places))]
        found |= {int(index): places[int(index) - first] for index in inside}
        first += len(places)
    return found
