"""Blocks of tokens on disk: the rows of a source, read, cleaned and tokenised a block at a time.

blocks/00000-000012.tokens.safetensors  ids (L,), flags (L,)
                    .minhash.npy        (D, P), when near duplicates are searched for
                    .index.safetensors  lengths, characters, numbers (D,), keys (D, 2), prompts (D,), exact (D, 2) where
                                        duplicates.exact=drop, groups (D,) where split_by is a field, notice_marks,
                                        notice_answers (D,), notice_ends (D, 2), reported; last

A block whose index exists is complete and is not made again, so a preparation that was killed resumes. The content of
a block depends on its rows alone: blocks never span two files, and are cut by number of rows and bytes. The index is
sealed (storage/sealed.py) and records the SHA-256 of the other files; a block that does not match is made again.

The cleaned documents can be kept as parquet too, one file per block, for inspection and for preparing them again with
another tokenizer.
"""

import hashlib
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from safetensors.numpy import load, save
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.data_schema import CleanConfig
from tpu_experiments.data.cleaning.clean import Cleaner
from tpu_experiments.data.cleaning.duplicates import Signer, content_key, exact_key, group_key, prompt_key
from tpu_experiments.data.documents import REASONING, Document, Refused, SourceSpec
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.steps.notices import Arrays, notices_of
from tpu_experiments.data.steps.pack import FlatTokens, flatten
from tpu_experiments.data.tokens.tokenize import (
    ByteTokenizer,
    DocumentTokenizer,
    Tokens,
    tokenize_apart,
    tokenize_pairs,
)
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import SEAL, UNSEALED, DamagedFile, require_seal, require_sha256, sealed

_TURN = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("train", pyarrow.bool_())])
_EXTRAS = (REASONING, "tool_calls", "name", "tool_call_id")
_EXTRA_TURN = pyarrow.struct([*_TURN, *((name, pyarrow.string()) for name in _EXTRAS)])
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("text", pyarrow.string()),
        ("messages", pyarrow.list_(_TURN)),
        ("source", pyarrow.string()),
        ("place", pyarrow.string()),
    ]
)
"""Exactly one of `text` and `messages` is set. `train` is false for an answer that is not trained on, else null.
`place` names the file and line that the document was read from."""
TOOL_SCHEMA = SCHEMA.set(2, pyarrow.field("messages", pyarrow.list_(_EXTRA_TURN))).append(
    pyarrow.field("tools", pyarrow.string())
)
"""Schema of files with conversations that have reasoning or use tools; calls and tools are JSON strings."""
PAIR_SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        *((name, pyarrow.list_(_EXTRA_TURN)) for name in ("chosen", "rejected")),
        *((name, pyarrow.float64()) for name in ("score_chosen", "score_rejected")),
        *((name, pyarrow.string()) for name in ("source", "place", "tools")),
    ]
)
"""Schema of files with preference pairs; both are whole conversations."""


SINGLE_SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        *((name, pyarrow.list_(_EXTRA_TURN)) for name in ("prompt", "completion")),
        ("label", pyarrow.bool_()),
        *((name, pyarrow.string()) for name in ("source", "place", "tools")),
    ]
)
"""Schema of files with single answers that are labelled."""


def write_documents(documents: Sequence[Document], *, folder: str, name: str, source: str) -> None:
    """Write `<folder>/<name>.parquet` atomically; `format: auto` reads it back."""
    paths.make_dirs(folder)
    rows = [
        _row_of_pair(document, document.rejected, source=source)
        if document.rejected is not None
        else _row_of_single(document, source=source)
        if document.is_single
        else {
            "id": document.id,
            "text": document.text,
            "messages": _turns(document),
            "source": source,
            "place": document.place,
            "tools": document.tools or None,
        }
        for document in documents
    ]
    schema = TOOL_SCHEMA if any(document.uses_tools for document in documents) else SCHEMA
    schema = PAIR_SCHEMA if any(document.rejected is not None for document in documents) else schema
    if any(document.margin is not None for document in documents):
        schema = schema.append(pyarrow.field("margin", pyarrow.float64()))
    schema = SINGLE_SCHEMA if any(document.is_single for document in documents) else schema
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), buffer, compression="zstd")
    paths.write_bytes_atomic(_path(folder, name), buffer.getvalue())


def _row_of_pair(document: Document, rejected: Document, *, source: str) -> dict[str, Any]:
    chosen, other = document.scores or (None, None)
    return {
        "id": document.id,
        "chosen": _turns(document),
        "rejected": _turns(rejected),
        "score_chosen": chosen,
        "score_rejected": other,
        **({} if document.margin is None else {"margin": document.margin}),
        "source": source,
        "place": document.place,
        "tools": document.tools or None,
    }


