"""When and how a run saves checkpoints: blocking the loop, or in a background thread from a host copy.

The first save of a process and those that end a stage or the run block training: before they count, the model evaluates
held-out rows with the parameters read back, which must happen on the loop's own thread. Saves in between are written,
read back and verified by a background thread, one at a time. A state too large to be copied as a whole always blocks
training and is streamed file by file: copied from the device, written, read back, verified, dropped.

Where trained tensors are sharded over several hosts, every host writes files of its own: the first begins the
checkpoint, each writes, reads back and verifies its files, and once all have, the first commits it. An error of one
ends the run on all, with its sentence, and the checkpoint does not count. Such checkpoints go to the run folder only:
the local disk of one host would hold a part.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from tpu_experiments.checkpoint import store
from tpu_experiments.checkpoint.errors import (
    TrainingStopped,
    UnprovenError,
    as_training_stopped,
    on_every_process,
    on_rank_zero,
)
from tpu_experiments.checkpoint.manifest import PROGRESS, folder_name, read_manifest
from tpu_experiments.checkpoint.progress import Progress
from tpu_experiments.checkpoint.proof import (
    InitialTensors,
    LossComparison,
    TrainedEvidence,
    evidence_in,
    require_numbers,
)
from tpu_experiments.checkpoint.reading import remember, tensors_below
from tpu_experiments.checkpoint.retention import Keep, Retention
from tpu_experiments.checkpoint.state import PARAMETERS, Snapshot, divided
from tpu_experiments.config.schema import CheckpointConfig
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import complaint, is_explained
from tpu_experiments.storage.spool import First, Spool

# ---- background thread --------------------------------------------------------------------------------------


class Background:
    """Runs jobs in a background thread, in order, never two at once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether a job failed and its error has not been raised yet."""
        return self._error is not None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then run `job`; an error of the previous one is raised here instead.

        Raises:
            BaseException: the error of the previous job, once; `job` is not started then.
        """
        self.join()
        # Not a daemon: the interpreter waits for it at exit, so only a kill can tear a save.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a finished job, once; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait for the running job; raise as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error


# ---- saver --------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
GIB = 2**30
Result = TypeVar("Result")
TakeSnapshot = Callable[[], Snapshot]
"""Returns the state to save, uncopied; called on every process, once earlier saves are done."""
Written = tuple[Snapshot, store.Draft, dict[str, Any] | None]
"""Saved state, its uncommitted checkpoint, and the results of the verification (None without `prove`)."""


