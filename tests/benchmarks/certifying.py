"""Faults seeded into ten families, and the checks of a certificate that find each.

    python -m tests.benchmarks.certifying RESULTS.jsonl [--only "FAULT,..."] [--families llama,...]
    python -m tests.benchmarks.certifying RESULTS.jsonl --table

Each fault of tests/tasks/certify_faults.py is put into the product's code while a family is certified, in a process of
its own. A cell names the checks that failed or refused. `=` is a family in which the fault changes nothing, such as a
model without biases, windows or a tied head: every figure is then the same to the last digit as without the fault.
`missed` is one that changes a figure, and that no check found.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir

from tests.config.composing import CONF, composition
from tests.jobs import of_tiny_job
from tests.tasks.certify_faults import FAMILIES, FAULTS, verdicts_with
from tpu_experiments.config.compose import to_config
from tpu_experiments.config.schema import Config

CLEAN = "no fault"
SECONDS = 240.0


def make_config(*words: str) -> Config:
    """Compose a config of the tiny job."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(composition(["hw.num_threads=1", *of_tiny_job(words)]))


def in_child(fault: str, family: str, answers: Connection) -> None:
    """Certify one family with one fault, and send verdicts and figures."""
    warnings.simplefilter("ignore")
    import torch
    import torch_xla

    torch.set_num_threads(1)
    torch_xla.device()  # before the first backward pass
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        os.environ["XDG_CACHE_HOME"] = place
        if fault != CLEAN:
            FAULTS[fault](patch)
        found = verdicts_with(family, make_config, Path(place))
    answers.send({name: [check.verdict, check.said, check.figures] for name, check in found.items()})


def certified(fault: str, family: str) -> dict[str, Any]:
    """Certify one family with one fault in a process of its own."""
    context = multiprocessing.get_context("fork")
    answers, sent = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(fault, family, sent))
    began = time.monotonic()
    child.start()
    sent.close()
    try:
        found = answers.recv() if answers.poll(SECONDS) else {"process": ["failed", f"more than {SECONDS:.0f} s", {}]}
    except EOFError:
        child.join()
        found = {"process": ["failed", f"ended with {child.exitcode}", {}]}
    child.kill()
    child.join()
    seconds = round(time.monotonic() - began, 1)
    return {"fault": fault, "family": family, "checks": found, "seconds": seconds}


def outcome(found: Mapping[str, Any], *, clean: Mapping[str, Any]) -> str:
    """Return the checks that found a fault, `=` where it changed nothing, or `missed`."""
    wrong = [name for name, (verdict, *_) in found.items() if verdict in ("failed", "refused")]
    return ", ".join(wrong) or ("=" if found == clean else "missed")


def table(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line of each fault, with a cell for each family."""
    families = [family for family in FAMILIES if (CLEAN, family) in results]
    yield f"| fault | {' | '.join(f'`{family}`' for family in families)} |"
    yield "|---|" + "---|" * len(families)
    for fault in FAULTS:
        cells = [
            outcome(results[fault, family], clean=results[CLEAN, family]) if (fault, family) in results else ""
            for family in families
        ]
        yield f"| {fault} | {' | '.join(cells)} |"


def main() -> None:
    """Certify what the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="faults, with commas; certified again")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--table", action="store_true", help="print what there is")
    args = parser.parse_args()
    lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
    results = {(each["fault"], each["family"]): each["checks"] for each in map(json.loads, lines)}
    only = [fault for fault in args.only.split(",") if fault]
    pairs = [(fault, family) for fault in (only or [CLEAN, *FAULTS]) for family in args.families.split(",")]
    for fault, family in () if args.table else pairs:
        if (fault, family) in results and not only:
            continue
        result = certified(fault, family)
        results[fault, family] = result["checks"]
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        clean = results.get((CLEAN, family), {})
        print(f"{fault:36} {family:12} {outcome(result['checks'], clean=clean)}  ({result['seconds']} s)", flush=True)
    faulty = {pair: found for pair, found in results.items() if pair[0] != CLEAN}
    kinds = (outcome(found, clean=results.get((CLEAN, pair[1]), {})) for pair, found in faulty.items())
    counts = Counter({"=": "nothing changed", "missed": "missed"}.get(kind, "found") for kind in kinds)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    print(*table(results), sep="\n")


if __name__ == "__main__":
    main()
