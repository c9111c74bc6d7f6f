"""The TPU's compiler in processes of their own: what it refuses, what is remembered, and what of jax it needs."""

import importlib
import logging
import os
import signal
import sysconfig
import threading
import time
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning import oom
from tpu_experiments.planning.compiled import Compiled, Compilers
from tpu_experiments.planning.oom import OutOfMemory
from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.xla.tracing import TracingRuntime

pytestmark = pytest.mark.xla
HW = composed("hw=v6e1").hw
# Where planning/compiler.py reaches into jax, which promises none of it from one release to the next.
INSIDE_JAX = {
    "jax.experimental.topologies": ["get_topology_desc"],
    "jax._src.compiler": ["get_compile_options"],
    "jax._src.tpu_custom_call": ["get_ir_version"],
    "jax._src.interpreters.mlir": ["make_ir_context", "module_to_bytecode"],
    "jax._src.lib.mlir": [
        f"ir.{name}" for name in ("Module", "IntegerType", "StringAttr", "IntegerAttr", "DictAttr", "ArrayAttr")
    ],
    "jax._src.lib": [
        f"xla_client.{name}" for name in ("DeviceList", "XlaComputation", "_xla.mlir.xla_computation_to_mlir_module")
    ],
}


@pytest.fixture(scope="module")
def program() -> Lowered:
    """One addition."""
    import torch

    config = composed("hw=v6e1")
    runtime = TracingRuntime(config.hw, sharding=config.sharding)
    batch = {"ids": torch.empty(8, 128, dtype=torch.int32, device="meta")}
    return runtime.lower(lambda sent: sent["ids"] + 1, name="train", batch=batch, rows_dim=0)


def compiled(program: Lowered, *, hw: HwConfig, folder: Path) -> Compiled:
    with Compilers(1) as compilers:
        return compilers.submit(program, hw=hw, folder=str(folder)).result()


