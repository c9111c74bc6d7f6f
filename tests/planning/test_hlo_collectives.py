"""Collectives: bytes, group sizes and overlap of each form."""

import pytest

from tests.planning.hlo_programs import computation, cost, module
from tpu_experiments.planning.hlo.program import read_program
from tpu_experiments.planning.hlo.text import Transfer

GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
WORK = f"w = f32[8] multiply(%b, %b){cost(5)}"
LATE = WORK.replace("w =", "late =")


def collective(*lines: str, before: str = "") -> Transfer:
    """The only collective of a program over 8 chips with arguments %a (bf16[64]) and %b (f32[8])."""
    main = computation("main", "a = bf16[64] parameter(0)", "b = f32[8] parameter(1)", *lines, entry=True)
    (found,) = read_program(module(*([before] if before else []), main, num_partitions=8)).transfers
    return found


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes", "size"),
    [
        (f"ROOT x = bf16[256] all-gather(%a), {GROUPS}, dimensions={{0}}", "all-gather", 512, 4),
        (f"ROOT x = bf16[16] reduce-scatter(%a), {GROUPS}, to_apply=%add", "reduce-scatter", 128, 4),
        ("ROOT x = bf16[64] all-reduce(%a), replica_groups=[4,2]<=[8], to_apply=%add", "all-reduce", 128, 2),
        ("ROOT x = (bf16[64], f32[8]) all-reduce(%a, %b), replica_groups={}, to_apply=%add", "all-reduce", 160, 8),
        ("ROOT x = bf16[64] all-to-all(%a), replica_groups=[1,8]<=[8], dimensions={0}", "all-to-all", 128, 8),
        ("ROOT x = f32[8] collective-permute(%b), source_target_pairs={{0,1},{1,0}}", "collective-permute", 32, 2),
    ],
)
def test_bytes_and_group(line: str, kind: str, num_bytes: int, size: int) -> None:
    assert collective(line) == Transfer(kind, 1, num_bytes, 0, size)


@pytest.mark.parametrize("between", [[], [WORK]])
def test_a_start_and_a_done_with_work_between_overlap(between: list[str]) -> None:
    start = f"s = (bf16[64], bf16[256]) all-gather-start(%a), {GROUPS}, dimensions={{0}}"
    found = collective(start, *between, "ROOT x = bf16[256] all-gather-done(%s)", LATE)
    assert (found.kind, found.count, found.num_bytes) == ("all-gather", 1, 512)
    assert (found.num_overlapped, found.overlapped_bytes) == ((1, 512) if between else (0, 0))


@pytest.mark.parametrize("between", [[], [WORK]])
def test_a_collective_wrapped_in_async_start_counts_once(between: list[str]) -> None:
    inner = computation("inner", "p = bf16[64] parameter(0)", f"ROOT x = bf16[256] all-gather(%p), {GROUPS}")
    lines = ["s = ((bf16[64]), bf16[256]) async-start(%a), calls=%inner", "u = bf16[256] async-update(%s)"]
    lines += [*between, "ROOT d = bf16[256] async-done(%u)", LATE]
    found = collective(*lines, before=inner)
    assert (found.kind, found.count, found.num_bytes, found.num_overlapped) == ("all-gather", 1, 512, len(between))


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter() -> None:
    """As libtpu 0.0.21 writes it (the gradient of an embedding over 8 chips), shortened to these shapes."""
    inner = computation(
        "all-reduce-scatter.1", "p = bf16[64] parameter(0)", "zero = bf16[] constant(0)",
        "pad = bf16[72] pad(%p, %zero), padding=0_8",
        "sum = bf16[72] all-reduce(%pad), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add",
        "id = u32[] partition-id()", "ROOT x = bf16[9] dynamic-slice(%sum, %id), dynamic_slice_sizes={9}",
    )  # fmt: skip
    found = collective("ROOT f = bf16[9] fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1", before=inner)
    assert (found.kind, found.count, found.num_bytes, found.num_overlapped) == ("reduce-scatter", 1, 144, 0)


@pytest.mark.parametrize("between", [[], [WORK]])
def test_a_chain_overlaps_where_work_stands_before_its_end(between: list[str]) -> None:
    """A chain in the form of libtpu 0.0.21: a start, a part beside compute (here without), a done, on one channel."""
    settings = 'backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}'
    gather = f"all-gather(%p), channel_id=7, {GROUPS}, dimensions={{0}}, {settings}"
    parts = [
        computation(name, "p = bf16[64] parameter(0)", f"g = bf16[256] {gather}", f"ROOT x = bf16[256] {end}")
        for name, end in (
            ("start", 'custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
            ("part", "copy(%g)"),
            ("done", 'custom-call(%g), custom_call_target="AsyncCollectiveDone"'),
        )
    ]
    fusion = "bf16[256] fusion(%a), kind=kCustom, calls="
    lines = [f"s = {fusion}%start", f"m = {fusion}%part", *between, f"ROOT d = {fusion}%done", LATE]
    found = collective(*lines, before="\n".join(parts))
    assert (found.kind, found.count, found.num_bytes, found.group_size) == ("all-gather", 1, 512, 4)
    assert found.num_overlapped == len(between)
