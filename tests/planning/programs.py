"""Prints what a program computes, as the plan traces it or as a run lowers it, in a process of its own.

    python -m tests.planning.programs plan|run OVERRIDE...

A program's signature: for every output a hash over its instruction, its attributes and, recursively, its operands; an
argument counts by its shape and sharding, not by its number.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from typing import Any

from tests.config.composing import composed
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.env import variables

LINE = re.compile(r"^\s*(ROOT )?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$")
CALLED = re.compile(r"\b(to_apply|body|condition)=([\w.\-]+)")
WITHOUT = re.compile(r", (?:metadata|sharding|frontend_attributes|origin)=\{.*?\}+")
SHORT = {"float32": "f32", "bfloat16": "bf16", "int32": "s32", "int64": "s64"}

Line = dict[str, Any]
Signature = dict[str, dict[str, int]]


class Program:
    """An HLO module as jaxlib prints it."""

    def __init__(self, hlo: str) -> None:
        self.computations: dict[str, dict[str, Line]] = {}
        self.entry = current = ""
        self._known: dict[tuple[str, str], str] = {}
        for text in hlo.splitlines():
            head = re.match(r"^(ENTRY )?([\w.\-]+) \{$", text)
            if head:
                current = head[2]
                self.computations[current] = {}
                self.entry = current if head[1] else self.entry
            elif match := LINE.match(text):
                names = ("is_root", "name", "shape", "op", "operands", "rest")
                self.computations[current][match[2]] = dict(zip(names, match.groups(), strict=True))

    def signature(self) -> Signature:
        """Arguments and outputs of the entry, in no order."""
        lines = self.computations[self.entry].values()
        arguments = Counter(
            f"{_plain(line['shape'])} {_split_of(line['rest'])}" for line in lines if line["op"] == "parameter"
        )
        root = next(line for line in lines if line["is_root"])
        outputs = Counter(self._hash(self.entry, name) for name in _operands(root))
        return {"arguments": dict(sorted(arguments.items())), "outputs": dict(sorted(outputs.items()))}

    def _hash(self, computation: str, name: str) -> str:
        if (computation, name) not in self._known:
            line = self.computations[computation][name]
            if 'custom_call_target="Sharding"' in line["rest"]:  # says where the result lies, computes nothing
                return self._hash(computation, _operands(line)[0])
            is_leaf = line["op"] in ("parameter", "constant")
            of_entry = line["op"] == "parameter" and computation == self.entry
            inside = line["operands"] if is_leaf and not of_entry else ""
            operands = [] if is_leaf else [self._hash(computation, operand) for operand in _operands(line)]
            attributes = CALLED.sub(lambda match: f"{match[1]}={self._root(match[2])}", WITHOUT.sub("", line["rest"]))
            text = f"{_plain(line['shape'])} {line['op']} {inside} {operands} {attributes}"
            self._known[computation, name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._known[computation, name]

    def _root(self, computation: str) -> str:
        root = next(line for line in self.computations[computation].values() if line["is_root"])
        return self._hash(computation, root["name"])


def _operands(line: Line) -> list[str]:
    listed = re.sub(r"/\*.*?\*/", "", line["operands"]).split(",")
    return [operand.strip() for operand in listed if operand.strip()]


def _plain(shape: str) -> str:
    """Without the layout."""
    return re.sub(r"\{[\d,]*\}", "", shape)


def _split_of(rest: str) -> str:
    """Tiles of every dimension, as in `[1,4]`; empty where the whole is on every device."""
    found = re.search(r"devices=(\[[\d,]*\])", rest)
    return found[1] if found else ""


def signatures_of_plan(config: Config) -> dict[str, Signature]:
    """Of every program of the plan, by name and shape; the arguments are those that the plan hands to the compiler."""
    from tpu_experiments.tasks.plan.programs import trace_run

    found = {}
    for program in trace_run(config, which="train").programs:
        arguments: Counter[str] = Counter()
        for argument in program.arguments:
            split = _split_of(program.mesh.sharding_text(list(argument.axes)))
            arguments[f"{SHORT[argument.dtype]}[{','.join(map(str, argument.shape))}] {split}"] += 1
        outputs = Program(hlo_text(program.module)).signature()["outputs"]
        found[f"{program.name} {program.shape}"] = {"arguments": dict(sorted(arguments.items())), "outputs": outputs}
    return found


def lowered_by_run(config: Config) -> dict[str, bytes]:
    """HLO of the trainer's training step on real tensors on (virtual) CPU devices."""
    import torch
    import torch_xla
    from torch.utils._pytree import tree_leaves

    from tests.training.tiny import random_batch
    from tpu_experiments.config.curriculum import resolve_stages
    from tpu_experiments.config.targets import locate
    from tpu_experiments.metrics.goodput import Stopwatch
    from tpu_experiments.runtime.processes.launch import make_runtime
    from tpu_experiments.training.batches import RunInputs

    runtime = make_runtime(config)
    inputs = RunInputs(None, {}, resolve_stages(config))
    trainer = locate(config.trainer._target_, key="trainer")(
        config, runtime, inputs=inputs, outputs=None, watch=Stopwatch()
    )
    trainer.build()
    geometry = inputs.stages[0].geometry
    rows = geometry.micro_rows * (geometry.num_shards if config.hw.parallel == "spmd" else 1)
    shape = {"accumulation": geometry.accumulation, "rows": rows, "seq_len": geometry.seq_len}
    host = random_batch(0, **shape, dropout=config.lora.dropout)
    batch = runtime.put(host, rows_dim=1)
    torch_xla.sync()
    runtime.wait()
    report = trainer.step_in_place(batch)
    changed = [*trainer.parameters.values(), *tree_leaves(trainer.state), *written(runtime)]
    tensors = [tensor for tensor in [*changed, *vars(report).values()] if isinstance(tensor, torch.Tensor)]
    return {f"train {tuple(batch['ids'].shape)}": torch_xla._XLAC._get_xla_tensors_hlo_proto(tensors)}


def written(runtime: Any) -> list[Any]:
    """Weights that a step writes its adapters into."""
    in_place = runtime.folding.in_place
    return [] if in_place is None else list(in_place.kept.values())


def hlo_text(proto: bytes) -> str:
    from jax._src.lib import xla_client

    return str(xla_client.XlaComputation(proto).as_hlo_text())


def main(kind: str, overrides: list[str]) -> None:
    """Print the signatures as JSON."""
    config = composed(*overrides)
    os.environ.update(variables(config.hw))
    if kind == "plan":
        found = signatures_of_plan(config)
    else:
        found = {name: Program(hlo_text(hlo)).signature() for name, hlo in lowered_by_run(config).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
