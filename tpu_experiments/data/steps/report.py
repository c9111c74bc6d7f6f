"""Report of every row that is not in the prepared data: reported.jsonl, and counts by reason."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.documents import TEXT_SHOWN, Refused, beginning
from tpu_experiments.data.steps.blocks import read_index, read_report, read_tokens
from tpu_experiments.data.steps.selection import Selection
from tpu_experiments.data.steps.tokenized import TokenizedSource
from tpu_experiments.storage import paths

REPORTED = "reported.jsonl"
NUM_EXAMPLES = 3  # of each reason, for the audit
Examples = dict[str, list[dict[str, str]]]


def write_report(
    folder: str,
    *,
    tokens: TokenizedSource,
    selection: Selection,
    records: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Counter[str], Examples]:
    """Write `<folder>/reported.jsonl`; return the count and the first examples of each reason.

    Documents are on disk as tokens only, so their beginnings are decoded for the examples.
    """
    counts: Counter[str] = Counter()
    examples: Examples = {}
    with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as scratch:
        local = Path(scratch) / REPORTED
        with local.open("w", encoding="utf-8") as file:
            for refused, document in _reported(tokens, selection=selection, records=records):
                entry = {"place": refused.place, "message": refused.message}
                entry |= {"text": refused.text} if refused.text else {}
                file.write(json.dumps({"reason": refused.reason, **entry}, ensure_ascii=False) + "\n")
                counts[refused.reason] += 1
                if counts[refused.reason] <= NUM_EXAMPLES:
                    if document is not None:
                        entry["text"] = _decoded(*document, folder=tokens.folder, tokenizer=tokenizer)
                    examples.setdefault(refused.reason, []).append(entry)
        paths.copy_file(str(local), paths.join(folder, REPORTED))
    return counts, examples


def _decoded(block: str, index: int, *, folder: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode the beginning of a document of a block."""
    about = read_index(folder, block)
    begin = int(about.lengths_D[:index].sum())
    ids, _ = read_tokens(folder, block, sha256=about.sha256["tokens"])
    shown = ids[begin : begin + min(int(about.lengths_D[index]), TEXT_SHOWN)].tolist()
    return beginning(str(tokenizer.decode(shown, skip_special_tokens=True)))


def _reported(
    tokens: TokenizedSource, *, selection: Selection, records: Sequence[dict[str, Any]]
) -> Iterator[tuple[Refused, tuple[str, int] | None]]:
    """Yield refused rows and unpacked documents in reading order, a document with its block and index."""
    unpacked = {index: reason for reason in ("too_long", "nothing_to_learn") for r in records for index in r[reason]}
    place_of = _places(tokens, wanted=np.unique(selection.first_D[selection.first_D >= 0]))
    first = 0
    for name in tokens.block_names:
        places, refused = read_report(tokens.folder, name)
        yield from ((each, None) for each in refused)
        for index, place in enumerate(places, start=first):
            earlier = int(selection.first_D[index])
            if earlier >= 0:
                kind = "near_duplicate" if selection.is_near_D[index] else "exact_duplicate"
                kind = "held_out_copy" if selection.is_own_D[earlier] else kind
                repeats = Refused(kind, place, f"repeats {place_of[earlier]}.", is_bad_row=False)
                yield repeats, (name, index - first)
            elif index in unpacked:
                unused = Refused(unpacked[index], place, _MESSAGES[unpacked[index]], is_bad_row=False)
                yield unused, (name, index - first)
        first += len(places)


_MESSAGES = {
    "too_long": "is longer than a row, and prepare.long_documents=drop.",
    "nothing_to_learn": "has no token to learn in what fits into a row.",
}


def _places(tokens: TokenizedSource, *, wanted: "np.ndarray[Any, np.dtype[np.int64]]") -> dict[int, str]:
    """Return the places of the documents with these indices."""
    found: dict[int, str] = {}
    first = 0
    for name in tokens.block_names if len(wanted) else []:
        places, _ = read_report(tokens.folder, name)
        inside = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + len(places))]
        found |= {int(index): places[int(index) - first] for index in inside}
        first += len(places)
    return found
