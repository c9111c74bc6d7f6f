"""Orders of a slice's chips: which are compiled, and which differences of two programs are told."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.planning.examples import example_plan
from tests.planning.hlo_programs import computation, module
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.planning.compiler import ANSWER, OPTIMIZED, ORDER, PROGRAM, REQUEST, environment
from tpu_experiments.planning.orders import Changed, Order, differences, orders_of
from tpu_experiments.planning.report import plan_json, summary_rows

GROUPS = "replica_groups=[2,4]<=[8]"
STRATEGY = 'backend_config={"strategy":"ring","estimated_cycles":"100"}'
PROGRAM_TEXT = module(
    computation("add", "x = f32[] parameter(0)", "y = f32[] parameter(1)", "ROOT z = f32[] add(%x, %y)"),
    computation(
        "main",
        "a = bf16[64] parameter(0)",
        "b = f32[8] parameter(1)",
        f"g = bf16[256] all-gather(%a), channel_id=1, {GROUPS}, dimensions={{0}}, {STRATEGY}",
        f"s = (bf16[64], f32[8]) all-reduce(%a, %b), channel_id=2, {GROUPS}, to_apply=%add, {STRATEGY}",
        "p = f32[8] collective-permute(%b), channel_id=3, source_target_pairs={{0,1},{1,0}}",
        "m = f32[8] multiply(%b, %b)",
        "ROOT t = (f32[8], f32[8]) tuple(%m, %p)",
        entry=True,
    ),
    num_partitions=8,
)
PRODUCT = """
module @product attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<1024x2048xbf16>, %a: tensor<2048x64xbf16>) -> tensor<2048x64xbf16> {
    %h = stablehlo.dot_general %x, %a, contracting_dims = [1] x [0]
      : (tensor<1024x2048xbf16>, tensor<2048x64xbf16>) -> tensor<1024x64xbf16>
    %g = stablehlo.dot_general %x, %h, contracting_dims = [0] x [0]
      : (tensor<1024x2048xbf16>, tensor<1024x64xbf16>) -> tensor<2048x64xbf16>
    return %g : tensor<2048x64xbf16>
  }
}
"""
SEEDED = {
    "groups": ("[2,4]<=[8], dim", "[2,4]<=[4,2]T(1,0), dim"),
    "dtype of a sum": ("(bf16[64], f32[8]) all-reduce", "(f32[64], f32[8]) all-reduce"),
    "a gather's size": ("bf16[256] all-gather", "bf16[512] all-gather"),
    "kind": ("all-gather(", "all-to-all("),
    "asynchronous": ("f32[8] collective-permute(", "(f32[8], f32[8]) collective-permute-start("),
    "pairs": ("{{0,1},{1,0}}", "{{0,2},{2,0}}"),
    "a sum's function": ("to_apply=%add", "to_apply=%max"),
    "the way": ('"strategy":"ring"', '"strategy":"tree"'),
    "split in two": (
        f"%s = (bf16[64], f32[8]) all-reduce(%a, %b), channel_id=2, {GROUPS}, to_apply=%add",
        f"%s = bf16[64] all-reduce(%a), {GROUPS}, to_apply=%add\n"
        f"  %s2 = f32[8] all-reduce(%b), {GROUPS}, to_apply=%add",
    ),
    "left out": (re.search(r"  %p = .*\n", PROGRAM_TEXT).group(), ""),  # type: ignore[union-attr]
    "another instruction": ("f32[8] multiply(", "f32[8] add("),
}


@pytest.mark.parametrize("seeded", SEEDED)
def test_every_seeded_difference_is_told(seeded: str) -> None:
    before, after = SEEDED[seeded]
    assert before in PROGRAM_TEXT
    changed, rest = differences(PROGRAM_TEXT, PROGRAM_TEXT.replace(before, after, 1))
    assert bool(changed) == (seeded != "another instruction")
    assert bool(rest) == (seeded == "another instruction")
    if seeded in ("a sum's function", "the way"):
        assert [each.only_route for each in changed] == [True]


def test_names_numbers_and_estimates_are_no_difference() -> None:
    other = PROGRAM_TEXT.replace("channel_id=2", "channel_id=9").replace(
        '"estimated_cycles":"100"', '"estimated_cycles":"7"'
    )
    other = re.sub(r"%m\b", "%multiply.3", other)
    assert differences(PROGRAM_TEXT, other) == ((), 0)


def test_values_that_are_copied_are_no_difference() -> None:
    """As the compiler does around a gather that takes another way: 16 copies and tuples of a step of 0.5B."""
    other = PROGRAM_TEXT.replace("%m = f32[8] multiply(%b, %b)", "%c = f32[8] copy(%b)\n  %m = f32[8] multiply(%c, %c)")
    assert other != PROGRAM_TEXT
    assert differences(PROGRAM_TEXT, other) == ((), 0)


def test_orders_are_distinct_and_the_same_each_time() -> None:
    found = orders_of(8, count=20)
    assert found == orders_of(8, count=20)
    assert len(set(found)) == 20
    assert found[0] == tuple(range(8))
    assert all(sorted(order) == list(range(8)) for order in found)
    assert len(orders_of(2, count=9)) == 2


def test_the_plan_names_what_differs() -> None:
    changed = Changed("all-reduce", "bf16[64]", "[2,4]<=[8]", usual=2, other=1, only_route=False)
    plan = replace(example_plan(), orders=(Order((1, 0), (changed,), 3), Order((0, 1), ())))
    lines = [text for _, text in summary_rows(plan)]
    assert "2 other orders of the chips compiled, 1 to another program" in lines
    assert "1, 0: 1 kinds of collectives and 3 other instructions differ" in lines
    assert "  all-reduce of bf16[64] over [2,4]<=[8]: 2 times, now 1" in lines
    rounded = "sums are rounded otherwise there: a run that does not learn may learn in another order"
    assert rounded in lines
    scattered = replace(changed, kind="reduce-scatter")
    assert rounded in [text for _, text in summary_rows(replace(plan, orders=(Order((1, 0), (scattered,)),)))]
    gathered = replace(changed, kind="all-gather", only_route=True)
    lines = [text for _, text in summary_rows(replace(plan, orders=(Order((1, 0), (gathered,)),)))]
    assert "no sum is among them: values are moved as they are, and results are the same" in lines
    assert plan_json(plan)["orders"][0]["changed"][0]["other"] == 1


@pytest.mark.parametrize("with_it", ["task.explore=ladder", "task.method=analytic"])
def test_a_search_and_formulas_compile_no_orders(with_it: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"task.orders=3 with {with_it}; ")):
        composed("task=plan", "hw=v5e8", "task.orders=3", with_it)


def test_the_compiler_is_told_the_order(tmp_path: Path) -> None:
    """A product whose sums are over four chips of eight: ways between the chips depend on where they are."""
    optimized = {}
    for order in (None, (3, 0, 6, 1, 7, 2, 5, 4)):
        folder = tmp_path / str(order)
        folder.mkdir()
        (folder / PROGRAM).write_text(PRODUCT)
        arguments = [{"axes": axes, "alias": None} for axes in ((("data", "fsdp"), None), ("fsdp", None))]
        request = {
            "topology": "v5e:2x4", "num_chips": 8, "mesh": {"data": 2, "fsdp": 4, "tensor": 1}, "num_replicas": 1,
            "form": "stablehlo", "arguments": arguments,
        }  # fmt: skip
        (folder / REQUEST).write_text(json.dumps(request | ({ORDER: order} if order else {})))
        command = [sys.executable, "-m", "tpu_experiments.planning.compiler", str(folder)]
        subprocess.run(command, check=True, env={**os.environ, **environment()}, capture_output=True)
        assert "error" not in json.loads((folder / ANSWER).read_text())
        optimized[order] = (folder / OPTIMIZED).read_text()
    usual, other = optimized.values()
    changed, _ = differences(usual, other)
    assert changed
    assert all(each.only_route for each in changed)
    assert differences(usual, usual) == ((), 0)
