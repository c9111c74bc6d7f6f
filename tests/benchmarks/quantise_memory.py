"""Host memory of task=quantize with more layers of the same size: what a layer takes, and not the model.

    python -m tests.benchmarks.quantise_memory FOLDER

Writes Mistral-like checkpoints of random weights that differ in their number of layers into FOLDER, and quantises each
in a process of its own, with calibration rows of the shipped sample. Counted is anonymous memory, in 20 ms steps, above
what is held when the weights are first looked at. Nothing is compared afterwards: that holds two models, as any
comparison does. Prints Markdown.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.loading_memory import arch, write_checkpoint

CASES = (("rtn", 1024), ("gptq", 1024), ("vptq", 256))
"""Methods, and the width of the model that each is given: k-means takes minutes on wide layers."""
LAYERS = (4, 16)
ROWS, ROW_TOKENS = 16, 256
QUANTISE = """
import json, os, sys, time
sys.path.insert(0, os.getcwd())
from tests.benchmarks.anonymous import Peak, anonymous_mib
from tests.config.composing import composed_as_typed
from tpu_experiments.tasks.export.subject import subject_of
from tpu_experiments.tasks.quantize import write_quantised_form

folder, method, *words = sys.argv[1:]
config = composed_as_typed(
    "task=quantize", "model=mistral7b", f"model.path={folder}/base", "hw=cpu", "data=ultrachat_ro", "data_size=sample",
    "model.tokenizer_path=tpu_experiments/samples/tokenizer", f"task.method={method}",
    f"output_dir={folder}/out", f"task.folder={folder}/forms", *words,
)
subject = subject_of(config, config.task)
place = f"{folder}/forms/{method}"
os.makedirs(place)
before, begin, peak = anonymous_mib(), time.perf_counter(), Peak()
written = write_quantised_form(place, subject, config=config, task=config.task)
seconds = time.perf_counter() - begin
print("FOUND " + json.dumps([seconds, peak.end() - before, written.facts["bits_per_weight"]]))
"""


def main() -> None:
    """Write the checkpoints, quantise them and print the table."""
    folder = Path(sys.argv[1])
    print("| method | width | layers | MiB of weights, bf16 | MiB above the start | bits a weight | s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for method, width in CASES:
        for layers in LAYERS:
            place = folder / f"{method}-{layers}"
            widths = {"hidden_size": width, "intermediate_size": 7 * width // 2, "vocab_size": 4096}
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": width // 8}
            values = arch(layers=layers) | widths | heads
            num_bytes = write_checkpoint(place / "base", values, shard_bytes=2**25)
            rows = [] if method == "rtn" else [f"task.rows={ROWS}", f"task.row_tokens={ROW_TOKENS}"]
            command = [sys.executable, "-c", QUANTISE, str(place), method, *rows]
            # Tensors of this size are freed to the system, as all of 32 MiB and more are: else the heap keeps gaps.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
            if not found:
                raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
            seconds, mib, bits = json.loads(found[0].removeprefix("FOUND "))
            print(
                f"| `{method}` | {width} | {layers} | {num_bytes / 2**20:,.0f} | {mib:,.0f} | {bits:.3f} | "
                f"{seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
