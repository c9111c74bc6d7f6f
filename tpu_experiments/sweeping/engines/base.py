"""What a sweep asks of the engine that runs its points, and the signals of engines whose points run elsewhere."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FrameType

from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.stopping import SIGNALS
from tpu_experiments.sweeping.points import Point

Say = Callable[[str], None]
"""Prints a sentence beside the sweep's table."""


class Started(ABC):
    """A point that an engine has started."""

    returncode: int | None = None
    """Exit code of the point; None while it runs."""
    why: str = ""
    """What the engine knows of a failure besides the exit code, for the sentence that reports it."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, or None while the point runs; call it often, since it does what is due."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask the point to save and end."""

    def codes(self) -> dict[str, int]:
        """Return the exit codes of those points of a pack that have ended, by name; empty for a single point."""
        return {}

    def drop(self, name: str) -> None:
        """Ask one point of a pack to save and end."""
        self.terminate()


class Engine(ABC):
    """Runs points; `asked` is True after SIGTERM or Ctrl-C, which every running point is passed."""

    name: str
    is_elsewhere = True
    """Whether points write to a log instead of this terminal, and outlive an outage of this machine's network."""
    has_packs = False
    """Whether several points can train in one process."""
    asked: bool

    @abstractmethod
    def check(self, config: Config) -> None:
        """Refuse a point that this engine cannot run; asks nothing over the network.

        Raises:
            ConfigError: it cannot.
        """

    @abstractmethod
    def open(self, points: Sequence[Point], *, folder: str, say: Say) -> None:
        """Connect to what runs the points, before the first of them starts; a second call does nothing.

        Raises:
            ConfigError: it cannot be reached, or cannot run one of the points.
        """

    @abstractmethod
    def start(self, point: Point, *, slot: int, limit_seconds: float | None) -> Started:
        """Start a point.

        Args:
            slot: a number that no other running point has, from 0.
            limit_seconds: after which a point that outlives this process ends by itself; None for never.
        """

    def start_pack(self, points: Sequence[Point], *, slot: int) -> Started:
        """Start points that train in one program; only where `has_packs` is True."""
        raise NotImplementedError

    @abstractmethod
    def ask(self) -> None:
        """Ask all running points to save and end, as SIGTERM to this process does."""


class AsksOnSignal(Engine):
    """Turns SIGTERM and the first Ctrl-C into `asked`, which the engine's points look at when they are polled."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Take both signals from now on; what runs points may have installed handlers of its own before."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def ask(self) -> None:
        self.asked = True

    def abandon(self) -> None:
        """Say what is left running; called before a second Ctrl-C ends this process."""

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            self.abandon()
            raise KeyboardInterrupt
        self.asked = True
