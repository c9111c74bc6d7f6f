"""Preparing a set of the Hub into a bucket: what of it is ever on this machine's disk, and what a kill costs.

    python -m tests.benchmarks.hub_streaming [--mb 200] [--files 4]

A stand-in for the Hub serves parquet files of random words, an emulator is the bucket (both in this process). The
same command is run to its end, and once killed when half of the set was read and started again. Drawn once a second:
bytes below the command's own folders (output, temporary files, the Hub client's cache) and its processes' memory.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet

from tests.benchmarks.outage import Bucket
from tests.benchmarks.prepare_memory import GB, MIB, REPOSITORY, write_corpus
from tests.hub import HubServer

MODEL = ("model=tiny", "data=sample_text", "data.sample_text.path=org/set", "data.sample_text.format=auto")
SPLIT = ("data.sample_text.duplicates.near=null", "trainer.seq_len=1024")


def write_set(folder: Path, *, num_bytes: int, num_files: int) -> int:
    """Write parquet files of random words; returns their bytes."""
    (folder / "data").mkdir(parents=True)
    texts = folder / "texts.jsonl"
    write_corpus(texts, num_bytes=num_bytes)
    lines = [line[10:-3] for line in texts.read_text().splitlines(keepends=True)]
    texts.unlink()
    for at in range(num_files):
        name = folder / "data" / f"train-{at:05d}-of-{num_files:05d}.parquet"
        table = pyarrow.table({"text": lines[at::num_files]})
        pyarrow.parquet.write_table(table, name, row_group_size=1000, compression="none")
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder, some of which may go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def memory_of(process: psutil.Process) -> int:
    """Proportional resident bytes of a process and its children."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def run(home: Path, hub: HubServer, bucket: str, *, until: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Prepare until the end, or kill the command and its workers when `until` says so."""
    for name in ("tmp", "hub", "out"):
        (home / name).mkdir(parents=True, exist_ok=True)
    words = [*MODEL, *SPLIT, "prepare.workers=2", f"prepare.folder={bucket}", f"output_dir={home / 'out'}"]
    environment = os.environ | hub.environment(home / "hub") | {"TMPDIR": str(home / "tmp")}
    with (home / "log").open("w") as log:
        started = subprocess.Popen([sys.executable, "run.py", "task=prepare", *words], cwd=REPOSITORY, stdout=log,
                                   stderr=subprocess.STDOUT, env=environment, start_new_session=True)  # fmt: skip
    begun, disk, memory = time.perf_counter(), 0, 0
    while started.poll() is None:
        disk, memory = max(disk, size_of(home)), max(memory, memory_of(psutil.Process(started.pid)))
        if until():
            os.killpg(started.pid, 9)
            started.wait()
            break
        time.sleep(0.5)
    else:
        assert started.returncode == 0, (home / "log").read_text()[-3000:]
    return {"seconds": time.perf_counter() - begun, "disk": disk, "memory": memory}


def bytes_of(bucket: str) -> dict[str, str]:
    """SHA-256 of every shard below an address."""
    import gcsfs  # reads its settings from the environment then

    files = gcsfs.GCSFileSystem(endpoint_url=os.environ["STORAGE_EMULATOR_HOST"], token="anon")
    found = [name for name in files.find(bucket) if name.endswith(".npy")]
    return {
        name.removeprefix(bucket.removeprefix("gs://")): hashlib.sha256(files.cat(name)).hexdigest() for name in found
    }


def main() -> None:
    """Print what both commands took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--files", type=int, default=4)
    args = parser.parse_args()
    server, bucket = Bucket(), "gs://bkt"
    os.environ |= {"STORAGE_EMULATOR_HOST": server.address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        total = write_set(place / "set", num_bytes=args.mb * 10**6, num_files=args.files)
        print(f"{total / GB:.2f} GB of parquet in {args.files} files")
        with HubServer(place / "set") as hub:
            whole = run(place / "whole", hub, f"{bucket}/whole")
            read = hub.read_bytes.total()
            shown("whole", whole, read=read)
            killed = run(place / "killed", hub, f"{bucket}/killed", until=lambda: hub.read_bytes.total() > 1.5 * read)
            shown("killed", killed, read=hub.read_bytes.total() - read)
            before = hub.read_bytes.total()
            again = run(place / "killed", hub, f"{bucket}/killed")
            shown("again", again, read=hub.read_bytes.total() - before)
        print("the same shards:", bytes_of(f"{bucket}/whole") == bytes_of(f"{bucket}/killed") != {})
    server.server.stop()


def shown(name: str, took: dict[str, float], *, read: int) -> None:
    """Print a line."""
    print(f"{name:7}{took['seconds']:6.0f} s, read {read / GB:.2f} GB, disk {took['disk'] / MIB:.0f} MiB at most, "
          f"memory {took['memory'] / MIB:.0f} MiB at most", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
