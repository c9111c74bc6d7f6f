"""Points as processes of this machine."""

import subprocess
import tempfile
from collections.abc import Sequence

from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.env import require_device, require_start
from tpu_experiments.runtime.processes.stopping import Relay
from tpu_experiments.storage import paths
from tpu_experiments.storage.spool import Mirror
from tpu_experiments.sweeping.engines.base import Engine, Say, Started
from tpu_experiments.sweeping.placement import check_places, place_of, slots
from tpu_experiments.sweeping.points import Point, command_of, member_overrides, pack_command
from tpu_experiments.training.given import require_given
from tpu_experiments.training.pack_folder import PackFolder

NEED_NO_DEVICE = ("plan", "report", "doctor", "convert")


class LocalPoint(Started):
    """A point that is a child of this process."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Mirror | None) -> None:
        self._process, self._output = process, output

    def poll(self) -> int | None:
        if self.returncode is None and self._process.poll() is not None:
            if self._output is not None:
                self._output.close()
            self.returncode = self._process.returncode
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()


class LocalPack(LocalPoint):
    """Points that are one child of this process."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        output: Mirror | None,
        folder: "tempfile.TemporaryDirectory[str]",
    ) -> None:
        """Take the process, its output and its `PackFolder`, which is removed with this object."""
        super().__init__(process, output)
        self._temporary, self._folder = folder, PackFolder(folder.name)

    def codes(self) -> dict[str, int]:
        return self._folder.codes()

    def drop(self, name: str) -> None:
        self._folder.drop(name)


class LocalEngine(Engine):
    """Runs points as child processes; `given` is the output_dir of the sweep's command line."""

    name = "local"
    is_elsewhere = False
    has_packs = True

    def __init__(self, *, given: str) -> None:
        self._given = given
        self._relay = Relay()

    @property
    def asked(self) -> bool:  # type: ignore[override]
        """Whether the sweep was asked to stop."""
        return self._relay.asked

    def check(self, config: Config) -> None:
        check_places(config)
        if config.task.name not in NEED_NO_DEVICE:
            require_given(config)
            require_device(config.hw)
            require_start(config.hw)

    def open(self, points: Sequence[Point], *, folder: str, say: Say) -> None:
        """Do nothing: this machine is here."""

    def start(self, point: Point, *, slot: int, limit_seconds: float | None) -> Started:
        process, output = self._started(point, command_of(point, given=self._given), slot=slot, name=point.name)
        return LocalPoint(process, output)

    def start_pack(self, points: Sequence[Point], *, slot: int) -> Started:
        own = place_of(slot, points[0].config).overrides
        folder = tempfile.TemporaryDirectory(prefix="tpu_experiments_pack_")
        PackFolder(folder.name).write([[*member_overrides(point), *own] for point in points])
        name = f"{points[0].name}_and_{len(points) - 1}_more"
        command = pack_command(points[0], folder=folder.name)
        return LocalPack(*self._started(points[0], command, slot=slot, name=name), folder)

    def _started(
        self, point: Point, command: Sequence[str], *, slot: int, name: str
    ) -> tuple["subprocess.Popen[bytes]", Mirror | None]:
        """Start a command in a slot; return the process, and its output where it does not write to the terminal."""
        place, output = place_of(slot, point.config), None
        if slots(point.config) > 1:  # a single point writes to the terminal itself
            folder = point.config.output_dir
            paths.make_dirs(paths.join(folder, "logs"))
            output = Mirror.of_file(paths.join(folder, "logs", f"{name}.log"))
        process = self._relay.start(
            [*command, *place.overrides],
            env=place.env,
            cores=place.cores,
            output=output.local if output is not None else None,
        )
        return process, output

    def ask(self) -> None:
        self._relay.ask()
