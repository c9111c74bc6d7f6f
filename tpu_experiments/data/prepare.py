"""Preparation of documents as packed rows on disk, once, on CPU.

The steps: read, clean, tokenise, drop duplicates, split, pack. Folders are named by a hash of their inputs
(data/steps/keys.py): a second run finds them, a changed setting makes new ones, and a preparation that was killed
resumes.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.data_schema import FIRST_TURN, OWN_KEYS, DataSourceConfig, PrepareConfig, hashed_shares
from tpu_experiments.config.defaults import LANES, Lengths
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.data.audit.summary import audit_hash, not_read_text, origins_text
from tpu_experiments.data.cleaning.clean import check_rules
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.documents import SourceSpec, spec_of
from tpu_experiments.data.prepared import MANIFEST, NotPrepared, PreparedSource, read_manifest
from tpu_experiments.data.rows import Array
from tpu_experiments.data.steps.across import add_overlaps_across_sources, write_groups
from tpu_experiments.data.steps.blocks import BlockIndex, most_common, read_index, read_notices
from tpu_experiments.data.steps.keys import rows_key
from tpu_experiments.data.steps.labels import Counts, Labelling, label_counts, label_text, require_known
from tpu_experiments.data.steps.notices import Noticed
from tpu_experiments.data.steps.pack import best_fit
from tpu_experiments.data.steps.report import write_report
from tpu_experiments.data.steps.selection import Selection, select
from tpu_experiments.data.steps.tokenized import Found, Read, TokenizedSource, tokenize_source
from tpu_experiments.data.steps.windows import WindowMaker, WindowSettings, cut_windows, learnt_per_turn, merged
from tpu_experiments.data.steps.workers import map_jobs
from tpu_experiments.data.store.shards import arrays_entry, damaged_shards
from tpu_experiments.data.store.stream import CacheSettings, Check
from tpu_experiments.data.tokens.tokenizer import own_ends, pad_id, require_chat_template, template_hash, tokenizer_hash
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import shown_path
from tpu_experiments.storage.process import PeakMemory
from tpu_experiments.storage.sealed import DamagedFile, write_sealed_json

log = logging.getLogger(__name__)

START_BYTES = 16 * 2**30  # verified at startup, per source and row length: a quarter of a minute of TPU time at 1 GB/s
LOG_AFTER_SECONDS = 2.0
MIN_FILLED = 0.92
"""Share of the rows that documents fill, with some room to what the audit finds (data/audit/findings.py)."""
PACKED_TO_MEASURE = 20_000
"""Documents that are packed to choose a row length: 0.1 s."""
MAX_BEYOND = 0.02
"""Share of a source's tokens that may be beyond the row that their conversation begins in."""


@dataclass(frozen=True)
class Preparation:
    """Settings of the preparation, for all sources; `readers` are the user's own, by source."""

    settings: PrepareConfig
    folder: str
    tokenizer: PreTrainedTokenizerBase
    readers: Mapping[str, Read]
    cache: CacheSettings | None = None
    is_lookup: bool = False
    """Make nothing; raise `NotPrepared` where something is missing."""
    verify: Literal["rows", "all"] = "rows"
    """Which existing files are verified by checksum. `rows`: the shards; those of a source and row length with more
    than `START_BYTES` only when they are opened. `all`: every shard, and every block of tokens too."""
    is_labelled: bool = False
    """Whether texts are read with their labels."""
    labels: tuple[str, ...] | None = None
    """All labels, in the order of their numbers; None while they are to be found."""
    arrays: tuple[Array, ...] = ()
    """Further arrays of rows, as the objective declares them."""
    reads_margin: bool = False
    """Whether pairs are read with their margins."""
    needs_answers: bool = True
    """False where the model writes the answers itself, and a row's `answer` is its reference."""

    def spec(self, name: str, source: DataSourceConfig, *, data_size: str) -> SourceSpec:
        """Resolve a source as the objective reads it; arguments and errors as of `spec_of`."""
        how = {name: getattr(self, name) for name in ("is_labelled", "reads_margin", "needs_answers")}
        return spec_of(name, source, data_size=data_size, **how)


