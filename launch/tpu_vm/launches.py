"""Find or create a launch: its record, limits, lock and driver.

`up`, `run` and `train` differ only in their goal.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launch.tpu_vm import code_sync, gcloud, rights
from launch.tpu_vm.cloud import Cloud
from launch.tpu_vm.driver import Driver
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.job import Estimate, Job, is_sweep, job_of
from launch.tpu_vm.money import HOUR, Limits
from launch.tpu_vm.settings import Settings, require_name, settings_of
from launch.tpu_vm.slices import Slice, load_slice
from launch.tpu_vm.state import Record
from launch.tpu_vm.vm import Vm
from launch.tpu_vm.world import World

WATCHDOG = "launch/watchdog.sh"


def folder_of(settings: Settings) -> Path:
    """Return the folder with the state of all launches."""
    return Path(settings.results) / "launch"


def project_of(world: World, settings: Settings) -> str:
    """Return `project=`, else gcloud's default project.

    Raises:
        LaunchError: neither is set.
    """
    project = settings.project or world.run(gcloud.project()).out.strip()
    if not project or project == "(unset)":
        raise LaunchError(
            "project=; gcloud has no project of its own; give project=ID or gcloud config set project ID."
        )
    return project


def secrets_of(world: World, settings: Settings, env_file: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables listed in `secrets=`, from this environment or the .env file."""
    found = {name: world.environ.get(name) or env_file.get(name, "") for name in settings.secrets}
    return {name: value for name, value in found.items() if value}


def limits_of(settings: Settings, slice_: Slice, *, zone: str) -> Limits:
    """Return the launch's limits with hours and minutes converted to seconds."""
    price = slice_.usd_per_hour(spot=settings.spot, zone=zone, override=settings.usd_per_chip_hour)
    hours, minutes = settings.queue_hours, settings.zone_minutes
    return Limits(price, settings.max_usd, settings.max_hours, hours * HOUR, minutes * 60)


def fresh(world: World, settings: Settings, slice_: Slice, *, project: str, words: tuple[str, ...]) -> Record:
    """Return the record of a launch that has not started."""
    return Record(
        name=settings.name,
        launch_id=world.new_id(),
        hw=settings.hw,
        spot=settings.spot,
        project=project,
        zones=settings.zones or slice_.zones,
        words=words,
    )


def with_job(record: Record, job: Job, *, then: str) -> Record:
    """Return the record with a job to run.

    Raises:
        LaunchError: the launch is running another job.
    """
    if record.goal == "run" and not record.done and record.overrides != job.overrides:
        was = " ".join(record.overrides)
        raise LaunchError(
            f"name={record.name}; it is running `{was}`; stop it first, give the same words, or another name=."
        )
    if record.goal == "run" and not record.done:
        return replace(record, then=then)
    return replace(
        record.before_start(),
        goal="run",
        then=then,
        done=False,
        outcome="",
        reason="",
        overrides=job.overrides,
        run_folder=job.folder,
        was_started=False,
        is_fetched=False,
        fetch_failures=0,
        attempts=record.attempts + 1 if record.was_started else 0,
    )


def agree(
    world: World, settings: Settings, slice_: Slice, limits: Limits, job: Job | None, *, project: str, is_planned: bool
) -> None:
    """Plan the run and ask for confirmation before anything is rented.

    Raises:
        LaunchError: it does not fit, costs more than `max_usd`, or the user declines.
    """
    words = f"{slice_.accelerator_type}{' spot' if settings.spot else ''}, up to ${limits.usd_per_hour:.2f}/h"
    if job is not None and is_planned and settings.plan == "first":
        found = world.plan(job.overrides, run_name=job.name, spot=settings.spot, results=Path(settings.results))
        if found is not None:
            check_price(found, settings, limits, say=world.say)
    warning = rights.look_ahead(world.run, settings, project)
    if warning:
        world.say(f"warning: {warning}")
    cap = f"{settings.max_hours:g} h" + ("" if settings.max_usd is None else f" and ${settings.max_usd:g}")
    world.confirm(f"rent {words}; at most {cap}?", settings)


