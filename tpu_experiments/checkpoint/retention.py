"""Retention and removal of checkpoints.

COMMIT.json is removed first, so that no half-removed checkpoint counts as complete.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tpu_experiments.checkpoint.manifest import COMMIT, folder_name, read_manifest, steps_in
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keep:
    """The retention policy, from the config's `checkpoint.keep_*`."""

    last: int = 1
    every: int = 0
    best: int = 0
    also: frozenset[int] = frozenset()
    """Steps that are kept in any case."""


def steps_to_keep(steps: Iterable[int], losses: Mapping[int, float], *, keep: Keep) -> set[int]:
    """Return the steps to keep: the newest, the multiples of `every`, the lowest held-out losses, `also`.

    `steps` are those of complete checkpoints. Of equal losses the earlier step ranks first; a loss that is not finite
    is ignored.

    >>> sorted(kept(range(10, 60, 10), {10: 3.0, 20: 2.0, 40: 2.5}, keep=Keep(last=1, every=30, best=2)))
    [20, 30, 40, 50]
    """
    ordered = sorted(steps)
    ranked = sorted((loss, step) for step, loss in losses.items() if step in ordered and math.isfinite(loss))
    best = {step for _, step in ranked[: keep.best]}
    multiples = {step for step in ordered if keep.every and step % keep.every == 0}
    return {*ordered[-keep.last :], *multiples, *best, *keep.also.intersection(ordered)}


class Retention:
    """Removes the checkpoints that a policy does not keep; caches which ones of its folder are complete."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._losses: dict[int, float | None] = {}
        """Held-out losses of the known complete checkpoints, by step."""
        self._foreign: set[int] = set()
        """Steps whose checkpoints this program cannot have written in this form; they are kept as evidence."""

    def apply(self, *, newest: int, eval_loss: float | None, keep: Keep) -> None:
        """Apply the policy; call it once the checkpoint of step `newest` is complete.

        A checkpoint of a later step is damaged or was rolled back, or else the run would have restarted from it: it
        must not count as the newest. What cannot be removed is logged and left.
        """
        self._losses[newest] = eval_loss
        found = steps_in(self._folder)
        complete = [step for step in found if step <= newest and self._is_complete(step)]
        losses = {step: loss for step in complete if (loss := self._losses[step]) is not None}
        stay = steps_to_keep(complete, losses, keep=keep) | self._foreign
        for step in found:
            if step not in stay:
                self._losses.pop(step, None)
                remove(paths.join(self._folder, folder_name(step)))

    def _is_complete(self, step: int) -> bool:
        if step in self._foreign:
            return False
        if step not in self._losses:
            target = paths.join(self._folder, folder_name(step))
            try:
                self._losses[step] = read_manifest(target).eval_loss
            except ConfigError as error:
                log.warning("%s", error)
                self._foreign.add(step)
                return False
            except (FileNotFoundError, ValueError):
                return False
        return True


def remove(target: str) -> None:
    """Remove a checkpoint, its marker first; an error is only logged, since the run can continue."""
    try:
        paths.remove_marked(target, COMMIT)
    except Exception as error:  # file systems raise types of their own
        log.warning("checkpoint %s could not be removed (%s): it still takes space", target, error)
