"""Held-out documents as rows: each token is predicted once and traceable to its document.

The rows of training cannot be used: they have no document numbers, and what `prepare.long_documents` cuts off is
missing. A document longer than a row becomes rolling windows, as in lm-evaluation-harness: each begins with the last
token of the one before, and the last one reaches back to be as long as the others. Legend: D documents, L tokens of
all of them, concatenated, N rows of T tokens.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.data.prepare import Preparation, labelling_of
from tpu_experiments.data.reading.parts import list_parts
from tpu_experiments.data.reading.sources import field_values
from tpu_experiments.data.rows import Rows, padding
from tpu_experiments.data.steps.blocks import BlockIndex, read_index, read_report, read_tokens
from tpu_experiments.data.steps.labels import Labelling, cut_texts, with_labels
from tpu_experiments.data.steps.pack import FlatTokens, best_fit
from tpu_experiments.data.steps.pairs import cut_prompts, with_margins
from tpu_experiments.data.steps.selection import select
from tpu_experiments.data.steps.tokenized import TokenizedSource, tokenize_source
from tpu_experiments.data.tokens.tokenize import LEARN, SECOND

log = logging.getLogger(__name__)

MAX_VALUES = 100
NO_VALUE = "(none)"


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Documents of one split of one source."""

    name: str
    kind: str
    flat: FlatTokens
    num_in_split: int
    values: tuple[str, ...] | None = None
    """Each document's value of the field `by`; None where the source's rows do not have it."""
    labelling: Labelling | None = None
    """Labels of the texts; None where they have none."""

    def cut(self, seq_len: int) -> "HeldOut":
        """Return labelled texts and pairs as training reads them, cut to a row; other documents become windows."""
        if self.kind == "preference":
            return self._cut_pairs(seq_len)
        if self.labelling is None:
            return self
        flat, counts = cut_texts(self.flat, max_tokens=seq_len, num_closing=self.labelling.num_closing)
        if counts["documents_truncated"]:
            log.info("data.%s: %d of %d texts are cut to %d tokens", self.name, counts["documents_truncated"],
                     flat.num_documents, seq_len)  # fmt: skip
        return replace(self, flat=flat)

    def _cut_pairs(self, seq_len: int) -> "HeldOut":
        """Return the pairs with prompts cut to a row, without those whose answers alone do not fit."""
        flat, counts = cut_prompts(self.flat, max_tokens=seq_len)
        fits_D = flat.lengths_D <= seq_len
        fits_L = np.repeat(fits_D, flat.lengths_D)
        more = {name: array_L[fits_L] for name, array_L in flat.more.items()}
        kept = FlatTokens(flat.ids_L[fits_L], flat.flags_L[fits_L], flat.lengths_D[fits_D], more)
        if counts["documents_truncated"] or not fits_D.all():
            log.info("data.%s: the prompts of %d of %d pairs are cut to a row of %d tokens, and %d pairs that do not "
                     "fit are left out", self.name, counts["documents_truncated"], flat.num_documents, seq_len,
                     int((~fits_D).sum()))  # fmt: skip
        given = self.values
        values = None if given is None else tuple(v for v, fits in zip(given, fits_D, strict=True) if fits)
        return replace(self, flat=kept, values=values)

    def token_documents(self) -> NDArray[np.int64]:
        """Return the document index of each token, shape (L,)."""
        return np.repeat(np.arange(self.flat.num_documents), self.flat.lengths_D)

    def texts(self) -> Iterator[NDArray[np.int32]]:
        """Yield the ids of each document; of a pair those of its one or two conversations by themselves."""
        for ids, flags in self.documents():
            second = np.flatnonzero(flags & SECOND)
            for part, own in zip(np.split(ids, second), np.split(flags, second), strict=True):
                if not len(second) or np.any(own & LEARN):  # the missing half of a single answer is one token
                    yield part

    def documents(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Yield ids and flags of each document."""
        ends_D = np.cumsum(self.flat.lengths_D)
        for end, length in zip(ends_D.tolist(), self.flat.lengths_D.tolist(), strict=True):
            yield self.flat.ids_L[end - length : end], self.flat.flags_L[end - length : end]


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """Rows of held-out documents, with the token index of each position."""

    rows: Rows
    token_NT: NDArray[np.int64]
    """Index of the token, among all L, at each position; -1 at padding."""

    def per_token(self, values_NT: NDArray[np.float32], *, num_tokens: int) -> NDArray[np.float64]:
        """Return values (L,) of the predicted tokens, 0 for the others.

        Args:
            values_NT: the value of each token at the position before it, as `models/passes/loss.py` returns them.
        """
        values_L = np.zeros(num_tokens, np.float64)
        learn_NT = self.rows.learn_NT[:, 1:]
        values_L[self.token_NT[:, 1:][learn_NT]] = values_NT[:, :-1][learn_NT]
        return values_L

    def segment_lengths(self) -> NDArray[np.float64]:
        """Return the learnt tokens of segments 1, 2, ... of every row, (N, S), up to the last of the fullest row."""
        rows = self.rows
        row_K, column_K = np.nonzero(rows.learn_NT)
        lengths_NS = np.zeros((rows.num_rows, int(rows.segments_NT.max())))
        np.add.at(lengths_NS, (row_K, rows.segments_NT[row_K, column_K] - 1), 1)
        return lengths_NS

    def per_pair(self, values_NPK: NDArray[np.float64], held_out: HeldOut) -> NDArray[np.float64]:
        """Return the values of every pair (D, K) from those of the rows' first, second, ... two segments."""
        row_M, column_M = np.nonzero(self.rows.learn_NT)
        document_M = held_out.token_documents()[self.token_NT[row_M, column_M]]
        values_DK = np.zeros((held_out.flat.num_documents, values_NPK.shape[2]))
        values_DK[document_M] = values_NPK[row_M, (self.rows.segments_NT[row_M, column_M] - 1) // 2]
        return values_DK


def held_out_documents(
    name: str,
    source: DataSourceConfig,
    *,
    split: str,
    data_size: str,
    preparation: Preparation,
    max_documents: int | None,
    seed: int,
    by: str | None = None,
) -> HeldOut:
    """Return a prepared source's documents of a split, as `data/prepare.py` chose them.

    At most `max_documents`, sampled by `seed`.

    Args:
        by: row field whose value is returned for each document.

    Raises:
        NotPrepared: the source is not prepared.
        DamagedFile: one of its files fails its checksum.
        ConfigError: the field has more than `MAX_VALUES` values, or the source has a reader of the user's own.
    """
    tokens = tokenize_source(
        preparation.spec(name, source, data_size=data_size),
        source=source,
        tokenizer=preparation.tokenizer,
        settings=preparation.settings,
        folder=preparation.folder,
        read=preparation.readers.get(name),
        is_lookup=True,
    )
    blocks = [read_index(tokens.folder, block) for block in tokens.block_names]
    chosen_D = select(blocks, source=source, tokens=tokens).chosen(split)
    members = np.flatnonzero(chosen_D)
    num_in_split = len(members)
    if max_documents is not None and num_in_split > max_documents:
        generator = np.random.Generator(np.random.Philox(key=seed))
        members = np.sort(generator.choice(members, max_documents, replace=False))
    values = None if by is None else _values(tokens, members, by=by, is_own=name in preparation.readers)
    labelling = labelling_of(preparation)
    flat = _read(tokens, members, blocks=blocks, labelling=labelling)
    return HeldOut(name, tokens.spec.kind, flat, num_in_split, values, labelling)


def _values(tokens: TokenizedSource, members: NDArray[np.int64], *, by: str, is_own: bool) -> tuple[str, ...] | None:
    """Return the value of the field `by` for the documents with these indices in the source."""
    if is_own:
        raise ConfigError(
            f"task.by={by}; data.{tokens.spec.name} has a reader of your own, of whose rows no field is known; leave "
            "task.by out."
        )
    places = [place for name in tokens.block_names for place in read_report(tokens.folder, name)[0]]
    wanted = [places[index] for index in members.tolist()]
    found: dict[str, str] = {}
    names: list[str] = []
    for part in list_parts(tokens.spec).parts:
        of_part, fields = field_values(part.spec, files=part.files, field=by, places=frozenset(wanted))
        found, names = found | of_part, names or fields
    if not found and wanted:
        log.warning("data.%s: no held-out row has the field %r (task.by). %s", tokens.spec.name, by, suggest(by, names))
        return None
    values = tuple(found.get(place, NO_VALUE) for place in wanted)
    if len(set(values)) > MAX_VALUES:
        raise ConfigError(
            f"task.by={by}; it has {len(set(values)):,} values in the held-out rows of data.{tokens.spec.name}, and "
            f"{MAX_VALUES} are distinguished at most; name a field that puts documents into a few groups."
        )
    return values


def _read(
    tokens: TokenizedSource, members: NDArray[np.int64], *, blocks: list[BlockIndex], labelling: Labelling | None
) -> FlatTokens:
    """Read the tokens of the documents with these indices in the source; blocks without one are skipped."""
    ids, flags, chosen = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)], [np.zeros(0, np.int64)]
    labels, margins = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    first = 0
    for block in blocks:
        lengths_D = block.lengths_D
        inside = members[(members >= first) & (members < first + len(lengths_D))] - first
        first += len(lengths_D)
        if not len(inside):
            continue
        ids_L, flags_L = read_tokens(tokens.folder, block.name, sha256=block.sha256["tokens"])
        ends_D = np.cumsum(lengths_D)
        if labelling is not None:
            labels.append(labelling.numbers(block)[inside])
        if block.margins_D is not None:
            margins.append(block.margins_D[inside])
        for index in inside.tolist():
            part = slice(int(ends_D[index] - lengths_D[index]), int(ends_D[index]))
            ids.append(ids_L[part])
            flags.append(flags_L[part])
        chosen.append(lengths_D[inside])
    flat = FlatTokens(np.concatenate(ids), np.concatenate(flags), np.concatenate(chosen))
    flat = with_margins(flat, np.concatenate(margins)) if tokens.spec.reads_margin else flat
    return flat if labelling is None else with_labels(flat, np.concatenate(labels))


