"""Find or create a launch: its record, limits, lock and driver.

`up`, `run` and `train` differ only in their goal.
"""

import fcntl
import math
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
from launch.tpu_vm.job import Estimate, Job, is_sweep, job_of, values_of
from launch.tpu_vm.money import HOUR, Limits
from launch.tpu_vm.settings import Settings, require_name, settings_of
from launch.tpu_vm.slices import Slice, load_slice
from launch.tpu_vm.state import Record
from launch.tpu_vm.vm import Vm
from launch.tpu_vm.world import World

WATCHDOG = "launch/watchdog.sh"
UNSEEN_SECONDS = 2700.0
"""Time that a machine without a run can be used before it counts as idle: its boot and a set-up of at most 40 min."""
HEADROOM = 1.5
"""Limit in dollars where none is given, in planned costs: room for reclaims and for a wrong estimate."""


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


def limits_of(settings: Settings, slice_: Slice, record: Record) -> Limits:
    """Return the launch's limits in seconds, at the highest price of its zones."""
    price = max(
        slice_.usd_per_hour(spot=settings.spot, zone=zone, override=settings.usd_per_chip_hour) for zone in record.zones
    )
    max_usd = record.max_usd if settings.max_usd is None else settings.max_usd
    hours, minutes = settings.queue_hours, settings.zone_minutes
    unseen = settings.idle_minutes * 60 + UNSEEN_SECONDS if settings.watchdog == "required" else math.inf
    return Limits(price, max_usd, settings.max_hours, hours * HOUR, minutes * 60, unseen_seconds=unseen)


def fresh(
    world: World, settings: Settings, slice_: Slice, *, project: str, words: tuple[str, ...], then: str
) -> Record:
    """Return the record of a launch that has not started."""
    return Record(
        name=settings.name,
        launch_id=world.new_id(),
        hw=settings.hw,
        spot=settings.spot,
        project=project,
        zones=settings.zones or slice_.zones,
        words=words,
        then=then,
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


def agree(world: World, settings: Settings, slice_: Slice, record: Record, job: Job | None) -> Record:
    """Check, plan and price a launch, and ask for confirmation, before anything is rented.

    Returns:
        The record with the limit of dollars that follows from the plan, where none was given.

    Raises:
        LaunchError: the code cannot be sent, the VM could not delete itself, the run does not fit or costs more than
            `max_usd`, or the user declines.
    """
    if settings.code == "archive":
        world.files.check_archive()
    missing = rights.look_ahead(Cloud(world.run, sleep=world.clock.sleep).ask, settings, record.project)
    if missing and settings.watchdog == "required":
        raise LaunchError(
            f"watchdog=required; {missing}; if this launcher died, nobody would end it. If a folder or a group "
            "gives the right, or to rent all the same: watchdog=warn."
        )
    if missing:
        world.say(f"warning: {missing}")
    if job is not None and not job.is_remote:
        world.say(
            f"warning: output_dir={values_of(job.overrides)['output_dir']}; the machine has the only copy of the "
            "checkpoints, and of the results until they are fetched; a limit or a failure of the machine loses them; "
            "with output_dir=gs://... after -- nothing is lost"
        )
    limits = limits_of(settings, slice_, record)
    if job is not None and record.then == "gone" and settings.plan == "first":
        found = world.plan(job.overrides, run_name=job.name, spot=settings.spot, results=Path(settings.results))
        if found is not None:
            record = replace(record, max_usd=check_price(found, settings, limits, say=world.say))
            limits = limits_of(settings, slice_, record)
    words = f"{slice_.accelerator_type}{' spot' if settings.spot else ''}, up to ${limits.usd_per_hour:.2f}/h"
    world.confirm(f"rent {words}; at most {limits.max_hours:g} h and ${limits.most_usd:.2f}?", settings)
    return record


def check_price(found: Estimate, settings: Settings, limits: Limits, *, say: Callable[[str], None]) -> float | None:
    """Print the plan's estimate; return the limit in dollars that follows from it, None where one was given.

    Raises:
        LaunchError: the estimate exceeds `max_usd`.
    """
    if found.usd is None and found.hours is not None:
        found = replace(found, usd=found.hours * limits.usd_per_hour)
    say(found.sentence)
    if settings.max_usd is not None:
        if found.usd is not None and found.usd > settings.max_usd:
            raise LaunchError(f"max_usd={settings.max_usd:g}; the plan says ${found.usd:.2f}; raise it, or train less.")
        return None
    if found.hours is None:
        return None
    highest = max(found.usd or 0.0, found.hours * limits.usd_per_hour)  # in the dearest zone, as the limit counts
    max_usd = math.ceil(HEADROOM * highest * 100) / 100
    say(f"max_usd={max_usd:.2f}, {HEADROOM:g} times the planned hours at the highest price of the zones")
    return max_usd


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
        limits=limits_of(settings, slice_, record),
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
