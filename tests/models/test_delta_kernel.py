"""The gated delta rule's kernel, its steps interpreted: results and gradients of the plain operations."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch_xla

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.models.families.gated_delta import Rule, over_rows
from tpu_experiments.planning import compiler
from tpu_experiments.planning.hlo.program import read_program
from tpu_experiments.planning.hlo.text import Kernel
from tpu_experiments.planning.timing import Calibration, StepWork, step_time
from tpu_experiments.runtime.kernels import on_xla
from tpu_experiments.runtime.kernels.delta import (
    CYCLES,
    OF_PRODUCTS,
    DeltaCall,
    has_delta_kernel,
    install_delta_kernel,
    schedule_flops,
)
from tpu_experiments.runtime.kernels.delta_rows import arguments_of, lowered

pytestmark = pytest.mark.xla
ROWS, HEADS, WIDTH = 2, 3, 128
KINDS = {"usual": 0.05, "steep": 200.0, "without decay, of one key": 0.0}
"""Largest decay of a token, as a logarithm."""
LENGTHS = {
    "one document": ((384,), (384,)),
    "documents across borders": ((100, 1, 27, 130, 126), (128, 128, 60, 68)),
    "padding": ((200, -184), (5, -379)),
}
"""Documents of both rows; less than 0 is padding."""


@pytest.fixture
def kernel() -> Iterator[None]:
    torch_xla.device()  # before the first backward pass on the CPU
    install_delta_kernel(on_xla.XlaDeltaRule(mesh=Mesh(), flops=OF_PRODUCTS, target="interpreted"))
    yield
    install_delta_kernel(None)


def segments(documents: str) -> torch.Tensor:
    numbered = [[(n, number if n > 0 else 0) for number, n in enumerate(row, 1)] for row in LENGTHS[documents]]
    return torch.stack([torch.cat([torch.full((abs(n),), number) for n, number in row]) for row in numbered]).int()


def inputs(kind: str = "usual", *, tokens: int = 384, rows: int = ROWS, heads: int = HEADS) -> list[torch.Tensor]:
    """Queries, keys, values, logarithms of decays and rates, and the gradient of the output."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(rows, heads, tokens, *shape, generator=generator)

    query, key, value, grad, rate = draw(WIDTH), draw(WIDTH), draw(WIDTH), draw(WIDTH), draw().sigmoid()
    decay = -torch.rand(rows, heads, tokens, generator=generator) * KINDS[kind]
    if not KINDS[kind]:
        key, rate = key[:, :, :1].expand(-1, -1, tokens, -1).contiguous(), torch.ones_like(rate)
    rate[:, 0, ::7] = 0.0
    return [query, key, value, decay, rate, grad]


