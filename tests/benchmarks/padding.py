"""Packed pairs against padded ones, on real lengths: tokens that count of those computed, and pairs of a step.

    python -m tests.benchmarks.padding
    python -m tests.benchmarks.padding --seq-len 2048 --step 0.648 --rows 64     # a planned step, and its rows

Pairs are made of real conversations: the chosen answer is the conversation's last, the rejected one the last of
another conversation of the same file. The product's reader and packer make the rows. Padded are the same pairs, each
answer in a row of its own: of `--seq-len` tokens, of the longest of all, and of the longest of 16 rows, as TRL's
collator pads (which is a shape, and on a TPU a program, for each length).
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tests.benchmarks.prepare import SAMPLES, SHARED, _turns
from tpu_experiments.config.data_schema import DataSourceConfig, PrepareConfig
from tpu_experiments.data.prepare import Preparation, prepare

BATCH = 16
"""Rows of a batch of TRL's: 8 pairs (`per_device_train_batch_size`)."""
COLUMNS = (
    *("pairs", "number", "tokens of an answer's row, mean", "95 %", "packed: tokens that count", "padded to the row"),
    *("to the longest", "to a batch's longest", "packed over padded to the row, longest, batch's longest"),
)


def write_pairs(source: Path, path: Path) -> None:
    """Write pairs of one file of conversations; a file that has pairs is copied."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    if "chosen" in rows[0]:
        made = rows
    else:
        turns = [own for own in map(_turns, rows) if len(own) > 1]
        others = turns[1:] + turns[:1]
        made = [
            {"prompt": own[:-1], "chosen": [own[-1]], "rejected": [other[-1]]}
            for own, other in zip(turns, others, strict=True)
            if own[-1]["content"] != other[-1]["content"]
        ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")


def lengths_of(path: Path, *, seq_len: int, tokenizer: Any) -> tuple[np.ndarray, int]:
    """Return the lengths (2, P) of the rows of chosen and of rejected answers of all pairs, and the packed rows."""
    source = DataSourceConfig(path=str(path), kind="preference", eval_fraction=0, test_fraction=0, on_bad_row="skip")
    with tempfile.TemporaryDirectory() as out:
        how = Preparation(PrepareConfig(workers=1), out, tokenizer, {})
        store = prepare({"pairs": source}, data_size="full", seq_lens=[seq_len], preparation=how)["pairs"].store(
            "train", seq_len
        )
        rows = store.take(slice(0, store.num_rows))
        segments_NT = rows.segments_NT
    counts = [np.bincount(own_T, minlength=1)[1:] for own_T in segments_NT]
    lengths_S = np.concatenate([own[: len(own) - len(own) % 2] for own in counts])
    return lengths_S.reshape(-1, 2).T, len(segments_NT)


def line_of(name: str, lengths_2P: np.ndarray, num_rows: int, *, seq_len: int) -> list[str]:
    """Return a line of the table."""
    lengths_S = lengths_2P.T.reshape(-1)
    tokens = int(lengths_S.sum())
    drawn_S = np.random.default_rng(0).permutation(lengths_2P.T).reshape(-1)
    batches = [drawn_S[i : i + BATCH] for i in range(0, len(drawn_S), BATCH)]
    longest = int(lengths_S.max())
    computed = [seq_len * len(lengths_S), longest * len(lengths_S), sum(int(own.max()) * len(own) for own in batches)]
    packed = seq_len * num_rows
    cells = [f"{len(lengths_S) // 2:,}", f"{lengths_S.mean():.0f}", f"{np.quantile(lengths_S, 0.95):.0f}"]
    cells += [f"{tokens / each:.1%}" for each in (packed, *computed)]
    return [name, *cells, ", ".join(f"{each / packed:.2f}" for each in computed)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokenizer", default=str(SAMPLES / "tokenizer"))
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--step", type=float, help="seconds of a planned step of `--rows` rows of this length")
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    found = [SHARED / f"{name}.jsonl" for name in ("chat_messages", "ro_chat", "instruct_en", "uk_law")]
    shipped = [SAMPLES / f"{name}.jsonl" for name in ("ultrafeedback_binarized", "orca_dpo_pairs", "ro_dpo")]
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer, trust_remote_code=False)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for file in given.files or [each for each in (*found, *shipped) if each.is_file()]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pairs.jsonl"
            write_pairs(file, path)
            lengths_2P, num_rows = lengths_of(path, seq_len=given.seq_len, tokenizer=tokenizer)
        print(f"| {' | '.join(line_of(file.stem, lengths_2P, num_rows, seq_len=given.seq_len))} |", flush=True)
        if given.step:
            pairs = lengths_2P.shape[1] / num_rows
            packed, padded = given.step / given.rows / pairs, 2 * given.step / given.rows
            print(f"{file.stem}: {1e3 * packed:.2f} ms a pair packed, {1e3 * padded:.2f} padded to the row")


if __name__ == "__main__":
    main()
