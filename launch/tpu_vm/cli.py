"""Parse and run the commands of launch/tpu.py.

`train`, `up`, `run` and `down` rent and delete machines; `logs`, `status`, `ssh` and `stop` do neither.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from launch.tpu_vm import data_disk, dry_run, gcloud, launches
from launch.tpu_vm.cloud import Cloud, CloudError, Remaining, as_launch_error, remaining, table
from launch.tpu_vm.driver import Driver, Progress
from launch.tpu_vm.errors import FAILED, REFUSED, STOPPED, LaunchError, UnreachableError
from launch.tpu_vm.gcloud import Target
from launch.tpu_vm.job import check_outlives, name_for
from launch.tpu_vm.launches import known_driver, known_record
from launch.tpu_vm.settings import Settings, require_name, settings_of
from launch.tpu_vm.slices import load_slice, rentable
from launch.tpu_vm.state import Record, Store
from launch.tpu_vm.world import WallClock, World, run

EXIT_CODES = {"finished": 0, "down": 0, "": 0, "stopped": STOPPED, "interrupted": STOPPED}
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
        "up": up,
        "run": run_there,
        "train": train,
        "down": down,
        "logs": logs,
        "status": status,
        "ssh": login,
        "stop": stop,
        "load_data": data_disk.load_data,
    }
    if command not in known:
        raise LaunchError(f"{command}; there is no such command; use one of: {', '.join(known)}.")
    return known[command](dry_run.dry_world(world, words) if is_dry else world, words, overrides)


def train(world: World, words: list[str], overrides: list[str]) -> int:
    """Rent, set up, run, fetch and delete; no machine is left, however it ends."""
    settings, env_file = settings_of(words)
    settings = replace(settings, name=settings.name or name_for(overrides, settings.hw))
    return _launch(world, settings, env_file, words, overrides, then="gone")


def up(world: World, words: list[str], overrides: list[str]) -> int:
    """Rent a machine and set it up; it is kept."""
    settings, env_file = settings_of(words)
    require_name(settings)
    return _launch(world, settings, env_file, words, None, then="keep")


def run_there(world: World, words: list[str], overrides: list[str]) -> int:
    """Run on the machine of an earlier `up`; it is kept."""
    settings, env_file = settings_of(words)
    record = known_record(world, settings)
    settings, env_file = settings_of([*record.words, *words])
    settings = replace(settings, hw=record.hw, spot=record.spot)
    return _launch(world, settings, env_file, words, overrides, then="keep")


def _launch(
    world: World,
    settings: Settings,
    env_file: dict[str, str],
    words: list[str],
    overrides: list[str] | None,
    *,
    then: str,
) -> int:
    """Find or create the launch's record and drive it to its goal, as the only launcher of its name."""
    with launches.locked(world, settings):
        record = world.store(launches.folder_of(settings), settings.name).load()
        is_new = record is None or (record.done and (record.goal == "gone" or overrides is None))
        if record is not None and not is_new:
            settings = _continued(settings, record)
        elif not settings.hw:
            raise LaunchError(f"hw=; it is missing; use one of: {', '.join(rentable())}.")
        slice_ = load_slice(settings.hw)
        if record is not None and not record.done and record.goal == "gone":
            world.say(f"ending the launch before ({record.outcome}); give the command again to begin anew")
            return _end_it(known_driver(world, [*words, f"name={settings.name}"]))
        job = None if overrides is None else launches.job_for(overrides, settings)
        if job is not None:
            check_outlives(job, settings, num_workers=slice_.num_workers, is_new=then == "gone")
        if record is None or is_new:
            project = launches.project_of(world, settings)
            record = launches.fresh(world, settings, slice_, project=project, words=tuple(words), then=then)
            record = launches.agree(world, settings, slice_, record, job)
        elif not record.done:
            world.say(f"continuing the launch of {record.resource} ({record.zone})")
        if job is not None:
            record = launches.with_job(record, job, then=then)
        launches.offer_key(world, settings)
        secrets = launches.secrets_of(world, settings, env_file)
        return drive(launches.driver_of(world, record, settings, secrets=secrets))


def _continued(settings: Settings, record: Record) -> Settings:
    """Return the settings of a resumed launch, with the hardware and zones it has rented.

    Raises:
        LaunchError: `hw=` names another slice.
    """
    if settings.hw and settings.hw != record.hw:
        raise LaunchError(
            f"hw={settings.hw}; name={record.name} has rented hw={record.hw}; `down` it, or give another name=."
        )
    return replace(settings, hw=record.hw, spot=record.spot, zones=record.zones)


