"""Commands of run.py, one after the other in one process, with what each said, its exit code and what it had loaded."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LOOP = """
import contextlib, io, json, runpy, sys
from hydra.core.global_hydra import GlobalHydra
for line in sys.stdin:
    sys.argv = ["run.py", *json.loads(line)]
    said, code = io.StringIO(), 0
    GlobalHydra.instance().clear()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path("run.py", run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    names = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps([code, said.getvalue(), sorted(names)]), flush=True)
"""


@dataclass(frozen=True)
class Said:
    """What a command said, with its exit code."""

    code: int
    text: str
    loaded: frozenset[str]
    """Packages loaded by this command or one before it."""


def say(commands: Mapping[str, Sequence[str]]) -> dict[str, Said]:
    """Run the commands from the repository's root; a fresh process for each would take a second of CPU."""
    ended = subprocess.run(
        [sys.executable, "-c", LOOP],
        input="".join(json.dumps([*words]) + "\n" for words in commands.values()),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = (json.loads(line) for line in ended.stdout.splitlines())
    return {
        name: Said(code, text, frozenset(loaded)) for name, (code, text, loaded) in zip(commands, answers, strict=True)
    }
