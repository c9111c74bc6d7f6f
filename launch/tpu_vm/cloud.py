"""The Cloud TPU API as far as a launch needs it, through gcloud with --format=json."""

import json
from collections.abc import Callable
from typing import Any

from launch.tpu_vm import commands
from launch.tpu_vm.commands import Target
from launch.tpu_vm.errors import FAILED, LaunchError
from launch.tpu_vm.failures import Kind, advice_for, in_one_line, kind_of
from launch.tpu_vm.machine import Seen
from launch.tpu_vm.running import Run
from launch.tpu_vm.slices import Slice

TRIES = 6


class CloudError(Exception):
    """A failure of the API, with its kind."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Cloud:
    """One launch's view of the API; a failure that passes is tried again before it is told."""

    def __init__(self, run: Run, *, sleep: Callable[[float], None]) -> None:
        self._run = run
        self._sleep = sleep

    def call(self, words: list[str], *, timeout: float = 120.0) -> str:
        """What the command printed.

        Raises:
            CloudError: with the kind of the failure; one that passes only after six tries, with 62 s of waiting.
        """
        for attempt in range(TRIES):
            done = self._run(words, timeout=timeout)
            if done.code == 0:
                return done.out
            kind = kind_of(done.err)
            if kind not in ("transient", "unknown") or attempt == TRIES - 1:
                raise CloudError(kind, in_one_line(done.err) or f"exit code {done.code}")
            self._sleep(2.0 * 2**attempt)
        raise AssertionError("unreachable")

    def look(self, target: Target) -> Seen:
        """The resource and, where it is ACTIVE, its node."""
        try:
            resource = _json(self.call(commands.describe(target)))
        except CloudError as error:
            if error.kind == "absent":
                return Seen("ABSENT")
            raise
        state = resource.get("state", {})
        failure = state.get("failedData", {}).get("error", {})
        name = state.get("state", "CREATING")
        node = self._node_state(target) if name == "ACTIVE" else "ABSENT"
        return Seen(name, node, message=failure.get("message", ""), code=failure.get("code"))

    def _node_state(self, target: Target) -> str:
        try:
            return str(_json(self.call(commands.describe_node(target))).get("state", "CREATING"))
        except CloudError as error:
            if error.kind == "absent":
                return "ABSENT"
            raise

    def create(self, target: Target, slice_: Slice, **lengths: Any) -> None:
        """Ask for the resource; that it is there already is what was wanted."""
        try:
            self.call(commands.create(target, slice_, **lengths), timeout=300.0)
        except CloudError as error:
            if error.kind != "exists":
                raise

    def delete(self, target: Target) -> bool:
        """Delete the resource with its node; False where the API will not yet."""
        try:
            self.call(commands.delete(target), timeout=300.0)
        except CloudError as error:
            if error.kind == "undeletable":
                return False
            if error.kind != "absent":
                raise
        return True


def as_launch_error(error: CloudError) -> LaunchError:
    """One sentence with what to do."""
    advice = f" {advice_for(str(error))}." if error.kind == "structural" else " Try again later."
    return LaunchError(f"{str(error).rstrip('.')};{advice}", code=FAILED)


def _json(text: str) -> dict[str, Any]:
    content = json.loads(text or "{}")
    return content if isinstance(content, dict) else {}
