"""Launch the points of any Hydra sweeper, each as a process of its own.

A process can initialise its devices only once, and the environment they read cannot change afterwards. Hydra imports
this module with every command (plugin/hydra_plugins), so imports that only a sweep needs are local.
"""

import copy
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from tpu_experiments.config.commands import override_of
from tpu_experiments.config.compose import require_single_choices, to_config
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.sweeping.points import Point, point_name, sweep_folder, without_own

if TYPE_CHECKING:
    from tpu_experiments.sweeping.sweep import Sweep


class PointFailed(Exception):
    """A point has no held-out loss; a sampler counts it as a failed trial."""


class PointLauncher(Launcher):
    """Hydra launcher that runs every point of a sweep as a process of its own."""

    latest: "PointLauncher | None" = None
    """The launcher of this process; `finish` is called on it when the sweeper has no more points."""

    def __init__(self) -> None:
        self.sweep: Sweep | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Prepare the launcher; the sweeper's own output is unused and goes to a temporary folder."""
        PointLauncher.latest = self
        self.context, self.config = hydra_context, config
        self._scratch = tempfile.TemporaryDirectory(prefix="tpu_experiments_sweep_")
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = self._scratch.name

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points and return their held-out losses, in order.

        Raises:
            ConfigError: a point of a grid is refused; nothing of the batch was started.
            SystemExit: the sweep was asked to stop.
        """
        sweep = self.sweep = self.sweep or self._opened(job_overrides[0])
        points = [self._point(overrides, sweep) for overrides in job_overrides]
        sweep.run([point for point in points if isinstance(point, Point)])
        if sweep.engine.asked and (sweep.unfinished or not self._is_grid()):
            self._exit_on_stop(sweep)
        return [self._returned(sweep, point if isinstance(point, str) else point.name) for point in points]

    def finish(self) -> int:
        """Print the sweep's result; return its exit code, 1 where a point failed."""
        sweep = self.sweep
        if sweep is None or not sweep.points:
            return 0
        from tpu_experiments.sweeping import leaderboard, totals

        points = list(sweep.points.values())
        if points[0].config.task.name == "plan":
            print(*totals.total_lines(points, points_at_once=points[0].config.sweeping.points_at_once), sep="\n")
            if sweep.pack_plans:
                at_once = points[0].config.sweeping.points_at_once
                print(*totals.pack_lines(points, sweep.pack_plans, points_at_once=at_once), sep="\n")
            print(f"sweep: {totals.write_total(points, folder=sweep.folder)}")
        elif points[0].config.task.name == "train":
            if not sweep.has_run:  # else printed when the last point ended
                print(*leaderboard.lines(sweep.rows.values()), sep="\n")
            for finding in leaderboard.findings(list(sweep.rows.values())):
                print(finding)
            print(*leaderboard.best(sweep.rows.values(), name=sweep.name), sep="\n")
            print(*leaderboard.after(sweep.name, folder=sweep.folder), sep="\n")
            print(f"sweep: {sweep.folder}/{leaderboard.NAME}.md")
        if sweep.failed:
            print(f"{len(sweep.failed)} points failed: {'; '.join(sweep.failed)}", file=sys.stderr)
        return 1 if sweep.failed else 0

    def _opened(self, overrides: Sequence[str]) -> "Sweep":
        """Open the sweep's folder, named after its first point where no name is given.

        Raises:
            ConfigError: the engine cannot run the first point.
        """
        from tpu_experiments.sweeping.budget import check_price
        from tpu_experiments.sweeping.engines.choose import engine_of
        from tpu_experiments.sweeping.sweep import Sweep

        first = self._config_of(self._split(overrides)[0])
        engine = engine_of(first)
        check_price(first)
        engine.check(first)
        return Sweep(sweep_folder(first.output_dir, str(first.name)), name=str(first.name), engine=engine)

    def _point(self, overrides: Sequence[str], sweep: "Sweep") -> Point | str:
        """Compose and check one point; return its name if a sampler drew it and it is refused.

        Raises:
            ConfigError: a point of a grid is refused.
        """
        from tpu_experiments.sweeping.budget import check_price

        given, varied = self._split(overrides)
        name, own = point_name(varied), without_own(given)
        changed = {_key(o): o.partition("=")[2] for o in varied}
        try:
            config = self._config_of([*own, override_of("name", name), override_of("output_dir", sweep.folder)])
            check_price(config)
            sweep.engine.check(config)
        except ConfigError as error:
            if self._is_grid():
                raise
            sweep.refuse(name, changed=changed, why=str(error))
            return name
        return Point(name, changed, tuple(own), config, options=self._options())

    def _options(self) -> tuple[str, ...]:
        """Return the command line's `--config-dir`, whose files the points read too."""
        sources = self.config.hydra.runtime.config_sources
        return tuple(f"--config-dir={source.path}" for source in sources if source.provider == "command-line")

    def _split(self, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return all overrides of a point, the command line's first, and those that vary."""
        own: list[str] = OmegaConf.to_container(self.config.hydra.overrides.task, resolve=False)  # type: ignore[assignment]
        parsed = OverridesParser.create().parse_overrides(own)
        swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
        swept |= {str(key) for key in self.config.hydra.sweeper.get("params") or {}}
        varied = [o for o in overrides if _key(o) in swept]
        return [*(o for o in own if _key(o) not in swept), *varied], varied

    def _config_of(self, overrides: list[str]) -> Config:
        composed = self.context.config_loader.load_sweep_config(self.config, overrides)
        require_single_choices(composed.hydra.runtime.choices)
        return to_config(_without_hydra(composed))

    def _exit_on_stop(self, sweep: "Sweep") -> None:
        from tpu_experiments.training.stop import STOPPED_EXIT_CODE

        next_points = f"the same command resumes with {'; '.join(sweep.unfinished) or 'further points'}"
        print(f"the sweep was stopped on request; {next_points}", file=sys.stderr)
        sys.exit(STOPPED_EXIT_CODE)

    def _returned(self, sweep: "Sweep", name: str) -> JobReturn:
        """Return the held-out loss as Hydra's job result, a failed one for a sampler without a loss.

        A grid's sweeper only checks that the job has completed.
        """
        row = sweep.rows[name]
        ended = JobReturn(overrides=list(row.overrides), status=JobStatus.COMPLETED)
        ended.return_value = float("nan") if row.eval_loss is None else row.eval_loss
        if row.eval_loss is None and not self._is_grid():
            ended.status, ended.return_value = JobStatus.FAILED, PointFailed(f"{name} {row.state}")
        return ended

    def _is_grid(self) -> bool:
        return str(self.config.hydra.sweeper._target_).endswith("BasicSweeper")


def _key(override: str) -> str:
    return override.partition("=")[0]


def _without_hydra(composed: DictConfig) -> DictConfig:
    plain = copy.deepcopy(composed)
    with read_write(plain), open_dict(plain):
        del plain["hydra"]
    return plain