def _row_of_single(document: Document, *, source: str) -> dict[str, Any]:
    turns = _turns(document) or []
    return {
        "id": document.id,
        "prompt": turns[:-1],
        "completion": turns[-1:],
        "label": document.label == "true",
        "source": source,
        "place": document.place,
        "tools": document.tools or None,
    }


def _turns(document: Document) -> list[dict[str, str | bool | None]] | None:
    turns = []
    for turn, ((role, content), extra) in enumerate(zip_longest(document.messages or (), document.extras)):
        beside = json.loads(extra) if extra else {}
        if "tool_calls" in beside:
            beside["tool_calls"] = json.dumps(beside["tool_calls"], ensure_ascii=False)
        turns.append({"role": role, "content": content, "train": False if turn in document.context else None, **beside})
    return turns or None


def read_texts(folder: str, name: str) -> list[list[str]]:
    """Read the texts of a block's documents: one each, or of conversations one for each turn that is not blank."""
    table = pyarrow.parquet.read_table(io.BytesIO(_read(_path(folder, name))))
    found = []
    for row in table.to_pylist():
        turns = [
            turn for key in ("messages", "chosen", "rejected", "prompt", "completion") for turn in row.get(key) or ()
        ]
        found.append([turn["content"] for turn in turns if turn["content"].strip()] if turns else [row["text"]])
    return found


def documents_exist(names: Iterable[str], folder: str) -> bool:
    """Return whether the document files of all these blocks exist; each file is written atomically."""
    return all(paths.exists(_path(folder, name)) for name in names)


def _path(folder: str, name: str) -> str:
    return paths.join(folder, f"{name}.parquet")


log = logging.getLogger(__name__)

BLOCK_ROWS = 2048
BLOCK_BYTES = 2 * 2**20  # of raw rows; about a second of work
NAMES_COUNTED, OTHER_NAMES = 100, "(other names)"

NOTICE = "notice_"
"""Prefix of the arrays of data/steps/notices.py."""

SUFFIX_OF = {"tokens": "tokens.safetensors", "minhash": "minhash.npy"}

Item = RawRow | Document | Refused


@dataclass(frozen=True)
class Block:
    """Rows that are processed together; `name` is `<file number>-<block number>`."""

    name: str
    items: list[Item] = field(repr=False)
    split: str | None = None
    """The split that all of its rows belong to; None where the split hash decides."""


@dataclass(frozen=True)
class BlockSettings:
    """Settings that a worker needs to make blocks; picklable."""

    folder: str
    spec: SourceSpec
    clean: CleanConfig
    is_signed: bool
    """Whether MinHash signatures are written, to search for near duplicates."""
    is_compared: bool
    """Whether `exact_key` hashes are written, to search for documents that are equal letter for letter."""
    tokenizer: PreTrainedTokenizerBase | None
    """None writes no tokens, and lengths in bytes."""
    documents_folder: str | None = None


def cut_blocks(items: Iterable[Item], *, file_number: int, split: str | None = None) -> Iterator[Block]:
    """Yield blocks of one file's rows, in order."""
    pending: list[Item] = []
    num_bytes = number = 0
    for item in items:
        pending.append(item)
        num_bytes += _size(item)
        if len(pending) >= BLOCK_ROWS or num_bytes >= BLOCK_BYTES:
            yield Block(f"{file_number:05d}-{number:06d}", pending, split)
            pending, num_bytes, number = [], 0, number + 1
    if pending:
        yield Block(f"{file_number:05d}-{number:06d}", pending, split)


def _size(item: Item) -> int:
    """Estimate the bytes of a row."""
    if isinstance(item, Refused):
        return 0
    if isinstance(item, Document):
        return len(item.content)
    if isinstance(item.data, bytes):
        return len(item.data)
    return sum(len(value) if isinstance(value, str) else 64 for value in item.data.values())


