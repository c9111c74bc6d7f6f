"""Run one command of run.py in a forked child, with limits, and judge how it ended.

The parent imports torch and transformers once; a child runs the file run.py itself as `__main__`, in a folder of its
own, so that thousands of commands are affordable. A child that hangs is ended with the processes it started.
"""

import atexit
import contextlib
import gc
import importlib
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tpu_experiments.data.steps import workers

REPOSITORY = Path(__file__).parents[2]
MAX_CPU_SECONDS = 60
MAX_BYTES = 6 * 2**30
"""Private memory of a child."""
REPORTED = re.compile(r"Traceback \(most recent call last\)|a bug in tpu_experiments|Fatal Python error|is used up \(")
OUTPUTS = ("stdout.txt", "stderr.txt")
FAILINGS = ("traceback", "wordless", "too long", "written over")
"""Verdicts that no command may end in."""
PRELOADED = (
    "torch",
    "transformers",
    "transformers.models.mistral.modeling_mistral",
    "pyarrow.parquet",
    "hydra._internal.hydra",
    "tpu_experiments.tasks.train",
    "tpu_experiments.tasks.prepare",
    "tpu_experiments.tasks.generate",
    "tpu_experiments.tasks.evaluate",
    "tpu_experiments.tasks.report",
    "tpu_experiments.tasks.doctor",
    "tpu_experiments.training.trainer",
    "tpu_experiments.optim.adamw",
    "tpu_experiments.loggers.jsonl",
    "tpu_experiments.loggers.console",
    "tpu_experiments.runtime.eager",
)


@dataclass(frozen=True)
class Case:
    """A command line, what is laid into its folder before, and how long it may take."""

    number: int
    kind: str
    arguments: tuple[str, ...]
    """`{tmp}` stands for the case's folder."""
    lay: Callable[[Path], None] = field(default=lambda folder: None)
    """Makes the files that the command reads."""
    guarded: tuple[str, ...] = ()
    """Files and folders below the case's folder that must be the same afterwards."""
    limit_seconds: float = 300.0
    """Of the wall clock; of a core's time it has MAX_CPU_SECONDS, which a busy machine does not shorten."""
    said: list[str] = field(default_factory=list)
    """What is odd about it, in words; of files once they are laid."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    case: Case
    verdict: str
    """`trained`, `refused`, `stopped` (exit code 1 or 75 and a sentence), or one of FAILINGS."""
    code: int
    seconds: float
    shown: str
    """The end of what it printed."""

    @property
    def group(self) -> str:
        """Where a traceback comes from: its exception and the innermost line of this project."""
        frames = re.findall(r'File "[^"]*?/((?:tpu_experiments|tests)/[^"]+|run\.py)", line (\d+)', self.shown)
        raised = re.findall(
            r"^([\w.]+(?:Error|Exception|Interrupt|Exit|Warning|Failed)\b.*)$", self.shown, re.MULTILINE
        )
        inner = [frame for frame in frames if not frame[0].startswith("tests/")]
        place = ":".join(inner[-1]) if inner else "?"
        return f"{self.verdict}: {place}: {(raised or ['?'])[-1][:160]}"


def preload() -> None:
    """Import what every child needs; the only threads are then this one."""
    # Else transformers imports torch_xla, which takes no environment any more afterwards.
    os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"}
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's collector leaves alone what the parent has imported


def outcomes(cases: Iterable[Case], *, folder: Path, processes: int, keeping: bool = False) -> Iterator[Outcome]:
    """Run every case, `processes` at a time; in the order they end. The folders of those that failed stay, or all."""
    running: dict[int, tuple[Case, float, dict[str, bytes]]] = {}
    waiting = iter(cases)
    is_over = False
    while running or not is_over:
        while len(running) < processes and not is_over:
            case = next(waiting, None)
            if case is None:
                is_over = True
                break
            before = _laid(case, folder)
            running[_started(case, folder)] = (case, time.monotonic(), before)
        for pid, (case, began, before) in list(running.items()):
            seconds = time.monotonic() - began
            ended, status = os.waitpid(pid, os.WNOHANG)
            is_late = not ended and seconds > case.limit_seconds
            if is_late:
                os.killpg(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0)
            if ended:
                del running[pid]
                _end_group(pid)
                outcome = _judged(case, folder, status=status, seconds=seconds, is_late=is_late, before=before)
                if outcome.verdict not in FAILINGS and not keeping:
                    shutil.rmtree(place_of(case, folder), ignore_errors=True)
                yield outcome
        time.sleep(0.005)


def place_of(case: Case, folder: Path) -> Path:
    """The folder of a case."""
    return folder / f"{case.number:06d}"


def _laid(case: Case, folder: Path) -> dict[str, bytes]:
    place = place_of(case, folder)
    shutil.rmtree(place, ignore_errors=True)
    (place / "work").mkdir(parents=True)
    case.lay(place)
    return _contents(case, place)


def _contents(case: Case, place: Path) -> dict[str, bytes]:
    files = [p for name in case.guarded for p in [place / name, *(place / name).rglob("*")] if p.is_file()]
    return {str(path): path.read_bytes() for path in files}


def _started(case: Case, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        _run(case, place_of(case, folder))
    finally:
        os._exit(70)


def _run(case: Case, place: Path) -> None:
    """In the child: what `python run.py ARGUMENTS` does, from the first line to the exit hooks."""
    os.setsid()
    os.chdir(place / "work")
    sys.path.insert(0, str(place / "work"))  # plugins lie there
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + MAX_CPU_SECONDS, used + MAX_CPU_SECONDS))
    # The commands read little, and are given no processes: theirs would only import for seconds.
    workers.PRELOADED.clear()
    tempfile.tempdir = None
    for number, name in enumerate(OUTPUTS, start=1):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= {"TMPDIR": str(place / "work"), "HF_HUB_OFFLINE": "1"}
    sys.argv = ["run.py", *(word.replace("{tmp}", str(place)) for word in case.arguments)]
    code = 0
    try:
        runpy.run_path(str(REPOSITORY / "run.py"), run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_group(pid: int) -> None:
    """End what the child left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _judged(
    case: Case, folder: Path, *, status: int, seconds: float, is_late: bool, before: dict[str, bytes]
) -> Outcome:
    place = place_of(case, folder)
    code = os.waitstatus_to_exitcode(status)
    shown = "\n".join((place / name).read_text(errors="replace") for name in OUTPUTS if (place / name).exists())
    log = re.search(r"the log with the traceback is at (.*); attach it", shown)
    if log and Path(log[1]).is_file():
        shown += Path(log[1]).read_text(errors="replace")
    verdict = _verdict(case, code, shown)
    if is_late or code in (-signal.SIGXCPU, -signal.SIGKILL):
        verdict = "too long"
    elif _contents(case, place) != before:
        verdict = "written over"
    return Outcome(case, verdict, code, seconds, shown[-12000:])


def _verdict(case: Case, code: int, shown: str) -> str:
    if REPORTED.search(shown):
        return "traceback"
    if code == 0:
        return "trained"
    has_sentence = re.search(r"^(run\.py: )?error: \S", shown, re.MULTILINE) is not None
    if code == 2 and has_sentence:
        return "refused"
    is_answer = case.kind.startswith("doctor") and code == 1
    return "stopped" if code in (1, 75) and (has_sentence or is_answer) else "wordless"
