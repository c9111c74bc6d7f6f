"""What TorchTPU lowers, executed on the CPU through XLA's client, computes what plain torch does.

These run in the environment of launch/requirements-torchtpu.lock: `pytest -m torchtpu`.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.config.composing import composed, composed_as_typed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.kernels.contraction import contraction
from tpu_experiments.runtime.kernels.integers import int8_product
from tpu_experiments.runtime.ops import Folding, Loop, python_loop

if find_spec("torch_tpu") is None:
    pytest.skip("needs torch_tpu, in an environment of its own (launch/README.md)", allow_module_level=True)

import jax

from tpu_experiments.runtime.base import UnexpectedProgram
from tpu_experiments.runtime.host_copies import host_copy, on_host
from tpu_experiments.runtime.lowered import Argument, Lowered
from tpu_experiments.runtime.tpu import planned
from tpu_experiments.runtime.tpu.buffers import BUFFERS, Buffers, array_of
from tpu_experiments.runtime.tpu.compiling import Layout, _compiled
from tpu_experiments.runtime.tpu.device import TorchTpuRuntime
from tpu_experiments.runtime.tpu.tracing import TracingRuntime, as_function_of, function_of, load, running_sum
from tpu_experiments.tasks.plan import programs

# torch_tpu warns that its names are experimental, and of a memory allocator that is not loaded.
pytestmark = [pytest.mark.torchtpu, pytest.mark.filterwarnings("ignore::UserWarning")]
STEPS, LEARNING_RATE = 5, 1e-3
REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"))


class HostRuntime(TracingRuntime):
    """The same runtime with tensors of the host, whose numbers depend on their names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = torch.device("cpu")
        self.loop: Loop = python_loop
        self.folding = Folding(python_loop)

    def place(self, tensor: Tensor, *, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        made = torch.randn(tensor.shape, generator=generator) * 0.2  # smaller ones have gradients near rounding
        if name.endswith("norm.weight"):
            made = 1 + made
        if "/" in name:  # optimizer state
            made = torch.zeros(tensor.shape)
        made = made.to(tensor.dtype)
        self.placed.append((name, made))
        return made


def executed(lowered: Lowered) -> Callable[[Sequence[Mapping[str, Tensor]]], list[list[Tensor]]]:
    """The program on devices of the CPU: maps each process's arguments by name to its results."""
    import jax

    text = lowered.module.decode()
    count = max(lowered.num_replicas, lowered.mesh.num_devices)
    devices = jax.devices("cpu")[:count]
    assert len(devices) == count
    if lowered.num_replicas > 1:
        return on_each(text, lowered.arguments, devices)
    layout = Layout(lowered.mesh, devices)
    compiled: list[Any] = []

    def run(values: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
        arrays = [array_of(values[0][a.name], device=layout.of(a.axes)) for a in lowered.arguments]
        if not compiled:
            compiled.append(layout.executable_of(text, aliases={}, arrays=arrays))
        return [[torch.from_numpy(np.array(found)) for found in compiled[0](arrays)]]

    return run


def on_each(
    text: str, arguments: Sequence[Argument], devices: Sequence[Any]
) -> Callable[[Sequence[Mapping[str, Tensor]]], list[list[Tensor]]]:
    """A program that every device runs with arguments of its own, as a process a chip does."""
    import jax

    program = _compiled(text, aliases={}, devices=devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("chips",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def run(values: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
        given = []
        for argument in arguments:
            parts = [array_of(own[argument.name], device=to) for own, to in zip(values, devices, strict=True)]
            given.append(jax.make_array_from_single_device_arrays(argument.shape, everywhere, parts))
        found = program.execute_sharded(given).disassemble_into_single_device_arrays()
        return [[torch.from_numpy(np.array(parts[chip])) for parts in found] for chip in range(len(devices))]

    return run


def batch_of(like: Mapping[str, Tensor], *, step: int, vocab_size: int) -> dict[str, Tensor]:
    """A batch whose rows hold two documents, with targets everywhere."""
    generator = torch.Generator().manual_seed(step)
    made: dict[str, Tensor] = {}
    for name, tensor in like.items():
        length = tensor.shape[-1] if tensor.ndim else 1
        places = torch.arange(length, dtype=torch.int32)
        if name == "ids":
            made[name] = torch.randint(3, vocab_size, tensor.shape, generator=generator, dtype=torch.int32)
        elif name == "segments":
            made[name] = (1 + (places >= length // 2).int()).expand(tensor.shape).contiguous()
        elif name == "positions":
            made[name] = (places % (length // 2)).expand(tensor.shape).contiguous()
        elif tensor.dtype == torch.int32:
            made[name] = torch.ones(tensor.shape, dtype=torch.int32)
        else:
            made[name] = torch.full(tensor.shape, LEARNING_RATE if name == "lr" else 1.0)
    return made


FLOAT32 = ("model.size=tiny", "model.dtype=float32")


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=tiny", "lora.dropout=0.1"),
        ("model=tiny", "model.stack=unrolled", "trainer.micro_batch_rows=2"),
        ("model=gemma3_270m", "lora.dropout=0.1", *FLOAT32),
        ("model=qwen05b", *FLOAT32),
        ("model=tiny", "hw=v6e4", "hw.parallel=spawn"),
        ("model=tiny", "hw=v6e4", "sharding=replicated"),
        ("model=tiny", "hw=v6e4", "sharding=fsdp", "lora.dropout=0.1"),
        ("model=tiny", "hw=v6e4", "sharding=fsdp", "lora=none"),
        ("model=tiny", "hw=v6e4", "sharding=fsdp_tensor", "sharding.mesh.tensor=2"),
        ("model=qwen05b", "hw=v6e4", "sharding=hsdp", "model.stack=unrolled", *FLOAT32),
    ],
    ids=[
        "folded, dropout",
        "unrolled, micro-batches",
        "Gemma 3, dropout",
        "Qwen2",
        "four processes",
        "four chips, replicated",
        "four chips, fsdp, dropout",
        "four chips, fsdp, all weights trained",
        "two by two chips, fsdp and tensor",
        "two by two chips, hsdp",
    ],
)
def test_five_steps_are_those_of_plain_torch(overrides: tuple[str, ...]) -> None:
    import jax

    if not jax._src.xla_bridge.backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", 4)
    shape = ("trainer.seq_len=64", "trainer.global_batch_rows=4", "data=sample_text", "curriculum=single")
    words = ("task=plan", "hw=v6e1", "hw.runtime=torchtpu", "model.attention=sdpa", *shape, "model.init=random")
    chosen = {word.partition("=")[0]: word for word in (*words, *overrides)}  # a group is given once
    config = composed(*chosen.values())
    planned = programs.planned_trainer(config, TracingRuntime(config.hw, sharding=config.sharding))
    planned.build()
    geometry = programs.shape_of(planned.inputs.stages[0], runtime=planned.runtime)
    lowered = programs.lowered_step(planned, shape=geometry)
    compute = executed(lowered)
    single = composed(*{**chosen, "hw": "hw=v6e1", "hw.parallel": "hw.parallel=inline"}.values())
    host = programs.planned_trainer(single, HostRuntime(single.hw, sharding=single.sharding))
    host.build()
    values = {name: tensor.detach() for name, tensor in host.runtime.placed}
    whole = programs.shape_of(host.inputs.stages[0], runtime=host.runtime)
    like = programs.batch_like(whole, trainer=host) | programs.added_like(host)
    rows = {f"batch/{name}": 1 for name, tensor in like.items() if tensor.ndim > 1}
    parameters, state = host.parameters, host.state
    for step in range(STEPS):
        batch = batch_of(like, step=step, vocab_size=300)
        given = {**values, **{f"batch/{name}": tensor for name, tensor in batch.items()}}
        count = lowered.num_replicas
        split = {name: t.chunk(count, dim=1) if name in rows else [t] * count for name, t in given.items()}
        chips = compute([{name: parts[chip] for name, parts in split.items()} for chip in range(count)])
        parameters, state, report = host.step(parameters, state, batch)
        renewed = {**parameters, **{f"{n}/{slot}": t for n, slots in state.items() for slot, t in slots.items()}}
        for found in chips:
            for name, ours in zip(renewed, found, strict=False):
                theirs = renewed[name].detach()
                is_far = ~torch.isclose(ours, theirs, rtol=1e-5, atol=1e-5)
                # Adam divides a gradient by its size: one at rounding (1e-8) decides a step of a learning rate.
                assert is_far.sum() <= (0 if "/" in name else ours.numel() / 200), (
                    f"{name}, step {step}: {int(is_far.sum())} numbers differ"
                )
                assert (ours - theirs).abs().max() <= 2 * LEARNING_RATE
                values[name] = theirs
            losses = [t for t in found[len(renewed) :] if t.ndim == 0]
            assert any(torch.isclose(loss, report.loss.detach(), rtol=1e-5) for loss in losses)


@pytest.mark.slow
def test_offloaded_layers_keep_their_inputs_in_the_hosts_memory(tmp_path: Path) -> None:
    tiny = ("model=mistral7b", "model.size=tiny", "model.tiny_arch.num_hidden_layers=2", "model.remat=offload")
    rows = ("data=sample_text", "trainer.seq_len=256", "trainer.micro_batch_rows=1", "trainer.global_batch_rows=8")
    done = run(tmp_path, "task=plan", "task.programs=train", "hw=v6e8", "hw.runtime=torchtpu", "name=x", *tiny, *rows)
    assert done.returncode == 0, done.stderr[-3000:]
    (optimized,) = (tmp_path / "plans" / "compiled").glob("*/optimized.hlo")
    # Space 5 is the host's memory: a buffer of two layers, each with one row's input on every chip.
    found = r"bf16\[2,1,256,64\]\{\S*S\(5\)\} custom-call\(\), custom_call_target=\"AllocateBuffer\""
    assert re.search(found, optimized.read_text())


SMOKE = ("debug=smoke", "lora.dropout=0.1")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of run.py in this environment."""
    flags = [word for word in words if word.startswith("-")]
    settings = [f"output_dir={folder}", f"prepare.folder={folder / 'prepared'}", *(w for w in words if w not in flags)]
    command = [sys.executable, "run.py", *flags, *settings]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


def records_of(folder: Path) -> dict[tuple[int, str], float]:
    """Losses, norms of gradients and accuracies of a run by step and name."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name.startswith(("train/loss", "train/grad_norm", "eval/"))
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three runs; 508 s beside compilations
def test_a_run_trains_as_in_plain_torch(tmp_path: Path) -> None:
    kept = f"hw.compile_cache={tmp_path / 'programs'}"
    for runtime in ("eager", "torchtpu"):
        done = run(tmp_path, *SMOKE, kept, f"hw.runtime={runtime}", f"name={runtime}")
        assert done.returncode == 0, done.stderr[-3000:]
    assert "4 compiled, 0 after warm-up; of the compile cache 0 hits, 4 misses" in done.stdout
    again = run(tmp_path, *SMOKE, kept, "hw.runtime=torchtpu", "name=again")
    assert "0 compiled, 0 after warm-up; of the compile cache 4 hits, 0 misses" in again.stdout
    assert records_of(tmp_path / "again") == records_of(tmp_path / "torchtpu")
    plain, ours = (records_of(tmp_path / runtime) for runtime in ("eager", "torchtpu"))
    assert ours.keys() == plain.keys()
    assert len(ours) > 10
    for name, value in plain.items():
        assert ours[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_int8_times_int8_trains_as_in_plain_torch(tmp_path: Path) -> None:
    words = ("debug=smoke", "model.base=int8", "model.base_activations=int8")
    for runtime in ("eager", "torchtpu"):
        done = run(tmp_path, *words, f"hw.runtime={runtime}", f"name={runtime}")
        assert done.returncode == 0, done.stderr[-3000:]
    plain, ours = (records_of(tmp_path / runtime) for runtime in ("eager", "torchtpu"))
    assert ours.keys() == plain.keys()
    for (step, name), value in plain.items():
        if "loss" in name or "norm" in name:  # an input between two integers falls on either side of a half
            assert ours[step, name] == pytest.approx(value, rel=1e-3 if "loss" in name else 1e-2), (step, name)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", RECIPES)
def test_every_recipe_trains_as_in_plain_torch(experiment: str, tmp_path: Path) -> None:
    words = ["debug=smoke", "hw=cpu", "sharding=replicated", f"experiment={experiment}"]
    for runtime in ("eager", "torchtpu"):
        done = run(tmp_path, *words, f"hw.runtime={runtime}", f"name={runtime}")
        assert done.returncode == 0, done.stderr[-3000:]
    plain, ours = (records_of(tmp_path / runtime) for runtime in ("eager", "torchtpu"))
    assert ours.keys() == plain.keys()
    # A number between two integers falls on either side of a half: 1.6e-3 of a norm at most.
    allowed = 1e-2 if experiment == "bitnet_pretrain" else 1e-5
    for (step, name), value in plain.items():  # perplexities and their bounds are powers of losses
        assert ours[step, name] == pytest.approx(value, rel=allowed if "loss" in name else 10 * allowed), (step, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("hw.parallel=spawn", "hw.num_devices=2", "lora.dropout=0.1"),
        ("hw.parallel=spmd", "hw.num_devices=4", "sharding=fsdp", "lora=none"),
    ],
    ids=["two processes", "four devices of one, all weights split and trained"],
)
def test_several_devices_train_as_one_in_plain_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    on_one = ("hw.runtime=eager", *(word for word in words if not word.startswith(("hw.", "sharding"))))
    for name, chosen in (("one", on_one), ("two", ("hw.runtime=torchtpu", *words))):
        done = run(tmp_path, "debug=smoke", *chosen, f"name={name}")
        assert done.returncode == 0, done.stderr[-3000:]
    plain, ours = (records_of(tmp_path / name) for name in ("one", "two"))
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert ours[name] == pytest.approx(value, rel=1e-5), name


STRUCK = '''
import os, signal
from tpu_experiments.training.trainer import Trainer


class Struck(Trainer):
    """Kills the second host behind step 5, if it is told to."""

    def between_steps(self, stage, *, last):
        if os.environ.get("STRIKE") and self.runtime.rank == 1 and self.progress.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        super().between_steps(stage, last=last)
'''
SLICE = (
    "debug=smoke", "model=tiny", "data=[sample_text]", "lora=none", "sharding=fsdp", "hw.num_devices=4",
    "hw.parallel=spmd", "trainer.max_stage_steps=6", "trainer.log_every_steps=1", "trainer.eval_every_steps=6",
    "checkpoint.every_steps=2",
    "hw.runtime=torchtpu", "plugins=[struck]", "trainer._target_=struck.Struck", "name=run",
)  # fmt: skip


@pytest.mark.slow
def test_two_hosts_killed_and_resumed_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with two devices each, over which XLA splits all weights; and one host goes on with their run."""
    (tmp_path / "struck.py").write_text(STRUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def on_two_hosts(folder: Path, **more: str) -> list[int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2", **more}
        command = [sys.executable, "run.py", *SLICE, "hw.num_hosts=2", f"output_dir={folder}"]
        started = [
            subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | place | {"RANK": str(rank)}) for rank in range(2)
        ]
        return [host.wait(timeout=600) for host in started]

    together, alone, elastic = tmp_path / "together", tmp_path / "alone", tmp_path / "elastic"
    assert on_two_hosts(together, STRIKE="1") == [1, -signal.SIGKILL]
    last = together / "run" / "checkpoints" / "step_00000004"
    files = {path.name for path in last.glob("*.safetensors")}
    assert files == {
        f"host-0{rank}-of-02.{kind}.safetensors" for rank in (0, 1) for kind in ("optimizer", "parameters")
    }
    shutil.copytree(together, elastic)
    assert on_two_hosts(together) == [0, 0]
    for folder in (alone, elastic):
        done = run(folder, *SLICE)
        assert done.returncode == 0, done.stderr[-3000:]
    expected = records_of(alone / "run")
    for folder in (together, elastic):
        found = records_of(folder / "run")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4), name


def test_values_come_from_programs_alone() -> None:
    buffers = Buffers()
    tensor = buffers.stands_for(np.arange(6.0, dtype=np.float32), like=torch.empty(2, 3))
    assert nn.Parameter(tensor) in buffers
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of \(2, 3\) was changed outside a program"):
        buffers[tensor]
    buffers.accept(tensor)
    assert buffers[tensor].sum() == 15
    with pytest.raises(RuntimeError, match=r"a tensor of \(2, 3\) was made outside a program"):
        buffers[tensor + 1]
    del tensor
    buffers.sweep()
    assert not buffers._arrays


def made(config: Any) -> TorchTpuRuntime:
    return TorchTpuRuntime(config.hw, sharding=config.sharding, on_recompile="error")


def test_a_program_writes_in_place_and_keeps_no_old_values() -> None:
    runtime = made(composed("hw=cpu", "hw.runtime=torchtpu"))
    held = {"x": runtime.place(torch.arange(4.0), name="x")}
    base = runtime.place(torch.full((4,), 10.0), name="base")

    def step(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        total = (held["x"] * batch["ids"]).sum()
        held["x"].copy_(held["x"] + base)
        return {"total": total}

    program = runtime.program(step, name="add", held=lambda: held)
    runtime.expect({"add": {(4,)}})
    totals, sizes = [], []
    for number in range(4):
        batch = runtime.put({"ids": torch.full((4,), float(number))}, rows_dim=0)
        totals.append(float(on_host(program(batch)["total"])))
        runtime.place(torch.zeros(1), name="")  # placing frees what is gone
        sizes.append(len(BUFFERS._arrays))
    # 0 + 1 + 2 + 3, and 40 more in every step
    assert totals == [0.0, 46.0, 2 * 86.0, 3 * 126.0]
    assert host_copy(held["x"]).tolist() == [40.0, 41.0, 42.0, 43.0]
    assert sizes[1:] == sizes[1:2] * 3
    assert runtime.counters().num_compiles == 1
    held["x"] = runtime.place(torch.zeros(4), name="x")  # as a fresh optimizer replaces its state
    program(runtime.put({"ids": torch.ones(4)}, rows_dim=0))
    assert host_copy(held["x"]).tolist() == [10.0] * 4
    with pytest.raises(UnexpectedProgram, match=r"program add would be compiled again: ids was 4 float32 and is 8"):
        program(runtime.put({"ids": torch.ones(8)}, rows_dim=0))
    whole = runtime.place(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), name="y")
    assert torch.equal(host_copy(whole.T[1:]), torch.tensor([[1, 4], [2, 5]], dtype=torch.bfloat16))


def test_a_number_that_python_computes_anew_is_refused() -> None:
    runtime, calls = made(composed("hw=cpu", "hw.runtime=torchtpu")), []

    def grows(batch: Mapping[str, Tensor]) -> Tensor:
        return batch["ids"] * (2.5 + len(calls))

    program, batch = runtime.program(grows, name="grow"), runtime.put({"ids": torch.ones(4)}, rows_dim=0)
    assert on_host(program(batch)).tolist() == [2.5] * 4
    calls.append(None)
    with pytest.raises(UnexpectedProgram, match=r"program grow holds a value that Python .*2\.5.* became .*3\.5"):
        program(batch)


def test_a_program_that_reads_what_it_wrote_is_refused() -> None:
    held = torch.ones(3, device="meta")
    other = held.detach()

    def writes(_: Any) -> list[Tensor]:
        held.copy_(held + 1)
        return [other * 2]

    with pytest.raises(RuntimeError, match="reads a tensor after writing it"):
        function_of(writes, {"held/x": held}, known=lambda _: False)


def test_draws_of_the_generator_are_refused() -> None:
    x = torch.ones(3, device="meta")
    with pytest.raises(ConfigError, match=r"draws by torch's own generator \(aten\..*set it to 0"):
        function_of(lambda _: [nn.functional.dropout(x, 0.5)], {"batch/x": x}, known=lambda _: False)
    config = composed("task=plan", "hw=v6e1", "hw.runtime=torchtpu")
    planning = TracingRuntime(config.hw, sharding=config.sharding)
    with pytest.raises(ConfigError, match=r"draws by torch's own generator"):
        planning.lower(lambda batch: nn.functional.dropout(batch["x"], 0.5), name="x", batch={"x": x}, rows_dim=0)


def test_an_operator_that_is_not_lowered_yet_is_refused() -> None:
    @torch.library.custom_op("tpu_experiments::of_tomorrow", mutates_args=())
    def of_tomorrow(x: Tensor) -> Tensor:
        return x.clone()

    of_tomorrow.register_fake(torch.empty_like)
    x = torch.empty(8, 16, device="meta")
    graph = make_fx(lambda tensors: of_tomorrow(tensors[0]))([x])
    with pytest.raises(ConfigError, match=r"hw\.runtime=torchtpu; the program calls tpu_experiments\.of_tomorrow"):
        as_function_of(graph, [("x", x)])


def test_products_of_int8_are_those_of_plain_torch() -> None:
    runtime = made(composed("hw=cpu", "hw.runtime=torchtpu"))
    x = torch.arange(-60, 60, dtype=torch.int32).reshape(6, 20)
    weight = torch.arange(-80, 80, dtype=torch.int32).reshape(8, 20)
    held = runtime.place(weight.to(torch.int8), name="weight")

    def products(batch: Mapping[str, Tensor]) -> list[Tensor]:
        given = batch["x"].to(torch.int8)
        return [int8_product(given, held, 1), int8_product(given[:, :8].contiguous(), held, 0)]

    found = [on_host(t) for t in runtime.program(products, name="products")(runtime.put({"x": x}, rows_dim=0))]
    assert {tensor.dtype for tensor in found} == {torch.int32}
    assert torch.equal(found[0], x @ weight.T)
    assert torch.equal(found[1], x[:, :8] @ weight)


def test_running_sums_are_those_of_plain_torch() -> None:
    x = torch.arange(2 * 13 * 3).reshape(2, 13, 3) % 7
    for dim in range(-3, 3):
        assert torch.equal(running_sum(x, dim), x.cumsum(dim))
    assert running_sum(x, 1, dtype=torch.int32).dtype == torch.int32
    assert running_sum(x > 3, 1).dtype == torch.int64
    torch.testing.assert_close(running_sum(x / 7, 1), (x / 7).cumsum(1))


def test_a_number_made_into_a_tensor_is_a_constant() -> None:
    load()
    x = torch.empty(4, device="meta")
    graph = make_fx(lambda tensors: [tensors[0] * torch.sqrt(torch.tensor(6.25))])([x])
    read = as_function_of(graph, [("x", x)])
    assert [name for name, _ in read] == ["x"]
    assert "scalar_tensor" in graph.code
    assert "6.25" in graph.code
    whole = torch.ones(4)  # a tensor with values that were not placed stays refused
    graph = make_fx(lambda tensors: [tensors[0] + whole.to("meta")])([x])
    with pytest.raises(RuntimeError, match=r"reads a tensor of \(4,\) that was not placed"):
        as_function_of(graph, [("x", x)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_several_dimensions_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    runtime = made(composed("hw=cpu", "hw.runtime=torchtpu"))
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5) % 7 - 3
    weight = torch.arange(6 * 4 * 5.0).reshape(6, 4, 5) % 5 - 2
    held = runtime.place(weight.to(dtype), name="weight")

    def products(batch: Mapping[str, Tensor]) -> list[Tensor]:
        given = batch["x"].to(dtype)
        out = contraction(given, held, [2, 3], [1, 2])
        return [out, contraction(out, held, [2], [0]), contraction(out, given, [0, 1], [0, 1])]

    found = [on_host(t) for t in runtime.program(products, name="products")(runtime.put({"x": x}, rows_dim=0))]
    out = torch.einsum("bthd,mhd->btm", x, weight)
    exact = [out, torch.einsum("btm,mhd->bthd", out, weight), torch.einsum("btm,bthd->mhd", out, x)]
    assert {tensor.dtype for tensor in found} == {dtype}
    for ours, plain in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.float(), plain, rtol=0.0 if dtype == torch.float32 else 1e-2, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [("hw=v6e1", "lora.dropout=0.1", "sample.temperature=0.5"), ("hw=v6e8", "sharding=fsdp", "lora=none")],
    ids=["one chip", "eight chips, all weights split and trained"],
)
def test_a_run_on_a_tpu_finds_what_its_plan_compiled(machine: tuple[str, ...], tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    rows = ("data=sample_text", "trainer.seq_len=256", "trainer.micro_batch_rows=1", "trainer.global_batch_rows=8")
    words = ("model=mistral7b", "model.size=tiny", "model.init=random", "hw.runtime=torchtpu", *rows, *machine)
    planning = run(tmp_path, "task=plan", f"hw.compile_cache={programs}", "name=x", *words)
    assert planning.returncode == 0, planning.stderr[-3000:]
    assert "programs: 3 of 3 compiled for the run" in planning.stdout
    command = [sys.executable, "-m", "tests.runtime.asked_programs", str(programs), *words]
    asked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert asked.returncode == 0, asked.stderr[-3000:]
    assert asked.stdout.splitlines()[-3:] == ["train: planned", "evaluate: planned", "sample: planned"]


def compile_here(config: Config, folder: Path) -> None:
    """Compile a run's programs for the CPU, which task=plan does not, and keep them as it does."""
    (chip,) = jax.devices("cpu")[:1]
    for number, program in enumerate(programs.trace_run(config, which="all").programs):
        aliases = {n: argument.alias for n, argument in enumerate(program.arguments) if argument.alias is not None}
        text = program.module.decode()
        made = _compiled(text, aliases=aliases, devices=[chip])
        place = folder / "compiled" / str(number)
        place.mkdir(parents=True)
        facts = planned.facts_of(text, aliases=aliases, shardings=None, replicas=1, devices=[chip])
        planned.write(place, facts=facts, executable=chip.client.serialize_executable(made))
        planned.keep(place, folder=folder)


@pytest.mark.slow
def test_a_run_loads_the_programs_of_its_plan(tmp_path: Path) -> None:
    words, kept = ("hw.runtime=torchtpu", *SMOKE), f"hw.compile_cache={tmp_path / 'programs'}"
    compile_here(composed_as_typed(*words), tmp_path / "programs")
    done = run(tmp_path, *words, kept, "name=loads")
    assert "0 compiled, 0 after warm-up; of the compile cache 4 hits, 0 misses" in done.stdout, done.stderr[-3000:]
    again = run(tmp_path, *words, "name=compiles")
    assert "4 compiled, 0 after warm-up" in again.stdout, again.stderr[-3000:]
    assert records_of(tmp_path / "loads") == records_of(tmp_path / "compiles")


@pytest.mark.slow
def test_several_runs_in_one_program_load_its_step(tmp_path: Path) -> None:
    words, kept = ("hw.runtime=torchtpu", *SMOKE), f"hw.compile_cache={tmp_path / 'programs'}"
    compile_here(composed_as_typed("task=plan", "task.pack=2", *words), tmp_path / "programs")
    done = run(tmp_path, "-m", "lora.alpha=8,16", "sweeping.pack=2", *words, kept, "name=sweep")
    assert "3 compiled, 0 after warm-up" in done.stdout, done.stderr[-3000:]  # 4, and its own evaluation and samples