def computed(given: list[torch.Tensor], segments_BT: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of all inputs, on the CPU."""
    *parts, grad = (tensor.detach() for tensor in given)
    parts = [part.requires_grad_() for part in parts]
    made = over_rows(Rule(*parts), segments_BT)
    (made * grad).sum().backward()
    torch_xla.sync()
    return [tensor.detach().cpu() for tensor in (made, *(part.grad for part in parts))]


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, float]:
    """Largest differences, as shares of the largest value."""
    names = ("output", "query", "key", "value", "decay", "rate")
    pairs = zip(names, found, wanted, strict=True)
    return {name: float((ours - theirs).abs().max() / theirs.abs().max()) for name, ours, theirs in pairs}


@pytest.mark.parametrize("documents", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_has_the_output_and_gradients_of_plain_operations(kernel, kind, documents):
    given, rows = inputs(kind), segments(documents)
    device = torch_xla.device()
    moved = [tensor.to(device) for tensor in given]
    assert has_delta_kernel(moved[0], moved[2])
    found = computed(moved, rows.to(device))
    wanted = computed(given, rows)  # on the host, which has no kernel
    worst = apart(found, wanted)
    if not KINDS[kind]:  # a rate of 1 overwrites the state, and no decay matters
        worst.pop("decay")
    assert worst.pop("output") < 2e-6
    assert max(worst.values()) < (2e-6 if KINDS[kind] else 5e-6), worst


def test_bfloat16_rows_are_as_far_from_exact_ones_as_rounding_them(kernel):
    given, rows = inputs(), segments("documents across borders")
    for place in (0, 1, 2, 5):
        given[place] = given[place].bfloat16()
    device = torch_xla.device()
    found = computed([tensor.to(device) for tensor in given], rows.to(device))
    assert [tensor.dtype for tensor in found[1:4]] == [torch.bfloat16] * 3
    worst = apart(found, computed([tensor.float() for tensor in given], rows))
    assert max(worst.values()) < 2e-2, worst


def test_only_whole_chunks_of_a_tpu_with_heads_of_128_features_have_the_kernel(kernel):
    device = torch_xla.device()
    for tokens, width, has in ((384, 128, True), (380, 128, False), (384, 64, False)):
        query = torch.zeros(1, 1, tokens, width, device=device)
        assert has_delta_kernel(query, query) == has
    assert not has_delta_kernel(torch.zeros(1, 1, 384, 128), torch.zeros(1, 1, 384, 128))
    assert not has_delta_kernel(query, torch.zeros(1, 1, 384, 128, device=device))
    given, rows = inputs(tokens=200), torch.ones(ROWS, 200, dtype=torch.int32)
    found = computed([tensor.to(device) for tensor in given], rows.to(device))
    assert max(apart(found, computed(given, rows)).values()) < 5e-6
    hw = HwConfig(parallel="spmd", num_devices=8)
    assert on_xla.delta_rule_for(hw, mesh=Mesh(fsdp=8), device="CPU") is None
    assert on_xla.delta_rule_for(hw, mesh=Mesh(fsdp=8), device="TPU").mesh.num_devices == 8
    hw.parallel = "spawn"
    assert on_xla.delta_rule_for(hw, mesh=Mesh(fsdp=8), device="tpu").mesh.num_devices == 1


def test_heads_of_a_step_divide_those_of_a_chip():
    sizes = {(16, 1): 8, (16, 4): 4, (12, 1): 6, (30, 1): 6, (7, 1): 7, (6, 4): 6}
    for (heads, tensor), expected in sizes.items():
        call = DeltaCall(2, heads, 256, "bfloat16", Mesh(fsdp=2, tensor=tensor), OF_PRODUCTS)
        assert call.heads_of_step == expected


@pytest.mark.parametrize("preset", ["v6e1", "v5e1"])
def test_a_plan_takes_as_long_for_the_kernels_as_their_cycles(make_config, preset):
    hw = make_config(f"hw={preset}").hw
    call = DeltaCall(4, 16, 2048, "bfloat16", Mesh(), schedule_flops(hw))
    for number, flops in enumerate(call.flops):
        kernel = Kernel("delta", 1, 4 * 16 * 16 * flops, 4 * 16 * 16 * 10 * 2**15, ())
        work = StepWork(0, 0, 1.0, 1, (kernel,))
        time = step_time(work, chip=hw.chip, topology=hw.topology, calibration=Calibration())
        cycles = CYCLES[hw.chip.name][number]
        assert time.kernels_s == pytest.approx(4 * 16 * 16 * cycles / (hw.chip.clock_ghz * 1e9))


def test_rows_and_heads_split_over_devices_have_the_gradients_of_one():
    command = [sys.executable, "-m", "tests.models.split_delta"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    worst = {name: float(apart) for apart, _, name in (line.partition(" ") for line in done.stdout.splitlines())}
    assert len(worst) == 3
    assert max(worst.values()) < 2e-6, worst


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:1x1"])
def test_the_compiler_takes_the_kernels(topology, direction, tmp_path):
    call = DeltaCall(4, 16, 2048, "bfloat16", Mesh(), OF_PRODUCTS)
    arguments = [{"axes": [], "alias": None}] * len(arguments_of(call, direction=direction))
    request = {"topology": topology, "num_chips": 1, "num_replicas": 1, "mesh": {}, "arguments": arguments}
    (tmp_path / compiler.REQUEST).write_text(json.dumps(request))
    (tmp_path / compiler.PROGRAM).write_bytes(lowered(call, direction=direction))
    subprocess.run([sys.executable, "-m", "tpu_experiments.planning.compiler", str(tmp_path)], check=True)
    answer = json.loads((tmp_path / compiler.ANSWER).read_text())
    assert "error" not in answer, answer["error"]
    (kernel,) = read_program((tmp_path / compiler.OPTIMIZED).read_text()).kernels
    assert (kernel.name, kernel.flops) == (f"delta_{direction}", 1024 * OF_PRODUCTS[direction == "backward"])