class BlockMaker:
    """Worker that writes the files of blocks; constructed once per process."""

    def __init__(self, settings: BlockSettings) -> None:
        self.settings = settings
        self.cleaner = Cleaner(settings.clean)
        self.tokenizer = (
            ByteTokenizer()
            if settings.tokenizer is None
            else DocumentTokenizer(settings.tokenizer, marks_prompts=settings.spec.kind == "preference")
        )
        self.signer = Signer() if settings.is_signed else None
        self.not_read: Counter[str] = Counter()
        """Rows of the block with each field that was not read."""

    def __call__(self, block: Block) -> str:
        """Write the block's files unless they are complete; return the block's name."""
        folder = self.settings.documents_folder
        if not is_whole(self.settings.folder, block.name) or not (
            folder is None or documents_exist([block.name], folder)
        ):
            self.make(block)
        return block.name

    def make(self, block: Block) -> None:
        """Write the block's files, the index last."""
        before = Counter(self.cleaner.changes) + Counter(self.tokenizer.counts)
        self.not_read = Counter()
        refused: list[Refused] = []
        documents = _collect_refused((self._document(item) for item in block.items), refused)
        made: list[tuple[Document, Tokens]] = []
        spec = self.settings.spec
        if spec.kind == "preference":
            tokenized = tokenize_pairs(documents, tokenizer=self.tokenizer)
        else:
            tokenized = tokenize_apart(documents, tokenizer=self.tokenizer, rewritten=spec.rewritten_answers)
        for document, tokens in tokenized:
            if isinstance(tokens, Refused):
                refused.append(replace(tokens, text=document.beginning))
            else:
                made.append((document, tokens))
        changes = Counter(self.cleaner.changes) + Counter(self.tokenizer.counts)
        changes.subtract(before)
        num_rows = len(block.items) + len(tokenized) - len(documents)
        self._write(block, made, refused=refused, changes=+changes, num_rows=num_rows)

    def _document(self, item: Item) -> Document | Refused:
        document = document_of(item, spec=self.settings.spec) if isinstance(item, RawRow) else item
        if isinstance(document, Document):
            self.not_read.update(document.unread)
        if isinstance(document, Document) and document.group is None and self.settings.spec.group_field is not None:
            message = "has no `group`, which a reader of your own sets where data.<name>.split_by is a field."
            document = Refused("no_group", document.place or document.id, message)
        if isinstance(document, Document) and document.label is None and self.settings.spec.label_field is not None:
            message = "has no `label`, which a reader of your own sets for objective=classify."
            document = Refused("no_label", document.place or document.id, message)
        if isinstance(document, Document) and (document.rejected is not None or document.is_single) != (
            self.settings.spec.kind == "preference"
        ):
            message = (
                "is neither a pair (`rejected`) nor an answer with a label (`label`), which a reader of your own sets "
                "with kind=preference, and only there."
            )
            document = Refused("no_pair", document.place or document.id, message)
        if isinstance(document, Document) and document.margin is None and self.settings.spec.reads_margin:
            message = "has no `margin`, which a reader of your own sets for objective.margin=true."
            document = Refused("bad_margin", document.place or document.id, message)
        if isinstance(document, Document) and document.is_empty:
            document = Refused("empty", document.place, "has no text.", is_bad_row=False)
        read = item
        if isinstance(document, Document):
            read, document = document, self.cleaner.clean(document)
        if isinstance(document, Refused) and not isinstance(read, Refused):
            document = replace(document, text=read.beginning)
        return document

    def _write(
        self,
        block: Block,
        made: list[tuple[Document, Tokens]],
        *,
        refused: list[Refused],
        changes: Counter[str],
        num_rows: int,
    ) -> None:
        settings, documents = self.settings, [document for document, _ in made]
        stem = paths.join(settings.folder, "blocks", block.name)
        flat = flatten(tokens for _, tokens in made)
        digests = {}
        if settings.tokenizer is not None:
            tokens_file = save({"ids": flat.ids_L, "flags": flat.flags_L})
            paths.write_bytes_atomic(f"{stem}.tokens.safetensors", tokens_file)
            digests["tokens"] = hashlib.sha256(tokens_file).hexdigest()
        if self.signer is not None:
            buffer = io.BytesIO()
            np.save(buffer, self.signer.signatures(documents))
            paths.write_bytes_atomic(f"{stem}.minhash.npy", buffer.getvalue())
            digests["minhash"] = hashlib.sha256(buffer.getvalue()).hexdigest()
        if settings.documents_folder is not None:
            write_documents(documents, folder=settings.documents_folder, name=block.name, source=settings.spec.name)
        arrays = self._columns(documents, flat, refused)
        notices, examples = notices_of(made)
        arrays |= {f"{NOTICE}{name}": values for name, values in notices.items()}
        bad = next((vars(item) for item in refused if item.is_bad_row), None)
        facts = {
            SEAL: UNSEALED,
            "block": block.name,
            "rows": num_rows,
            "changes": dict(sorted(changes.items())),
            "examples": examples,
            "not_read": most_common(self.not_read),
            "first_bad_row": bad,
            "sha256": digests,
            **({} if block.split is None else {"split": block.split}),
        }
        # A single metadata entry, since safetensors writes several in random order.
        content = sealed(save(arrays, metadata={"facts": json.dumps(facts)}))
        paths.write_bytes_atomic(index_path(settings.folder, block.name), content)

    def _columns(self, documents: list[Document], flat: FlatTokens, refused: list[Refused]) -> dict[str, np.ndarray]:
        """Return what the index of a block says of every document."""
        settings = self.settings
        both = [(content_key(document), prompt_key(document)) for document in documents]
        keys, prompts = b"".join(key for key, _ in both), b"".join(key for _, key in both)
        reported = "\n".join(json.dumps(vars(r), ensure_ascii=False) for r in refused)
        arrays: dict[str, np.ndarray] = {
            "lengths": flat.lengths_D,
            "characters": np.array([_characters(document) for document in documents], np.int64),
            "keys": np.frombuffer(keys, np.uint64).reshape(-1, 2),
            "prompts": np.frombuffer(prompts, np.uint64),
            "places": _bytes_array(json.dumps([document.place or document.id for document in documents])),
            "reported": _bytes_array(reported),
            "max_token_id": np.array([flat.ids_L.max(initial=0)], np.int64),
        }
        if settings.spec.label_field is not None:
            names = sorted({str(document.label) for document in documents})
            number = {name: index for index, name in enumerate(names)}
            arrays["labels"] = np.array([number[str(document.label)] for document in documents], np.int32)
            arrays["label_names"] = _bytes_array(json.dumps(names))
        if settings.spec.reads_margin:
            arrays["margins"] = np.array([document.margin for document in documents], np.float32)
        if settings.is_compared:
            exact = b"".join(exact_key(document) for document in documents)
            arrays["exact"] = np.frombuffer(exact, np.uint64).reshape(-1, 2)
        if settings.spec.group_field is not None:
            groups = b"".join(group_key(document) for document in documents)
            arrays["groups"] = np.frombuffer(groups, np.uint64)
        return arrays


