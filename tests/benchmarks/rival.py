"""The same recipe as users of transformers and PEFT run it on torch_xla, compiled for the recipe's TPU and read alike.

    python -m tests.benchmarks.rival OUTPUT layer|module OVERRIDE...     # prints one line of JSON

transformers' model, frozen in bf16; PEFT's adapters in float32 under bf16 autocast, as accelerate does it; sdpa; every
layer checkpointed; the loss of the model's own forward; gradients clipped at 1 and torch's AdamW; micro-batches one
after another in one program. Rows are whole, so that there is no mask and sdpa is causal, which is less work than the
packed rows of ours. Over several chips it is FSDP as transformers' Trainer sets it up with `xla_fsdp_v2`: the largest
dimension of every parameter is split, and the rows of every layer's result. Flags of libtpu are its defaults.

Checkpoints are torch_xla's, whose barrier keeps the compiler from undoing them: `layer` puts them where transformers
has its own (gradient_checkpointing), `module` around the layers as Trainer's `xla_fsdp_grad_ckpt` does, where the
barrier takes in the weights, so that what was gathered for the forward pass is not kept for the backward pass.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.config.composing import composed
from tpu_experiments.config.mesh import Axes
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.ops import BY_ROWS, Constrain
from tpu_experiments.runtime.processes.env import prepare_environment
from tpu_experiments.runtime.sharding import ShardingTable


class LargestDimension(ShardingTable):
    """FSDP's own rule: the first of the largest dimensions of every parameter and of its optimizer state."""

    def axes(self, name: str, shape: tuple[int, ...]) -> Axes:
        if not shape or "inv_freq" in name or max(shape) % self.mesh.num_devices:
            return (None,) * len(shape)
        split = shape.index(max(shape))
        return tuple("fsdp" if dim == split else None for dim in range(len(shape)))


def with_adapters(config: Config, *, checkpoints: str) -> nn.Module:
    """PEFT's model on the meta device, its buffers on the host."""
    from peft import LoraConfig, get_peft_model
    from torch_xla.distributed.fsdp import checkpoint_module
    from torch_xla.utils.checkpoint import checkpoint

    from tpu_experiments.models.huggingface import ShapesOfModel

    source = ShapesOfModel(replace(config.model, attention="sdpa"), seed=config.seed)
    base: Any = source.empty()
    if checkpoints == "module":
        for layer in base.model.layers:
            checkpoint_module(layer)
    else:
        base.gradient_checkpointing_enable()
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    base.enable_input_require_grads()
    base.config.use_cache = False
    lora = config.lora
    settings = LoraConfig(
        r=lora.r, lora_alpha=int(lora.alpha), lora_dropout=lora.dropout, target_modules=list(lora.targets)
    )
    with torch.device("meta"):
        return get_peft_model(base, settings).train()