class Saver:
    """Writer of one process's checkpoints; every process must make the same calls.

    Rank 0 writes; where tensors are sharded over hosts, every host writes its part.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        spool: Spool,
        *,
        runtime: Runtime,
        start: InitialTensors,
        loss_comparison: LossComparison,
    ) -> None:
        self.settings, self.folder, self._runtime, self._spool = settings, spool.target, runtime, spool
        self.start, self.loss_comparison = start, loss_comparison
        self._worker = Background()
        self._hosts = runtime.hosts.for_thread()
        self._is_divided = False
        """Whether every host wrote a part of the last checkpoint."""
        self._retention = Retention(spool.target)
        self._keep = Keep(settings.keep_last, settings.keep_every, settings.keep_best)
        self._has_compared = not settings.prove
        self._has_logged_size = False
        self._saved_at = time.monotonic()
        self._saved: Progress | None = None
        self.completed: deque[tuple[int, str]] = deque()
        """Step and folder of checkpoints that are complete there since somebody last looked, on process 0."""

    def use_start_fingerprints(self, marks: Mapping[str, str]) -> None:
        """Verify saves against the initial fingerprints of a warm start; empty `marks` change nothing."""
        if marks:
            self.start = replace(self.start, fingerprints=dict(marks))

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self._worker.is_running

    # ---- when to save ---------------------------------------------------------------------------------------

    def is_due(self, step: int, *, is_evaluated: bool, agrees: bool, is_best: bool = False) -> bool:
        """Return whether to save a checkpoint after this step.

        Args:
            is_best: whether the stage may end with the parameters of this step.
            agrees: whether all processes make this call, so that process 0 can share the state of its clock.
        """
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        due = bool(every and step % every == 0) or (is_evaluated and self.settings.keep_best > 0) or is_best
        if minutes and agrees:
            is_late = self._runtime.rank == 0 and time.monotonic() - self._saved_at >= 60 * minutes
            due = self._runtime.any_process(is_late) or due
        return due

    def raise_background_error(self) -> None:
        """Raise the error of a background save, without waiting for one; every process calls it.

        Raises:
            TrainingStopped: it failed.
        """
        if self._runtime.world_size == 1 or self._runtime.any_process(self._worker.has_failed):
            if self._is_divided:
                self.join()  # the same error is on its way on every host
            else:
                self._on_rank_zero(self._worker.check)

    def join(self) -> None:
        """Wait for a background save.

        Raises:
            TrainingStopped: it failed.
        """
        if self._is_divided:
            on_every_process(self._runtime, self._worker.join)
        else:
            self._on_rank_zero(self._worker.join)

    def close(self) -> None:
        """Wait for a background save at the end of the run; its error is only logged."""
        try:
            self._worker.join()
        except Exception as error:
            log.error("the last checkpoint was not completed: %s", error)

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(self, take_snapshot: TakeSnapshot, *, step: int, is_interval: bool, ends_stage: bool = False) -> None:
        """Save what `take_snapshot` returns (on rank 0); return once copied, if it may be written in the background.

        Args:
            is_interval: the run continues, so that nothing has to wait for the save.

        Raises:
            TrainingStopped: this save or the one before it failed.
        """
        self.join()
        self._saved_at = time.monotonic()
        compares = self.settings.prove and (ends_stage or (is_interval and not self._has_compared))
        state = self._divided(take_snapshot())
        fits = self._fits(state)
        if is_interval and not compares and self.settings.background and fits:
            if self._runtime.rank == 0 or self._is_divided:
                copy = state.copied()
                self._worker.start(lambda: self._save_blocking(copy))
            return
        if self._is_divided:
            self._save_divided(state.copied() if fits else state, compares=compares)
            return
        written = self._on_rank_zero(lambda: self._write_draft(state.copied() if fits else state))
        is_elsewhere = self._runtime.rank == 0 and (written is None or written[1].target != self._target(step))
        answer = None
        if not self._runtime.any_process(is_elsewhere) and compares:
            try:
                answer = self.loss_comparison.compare_with(lambda: self._read_back(step))
            except UnprovenError as error:
                raise as_training_stopped(error) from error
            self._has_compared = True
        self._on_rank_zero(lambda: self._commit_draft(written, answer))

    def _divided(self, state: Snapshot) -> Snapshot:
        """Return the state as this process writes it, and note whether others write parts of it."""
        state = divided(state, self._runtime)
        self._is_divided = state.pieces is not None
        return state

    def _read_back(self, step: int) -> Mapping[str, Tensor]:
        return tensors_below(self._target(step), PARAMETERS, max_held_bytes=self.settings.max_copy_gib * GIB)

    def _fits(self, state: Snapshot) -> bool:
        """Return whether the state may be copied as a whole, on every host; log once if not: all saves then block."""
        fits = state.num_bytes <= self.settings.max_copy_gib * GIB
        if self._is_divided:
            fits = not self._runtime.any_process(not fits)
        if self.settings.background and not fits and not self._has_logged_size:
            log.info(
                "state of %.3g GiB exceeds checkpoint.max_copy_gib=%g: checkpoints block training and are streamed in "
                "files of %g GiB (checkpoint.max_shard_gib)",
                state.num_bytes / GIB,
                self.settings.max_copy_gib,
                self.settings.max_shard_gib,
            )
            self._has_logged_size = True
        return fits

    def save_on_stop(self, take_snapshot: TakeSnapshot) -> None:
        """Save on a request to stop: for a remote folder to the local disk; closing the spool uploads it.

        Raises:
            TrainingStopped: this save or the one before it failed.
        """
        self.join()
        state = self._divided(take_snapshot())
        fits = self._fits(state)
        if self._is_divided:
            self._save_divided(state.copied() if fits else state)
            return
        self._on_rank_zero(lambda: self._save_blocking(state.copied() if fits else state, first="spool"))

    def _save_blocking(self, state: Snapshot, *, first: First = "target") -> None:
        """Write and commit, spilling to the local disk if the folder is unreachable (storage/spool.py).

        `_write_draft` and `_commit_draft` spill in the same way; a state that every host writes a part of does not.
        """
        if state.pieces is not None:
            self._save_divided(state)
            return

        def write(folder: str) -> None:
            self._commit(self._write_files(state, folder), None)

        self._spool.save(write, free_space=self._free_space, first=first)

    def _write_draft(self, copy: Snapshot) -> Written | None:
        return self._spool.save(lambda folder: self._write_files(copy, folder), free_space=self._free_space)

    def _commit_draft(self, written: Written | None, answer: dict[str, Any] | None) -> None:
        if written is None:
            return
        own = written[1].target.rpartition("/")[0]

        def commit_to(folder: str) -> None:
            there = written if folder == own else self._write_files(written[0], folder)
            self._commit(there, answer)

        self._spool.save(commit_to, free_space=self._free_space)

    def _free_space(self) -> None:
        """Remove what retention does not keep, before a save that did not fit is repeated."""
        complete = store.latest_step(self.folder)
        if complete:
            eval_loss = read_manifest(self._target(complete)).eval_loss
            self._retention.apply(newest=complete, eval_loss=eval_loss, keep=self._policy_for(self._saved))

    def _policy_for(self, progress: Progress | None) -> Keep:
        """Return the policy, extended by the step that the stage may end with."""
        held = progress.held_step if progress is not None else None
        return self._keep if held is None else replace(self._keep, also=frozenset({held}))

    def _write_files(self, copy: Snapshot, folder: str) -> Written:
        """Write every file and verify it by reading back, if configured; the draft does not count yet."""
        started, progress = time.perf_counter(), copy.progress
        self._saved = progress
        draft = store.begin(folder, step=progress.step, progress=progress.to_dict())
        num_read, evidence = 1, TrainedEvidence(self.start)
        if self.settings.prove:
            store.read_back(draft, PROGRESS)
        for group in copy.groups:
            for name, tensors in copy.files(group, max_bytes=self.settings.max_shard_gib * GIB):
                store.add_tensors(draft, name, tensors)
                if self.settings.prove:
                    found = store.read_tensors(draft, name, tensors)
                    num_read += 1
                    require_numbers(found, group=group)
                    if group == PARAMETERS:
                        evidence.add(found)
                    del found  # free before the next file is copied
                del tensors
        proof = {"read_back": num_read, "trained": evidence.verify(progress)} if self.settings.prove else None
        seconds = time.perf_counter() - started
        log.info("checkpoint of step %d: %.1f MB in %.2f s", progress.step, draft.num_bytes / 1e6, seconds)
        return copy, draft, proof

    def _commit(self, written: Written, answer: dict[str, Any] | None) -> str:
        """Commit the checkpoint, apply the retention policy, and return the manifest's text."""
        copy, draft, proof = written
        progress = copy.progress
        if proof is not None and answer is not None:
            proof["answer"] = answer
        eval_loss = progress.eval_loss if progress.eval_step == progress.step else None
        folder = draft.target.rpartition("/")[0]
        self._spool.upload_records(folder)
        text = store.commit(draft, eval_loss=eval_loss, proof=proof)
        retention = self._retention if folder == self.folder else Retention(folder)
        retention.apply(newest=progress.step, eval_loss=eval_loss, keep=self._policy_for(progress))
        if folder == self.folder:
            self.completed.append((progress.step, draft.target))
        return text

    # ---- saving a part on every host --------------------------------------------------------------------------

    def _save_divided(self, state: Snapshot, *, compares: bool = False) -> None:
        """Write this host's files of a checkpoint, and commit it on the first once every host has verified its own.

        Called on every host, in the loop's thread (with `compares`) or in each one's background thread.

        Raises:
            TrainingStopped: a host could not write or verify its files.
        """
        progress = self._saved = state.progress
        draft = self._begin_together(progress)
        num_read = 1 + self._agreed(lambda: self._write_own(state, draft))
        drafts = self._hosts.gather((draft, num_read - 1))
        proof: dict[str, Any] | None = None

        def merge() -> dict[str, Any] | None:
            if self._hosts.rank > 0:
                return None
            store.merge(draft, [other for other, _ in drafts[1:]])
            return self._evidence(draft, progress, num_read=1 + sum(number for _, number in drafts))

        proof = self._agreed(merge)
        answer = None
        if compares:
            stored = tensors_below(draft.target, PARAMETERS, max_held_bytes=0)
            try:
                answer = self.loss_comparison.compare_with(lambda: stored)
            except UnprovenError as error:
                raise as_training_stopped(error) from error
            self._has_compared = True
        text = self._agreed(lambda: self._commit((state, draft, proof), answer) if self._hosts.rank == 0 else "")
        text = self._hosts.gather(text)[0]
        if self.settings.prove:
            remember(draft.target, text)

    def _begin_together(self, progress: Progress) -> store.Draft:
        """Return this host's draft of a checkpoint, once the first has made its folder."""

        def begin() -> store.Draft | None:
            if self._hosts.rank > 0:
                return None
            draft = store.begin(self.folder, step=progress.step, progress=progress.to_dict())
            if self.settings.prove:
                store.read_back(draft, PROGRESS)
            return draft

        return self._agreed(begin) or store.begun(self.folder, step=progress.step)

    def _write_own(self, state: Snapshot, draft: store.Draft) -> int:
        """Write this host's files, verify each by reading back if configured, and return how many were."""
        started = time.perf_counter()
        before, num_read = draft.num_bytes, 0
        for group in state.groups:
            for name, tensors in state.files(group, max_bytes=self.settings.max_shard_gib * GIB):
                store.add_tensors(draft, name, tensors)
                if self.settings.prove:
                    require_numbers(store.read_tensors(draft, name, tensors), group=group)
                    num_read += 1
                del tensors  # free before the next file is copied
        log.info(
            "checkpoint of step %d: %.1f MB of host %d of %d in %.2f s",
            state.progress.step,
            (draft.num_bytes - before) / 1e6,
            self._hosts.rank,
            self._hosts.size,
            time.perf_counter() - started,
        )
        return num_read

    def _evidence(self, draft: store.Draft, progress: Progress, *, num_read: int) -> dict[str, Any] | None:
        """Return the results of the verification; `num_read` counts the files that the hosts have read back."""
        if not self.settings.prove:
            return None
        stored = tensors_below(draft.target, PARAMETERS, max_held_bytes=0)
        trained = evidence_in(stored, self.start, progress)
        return {"read_back": num_read, "hosts": self._hosts.size, "trained": trained}

    def _agreed(self, action: Callable[[], Result]) -> Result:
        """Run an action on every host and return its own result; an error of one ends the run on all.

        Raises:
            TrainingStopped: with the sentence of the host where the action failed.
        """
        error: Exception | None = None
        cause: Exception | None = None
        text: str | None = None
        try:
            result = action()
        except Exception as caught:
            is_known = is_explained(caught, place=self.folder)
            error = TrainingStopped(complaint(caught, place=self.folder)) if is_known else as_training_stopped(caught)
            text, cause = str(error), None if error is caught else caught
        texts = self._hosts.gather(text)
        if error is not None:
            raise error from cause
        for rank, other in enumerate(texts):
            if other is not None:
                raise TrainingStopped(f"host {rank} of {self._hosts.size}: {other}")
        return result

    def _target(self, step: int) -> str:
        return paths.join(self.folder, folder_name(step))

    def _on_rank_zero(self, action: Callable[[], Result]) -> Result | None:
        return on_rank_zero(self._runtime, action)
