"""Changes seeded into the collectives of a compiled step, and how many of them `planning/orders.py` tells.

    python run.py task=plan ... task.orders=4
    python -m tests.benchmarks.orders outputs/plans/compiled/*/optimized.hlo

Every collective of the first program gets another kind, dtype, groups and strategy, and is left out, one change at a
time; a change that is not told is printed. The other programs are compared with the first: those that are the same
letter for letter must have no difference.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tpu_experiments.planning.hlo.collectives import KINDS
from tpu_experiments.planning.orders import GROUPS, differences

CALL = re.compile(rf" ({'|'.join(sorted(KINDS, key=len, reverse=True))})(-start)?\(")
DTYPES = {"bf16": "f32", "f32": "bf16", "s32": "u32"}
OTHER_GROUPS = "{{0,7},{1,6},{2,5},{3,4}}"


def seeded(line: str) -> Iterator[tuple[str, str]]:
    """Yield what is changed, and the changed line."""
    kind = CALL.search(line)
    assert kind is not None
    other = "all-gather" if kind[1] == "all-to-all" else "all-to-all"
    yield "kind", line.replace(kind[0], kind[0].replace(kind[1], other), 1)
    yield "left out", ""
    if groups := re.search(GROUPS, line):
        yield "groups", line.replace(groups[1], OTHER_GROUPS, 1)
    if dtype := re.search(r"\b(bf16|f32|s32)\[", line):
        yield "dtype", line.replace(dtype[0], f"{DTYPES[dtype[1]]}[", 1)
    if strategy := re.search(r'"strategy":"(\w+)"', line):
        yield "strategy", line.replace(strategy[0], '"strategy":"another"', 1)


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", type=Path)
    usual, *others = (path.read_text() for path in parser.parse_args().programs)
    for number, other in enumerate(others, start=1):
        changed, rest = differences(usual, other)
        print(
            f"program {number}: same text {usual == other}, {len(changed)} kinds of collectives, {rest} others differ"
        )
    lines, tried, told = usual.splitlines(), Counter[str](), Counter[str]()
    for at, line in enumerate(lines):
        for name, new in seeded(line) if CALL.search(line) else ():
            if new == line:
                continue
            changed, _ = differences(usual, "\n".join([*lines[:at], *filter(None, [new]), *lines[at + 1 :]]))
            tried[name] += 1
            told[name] += bool(changed)
            if not changed:
                print(f"not told: {name}: {line.strip():.200}")
    print(", ".join(f"{name} {told[name]} of {tried[name]}" for name in tried))
    print(f"{told.total()} of {tried.total()} told")


if __name__ == "__main__":
    main()
