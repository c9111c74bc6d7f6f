"""Shards of packed rows: a window of documents is packed together and written as one shard.

A window is a run of one split's documents with about `prepare.window_tokens` tokens, so that packing takes little
memory whatever the size of the corpus, and windows can be packed in parallel. <split>/00012.npy holds the rows of
window 12, <split>/00012.json the outcome of its documents. A window is complete when its JSON exists and its shard
matches the checksum there.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import Array
from tpu_experiments.data.steps.blocks import BlockIndex, read_tokens
from tpu_experiments.data.steps.labels import Labelling, cut_texts, with_labels
from tpu_experiments.data.steps.pack import FlatTokens, Packed, pack
from tpu_experiments.data.steps.pairs import cut_prompts, with_margins
from tpu_experiments.data.store.shards import arrays_entry, damaged_shards, row_dtype, write_shard
from tpu_experiments.data.tokens.tokenize import LEARN
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile, read_sealed_json, write_sealed_json

log = logging.getLogger(__name__)

Index = NDArray[np.int64]
LENGTH_EDGES = (0, *(2**k for k in range(4, 21)))
"""Bin edges of the histogram of document lengths, in tokens; the last bin is open."""
COUNTS = (
    *("documents", "rows", "tokens", "supervised_tokens", "tokens_dropped"),
    *("documents_split", "documents_truncated", "documents_truncated_in_turn"),
)
WITHOUT_PROMPT = "supervised_without_prompt"
"""Counted for conversations only."""
MAX_TURNS = 16  # answers of a conversation counted separately; later ones are added to the last


@dataclass(frozen=True)
class Window:
    """Documents that are packed together: for each block, the chosen documents."""

    split: str
    number: int
    parts: tuple[tuple[str, str, Index, Index], ...]
    """(name of the block, SHA-256 of its tokens, first token of each chosen document, its length)."""
    characters: int
    documents: Index
    """Index of every document in the source."""
    labels: NDArray[np.int32] | None = None
    """Label number of every document; None where texts have no labels."""
    margins: NDArray[np.float32] | None = None
    """Margin of every pair; None where they are not read."""


@dataclass(frozen=True)
class WindowSettings:
    """Settings that a worker needs to pack windows; picklable."""

    tokens_folder: str
    folder: str
    seq_len: int
    packing: str
    long_documents: str
    pad_id: int
    vocab_size: int
    kind: str = "text"
    labelling: Labelling | None = None
    arrays: tuple[Array, ...] = ()
    """Further arrays of the rows."""


def cut_windows(
    blocks: Sequence[BlockIndex],
    *,
    split: str,
    chosen_D: NDArray[np.bool_],
    tokens: int,
    labelling: Labelling | None = None,
) -> Iterator[Window]:
    """Yield windows of the chosen documents, in order, each but the last with at least `tokens` tokens."""

    def window() -> Window:
        own = None if labelling is None else np.concatenate(labels)
        given = np.concatenate(margins) if margins else None
        return Window(split, number, tuple(parts), characters, np.concatenate(documents), own, given)

    labels: list[NDArray[np.int32]] = []
    margins: list[NDArray[np.float32]] = []
    parts: list[tuple[str, str, Index, Index]] = []
    documents: list[Index] = []
    held = characters = first = number = 0
    for block in blocks:
        count = len(block.lengths_D)
        index = np.flatnonzero(chosen_D[first : first + count])
        if len(index):
            begin_D = np.cumsum(block.lengths_D) - block.lengths_D
            parts.append((block.name, block.sha256["tokens"], begin_D[index], block.lengths_D[index]))
            documents.append(index + first)
            if labelling is not None:
                labels.append(labelling.numbers(block)[index])
            if block.margins_D is not None:
                margins.append(block.margins_D[index])
            held += int(block.lengths_D[index].sum())
            characters += int(block.characters_D[index].sum())
        first += count
        if held >= tokens:
            yield window()
            parts, documents, labels, margins = [], [], [], []
            held, characters, number = 0, 0, number + 1
    if parts:
        yield window()


class WindowMaker:
    """Worker that packs windows into shards; constructed once per process."""

    def __init__(self, settings: WindowSettings) -> None:
        self.settings = settings
        self.dtype = row_dtype(settings.seq_len, vocab_size=settings.vocab_size, arrays=settings.arrays)

    def __call__(self, window: Window) -> dict[str, Any]:
        """Return the window's record, reusing an earlier one if it and its shard are intact."""
        record = paths.join(self.settings.folder, window.split, f"{window.number:05d}.json")
        found = self._found(record, window)
        if found is not None:
            return found
        paths.make_dirs(paths.join(self.settings.folder, window.split))
        made = {"window": window.number, **arrays_entry(self.settings.arrays), **self.make(window)}
        write_sealed_json(record, made)
        return made

    def _found(self, record: str, window: Window) -> dict[str, Any] | None:
        if not paths.exists(record):
            return None
        try:
            found = read_sealed_json(
                record, expected={"window": window.number, "split": window.split, **arrays_entry(self.settings.arrays)}
            )
        except DamagedFile as error:
            log.warning("%s It is prepared again.", error)
            return None
        shard = found["shard"]
        damaged = damaged_shards(self.settings.folder, [shard], md5={shard["name"]: shard["md5"]}) if shard else []
        for complaint in damaged:
            log.warning("%s It is prepared again.", complaint)
        return None if damaged else found

    def make(self, window: Window) -> dict[str, Any]:
        """Pack the window and write its shard."""
        settings = self.settings
        flat, labelling = self._read(window), settings.labelling
        lengths_D = flat.lengths_D
        cut: dict[str, int] = {}
        long_documents = settings.long_documents
        if settings.kind == "preference":
            flat, cut = cut_prompts(flat, max_tokens=settings.seq_len) if long_documents != "drop" else (flat, {})
            long_documents = "drop"
        if labelling is not None and settings.long_documents != "drop":
            flat, cut = cut_texts(flat, max_tokens=settings.seq_len, num_closing=labelling.num_closing)
        packed = pack(
            flat,
            seq_len=settings.seq_len,
            pad_id=settings.pad_id,
            packing=settings.packing,
            long_documents=long_documents,
        )
        packed.counts.update(cut)
        if settings.kind != "chat":
            del packed.counts[WITHOUT_PROMPT]  # a text has no prompt
        shard = None
        if packed.rows.num_rows:
            name = f"{window.split}/{window.number:05d}.npy"
            written = write_shard(paths.join(settings.folder, name), packed.rows, dtype=self.dtype)
            shard = {**written, "name": name}
        too_long = (lengths_D > settings.seq_len) & (long_documents == "drop")
        return {
            "split": window.split,
            "shard": shard,
            "characters": window.characters,
            "counts": {**packed.counts, **_totals(packed)},
            "too_long": window.documents[~packed.kept_D & too_long].tolist(),
            "nothing_to_learn": window.documents[~packed.kept_D & ~too_long].tolist(),
            **_shape_of(flat, kept_D=packed.kept_D, learnt_L=packed.learnt_L),
        }

    def _read(self, window: Window) -> FlatTokens:
        ids, flags = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
        for name, sha256, begin_D, length_D in window.parts:
            ids_L, flags_L = read_tokens(self.settings.tokens_folder, name, sha256=sha256)
            for begin, end in _runs(begin_D, length_D):
                ids.append(ids_L[begin:end])
                flags.append(flags_L[begin:end])
        lengths = np.concatenate([length_D for *_, length_D in window.parts])
        flat = FlatTokens(np.concatenate(ids), np.concatenate(flags), lengths)
        flat = flat if window.margins is None else with_margins(flat, window.margins)
        return flat if window.labels is None else with_labels(flat, window.labels)


