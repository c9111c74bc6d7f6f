"""Costs read from HLO: real programs of the TPU compiler, and what each construct counts."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest

from tests.planning.hlo_programs import computation, cost, counting_loop, module, text
from tpu_experiments.planning.compiled import step_work
from tpu_experiments.planning.hlo.program import CLASSES, read_program
from tpu_experiments.planning.hlo.text import read_module


def cycles_by_computation(hlo: str) -> dict[str, int]:
    """Sum of the estimates in each computation, found without the reader under test."""
    sums: dict[str, int] = defaultdict(int)
    name = ""
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line)
        name = head[1] if head else name
        sums[name] += sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', line)))
    return {key: value for key, value in sums.items() if value}


def test_a_split_64_bit_counter_multiplies_its_loop() -> None:
    hlo = text("pallas_loop.hlo")
    program = read_program(hlo)
    entry, body = (
        cycles_by_computation(hlo)[name] for name in ("main.42", "wide.wide.region_0.30.clone.sunk.clone.sunk")
    )
    assert [(loop.trip_count, loop.cycles) for loop in program.loops] == [(3, body)]
    assert program.cycles == entry + 3 * body == sum(program.cycles_by_class.values())
    assert set(program.cycles_by_class) == set(CLASSES)
    assert program.dot_flops == 3 * 2 * (2 * 1024) * 512 * 512


def test_the_bound_is_read_not_guessed() -> None:
    longer = re.sub(r"(%constant\.55 = u32\[\]\S* constant)\(3\)", r"\1(32)", text("pallas_loop.hlo"))
    assert [loop.trip_count for loop in read_program(longer).loops] == [32]


def test_pallas_kernels_are_named_and_measured() -> None:
    (kernel,) = read_program(text("pallas_loop.hlo")).kernels
    assert kernel.name == "_flash_attention_impl"
    assert kernel.count == 3
    assert kernel.operand_shapes == ("bf16[2,4,1024,128]",) * 3
    assert kernel.num_bytes == 4 * 2 * 4 * 1024 * 128 * 2
    # two products of 1024 x 1024 x 128 for 2 x 4 heads, not halved by the causal mask, and the softmax
    assert 0 < (kernel.flops or 0) - 4 * 2 * 4 * 1024 * 1024 * 128 < 0.01 * 4 * 2 * 4 * 1024 * 1024 * 128


def test_random_numbers_and_moves_to_the_host_have_no_cycles_and_are_reported() -> None:
    stack, part = "bf16[2,8,64]{2,1,0:T(8,128)(2,1)S(5)}", "bf16[1,8,64]{2,1,0:T(8,128)(2,1)}"
    lines = (
        "%bits = u32[4,8]{1,0} rng-bit-generator(%state), algorithm=rng_default",
        f"%put = (({stack}, {part}, s32[], s32[]), {stack}, u32[]) dynamic-update-slice-start(%all, %x, %i, %n)",
        f"%take = (({stack}, s32[], s32[]), {part}, u32[]) dynamic-slice-start(%all, %i, %n)",
        "%here = ((bf16[2,8,64]{2,1,0}, s32[]), bf16[1,8,64]{2,1,0}, u32[]) dynamic-slice-start(%other, %i)",
    )
    loop = counting_loop(start="constant(0)", step="add(%i, %one)", goes_on="compare(%i, %n), direction=LT")
    program = read_program(loop.replace("  %next =", "".join(f"  {line}\n" for line in lines) + "  %next ="))
    assert program.cycles == 5 * 10
    assert (program.random_bytes, program.host_bytes) == (5 * 4 * 8 * 4, 5 * 2 * 8 * 64 * 2)
    _, notes = step_work(replace(program, random_bytes=2**30, host_bytes=2**31), model_flops=1.0, tokens=1)
    assert [note.partition(" GiB")[0] for note in notes] == ["1.00", "2.00"]
    assert step_work(replace(program, random_bytes=2**20, host_bytes=0), model_flops=1.0, tokens=1)[1] == ()


def test_loops_of_products_multiply_inside_the_loop_over_layers() -> None:
    hlo = text("windowed_loops.hlo")
    program = read_program(hlo)
    sums = cycles_by_computation(hlo)
    # 8 chips in both directions at once are 4 steps, unrolled by two
    assert [loop.trip_count for loop in program.loops] == [2, 2, 5]
    inner = sums["wide.windowed_dot_general_body_ag.sunk.sunk"] + sums["wide.windowed_dot_general_body_ag.1.sunk"]
    assert program.loops[2].cycles == sums["wide.region_0.26_spmd.sunk"] + 2 * inner
    assert program.cycles == sums["main.46_spmd"] + 5 * program.loops[2].cycles
    assert program.dot_flops == 5 * 2 * (2 * 1024 * 2048 * 4096)
    assert program.cycles_by_class["matmul"] > program.cycles_by_class["reduce"] > 0


def test_permutes_of_a_loop_of_products_are_hidden() -> None:
    by_kind = {each.kind: each for each in read_program(text("windowed_loops.hlo")).transfers}
    ring = by_kind["collective-permute"]
    assert (ring.count, ring.num_overlapped, ring.group_size) == (90, 90, 8)
    assert (
        ring.num_bytes == ring.overlapped_bytes == 90 * 2048 * 4096 // 8 * 2
    )  # each moves one chip's share of a weight
    total = by_kind["all-reduce"]
    assert (total.count, total.num_bytes, total.num_overlapped, total.overlapped_bytes) == (1, 4, 0, 0)


def test_a_chain_of_fusions_around_a_gather_counts_once() -> None:
    program = read_program(text("gather_chain.hlo"))
    gather = next(each for each in program.transfers if each.kind == "all-gather")
    assert (gather.count, gather.num_overlapped, gather.group_size) == (2 * 5, 5, 8)
    assert gather.num_bytes == 2 * 5 * 2048 * 4096 * 2
    assert gather.overlapped_bytes == gather.num_bytes // 2
    assert program.dot_flops == 5 * 2 * (2 * 1024 * 2048 * 4096)


def test_the_way_the_gathers_are_done_leaves_the_work_the_same() -> None:
    looped, chained = (read_program(text(f"{name}.hlo")) for name in ("windowed_loops", "gather_chain"))
    assert looped.dot_flops == chained.dot_flops
    assert looped.cycles != chained.cycles


def test_of_a_conditional_the_costliest_branch_counts() -> None:
    branches = [computation(f"branch{n}", f"ROOT x = f32[8] copy(%p){cost(n)}") for n in (3, 40)]
    fork = "ROOT r = f32[8] conditional(%i, %a, %a), branch_computations={%branch3, %branch40}"
    main = computation("main", "i = s32[] parameter(0)", "a = f32[8] parameter(1)", fork, entry=True)
    assert read_program(module(*branches, main)).cycles == 40


def test_calls_are_followed() -> None:
    called = computation("called", "p = f32[8] parameter(0)", f"ROOT x = f32[8] copy(%p){cost(7)}")
    calls = [f"{name} = f32[8] call(%a), to_apply=%called" for name in ("x", "y", "ROOT z")]
    main = computation("main", "a = f32[8] parameter(0)", *calls, entry=True)
    assert read_program(module(called, main)).cycles == 21


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("ROOT x = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "matmul"),
        ("ROOT x = f32[8,8] gather(%p, %p), slice_sizes={1}", "gather_scatter"),
        ("ROOT x = f32[8] reduce(%p, %p), dimensions={1}, to_apply=%add", "reduce"),
        ("ROOT x = f32[8,8] multiply(%p, %p)", "elementwise"),
        ("ROOT x = f32[8,8] transpose(%p), dimensions={1,0}", "copy"),
        ("ROOT x = f32[8,8] sort(%p), dimensions={1}", "other"),
    ],
)
def test_a_fusion_is_classed_by_what_it_holds(inside: str, expected: str) -> None:
    inner = computation("inner", "p = f32[8,8] parameter(0)", "b = f32[8,8] bitcast(%p)", inside)
    outer = computation("outer", "p = f32[8,8] parameter(0)", "ROOT x = f32[8,8] fusion(%p), kind=kLoop, calls=%inner")
    call = f"ROOT x = f32[8,8] fusion(%a), kind=kLoop, calls=%outer{cost(9)}"
    main = computation("main", "a = f32[8,8] parameter(0)", call, entry=True)
    program = read_program(module(inner, outer, main))
    assert program.cycles_by_class == dict.fromkeys(CLASSES, 0) | {expected: 9}
    assert program.dot_flops == (2 * 8 * 8 * 8 if expected == "matmul" else 0)


def test_a_kernel_without_a_body_keeps_its_target_as_name() -> None:
    call = 'ROOT k = bf16[4] custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"body":"!"}'
    main = computation("main", "a = bf16[8] parameter(0)", call, entry=True)
    (kernel,) = read_program(module(main)).kernels
    assert (kernel.name, kernel.count, kernel.num_bytes, kernel.flops) == ("tpu_custom_call", 1, 16 + 8, None)


def test_the_bytes_of_a_kernel_are_those_that_it_states() -> None:
    stated = '"cost_estimate":{"flops":"640","transcendentals":"3","bytes_accessed":"24"}'
    call = f'ROOT k = bf16[4] custom-call(%a), custom_call_target="tpu_custom_call", backend_config={{{stated}}}'
    main = computation("main", "a = bf16[100,8] parameter(0)", call, entry=True)
    (kernel,) = read_program(module(main)).kernels
    assert (kernel.flops, kernel.num_bytes) == (640, 24)


def test_a_loop_whose_count_is_unknown_is_an_error_that_names_it() -> None:
    hlo = counting_loop(start="copy(%seed)", step="add(%i, %one)", goes_on="compare(%i, %n), direction=LT")
    with pytest.raises(ValueError, match=r"loop=loop; its trip count cannot be determined: condition condition reads"):
        read_program(hlo)


@pytest.mark.parametrize("bad", ["", "HloModule x\n", text("pallas_loop.hlo").replace("ENTRY ", "")])
def test_what_is_no_program_is_an_error(bad: str) -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_program(bad)


def test_a_computation_of_the_sparse_core_ends_where_it_does() -> None:
    """libtpu 0.0.52 names the core behind the closing brace."""
    hlo = text("gather_chain.hlo")
    named = hlo.replace("\n}\n", '\n}, execution_thread="sparsecore"\n', 2)
    assert named != hlo
    assert read_module(named).computations.keys() == read_module(hlo).computations.keys()
