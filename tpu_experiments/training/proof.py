"""What a save must show before it counts: parameters that training has changed, an adapter that does something, and
the live model's answer from what storage gives back.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tpu_experiments.data.batches import Batch
from tpu_experiments.io.finite import not_finite
from tpu_experiments.models.lora import A, B
from tpu_experiments.models.trained import effects, num_changed
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.stacked import stacked
from tpu_experiments.training.evaluate import Evaluator
from tpu_experiments.training.progress import Progress

log = logging.getLogger(__name__)
NUM_TRIES = 3
"""Answers that are compared at most: several threads of XLA's CPU device add in an order of their own, so that on a
busy machine a program now and then differs from itself by an ulp."""
Tensors = Mapping[str, Tensor]


class UnprovenError(RuntimeError):
    """A save failed verification and must not count; the message says why."""


@dataclass(frozen=True)
class Start:
    """Initial state that trained tensors are compared with."""

    fingerprints: Mapping[str, str]
    """Of every trained tensor at its start (models/trained.py)."""
    adapters: Tensors = field(default_factory=dict)
    """PiSSA's A and B at their start; empty otherwise."""
    is_adapter: bool = True

    def verdict(self, tensors: Tensors, progress: Progress) -> dict[str, Any]:
        """Return evidence that training changed the host tensors.

        Raises:
            UnprovenError: after steps with a learning rate above 0, all tensors have their initial values, or the
                adapter has no effect.
        """
        look = Look(self)
        look.at(tensors)
        return look.verdict(progress)


class Look:
    """Evidence that tensors were trained, collected file by file."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._num_tensors = self._num_changed = 0
        self._norms: dict[str, float] = {}
        self._halves: dict[str, Tensor] = {}
        """A or B of modules whose other one is in a file to come."""

    def at(self, tensors: Tensors) -> None:
        """Add the tensors of one file."""
        self._num_tensors += len(tensors)
        self._num_changed += num_changed(tensors, self._start.fingerprints)
        if self._start.is_adapter:
            known = {**self._halves, **tensors}
            whole = {name: t for name, t in known.items() if _other_half(name) in known}
            self._halves = {name: t.clone() for name, t in known.items() if name not in whole}
            self._norms |= effects(whole, start=self._start.adapters)

    def verdict(self, progress: Progress) -> dict[str, Any]:
        """Return the evidence over all files; raises as `Start.verdict` does."""
        total, changed, norms = self._num_tensors, self._num_changed, self._norms
        was_trained = progress.peak_lr > 0
        kind = "adapter" if self._start.is_adapter else "model"
        found: dict[str, Any] = {"tensors": total, "changed": changed, "peak_lr": progress.peak_lr}
        after = f"after {progress.step} steps with learning rates up to {progress.peak_lr:.3g}"
        if was_trained and not changed:
            raise UnprovenError(
                f"every one of the {total} trained tensors has its initial value {after}, so it would be an "
                f"untrained {kind}; look at train/grad_norm, and at how many tokens are learnt"
            )
        if self._start.is_adapter:
            found |= {"modules": len(norms), "with_effect": sum(norm > 0 for norm in norms.values())}
            found |= {"largest_effect": max(norms.values(), default=0.0)}
            if was_trained and not found["with_effect"]:
                raise UnprovenError(
                    f"B A is zero in all {len(norms)} adapted modules {after}, so the adapter would leave the base "
                    "model as it is; look at train/grad_norm, and at lora.init"
                )
        if not was_trained:
            found["note"] = "no step had a learning rate above 0, so nothing had to change"
        return found


def require_numbers(tensors: Tensors, *, group: str) -> None:
    """Require finite values in the host tensors of a group.

    Raises:
        UnprovenError: one is NaN or infinite.
    """
    for name, tensor in tensors.items():
        bad = not_finite(tensor)
        if bad is not None:
            raise UnprovenError(
                f"{bad} of {group} {name} are NaN or infinite, and nobody could go on from it; lower optim.lr, or "
                "look at your optimizer"
            )


def _other_half(name: str) -> str:
    """Return `...lora_B` for `...lora_A` and vice versa."""
    module, _, kind = name.rpartition(".")
    return f"{module}.{B if kind == A else A}"


class Answers:
    """Model outputs on one batch of held-out rows, by evaluation's program, so nothing more is compiled.

    Only on the training loop's thread: a device tensor created by another thread while a step is traced would become
    part of that step's program.
    """

    def __init__(self, evaluator: Evaluator, batch: Batch | None, *, runtime: Runtime, parameters: dict[str, Tensor]):
        self._evaluator, self._batch, self._runtime, self._parameters = evaluator, batch, runtime, parameters

    def compared(self, read: Callable[[], Tensors]) -> dict[str, Any]:
        """Require stored tensors to give the live parameters' loss; every process takes part.

        The host tensors have Hugging Face's names. Return the loss and whether it was equal bit for bit.

        Raises:
            UnprovenError: the losses differ, though the live parameters gave the same loss every time.
        """
        if self._batch is None:
            return {"note": "there are no held-out rows to answer"}
        live, back = [self._ask()], [self._with(read())]
        while back[-1] not in live and len(live) < NUM_TRIES:
            live.append(self._ask())
            back.append(self._with(read()))
        loss, tokens = live[0]
        found = {"rows": self._batch.num_rows, "tokens": int(tokens), "loss": loss / max(tokens, 1.0)}
        if back[-1] in live:
            return found | {"equal_bits": True}
        if len(set(live)) == 1:
            raise UnprovenError(
                f"held-out rows have the loss sum {loss!r} with the live parameters and {back[-1][0]!r} with those "
                "read back from storage"
            )
        log.warning("the model answers %s to the same rows with the same parameters; not compared", live)
        return found | {"equal_bits": False, "note": "the live model does not give the same answer twice"}

    def _with(self, tensors: Tensors) -> tuple[float, float]:
        """Return the loss with other parameters, and restore the live ones."""
        own = dict(self._parameters)
        try:
            for name in own:
                self._parameters[name] = self._runtime.place(stacked(tensors, name), name=name)
            return self._ask()
        finally:
            self._parameters.update(own)

    def _ask(self) -> tuple[float, float]:
        assert self._batch is not None, "`compared` looks"
        return self._evaluator.sums_of(self._batch)
