"""Try thousands of command lines and hostile files, and count how they end.

    python -m tests.benchmarks.fuzz --cases 5000 --seed 0 --processes 2

Half of the cases are command lines (tests/fuzzing/commands.py), half files (tests/fuzzing/files.py); a case has a
number, and seed and number make it again: `--only 17` runs that one and prints what it said. Every command is run.py's
own from the first line to the last, in a forked child with limits of time and memory (tests/fuzzing/server.py), on
`hw.runtime=eager`. Exit code 1 when a case ended in a traceback, without a word, too late, or with something of the
user's written over.

The bad ones of each line are mended in the next; sweeps and task=resume_check are in the mix from the second line on.
40 minutes for 5,000 cases on 2 cores:

| cases | refused | trained | stopped | traceback | without a word | too long | written over |
|---|---|---|---|---|---|---|---|
| seed 0, 0 to 563, before there was a fuzz | 358 | 173 | 0 | 33 | 0 | 0 | 0 |
| seed 0, 0 to 4,999 | 3,311 | 1,675 | 2 | 10 | 2 | 0 | 0 |
| seed 1, 0 to 2,499 | 1,726 | 769 | 4 | 1 | 0 | 0 | 0 |
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.fuzzing import server
from tests.fuzzing.commands import command_case, given_case
from tests.fuzzing.files import file_case, make_fixtures
from tests.fuzzing.server import FAILINGS, Case, Outcome


def main() -> int:
    """Run them and print the counts."""
    options = _options()
    server.preload()
    base = Path(tempfile.mkdtemp(prefix="fuzz-"))
    fixtures = base / "fixtures"
    if options.only or options.cases:  # command lines that are given read no run
        make_fixtures(fixtures)
    began = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in server.outcomes(_cases(options, fixtures), folder=base / "cases", processes=options.processes):
        counts[outcome.case.kind, outcome.verdict] += 1
        if outcome.verdict in FAILINGS:
            groups[outcome.group].append(outcome)
        if options.only is not None:
            print(outcome.shown)
        if options.verbose:
            print(_line(outcome), flush=True)
    _print(counts, groups, seconds=time.monotonic() - began)
    given = _given(options, fixtures, base)
    totals = _totals(counts)
    if options.json:
        report = {"verdicts": totals, "failings": {g: [o.case.number for o in found] for g, found in groups.items()}}
        report |= {"given": [{"verdict": o.verdict, "code": o.code, "shown": o.shown} for o in given]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if not groups or options.tidy:
        shutil.rmtree(base)
    else:
        print(f"their folders: {base}")
    return int(bool(groups))


def _given(options: argparse.Namespace, fixtures: Path, base: Path) -> list[Outcome]:
    """How the command lines of the file `--given` end, each after the words of the toy run."""
    if options.given is None:
        return []
    lines = json.loads(Path(options.given).read_text())
    cases = [given_case(n, words, fixtures=fixtures, beside=options.beside) for n, words in enumerate(lines)]
    found = server.outcomes(cases, folder=base / "given", processes=options.processes)
    return sorted(found, key=lambda outcome: outcome.case.number)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, nargs="*", help="these cases alone, with all they print")
    parser.add_argument("--kind", help="the cases alone whose kind begins so, for example model")
    parser.add_argument("--given", help="JSON file with a list of command lines, lists of words, to be run as well")
    parser.add_argument("--beside", nargs="*", default=[], help="files that lie in their working folder")
    parser.add_argument("--json", help="file that the counts are written to")
    parser.add_argument("--tidy", action="store_true", help="remove the folders of failed cases as well")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    return parser.parse_args()


def _cases(options: argparse.Namespace, fixtures: Path) -> Iterator[Case]:
    """Those with an even number are command lines, the others files."""
    for number in options.only or range(options.first, options.first + options.cases):
        make = file_case if number % 2 else command_case
        case = make(number, seed=options.seed, fixtures=fixtures)
        if options.kind is None or case.kind.startswith(options.kind):
            yield case


def _totals(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (_, verdict), count in counts.items():
        totals[verdict] += count
    return dict(totals)


def _print(counts: Counter[tuple[str, str]], groups: dict[str, list[Outcome]], *, seconds: float) -> None:
    verdicts = ("refused", "trained", "stopped", *FAILINGS)
    print(f"{'kind':18}" + "".join(f"{verdict:>13}" for verdict in verdicts))
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind:18}" + "".join(f"{counts[kind, verdict]:13}" for verdict in verdicts))
    totals = _totals(counts)
    print(f"{'all':18}" + "".join(f"{totals.get(verdict, 0):13}" for verdict in verdicts))
    print(f"{sum(totals.values())} cases in {seconds:.0f} s")
    for group, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(found)} x {group}")
        for outcome in found[:3]:
            print(f"   {_line(outcome)}")


def _line(outcome: Outcome) -> str:
    said = " | ".join(outcome.case.said)
    return f"{outcome.case.number} {outcome.verdict} {outcome.seconds:.1f} s {outcome.case.kind}: {said!r:.300}"


if __name__ == "__main__":
    sys.exit(main())
