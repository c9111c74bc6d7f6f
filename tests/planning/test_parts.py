"""Parts of a step told from sizes: one operation of each kind, written as libtpu 0.0.21 writes it."""

import pytest

from tests.config.composing import composed
from tests.planning.hlo_programs import computation, cost, counting_loop, module, text
from tpu_experiments.models.adapters.padded import PADDING
from tpu_experiments.models.huggingface import config_from_arch
from tpu_experiments.planning.hlo.flops import dot_flops
from tpu_experiments.planning.hlo.parts import PARTS, Widths, part_of_product, product_sizes, seconds_by_part, widths_of
from tpu_experiments.planning.hlo.program import read_program
from tpu_experiments.planning.hlo.text import read_module
from tpu_experiments.planning.timing import StepTime

ARCH = config_from_arch(composed("model=mistral7b").model.arch)
# Rows as long as keys are wide (1,024): the sizes alone do not tell a row from a feature.
MISTRAL = widths_of(
    ARCH, ranks={16}, seq_len=1024, trained={32 * 16 * 4096, 32 * 16 * 1024, 32 * 16 * 14336, 16 * 4096}, splits={8}
)


def part(*inner: str, operands: str, result: str, in_loop: bool = False, widths: Widths = MISTRAL) -> str:
    """The part of a fusion; `inner` are its instructions after the parameters %p0, %p1, ..."""
    shapes = operands.split("; ")
    read = [f"p{n} = {shape} parameter({n})" for n, shape in enumerate(shapes)]
    fusion = computation("fused", *read, *inner)
    given = [f"a{n} = {shape} parameter({n})" for n, shape in enumerate(shapes)]
    names = ", ".join(f"%a{n}" for n in range(len(shapes)))
    call = f"ROOT x = {result} fusion({names}), kind=kLoop, calls=%fused{cost(7)}"
    main = computation("main", *given, call, entry=True)
    if in_loop:
        loop = counting_loop(start="constant(0)", step="add(%i, %one)", goes_on="compare(%i, %n), direction=LT")
        work = f"work = f32[8] copy(%i){cost(10)}"
        assert work in loop
        inside = "\n  ".join([*(f"%{line}" for line in given), "%" + call.removeprefix("ROOT ")])
        whole = loop.replace("%" + work, inside).replace("\n\n", "\n\n" + fusion + "\n", 1)
    else:
        whole = module(fusion, main)
    found = read_program(whole, widths=widths).cycles_by_part
    assert sum(found.values()) == (5 * 7 if in_loop else 7)
    return next(iter(found))


def product(left: str, right: str, result: str, *, contracted: tuple[str, str] = ("2", "1"), batch: str = "") -> str:
    """The part of a fusion around one matrix product."""
    batched = f", lhs_batch_dims={{{batch}}}, rhs_batch_dims={{{batch}}}" if batch else ""
    dims = f"lhs_contracting_dims={{{contracted[0]}}}, rhs_contracting_dims={{{contracted[1]}}}{batched}"
    return part(f"ROOT d = {result} dot(%p0, %p1), {dims}", operands=f"{left}; {right}", result=result)


@pytest.mark.parametrize(
    ("left", "right", "result", "expected"),
    [
        ("bf16[8,1024,4096]", "bf16[14336,4096]", "bf16[8,1024,14336]", "projections"),
        ("bf16[8,1024,4096]", "bf16[1024,4096]", "bf16[8,1024,1024]", "projections"),
        ("bf16[8,1024,512]", "bf16[14336,512]", "bf16[8,1024,14336]", "projections"),  # one chip's share of a weight
        ("bf16[8,1024,4112]", "bf16[14336,4112]", "bf16[8,1024,14336]", "projections"),  # with its adapter
        ("bf16[8,1024,14336]", "bf16[14336,4112]", "bf16[8,1024,4112]", "projections"),
        ("bf16[8,1024,4096]", "bf16[16,4096]", "bf16[8,1024,16]", "adapters"),
        ("bf16[8,1024,16]", "bf16[14336,16]", "bf16[8,1024,14336]", "adapters"),
        ("bf16[8,256,4096]", "bf16[32000,4096]", "bf16[8,256,32000]", "loss"),
        ("bf16[8,256,4096]", "bf16[4000,4096]", "bf16[8,256,4000]", "loss"),
        ("f32[8,1024,4096]", "f32[32,4096]", "f32[8,1024,32]", "attention"),  # a sum over what each head holds
        ("bf16[8,32,1024,128]", "bf16[128,128]", "bf16[8,32,1024,128]", "attention"),  # queries turned
    ],
)
def test_a_product_is_recognised_by_its_edges(left: str, right: str, result: str, expected: str) -> None:
    assert product(left, right, result, contracted=(str(left.count(",")), "1")) == expected


def test_products_of_every_head_are_attention_though_the_rows_are_as_long_as_keys_are_wide() -> None:
    scores = product(
        "bf16[256,1024,128]", "bf16[256,1024,128]", "bf16[256,1024,1024]", contracted=("2", "2"), batch="0"
    )
    assert scores == "attention"


def test_axes_that_were_split_or_merged_change_nothing() -> None:
    computations = read_module(text("gather_chain.hlo")).computations.values()
    sizes = [
        sorted(product_sizes(line, flops=dot_flops(line, within=each), within=each))
        for each in computations
        for line in each.instructions
        if line.opcode == "convolution"
    ]
    # 1,024 rows of a chip and a weight of 2,048 x 4,096 or its transpose, whatever axes the compiler made of them
    assert sizes == [[1, 1024, 2048, 4096]] * 2


