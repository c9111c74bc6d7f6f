"""Points as tasks of a Ray cluster: Ray places them by their chips, and says when a node was lost with one."""

import importlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import COMMAND, PACKAGE, require_checkout
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import lease, paths
from tpu_experiments.storage.retry import is_transient, shown
from tpu_experiments.sweeping.engines import node
from tpu_experiments.sweeping.engines.base import AsksOnSignal, Say, Started
from tpu_experiments.sweeping.leaderboard import RECORD
from tpu_experiments.sweeping.placement import own_cache, require_one_host, slots
from tpu_experiments.sweeping.points import Point, command_of
from tpu_experiments.training.stop import STOPPED_EXIT_CODE

ROOT = str(PACKAGE.parent)
MAX_LOSSES = 10  # nodes lost with one point: spot nodes are reclaimed a few times a day
LEASE_SECONDS = 5.0  # between two looks at the lease that a lost node has left
REACH_SECONDS = 10.0
PROBE_SECONDS = 120.0  # for a node's first worker, which imports Ray
GIVEN = ("HF_", "WANDB_", "XLA_", "LIBTPU_", "OMP_", "GCSFS_", "STORAGE_EMULATOR_HOST")
"""Beginnings of the variables of this process that a point has on its node too: access, and what changes sums."""
ACCELERATOR_TYPES = {"v4": "TPU-V4", "v5litepod": "TPU-V5LITEPOD", "v5p": "TPU-V5P", "v6e": "TPU-V6E"}
"""Ray's name of the chip (ray.util.accelerators) by the beginning of `rent.accelerator_type`."""


def resources_of(hw: HwConfig) -> dict[str, float]:
    """Return what Ray reserves for a point: its chips or GPUs and a CPU."""
    if hw.device == "cpu":
        return {"CPU": 1.0}
    if hw.device == "cuda":
        return {"CPU": 1.0, "GPU": float(hw.num_devices)}
    kind = ACCELERATOR_TYPES.get(hw.rent.accelerator_type.partition("-")[0]) if hw.rent is not None else None
    chips = {"CPU": 1.0, "TPU": float(hw.num_devices)}
    return chips if kind is None else chips | {f"accelerator_type:{kind}": 0.001}  # as Ray's own accelerator_type=


