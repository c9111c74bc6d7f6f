"""Hosts of a run, as processes of this machine, that save and read a sharded state together.

torch_xla's CPU device knows one process. So the runtime here is plain torch: of a placed tensor a host has the boxes of
its own devices, by the sharding table and the mesh of all hosts, and NaN everywhere else. Collectives, files and
everything above the runtime are those of a run.

    python -m tests.checkpoint.host_lab

reads one JSON object a line, `{"hosts": 2, "call": "write", ...}`, forks that many hosts, and prints what each one
returned.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tpu_experiments.checkpoint import reading, saver, store
from tpu_experiments.checkpoint.manifest import COMMIT
from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.checkpoint.proof import InitialTensors, LossComparison
from tpu_experiments.checkpoint.state import boxes_needed, newest_parameters, read_state, snapshot
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.config.schema import CheckpointConfig
from tpu_experiments.models.adapters.lora import fingerprints
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.processes.hosts import Hosts, rendezvous
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.stacked import unstacked
from tpu_experiments.storage import paths
from tpu_experiments.storage.spool import Spool

SHAPES = {
    "model.embed_tokens.weight": (64, 32),
    "model.layers.0:4:1.self_attn.q_proj.weight": (4, 16, 32),
    "model.layers.0:4:1.mlp.down_proj.weight": (4, 32, 64),
    "model.layers.0:4:1.input_layernorm.weight": (4, 32),
    "model.norm.weight": (32,),
}
RULES: dict[str, Any] = {
    "*embed_tokens.weight|*.q_proj.weight": ["tensor", "fsdp"],
    "*.down_proj.weight": ["fsdp", "tensor"],
}
SLOTS = ("first", "second")


class HostRuntime(EagerRuntime):
    """One host with an equal part of a mesh's devices."""

    def __init__(self, hosts: Hosts, mesh: Mesh) -> None:
        super().__init__(HwConfig(name="cpu", runtime="eager", device="cpu", num_devices=1, num_threads=1))
        self.hosts, self.rank, self.world_size, self._mesh = hosts, hosts.rank, hosts.size, mesh
        self._table = ShardingTable(ShardingConfig(name="lab", rules=RULES), mesh=mesh)
        each = mesh.num_devices // hosts.size
        self._devices = range(hosts.rank * each, (hosts.rank + 1) * each)
        self._boxes = WeakIdKeyDictionary()

    def any_process(self, flag: bool) -> bool:
        return self.hosts.any(flag)

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        boxes = self._boxes_of(name, tuple(tensor.shape))
        placed = torch.full(tensor.shape, torch.nan)
        for box in boxes:
            placed[box.slices] = tensor[box.slices]
        self._boxes[placed] = boxes
        return placed

    def zeros(self, shape: torch.Size, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.place(torch.zeros(shape, dtype=dtype), name=name)

    def boxes(self, tensor: Tensor) -> list[Box]:
        return list(self._boxes[tensor])

    def copy_boxes(self, tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
        assert set(boxes) <= set(self._boxes[tensor]), "another host's"
        return [tensor[box.slices].clone() for box in boxes]

    def _boxes_of(self, name: str, shape: tuple[int, ...]) -> list[Box]:
        return boxes_on(self._devices, shape, mesh=self._mesh, axes=self._table.axes(name, shape))


def boxes_on(devices: range, shape: tuple[int, ...], *, mesh: Mesh, axes: Axes) -> list[Box]:
    """Boxes of a tensor of this shape that these devices of a mesh hold, each once."""
    split = mesh.split(mesh.named(axes), ndim=len(shape))
    if split.is_whole:
        return [Box.whole(shape)]
    sizes = tuple(size // tiles for size, tiles in zip(shape, split.tiles, strict=True))
    found = set()
    for position, device in enumerate(split.devices):
        if device in devices:
            tile = np.unravel_index(position // split.copies, split.tiles)
            start = tuple(int(index) * size for index, size in zip(tile, sizes, strict=True))
            found.add(Box(start, tuple(map(int.__add__, start, sizes))))
    return sorted(found)


def values(name: str, step: int) -> Tensor:
    """The tensor of this name as of a step."""
    shape = SHAPES[name.partition("/")[0]]
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


class Run:
    """The state of one host, and what saves and reads it."""

    def __init__(self, hosts: Hosts, folder: str, *, mesh: dict[str, int], **settings: Any) -> None:
        self.runtime, self.folder = HostRuntime(hosts, Mesh(**mesh)), folder
        self.parameters: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in SHAPES}
        self.set(0)
        marks = {part: mark for name in SHAPES for part, mark in fingerprints(name, values(name, 0)).items()}
        comparison = LossComparison(self, SimpleNamespace(num_rows=1), runtime=self.runtime, parameters=self.parameters)
        self.progress = Progress(peak_lr=1e-3, stages=[StageRecord("main")])
        self.saver = saver.Saver(
            CheckpointConfig(keep_last=2, **settings),
            Spool(folder, key="host_lab", marker=COMMIT),
            runtime=self.runtime,
            start=InitialTensors(marks, is_adapter=False),
            loss_comparison=comparison,
        )

    def set(self, step: int) -> None:
        for name in SHAPES:
            self.parameters[name] = self.runtime.place(values(name, step), name=name)
            for slot in SLOTS:
                self.state[name][slot] = self.runtime.place(values(f"{name}/{slot}", step), name=f"{name}/{slot}")

    def sums_of(self, batch: Any) -> tuple[float, float]:
        """Sum over what all hosts hold of the parameters, in the place of a loss."""
        own = [float(t[box.slices].double().sum()) for t in self.parameters.values() for box in self.runtime.boxes(t)]
        return sum(self.runtime.hosts.gather(sum(own))), 1.0

    def save(self, step: int, **how: bool) -> None:
        self.set(step)
        self.progress.advance(step)
        take = lambda: snapshot(self.progress, parameters=self.parameters, state=self.state)  # noqa: E731
        self.saver.save(take, step=step, **{"is_interval": True} | how)

    def read(self) -> int | None:
        """Step of what a new process reads, after comparing every number that this host holds."""
        reading._verified.clear()
        self.set(0)
        store.verify_newest(self.folder, self.runtime.hosts)
        found = read_state(
            self.folder,
            parameters=self.parameters,
            state=self.state,
            place=self.runtime.place,
            boxes=boxes_needed(self.runtime),
        )
        step = 0 if found is None else found.step
        held = {f"{name}/{slot}": t for name, slots in self.state.items() for slot, t in slots.items()}
        for name, tensor in (self.parameters | held).items():
            for box in self.runtime.boxes(tensor):
                assert torch.equal(tensor[box.slices], values(name, step)[box.slices]), (name, box)
        return step


def write(hosts: Hosts, *, folder: str, steps: list[int], then: dict[str, bool] | None = None, **how: Any) -> Any:
    """Save at each step, the last one blocking the loop."""
    run = Run(hosts, folder, **how)
    for step in steps:
        run.save(step, **({"ends_stage": True, "is_interval": False} if step == steps[-1] else {}))
    run.saver.join()
    return steps[-1]


def read(hosts: Hosts, *, folder: str, mesh: dict[str, int]) -> Any:
    """Step, and bytes of tensors read, first all of them for the checksums, then what this host holds."""
    run, counted = Run(hosts, folder, mesh=mesh), [0]
    plain = reading.read_range

    def count(place: str, start: int, stop: int) -> bytes:
        counted[0] += stop - start
        return plain(place, start, stop)

    reading.read_range = count
    store.verify_newest(folder, hosts)
    verified, counted[0] = counted[0], 0
    found = read_state(
        folder,
        parameters=run.parameters,
        state=run.state,
        place=run.runtime.place,
        boxes=boxes_needed(run.runtime),
    )
    reading.read_range = plain
    taken = counted[0]
    return {"step": run.read(), "verified": verified, "read": taken, "found": found is not None}


def whole(hosts: Hosts, *, folder: str) -> Any:
    """Step of the newest parameters, read whole by one process as a task does, after comparing every number."""
    found = newest_parameters(folder, max_held_bytes=0)
    assert found is not None
    expected = unstacked({name: values(name, found[0]) for name in SHAPES})
    assert found[1].keys() == expected.keys()
    assert all(torch.equal(found[1][name], t) for name, t in expected.items())
    return found[0]


def spoil(hosts: Hosts, *, rank: int, part: str, **how: Any) -> Any:
    """Write with storage that changes a byte of what one host writes."""
    plain = paths.write_chunks_atomic

    def damage(place: str, chunks: Any) -> None:
        content = bytearray(b"".join(chunks))
        content[-1] ^= part in place and hosts.rank == rank
        plain(place, iter([memoryview(content)]))

    paths.write_chunks_atomic = damage
    return write(hosts, **how)


def apart(hosts: Hosts, *, folder: str, **how: Any) -> Any:
    """Write to a folder of each host's own."""
    return write(hosts, folder=f"{folder}/{hosts.rank}", **how)


def die(hosts: Hosts, *, rank: int, at: int, **how: Any) -> Any:
    """Write, and end one host before its file operation number `at` in the folder; count those without an end."""
    count = 0

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal count
        if event.startswith(("open", "os.")) and any(how["folder"] in str(each) for each in given):
            count += 1
            if hosts.rank == rank and count == at + 1:
                os._exit(9)

    sys.addaudithook(hook)
    write(hosts, **how)
    return count


CALLS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (write, read, whole, spoil, apart, die)}


def host(rank: int, num_hosts: int, port: int, call: str, given: dict[str, Any], results: Any) -> None:
    """Be one host."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(num_hosts)
    torch.set_num_threads(1)
    hosts = rendezvous(HwConfig(num_hosts=num_hosts), lost_seconds=0.5) if num_hosts > 1 else Hosts()
    try:
        found = CALLS[call](hosts, **given)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    results.send(found)
    hosts.announce_end()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Answer every line."""
    context = multiprocessing.get_context("fork")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints there
    for line in sys.stdin:
        given = json.loads(line)
        num_hosts, call = given.pop("hosts"), given.pop("call")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [context.Pipe(duplex=False) for _ in range(num_hosts)]
        started = [
            context.Process(target=host, args=(rank, num_hosts, port, call, given, pipes[rank][1]))
            for rank in range(num_hosts)
        ]
        for each in started:
            each.start()
        for each in started:
            each.join()
        answers = [
            end.recv() if end.poll() else f"ended with {each.exitcode}"
            for (end, _), each in zip(pipes, started, strict=True)
        ]
        print(json.dumps(answers), file=out, flush=True)


if __name__ == "__main__":
    main()
