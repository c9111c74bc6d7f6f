"""Peak memory of preparing texts against the size of the corpus: a constant part, and the index of the documents.

    python -m tests.benchmarks.prepare_memory [--sizes 0.25 0.5 1 2] [--near-size 1] [--workers 4]

Documents of 2 kB of random words of the samples, one JSONL file, rows of 1,024 tokens, exact duplicates dropped; one
case more looks for near duplicates. Each size is a fresh process, and its files are deleted. `all processes` is the
manifest's peak_rss_gib: the resident pages of all processes, sampled once a second, a shared page counted once;
`main process` is the kernel's high-water mark of the one that keeps the index. A straight line through the sizes gives
what a GB adds.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parents[2]
SAMPLES = REPOSITORY / "tpu_experiments" / "samples"
GB, MIB = 10**9, 2**20
DOCUMENT_BYTES, DOCUMENTS_AT_ONCE = 2000, 1000
SEQ_LEN = 1024
LARGE_GB = 20
MAX_WORDS = 4000
COLUMNS = "GB|near|documents|rows|s|MB/s|tokens/s|all processes, MiB|while tokenising|main process|peak disk, GB"


def main() -> None:
    """Print the table and the lines, or run one case for `measure`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=(0.25, 0.5, 1, 2), help="GB of each corpus")
    parser.add_argument("--near-size", type=float, default=1, help="GB of the corpus with near duplicates looked for")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", nargs=2, metavar=("FOLDER", "NEAR"), help="one case, in this process")
    args = parser.parse_args()
    if args.case:
        near = None if args.case[1] == "None" else float(args.case[1])
        print(json.dumps(run_case(args.case[0], near=near, workers=args.workers)))
        return
    print(f"{platform.machine()}, {args.workers} workers, load {os.getloadavg()[0]:.1f}, {len(words()):,} words\n")
    print(f"|{COLUMNS}|\n|{'---|' * len(COLUMNS.split('|'))}")
    results = []
    for size in args.sizes:
        results.append(measure(size, near=None, workers=args.workers))
        print(line(size, results[-1]), flush=True)
    if args.near_size:
        print(line(args.near_size, measure(args.near_size, near=0.8, workers=args.workers)), flush=True)
    if len(args.sizes) > 1:
        print_lines(list(args.sizes), results)


def words() -> list[str]:
    """The first words of the Romanian sample that need no escape in JSON, each once."""
    text = (SAMPLES / "wiki_ro.jsonl").read_text(encoding="utf-8")
    found = re.findall(r"[^\W\d_]+", " ".join(json.loads(row)["text"] for row in text.splitlines()))
    return list(dict.fromkeys(found))[:MAX_WORDS]


def write_corpus(path: Path, *, num_bytes: int) -> int:
    """Write documents of random words until the file has `num_bytes`, a few MB at a time; returns their number."""
    vocabulary, generator = np.array(words(), object), np.random.default_rng(0)
    size = np.mean([len(word.encode()) + 1 for word in vocabulary])
    shape, number = (DOCUMENTS_AT_ONCE, round(DOCUMENT_BYTES / size)), 0
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            for drawn in vocabulary[generator.integers(len(vocabulary), size=shape)]:
                file.write(f'{{"text": "{" ".join(drawn)}"}}\n'.encode())
                number += 1
                if file.tell() >= num_bytes:
                    break
    return number


def measure(size: float, *, near: float | None, workers: int) -> dict[str, Any]:
    """Write a corpus of `size` GB and prepare it in a fresh process; nothing of either is left."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus.jsonl", num_bytes=int(size * GB))
        command = [sys.executable, "-m", "tests.benchmarks.prepare_memory", "--case", folder, str(near)]
        command += ["--workers", str(workers)]
        env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        disk = sum(path.stat().st_size for path in files)
    return json.loads(done.stdout.splitlines()[-1]) | {"disk": disk, "near": near}


def run_case(folder: str, *, near: float | None, workers: int) -> dict[str, Any]:
    """Prepare the corpus in a folder; seconds, memory in bytes and what came out."""
    from transformers import AutoTokenizer

    from tpu_experiments.config.data_schema import DataSourceConfig, PrepareConfig
    from tpu_experiments.data.prepare import Preparation, prepare
    from tpu_experiments.data.steps.tokenized import BLOCKS

    source = DataSourceConfig(path=f"{folder}/corpus.jsonl", kind="text")
    source.duplicates.near = near
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")
    how = Preparation(PrepareConfig(workers=workers), f"{folder}/prepared", tokenizer, {})
    started = time.perf_counter()
    prepared = prepare({"text": source}, data_size="full", seq_lens=[SEQ_LEN], preparation=how)["text"]
    seconds = time.perf_counter() - started
    manifest = prepared.manifests[SEQ_LEN]
    assert manifest["documents_out"] == manifest["documents_in"], manifest["documents_reported"]
    [blocks] = Path(how.folder).glob(f"*/{BLOCKS}")
    return {
        "seconds": seconds,
        "documents": manifest["documents_in"],
        "rows": sum(split["rows"] for split in manifest["splits"].values()),
        "tokens": sum(split["tokens"] for split in manifest["splits"].values()),
        "all": manifest["peak_rss_gib"] * 2**30,
        "tokenising": json.loads(blocks.read_text())["peak_rss_gib"] * 2**30,
        "main": _high_water_mark(),
    }


def _high_water_mark() -> int:
    """Most bytes this process had resident."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def line(size: float, result: dict[str, Any]) -> str:
    """One line of the table."""
    seconds = result["seconds"]
    cells = [f"{size:g}", result["near"] or "off", f"{result['documents']:,}", f"{result['rows']:,}", f"{seconds:.0f}"]
    cells += [f"{size * GB / 1e6 / seconds:.1f}", f"{result['tokens'] / seconds:,.0f}"]
    cells += [f"{result[name] / MIB:,.0f}" for name in ("all", "tokenising", "main")]
    return "| " + " | ".join(map(str, [*cells, f"{result['disk'] / GB:.1f}"])) + " |"


def print_lines(sizes: list[float], results: list[dict[str, Any]]) -> None:
    """Least squares of memory over size, and where the line is at a large corpus."""
    per_gb = np.mean([result["documents"] / size for size, result in zip(sizes, results, strict=True)])
    print(f"\n{per_gb:,.0f} documents a GB")
    for title, name in (("all processes", "all"), ("main process", "main")):
        values = np.array([result[name] / MIB for result in results])
        slope, base = np.polyfit(sizes, values, 1)
        off = np.abs(values - base - slope * np.array(sizes)).max()
        print(
            f"{title}: {base:,.0f} MiB + {slope:.1f} MiB per GB ({slope * MIB / per_gb:.0f} bytes a document), off by "
            f"{off:.0f} MiB at most; at {LARGE_GB} GB: {base + slope * LARGE_GB:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
