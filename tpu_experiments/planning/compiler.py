"""The TPU's own compiler on a machine without a TPU; the only file that depends on jax's internals.

    python -m tpu_experiments.planning.compiler FOLDER

reads FOLDER/request.json and FOLDER/program.hlo and writes FOLDER/answer.json and FOLDER/optimized.hlo, and of a
program by TorchTPU what a run loads (runtime/tpu/planned.py). It runs in a separate process: it sets jax's platform and
default device, and where the system kills it for its memory, nothing else ends with it. libtpu contains the compiler;
jax returns a client of it for the name of a topology (as MaxText's train_compile does), and torch_xla's HLO is passed
in as StableHLO.

A request can name another environment (task.libtpu). torch_xla's HLO becomes text here, FOLDER/program.mlir, since jax
0.12 does not read the bytes that jax 0.7.1 writes; then the process goes on as the other environment's Python.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tpu_experiments.config.folders import REPOSITORY
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.patches import mosaic_for_libtpu
from tpu_experiments.runtime.stablehlo import annotated
from tpu_experiments.runtime.tpu import planned

TAKES_MODULE = (0, 10)
"""First jax known whose client compiles a module and no bytes of one (0.10.2, 0.12.0); 0.7.1 is the other way about."""
REQUEST, PROGRAM, ANSWER, OPTIMIZED = "request.json", "program.hlo", "answer.json", "optimized.hlo"
TEXT = "program.mlir"
"""StableHLO as text, for the compiler of another environment."""
ORDER = "order"
"""Key of a request: chips in the order of the program's partitions; absent for the topology's own."""
SPLIT_RESULTS = "split_results"
"""Key of a request: results are sharded as the compiler propagates it; absent where they are whole on each device."""
ENVIRONMENT = "environment"
"""Key of a request: folder of the environment whose libtpu compiles; absent for the one that asks."""
DUMP, ASSIGNMENT = "dump", "*buffer-assignment.txt"
"""Folder that the compiler writes its passes to, removed at the end, and the file with the addresses of buffers."""
TEMPORARIES = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.MULTILINE)
"""An allocation of temporaries in HBM; those in other memories have a color."""


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM per chip, as reported by the compiler."""

    arguments: int
    outputs: int
    aliased: int
    """Part of `outputs` that reuses the buffers of arguments."""
    temporaries: int
    """One allocation, in which buffers that are never held at once share addresses; with its gaps."""
    code: int

    @property
    def total(self) -> int:
        """Bytes that a step holds at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def main(folder: Path) -> None:
    """Compile the program of a request, and write the answer."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.loads((folder / REQUEST).read_text())
    os.environ.update(environment() | libtpu_of_this_environment())
    other = request.get(ENVIRONMENT)
    if other and not Path(other).samefile(sys.prefix):
        (folder / TEXT).write_bytes(_stablehlo_of(request, (folder / PROGRAM).read_bytes()))
        python = python_of(other)
        os.execve(python, [python, "-m", "tpu_experiments.planning.compiler", str(folder)], with_package())
    answer: dict[str, Any] = {"versions": versions(), "stage": "topology"}
    shutil.rmtree(folder / DUMP, ignore_errors=True)  # of a compiler that was killed
    started = time.perf_counter()
    try:
        topology = _topology(request["topology"], num_chips=request["num_chips"])
        answer["stage"] = "program"
        is_text = (folder / TEXT).exists()
        text = (folder / TEXT).read_bytes() if is_text else _stablehlo_of(request, (folder / PROGRAM).read_bytes())
        executable, facts = _compiled(request, text, topology=topology, dump=folder / DUMP)
        memory = asdict(_memory(executable, dump=folder / DUMP))
        if request.get("form") == "stablehlo":  # TorchTPU's: a run can load it
            planned.write(folder, facts=facts, executable=executable.serialize())
        answer["stage"] = "text"
        (folder / OPTIMIZED).write_text(executable.hlo_modules()[0].to_string())
        answer["memory"] = memory
    except Exception as error:  # jaxlib raises one type for all errors of the compiler
        answer["error"] = f"{type(error).__name__}: {error}"
    shutil.rmtree(folder / DUMP, ignore_errors=True)
    answer["seconds"] = time.perf_counter() - started
    unfinished = folder / f"{ANSWER}.{os.getpid()}"
    unfinished.write_text(json.dumps(answer))
    unfinished.replace(folder / ANSWER)


