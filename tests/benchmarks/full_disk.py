"""A run whose disk is full at ten sizes, from one that holds nothing to one that lacks the last file, and goes on.

    python -m tests.benchmarks.full_disk        # as root: each size is a tmpfs of its own

Each is started on a disk of so many KiB, then again with room: exit code 1 and one sentence, then the adapter of a run
that had room from the start.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SIZES_KIB = (16, 64, 200, 600, 1000, 1400, 2000, 2800, 4000, 8000)
ROOM = "64m"
SETTINGS = (
    *("model=tiny", "data=[sample_text,sample_chat]", "debug=smoke", "hw.runtime=eager", "name=full"),
    *("trainer.max_stage_steps=4", "trainer.max_eval_rows=2", "trainer.global_batch_rows=2"),
    *("checkpoint.every_steps=2", "sample.max_new_tokens=0"),
)


def ran(disk: Path) -> tuple[int, str]:
    """Exit code and the sentence of a run, or what else it ended with."""
    command = [sys.executable, "run.py", *SETTINGS, f"output_dir={disk / 'out'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = re.findall(r"^(?:error: .*|Traceback.*)$", done.stdout + done.stderr, re.MULTILINE)
    return done.returncode, " / ".join(said)


def main() -> int:
    """Print what each size came to; exit code 1 where one did not hold."""
    held, expected = 0, ""
    with tempfile.TemporaryDirectory() as place:
        for size in (None, *SIZES_KIB):
            first = f"{size}k" if size else ROOM
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={first}", "tmpfs", place], check=True)
            try:
                code, said = ran(Path(place))
                subprocess.run(["mount", "-o", f"remount,size={ROOM}", place], check=True)
                again = ran(Path(place)) if size else (code, said)
                adapter = Path(place, "out", "full", "adapter", "adapter_model.safetensors")
                found = hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else "none"
            finally:
                subprocess.run(["umount", place], check=True)
            if size is None:
                expected = found
                continue
            is_held = code in (1, 2) and said.count("error: ") == 1 and again[0] == 0 and found == expected
            held += is_held
            print(f"{size:6} KiB: {'held' if is_held else 'NOT held'}, exit code {code}: {said}", flush=True)
    print(f"{held} of {len(SIZES_KIB)} held")
    return int(held < len(SIZES_KIB))


if __name__ == "__main__":
    sys.exit(main())
