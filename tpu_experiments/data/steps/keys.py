"""Cache keys of prepared folders: a hash of every input that affects their content.

A changed input gives another key, so that no stale data is read.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.data_schema import ASKED, DataSourceConfig, PrepareConfig
from tpu_experiments.data.documents import Document, Refused, SourceSpec
from tpu_experiments.data.reading.files import fingerprint
from tpu_experiments.data.reading.hub import fingerprint_of_hub
from tpu_experiments.data.reading.locations import SourceFile
from tpu_experiments.data.tokens.tokenizer import template_hash, text_ends, tokenizer_hash
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile, read_sealed_json, write_sealed_json

VERSION = 3
"""Incremented when the same input yields other tokens or rows, or another file layout."""

CHAT_VERSION = 4
"""Incremented when the same row gives another conversation, other tokens, or another loss mask."""

PAIR_VERSION = 1
"""Incremented when the same row gives another preference pair, or other tokens of it."""

RECOGNITION = 2
"""Incremented when `format: auto` recognises the same rows as another format."""

_EXACT = {"drop": "text", "folded": "drop", "keep": "keep"}
"""Values of `duplicates.exact` as they are hashed: `folded` was once the only rule and called `drop`; its folders stay
valid."""

_LATER = ("context", "extras", "tools", "label", "rejected", "scores", "margin")
"""Fields added to `Document` later; they are hashed only where set, so that older keys stay valid."""

REMEMBERED_BYTES = 64 * 2**20  # larger files are rehashed only when size or mtime change; hashing this much takes 0.1 s


def tokens_key(
    spec: SourceSpec,
    *,
    source: DataSourceConfig,
    content: list[str],
    tokenizer: PreTrainedTokenizerBase | None,
    has_tables: bool = False,
) -> str:
    """Return the cache key of a source's tokenised documents; `tokenizer` None keys those that are only cleaned.

    Args:
        content: fingerprints of the source's files or documents.
        has_tables: whether a .csv or .tsv file is among them, so that `quoting` matters.
    """
    return short_hash(
        {
            "version": VERSION,
            "content": content,
            "kind": spec.kind,
            "format": spec.format,
            "fields": spec.fields,
            "max_documents": spec.max_documents,
            "clean": asdict(source.clean),
            "signed": source.duplicates.near is not None,
            **({"exact": True} if source.duplicates.exact == "drop" else {}),
            **({"keep": spec.keep} if spec.keep else {}),
            **({} if spec.group_field is None else {"group_field": spec.group_field}),
            **{key: text for key in ASKED if (text := getattr(spec, key)) is not None},
            **({} if spec.label_field is None else {"label_field": spec.label_field}),
            **({"margins": True} if spec.reads_margin else {}),
            **({} if spec.needs_answers else {"needs_answers": False}),
            "tokenizer": None if tokenizer is None else tokenizer_hash(tokenizer),
            "template": template_hash(tokenizer) if tokenizer is not None and spec.kind != "text" else None,
            **({"quoting": spec.quoting} if has_tables else {}),
            **({"chat": CHAT_VERSION} if spec.kind != "text" else {}),
            **({"pairs": PAIR_VERSION} if spec.kind == "preference" else {}),
            **({} if spec.rewritten_answers == "split" else {"rewritten_answers": spec.rewritten_answers}),
            **({"ends": list(text_ends(tokenizer))} if _has_ends_of_bert(tokenizer, spec=spec) else {}),
        }
    )


def _has_ends_of_bert(tokenizer: PreTrainedTokenizerBase | None, *, spec: SourceSpec) -> bool:
    """Return whether texts are closed by [CLS] or [SEP]; earlier versions gave such a tokenizer's texts no ends."""
    if tokenizer is None or spec.kind != "text" or spec.label_field is not None:
        return False
    return text_ends(tokenizer) != (tokenizer.bos_token, tokenizer.eos_token)


