"""Prompts of the selected conversations, for objectives whose answers the model writes itself.

<folder>/<source>-prompts-<key>/prompts.jsonl   one a line; the first line has the seal and what was left out

They are read again from the files, in their order, and have the splits of the prepared rows: a prompt is where its
conversation is. Of equal ones there is the first, and none of training is held out. A row without an answer has a
prompt too, and one that ends with a question is asked that, as TRL's prompts of several turns are.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from tpu_experiments.config.data_schema import FIRST_TURN, DataSourceConfig, hashed_shares
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.cleaning.clean import Cleaner
from tpu_experiments.data.cleaning.duplicates import content_key, group_key, prompt_key
from tpu_experiments.data.cleaning.split import SPLITS, split_codes
from tpu_experiments.data.documents import Document, Refused
from tpu_experiments.data.prepare import Preparation, each_tokenized
from tpu_experiments.data.reading.formats import REFERENCE, document_of, own_fields
from tpu_experiments.data.reading.parts import Part, list_parts
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.reading.sources import SourceRows
from tpu_experiments.data.steps.blocks import Item, read_index, read_report
from tpu_experiments.data.steps.keys import rows_key, short_hash
from tpu_experiments.data.steps.selection import DROPPED, select
from tpu_experiments.data.steps.tokenized import TokenizedSource
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import SEAL, UNSEALED, DamagedFile, require_seal, sealed

log = logging.getLogger(__name__)

FILE = "prompts.jsonl"
VERSION = 2
"""Incremented when the same row gives another prompt."""
STAND_IN = "x"
"""Content of the answer that is rendered behind a prompt and cut off: prompts end where answers begin in training."""
AT_ONCE = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised for the model."""

    ids: list[int]
    """The conversation up to its last answer, rendered with what begins an answer."""
    text: str
    """What the last turn before the answer says."""
    row: dict[str, Any]
    """Fields of the row in its file, and `answer`, the last answer of the conversation, where it has no such field."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of a run, in the order of their sources and files."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """Of the evaluation split."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Numbers of those that are not here, by the reason."""

    def summary(self) -> str:
        """Return numbers and lengths in one sentence."""
        tokens = np.array([len(prompt.ids) for prompt in chain(self.train, self.held_out)])
        p95 = int(np.percentile(tokens, 95, method="inverted_cdf"))
        left_out = _listed(self.left_out)
        return (
            f"prompts: {len(self.train):,} to train on and {len(self.held_out):,} held out, of {tokens.mean():.0f} "
            f"tokens on average, 95 % of at most {p95}, the longest of {tokens.max()}"
            + (f"; left out: {left_out}" if left_out else "")
        )


def read_prompts(
    config: Config, *, preparation: Preparation, sources: Sequence[str] | None = None, seq_len: int | None = None
) -> Prompts:
    """Read the prompts of a run, and log their numbers and lengths.

    Args:
        preparation: of the same rows (training/batches.py: `preparation_settings`).
        sources: names of sources, as those of a stage; None takes all.
        seq_len: tokens of a row; None takes `trainer.seq_len`, which is then set.

    Raises:
        ConfigError: a source cannot be read, or no prompt to train on fits into a row.
    """
    seq_len = config.trainer.seq_len if seq_len is None else seq_len
    chosen = {name: config.data[name] for name in config.data if sources is None or name in sources}
    most = config.rollout.prompt_tokens(seq_len)
    left_out: Counter[str] = Counter()
    by_split: dict[str, dict[bytes, Prompt]] = {split: {} for split in SPLITS}
    for name, tokens in each_tokenized(chosen, data_size=config.data_size, preparation=preparation):
        for split, prompt in _of_source(name, tokens, chosen[name], preparation=preparation, left_out=left_out):
            key = np.array(prompt.ids, np.int32).tobytes()
            if len(prompt.ids) > most:
                left_out[f"of more than {most} tokens"] += 1
            elif key in by_split[split]:
                left_out["copies"] += 1
            else:
                by_split[split][key] = prompt
    own, held_out, test = (by_split[split] for split in SPLITS)
    shared = own.keys() & (held_out.keys() | test.keys())
    left_out["held out too"] += len(shared)
    train = [prompt for key, prompt in own.items() if key not in shared]
    if not train:
        reasons = _listed(left_out) or "no conversation is in the training split"
        raise ConfigError(
            f"data=[{', '.join(chosen)}]; no prompt is left to train on ({reasons}); rows have {seq_len} tokens, of "
            f"which rollout.max_new_tokens={config.rollout.max_new_tokens} are for the answer; use longer rows "
            "(trainer.seq_len=), shorter answers, or other data."
        )
    found = Prompts(train, list(held_out.values()), dict(+left_out))
    log.info("%s", found.summary())
    return found


