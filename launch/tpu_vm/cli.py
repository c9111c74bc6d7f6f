"""Parse and run the commands of launch/tpu.py."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from launch.tpu_vm import dry, goals, loading, looking
from launch.tpu_vm.clock import WallClock
from launch.tpu_vm.cloud import CloudError, as_launch_error
from launch.tpu_vm.errors import FAILED, REFUSED, STOPPED, LaunchError
from launch.tpu_vm.known import settings_of
from launch.tpu_vm.launching import World
from launch.tpu_vm.local_files import NoFiles
from launch.tpu_vm.planning import plan_words
from launch.tpu_vm.running import run
from launch.tpu_vm.slices import load_slice

USAGE = """usage: python launch/tpu.py COMMAND [--dry-run] [key=value ...] [-- OVERRIDES OF run.py]

  train      plan, rent, set up, run, follow, fetch the results, delete: all of it
  up         rent a machine and set it up; it stays, and costs
  run        run on the machine of `up`, follow, fetch
  logs       what the run has printed, and prints
  status     everything that costs money now, of this launcher or not, and the launches known here
  ssh        a login (worker=N of a slice of several)
  stop       ask the run to save and end
  down       delete the machine
  load_data  source= to bucket=gs://..., or source=gs://... to data_disk= in zones=ZONE

    python launch/tpu.py train hw=v6e8 spot=true max_usd=60 -- experiment=mistral7b_ro output_dir=gs://bucket/runs

--dry-run prints every command and runs none. Keys: launch/tpu_vm/settings.py; the rest: launch/README.md.
exit codes: 0 finished, 1 failed, 2 refused, 75 stopped on request"""


def main(arguments: list[str], world: World | None = None) -> int:
    """Run one command and return its exit code."""
    if not arguments or {"-h", "--help", "help"} & set(arguments[:1]):
        print(USAGE)
        return 0 if arguments else REFUSED
    if world is None:
        _end_as_by_ctrl_c(signal.SIGTERM, signal.SIGHUP)
        world = World(run, WallClock(), _say, input, os.environ)
    try:
        return _command(arguments, world)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:  # only before anything is rented; afterwards the driver handles it
        print("interrupted; python launch/tpu.py status shows what costs", file=sys.stderr)
        return STOPPED
    except CloudError as error:
        print(f"error: {as_launch_error(error)}", file=sys.stderr)
        return FAILED


def _say(line: str) -> None:
    """Print a line; a closed terminal must not prevent the deletion of a machine."""
    with suppress(OSError, ValueError):
        print(line, flush=True)


def _end_as_by_ctrl_c(*numbers: signal.Signals) -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that both delete the machine.

    An ignored signal stays ignored: under nohup, closing the terminal ends nothing.
    """
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _command(arguments: list[str], world: World) -> int:
    command, *rest = arguments
    cut = rest.index("--") if "--" in rest else len(rest)
    words, overrides = rest[:cut], rest[cut + 1 :]
    is_dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    known: dict[str, Callable[[World, list[str], list[str]], int]] = {
        "up": goals.up,
        "run": goals.run_there,
        "train": goals.train,
        "down": goals.down,
        "logs": looking.logs,
        "status": looking.status,
        "ssh": looking.login,
        "stop": looking.stop,
        "load_data": loading.load_data,
    }
    if command not in known:
        raise LaunchError(f"{command}; there is no such command; use one of: {', '.join(known)}.")
    return known[command](_dry(world, words) if is_dry else world, words, overrides)


def _dry(world: World, words: list[str]) -> World:
    """Return a world in which commands are printed and nothing is run, written or asked."""
    settings, _ = settings_of(words)
    count = load_slice(settings.hw).num_workers if settings.hw else 1
    pretended = dry.DryRun(world.say, num_workers=count, service_account=settings.service_account)

    def say_plan(overrides: tuple[str, ...], **where: Any) -> None:
        world.say(f"$ {' '.join(['python', 'run.py', *plan_words(overrides, results=where['results'])[2:]])}")

    return replace(
        world,
        run=pretended,
        clock=dry.DryClock(),
        ask=lambda question: "y",
        promise=say_plan,
        files=NoFiles(),
        store=dry.MemoryStore,
        new_id=lambda: "000000",
    )
