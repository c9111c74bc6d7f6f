"""Place parallel points on one host: one chip each on a TPU, a share of the cores each on the CPU."""

import os
from dataclasses import dataclass, field

from tpu_experiments.config.commands import override_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.chips import chip_variables, num_chips_present
from tpu_experiments.runtime.processes.env import compile_cache_folder
from tpu_experiments.storage import paths


@dataclass(frozen=True)
class Place:
    """Environment, cores and overrides assigned to a point."""

    env: dict[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    """CPU cores that it may use; None for all."""
    overrides: tuple[str, ...] = ()


def slots(config: Config) -> int:
    """Return how many points run at once.

    It is 1 for plans, each of which uses the host's memory and cores by itself (`task.workers`).
    """
    return 1 if config.task.name == "plan" else config.sweeping.points_at_once


def place_of(slot: int, config: Config) -> Place:
    """Return the place of the point in `slot`, 0 to `sweeping.points_at_once` - 1.

    It is the whole host where points run one at a time.
    """
    count = slots(config)
    if count == 1:
        return Place()
    if config.hw.device == "tpu":
        return Place(env=chip_variables(slot), overrides=own_cache(slot, config))
    return Place(cores=share_of_cores(slot, count=count, usable=os.sched_getaffinity(0)))


def own_cache(slot: int, config: Config) -> tuple[str, ...]:
    """Return the override for a compile cache of its own, as each process of `spawn` has."""
    folder = compile_cache_folder(config, process=0)
    return () if folder is None else (override_of("hw.compile_cache", paths.join(folder, f"slot_{slot}")),)


def share_of_cores(slot: int, *, count: int, usable: set[int]) -> frozenset[int]:
    """Return an equal part of the usable cores, or one core if there are more points than cores.

    torch and XLA both start as many threads as the process may use cores.
    """
    cores = sorted(usable)
    share = len(cores) // count
    if share == 0:
        return frozenset({cores[slot % len(cores)]})
    return frozenset(cores[slot * share : (slot + 1) * share])


def require_one_host(config: Config) -> None:
    """Refuse points that train on several hosts.

    Raises:
        ConfigError: the machine of `hw` has several hosts.
    """
    if config.hw.num_hosts > 1 and config.task.name == "train":
        raise ConfigError(
            f"hw.num_hosts={config.hw.num_hosts} with -m; each host would choose its points by itself; sweep on one "
            "host (hw=v5e8 or hw=v6e8), or start the points one by one with launch/tpu.py."
        )


def check_places(config: Config) -> None:
    """Refuse points that cannot run on this host, alone or side by side.

    Raises:
        ConfigError: a point trains on several hosts, needs more than one chip or a GPU, or the host has too few chips.
    """
    require_one_host(config)
    hw, count = config.hw, slots(config)
    if count == 1 or hw.device == "cpu":
        return
    asked = f"sweeping.points_at_once={count}; "
    if hw.device != "tpu":
        raise ConfigError(f"{asked}hw.device={hw.device} is one device that all would share; use 1.")
    if hw.num_devices != 1 or hw.parallel != "inline":
        raise ConfigError(
            f"{asked}a point on hw={hw.name} takes {hw.num_devices} chips, and side by side each has one; name a "
            "machine of one chip, for example hw=v5e1 or hw=v6e1, or use 1."
        )
    there = num_chips_present()
    if there is not None and there < count:
        raise ConfigError(f"{asked}this host has {there} chips; use {there} or fewer.")