def prepare(
    sources: Mapping[str, DataSourceConfig], *, data_size: str, seq_lens: Iterable[int], preparation: Preparation
) -> dict[str, PreparedSource]:
    """Return rows of every source at every length, made now or reused, in the order of `sources`.

    Raises:
        ConfigError: a source that cannot be read, is empty, or leaves no row to train or hold out; or links in the
            folder.
    """
    paths.require_no_links(preparation.folder, key=f"prepare.folder={preparation.folder}")
    lengths = sorted(set(seq_lens))
    specs = _specs(sources, data_size=data_size, preparation=preparation)
    for name, spec in specs.items():
        _check(spec, source=sources[name], preparation=preparation)
    prepared = {}
    for name, spec in specs.items():
        tokens = _tokenized(
            spec,
            source=sources[name],
            preparation=preparation,
            found="taken" if preparation.verify == "rows" else "verified",
        )
        rows = {n: _rows_of_length(tokens, source=sources[name], seq_len=n, preparation=preparation) for n in lengths}
        prepared[name] = PreparedSource(
            name=name,
            kind=spec.kind,
            folders={n: folder for n, (folder, _) in rows.items()},
            manifests={n: manifest for n, (_, manifest) in rows.items()},
            cache=preparation.cache,
            check=_shard_check(manifest for _, manifest in rows.values()),
        )
        _log_not_read(next(iter(prepared[name].manifests.values())))
    add_overlaps_across_sources(prepared, sources=sources)
    return prepared


def lengths_of(
    sources: Mapping[str, DataSourceConfig], *, data_size: str, preparation: Preparation
) -> dict[str, Lengths]:
    """Return the document lengths of every source, tokenising where needed; arguments as for `prepare`.

    Raises:
        NotPrepared: some are not tokenised, and `preparation` forbids making them.
        ConfigError: a source that cannot be read or is empty.
    """
    found = {}
    for name, tokens in each_tokenized(sources, data_size=data_size, preparation=preparation):
        lengths_D = np.concatenate([read_index(tokens.folder, block).lengths_D for block in tokens.block_names])
        held = length_to_hold(lengths_D, kind=tokens.spec.kind)
        is_packed = preparation.settings.packing == "best_fit"
        row = held if held is None or not is_packed else well_filled(lengths_D, at_least=held)
        found[name] = Lengths(row, int(lengths_D.sum()), held)
    return found