def check_price(found: Estimate, settings: Settings, limits: Limits, *, say: Callable[[str], None]) -> None:
    """Print the plan's estimate.

    Raises:
        LaunchError: the estimate exceeds `max_usd`.
    """
    if found.usd is None and found.hours is not None:
        found = replace(found, usd=found.hours * limits.usd_per_hour)
    say(found.sentence)
    if found.usd is not None and settings.max_usd is not None and found.usd > settings.max_usd:
        raise LaunchError(f"max_usd={settings.max_usd:g}; the plan says ${found.usd:.2f}; raise it, or train less.")


def offer_key(world: World, settings: Settings) -> None:
    """Create the deploy key of a private repository and show it until the user confirms having stored it."""
    if settings.code != "clone" or not code_sync.is_private(settings):
        return
    folder = code_sync.key_folder(folder_of(settings), settings)
    stored = folder / "stored"
    if not stored.exists():
        _, public = world.files.deploy_key(folder)
        world.say(f"add this read-only deploy key to {settings.repo} (GitHub: Settings, Deploy keys):\n{public}")
        world.confirm("is it there?", settings)
        world.files.write(stored, "")


def driver_of(world: World, record: Record, settings: Settings, *, secrets: dict[str, str]) -> Driver:
    """Return the driver of a record, whose hardware and zones override the command line's."""
    settings = replace(settings, name=record.name, hw=record.hw, spot=record.spot, zones=record.zones)
    slice_ = load_slice(record.hw)
    folder = folder_of(settings)
    vm = Vm(
        world.run,
        settings=settings,
        num_workers=slice_.num_workers,
        say=world.say,
        scratch=folder,
        files=world.files,
    )
    return Driver(
        record=record,
        store=world.store(folder, record.name),
        cloud=Cloud(world.run, sleep=world.clock.sleep),
        vm=vm,
        settings=settings,
        slice_=slice_,
        limits=limits_of(settings, slice_, zone=record.zone),
        clock=world.clock,
        say=world.say,
        secrets=secrets,
        results=_results_of(record, settings),
        watchdog=code_sync.ROOT / WATCHDOG,
    )


def _results_of(record: Record, settings: Settings) -> Path:
    """Return the local results folder, with the name that run.py would have used here."""
    name = record.run_folder.rsplit("/", 1)[-1] or record.name
    return Path(settings.results) / ("sweeps" if is_sweep(record.overrides) else "") / name


def job_for(overrides: list[str], settings: Settings) -> Job:
    """Return the job, with the local settings of this checkout."""
    return job_of(overrides, settings, local_file=code_sync.ROOT / "conf" / "local" / "default.yaml")


@contextmanager
def locked(world: World, settings: Settings) -> Iterator[None]:
    """Hold the lock of a launch's name, so that only one launcher drives it at a time.

    Raises:
        LaunchError: another process holds it.
    """
    folder = folder_of(settings)
    world.files.make_dirs(folder)
    if not folder.is_dir():  # a dry run
        yield
        return
    with (folder / f"{settings.name}.lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip() or "another process"
            raise LaunchError(f"name={settings.name}; {owner} drives it; Ctrl-C there ends it and deletes.") from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()}, since {time.strftime('%H:%M')}")
        stream.flush()
        yield


def known_record(world: World, settings: Settings) -> Record:
    """Return the record of the launch named by `name=`.

    Raises:
        LaunchError: no such launch is recorded here.
    """
    require_name(settings)
    record = world.store(folder_of(settings), settings.name).load()
    if record is None:
        raise LaunchError(f"name={settings.name}; no launch of that name is known in {folder_of(settings)}.")
    return record


def known_driver(world: World, words: list[str]) -> Driver:
    """Return the driver of a recorded launch."""
    settings, _ = settings_of(words)
    record = known_record(world, settings)
    settings, env_file = settings_of([*record.words, *words])
    secrets = secrets_of(world, settings, env_file)
    return driver_of(world, record, settings, secrets=secrets)
