"""Every source to its training and held-out rows: read, split by hash, tokenise, pack.

Documents -> tokens, one document at a time -> rows in memory, for every row length asked for.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import DataSourceConfig
from tpu_experiments.data.documents import Document, SourceSpec, no_document, spec_of
from tpu_experiments.data.pack import FlatTokens, Packed, flatten, pack_flat
from tpu_experiments.data.rows import Rows
from tpu_experiments.data.split import is_held_out
from tpu_experiments.data.tokenize import Tokens, tokenize_document
from tpu_experiments.data.tokenizer import pad_id, require_chat_template

log = logging.getLogger(__name__)

Read = Callable[[str, SourceSpec], Iterator[Document]]
"""The configured reader of a source, called with its name."""


@dataclass(frozen=True, eq=False)
class PreparedSource:
    """One source's rows, keyed by their length."""

    name: str
    kind: str
    train: dict[int, Rows]
    evaluation: dict[int, Rows]
    num_documents: int
    """Documents read, dropped ones included."""
    num_dropped: dict[str, int]
    """`empty_documents`, and `unlearnable_pieces@<length>` for every row length."""


def prepare(
    sources: dict[str, DataSourceConfig],
    *,
    data_size: str,
    tokenizer: PreTrainedTokenizerBase,
    seq_lens: Iterable[int],
    read: Read,
) -> dict[str, PreparedSource]:
    """Rows of every source at every length, in the order of `sources`.

    Raises:
        ConfigError: a source that cannot be read, is empty, or leaves no row to train or hold out.
    """
    lengths = sorted(set(seq_lens))
    specs = {name: spec_of(name, source, data_size=data_size) for name, source in sources.items()}
    for name, spec in specs.items():
        if spec.kind == "chat":
            require_chat_template(tokenizer, source=name)
    return {
        name: _prepare_source(
            read(name, spec),
            spec=spec,
            eval_fraction=sources[name].eval_fraction,
            tokenizer=tokenizer,
            seq_lens=lengths,
        )
        for name, spec in specs.items()
    }


def _prepare_source(
    documents: Iterator[Document],
    *,
    spec: SourceSpec,
    eval_fraction: float,
    tokenizer: PreTrainedTokenizerBase,
    seq_lens: list[int],
) -> PreparedSource:
    counts: Counter[str] = Counter()
    held_out: list[Tokens] = []  # few; those to train on are flattened as they come
    train = flatten(
        _tokens_to_train(
            documents,
            spec=spec,
            eval_fraction=eval_fraction,
            tokenizer=tokenizer,
            counts=counts,
            held_out=held_out,
        )
    )
    if not counts["documents"]:
        raise no_document(spec)
    sides = {"train": train, "evaluation": flatten(held_out)}
    packed = {
        side: {n: pack_flat(flat, seq_len=n, pad_id=pad_id(tokenizer)) for n in seq_lens}
        for side, flat in sides.items()
    }
    _require_rows(packed, sides=sides, spec=spec, eval_fraction=eval_fraction, counts=counts)
    for n in seq_lens:
        counts[f"unlearnable_pieces@{n}"] = sum(p[n].num_dropped_pieces for p in packed.values())
        _log_source(spec, seq_len=n, packed=packed, sides=sides, counts=counts)
    return PreparedSource(
        name=spec.name,
        kind=spec.kind,
        train={n: packed["train"][n].rows for n in seq_lens},
        evaluation={n: packed["evaluation"][n].rows for n in seq_lens},
        num_documents=counts.pop("documents"),
        num_dropped=dict(counts),
    )


def _tokens_to_train(
    documents: Iterator[Document],
    *,
    spec: SourceSpec,
    eval_fraction: float,
    tokenizer: PreTrainedTokenizerBase,
    counts: Counter[str],
    held_out: list[Tokens],
) -> Iterator[Tokens]:
    """Tokens to train on; those held out go into `held_out`, the totals into `counts`."""
    counts["documents"] = counts["empty_documents"] = 0
    # disable=None: no bar unless stderr is a terminal.
    bar = tqdm(documents, desc=spec.name, unit=" docs", mininterval=0.5, leave=False, disable=None)
    for document in bar:
        counts["documents"] += 1
        if document.is_empty:
            counts["empty_documents"] += 1
            continue
        tokens = tokenize_document(document, tokenizer=tokenizer, source=spec.name)
        if is_held_out(document.content, eval_fraction=eval_fraction):
            held_out.append(tokens)
        else:
            yield tokens


def _require_rows(
    packed: dict[str, dict[int, Packed]],
    *,
    sides: dict[str, FlatTokens],
    spec: SourceSpec,
    eval_fraction: float,
    counts: Counter[str],
) -> None:
    """Raise unless every length has a row to train on and, if any is wanted, one held out."""
    read = f"{counts['documents']} documents were read, {counts['empty_documents']} of them empty"
    key = f"data.{spec.name}.eval_fraction={eval_fraction}"
    if any(part.rows.num_rows == 0 for part in packed["train"].values()):
        raise ConfigError(
            f"{key}; no row is left to train on ({read}, {sides['evaluation'].num_documents} held "
            f"out); lower data.{spec.name}.eval_fraction or add documents to {spec.path}."
        )
    if eval_fraction and any(part.rows.num_rows == 0 for part in packed["evaluation"].values()):
        raise ConfigError(
            f"{key}; no row was held out ({read}, {sides['evaluation'].num_documents} held out); "
            f"raise data.{spec.name}.eval_fraction, set it to 0, or add documents to {spec.path}."
        )


def _log_source(
    spec: SourceSpec,
    *,
    seq_len: int,
    packed: dict[str, dict[int, Packed]],
    sides: dict[str, FlatTokens],
    counts: Counter[str],
) -> None:
    rows = packed["train"][seq_len].rows
    log.info(
        "data.%s: %d documents (%d held out, %d empty) -> %d rows of %d (%d held out), %d tokens, "
        "%.1f%% of the row filled, %.1f%% supervised; %d split, %d pieces without supervision",
        spec.name,
        counts["documents"],
        sides["evaluation"].num_documents,
        counts["empty_documents"],
        rows.num_rows,
        seq_len,
        packed["evaluation"][seq_len].rows.num_rows,
        rows.num_tokens,
        100 * rows.num_tokens / rows.ids_NT.size,
        100 * rows.num_supervised / rows.num_tokens,
        sum(packed[side][seq_len].num_split for side in packed),
        counts[f"unlearnable_pieces@{seq_len}"],
    )