def _of_source(
    name: str,
    tokens: TokenizedSource,
    source: DataSourceConfig,
    *,
    preparation: Preparation,
    left_out: Counter[str],
) -> Iterator[tuple[str, Prompt]]:
    """Yield the prompts of a source with their splits, from its file, which is made where there is none."""
    rows = rows_key(tokens.key, source=source, settings=preparation.settings, seq_len=0, pad_id=0)
    key = short_hash({"version": VERSION, "rows": rows})
    path = paths.join(preparation.folder, f"{name}-prompts-{key}", FILE)
    try:
        content = paths.read_bytes(path)
        require_seal(content, path=path)
    except (FileNotFoundError, DamagedFile) as error:
        if isinstance(error, DamagedFile):
            log.warning("%s It is made again.", error)
        maker = _Maker(tokens, source, preparation=preparation)
        lines = [json.dumps(entry) for entry in maker.entries()]
        header = json.dumps({SEAL: UNSEALED, "left_out": maker.left_out})
        content = sealed("\n".join([header, *lines]).encode())
        paths.make_dirs(paths.folder_of(path))
        paths.write_bytes_atomic(path, content)
    first, *others = content.split(b"\n")
    left_out.update(json.loads(first)["left_out"])
    for line in others:
        entry = json.loads(line)
        yield entry["split"], Prompt(entry["ids"], entry["text"], entry["row"])


