"""Schema of the group `task`: what the command does, and the settings of task=plan."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class TaskConfig:
    """Selected task, what the command does."""

    name: str = MISSING
    """Name of the task; a module of tpu_experiments/tasks."""


@dataclass
class SearchConfig:
    """Search space of `explore: search`: every combination of the axes under the configured global batch."""

    axes: dict[str, list[Any]] = field(default_factory=dict)
    """Key or group of the command line to the values it takes, none leaves it alone. A combination that the checks
    refuse is left out, and so are `sharding` where hw.parallel splits nothing, and all values but one of `model.remat`
    and `model.stack_group` where model.stack folds nothing. Where combinations differ in the
    micro-batch alone, none above one that is too large is compiled."""
    prune_above: float = number(default=1.5, above=0)
    """Multiple of a chip's memory: what the formulas put above it is not compiled. They are up to 45 % wrong."""
    table: str | None = place("local", default=None)
    """YAML file that takes the fastest settings of each `model.stack` as lines, as conf/tuned.yaml holds them; null
    writes none."""


@dataclass
class PlanTaskConfig(TaskConfig):
    """Settings of task=plan."""

    method: str = choice("auto", "compiled", "analytic", default="auto")
    """`compiled`: by the TPU's own compiler. `analytic`: from formulas, anywhere. `auto`: the compiler where libtpu is
    installed, else formulas."""
    programs: str = choice("all", "train", default="all")
    """`all` compiles the programs of evaluation and sample as well; `train` counts them only."""
    explore: str = choice("none", "ladder", "search", default="none")
    """`ladder` finds the largest micro-batch that fits. `search` tries the combinations of `search.axes` and writes the
    fastest that fits to best.yaml beside the plan, which task=train takes as +plan=FILE."""
    compare: list[str] = field(default_factory=list)
    """Further machines (names of conf/hw) that the same run is planned for in the same call."""
    compiled_folder: str | None = place("folder", default=None)
    """Where compilations are remembered; null is `<output_dir>/plans/compiled`. The points of a sweep get the command's
    own, so that none compiles what another plan has compiled."""
    workers: int | None = number(default=None, at_least=1)
    """Compilations at once; null goes by the free memory, 6 GiB each, and the cores."""
    search: SearchConfig = field(default_factory=SearchConfig)