def _runs(begin_D: Index, length_D: Index) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of adjacent documents."""
    end_D = begin_D + length_D
    breaks = np.flatnonzero(begin_D[1:] != end_D[:-1]) + 1
    for index in np.split(np.arange(len(begin_D)), breaks):
        yield int(begin_D[index[0]]), int(end_D[index[-1]])


def _totals(packed: Packed) -> dict[str, int]:
    rows = packed.rows
    return {
        "documents": int(np.count_nonzero(packed.kept_D)),
        "rows": rows.num_rows,
        "tokens": rows.num_tokens,
        "supervised_tokens": rows.num_supervised,
    }


def _shape_of(flat: FlatTokens, *, kept_D: NDArray[np.bool_], learnt_L: NDArray[np.bool_]) -> dict[str, list[int]]:
    """Return the length histogram of the kept documents, and their tokens to learn by answer number.

    `supervised_per_turn` counts those of whole documents, as earlier versions did (it is in the audit hash),
    `learnt_per_turn` those that are learnt in a row: without what is truncated, and the first token of a piece.
    """
    document_L = np.repeat(np.arange(flat.num_documents, dtype=np.int32), flat.lengths_D)
    learn_L = ((flat.flags_L & LEARN) > 0) & kept_D[document_L]
    begins_answer_L = learn_L & ~np.concatenate([[False], learn_L[:-1]])
    first_L = np.concatenate([[True], document_L[1:] != document_L[:-1]])[: len(document_L)]
    begins_answer_L |= learn_L & first_L
    answer_L = np.cumsum(begins_answer_L, dtype=np.int32)
    before_D = np.concatenate([np.zeros(1, np.int32), answer_L])[np.cumsum(flat.lengths_D) - flat.lengths_D]
    turn_L = np.minimum(answer_L - before_D[document_L] - 1, MAX_TURNS - 1)
    per_turn = np.bincount(turn_L[learn_L], minlength=1)
    learnt = np.bincount(turn_L[learnt_L], minlength=len(per_turn))
    answers_D = np.bincount(document_L[begins_answer_L], minlength=flat.num_documents)
    having = [int(np.count_nonzero(answers_D > turn)) for turn in range(len(per_turn))]
    edges = (*LENGTH_EDGES, np.inf)
    histogram, _ = np.histogram(flat.lengths_D[kept_D], bins=edges)
    return {
        "supervised_per_turn": per_turn.tolist(),
        "learnt_per_turn": learnt.tolist(),
        "documents_per_turn": having,
        "length_histogram": histogram.tolist(),
    }


def merged(records: Sequence[dict[str, Any]], *, seq_len: int) -> dict[str, Any]:
    """Merge the records of one split's windows into its totals."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["counts"])
    lists = ("supervised_per_turn", "documents_per_turn", "length_histogram")
    sums = {name: _added([record[name] for record in records]) for name in lists}
    # Without their MD5: these numbers are in the audit hash, which covers the data and not its storage.
    shards = [{k: v for k, v in r["shard"].items() if k != "md5"} for r in records if r["shard"]]
    slots = seq_len * sum(shard["rows"] for shard in shards)
    return {
        **{name: counts[name] for name in COUNTS},
        **({WITHOUT_PROMPT: counts[WITHOUT_PROMPT]} if WITHOUT_PROMPT in counts else {}),
        "characters": sum(record["characters"] for record in records),
        "supervised_per_turn": sums["supervised_per_turn"],
        "documents_per_turn": sums["documents_per_turn"],
        "length_histogram": {"edges": list(LENGTH_EDGES), "documents": sums["length_histogram"]},
        "shards": shards,
        "packing_efficiency": counts["tokens"] / max(1, slots),
    }


def learnt_per_turn(records: Sequence[dict[str, Any]]) -> list[int]:
    """Return the tokens that a split's rows train on, by answer number; their sum is its `supervised_tokens`.

    Records from before 2026-11-28 lack them.
    """
    return _added([record.get("learnt_per_turn", []) for record in records])


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the element-wise sum of lists of different lengths."""
    total = [0] * max((len(values) for values in lists), default=0)
    for values in lists:
        for i, value in enumerate(values):
            total[i] += value
    return total