def _end_with(parent: int) -> None:
    """Exit when the parent does: a compiler takes gigabytes and must not outlive the plan that started it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def environment() -> dict[str, str]:
    """Return variables that keep jax off other devices and let several processes load libtpu."""
    return {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def libtpu_of_this_environment() -> dict[str, str]:
    """Return the variable that names the libtpu installed beside this Python.

    torch_xla and torch_tpu set it for their own when they are imported, and a process that they start inherits it.
    """
    found = importlib.util.find_spec("libtpu")
    return {"TPU_LIBRARY_PATH": str(Path(found.origin).with_name("libtpu.so"))} if found and found.origin else {}


def versions() -> dict[str, str]:
    """Return the versions of the packages that an estimate depends on, where they are installed."""
    known = {}
    for name in ("libtpu", "jax", "torch_xla", "torch_tpu", "torch"):
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def python_of(environment: str) -> str:
    """Return the Python of a virtual environment."""
    return str(Path(environment) / "bin" / "python")


def with_package() -> dict[str, str]:
    """Return variables with which another environment's Python finds this package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))}


@functools.cache
def versions_in(environment: str) -> dict[str, str]:
    """Return `versions` of another virtual environment.

    Raises:
        OSError: there is no such environment, or its Python could not be run.
        subprocess.SubprocessError: it ended with an error.
    """
    ask = "import json; from tpu_experiments.planning import compiler; print(json.dumps(compiler.versions()))"
    command = [python_of(environment), "-c", ask]
    answer = subprocess.run(command, env=with_package(), capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _topology(name: str, *, num_chips: int) -> Any:
    from jax.experimental import topologies

    settings: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if num_chips == 1 else {}
    if name.startswith("v4:"):  # by default each of a chip's two cores is a device; a TPU VM runs them as one
        settings["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(topology_name=name, platform="tpu", **settings)


def _stablehlo_of(request: dict[str, Any], program: bytes) -> bytes:
    """Return a request's program as the text of StableHLO."""
    if request.get("form") == "stablehlo":
        return program
    from jax._src.lib import xla_client

    text: str = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(program))
    return text.encode()


def _compiled(request: dict[str, Any], text: bytes, *, topology: Any, dump: Path) -> tuple[Any, planned.Facts]:
    """Return the compiled program, and all that it depends on."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client

    jax.config.update("jax_default_device", topology.devices[0])  # a Pallas kernel is lowered for the default device
    mesh, replicas = Mesh(**request["mesh"]), request["num_replicas"]
    partitions = mesh.num_devices
    order = request.get(ORDER) or range(partitions * replicas)
    options = compiler.get_compile_options(
        num_replicas=replicas,
        num_partitions=partitions,
        device_assignment=np.array([topology.devices[at].id for at in order]).reshape(replicas, partitions),
    )
    options.executable_build_options.use_spmd_partitioning = partitions > 1
    options.executable_build_options.use_shardy_partitioner = False
    written = options.executable_build_options.debug_options  # as compiler_options= of jax.stages.Lowered.compile
    written.xla_dump_to, written.xla_dump_hlo_as_text = str(dump), True
    if request.get(SPLIT_RESULTS):
        options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    devices, client = [topology.devices[at] for at in order], topology.devices[0].client
    arguments, is_run = request["arguments"], request.get("form") == "stablehlo"
    shardings = [mesh.sharding_text(argument["axes"]) for argument in arguments] if partitions > 1 else None
    aliases = {number: each["alias"] for number, each in enumerate(arguments) if each["alias"] is not None}
    with mlir.make_ir_context(), mosaic_for_libtpu():
        module = annotated(text, aliases=aliases, shardings=shardings, has_whole_results=is_run)
        is_new = tuple(map(int, jax.__version__.split(".")[:2])) >= TAKES_MODULE
        given = module if is_new else bytes(mlir.module_to_bytecode(module))
        made = client.compile(given, xla_client.DeviceList(tuple(devices)), options)
    return made, planned.facts_of(text, aliases=aliases, shardings=shardings, replicas=replicas, devices=devices)


def _memory(executable: Any, *, dump: Path) -> Memory:
    """Return a program's memory.

    `temp_size_in_bytes` is larger than its temporaries: libtpu 0.0.21 adds their gaps, which are inside the allocation,
    once more, and takes what only a loop holds for gaps (3.73 GiB as 5.26; tests/benchmarks/LOG.md, Memory counted
    twice). The allocation itself is what the compiler compares with the chip's memory, with the arguments. Where the
    compiler wrote none, the larger number stands.
    """
    stats = executable.get_compiled_memory_stats()
    found = [int(size) for file in dump.glob(ASSIGNMENT) for size in TEMPORARIES.findall(file.read_text())]
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=sum(found) or stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
