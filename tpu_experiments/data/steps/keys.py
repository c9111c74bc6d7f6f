"""Names of prepared folders: a hash of everything that decides what is in them, so that nothing stale is ever read."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.model_schema import DataSourceConfig
from tpu_experiments.config.schema import PrepareConfig
from tpu_experiments.data.documents import Document, Refused, SourceSpec
from tpu_experiments.data.reading.files import fingerprint
from tpu_experiments.data.reading.hub import fingerprint_of_hub
from tpu_experiments.data.reading.locations import SourceFile
from tpu_experiments.data.tokens.tokenizer import template_hash, tokenizer_hash
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile, read_sealed_json, write_sealed_json

VERSION = 3
"""Goes up when the same input gives other tokens or rows, or other files of them."""

CHAT_VERSION = 2
"""Goes up when the same conversation gives other tokens, or others of them are learnt."""

RECOGNITION = 1
"""Goes up when `format: auto` takes the same rows for another format."""

_EXACT = {"drop": "text", "folded": "drop", "keep": "keep"}
"""As it is hashed: `folded` was called `drop` before there was another, and its folders stay valid."""

_LATER = ("context", "extras", "tools")
"""What documents did not have at first, and most have not."""

REMEMBERED_BYTES = 64 * 2**20  # a file at least this large is not hashed again while size and time stay (0.1 s)


def tokens_key(
    spec: SourceSpec,
    *,
    source: DataSourceConfig,
    content: list[str],
    tokenizer: PreTrainedTokenizerBase,
    has_tables: bool = False,
) -> str:
    """Key of the tokenised documents of a source, whose content is `content`; `has_tables`: a .csv or .tsv is in it."""
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
            "tokenizer": tokenizer_hash(tokenizer),
            "template": template_hash(tokenizer) if spec.kind == "chat" else None,
            **({"quoting": spec.quoting} if has_tables else {}),
            **({"chat": CHAT_VERSION} if spec.kind == "chat" else {}),
        }
    )


def rows_key(tokens: str, *, source: DataSourceConfig, settings: PrepareConfig, seq_len: int, pad_id: int) -> str:
    """Key of the packed rows of one length."""
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
        }
    )


def content_of_files(files: list[SourceFile], *, spec: SourceSpec, folder: str) -> list[str]:
    """Name and fingerprint of every file; `folder` remembers those of large local files."""
    if not files:
        return [fingerprint_of_hub(spec), str(spec.hub_config), spec.hub_split]
    known = _Fingerprints(_Memory(paths.join(folder, "fingerprints.json")))
    return [f"{file.name} {known.fingerprint(file)}" for file in files]


def content_of_documents(read: Callable[[], Iterator[Document | Refused]]) -> list[str]:
    """A hash of all that a reader of the user's own yields; nothing else says whether it changed."""
    digest = hashlib.sha256()
    for document in read():
        # Without what most of them do not have: it came later, and what was prepared before stays found.
        later = _LATER if isinstance(document, Document) else ("text",)
        known = {name: value for name, value in vars(document).items() if name not in later or value}
        digest.update(json.dumps(known, ensure_ascii=False).encode(errors="surrogatepass"))
    return [digest.hexdigest()]


def format_of_content(
    spec: SourceSpec, *, content: list[str], folder: str, recognise: Callable[[], SourceSpec], is_lookup: bool
) -> SourceSpec:
    """What `recognise` makes of a source of `format: auto`; `folder` remembers it for as long as the content stays.

    So neither another length of rows nor a later start opens the source to look into it.
    """
    if spec.format != "auto":
        return recognise()
    facts = {"version": RECOGNITION, "content": content, "kind": spec.kind, "fields": spec.fields}
    facts["quoting"] = spec.quoting
    memory, key = _Memory(paths.join(folder, "formats.json")), short_hash(facts)
    known = memory.read().get(key)
    if known is not None:
        return replace(spec, **known)
    found = recognise()
    if not is_lookup:
        memory.add(key, {"format": found.format, "fields": found.fields})
    return found


class _Memory:
    """A sealed file of what is known by some key; a damaged one is forgotten."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """All of it."""
        try:
            return read_sealed_json(self.path)
        except (FileNotFoundError, DamagedFile):
            return {}

    def add(self, key: str, value: Any) -> None:
        """Write one more entry."""
        paths.make_dirs(self.path.rpartition("/")[0])
        write_sealed_json(self.path, {**self.read(), key: value}, indent=1)


class _Fingerprints:
    """Fingerprints of large local files by path, size and time of change."""

    def __init__(self, memory: _Memory) -> None:
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
    """16 hex digits of the values as JSON."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
