"""Time and memory of writing each form of a model of 7 billion random weights with an adapter.

    python -m tests.benchmarks.exporting FOLDER [LAYERS] [FORM...]

Writes a checkpoint of Mistral 7B's shape (14.5 GB in bfloat16; LAYERS of its 32 layers) and an adapter of rank 16 into
FOLDER, then each form in a process of its own. Nothing is compared: that would take two forward passes of the model.
"""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.loading_memory import arch, write_checkpoint

WIDE, NARROW, INNER = 4096, 1024, 14336
LINEARS = {
    "self_attn.q_proj": (WIDE, WIDE),
    "self_attn.k_proj": (NARROW, WIDE),
    "self_attn.v_proj": (NARROW, WIDE),
    "self_attn.o_proj": (WIDE, WIDE),
    "mlp.gate_proj": (INNER, WIDE),
    "mlp.up_proj": (INNER, WIDE),
    "mlp.down_proj": (WIDE, INNER),
}
WRITE = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from tests.benchmarks.anonymous import Peak, anonymous_mib
from tests.config.composing import composed_as_typed
from tpu_experiments.tasks.export.forms import WRITERS
from tpu_experiments.tasks.export.subject import subject_of

folder, form = sys.argv[1:]
config = composed_as_typed(
    "task=export", "model=mistral7b", f"model.path={folder}/base", f"task.adapter={folder}/adapter", "hw=cpu",
    "model.tokenizer_path=tpu_experiments/samples/tokenizer", f"task.forms=[{form}]", "task.gguf_types=[q8_0]",
)
subject = subject_of(config, config.task)
place = f"{folder}/{form}"
os.makedirs(place)
before, begin, peak = anonymous_mib(), time.perf_counter(), Peak()
WRITERS[form](place, subject)
seconds = time.perf_counter() - begin
most = peak.end()
size = sum(entry.stat().st_size for entry in os.scandir(place))
print(f"{form}: {seconds:.0f} s, {size / 1e9:.2f} GB, peak {(most - before) / 1024:.2f} GiB above the start")
"""


def make(folder: Path, num_layers: int) -> None:
    """Write the base and the adapter."""
    write_checkpoint(folder / "base", arch(layers=num_layers), shard_bytes=2**31)
    adapter, generator = folder / "adapter", torch.Generator().manual_seed(0)
    adapter.mkdir()
    trained: dict[str, torch.Tensor] = {}
    for layer, (name, (out, into)) in itertools.product(range(num_layers), LINEARS.items()):
        prefix = f"base_model.model.model.layers.{layer}.{name}"
        trained[f"{prefix}.lora_A.weight"] = torch.randn(16, into, generator=generator) / 64
        trained[f"{prefix}.lora_B.weight"] = torch.randn(out, 16, generator=generator) / 64
    save_file(trained, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "base_model_name_or_path": str(folder / "base")}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Make the model unless it is there, and write the forms."""
    folder, *rest = sys.argv[1:]
    num_layers, forms = int(rest[0]) if rest else 32, rest[1:] or ["peft", "merged", "int8", "nf4", "gguf"]
    if not Path(folder).exists():
        begin = time.perf_counter()
        make(Path(folder), num_layers)
        print(f"made in {time.perf_counter() - begin:.0f} s", flush=True)
    for form in forms:
        subprocess.run([sys.executable, "-c", WRITE, folder, form], check=True)


if __name__ == "__main__":
    main()
