"""Trainers whose checkpoints are wrong, each in one way: what `task=resume_check` must find. See test_nets.py."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tpu_experiments.checkpoint.saver import Saver
from tpu_experiments.checkpoint.state import OPTIMIZER, PARAMETERS, Snapshot, to_host
from tpu_experiments.training.batches import StepInfo
from tpu_experiments.training.trainer import Trainer

WAIT_SECONDS = 60.0


class Mutant(Trainer):
    """Writes `wrong(copy)` in place of each copy that is written in the background; all else is as it should be."""

    def build_saver(self) -> Saver:
        """The saver, changed."""
        saver = super().build_saver()
        save = saver._save_blocking
        saver._save_blocking = lambda state, **options: save(self.wrong(state), **options)
        return saver

    def wrong(self, copy: Snapshot) -> Snapshot:
        """What is written."""
        return copy


class ZeroOptimizer(Mutant):
    """Saves an optimizer that has seen nothing."""

    def wrong(self, copy: Snapshot) -> Snapshot:
        """With all of its state zero."""
        zeros = {name: torch.zeros_like(t) for name, t in copy.groups[OPTIMIZER].items()}
        return replace(copy, groups={**copy.groups, OPTIMIZER: zeros})


class StaleParameters(Mutant):
    """Saves the parameters of the step before."""

    def queue_step(self, info: StepInfo, batch: Mapping[str, Tensor]) -> None:
        """Keep what the step begins with."""
        earlier: dict[int, dict[str, Tensor]] = self.__dict__.setdefault("earlier", {})
        earlier[self.progress.step] = to_host(self.parameters)
        super().queue_step(info, batch)

    def wrong(self, copy: Snapshot) -> Snapshot:
        """With the parameters as they were before the last step."""
        return replace(copy, groups={**copy.groups, PARAMETERS: self.earlier[copy.progress.step - 1]})


class StageStepBack(Mutant):
    """Saves a place in the stage one step back; the step of the run is right."""

    def wrong(self, copy: Snapshot) -> Snapshot:
        """So that the resumed run does a step of the stage twice."""
        return replace(copy, progress=replace(copy.progress, stage_step=copy.progress.stage_step - 1))


class LostWindow(Trainer):
    """Leaves the losses of an open log window out of every checkpoint."""

    def snapshot(self) -> Snapshot:
        """Without them."""
        taken = super().snapshot()
        taken.progress.open_losses = []
        return taken


class NoCopy(Mutant):
    """Writes the live tensors once the next step has changed them."""

    def wrong(self, copy: Snapshot) -> Snapshot:
        """The position of the copy with the tensors of a later step."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.progress.step == copy.progress.step:
            assert time.monotonic() < deadline, "no step came after the save"
            time.sleep(0.01)
        groups = {group: to_host(tensors) for group, tensors in self.snapshot().groups.items()}
        return replace(copy, groups=groups)
