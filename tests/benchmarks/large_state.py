"""Host memory of a save and of a resume of full fine-tuning, one fresh process per case, on torch_xla's CPU device.

    python -m tests.benchmarks.large_state [--layers 8] [--parallel inline] [--folder /tmp]

The model is Qwen2.5 0.5B's widths and embedding with fewer layers, random, with AdamW: 3.1 GB of parameters and
moments. `whole` copies everything and writes one file a group; the others save file by file and read tensor by tensor.
Memory is what the process holds resident above the moment before, when the device, which is the host's memory too,
holds the state.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from tests.benchmarks.saving import peak_above, trimmed
from tests.config.composing import composed
from tests.training.tiny import plain_updates
from tpu_experiments.checkpoint.manifest import COMMIT
from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.checkpoint.proof import InitialTensors, LossComparison
from tpu_experiments.checkpoint.saver import Saver
from tpu_experiments.checkpoint.state import read_state, snapshot, zero_state
from tpu_experiments.config.schema import CheckpointConfig
from tpu_experiments.runtime.host_copies import host_copy
from tpu_experiments.runtime.stacked import hugging_face_names
from tpu_experiments.storage.spool import Spool

GIB = 2**30
EMBEDDING = "model.embed_tokens.weight"
HIDDEN, KEY_VALUE, MLP, VOCAB = 896, 128, 4864, 151936
SHAPES = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (KEY_VALUE, HIDDEN),
    "self_attn.v_proj.weight": (KEY_VALUE, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
}
CASES = {"whole": (1e9, 1e9), "files of 1 GiB": (0.0, 1.0), "files of 0.25 GiB": (0.0, 0.25)}
"""`checkpoint.max_copy_gib` and `max_shard_gib`."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--parallel", choices=("inline", "spmd"), default="inline")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--case", default=None)
    parser.add_argument("--load", action="store_true")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measured(args)))
        return
    print("| case | files | save: GB above before | s | resume: GB above before | s |\n|---|---|---|---|---|---|")
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            common = ["--case", case, "--folder", folder, "--layers", str(args.layers), "--parallel", args.parallel]
            saved, loaded = child(*common), child(*common, "--load")
        cells = f"{saved['files']} | {saved['gb']:.2f} | {saved['s']:.1f} | {loaded['gb']:.2f} | {loaded['s']:.1f}"
        print(f"| {case} | {cells} |", flush=True)


def child(*arguments: str) -> dict[str, Any]:
    """One case in a process of its own; its first line is where the bits were compared."""
    command = [sys.executable, "-m", "tests.benchmarks.large_state", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The peak and the seconds of a save, or of the resume from it."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = "4" if args.parallel == "spmd" else "1"
    overrides = ["hw.parallel=spmd", "hw.num_devices=4"] if args.parallel == "spmd" else []
    config = composed(*overrides)
    from tpu_experiments.runtime.xla.device import XlaRuntime

    runtime: Any = XlaRuntime(config.hw, sharding=config.sharding, trace_every=50)
    generator = torch.Generator().manual_seed(1 if args.load else 0)
    shapes = {EMBEDDING: (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.0:{args.layers}:1.{name}": (args.layers, *shape) for name, shape in SHAPES.items()}
    parameters = {
        name: runtime.place(torch.randn(shape, generator=generator), name=name) for name, shape in shapes.items()
    }
    updates = plain_updates(parameters)
    # Placed, since the device makes no zeros before a program reads them.
    state = zero_state(updates, parameters, zeros=runtime.zeros)
    runtime.wait()
    held = {"parameters": parameters, "state": state}
    return loading(args, runtime, held) if args.load else saving(args, runtime, held)


def loading(args: argparse.Namespace, runtime: Any, held: dict[str, Any]) -> dict[str, Any]:
    """A resume."""
    max_held_bytes = CASES[args.case][0] * GIB
    before, started = trimmed(), time.perf_counter()
    with peak_above(before) as peak:
        read_state(args.folder, **held, place=runtime.place, max_held_bytes=max_held_bytes)
        runtime.wait()
    seconds = time.perf_counter() - started
    saved = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(0))
    assert torch.equal(host_copy(held["parameters"][EMBEDDING]), saved)
    return {"gb": peak[0] / 1e9, "s": seconds}


def saving(args: argparse.Namespace, runtime: Any, held: dict[str, Any]) -> dict[str, Any]:
    """A save that is waited for."""
    marks = {part: "" for name in held["parameters"] for part in hugging_face_names(name)}
    nothing: Any = None
    loss_comparison = LossComparison(nothing, None, runtime=runtime, parameters=held["parameters"])
    copy_gib, shard_gib = CASES[args.case]
    settings = CheckpointConfig(max_copy_gib=copy_gib, max_shard_gib=shard_gib)
    spool = Spool(args.folder, key="large_state", marker=COMMIT)
    saver = Saver(
        settings, spool, runtime=runtime, start=InitialTensors(marks, is_adapter=False), loss_comparison=loss_comparison
    )
    progress = Progress(stage_step=1, step=1, peak_lr=1e-4, stages=[StageRecord("main", steps=1)])
    before, started = trimmed(), time.perf_counter()
    with peak_above(before) as peak:
        saver.save(lambda: snapshot(progress, **held), step=1, is_interval=False, ends_stage=True)
    seconds = time.perf_counter() - started
    files = [name for name in os.listdir(f"{args.folder}/step_00000001") if name.endswith(".safetensors")]
    return {"gb": peak[0] / 1e9, "s": seconds, "files": len(files)}


if __name__ == "__main__":
    main()
