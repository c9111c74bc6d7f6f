"""`train`, `up`, `run` and `down`: the commands that rent and delete machines."""

from dataclasses import replace

from launch.tpu_vm import commands, launching
from launch.tpu_vm.cloud import Cloud, CloudError
from launch.tpu_vm.commands import Target
from launch.tpu_vm.driver import Driver
from launch.tpu_vm.errors import FAILED, STOPPED, LaunchError
from launch.tpu_vm.job import check_outlives, name_for
from launch.tpu_vm.known import known_driver, known_record, require_name, settings_of
from launch.tpu_vm.launching import World
from launch.tpu_vm.looking import everything
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import load_slice, rentable
from launch.tpu_vm.state import Record

EXIT_CODES = {"finished": 0, "down": 0, "": 0, "stopped": STOPPED, "interrupted": STOPPED}


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
    """Find or create the launch's record and drive it to its goal."""
    record = world.store(launching.folder_of(settings), settings.name).load()
    is_new = record is None or (record.done and (record.goal == "gone" or overrides is None))
    if record is not None and not is_new:
        settings = _continued(settings, record)
    elif not settings.hw:
        raise LaunchError(f"hw=; it is missing; use one of: {', '.join(rentable())}.")
    slice_ = load_slice(settings.hw)
    if record is not None and not record.done and record.goal == "gone":
        world.say(f"ending the launch before ({record.outcome}); give the command again to begin anew")
        return _end_it(known_driver(world, [*words, f"name={settings.name}"]), world)
    job = None if overrides is None else launching.job_for(overrides, settings)
    if job is not None:
        check_outlives(job, settings, num_workers=slice_.num_workers)
    if record is None or is_new:
        project = launching.project_of(world, settings)
        record = launching.fresh(world, settings, slice_, project=project, words=tuple(words))
        limits = launching.limits_of(settings, slice_, zone=record.zone)
        launching.agree(world, settings, slice_, limits, job, project=project, is_planned=then == "gone")
    if job is not None:
        record = launching.with_job(record, job, then=then)
    launching.offer_key(world, settings)
    secrets = launching.secrets_of(world, settings, env_file)
    with launching.locked(world, settings):
        return drive(launching.driver_of(world, record, settings, secrets=secrets))


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
    driver.store.save(driver.record)
    try:
        record = driver.run()
    except KeyboardInterrupt:
        name, record = driver.record.name, driver.record
        if record.goal != "gone":
            driver.say(f"the run goes on, and costs: logs name={name}, stop name={name}, down name={name}")
            return STOPPED
        driver.say(f"NOT finished: python launch/tpu.py down name={name} (or {by_hand(driver)})")
        return FAILED
    except CloudError as error:
        driver.say(f"NOT deleted, and it may cost: {error}; {by_hand(driver)}")
        return FAILED
    if record.goal == "gone":
        driver.say(f"nothing of {record.name} is left; it cost {record.hours_before:.1f} h, ${record.usd_before:.2f}")
    else:
        driver.say(
            f"{record.resource} in {record.zone} stays, and costs until: python launch/tpu.py down name={record.name}"
        )
    return EXIT_CODES.get(record.outcome, FAILED)


def by_hand(driver: Driver) -> str:
    return " ".join(commands.delete(driver.target))


def down(world: World, words: list[str], overrides: list[str]) -> int:
    """Delete the machine of a launch; one this launcher did not create, only after confirmation."""
    settings, _ = settings_of(words)
    require_name(settings)
    if world.store(launching.folder_of(settings), settings.name).load() is None:
        return delete_foreign(world, settings)
    driver = known_driver(world, words)
    code = _end_it(driver, world)
    return 0 if driver.record.done else code


def _end_it(driver: Driver, world: World) -> int:
    """Fetch the results and delete the machine; return the exit code of the launch's outcome."""
    with launching.locked(world, driver.settings):
        outcome = driver.record.outcome or "down"
        driver.save(goal="gone", done=False, outcome=outcome, reason=driver.record.reason or "down was asked for")
        return drive(driver)


def delete_foreign(world: World, settings: Settings) -> int:
    project = launching.project_of(world, settings)
    items, problems = everything(world, settings, project)
    found = [item for item in items if item.name == settings.name or item.launch == settings.name]
    found = [item for item in found if item.kind in ("queued resource", "node")]
    if not found:
        raise LaunchError(f"name={settings.name}; there is nothing of that name. {' '.join(problems)}".strip())
    cloud = Cloud(world.run, sleep=world.clock.sleep)
    for item in found:
        world.confirm(f"{item.kind} {item.name} in {item.zone} was not made here; delete it?", settings)
        target = Target(settings, project, item.zone, item.name)
        cloud.call(commands.delete(target) if item.kind == "queued resource" else commands.delete_node(target))
        world.say(f"{item.name} is being deleted")
    return 0