def rows_key(
    tokens: str,
    *,
    source: DataSourceConfig,
    settings: PrepareConfig,
    seq_len: int,
    pad_id: int,
    labels: Sequence[str] | None = None,
) -> str:
    """Return the cache key of the packed rows of one length."""
    return short_hash(
        {
            "version": VERSION,
            "tokens": tokens,
            "duplicates": source.duplicates.settings() | {"exact": _EXACT[source.duplicates.exact]},
            "eval_fraction": source.eval_fraction,
            "test_fraction": source.test_fraction,
            "split_by": source.split_by,
            **({} if source.held_out_copies == "find" else {"held_out_copies": source.held_out_copies}),
            "seq_len": seq_len,
            "pad_id": pad_id,
            "packing": settings.packing,
            "long_documents": settings.long_documents,
            "window_tokens": settings.window_tokens,
            **({} if labels is None else {"labels": list(labels)}),
        }
    )


def content_of_files(files: list[SourceFile], *, spec: SourceSpec, folder: str) -> list[str]:
    """Return name and fingerprint of every file; those of large local files are cached in `folder`."""
    if not files:
        return [fingerprint_of_hub(spec), str(spec.hub_config), spec.hub_split]
    known = _Fingerprints(_JsonCache(paths.join(folder, "fingerprints.json")))
    return [f"{file.name} {known.fingerprint(file)}" for file in files]


def content_of_documents(read: Callable[[], Iterator[Document | Refused]]) -> list[str]:
    """Hash all documents of a user's reader; nothing else shows whether its data changed."""
    digest = hashlib.sha256()
    for document in read():
        # Later fields count only where set, so that data prepared before they existed is still found.
        later = _LATER if isinstance(document, Document) else ("text",)
        known = {name: v for name, v in vars(document).items() if name != "unread" and (name not in later or v)}
        digest.update(json.dumps(known, ensure_ascii=False, default=vars).encode(errors="surrogatepass"))
    return [digest.hexdigest()]


def format_of_content(
    spec: SourceSpec, *, content: list[str], folder: str, recognise: Callable[[], SourceSpec], is_lookup: bool
) -> SourceSpec:
    """Resolve `format: auto` with `recognise`; the result is cached in `folder` by content.

    So neither another row length nor a restart opens the source again to recognise its format. A lookup
    (`is_lookup`) does not write the cache.
    """
    if spec.format != "auto":
        return recognise()
    facts = {"version": RECOGNITION, "content": content, "kind": spec.kind, "fields": spec.fields}
    facts |= {"quoting": spec.quoting, **({} if spec.needs_answers else {"needs_answers": False})}
    memory, key = _JsonCache(paths.join(folder, "formats.json")), short_hash(facts)
    known = memory.read().get(key)
    if known is not None:
        return replace(spec, **known)
    found = recognise()
    if not is_lookup:
        memory.add(key, {"format": found.format, "fields": found.fields})
    return found


class _JsonCache:
    """A sealed JSON file used as a key-value cache; a damaged file counts as empty."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return all entries."""
        try:
            return read_sealed_json(self.path)
        except (FileNotFoundError, DamagedFile):
            return {}

    def add(self, key: str, value: Any) -> None:
        """Add an entry and rewrite the file."""
        paths.make_dirs(self.path.rpartition("/")[0])
        write_sealed_json(self.path, {**self.read(), key: value}, indent=1)


class _Fingerprints:
    """Fingerprints of files; those of large local files are cached by path, size and modification time."""

    def __init__(self, memory: _JsonCache) -> None:
        self.memory = memory

    def fingerprint(self, file: SourceFile) -> str:
        if paths.is_remote(file.url) or Path(file.url).stat().st_size < REMEMBERED_BYTES:
            return fingerprint(file)
        facts = Path(file.url).stat()
        key = f"{Path(file.url).resolve()} {facts.st_size} {facts.st_mtime_ns}"
        known: str | None = self.memory.read().get(key)
        if known is None:
            known = fingerprint(file)
            self.memory.add(key, known)
        return known


def short_hash(values: dict[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 of the values as JSON."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
