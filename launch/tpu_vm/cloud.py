"""Call the Cloud TPU API, as far as a launch needs it, through gcloud with --format=json."""

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
    """Failure of the API, classified by `kind` (failures.py)."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Cloud:
    """Client of the Cloud TPU API for one launch; transient failures are retried before they are raised."""

    def __init__(self, run: Run, *, sleep: Callable[[float], None]) -> None:
        self._run = run
        self._sleep = sleep

    def call(self, words: list[str], *, timeout: float = 120.0) -> str:
        """Run a gcloud command and return its standard output.

        Raises:
            CloudError: classified; for a transient or unknown failure only after six tries with 62 s of waiting in all.
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
        """Return the state of the queued resource and, where it is ACTIVE, of its node."""
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
        """Request the queued resource; one that already exists counts as success."""
        try:
            self.call(commands.create(target, slice_, **lengths), timeout=300.0)
        except CloudError as error:
            if error.kind != "exists":
                raise

    def delete(self, target: Target) -> bool:
        """Delete the resource with its node; return False where the API refuses in its present state."""
        try:
            self.call(commands.delete(target), timeout=300.0)
        except CloudError as error:
            if error.kind == "undeletable":
                return False
            if error.kind != "absent":
                raise
        return True


def as_launch_error(error: CloudError) -> LaunchError:
    """Turn an API failure into one sentence for the user, with what to do."""
    advice = f" {advice_for(str(error))}." if error.kind == "structural" else " Try again later."
    return LaunchError(f"{str(error).rstrip('.')};{advice}", code=FAILED)


def _json(text: str) -> dict[str, Any]:
    content = json.loads(text or "{}")
    return content if isinstance(content, dict) else {}
