"""HLO programs for the tests: real ones of libtpu 0.0.21 under texts/, and small ones written by hand.

The real ones are whole modules; source positions (and, in windowed_loops, names and memory settings) are taken out.
pallas_loop: x64 `while_loop` of 3 trips over a 512 x 512 product and jax's flash attention, v6e:1x1.
windowed_loops: `scan` over 5 layers x + tanh(x W1) W2 (2048, 4096), parameters and rows over 8 chips of v5e:2x4;
the gathers are folded into loops of products. gather_chain: the same compiled without such loops.
"""

from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
PARAMETER = "  p = (s32[], s32[]) parameter(0)"


def text(name: str) -> str:
    """One of the real texts."""
    return (TEXTS / name).read_text(encoding="utf-8")


def computation(name: str, *lines: str, entry: bool = False) -> str:
    """A computation; operands are written with their percent signs, results without."""
    head = f"{'ENTRY ' if entry else ''}%{name} (p: s32[]) -> s32[] {{"
    body = [line if line.startswith("  ") else f"  {line}" for line in lines]
    return "\n".join([head, *(with_percent(line) for line in body), "}", ""])


def with_percent(line: str) -> str:
    """`  ROOT x = ...` as the printer writes it: `  ROOT %x = ...`."""
    root = "ROOT " if line.startswith("  ROOT ") else ""
    return f"  {root}%{line.removeprefix('  ' + root)}"


def module(*computations: str, num_partitions: int = 1) -> str:
    """A module of these computations; one of them is the entry."""
    return f"HloModule test, is_scheduled=true, num_partitions={num_partitions}\n\n" + "\n".join(computations)


def cost(cycles: int) -> str:
    """A backend_config that holds an estimate."""
    return f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


def counting_loop(*, start: str, step: str, goes_on: str, cycles: int = 10, settings: str = "") -> str:
    """A program with one loop; `step` and `goes_on` are HLO of the counter %i and the bound %n (5)."""
    return module(
        computation("condition", PARAMETER, *elements(), f"ROOT c = pred[] {goes_on}"),
        computation(
            "body", PARAMETER, *elements(), "one = s32[] constant(1)", "two = s32[] constant(2)",
            f"next = s32[] {step}", f"work = f32[8] copy(%i){cost(cycles)}", "ROOT t = (s32[], s32[]) tuple(%next, %n)",
        ),
        computation(
            "main", "seed = s32[] parameter(0)", f"first = s32[] {start}", "limit = s32[] constant(5)",
            "state = (s32[], s32[]) tuple(%first, %limit)",
            f"ROOT loop = (s32[], s32[]) while(%state), condition=%condition, body=%body{settings}",
            entry=True,
        ),
    )  # fmt: skip


def elements() -> list[str]:
    """Counter %i and bound %n out of the loop's state %p."""
    return [f"{name} = s32[] get-tuple-element(%p), index={index}" for index, name in enumerate("in")]
