"""A run whose bucket goes away in the middle and comes back: what is kept, what arrives, what it costs.

    python -m tests.benchmarks.outage
    python -m tests.benchmarks.outage --silent --seconds 90

The bucket is the emulator; while it is away every request gets a 503, as from an overloaded Google Cloud Storage, or
with `--silent` no answer at all.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from gcp_storage_emulator.server import create_server

REPOSITORY = Path(__file__).parents[2]
RUN = "gs://bkt/runs/outage"
SETTINGS = (
    "model=tiny", "debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single",
    "trainer.max_stage_steps=null", "trainer.log_every_steps=10", "checkpoint.every_steps=20", "trainer.seq_len=64",
    "trainer.global_batch_rows=8", "curriculum.stages.main.steps=300", "name=outage", "output_dir=gs://bkt/runs",
)  # fmt: skip
WORDS = ("unreachable", "reachable again", "upload", "waits", "answer")


class Bucket:
    """The emulator, which can be made to answer 503, or (`silent`) not at all until it is back."""

    def __init__(self) -> None:
        self.is_away = self.silent = False
        self.server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bkt")
        self.server.start()
        httpd = self.server._api._httpd
        httpd.handle_error = lambda request, client_address: None
        handler = httpd.RequestHandlerClass.func
        for verb in ("GET", "POST", "PUT", "DELETE"):
            setattr(handler, f"do_{verb}", self._guarded(getattr(handler, f"do_{verb}")))
        self.address = f"http://127.0.0.1:{httpd.server_address[1]}"

    def _guarded(self, answer):
        def guarded(request) -> None:
            if not self.is_away:
                answer(request)
                return
            request.rfile.read(int(request.headers.get("Content-Length") or 0))
            while self.silent and self.is_away:
                time.sleep(0.1)
            request.send_error(503)

        return guarded


def watch(process: "subprocess.Popen[str]", bucket: Bucket, *, away_at: int, seconds: float) -> list[tuple[float, str]]:
    """The run's lines with their time; the bucket goes away at a step, and is back after so many seconds."""
    lines: list[tuple[float, str]] = []
    began = time.monotonic()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic() - began, line.rstrip()))
        print(f"{lines[-1][0]:7.1f}  {lines[-1][1]}", flush=True)
        step = re.search(r"step +(\d+)/", line)
        if step and int(step[1]) >= away_at and not bucket.is_away and seconds:
            bucket.is_away = True
            lines.append((time.monotonic() - began, "--- the bucket is away"))
            threading.Timer(seconds, lambda: setattr(bucket, "is_away", False)).start()
            seconds = 0.0
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the bucket is away")
    parser.add_argument("--silent", action="store_true", help="requests are taken and not answered, in place of a 503")
    parser.add_argument("--at", type=int, default=60, help="step after which it goes")
    arguments = parser.parse_args()
    bucket = Bucket()
    bucket.silent = arguments.silent
    os.environ |= {"STORAGE_EMULATOR_HOST": bucket.address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    command = [sys.executable, "run.py", *SETTINGS]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = watch(process, bucket, away_at=arguments.at, seconds=arguments.seconds)
    import gcsfs  # looks at its environment then

    filesystem = gcsfs.GCSFileSystem(endpoint_url=bucket.address, token="anon", use_listings_cache=False)
    print("exit code", process.returncode)
    print(
        "told:",
        *[text for _, text in lines if any(word in text for word in WORDS)],
        sep="\n  ",
    )
    print("checkpoints:", [name.rpartition("/")[2] for name in filesystem.ls(f"{RUN}/checkpoints")])
    result = json.loads(filesystem.cat_file(f"{RUN}/result.json"))
    print("goodput:", json.dumps(result["goodput"]["run"]["seconds"], indent=1))
    bucket.server.stop()


if __name__ == "__main__":
    main()