def well_filled(lengths_D: NDArray[np.int64], *, at_least: int) -> int:
    """Return the shortest rows, a multiple of `LANES`, that best-fit packing fills.

    Of the eight lengths that are tried, the best if none is filled. Documents of a little more than half a row leave
    the rest of it empty.
    """
    lengths_D = lengths_D[:: -(-len(lengths_D) // PACKED_TO_MEASURE)]
    shares = {}
    for row in range(-(-at_least // LANES) * LANES, at_least + 8 * LANES, LANES):
        pieces_P = np.concatenate([lengths_D % row, np.repeat(row, int((lengths_D // row).sum()))])
        _, _, num_rows = best_fit(pieces_P[pieces_P > 0], seq_len=row)
        shares[row] = float(lengths_D.sum()) / (row * max(1, num_rows - 1))
        if shares[row] >= MIN_FILLED:
            return row
    return max(shares, key=lambda row: shares[row])


def length_to_hold(lengths_D: NDArray[np.int64], *, kind: str) -> int | None:
    """Return the length of the longest documents that a row should hold whole; None without documents.

    95 % of texts. Of conversations 99 %, and all but 2 % of their tokens: what is beyond a row has lost its question,
    and few long ones have many tokens.
    """
    if not len(lengths_D):
        return None
    share = 95 if kind == "text" else 99
    row = int(np.percentile(lengths_D, share, method="inverted_cdf"))
    if kind != "text":
        longer = np.sort(lengths_D[lengths_D > row])
        # With rows of longer[i] tokens, longer[i + 1:] have this many tokens beyond their row.
        beyond = np.append(np.cumsum(longer[::-1])[::-1][1:], 0) - longer * np.arange(len(longer))[::-1]
        if np.sum(longer - row) > MAX_BEYOND * lengths_D.sum():
            row = int(longer[np.argmax(beyond <= MAX_BEYOND * lengths_D.sum())])
    return row


def labels_of(
    sources: Mapping[str, DataSourceConfig], *, data_size: str, preparation: Preparation
) -> dict[str, Counts]:
    """Return the label counts of every source, tokenising where needed; arguments and errors as of `lengths_of`."""
    found: dict[str, Counts] = {}
    for name, tokens in each_tokenized(sources, data_size=data_size, preparation=preparation):
        blocks = [read_index(tokens.folder, block) for block in tokens.block_names]
        found[name] = label_counts(blocks, code_D=select(blocks, source=sources[name], tokens=tokens).code_D)
    return found


def each_tokenized(
    sources: Mapping[str, DataSourceConfig], *, data_size: str, preparation: Preparation
) -> Iterator[tuple[str, TokenizedSource]]:
    """Yield the tokens of every source, one source after another."""
    paths.require_no_links(preparation.folder, key=f"prepare.folder={preparation.folder}")
    for name, spec in _specs(sources, data_size=data_size, preparation=preparation).items():
        _check(spec, source=sources[name], preparation=preparation)
        yield name, _tokenized(spec, source=sources[name], preparation=preparation, found="taken")


def _check(spec: SourceSpec, *, source: DataSourceConfig, preparation: Preparation) -> None:
    """Require that a source's rules are for its kind, and that the tokenizer can render its conversations."""
    check_rules(source.clean, source=spec.name, kind=spec.kind)
    if spec.kind != "text":
        require_chat_template(preparation.tokenizer, source=spec.name)


def _specs(
    sources: Mapping[str, DataSourceConfig], *, data_size: str, preparation: Preparation
) -> dict[str, SourceSpec]:
    return {name: preparation.spec(name, source, data_size=data_size) for name, source in sources.items()}


def _tokenized(
    spec: SourceSpec, *, source: DataSourceConfig, preparation: Preparation, found: Found
) -> TokenizedSource:
    return tokenize_source(
        spec,
        source=source,
        tokenizer=preparation.tokenizer,
        settings=preparation.settings,
        folder=preparation.folder,
        read=preparation.readers.get(spec.name),
        is_lookup=preparation.is_lookup,
        found=found,
    )


def _shard_check(manifests: Iterable[Mapping[str, Any]]) -> Check:
    """Return `at_open` where a row length has too many bytes to verify its shards at startup, else `none`."""
    shards = [[record for split in m["splits"].values() for record in split["shards"]] for m in manifests]
    return "at_open" if any(sum(r["bytes"] for r in records) > START_BYTES for records in shards) else "none"


def _rows_of_length(
    tokens: TokenizedSource, *, source: DataSourceConfig, seq_len: int, preparation: Preparation
) -> tuple[str, dict[str, Any]]:
    """Return folder and manifest of the rows of one length."""
    pad = pad_id(preparation.tokenizer)
    key = rows_key(
        tokens.key,
        source=source,
        settings=preparation.settings,
        seq_len=seq_len,
        pad_id=pad,
        labels=preparation.labels,
    )
    folder = paths.join(preparation.folder, f"{tokens.spec.name}-rows-{seq_len}-{key}")
    manifest = read_manifest(folder, expected={"key": key}, is_lookup=preparation.is_lookup)
    if manifest is None and preparation.is_lookup:
        raise NotPrepared(tokens.spec.name)
    if (
        manifest is not None
        and not preparation.is_lookup
        and not _are_whole(manifest, folder=folder, verify=preparation.verify)
    ):
        manifest = None
    if manifest is None:
        started = time.perf_counter()
        with PeakMemory() as memory:
            try:
                manifest = _make_rows(tokens, source=source, seq_len=seq_len, preparation=preparation, folder=folder)
            except DamagedFile as error:
                log.warning("%s It is prepared again.", error)
                tokens = _tokenized(tokens.spec, source=source, preparation=preparation, found="verified")
                manifest = _make_rows(tokens, source=source, seq_len=seq_len, preparation=preparation, folder=folder)
            manifest = {"key": key, **manifest}
        seconds = time.perf_counter() - started + tokens.seconds
        total = sum(split["tokens"] for split in manifest["splits"].values())
        manifest |= {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(total / seconds),
            "peak_rss_gib": round(max(memory.gib, tokens.peak_rss_gib), 3),
        }
        _require_rows(manifest, source=source, tokens=tokens)
        write_sealed_json(paths.join(folder, MANIFEST), manifest, indent=1)
    _log_source(manifest, folder=folder)
    return folder, manifest


def _are_whole(manifest: Mapping[str, Any], *, folder: str, verify: str) -> bool:
    """Return whether all shards match the manifest; damage is logged."""
    shards = [record for split in manifest["splits"].values() for record in split["shards"]]
    shards += manifest["groups"].values()
    num_bytes = sum(record["bytes"] for record in shards)
    if verify == "rows" and num_bytes > START_BYTES:
        return True
    started = time.perf_counter()
    damaged = damaged_shards(folder, shards, md5=manifest.get("md5", {}))
    seconds = time.perf_counter() - started
    for complaint in damaged:
        log.warning("data.%s: %s It is prepared again.", manifest["source"], complaint)
    if seconds > LOG_AFTER_SECONDS:
        log.info("data.%s: checked %.0f MB of rows in %.1f s", manifest["source"], num_bytes / 1e6, seconds)
    return not damaged


def _make_rows(
    tokens: TokenizedSource, *, source: DataSourceConfig, seq_len: int, preparation: Preparation, folder: str
) -> dict[str, Any]:
    """Write the shards and the report; return the manifest without seconds and memory."""
    paths.make_dirs(folder)
    blocks = [read_index(tokens.folder, name) for name in tokens.block_names]
    selection = select(blocks, source=source, tokens=tokens)
    labels = _known_labels(tokens.spec.name, blocks, selection=selection, preparation=preparation)
    records = _pack_windows(
        blocks, selection=selection, tokens=tokens, seq_len=seq_len, preparation=preparation, folder=folder
    )
    splits = {split: merged([r for r in records if r["split"] == split], seq_len=seq_len) for split in SPLITS}
    groups = write_groups(folder, selection)
    reported, examples = write_report(
        folder, tokens=tokens, selection=selection, records=records, tokenizer=preparation.tokenizer
    )
    changes: Counter[str] = Counter()
    not_read: Counter[str] = Counter()
    for block in blocks:
        changes.update(block.changes)
        not_read.update(block.not_read)
    manifest = {
        **_described(tokens, seq_len=seq_len, preparation=preparation),
        "max_token_id": max(block.max_token_id for block in blocks),
        "documents_in": sum(block.num_rows for block in blocks),
        "documents_out": sum(split["documents"] for split in splits.values()),
        "documents_reported": dict(sorted(reported.items())),
        "examples": examples,
        "changes": dict(sorted(changes.items())),
        "not_read": most_common(not_read),
        "splits": splits,
        "packing_efficiency": splits["train"]["packing_efficiency"],
        "length_percentiles": _percentiles(blocks, chosen_D=selection.chosen("train")),
        "overlaps": selection.overlaps,
        "noticed": _noticed(tokens, selection=selection, records=records),
        "groups": groups,
        "md5": {
            record["name"]: record["md5"] for record in [*(r["shard"] for r in records if r["shard"]), *groups.values()]
        },
        "config": _settings_of(source, tokens=tokens),
        **({"origins": tokens.origins} if tokens.origins else {}),
        **({} if labels is None else {"labels": labels}),
        **arrays_entry(preparation.arrays),
    }
    assert manifest["documents_in"] == manifest["documents_out"] + sum(reported.values()), "a document was lost"
    return manifest | {"audit_hash": audit_hash(manifest)}


def _noticed(tokens: TokenizedSource, *, selection: Selection, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts over the training documents that the audit looks at; they are not in its hash.

    Only `learnt_per_turn` where some block was made before there were any.
    """
    learnt = {split: learnt_per_turn([r for r in records if r["split"] == split]) for split in SPLITS}
    chosen_D, noticed, first = selection.chosen("train"), Noticed(), 0
    for name in tokens.block_names:
        found = read_notices(tokens.folder, name)
        if found is None:
            return {"learnt_per_turn": learnt}
        count = len(found[0]["marks"])
        noticed.add(*found, chosen_D=chosen_D[first : first + count])
        first += count
    return {**noticed.counts(), "learnt_per_turn": learnt}


def _known_labels(
    name: str, blocks: list[BlockIndex], *, selection: Selection, preparation: Preparation
) -> dict[str, dict[str, int]] | None:
    """Return the number of documents of every label by split; None where texts have no labels.

    Raises:
        ConfigError: a document has a label that is none of the run's.
    """
    if not preparation.is_labelled:
        return None
    assert preparation.labels is not None, "they are found before rows are made"
    counts = label_counts(blocks, code_D=selection.code_D)
    require_known(counts, labels=preparation.labels, name=name, vocab_size=len(preparation.tokenizer))
    return {split: {label: own.get(label, 0) for label in preparation.labels} for split, own in counts.items()}


def labelling_of(preparation: Preparation) -> Labelling | None:
    """Return the labels of texts with what a text ends with; None where they have none."""
    if preparation.labels is None:
        return None
    return Labelling(preparation.labels, num_closing=len(own_ends(preparation.tokenizer)[1]))


def _described(tokens: TokenizedSource, *, seq_len: int, preparation: Preparation) -> dict[str, Any]:
    """Return the manifest entries that need no data."""
    path = str(preparation.tokenizer.name_or_path)
    return {
        "format": 1,
        "source": tokens.spec.name,
        "kind": tokens.spec.kind,
        "path": redacted_text(shown_path(tokens.spec.path)),
        "files": tokens.num_files,
        "seq_len": seq_len,
        "packing": preparation.settings.packing,
        "long_documents": preparation.settings.long_documents,
        "pad_id": pad_id(preparation.tokenizer),
        "tokenizer": shown_path(path),
        "tokenizer_hash": tokenizer_hash(preparation.tokenizer),
        "template_hash": template_hash(preparation.tokenizer) if tokens.spec.kind != "text" else "none",
    }


def _percentiles(blocks: list[BlockIndex], *, chosen_D: NDArray[np.bool_]) -> dict[str, int]:
    """Return length percentiles of the training documents, in tokens, to choose a row length by."""
    lengths = np.concatenate([block.lengths_D for block in blocks])[chosen_D]
    shares = (50, 90, 95, 99, 100)
    if not len(lengths):
        return {}
    values = np.percentile(lengths, shares, method="inverted_cdf")
    return {str(share): int(value) for share, value in zip(shares, values, strict=True)}


def _settings_of(source: DataSourceConfig, *, tokens: TokenizedSource) -> dict[str, Any]:
    eval_fraction, test_fraction = hashed_shares(source, own=tokens.own)
    return {
        "format": tokens.spec.format,
        "clean": asdict(source.clean),
        "duplicates": source.duplicates.settings(),
        "eval_fraction": eval_fraction,
        "test_fraction": test_fraction,
        "split_by": source.split_by,
        **({"own_splits": sorted(tokens.own), "held_out_copies": source.held_out_copies} if tokens.own else {}),
    }


def _pack_windows(
    blocks: list[BlockIndex],
    *,
    selection: Selection,
    tokens: TokenizedSource,
    seq_len: int,
    preparation: Preparation,
    folder: str,
) -> list[dict[str, Any]]:
    """Pack all windows; return the record of each, with its `split`."""
    size, labelling = preparation.settings.window_tokens, labelling_of(preparation)
    windows = (
        window
        for split in SPLITS
        for window in cut_windows(
            blocks, split=split, chosen_D=selection.chosen(split), tokens=size, labelling=labelling
        )
    )
    settings = WindowSettings(
        tokens_folder=tokens.folder,
        folder=folder,
        seq_len=seq_len,
        packing=preparation.settings.packing,
        long_documents=preparation.settings.long_documents,
        pad_id=pad_id(preparation.tokenizer),
        vocab_size=1 + max(preparation.tokenizer.get_vocab().values()),
        kind=tokens.spec.kind,
        labelling=labelling,
        arrays=preparation.arrays,
    )
    records = []
    with tqdm(desc=f"{tokens.spec.name}: rows", unit=" rows", mininterval=0.5, leave=False, disable=None) as bar:
        for record in map_jobs(
            WindowMaker, settings, windows, engine=preparation.settings.engine, workers=preparation.settings.workers
        ):
            bar.update(record["counts"]["rows"])
            records.append(record)
    return records


def _require_rows(manifest: Mapping[str, Any], *, source: DataSourceConfig, tokens: TokenizedSource) -> None:
    """Raise unless there is a row to train on and, if any is configured, one held out for evaluation."""
    splits, key = manifest["splits"], f"data.{tokens.spec.name}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in manifest["documents_reported"].items())
    read = f"{manifest['documents_in']} documents were read" + (f", left out: {reasons}" if reasons else "")
    for split in sorted(tokens.own):
        if not splits[split]["rows"]:
            raise ConfigError(
                f"{key}; no row is left of its {split} split, {tokens.origins[split]} ({read}); loosen {key}.clean, or "
                f"set {key}.{OWN_KEYS[split][0]}= to other files."
            )
    eval_fraction, test_fraction = hashed_shares(source, own=tokens.own)
    if not splits["train"]["rows"]:
        raise ConfigError(
            f"{key}.eval_fraction={eval_fraction} and {key}.test_fraction={test_fraction}; no row is "
            f"left to train on ({read}); {_most_frequent(manifest)}{_reference_hint(tokens.spec)}lower the "
            f"fractions, loosen {key}.clean, or add "
            "documents to "
            f"{tokens.spec.path}."
        )
    if eval_fraction and not splits["evaluation"]["rows"]:
        is_by_turn = source.split_by == FIRST_TURN and source.kind != "text"
        alike = f"set {key}.split_by=document if many begin with the same question, " if is_by_turn else ""
        raise ConfigError(
            f"{key}.eval_fraction={eval_fraction}; no row was held out ({read}); raise it, name held-out ones "
            f"with {key}.eval_path=FILE, {alike}add documents to {tokens.spec.path}, or, where another source holds "
            "some out, set it to 0."
        )


def _reference_hint(spec: SourceSpec) -> str:
    """Return what gives prompts an answer to compare with, as a clause; "" where conversations are learnt."""
    if spec.needs_answers:
        return ""
    return (
        "the model writes the answers, and held-out losses, lengths of rows and splits are those of a reference: give "
        f"each row one as `answer`, or name its field (data.{spec.name}.fields.answer=); "
    )


def _most_frequent(manifest: Mapping[str, Any]) -> str:
    """Return the first row that was left out for the most frequent reason, as a clause; "" where none was."""
    counts = manifest["documents_reported"]
    rows = manifest["examples"].get(max(counts, key=counts.__getitem__)) if counts else None
    return f"{rows[0]['place']} {rows[0]['message'].rstrip('.')}; " if rows else ""


def _log_not_read(manifest: Mapping[str, Any]) -> None:
    """Log the fields of a source's rows that were not read."""
    if manifest.get("not_read"):
        log.info("data.%s: not read: %s", manifest["source"], not_read_text(manifest))


def _log_source(manifest: Mapping[str, Any], *, folder: str) -> None:
    train, evaluation, test = (manifest["splits"][split] for split in SPLITS)
    if manifest.get("origins"):
        log.info("data.%s: %s", manifest["source"], origins_text(manifest))
    if manifest.get("labels"):
        names = list(manifest["labels"]["train"])
        texts = (f"{split}: {label_text(counts, labels=names)}" for split, counts in manifest["labels"].items())
        log.info("data.%s: labels in %s", manifest["source"], "; ".join(texts))
    apart, left = (manifest["changes"].get(f"rewritten_answer_{what}", 0) for what in ("learnt_apart", "not_learnt"))
    if apart or left:
        log.info(
            "data.%s: the chat template renders %d answers otherwise once turns follow (reasoning of earlier turns, an "
            "end): %s; a template that keeps every turn has none, see model.chat_format",
            manifest["source"],
            apart + left,
            f"{apart} are learnt as they are generated, in documents of their own" if apart else "they are not learnt",
        )
    log.info(
        "data.%s: %d documents in, %d out -> %d rows of %d (%d to evaluate, %d to test), %d tokens, %.1f%% of the rows "
        "filled, %.1f%% supervised; %s",
        manifest["source"],
        manifest["documents_in"],
        manifest["documents_out"],
        train["rows"],
        manifest["seq_len"],
        evaluation["rows"],
        test["rows"],
        train["tokens"],
        100 * train["packing_efficiency"],
        100 * train["supervised_tokens"] / train["tokens"],
        folder,
    )
