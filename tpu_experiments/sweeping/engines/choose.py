"""Choose the engine of a sweep."""

from collections.abc import Callable

from tpu_experiments.config.schema import Config
from tpu_experiments.sweeping.engines.base import Engine
from tpu_experiments.sweeping.engines.local import LocalEngine
from tpu_experiments.sweeping.engines.ray_tasks import RayEngine
from tpu_experiments.sweeping.engines.sky_jobs import SkyEngine

ENGINES: dict[str, Callable[..., Engine]] = {"local": LocalEngine, "ray": RayEngine, "sky": SkyEngine}


def engine_of(first: Config) -> Engine:
    """Return the engine of `sweeping.engine`; a plan needs no machine but this one."""
    chosen = "local" if first.task.name == "plan" else first.sweeping.engine
    return ENGINES[chosen](given=first.output_dir)