def refusal(program: Lowered, *, hw: HwConfig, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        compiled(program, hw=hw, folder=folder)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(folder.glob("*/answer.json")), "only answers are remembered"
    return str(caught.value)


def test_an_answer_is_remembered(program: Lowered, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first, second = (compiled(program, hw=HW, folder=tmp_path) for _ in range(2))
    assert ["from the cache" in line for line in caplog.messages if ": compiled in" in line] == [False, True]
    assert first.memory == second.memory
    assert first.memory is not None
    assert first.memory.arguments == 8 * 128 * 4
    assert first.out_of_memory is None
    assert "ENTRY" in second.optimized_hlo()
    assert [file.name for file in sorted(second.folder.iterdir())] == [
        "answer.json",
        "optimized.hlo",
        "program.hlo",
        "request.json",
    ]


def test_what_a_killed_compiler_leaves_is_not_read(program: Lowered, tmp_path: Path) -> None:
    first = compiled(program, hw=HW, folder=tmp_path)
    (first.folder / "answer.json").unlink()
    (first.folder / "dump").mkdir()
    (first.folder / "dump" / "x-buffer-assignment.txt").write_text("allocation 7: size 1048576, preallocated-temp:\n")
    assert compiled(program, hw=HW, folder=tmp_path).memory == first.memory
    assert not (first.folder / "dump").exists()


def other_environment(folder: Path) -> str:
    """A virtual environment of its own with the packages of this one."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "other.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder)


def test_another_environment_compiles(
    program: Lowered, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As torch_xla sets it: the other environment would load this one's compiler and call it by its own version.
    (tmp_path / "libtpu.so").write_text("no library")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    folder = other_environment(tmp_path / "other")
    with Compilers(1, libtpu=folder) as compilers:
        found = compilers.submit(program, hw=HW, folder=str(tmp_path / "plans")).result()
    with caplog.at_level(logging.INFO):
        own = compiled(program, hw=HW, folder=tmp_path / "plans")
    assert "from the cache" not in caplog.text
    assert found.memory == own.memory
    assert found.folder != own.folder
    assert (found.folder / "program.mlir").read_text().startswith(("module", "#loc"))
    assert found.versions == own.versions


def test_an_unknown_topology_is_one_sentence(program: Lowered, tmp_path: Path) -> None:
    said = refusal(program, hw=replace(HW, topology="v9e:1x1"), folder=tmp_path)
    assert said.startswith("hw.topology=v9e:1x1; the TPU compiler has no such slice of 1 chips: ")
    assert "Invalid TPU external name: TPU v9e; write GENERATION:SIDExSIDE" in said


def test_an_unknown_flag_is_one_sentence(program: Lowered, tmp_path: Path) -> None:
    said = refusal(program, hw=replace(HW, libtpu_flags=["--xla_tpu_nonsense=1"]), folder=tmp_path)
    assert said.startswith("hw.libtpu_flags; libtpu knows no flag 'xla_tpu_nonsense' and ends at once")


def test_a_killed_compiler_is_one_sentence(program: Lowered, tmp_path: Path) -> None:
    compilers = Compilers(1)

    def kill() -> None:
        while not compilers.running:
            time.sleep(0.01)
        os.kill(next(iter(compilers.running)).pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with (
        compilers,
        pytest.raises(ConfigError, match=r"compilation of train of 8x128 for v6e:1x1 was killed, as a mach"),
    ):
        compilers.submit(program, hw=HW, folder=str(tmp_path)).result()
    assert compiled(program, hw=HW, folder=tmp_path).memory is not None, "the same command goes on"


def test_no_compiler_outlives_a_plan_that_is_stopped(program: Lowered, tmp_path: Path) -> None:
    futures = []

    def stopped() -> None:
        with Compilers(1) as compilers:
            for hlo in (program.module, program.module + b" "):
                futures.append(compilers.submit(replace(program, module=hlo), hw=HW, folder=str(tmp_path)))
            while not compilers.running:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert isinstance(futures[0].exception(), ConfigError)
    assert futures[1].cancelled()


def test_faults_of_the_compiler_are_one_sentence_each() -> None:
    kernel = OutOfMemory("vmem", 0.05, 0.03, (), "")
    said = {
        "vmem": oom.kernel_too_large(kernel, what="train of 1x4x8"),
        "internal": oom.refused_program("XlaRuntimeError: INTERNAL: Mosaic failed\nmore", what="train of 1x4x8"),
        "text": oom.unread_program("arity\nmore", versions={"libtpu": "0.0.52", "jax": "0.7.1"}, what="train of 1x4x8"),
        "crash": oom.compiler_ended(-signal.SIGSEGV, stderr="", what="train of 1x4x8"),
        "chips": oom.too_many_chips(HW, num_there=4),
        "silent": oom.compiler_ended(3, stderr="TPU worker noise\n", what="train of 1x4x8"),
    }
    assert all(len(str(error).splitlines()) == 1 for error in said.values())
    assert "takes 52,429 KiB of vmem in one kernel and 31,457 KiB are there" in str(said["vmem"])
    assert "refused train of 1x4x8: INTERNAL: Mosaic failed; nothing" in str(said["internal"])
    assert "libtpu 0.0.52 compiled train of 1x4x8, and jax 0.7.1 of the same environment cannot" in str(said["text"])
    assert "crashed (SIGSEGV)" in str(said["crash"])
    assert "ended with exit code 3: silent" in str(said["silent"])


@pytest.mark.parametrize("module", INSIDE_JAX)
def test_what_the_compiler_needs_of_jax_is_there(module: str) -> None:
    found = importlib.import_module(module)
    for path in INSIDE_JAX[module]:
        at = found
        for name in path.split("."):
            at = getattr(at, name, None)
            assert at is not None, (
                f"{module} has no {path}; planning/compiler.py is written against jax 0.7.1 and uses it to compile "
                "without a device: find its new place, or pin jax"
            )