def test_a_fusion_belongs_to_its_larger_product() -> None:
    low = "low = bf16[8192,16] dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    wide = "ROOT d = bf16[8192,4096] dot(%p0, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    operands = "bf16[8192,4096]; bf16[16,4096]; bf16[4096,4096]"
    assert part(low, wide, operands=operands, result="bf16[8192,4096]") == "projections"
    assert part(low, operands=operands, result="bf16[8192,16]") == "adapters"


ADAPTER = "f32[32,16,4096]"


@pytest.mark.parametrize(
    ("inner", "operands", "result", "expected"),
    [
        (f"ROOT m = {ADAPTER} multiply(%p0, %p1)", f"{ADAPTER}; f32[]", ADAPTER, "optimizer"),
        ("ROOT m = f32[] reduce(%p0, %p1), dimensions={0,1,2}", f"{ADAPTER}; f32[]", "f32[]", "optimizer"),
        ("ROOT m = bf16[32,16,4096] convert(%p0)", ADAPTER, "bf16[32,16,4096]", "adapters"),
        ("ROOT m = bf16[8,1024,16] negate(%p0)", "bf16[8,1024,16]", "bf16[8,1024,16]", "adapters"),
        ("ROOT m = f32[8,256,32000] exponential(%p0)", "f32[8,256,32000]", "f32[8,256,32000]", "loss"),
        ("ROOT m = bf16[8,1024,4096] gather(%p0, %p1)", "bf16[32000,4096]; s32[8,1024]", "bf16[8,1024,4096]", "other"),
        ("ROOT m = f32[8,32,1024,1024] exponential(%p0)", "f32[8,32,1024,1024]", "f32[8,32,1024,1024]", "attention"),
        ("ROOT m = bf16[8,1024,1024] negate(%p0)", "bf16[8,1024,1024]", "bf16[8,1024,1024]", "other"),  # keys
        ("ROOT m = bf16[8,1024,8,128] transpose(%p0)", "bf16[8,8,1024,128]", "bf16[8,1024,8,128]", "attention"),
        ("ROOT m = bf16[14336,512] slice(%p0)", "bf16[32,14336,512]", "bf16[14336,512]", "projections"),
        ("ROOT m = bf16[8,1024,4096] add(%p0, %p0)", "bf16[8,1024,4096]", "bf16[8,1024,4096]", "other"),
        ("ROOT m = bf16[4096,4096] all-gather(%p0)", "bf16[512,4096]", "bf16[4096,4096]", "collectives"),
    ],
)  # fmt: skip
def test_a_pass_over_memory_is_recognised_by_its_arrays(inner: str, operands: str, result: str, expected: str) -> None:
    assert part(inner, operands=operands, result=result) == expected


def test_a_gradient_laid_into_its_stack_in_a_loop_is_no_optimizer() -> None:
    inner = f"ROOT m = {ADAPTER} dynamic-update-slice(%p0, %p1)"
    assert part(inner, operands=f"{ADAPTER}; f32[1,16,4096]", result=ADAPTER, in_loop=True) == "adapters"


def test_parts_add_up_to_the_step_with_kernels_and_the_network() -> None:
    chip = composed("hw=v6e8").hw.chip
    assert chip is not None
    time = StepTime(1.0, 0.25, 0.5, 0.125, 1.375, "compute", 0.4, 1.0)
    cycles = dict.fromkeys(PARTS, round(chip.clock_ghz * 1e9 / len(PARTS)))
    seconds = seconds_by_part(cycles, time=time, chip=chip)
    assert tuple(seconds) == PARTS
    assert sum(seconds.values()) == pytest.approx(time.uncalibrated_s)
    assert seconds["attention"] == pytest.approx(1 / 7 + 0.25)
    assert seconds["collectives"] == pytest.approx(1 / 7 + 0.125)


def test_joined_adapters_are_adapters() -> None:
    """A of q, k, v as one product, and of gate and up."""
    assert part_of_product((1, 8192, 48, 4096), widths=MISTRAL) == "adapters"
    assert part_of_product((1, 32, 4096, 8192), widths=MISTRAL) == "adapters"
    assert part_of_product((1, 8192, 64, 4096), widths=MISTRAL) != "adapters"


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_a_projection_multiplied_with_its_adapter_is_a_projection(ranks: int) -> None:
    """Its own alone, or those of gate and up, of which one meets zeros."""
    assert part_of_product((1, 8192, 14336, 4096 + 16 * ranks), widths=MISTRAL) == "projections"
    assert part_of_product((1, 8192, 4096 + 16 * ranks, 14336), widths=MISTRAL) == "projections"


def test_a_weight_padded_to_hold_its_adapter_is_a_projection() -> None:
    """Columns or rows of models/adapters/padded.py; also of one chip's share."""
    assert part_of_product((1, 8192, 14336, 4096 + PADDING), widths=MISTRAL) == "projections"
    assert part_of_product((1, 8192, 4096 + PADDING, 14336), widths=MISTRAL) == "projections"
    assert part_of_product((1, 8192, 4096 + PADDING + 128, 14336), widths=MISTRAL) == "attention"


def test_without_adapters_no_product_is_theirs() -> None:
    whole = widths_of(ARCH, ranks=(), seq_len=1024, trained={4096 * 4096}, splits=())
    assert part_of_product((1, 8192, 4096, 4096), widths=whole) == "projections"
    moments = "ROOT m = f32[4096,4096] multiply(%p0, %p0)"
    assert part(moments, operands="f32[4096,4096]", result="f32[4096,4096]", widths=whole) == "optimizer"