class _Maker:
    """Reads a source's rows again, and renders what is before their last answers."""

    def __init__(self, tokens: TokenizedSource, source: DataSourceConfig, *, preparation: Preparation) -> None:
        self.tokens, self.source = tokens, source
        self.read = preparation.readers.get(tokens.spec.name)
        self.cleaner = Cleaner(source.clean)
        self.tokenizer = DocumentTokenizer(preparation.tokenizer)
        self.left_out: Counter[str] = Counter()

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield a dictionary of JSON for each prompt: its split, and the fields of `Prompt`."""
        split_of = self._splits()
        for part in list_parts(self.tokens.spec, has_reader=self.read is not None).parts:
            limit = self.tokens.spec.max_documents if part.split is None else None
            items = islice(self._items(part), limit)
            while batch := list(islice(items, AT_ONCE)):
                yield from self._entries(batch, part, split_of)

    def _entries(
        self, batch: Sequence[Item], part: Part, split_of: dict[tuple[str | None, str], str | None]
    ) -> Iterator[dict[str, Any]]:
        asked: list[tuple[str, Document, dict[str, Any]]] = []
        for item in batch:
            document = self._document(item, part)
            if document is None:
                continue
            split = split_of.get((part.split, document.place or document.id), "")
            if (split == "" and not _has_answer(document)) or (not split and _ends_with_question(document)):
                split = self._by_hash(document, part)  # without its question it may be a copy of another
            if split and not _is_asked(document):
                self.left_out["without a question"] += 1
            elif split:
                asked.append((split, _before_answer(document), _row_of(item, document)))
        tokenized = self.tokenizer.tokenize([document for _, document, _ in asked])
        for (split, document, row), tokens in zip(asked, tokenized, strict=True):
            if isinstance(tokens, Refused):
                self.left_out["that the chat template cannot render"] += 1
                continue
            ids = tokens.ids[: int(np.flatnonzero(tokens.flags & LEARN)[0])].tolist()
            text = (document.messages or ())[-2][1]
            yield {"split": split, "ids": ids, "text": text, "row": row}

    def _items(self, part: Part) -> Iterator[Item]:
        if self.read is not None:
            return iter(self.read(part.spec))
        return chain.from_iterable(SourceRows(part.spec, files=part.files).by_file())

    def _document(self, item: Item, part: Part) -> Document | None:
        """Return the cleaned conversation of a row; None where preparation has reported why there is none."""
        document = document_of(item, spec=part.spec, is_learnt=False) if isinstance(item, RawRow) else item
        if isinstance(document, Refused) or document.is_empty or document.messages is None:
            return None
        cleaned = self.cleaner.clean(document)
        return None if isinstance(cleaned, Refused) else cleaned

    def _splits(self) -> dict[tuple[str | None, str], str | None]:
        """Return the split of every document by its part and place; None of one that is a copy of another."""
        blocks = [read_index(self.tokens.folder, name) for name in self.tokens.block_names]
        codes = iter(select(blocks, source=self.source, tokens=self.tokens).code_D.tolist())
        found: dict[tuple[str | None, str], str | None] = {}
        for block in blocks:
            for place in read_report(self.tokens.folder, block.name)[0]:
                code = next(codes)
                # A conversation may be several documents (data/tokens/tokenize.py: `tokenize_apart`).
                if found.get((block.split, place)) is None:
                    found[block.split, place] = None if code == DROPPED else SPLITS[code]
        return found

    def _by_hash(self, document: Document, part: Part) -> str:
        """Return the split of a conversation without an answer, which is not in the prepared rows."""
        if part.split is not None:
            return part.split
        key = prompt_key if self.source.split_by == FIRST_TURN else content_key
        key = key if document.group is None else group_key
        number = np.frombuffer(key(document)[:8], np.uint64)
        evaluation, test = hashed_shares(self.source, own=self.tokens.own)
        return SPLITS[int(split_codes(number, eval_fraction=evaluation, test_fraction=test)[0])]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)


def _has_answer(document: Document) -> bool:
    return any(document.is_taught(turn) for turn in range(len(document.messages or ())))


def _num_asked(document: Document) -> int:
    """Return the number of turns of the prompt: up to a question at the end, else those before the last answer."""
    messages = document.messages or ()
    answers = [turn for turn in range(len(messages)) if document.is_taught(turn)]
    questions = [turn + 1 for turn, (role, _) in enumerate(messages) if role != "assistant"]
    return answers[-1] if answers and not _ends_with_question(document) else max(questions, default=0)


def _ends_with_question(document: Document) -> bool:
    """Return whether the last turn, but for answers without text, is one that an answer follows."""
    messages = document.messages or ()
    said = [role for turn, (role, _) in enumerate(messages) if role != "assistant" or not document.is_blank(turn)]
    return bool(said) and said[-1] in ("user", "tool")


def _is_asked(document: Document) -> bool:
    """Return whether the prompt has a turn of the user or of a tool."""
    return any(role in ("user", "tool") for role, _ in (document.messages or ())[: _num_asked(document)])


def _before_answer(document: Document) -> Document:
    """Return the conversation with `STAND_IN` in the place of its last answer, the only one that is learnt."""
    messages, last = document.messages or (), _num_asked(document)
    return replace(
        document,
        messages=(*messages[:last], ("assistant", STAND_IN)),
        extras=(*document.extras[:last], "") if document.extras else (),
        context=tuple(turn for turn in range(last) if messages[turn][0] == "assistant"),
    )


def _row_of(item: Item, document: Document) -> dict[str, Any]:
    """Return the fields of a row as JSON has them, with the answer that the conversation ends with."""
    fields = own_fields(item) if isinstance(item, RawRow) else {}
    assert isinstance(fields, dict), "document_of has read it"
    row: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    messages = document.messages or ()
    answers = [content for turn, (_, content) in enumerate(messages) if document.is_taught(turn)]
    has_none = REFERENCE in row or not answers or _ends_with_question(document)
    return row if has_none else {**row, REFERENCE: answers[-1]}