def unplaced(hw: HwConfig, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence if no living node has what a point on `hw` takes; Ray would wait for one without end."""
    wanted = resources_of(hw)
    alive = [each["Resources"] for each in nodes if each["Alive"]]
    if any(all(has.get(name, 0.0) >= amount for name, amount in wanted.items()) for has in alive):
        return None
    shown = ", ".join(name if amount < 1 else f"{amount:.0f} {name}" for name, amount in wanted.items())
    kept = ("CPU", "GPU", "TPU")
    there = sorted(
        {
            (", ".join(f"{has[name]:.0f} {name}" for name in kept if name in has) or "no CPU")
            + "".join(f", {name}" for name in sorted(has) if name.startswith("accelerator_type:"))
            for has in alive
        }
    )
    return (
        f"sweeping.engine=ray; a point on hw={hw.name} takes a node with {shown}, and no node of the cluster has that "
        f"(nodes: {'; '.join(there)}); start one (with an autoscaler, min_workers: 1), or choose another hw."
    )


class RayPoint(Started):
    """A point that is a task of Ray, submitted again when its node was lost."""

    def __init__(self, engine: "RayEngine", point: Point, words: Sequence[str]) -> None:
        self._engine, self._point, self._words = engine, point, words
        self._task: Any = None
        self._losses = 0
        self._is_ending = self._is_cancelled = False
        self._submit_at, self._wait_until = 0.0, time.monotonic() + lease.VALID_SECONDS + lease.RENEW_SECONDS
        self.poll()

    def terminate(self) -> None:
        self._is_ending = True

    def poll(self) -> int | None:
        if self.returncode is not None:
            return self.returncode
        is_ending = self._is_ending or self._engine.asked
        if self._task is None:
            if is_ending:
                self.returncode = STOPPED_EXIT_CODE
            elif self._lease_is_free():
                self._task = self._engine.submit(self._point, self._words)
            return self.returncode
        ray = self._engine.ray
        if is_ending and not self._is_cancelled:
            self._is_cancelled = True
            ray.cancel(self._task)
        if ray.wait([self._task], timeout=0)[0]:
            self._take(ray)
        return self.returncode

    def _take(self, ray: Any) -> None:
        """Take what the task has come to."""
        errors = ray.exceptions
        lost = (errors.WorkerCrashedError, errors.NodeDiedError, errors.LocalRayletDiedError, errors.OutOfMemoryError)
        try:
            self.returncode, self.why = ray.get(self._task)
        except errors.TaskCancelledError:  # it had not started
            self.returncode = STOPPED_EXIT_CODE
        except lost as error:
            self._lose(error)
        except errors.RayError as error:
            self.returncode, self.why = 1, (str(error).strip().splitlines() or [type(error).__name__])[-1]

    def _lose(self, error: Exception) -> None:
        self._losses += 1
        if self._is_cancelled:
            self.returncode = STOPPED_EXIT_CODE
        elif self._losses > MAX_LOSSES:
            self.returncode, self.why = 1, f"its node or worker was lost {self._losses} times ({type(error).__name__})"
        else:
            self._engine.say(
                f"sweep point {self._point.name} was lost with its node or worker ({type(error).__name__}); it is run "
                "again, from its newest checkpoint"
            )
            self._task, self._submit_at = None, 0.0
            self._wait_until = time.monotonic() + lease.VALID_SECONDS + lease.RENEW_SECONDS

    def _lease_is_free(self) -> bool:
        """Return whether to submit now: a process on a lost node holds the run folder until its lease expires."""
        now = time.monotonic()
        if now < self._submit_at:
            return False
        self._submit_at = now + LEASE_SECONDS
        try:
            lease.refuse_if_held(self._point.folder.path(), name=self._point.name)
        except ConfigError:
            return now > self._wait_until  # the point then says itself who holds it
        except Exception as error:
            if not is_transient(error):
                raise
            return False
        return True


class RayEngine(AsksOnSignal):
    """Runs points as tasks of the cluster at RAY_ADDRESS; without one, of this machine's own."""

    name = "ray"

    def __init__(self, *, given: str) -> None:
        super().__init__()
        self._given = given
        self.ray: Any = None
        self.say: Say = print
        self._folder = ""
        self._digest = ""
        self._shared: str | None = None

    def check(self, config: Config) -> None:
        require_checkout("ray")
        require_one_host(config)
        if self.ray is None:
            self.ray = _imported()

    def open(self, points: Sequence[Point], *, folder: str, say: Say) -> None:
        self.say, ray = say, self.ray
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "")
            try:
                _reach(address)
                ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"sweeping.engine=ray; no cluster answers at RAY_ADDRESS={address} ({shown(error)}); start it (ray "
                    "start --head), or unset RAY_ADDRESS, which starts Ray on this machine."
                ) from error
        ray.cloudpickle.register_pickle_by_value(node)
        self.listen()  # ray.init takes SIGTERM for itself
        nodes = [each for each in ray.nodes() if each["Alive"]]
        for point in points:
            problem = unplaced(point.config.hw, nodes)
            if problem is not None:
                raise ConfigError(problem)
        self._folder, digest = folder, node.code_digest(ROOT)
        assert digest is not None, "this is the checkout"
        self._digest = digest
        self._shared = None if paths.is_remote(folder) else folder
        self._probe([each for each in nodes if each["Resources"].get("CPU", 0) > 0])  # a head may have none

    def _probe(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Ask every node that points may run on for the checkout and the sweep's folder.

        Raises:
            ConfigError: one lacks them, or does not answer.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        token = None
        if self._shared is not None:
            paths.make_dirs(self._shared)
            token = paths.join(paths.absolute(self._shared), f".seen_{secrets.token_hex(4)}")
            paths.write_text_atomic(token, "")
        try:
            task = self.ray.remote(num_cpus=0, max_retries=1)(node.node_problem)
            asked = [
                task.options(scheduling_strategy=On(each["NodeID"], soft=False)).remote(
                    ROOT, self._digest, token, folder=os.getcwd()
                )
                for each in nodes
            ]
            for each, answer in zip(nodes, asked, strict=True):
                try:
                    problem = self.ray.get(answer, timeout=PROBE_SECONDS)
                except self.ray.exceptions.RayError as error:
                    problem = f"does not answer ({type(error).__name__}); remove it from the cluster, or repair it."
                if problem is not None:
                    raise ConfigError(f"sweeping.engine=ray; node {each['NodeManagerAddress']} {problem}")
        finally:
            if token is not None:
                paths.remove_tree(token)

    def start(self, point: Point, *, slot: int, limit_seconds: float | None) -> Started:
        config = point.config
        words = command_of(point, given=self._given)[len(COMMAND) :]  # the interpreter and run.py are the node's
        if config.hw.device == "tpu" and slots(config) > 1:
            words += own_cache(slot, config)
        return RayPoint(self, point, words)

    def submit(self, point: Point, words: Sequence[str]) -> Any:
        """Submit a point as a task; Ray does not retry it by itself, so that a loss can be reported."""
        hw, wanted = point.config.hw, resources_of(point.config.hw)
        more = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
        task = self.ray.remote(num_cpus=wanted["CPU"], num_gpus=wanted.get("GPU", 0), resources=more, max_retries=0)(
            node.run_point
        )
        return task.options(name=f"sweep point {point.name}").remote(
            words,
            root=ROOT,
            digest=self._digest,
            shared=None if self._shared is None else paths.absolute(paths.join(self._shared, RECORD)),
            folder=os.getcwd(),
            log=paths.absolute(paths.join(self._folder, "logs", f"{point.name}.log")),
            given={name: value for name, value in os.environ.items() if name.startswith(GIVEN)},
            device=hw.device,
        )


def _reach(address: str) -> None:
    """Connect to the port of a cluster and leave; Ray itself tries for minutes.

    Raises:
        OSError: nothing answers there.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()


def _imported() -> Any:
    """Import Ray, which takes a second and is an extra.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        for part in ("ray.cloudpickle", "ray.exceptions"):
            importlib.import_module(part)
    except ImportError as error:
        raise ConfigError(
            "sweeping.engine=ray; Ray is not installed; install it (pip install 'tpu_experiments[ray]'), or use "
            "sweeping.engine=local."
        ) from error
    return sys.modules["ray"]