def drive(driver: Driver) -> int:
    """Drive a launch to its goal and return the exit code.

    On failure, the command that finishes the job is printed.
    """
    driver.save(fetch_failures=0)
    try:
        record = driver.run()
    except KeyboardInterrupt:
        name, record = driver.record.name, driver.record
        if record.goal != "gone":
            driver.say(f"the run continues and costs money: logs name={name}, stop name={name}, down name={name}")
            return STOPPED
        driver.say(f"NOT finished: python launch/tpu.py down name={name} (or {by_hand(driver)})")
        return FAILED
    except CloudError as error:
        again = f"python launch/tpu.py down name={driver.record.name}"
        driver.say(f"NOT deleted, and it may cost: {error}; {again} (or {by_hand(driver)})")
        return FAILED
    if driver.left:
        driver.say(left_behind(driver))
        return FAILED
    if record.goal == "gone":
        driver.say(f"nothing of {record.name} is left; it cost {record.hours_before:.1f} h, ${record.usd_before:.2f}")
    else:
        driver.say(
            f"{record.resource} in {record.zone} stays, and costs until: python launch/tpu.py down name={record.name}"
        )
    return EXIT_CODES.get(record.outcome, FAILED)


def left_behind(driver: Driver) -> str:
    """Return what is left and costs, what bounds it, and the commands that continue and end it."""
    record, name = driver.record, driver.record.name
    if record.created_at is None:
        return f"{driver.left}; nothing is rented; give the same command again"
    what = (
        "it has the only copy of the results; the same command again fetches them and deletes it"
        if record.outcome and not record.is_fetched
        else "the same command again continues"
    )
    return (
        f"NOT deleted: {record.resource} in {record.zone}: {driver.left}; {what}; it costs "
        f"${driver.limits.usd_per_hour:.2f}/h until its limit (${driver.limits.most_usd:.2f} in all); stop it with: "
        f"python launch/tpu.py down name={name} (or {by_hand(driver)})"
    )


def by_hand(driver: Driver) -> str:
    """Return the gcloud command that deletes the launch's resource."""
    return shlex.join(gcloud.delete(driver.target))


def down(world: World, words: list[str], overrides: list[str]) -> int:
    """Delete the machine of a launch; one this launcher did not create, only after confirmation."""
    settings, _ = settings_of(words)
    require_name(settings)
    if world.store(launches.folder_of(settings), settings.name).load() is None:
        return delete_foreign(world, settings)
    with launches.locked(world, settings):
        driver = known_driver(world, words)
        code = _end_it(driver)
    return 0 if driver.record.done else code


def _end_it(driver: Driver) -> int:
    """Fetch the results and delete the machine; return the exit code of the launch's outcome."""
    outcome = driver.record.outcome or "down"
    driver.save(goal="gone", done=False, outcome=outcome, reason=driver.record.reason or "down was asked for")
    return drive(driver)


def delete_foreign(world: World, settings: Settings) -> int:
    """Delete what bears a name that no launch of this machine has, each after confirmation.

    Raises:
        LaunchError: there is nothing of that name.
    """
    project = launches.project_of(world, settings)
    items, problems = everything(world, settings, project)
    found = [item for item in items if item.name == settings.name or item.launch == settings.name]
    found = [item for item in found if item.kind in ("queued resource", "node")]
    if not found:
        raise LaunchError(f"name={settings.name}; there is nothing of that name. {' '.join(problems)}".strip())
    cloud = Cloud(world.run, sleep=world.clock.sleep)
    for item in found:
        world.confirm(f"{item.kind} {item.name} in {item.zone} was not made here; delete it?", settings)
        target = Target(settings, project, item.zone, item.name)
        cloud.call(gcloud.delete(target) if item.kind == "queued resource" else gcloud.delete_node(target))
        world.say(f"{item.name} is being deleted")
    return 0


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
    """List everything that costs money, in all zones or in `zones=`."""
    settings, _ = settings_of(words)
    project = launches.project_of(world, settings)
    items, problems = everything(world, settings, project)
    world.say(table(items, problems))
    for file in sorted(launches.folder_of(settings).glob("*.json")):
        record = Store(file.parent, file.stem).load()
        if record is not None:
            end = f"{record.outcome or 'up'}: {record.reason}" if record.done else f"on its way to {record.goal}"
            world.say(f"{record.name}: {end}; ${record.usd_before:.2f} before its present machine")
    return FAILED if problems else 0


def everything(world: World, settings: Settings, project: str) -> tuple[list[Remaining], list[str]]:
    """Return what costs money in `zones=`, else in all zones, and a sentence for each listing that failed."""
    return remaining(Cloud(world.run, sleep=world.clock.sleep), settings, project=project, zones=settings.zones)


def login(world: World, words: list[str], overrides: list[str]) -> int:
    """Replace this process with gcloud's ssh."""
    driver = known_driver(world, words)
    line = gcloud.shell(driver.target, worker=driver.settings.worker)
    if isinstance(world.run, dry_run.DryRun):
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
    world.say("the run has saved and ended; `run` with the same words resumes it, `down` deletes the machine")
    return 0
