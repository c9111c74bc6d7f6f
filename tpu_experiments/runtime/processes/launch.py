"""Start the processes of a run and hand each its Runtime.

`inline` and `spmd` run in this process. `spawn` starts one process per device; a child dies with its parent,
however the parent ends, so nothing keeps holding a device.
"""

import os
import pickle
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpu_experiments.config.bugs import write_traceback
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.tracing import trace_interval
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.patches import TORCHTPU, require_versions
from tpu_experiments.runtime.processes.env import compile_cache_folder
from tpu_experiments.runtime.processes.stopping import Ticket, join, signals_for_children
from tpu_experiments.runtime.processes.tether import die_with

Main = Callable[..., Any]


def launch(main: Main, config: Config, *args: Any) -> None:
    """Call `main(runtime, config, *args)` once per process; `main` must be importable, `args` picklable."""
    if config.hw.parallel != "spawn":
        main(make_runtime(config), config, *args)
    elif config.hw.runtime == "xla":
        require_versions("torch", "torch_xla")
        import torch_xla

        with signals_for_children() as ticket:
            torch_xla.launch(_xla_child, args=(ticket, main, config, args))
    else:
        with signals_for_children() as ticket:
            _spawn_eager(ticket, main, config, args)


def make_runtime(config: Config, *, process: int = 0) -> Runtime:
    """Return the Runtime of this process, number `process` (from 0) on this machine."""
    if config.hw.runtime == "xla":
        require_versions("torch", "torch_xla")
        from tpu_experiments.runtime.xla.device import XlaRuntime

        cache = compile_cache_folder(config, process=process)
        return XlaRuntime(
            config.hw,
            sharding=config.sharding,
            on_recompile=config.trainer.on_recompile,
            compile_cache=cache,
            trace_every=trace_interval(config),
        )
    if config.hw.runtime == "torchtpu":
        require_versions(*TORCHTPU, of=TORCHTPU, lock="requirements-torchtpu.lock")
        from tpu_experiments.runtime.tpu.device import TorchTpuRuntime

        cache = compile_cache_folder(config, process=process)
        return TorchTpuRuntime(
            config.hw, sharding=config.sharding, on_recompile=config.trainer.on_recompile, compile_cache=cache
        )
    from tpu_experiments.runtime.eager import EagerRuntime

    # Layers' inputs are sent to the host in operations that wait for them.
    is_recorded = config.hw.cuda_graphs and config.model.remat != "offload"
    return EagerRuntime(replace(config.hw, cuda_graphs=is_recorded))


def _xla_child(index: int, ticket: Ticket, main: Main, config: Config, args: tuple[Any, ...]) -> None:
    die_with(ticket.parent)
    join(ticket, rank=index)
    main(make_runtime(config, process=index), config, *args)


def _spawn_eager(ticket: Ticket, main: Main, config: Config, args: tuple[Any, ...]) -> None:
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    payload = pickle.dumps((main, config, args))
    children = mp.start_processes(
        _eager_child, (ticket, port, payload), nprocs=config.hw.num_devices, join=False, start_method="spawn"
    )
    try:
        while not children.join():
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:  # a child that exited by itself has printed the reason
            sys.exit(error.exit_code)
        raise
    except mp.ProcessRaisedException as error:
        lines = error.msg.strip().splitlines()  # its traceback, whose last line is the exception
        raise RuntimeError(f"process {error.error_index} of {config.hw.num_devices}: {lines[-1]}") from error


def _eager_child(rank: int, ticket: Ticket, port: int, payload: bytes) -> None:
    die_with(ticket.parent)
    join(ticket, rank=rank)
    import torch
    import torch.distributed as dist

    main, config, args = pickle.loads(payload)
    backend = "gloo"
    if config.hw.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)  # nccl's collectives run on the current device, which is 0 in every process
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=config.hw.num_devices)
    try:
        main(make_runtime(config), config, *args)
    except ConfigError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        os._exit(2)
    except Exception as error:
        # The other processes lose their connection and may be reported first, so the cause is logged here.
        write_traceback(error, config=config, process=f"process {rank} of {config.hw.num_devices}, ")
        raise
    finally:
        dist.destroy_process_group()
