"""Packed rows in our format, Arrow, ArrayRecord and MDS: rows/s by index and in order, bytes, requests, time to resume.

    python -m tests.benchmarks.row_formats [--shards 10] [--seconds 3] [--formats ours,arrow]

A shard is 10,000 rows of 1,024 tokens. Every measurement ends in `Rows`, four arrays of (64, 1024), in a process of its
own, bound to one core except where the reader has threads; files are in the page cache. grain, array_record and
mosaicml-streaming are not in the project's lock: `uv pip install grain array_record mosaicml-streaming` in another
environment; a format that cannot be imported is left out. The bucket is gcp-storage-emulator in a process on this
machine: its bytes and requests are what a real bucket would see, its speed is not.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.row_format_readers import BATCH, FORMATS, SECONDS_MAKING, SHARD_ROWS
from tpu_experiments.data.rows import Rows

REPOSITORY = Path(__file__).parents[2]
REMOTE_SHARDS = 2
LONGEST_SECONDS = 120
ROUNDS = 3
MEASURES = ("random", "sequential", "resume", "remote")
COLUMNS = "| format | bytes a row | write, rows/s | by index, rows/s | in order, rows/s | 90 % of the data, ms | "
COLUMNS += "bucket: KB a row | requests per 1,000 rows | emulator, rows/s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--measure", choices=("write", *MEASURES))
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(MEASURE_OF[args.measure](FORMATS[args.formats](), args)))
        return
    print(f"{os.cpu_count()} cores, {args.shards * SHARD_ROWS:,} rows of 1,024 tokens, batches of {BATCH}")
    print(f"{COLUMNS}\n|{'---|' * (COLUMNS.count('|') - 1)}", flush=True)
    for name in args.formats.split(","):
        with tempfile.TemporaryDirectory(prefix="row_formats_") as folder:
            args.folder = folder
            results = {measure: run(name, measure, args) for measure in ("write", *MEASURES)}
        print(line(FORMATS[name].title, results), flush=True)
        for measure, result in results.items():
            if "error" in result:
                print(f"  {name}, {measure}: {result['error']}", file=sys.stderr)


def run(name: str, measure: str, args: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.row_formats", "--measure", measure, "--formats", name]
    command += ["--folder", args.folder, "--shards", str(args.shards), "--seconds", str(args.seconds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{args.folder}/hf"}
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, check=False, timeout=LONGEST_SECONDS, **options)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LONGEST_SECONDS} s"}
    if done.returncode:
        needs = FORMATS[name].needs
        hint = f" (pip install {needs})" if "ModuleNotFoundError" in done.stderr else ""
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1] + hint}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def line(title: str, results: dict[str, dict[str, Any]]) -> str:
    """One line of the table."""
    cells = [("write", "bytes_per_row"), ("write", "rows_per_second"), ("random", "rows_per_second")]
    cells += [("sequential", "rows_per_second"), ("resume", "milliseconds"), ("remote", "kb_per_row")]
    cells += [("remote", "requests"), ("remote", "rows_per_second")]
    values = [results[measure].get(key) for measure, key in cells]
    return " | ".join([f"| {title}", *("-" if value is None else shown(value) for value in values)]) + " |"


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure_write(fmt: Any, args: argparse.Namespace) -> dict[str, float]:
    """The time to make the random rows is taken off."""
    started = time.perf_counter()
    fmt.write(f"{args.folder}/data", args.shards)
    seconds = time.perf_counter() - started - sum(SECONDS_MAKING)
    size = sum(file.stat().st_size for file in Path(args.folder, "data").rglob("*") if file.is_file())
    num_rows = args.shards * SHARD_ROWS
    return {"rows_per_second": num_rows / seconds, "bytes_per_row": size / num_rows}


def measure_random(fmt: Any, args: argparse.Namespace) -> dict[str, float]:
    fmt.open(f"{args.folder}/data", args.shards)
    order = np.random.default_rng(0).permutation(args.shards * SHARD_ROWS)
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    return best(lambda: (fmt.take(index) for index in batches), seconds=args.seconds)


def measure_sequential(fmt: Any, args: argparse.Namespace) -> dict[str, float]:
    fmt.open(f"{args.folder}/data", args.shards)
    return best(fmt.stream, seconds=args.seconds)


def best(start: Callable[[], Iterator[Rows]], *, seconds: float) -> dict[str, float]:
    """The fastest of `ROUNDS` rounds: other work on the machine only ever takes away."""
    return max((read(start(), seconds=seconds) for _ in range(ROUNDS)), key=lambda found: found["rows_per_second"])


def read(batches: Iterator[Rows], *, seconds: float) -> dict[str, float]:
    """Rows and rows/s of what can be read in that time."""
    started, num_rows = time.perf_counter(), 0
    for rows in batches:
        num_rows += rows.num_rows
        if time.perf_counter() - started > seconds:
            break
    return {"rows_per_second": num_rows / (time.perf_counter() - started), "rows": num_rows}


def measure_resume(fmt: Any, args: argparse.Namespace) -> dict[str, float]:
    """From opening to the first batch at 90 % of the data; imports are not counted."""
    start = int(0.9 * args.shards * SHARD_ROWS) // BATCH * BATCH
    fmt.open(f"{args.folder}/data", args.shards)
    next(iter(fmt.stream()))
    expected = fmt.take(np.arange(start, start + BATCH))
    again = FORMATS[args.formats]()
    started = time.perf_counter()
    again.open(f"{args.folder}/data", args.shards)
    rows = next(iter(again.stream(start)))
    milliseconds = 1000 * (time.perf_counter() - started)
    assert np.array_equal(rows.ids_NT, expected.ids_NT)
    return {"milliseconds": milliseconds}


def serve(port: int, counts: Any) -> None:
    """The emulator, counting GET requests and the bytes of their answers."""
    from gcp_storage_emulator import server

    setup, get = server.RequestHandler.setup, server.RequestHandler.do_GET

    def counting_setup(self: Any) -> None:
        setup(self)
        write = self.wfile.write

        def counted(data: bytes) -> int:
            counts[1] += len(data)
            return int(write(data))

        self.wfile.write = counted

    def counting_get(self: Any) -> None:
        counts[0] += 1
        get(self)

    server.RequestHandler.setup, server.RequestHandler.do_GET = counting_setup, counting_get
    server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bkt").start()
    time.sleep(600)


def measure_remote(fmt: Any, args: argparse.Namespace) -> dict[str, float]:
    """In order, all of `REMOTE_SHARDS` shards."""
    from tpu_experiments.storage import paths

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    counts = multiprocessing.Array("q", 2)
    multiprocessing.Process(target=serve, args=(port, counts), daemon=True).start()
    for name in ("STORAGE_EMULATOR_HOST", "CLOUD_STORAGE_EMULATOR_ENDPOINT"):  # Python's client and C++'s
        os.environ[name] = f"http://127.0.0.1:{port}"
    shutil.rmtree(f"{args.folder}/small", ignore_errors=True)
    fmt.write(f"{args.folder}/small", REMOTE_SHARDS)
    time.sleep(2)
    for file in sorted(Path(args.folder, "small").iterdir()):
        paths.copy_file(str(file), f"gs://bkt/small/{file.name}")
    counts[0] = counts[1] = 0
    started = time.perf_counter()
    fmt.open_remote("gs://bkt/small", args.folder, REMOTE_SHARDS)
    num_rows = read(fmt.stream(), seconds=LONGEST_SECONDS)["rows"]
    seconds = time.perf_counter() - started
    return {
        "rows_per_second": num_rows / seconds,
        "requests": 1000 * counts[0] / num_rows,
        "kb_per_row": counts[1] / num_rows / 1000,
    }


MEASURE_OF = {
    "write": measure_write,
    "random": measure_random,
    "sequential": measure_sequential,
    "resume": measure_resume,
    "remote": measure_remote,
}

if __name__ == "__main__":
    main()