def rows_of_documents(held_out: HeldOut, *, seq_len: int, pad_id: int) -> HeldOutRows:
    """Lay documents out in rows; every trainable token but a segment's first is predicted exactly once.

    A document is one segment; a pair, which fits a row (`HeldOut.cut`), is two, as in training.
    """
    flat = held_out.flat
    learn_L = (flat.flags_L & LEARN) > 0
    begins = np.cumsum(flat.lengths_D) - flat.lengths_D
    pieces = np.array(
        [
            (begin + start, begin + end, begin + new)
            for begin, length in zip(begins.tolist(), flat.lengths_D.tolist(), strict=True)
            for start, end, new in windows(length, seq_len=seq_len)
            if learn_L[begin + new : begin + end].any()
        ],
        np.int64,
    ).reshape(-1, 3)
    row_P, column_P, num_rows = best_fit(pieces[:, 1] - pieces[:, 0], seq_len=seq_len)
    rows = padding(num_rows, seq_len=seq_len, pad_id=pad_id, like=flat.more)
    token_NT = np.full((num_rows, seq_len), -1, np.int64)
    for piece in np.lexsort((column_P, row_P)).tolist():
        start, end, new = pieces[piece].tolist()
        row, column = int(row_P[piece]), int(column_P[piece])
        place = slice(column, column + end - start)
        token_NT[row, place] = np.arange(start, end)
        for name, own_L in {"ids": flat.ids_L, **flat.more}.items():
            rows.array(name)[row, place] = own_L[start:end]
        rows.learn_NT[row, column + new - start : place.stop] = learn_L[new:end]
        rows.positions_NT[row, place] = np.arange(end - start)
        rows.segments_NT[row, place] = 1 + (rows.segments_NT[row, column - 1] if column else 0)
        for second in np.flatnonzero(flat.flags_L[start:end] & SECOND).tolist():
            behind = slice(column + second, place.stop)
            rows.learn_NT[row, behind.start] = False
            rows.positions_NT[row, behind] -= second
            rows.segments_NT[row, behind] += 1
    return HeldOutRows(rows, token_NT)


def windows(length: int, *, seq_len: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first new token) of a document's rolling windows of at most `seq_len` tokens.

    >>> list(windows(10, seq_len=4))
    [(0, 4, 1), (3, 7, 4), (6, 10, 7)]
    >>> list(windows(9, seq_len=4))
    [(0, 4, 1), (3, 7, 4), (5, 9, 7)]
    """
    done = min(length, seq_len)
    yield 0, done, min(1, length)
    while done < length:
        end = min(done + seq_len - 1, length)
        yield end - seq_len, end, done
        done = end
