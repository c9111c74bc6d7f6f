"""What each host writes of a sharded state, and how long it takes.

    python -m tests.benchmarks.host_checkpoints [HOSTS...]

A model of 114 million parameters with two moments, 1.37 GB in float32, sharded by rows over 1, 2 and 4 processes of
this machine that share its disk and cores (tests/checkpoint/host_lab.py). A save is written, read back, verified and
committed; the median of three, with the slowest host's. Then, for Mistral 7B on v6e16, what each of its 4 hosts would
write: counted, nothing is written.
"""

import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from tests.checkpoint import host_lab
from tests.config.composing import composed
from tpu_experiments.checkpoint.pieces import dealt
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.targets import locate
from tpu_experiments.models.sources.build import describe
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.runtime.sharding import ShardingTable

LAYERS = "model.layers.0:12:1"
SHAPES = {
    "model.embed_tokens.weight": (1024, 768),
    **{f"{LAYERS}.self_attn.{name}_proj.weight": (12, 768, 768) for name in "qkvo"},
    **{f"{LAYERS}.mlp.{name}_proj.weight": (12, 3072, 768) for name in ("gate", "up")},
    f"{LAYERS}.mlp.down_proj.weight": (12, 768, 3072),
    **{f"{LAYERS}.{name}_layernorm.weight": (12, 768) for name in ("input", "post_attention")},
}


def save(hosts: Hosts, *, folder: str, num_hosts: int) -> dict[str, Any]:
    """Save three times in front of the loop; bytes of this host, and seconds of each save."""
    run = host_lab.Run(hosts, folder, mesh={"fsdp": num_hosts})
    run.set(1)
    taken = []
    for step in (1, 2, 3):
        run.progress.advance(step)
        take = lambda: host_lab.snapshot(run.progress, parameters=run.parameters, state=run.state)  # noqa: E731
        hosts.barrier()
        started = time.perf_counter()
        run.saver.save(take, step=step, is_interval=False)
        taken.append(time.perf_counter() - started)
    manifest = host_lab.store.read_manifest(f"{folder}/step_00000003")
    own = f"host-{hosts.rank:02d}" if hosts.size > 1 else ""
    num_bytes = sum(
        facts.num_bytes for name, facts in manifest.files.items() if name.startswith(own) and "safetensors" in name
    )
    return {"bytes": num_bytes, "seconds": statistics.median(taken)}


def measured(num_hosts: int) -> list[dict[str, Any]]:
    """Of every host."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        pipes = [context.Pipe(duplex=False) for _ in range(num_hosts)]
        given = {"folder": folder, "num_hosts": num_hosts}
        started = [
            context.Process(target=host_lab.host, args=(rank, num_hosts, port, "save", given, pipes[rank][1]))
            for rank in range(num_hosts)
        ]
        for each in started:
            each.start()
        found = [end.recv() for end, _ in pipes]
        for each in started:
            each.join()
        return found


def planned() -> dict[str, Any]:
    """Bytes that each host of v6e16 would write of Mistral 7B with two moments, by the sharding table alone."""
    config = composed("model=mistral7b", "data=uk_law", "hw=v6e16", "task=plan", "lora=none", "model.init=random")
    mesh, hosts = mesh_of(config.hw, config.sharding), config.hw.num_hosts
    module, _ = describe(locate(config.model._target_, key="model")(config.model, seed=1), lora=config.lora)
    table = ShardingTable(config.sharding, mesh=mesh)
    tensors = {name: torch.empty(p.shape, device="meta") for name, p in module.named_parameters()}
    each = mesh.num_devices // hosts
    held = [
        {
            name: host_lab.boxes_on(
                range(rank * each, (rank + 1) * each), tuple(t.shape), mesh=mesh, axes=table.axes(name, tuple(t.shape))
            )
            for name, t in tensors.items()
        }
        for rank in range(hosts)
    ]
    loads = [0] * hosts
    for _ in ("parameters", "first moment", "second moment"):
        dealt(held, tensors, loads=loads)
    return {"hosts": hosts, "bytes": loads, "total": 3 * sum(t.nbytes for t in tensors.values())}


if __name__ == "__main__":
    host_lab.SHAPES.clear()
    host_lab.SHAPES.update(SHAPES)
    host_lab.RULES.clear()
    host_lab.RULES.update({"*_proj.weight|*embed_tokens.weight": ["fsdp", None]})
    host_lab.CALLS["save"] = save
    for count in map(int, sys.argv[1:] or ("1", "2", "4")):
        found = measured(count)
        assert all(isinstance(one, dict) for one in found), found
        shown = ", ".join(f"{one['bytes'] / 1e6:,.1f}" for one in found)
        print(f"{count} hosts: {shown} MB, {max(one['seconds'] for one in found):.2f} s", flush=True)
    print(json.dumps(planned()))
