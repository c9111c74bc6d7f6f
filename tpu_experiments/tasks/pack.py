"""task=pack: train several runs of a sweep in one program, each with the folder it would have alone.

A sweep starts it with `sweeping.pack`: it writes the command lines of its points to a folder (training/pack_folder.py),
where this task notes how each has ended.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

from hydra.core.hydra_config import HydraConfig

from tpu_experiments.config.compose import config_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PackTaskConfig
from tpu_experiments.config.trust import pack_problem
from tpu_experiments.loggers.runlog import kept_records, start_run_log
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.processes.faults import ending_of
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.runtime.processes.launch import launch
from tpu_experiments.storage.process import started_seconds
from tpu_experiments.tasks.train import Start, closing_lines, hold, start_of, train_process
from tpu_experiments.training.pack import Pack, Seat
from tpu_experiments.training.pack_folder import PackFolder
from tpu_experiments.training.stop import STOPPED_EXIT_CODE, ending_in_time, parting

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Train the runs; exit code 0 if all have finished, 75 if one can be resumed, 2 if the rest is refused, else 1.

    Raises:
        ConfigError: no folder is named, or it has a command line that is not of this command's sweep.
    """
    assert isinstance(config.task, PackTaskConfig)
    if config.task.points is None:
        raise ConfigError("task.points=null; a sweep starts task=pack and names its folder: -m ... sweeping.pack=auto.")
    place, hosts = PackFolder(config.task.points), Hosts()
    start_run_log(None, rank=0)
    codes, starts, said = {}, [], set[str]()
    given = HydraConfig.get().overrides
    words = [*given.task, *given.hydra]
    for command in place.commands():
        why = pack_problem(command, words)
        if why is not None:
            raise ConfigError(f"task.points={config.task.points}; {why}; a sweep writes that folder itself.")
        own = config_of(command)
        assert own.name is not None
        try:
            start = start_of(own, hosts, arguments=command, said=said)
        except ConfigError as error:
            codes[own.name] = _refused(own, error)
            continue
        if start is None:
            codes[own.name] = 0
        else:
            starts.append(start)
    with ending_in_time(), ExitStack() as stack:
        for start in list(starts):
            try:
                hold(start, hosts, stack)
            except ConfigError as error:
                starts.remove(start)
                codes[start.folder.name] = _refused(start.config, error)
        for name, code in codes.items():
            place.end(name, code)
        if starts:
            first = starts[0].config
            with parting(first.checkpoint.grace_seconds):
                launch(pack_process, first, starts, started_seconds(), config.task.points, codes)
    ends = set(codes.values())
    if ends != {0}:
        sys.exit(STOPPED_EXIT_CODE if STOPPED_EXIT_CODE in ends else 2 if ends <= {0, 2} else 1)


def pack_process(
    runtime: Runtime, _: Config, starts: Sequence[Start], began: float, folder: str, codes: dict[str, int]
) -> None:
    """Train the runs in this process; `codes` receives their exit codes."""
    place, by_name = PackFolder(folder), {start.folder.name: start for start in starts}
    said = set[str]()

    def look(seats: Sequence[Seat]) -> None:
        for seat in seats:
            if seat.trainer is not None and place.is_dropped(seat.name):
                seat.trainer.stop.drop()

    pack = Pack(
        runtime,
        list(by_name),
        loras=[start.config.lora for start in starts],
        look=look,
        began=began,
        kept=kept_records(),
    )
    log.info("%d runs train in one program: %s", len(starts), ", ".join(by_name))

    def main(seat: Seat) -> int:
        code = _code_of(runtime, by_name[seat.name], seat=seat, began=began, said=said)
        codes[seat.name] = code
        place.end(seat.name, code)
        return code

    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        for seat in pack.seats:
            if seat.trainer is not None:
                seat.trainer.stop.request()

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    pack.run(main)


def _code_of(runtime: Runtime, start: Start, *, seat: Seat, began: float, said: set[str]) -> int:
    """Train one run; return the exit code that it would have had as a process."""
    try:
        train_process(runtime, start.config, start, began, seat)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    except ConfigError as error:
        return _refused(start.config, error)
    except Exception as error:  # one run's bug ends no other
        why, code = ending_of(error, config=start.config)
        print(for_terminal(redacted_text(f"error: {why}")), file=sys.stderr)
        return code
    print(for_terminal(closing_lines(start, said=said)))
    return 0


def _refused(config: Config, error: ConfigError) -> int:
    print(for_terminal(redacted_text(f"error: {config.name}: {error}")), file=sys.stderr)
    return 2