def on_placeholders(module: nn.Module, place: Callable[..., Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Give every parameter and buffer a placeholder; (placeholder, parameter) of what is trained, by name."""
    trained: dict[str, tuple[Tensor, Tensor]] = {}
    known: dict[int, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if id(old) not in known:
            placeholder = place(old, name=name)
            # A value of its own: the update is in place, and so is the checkpoint's barrier around frozen weights; the
            # placeholder must still be found as an argument.
            new = nn.Parameter(placeholder.clone(), old.requires_grad)
            known[id(old)] = new
            if old.requires_grad:
                trained[name] = (placeholder, new)
        module.get_submodule(owner)._parameters[leaf] = known[id(old)]
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = place(buffer, name=name)
    return trained


def split_rows(module: nn.Module, constrain: Constrain) -> None:
    """Annotate the result of every decoder layer, and the logits, as FSDP does."""
    layers = module.get_submodule("base_model.model.model.layers")
    head = module.get_submodule("base_model.model.lm_head")
    for part in [*layers.children(), head]:
        part.register_forward_hook(lambda _, args, out: constrain(out, axes=BY_ROWS))


def optimizer_of(
    config: Config, trained: Mapping[str, tuple[Tensor, Tensor]], place: Callable[..., Tensor]
) -> tuple[torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    """torch's AdamW some steps into a run, and (placeholder, tensor) of its moments."""
    optim: Any = config.optim
    parameters = [new for _, new in trained.values()]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
    )
    moments = []
    for name, (_, parameter) in trained.items():
        state: dict[str, Tensor] = {"step": torch.tensor(10.0)}
        for slot in ("exp_avg", "exp_avg_sq"):
            placeholder = place(torch.empty_like(parameter, device="meta"), name=f"{name}/{slot}")
            state[slot] = placeholder.clone()
            moments.append((placeholder, state[slot]))
        optimizer.state[parameter] = state
    return optimizer, moments


def lowered(config: Config, shape: tuple[int, int, int], *, checkpoints: str) -> tuple[Any, frozenset[str]]:
    """The program of one optimizer step on (A, R, T) token ids, and the names of what it trains."""
    from tpu_experiments.runtime.xla.tracing import TracingRuntime

    runtime = TracingRuntime(config.hw, sharding=config.sharding)
    if runtime.is_sharded and config.sharding.name != "replicated":
        runtime.table = LargestDimension(config.sharding, mesh=runtime.mesh)
    module = with_adapters(config, checkpoints=checkpoints)
    trained = on_placeholders(module, runtime.place)
    if runtime.is_sharded:
        split_rows(module, runtime.constrain)
    optimizer, moments = optimizer_of(config, trained, runtime.place)

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros((), device=runtime.device)
        for ids, labels in zip(batch["ids"], batch["labels"], strict=True):
            with torch.autocast("xla", dtype=torch.bfloat16):
                loss = module(input_ids=ids, labels=labels).loss / shape[0]
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_([new for _, new in trained.values()], 1.0)
        optimizer.step()
        return total

    def renewed(_: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return ((old, new.detach()) for old, new in [*trained.values(), *moments])

    batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("ids", "labels")}
    program = runtime.lower(step, name="train", batch=batch, rows_dim=1, renewed=lambda out: list(renewed(out)))
    return program, frozenset(trained)


def measured(config: Config, *, checkpoints: str, folder: str) -> dict[str, Any]:
    """What the compiled step costs, in the fields of plan.json that the table reads."""
    from tpu_experiments.config.curriculum import resolve_stages
    from tpu_experiments.models.huggingface import ShapesOfModel
    from tpu_experiments.objectives.base import trained_flops
    from tpu_experiments.planning.compiled import Compilers, planned, widths_of_step

    geometry = resolve_stages(config)[0].geometry
    rows = geometry.micro_rows * geometry.num_shards
    shape = geometry.accumulation, rows, geometry.seq_len
    program, trained = lowered(config, shape, checkpoints=checkpoints)
    with Compilers(1) as compilers:
        compiled = compilers.submit(program, hw=config.hw, folder=folder).result()
    arch = ShapesOfModel(config.model, seed=config.seed).config
    flops = trained_flops(config, arch, seq_len=geometry.seq_len)
    widths = widths_of_step(program, arch, rank=config.lora.r, trained=trained)
    made = planned(program, compiled, hw=config.hw, trained=trained, flops=flops, widths=widths)
    time, work = made.time, made.work
    return {
        "hw": config.hw.name,
        "fits": made.memory.headroom >= 0,
        "hbm_gib_per_chip": {"total": made.memory.total, "limit": made.memory.limit},
        "estimated_step_seconds": time.total_s if time else None,
        "tokens_per_second_per_chip": time.tokens_per_second_per_chip if time else None,
        "estimated_cycles": work.cycles if work else None,
        "estimated_step_by_part": made.seconds_by_part if time else None,
        "compile_seconds": compiled.seconds,
        "trace_seconds": program.trace_seconds,
    }


def main(output: Path, checkpoints: str, overrides: list[str]) -> None:
    """Print what was found as JSON."""
    config = composed("task=plan", "hw.libtpu_flags=[]", *overrides)
    prepare_environment(config.hw, is_planned=True)
    os.environ.pop("LIBTPU_INIT_ARGS", None)
    print(json.dumps(measured(config, checkpoints=checkpoints, folder=str(output / "plans" / "compiled"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3:])
