"""A manifest as prepare writes it, with round numbers."""

from typing import Any

_PAIRS = [f"{split}_{what}_in_train" for split in ("evaluation", "test") for what in ("content", "prompt")]


def manifest(**changes: Any) -> dict[str, Any]:
    """A chat source of 240 documents; `changes` replace its top-level values."""
    base: dict[str, Any] = {
        "format": 1,
        "source": "ultrachat_ro",
        "kind": "chat",
        "path": "/somewhere/ultrachat_ro.json",
        "files": 1,
        "seq_len": 1024,
        "packing": "best_fit",
        "long_documents": "split",
        "pad_id": 0,
        "max_token_id": 4095,
        "tokenizer": "/somewhere/tokenizer",
        "tokenizer_hash": "0123456789abcdef",
        "template_hash": "fedcba9876543210",
        "documents_in": 240,
        "documents_out": 229,
        "documents_reported": {"not_json": 1, "exact_duplicate": 3, "near_duplicate": 2, "too_short": 5},
        "examples": {"not_json": [{"place": "line 17 of a.jsonl", "message": "is not JSON: Expecting value."}]},
        "changes": {"romanian_letters": 1200, "special_tokens_in_text": 1},
        "splits": {
            "train": split("train", documents=190, rows=88, tokens=89_000, supervised=20_000),
            "evaluation": split("evaluation", documents=20, rows=9, tokens=9_000, supervised=1_800),
            "test": split("test", documents=19, rows=8, tokens=8_000, supervised=2_000),
        },
        "packing_efficiency": 0.9877,
        "length_percentiles": {"50": 380, "90": 850, "95": 1_010, "99": 2_400, "100": 5_120},
        "overlaps": dict.fromkeys(_PAIRS, 0),
        "noticed": noticed(),
        "config": {
            "clean": {},
            "duplicates": {"exact": "drop", "near": 0.8},
            "eval_fraction": 0.1,
            "test_fraction": 0.1,
        },
        "seconds": 12.3,
        "tokens_per_second": 1.2e6,
        "peak_rss_gib": 1.1,
    }
    return base | changes


def noticed(**changes: Any) -> dict[str, Any]:
    """Counts over the 190 training documents, none of them suspicious."""
    ends = {"length": 512, "documents": 2, "inside_a_sentence": 1, "near": 0.4}
    base: dict[str, Any] = {
        "documents": 190,
        "rendered": 0,
        "markers": [],
        "empty_thoughts": 0,
        "echoes": 0,
        "same_answer": {"documents": 3, "text": "Da."},
        "equal_ends": {"characters": ends, "tokens": {**ends, "length": 128}},
        "learnt_per_turn": {"train": [9_000, 6_000, 3_000, 2_000]},
    }
    return base | changes


def split(name: str, *, documents: int, rows: int, tokens: int, supervised: int) -> dict[str, Any]:
    """Numbers of one split; 45 %, 30 %, 15 % and 10 % of the supervised tokens are in answers 1 to 4."""
    return {
        "documents": documents,
        "rows": rows,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "characters": 4 * tokens,
        "packing_efficiency": tokens / max(rows * 1024, 1),
        "documents_split": 2,
        "documents_truncated": 1,
        "documents_truncated_in_turn": 1,
        "tokens_dropped": 12,
        "supervised_per_turn": [supervised * share // 100 for share in (45, 30, 15, 10)],
        "documents_per_turn": [documents, documents, documents // 2, 1],
        "length_histogram": {"edges": [0, 16, 32, 64, 128], "documents": [0, 0, documents - 1, 1, 0]},
        "shards": [{"name": f"{name}/00000.npy", "rows": rows, "bytes": 1, "sha256": f"{tokens:064x}"}],
    }
