"""Plugin of pytest: which lines of the package each test file executes, for tests.benchmarks.random_mutants.

    LINE_MAP=FOLDER pytest -p tests.benchmarks.line_map ...

A process of pytest writes `FOLDER/<pid>.jsonl`, a line for each test file that it has left: its name, seconds, tests
that failed, and the lines by source file. Commands that tests start as processes of their own are not seen.
"""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PREFIX = f"{REPOSITORY}/tpu_experiments/"
FOLDER = Path(os.environ["LINE_MAP"])


class FileRecord:
    """What one test file has done so far."""

    def __init__(self, name: str) -> None:
        self.name, self.begun = name, time.monotonic()
        self.failed: list[str] = []
        self.lines: dict[str, set[int]] = defaultdict(set)

    def write(self) -> None:
        """Append the record to this process's file."""
        lines = {name.removeprefix(f"{REPOSITORY}/"): sorted(found) for name, found in self.lines.items()}
        record = {"test": self.name, "seconds": time.monotonic() - self.begun, "failed": self.failed, "lines": lines}
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


_now = FileRecord("")


def _calls(frame: FrameType, event: str, argument: Any) -> Any:
    return _lines if frame.f_code.co_filename.startswith(PREFIX) else None


def _lines(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        _now.lines[frame.f_code.co_filename].add(frame.f_lineno)
    return _lines


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace the test with its fixtures."""
    global _now
    name = item.nodeid.partition("::")[0]
    if name != _now.name:
        if _now.name:
            _now.write()
        _now = FileRecord(name)
    threading.settrace(_calls)
    sys.settrace(_calls)
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what fails without a defect."""
    if report.failed:
        _now.failed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write the record of the last file."""
    if _now.name:
        _now.write()
