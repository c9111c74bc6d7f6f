"""Defects drawn from the code by a seed: which test finds each, and which none does.

    python -m tests.benchmarks.random_mutants map OUTPUT [TESTS ...]        # which test file executes which lines; once
    python -m tests.benchmarks.random_mutants draw OUTPUT [COUNT [SEED]]    # prints the mutants alone
    python -m tests.benchmarks.random_mutants run OUTPUT [COUNT [SEED]]     # prints a Markdown table

A mutant is one change of one expression or statement: a comparison moved or turned round, + for -, a number off by
one, a condition negated, `and` for `or`, a statement left out, an argument dropped, None returned. Subjects take turns;
in each, every place is as likely as another. Texts of errors and of the log are left out. The test files that execute
the changed statement run in a copy under OUTPUT, the quickest first, until one fails; then those outside the map that
import its module, and last those that start commands as processes, whose lines the map does not see. What has run is
kept in OUTPUT/mutants.jsonl, and is not run again.
"""

import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.mutations import FAILED, REPOSITORY, copied

PACKAGE = REPOSITORY / "tpu_experiments"
SUBJECTS = {
    "state": (
        "checkpoint/state.py",
        "checkpoint/progress.py",
        "checkpoint/pieces.py",
        "optim/*.py",
        "training/step.py",
    ),
    "order": ("data/batches.py", "data/replay.py", "training/batches.py", "training/epochs.py", "data/steps/epochs.py"),
    "schedule": ("optim/schedules.py", "training/length.py"),
    "metrics": ("metrics/*.py", "training/evaluation.py"),
    "export": ("export/*.py",),
    "saver": ("checkpoint/saver.py", "checkpoint/store.py", "checkpoint/retention.py", "checkpoint/reading.py"),
    "readers": ("data/reading/*.py",),
    "packs": ("training/pack.py", "models/adapters/packed.py", "data/steps/pack.py"),
}
MINUTES = 20
"""Longest time for the tests of one mutant; a mutant that makes them wait is found by their own limit."""
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In,  # codespell:ignore notin
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
QUIET = ("log", "warnings", "logger")
"""Names whose calls only write texts."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    subject: str
    file: str
    line: int
    """First line of the changed statement."""
    end_line: int
    old: str
    new: str
    start: int
    """Byte in the file at which `old` begins."""

    @property
    def shown(self) -> str:
        """`file:line old -> new`, in a line."""
        old, new = (" ".join(text.split()).replace("|", "\\|")[:90] for text in (self.old, self.new))
        return f"`{self.file.removeprefix('tpu_experiments/')}:{self.line}` `{old}` -> `{new}`"


class Places(ast.NodeVisitor):
    """Collector of the places of a file that can be changed, with the statement of each."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.stmt, ast.AST, ast.AST]] = []
        self._statement: ast.stmt | None = None

    def visit(self, node: ast.AST) -> None:
        """Visit a node and what is in it, less texts and annotations."""
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
            return
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_quiet(node.value)):
            return
        former = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        if self._statement is not None:
            self.found += [(self._statement, node, new) for new in changes(node)]
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self._statement = former


