"""Errors of a failed save, and how they end all processes of a run together."""

from collections.abc import Callable
from typing import TypeVar

from tpu_experiments.checkpoint import store
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.storage.retry import StorageFailed

Result = TypeVar("Result")


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message says where and why."""


class UnprovenError(RuntimeError):
    """A save failed verification and must not count; the message says why."""


def on_rank_zero(runtime: Runtime, action: Callable[[], Result]) -> Result | None:
    """Run an action on rank 0 and return its result, None on the others; an error stops all processes."""
    return on_every_process(runtime, lambda: action() if runtime.rank == 0 else None)


def on_every_process(runtime: Runtime, action: Callable[[], Result]) -> Result:
    """Run an action on every process and return its own result; an error of one stops all."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    if runtime.any_process(error is not None):
        stopped = as_training_stopped(error)
        if stopped is error:
            raise stopped  # it would be its own cause
        raise stopped from error
    return result


def as_training_stopped(error: Exception | None) -> Exception:
    """Return the exception that ends the run."""
    if error is None:
        return TrainingStopped("another process could not save a checkpoint; its own message says why.")
    if isinstance(error, UnprovenError):
        return TrainingStopped(f"stopped instead of saving: {error}; the checkpoints before it stay.")
    if isinstance(error, StorageFailed):
        return TrainingStopped(str(error))
    if isinstance(error, store.StorageError | OSError):
        return TrainingStopped(
            f"a checkpoint could not be saved: {error}; the ones before it stay; mend the storage (room, permission), "
            "then the same command resumes from them."
        )
    return error
