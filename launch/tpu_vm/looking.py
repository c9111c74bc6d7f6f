"""`logs`, `status`, `ssh` and `stop`: the commands that rent and delete nothing."""

import os

from launch.tpu_vm import commands, dry, launching
from launch.tpu_vm.cloud import Cloud
from launch.tpu_vm.errors import FAILED, LaunchError, UnreachableError
from launch.tpu_vm.follow import Progress
from launch.tpu_vm.known import known_driver, settings_of
from launch.tpu_vm.launching import World
from launch.tpu_vm.remains import Remaining, remaining, table
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import load_slice, rentable
from launch.tpu_vm.state import Store


def logs(world: World, words: list[str], overrides: list[str]) -> int:
    """Print the log from its first line, until the run ends or Ctrl-C."""
    driver = known_driver(world, words)
    progress, offset = Progress(every=10**9), 0
    progress.show("", bill=driver.record.resource, say=world.say)
    try:
        while True:
            look = driver.vm.look(driver.target, offset)
            progress.show(look.text, bill="", say=world.say)
            offset = look.offset
            if look.state == "exited" and look.is_all:
                world.say(f"the run ended with exit code {look.code}")
                return 0
            if look.is_all:
                world.clock.sleep(driver.settings.poll_seconds)
    except KeyboardInterrupt:
        return 0
    except UnreachableError as error:
        raise LaunchError(f"name={driver.record.name}; no answer: {error}.", code=FAILED) from None


def status(world: World, words: list[str], overrides: list[str]) -> int:
    """List everything that costs money, in all zones where conf/hw offers a slice."""
    settings, _ = settings_of(words)
    project = launching.project_of(world, settings)
    items, problems = everything(world, settings, project)
    world.say(table(items, problems))
    for file in sorted(launching.folder_of(settings).glob("*.json")):
        record = Store(file.parent, file.stem).load()
        if record is not None:
            end = f"{record.outcome or 'up'}: {record.reason}" if record.done else f"on its way to {record.goal}"
            world.say(f"{record.name}: {end}; ${record.usd_before:.2f} before its present machine")
    return FAILED if problems else 0


def everything(world: World, settings: Settings, project: str) -> tuple[list[Remaining], list[str]]:
    zones = list(settings.zones)
    if not zones:
        zones = [zone for hw in rentable() for zone in load_slice(hw).zones]
        stored = (Store(file.parent, file.stem).load() for file in launching.folder_of(settings).glob("*.json"))
        zones += [zone for record in stored if record is not None for zone in record.zones]
    return remaining(Cloud(world.run, sleep=world.clock.sleep), settings, project=project, zones=zones)


def login(world: World, words: list[str], overrides: list[str]) -> int:
    """Replace this process with gcloud's ssh."""
    driver = known_driver(world, words)
    line = commands.shell(driver.target, worker=driver.settings.worker)
    if isinstance(world.run, dry.DryRun):
        world.run(line)
        return 0
    os.execvp(line[0], line)


def stop(world: World, words: list[str], overrides: list[str]) -> int:
    """Send SIGTERM to the run, which saves and exits with 75; the launcher following it notices."""
    driver = known_driver(world, words)
    try:
        driver.vm.stop(driver.target)
    except UnreachableError as error:
        raise LaunchError(
            f"name={driver.record.name}; no answer: {error}; `down` deletes the machine.", code=FAILED
        ) from None
    world.say("the run has saved and ended; `run` with the same words goes on, `down` deletes the machine")
    return 0
