"""Time and memory of the comparison of a loaded model with transformers': python -m tests.benchmarks.loaded_models

Checkpoints have random weights in bfloat16, as transformers writes them. Of the largest only the layers that are
compared are written. Each is compared in a process of its own.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.loaded import difference, part_of, with_layers

LLAMA = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "SmolLM2 135M": (LlamaConfig, LLAMA | {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "Qwen2.5 0.5B": (Qwen2Config, {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "Llama 3.1 8B": (LlamaConfig, LLAMA | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}),
}  # fmt: skip


def source_of(folder: str) -> HuggingFaceModel:
    """The checkpoint as a run with adapters reads it."""
    return HuggingFaceModel(ModelConfig(name="x", path=folder, dtype="bfloat16", attention="sdpa"), seed=0)


def write(name: str, folder: Path) -> None:
    """Write config.json and the layers that are compared."""
    kind, values = CONFIGS[name]
    config = kind(**values)
    config.save_pretrained(folder)
    source = source_of(str(folder))
    few = with_layers(source, part_of(source).layers)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(few.config, dtype=torch.bfloat16).save_pretrained(folder)
    config.save_pretrained(folder)


def measure(folder: str) -> str:
    """Compare one, in a new process; return the rest of its line of the table."""
    source = source_of(folder)
    part, before = part_of(source), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.monotonic(), time.process_time()
    apart = difference(source, part, lora=LoraConfig(r=16, targets=["all-linear"]), is_packed=True)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    gib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    return f"{part} | {part.nbytes / 2**30:.2f} | {seconds:.1f} | {cpu:.1f} | {gib:.2f} | {apart:.1e} |"


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        print(measure(sys.argv[1]))
        return
    print("| model | compared | its weights in float32, GiB | seconds | of CPU | more memory, GiB | apart |")
    print("|---|---|---|---|---|---|---|")
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder))
            command = [sys.executable, "-m", "tests.benchmarks.loaded_models", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"| {name} | {done.stdout.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