def most_common(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the `NAMES_COUNTED` largest counts by name, and the sum of all others as `OTHER_NAMES`.

    Rows whose fields have names of their own, such as dates, must not make the record grow with the file.
    """
    own = sorted((item for item in counts.items() if item[0] != OTHER_NAMES), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in own[NAMES_COUNTED:]) + counts.get(OTHER_NAMES, 0)
    return dict(sorted(own[:NAMES_COUNTED])) | ({OTHER_NAMES: others} if others else {})


def index_path(folder: str, name: str) -> str:
    """Return the path of a block's index, the file whose presence marks the block complete."""
    return paths.join(folder, "blocks", f"{name}.index.safetensors")


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Facts about a block's D documents that need no tokens: 16 bytes a document."""

    name: str
    num_rows: int
    lengths_D: NDArray[np.int64]
    characters_D: NDArray[np.int64]
    changes: Counter[str]
    not_read: Counter[str]
    """Rows with each field that was not read (`Document.unread`)."""
    first_bad_row: Refused | None
    max_token_id: int
    sha256: dict[str, str]
    """SHA-256 of the block's other files: `tokens`, and `minhash` where near duplicates are searched for."""
    split: str | None = None
    """The split that all documents belong to; None where the split hash decides."""
    label_names: tuple[str, ...] = ()
    """The block's labels, sorted."""
    labels_D: NDArray[np.int32] | None = None
    """Index into `label_names` of each document; None where texts have no labels."""
    margins_D: NDArray[np.float32] | None = None
    """Margin of each pair's scores; None where they are not read."""


def is_whole(folder: str, name: str) -> bool:
    """Return whether the block is complete and its files match their checksums; damage is logged."""
    stem = paths.join(folder, "blocks", name)
    if not paths.exists(index_path(folder, name)):
        return False
    try:
        index = read_index(folder, name)
        for kind, suffix in SUFFIX_OF.items():
            if kind in index.sha256:
                read_whole(f"{stem}.{suffix}", sha256=index.sha256[kind])
    except DamagedFile as error:
        log.warning("%s It is prepared again.", error)
        return False
    return True


def read_index(folder: str, name: str) -> BlockIndex:
    """Read the index of a complete block.

    Raises:
        DamagedFile: the index is missing, fails its seal, or belongs to another block.
    """
    arrays, facts = _opened(folder, name)
    bad = facts["first_bad_row"]
    return BlockIndex(
        name=name,
        num_rows=facts["rows"],
        lengths_D=arrays["lengths"],
        characters_D=arrays["characters"],
        changes=Counter(facts["changes"]),
        not_read=Counter(facts.get("not_read", {})),
        first_bad_row=Refused(**bad) if bad else None,
        max_token_id=int(arrays["max_token_id"][0]),
        sha256=facts["sha256"],
        split=facts.get("split"),
        label_names=tuple(json.loads(arrays["label_names"].tobytes())) if "label_names" in arrays else (),
        labels_D=arrays.get("labels"),
        margins_D=arrays.get("margins"),
    )


@dataclass(frozen=True, eq=False)
class Keys:
    """Hashes of D documents, for finding duplicates and assigning splits."""

    content_D2: NDArray[np.uint64]
    """`content_key` of each document."""
    prompts_D: NDArray[np.uint64]
    """`prompt_key` of each document."""
    exact_D2: NDArray[np.uint64] | None
    """`exact_key` of each document, where `duplicates.exact` is drop."""
    groups_D: NDArray[np.uint64] | None
    """`group_key` of each document, where `split_by` is a field."""


def read_keys(folder: str, name: str) -> Keys:
    """Read the hashes of a block's documents; raises as `read_index` does."""
    arrays, _ = _opened(folder, name)
    return Keys(arrays["keys"], arrays["prompts"], arrays.get("exact"), arrays.get("groups"))


def read_notices(folder: str, name: str) -> tuple[Arrays, dict[str, Any]] | None:
    """Read the result of `notices_of` for a block, None for one made before 2026-11-28; raises as `read_index` does."""
    arrays, facts = _opened(folder, name)
    if "examples" not in facts:
        return None
    return {key.removeprefix(NOTICE): arrays[key] for key in arrays if key.startswith(NOTICE)}, facts["examples"]


def joined(parts: Sequence[Keys]) -> Keys:
    """Concatenate the hashes of several blocks, in order."""
    exact = [part.exact_D2 for part in parts if part.exact_D2 is not None]
    groups = [part.groups_D for part in parts if part.groups_D is not None]
    return Keys(
        np.concatenate([np.empty((0, 2), np.uint64), *(part.content_D2 for part in parts)]),
        np.concatenate([np.empty(0, np.uint64), *(part.prompts_D for part in parts)]),
        np.concatenate(exact) if exact else None,
        np.concatenate(groups) if groups else None,
    )


def read_report(folder: str, name: str) -> tuple[list[str], list[Refused]]:
    """Read the place of each document of a block, and its refused rows; raises as `read_index` does."""
    arrays, _ = _opened(folder, name)
    lines = arrays["reported"].tobytes().decode().split("\n")
    return json.loads(arrays["places"].tobytes()), [Refused(**json.loads(line)) for line in lines if line]


def read_tokens(folder: str, name: str, *, sha256: str) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Read the ids (L,) and flags (L,) of a block's documents, concatenated.

    Raises:
        DamagedFile: the file is missing, or its SHA-256 is not the one in the index.
    """
    arrays = load(read_whole(paths.join(folder, "blocks", f"{name}.{SUFFIX_OF['tokens']}"), sha256=sha256))
    return arrays["ids"], arrays["flags"]


def read_whole(path: str, *, sha256: str) -> bytes:
    """Read a file of a block and verify its checksum.

    Raises:
        DamagedFile: the file is missing, or has another SHA-256.
    """
    content = _read(path)
    require_sha256(content, sha256, path=path)
    return content


def _read(path: str) -> bytes:
    try:
        return paths.read_bytes(path)
    except FileNotFoundError as error:
        raise DamagedFile(f"{path}; the file is missing.") from error


def _opened(folder: str, name: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read and verify an index; return its arrays and its facts."""
    path = index_path(folder, name)
    content = _read(path)
    require_seal(content, path=path)
    facts = json.loads(_metadata(content)["facts"])
    if facts["block"] != name:
        raise DamagedFile(f"{path}; it is the index of another block, {facts['block']}.")
    return load(content), facts


def _collect_refused(items: Iterable[Document | Refused], refused: list[Refused]) -> list[Document]:
    documents = []
    for item in items:
        if isinstance(item, Refused):
            refused.append(item)
        else:
            documents.append(item)
    return documents


def _characters(document: Document) -> int:
    if document.rejected is not None:
        return _characters(replace(document, rejected=None)) + _characters(document.rejected)
    if document.messages is not None:
        return sum(len(content) for _, content in document.messages)
    return len(document.text or "")


def _bytes_array(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def _metadata(content: bytes) -> dict[str, Any]:
    """Return the metadata strings in a safetensors header; the first 8 bytes are the header's length."""
    size = int.from_bytes(content[:8], "little")
    facts: dict[str, Any] = json.loads(content[8 : 8 + size])["__metadata__"]
    return facts