def _is_quiet(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in QUIET


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may stand for this one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        yield ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(OTHER[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
        yield ast.Call(node.func, node.args, node.keywords[:-1])
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(None)
    elif isinstance(node, ast.Expr | ast.AugAssign) or (isinstance(node, ast.Assign) and node.col_offset > 0):
        yield ast.Pass()


def mutants_of(file: Path, *, subject: str) -> list[Mutant]:
    """Return every mutant of a file."""
    source = file.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    places = Places()
    places.visit(ast.parse(source))
    found = []
    for statement, node, new in places.found:
        start = begins[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = begins[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        text = ast.unparse(ast.fix_missing_locations(new))
        text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Call) else text
        name = file.relative_to(REPOSITORY).as_posix()
        lines = statement.lineno, last_line(statement)
        found.append(Mutant(subject, name, *lines, source[start:end].decode(), text, start))
    return [mutant for mutant in found if mutant.old != mutant.new]


def last_line(statement: ast.stmt) -> int:
    """Return the last line of a statement, of a compound one the last of its head."""
    body = getattr(statement, "body", None)
    return max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno


def drawn(count: int, *, seed: int) -> list[Mutant]:
    """Draw mutants, the subjects in turn."""
    rng = random.Random(seed)
    pools = {}
    for subject, patterns in SUBJECTS.items():
        files = sorted({file for pattern in patterns for file in PACKAGE.glob(pattern)})
        pools[subject] = [mutant for file in files for mutant in mutants_of(file, subject=subject)]
    names = list(pools)
    chosen: list[Mutant] = []
    while len(chosen) < count:
        mutant = rng.choice(pools[names[len(chosen) % len(names)]])
        if mutant not in chosen:
            chosen.append(mutant)
    return chosen


def make_map(output: Path, tests: list[str]) -> None:
    """Run the tests once and note which file executes which lines."""
    tree = copied(output)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.benchmarks.line_map", "-p", "no:cacheprovider"]
    command += ["-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile", *tests]
    subprocess.run(command, cwd=tree, env=os.environ | {"LINE_MAP": str(output / "lines")}, check=False)


def records(output: Path) -> list[dict[str, object]]:
    """Return the map's records, the quickest test file first."""
    files = sorted((output / "lines").glob("*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    if not found:
        raise SystemExit(f"{output}/lines; there is no map; make it first: ... map {output}")
    return sorted(found, key=lambda record: record["seconds"])


def tests_of(mutant: Mutant, known: list[dict], *, tree: Path) -> list[str]:  # type: ignore[type-arg]
    """Return the test files that execute the changed statement, then those that the map cannot know.

    Of the latter, first the files outside the map that import the changed module, then those that start commands.
    """
    lines = set(range(mutant.line, mutant.end_line + 1))
    of_file = [record for record in known if mutant.file in record["lines"]]
    # Lines of a module's or a class's body run at the import, before any test.
    hits = [each["test"] for each in of_file if lines.intersection(each["lines"][mutant.file])]
    hits = hits or [each["test"] for each in of_file]
    mapped, module = {record["test"] for record in known}, mutant.file.removesuffix(".py").replace("/", ".")
    others = [path for path in sorted((tree / "tests").rglob("test_*.py")) if _name(path, tree) not in mapped]
    unmapped = [path for path in others if f"from {module} import" in path.read_text()]
    folder = mutant.file.split("/")[1]
    starting = [
        path for path in sorted((tree / "tests" / folder).rglob("test_*.py")) if "training.runs" in path.read_text()
    ]
    starting += sorted((tree / "tests/training").glob("test_resume*.py"))
    return list(dict.fromkeys([*hits, *(_name(path, tree) for path in [*unmapped, *starting])]))


def _name(path: Path, tree: Path) -> str:
    return path.relative_to(tree).as_posix()


def finder(mutant: Mutant, tests: list[str], *, tree: Path, failing: set[str]) -> str | None:
    """Name the first test that fails with the mutant in place; the file is as before afterwards."""
    file = tree / mutant.file
    source = file.read_bytes()
    end = mutant.start + len(mutant.old.encode())
    assert source[mutant.start : end].decode() == mutant.old, "the code has changed since the mutants were drawn"
    file.write_bytes(source[: mutant.start] + mutant.new.encode() + source[end:])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--timeout=300", "-p", "no:cacheprovider"]
    command += [f"--deselect={name}" for name in sorted(failing)]
    try:
        done = subprocess.run([*command, *tests], cwd=tree, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return f"none within {MINUTES} minutes"
    finally:
        file.write_bytes(source)
    if done.returncode == 0:
        return None
    found = FAILED.search(done.stdout)
    return found[1] if found else (done.stdout + done.stderr).strip().splitlines()[-1]


def main() -> None:
    what, output, *rest = sys.argv[1:]
    folder = Path(output).resolve()
    if what == "map":
        make_map(folder, rest)
        return
    chosen = drawn(int((rest or ["40"])[0]), seed=int((rest[1:] or ["0"])[0]))
    if what == "draw":
        print("\n".join(f"{mutant.subject}: {mutant.shown}" for mutant in chosen))
        return
    known, tree, kept = records(folder), copied(folder), folder / "mutants.jsonl"
    failing = {name for record in known for name in record["failed"]}  # type: ignore[attr-defined]
    done = dict(map(json.loads, kept.read_text().splitlines())) if kept.exists() else {}
    print("| subject | mutant | found by |\n| --- | --- | --- |", flush=True)
    missed = 0
    for mutant in chosen:
        if mutant.shown not in done:
            done[mutant.shown] = finder(mutant, tests_of(mutant, known, tree=tree), tree=tree, failing=failing)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([mutant.shown, done[mutant.shown]]) + "\n")
        found = done[mutant.shown]
        missed += found is None
        print(f"| {mutant.subject} | {mutant.shown} | {f'`{found}`' if found else 'MISSED'} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} are found")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
