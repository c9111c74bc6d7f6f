"""Peak host memory of loading a checkpoint: ours on both runtimes beside transformers, one fresh process per case.

    python -m tests.benchmarks.loading_memory [--layers 6]

The checkpoint is Mistral 7B with fewer layers and random bf16 weights, written tensor by tensor. A case counts from
the resident set right before loading (imports done, device client started) to the kernel's high-water mark after
it. On torch_xla's CPU device the device's memory is host memory, so the one copy counted there is the device's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
CASES = ("ours_eager", "ours_xla", "ours_eager_nf4", "ours_xla_int8", "transformers", "transformers_to_xla")
WIDTHS = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}


def arch(*, layers: int, **widths: int) -> dict[str, Any]:
    """Mistral's config values; Mistral 7B where `widths` does not say otherwise."""
    values = {"model_type": "mistral", "num_hidden_layers": layers, "num_attention_heads": 32}
    return values | {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096} | WIDTHS | widths


def write_checkpoint(folder: Path, values: dict[str, Any], *, shard_bytes: int | None) -> int:
    """Write random bf16 weights, no more than one tensor in memory; returns the bytes of all tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    from tpu_experiments.models.huggingface import config_from_arch

    config = config_from_arch(values)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    folder.mkdir(parents=True)
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    groups = _groups({name: 2 * p.numel() for name, p in module.named_parameters()}, shard_bytes)
    weight_map = {}
    for number, names in enumerate(groups, start=1):
        file = "model.safetensors"
        if shard_bytes is not None:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(folder / file, {name: shapes[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    num_bytes = sum(2 * p.numel() for p in module.parameters())
    if shard_bytes is not None:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes


def _groups(sizes: dict[str, int], shard_bytes: int | None) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shard_bytes is not None and groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """The safetensors layout: length of the header, header, tensors end to end."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            tensor = (0.02 * torch.randn(shape[-1])).to(torch.bfloat16).expand(shape).contiguous()
            tensor.view(torch.uint8).numpy().tofile(file)


def measure(case: str, folder: Path) -> int:
    """Bytes that loading adds at its peak, in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.loading_memory", "--case", case, "--folder", str(folder)]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{case} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return int(json.loads(done.stdout.splitlines()[-1])["added_bytes"])


def added_by(load: Callable[[], object]) -> int:
    """Bytes between the resident set before `load` and the highest during it."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to the resident set
    before = _status("VmRSS")
    kept = load()
    peak = _status("VmHWM")
    del kept
    return peak - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_case(case: str, folder: Path) -> int:
    """Load in this process; returns the bytes added at the peak."""
    if case.startswith("ours"):
        return added_by(_ours(case.removeprefix("ours_"), folder))
    import torch
    from transformers import AutoModelForCausalLM

    _import_model_class(folder)
    if case == "transformers":
        return added_by(lambda: _touched(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)))
    import torch_xla

    device = torch_xla.device()
    torch.ones(1).to(device).cpu()  # starts the client

    def load() -> object:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        torch_xla.sync(wait=True)
        return model

    return added_by(load)


def _import_model_class(folder: Path) -> None:
    """transformers imports a model's module when it is first asked for (250 MiB that are no weights)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _touched(model: Any) -> object:
    """Read one value of every page, as a first forward pass would: transformers maps the file and reads nothing."""
    for parameter in model.parameters():
        parameter.flatten()[::2048].sum()
    return model


def _ours(case: str, folder: Path) -> Callable[[], object]:
    import torch

    from tpu_experiments.config.hardware import HwConfig
    from tpu_experiments.config.model_schema import LoraConfig, ModelConfig, ShardingConfig
    from tpu_experiments.models.huggingface import HuggingFaceModel
    from tpu_experiments.models.sources.build import build_model

    runtime_name, _, base = case.partition("_")
    hw = HwConfig(name="cpu", device="cpu", parallel="inline", num_devices=1)
    if runtime_name == "xla":
        from tpu_experiments.runtime.xla.device import XlaRuntime

        runtime: Any = XlaRuntime(hw, sharding=ShardingConfig(name="replicated"))
    else:
        from tpu_experiments.runtime.eager import EagerRuntime

        runtime = EagerRuntime(hw)
    _import_model_class(folder)
    runtime.place(torch.ones(1), name="").cpu()  # starts the client
    model = ModelConfig(name="random", path=str(folder), dtype="bfloat16", base=base or "dense")
    lora = LoraConfig(r=8, targets=["q_proj", "v_proj"])

    def load() -> object:
        built = build_model(HuggingFaceModel(model, seed=0), lora=lora, seed=0, place=runtime.place)
        runtime.wait()
        return built

    return load


def main() -> None:
    """Print the table, or run one case for `measure`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="layers of 436 MB; 6 give a checkpoint of 2.9 GiB")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps({"added_bytes": run_case(arguments.case, arguments.folder)}))
        return
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    print(f"{'checkpoint':<12} {'case':<20} {'checkpoint MiB':>14} {'peak MiB':>9} {'ratio':>6}")
    for layout, shard_bytes in (("single", None), ("sharded", 1024 * MIB)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkpoint"
            num_bytes = write_checkpoint(folder, arch(layers=arguments.layers), shard_bytes=shard_bytes)
            for case in CASES:
                added = measure(case, folder)
                row = f"{layout:<12} {case:<20} {num_bytes / MIB:>14.0f} {added / MIB:>9.0f}"
                print(f"{row} {added / num_bytes:>6.3f}", flush=True)


if __name__ == "__main__":
    main()
