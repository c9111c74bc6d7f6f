"""Where two compiled steps differ: estimated time by kind of instruction, loops multiplied out.

    python -m tests.benchmarks.instructions outputs/plans/before outputs/plans/after --rows 20

A kind is what an instruction computes: operands and results of its products, or its results. Takes folders of plans of
one chip's type (task=plan), and prints Markdown: what differs most first, milliseconds of one step on one chip.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from tpu_experiments.planning.hlo.flops import dot_flops
from tpu_experiments.planning.hlo.program import branch_scopes, class_of, fused
from tpu_experiments.planning.hlo.scalars import Scope, trip_count
from tpu_experiments.planning.hlo.text import Instruction, read_module

Kinds = dict[str, list[float]]
"""By kind, how often it runs in a step, and its milliseconds."""


def main() -> None:
    """Print the kinds whose times differ most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--rows", type=int, default=20)
    given = parser.parse_args()
    first, second = kinds_of(given.first), kinds_of(given.second)
    total = [sum(ms for _, ms in kinds.values()) for kinds in (first, second)]
    print(f"{given.first.name}: {total[0]:,.1f} ms, {given.second.name}: {total[1]:,.1f} ms, without kernels\n")
    print("| difference, ms | first: ms | times | second: ms | times | |\n|---|---|---|---|---|---|")
    rows = [(*first.get(kind, [0, 0.0]), *second.get(kind, [0, 0.0]), kind) for kind in {**first, **second}]
    for times, ms, other_times, other_ms, kind in sorted(rows, key=lambda row: -abs(row[3] - row[1]))[: given.rows]:
        print(f"| {other_ms - ms:+,.2f} | {ms:,.2f} | {times:,.0f} | {other_ms:,.2f} | {other_times:,.0f} | {kind} |")


def kinds_of(folder: Path) -> Kinds:
    """Read the training program of a plan."""
    plan = json.loads((folder / "plan.json").read_text())
    fingerprint = next(program["fingerprint"] for program in plan["programs"] if program["name"] == "train")
    module = read_module((folder.parent / "compiled" / fingerprint / "optimized.hlo").read_text())
    cycles: Kinds = defaultdict(lambda: [0.0, 0.0])
    add(cycles, Scope(module, computation=module.entry, argument=lambda number, index: None), times=1)
    per_ms = plan["chip"]["clock_ghz"] * 1e6
    return {kind: [times, count / per_ms] for kind, (times, count) in cycles.items()}


def add(kinds: Kinds, scope: Scope, *, times: int) -> None:
    """Add the instructions of a computation that runs so many times in a step."""
    for instruction in scope.computation.instructions:
        if instruction.estimated_cycles:
            entry = kinds[kind_of(instruction, scope)]
            entry[0] += times
            entry[1] += times * instruction.estimated_cycles
        if instruction.opcode == "while":
            add(kinds, scope.loop_body(instruction), times=times * trip_count(instruction, scope=scope))
        elif instruction.opcode == "conditional":
            for branch in branch_scopes(scope, instruction):
                add(kinds, branch, times=times)
        elif instruction.opcode in {"call", "async-start"}:
            for computation in scope.module.callees(instruction):
                add(kinds, scope.inside(instruction, computation), times=times)


def kind_of(instruction: Instruction, scope: Scope) -> str:
    """Describe what an instruction computes."""
    holders = [(instruction, scope.computation), *fused(instruction, module=scope.module)]
    products = [
        f"{' x '.join(map(str, holder.operand_shapes(held)))} -> {held.shapes[0]}"
        for held, holder in holders
        if dot_flops(held, within=holder)
    ]
    name = class_of({held.opcode for held, _ in holders})
    return f"{name}: {'; '.join(products) or ' '.join(map(str, instruction.shapes))}"


if __name__ == "__main__":
    main()
