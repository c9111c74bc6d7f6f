"""Small sources and their preparation, for tests."""

import hashlib
import json
from pathlib import Path

from tpu_experiments.config.data_schema import DataSourceConfig, PrepareConfig
from tpu_experiments.data.prepare import Preparation, prepare

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"


def write_lines(path, rows):
    """A .jsonl file of `rows`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(path, count, *, first=0):
    """A .jsonl file of texts of a few words each, all different."""
    return write_lines(path, [{"text": f"Acesta este documentul cu numărul {i}."} for i in range(first, first + count)])


def text_source(path, **values):
    return DataSourceConfig(path=str(path), kind="text", **values)


def chat_source(path, **values):
    return DataSourceConfig(path=str(path), kind="chat", **values)


def prepared(
    sources, *, folder, tokenizer, seq_lens=(64,), data_size="full", readers=None, verify="rows", own=None, **settings
):
    """`prepare` with the settings of `prepare.*` as keywords, and those of `Preparation` in `own`."""
    preparation = Preparation(
        PrepareConfig(**settings), str(folder), tokenizer, readers or {}, verify=verify, **own or {}
    )
    return prepare(sources, data_size=data_size, seq_lens=seq_lens, preparation=preparation)


def all_rows(source, split, seq_len=64):
    """Every row of a split."""
    store = source.store(split, seq_len)
    return store.take(slice(0, store.num_rows))


def digests(folder):
    """SHA-256 of every shard and block below a folder, and the manifests without seconds and memory."""
    folder = Path(folder)
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.suffix in (".npy", ".safetensors", ".parquet")
    }
    for path in folder.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        for name in ("seal", "seconds", "peak_rss_gib", "tokens_per_second"):
            manifest.pop(name, None)
        found[str(path.relative_to(folder))] = manifest
    return found
