"""Verification of a checkpoint or export before it counts.

It is read back from storage and compared with what was trained: parameters must have changed, an adapter must have an
effect, and held-out rows must have the same loss as with the live model. `read_model` also serves tasks that read an
exported model; adapters are read by export/reading.py.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from safetensors.torch import load
from torch import Tensor

from tpu_experiments.checkpoint.errors import UnprovenError, as_training_stopped, on_rank_zero
from tpu_experiments.checkpoint.progress import Progress
from tpu_experiments.checkpoint.reading import metadata_of, tensors_below, without_values
from tpu_experiments.checkpoint.state import boxes_needed, shapes_of, to_host, with_boxes
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.batches import Batch
from tpu_experiments.export.full import BUFFERS, MODEL
from tpu_experiments.export.peft import ADAPTER_FILE, read_layout
from tpu_experiments.models.adapters.experts import ranks_of_matrices
from tpu_experiments.models.adapters.lora import A, B, effects, num_changed
from tpu_experiments.models.sources.buffers import persistent_buffers
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.stacked import is_adapter_part
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.tensors import described, group_in, not_finite, unequal

log = logging.getLogger(__name__)
NUM_TRIES = 3
"""Largest number of comparisons: XLA's CPU device sums in several threads in no fixed order, so on a busy machine two
runs of one program occasionally differ by an ulp."""
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class InitialTensors:
    """Initial state that trained tensors are compared with."""

    fingerprints: Mapping[str, str]
    """Fingerprint of every trained tensor's initial value (models/adapters/lora.py)."""
    adapters: Tensors = field(default_factory=dict)
    """Initial A and B whose product is not zero (PiSSA, LoftQ); empty for other initialisations."""
    is_adapter: bool = True

    def verify(self, tensors: Tensors, progress: Progress) -> dict[str, Any]:
        """Return evidence that training changed the host tensors.

        Raises:
            UnprovenError: after steps with a learning rate above 0, all tensors have their initial values, or the
                adapter has no effect.
        """
        evidence = TrainedEvidence(self)
        evidence.add(tensors)
        return evidence.verify(progress)


class TrainedEvidence:
    """Evidence that tensors were trained, collected file by file."""

    def __init__(self, start: InitialTensors) -> None:
        self._start = start
        self._num_tensors = self._num_changed = 0
        self._norms: dict[str, float] = {}
        self._halves: dict[str, Tensor] = {}
        """A or B of modules whose other half is in a later file."""
        self._of_other_length: set[str] = set()
        """Modules whose rows have other lengths (DoRA) or scales (LR-QAT) than at first, or other values (tokens), and
        embeddings: an effect even where B A is zero."""

    def add(self, tensors: Tensors) -> None:
        """Add the tensors of one file."""
        self._num_tensors += len(tensors)
        self._num_changed += num_changed(tensors, self._start.fingerprints)
        if self._start.is_adapter:
            lengths = {n: t for n, t in tensors.items() if is_adapter_part(n) and not n.endswith((A, B))}
            moved = (name for name, t in lengths.items() if num_changed({name: t}, self._start.fingerprints))
            self._of_other_length |= {name.rpartition(".")[0] for name in moved}
            known = {**self._halves, **{name: t for name, t in tensors.items() if name.endswith((A, B))}}
            whole = {name: t for name, t in known.items() if _other_half(name) in known}
            self._halves = {name: t.clone() for name, t in known.items() if name not in whole}
            self._norms |= effects(whole, start=self._start.adapters)

    @property
    def is_enough(self) -> bool:
        """Return whether no further tensor can change the verdict."""
        return bool(self._num_changed) and not self._start.is_adapter

    def verify(self, progress: Progress) -> dict[str, Any]:
        """Return the evidence over all files; raises as `InitialTensors.verify` does."""
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
            with_effect = {name for name, norm in norms.items() if norm > 0} | self._of_other_length
            found |= {"modules": len(norms), "with_effect": len(with_effect)}
            found |= {"largest_effect": max(norms.values(), default=0.0)}
            if was_trained and not found["with_effect"]:
                raise UnprovenError(
                    f"B A is zero in all {len(norms)} adapted modules {after}, so the adapter would leave the base "
                    "model as it is; look at train/grad_norm, and at lora.init"
                )
        if not was_trained:
            found["note"] = "no step had a learning rate above 0 and anything to learn, so nothing had to change"
        return found


def evidence_in(tensors: Tensors, start: InitialTensors, progress: Progress) -> dict[str, Any]:
    """Return evidence that stored tensors, written by several hosts in pieces, were trained.

    An adapter is read whole, tensor by tensor. Of a model the smallest tensors are read until one has changed, since
    no host holds all of it; `tensors` in the result is the number of those read. Raises as `InitialTensors.verify`.
    """
    evidence, shapes = TrainedEvidence(start), without_values(tensors)
    for name in sorted(shapes, key=lambda each: (shapes[each].numel(), each)):
        evidence.add({name: tensors[name]})
        if evidence.is_enough:
            break
    return evidence.verify(progress) | {"of_tensors": len(shapes)}


def require_numbers(tensors: Tensors, *, group: str) -> None:
    """Require finite values in the host tensors of a group.

    Raises:
        UnprovenError: one is NaN or infinite.
    """
    for name, tensor in tensors.items():
        bad = not_finite(tensor)
        if bad is not None:
            raise UnprovenError(
                f"{bad} of {group} {name} are NaN or infinite, so no run could resume from it; lower optim.lr, or "
                "look at your optimizer"
            )


def _other_half(name: str) -> str:
    """Return `...lora_B` for `...lora_A` and vice versa."""
    module, _, kind = name.rpartition(".")
    return f"{module}.{B if kind == A else A}"


class Evaluator(Protocol):
    """Evaluation that `LossComparison` uses (implemented in training/evaluation.py)."""

    def sums_of(self, batch: Batch) -> tuple[float, float]:
        """Loss sum in nats and number of supervised tokens of a batch."""
        ...


class LossComparison:
    """Comparison of stored and live parameters by the loss on one batch of held-out rows.

    It runs evaluation's program, so it compiles nothing. Use it on the training loop's thread only: a device tensor
    that another thread creates while a step is traced would become part of that step's program.
    """

    def __init__(self, evaluator: Evaluator, batch: Batch | None, *, runtime: Runtime, parameters: dict[str, Tensor]):
        self._evaluator, self._batch, self._runtime, self._parameters = evaluator, batch, runtime, parameters

    def compare_with(self, read_stored: Callable[[], Tensors]) -> dict[str, Any]:
        """Require stored tensors to have the live parameters' loss; every process takes part.

        `read_stored` returns host tensors under Hugging Face's names. Returns the loss in nats per token, and whether
        the loss sums were equal bit for bit.

        Raises:
            UnprovenError: the losses differ, although the live parameters' loss was the same every time.
        """
        if self._batch is None:
            return {"note": "there are no held-out rows to answer"}
        live, back = [self._live_loss()], [self._loss_with(read_stored)]
        while back[-1] not in live and len(live) < NUM_TRIES:
            live.append(self._live_loss())
            back.append(self._loss_with(read_stored))
        loss, tokens = live[0]
        found = {"rows": self._batch.num_rows, "tokens": int(tokens), "loss": loss / max(tokens, 1.0)}
        if back[-1] in live:
            return found | {"equal_bits": True}
        if len(set(live)) == 1:
            raise UnprovenError(
                f"held-out rows have the loss sum {loss!r} with the live parameters and {back[-1][0]!r} with those "
                "read back from storage"
            )
        log.warning(
            "the same parameters gave different losses for the same rows (%s): the stored ones are not compared",
            live,
        )
        return found | {"equal_bits": False, "note": "the live model does not give the same answer twice"}

    def _loss_with(self, read_stored: Callable[[], Tensors]) -> tuple[float, float]:
        """Return the loss with other parameters, and restore the live ones.

        Each of several hosts reads what its devices hold.
        """
        own, boxes = dict(self._parameters), boxes_needed(self._runtime)

        def place_stored() -> None:
            tensors = read_stored()
            for name, now in own.items():
                tensor, _ = with_boxes(tensors, name, now, boxes=None if boxes is None else boxes(now))
                self._parameters[name] = self._runtime.place(tensor, name=name)

        try:
            self._runtime.hosts.together(place_stored)
            return self._live_loss()
        finally:
            self._parameters.update(own)

    def _live_loss(self) -> tuple[float, float]:
        assert self._batch is not None, "`compare_with` looks"
        return self._evaluator.sums_of(self._batch)


class Export:
    """A run's exported adapter or model, read back through the safetensors library."""

    def __init__(
        self,
        folder: str,
        *,
        digests: Mapping[str, str],
        model: BuiltModel,
        start: InitialTensors,
        max_held_bytes: float,
        trained: Tensors | None = None,
    ) -> None:
        """Create a verification of the files in `digests`, the SHA-256 of each file of tensors as written.

        `digests` is empty on processes that wrote none. `trained` has the trained tensors under Hugging Face's names
        where the model's own are on several hosts.
        """
        self._folder, self._digests, self._model, self._start = folder, digests, model, start
        self._max_held_bytes, self._trained = max_held_bytes, trained

    def verify(self, progress: Progress, *, loss_comparison: LossComparison, runtime: Runtime) -> dict[str, Any]:
        """Verify the export and return the verdict for result.json; every process takes part.

        Raises:
            TrainingStopped: the export differs from what was trained.
        """
        found = on_rank_zero(runtime, lambda: self._verify_files(progress)) or {}
        dtype = str(self._model.source.dtype).removeprefix("torch.")
        if self._start.is_adapter or dtype == "float32":
            try:
                found["answer"] = loss_comparison.compare_with(self.tensors)
            except UnprovenError as error:
                raise as_training_stopped(error) from error
        else:
            found["answer"] = {"note": f"the export is {dtype} and what was trained float32, so answers differ"}
        return found

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the files' tensors under the run's parameter names; a large model's are read one by one."""
        if self._start.is_adapter:
            return self._adapter(load(paths.read_bytes(paths.join(self._folder, ADAPTER_FILE))))
        return trained_below(self._folder, max_held_bytes=self._max_held_bytes)

    def _adapter(self, layout: Tensors) -> dict[str, Tensor]:
        """Return the adapter's tensors under the run's parameter names."""
        source, ranks = self._model.source, ranks_of_matrices(self._model.module)
        try:
            return read_layout(layout, initial=self._model.taken_out, tied=source.tied_names, ranks=ranks)
        except ValueError as error:
            raise UnprovenError(f"{self._folder}, read back: {error}") from error

    def _verify_files(self, progress: Progress) -> dict[str, Any]:
        evidence, num_bytes = TrainedEvidence(self._start), 0
        expected = shapes_of(self._model.trainable)
        buffers = {} if self._start.is_adapter else persistent_buffers(self._model.source.empty())
        for file, digest in self._digests.items():
            place = paths.join(self._folder, file)
            paths.forget_cached(place)
            content = paths.read_bytes(place)
            if hashlib.sha256(content).hexdigest() != digest:
                raise UnprovenError(f"{place}, read back, differs from what was written")
            num_bytes += len(content)
            found = load(content)
            del content  # the library has copied it
            if self._start.is_adapter:
                found = self._adapter(found)
                trained = to_host(self._model.trainable) if self._trained is None else dict(self._trained)
                complaint = unequal(found, trained)
            else:
                own = {name: buffers.pop(name) for name in found if name in buffers}
                complaint = unequal({name: found.pop(name) for name in own}, own)
                complaint = complaint or _other_shapes(
                    found, {name: expected.pop(name) for name in found if name in expected}
                )
            if complaint is not None:
                raise UnprovenError(f"{place}, read back, {complaint}")
            evidence.add(found)
            del found  # free before the next file is read
        if not self._start.is_adapter and expected:
            raise UnprovenError(f"{self._folder}, read back, lacks {len(expected)} of the tensors that were trained")
        if buffers:
            raise UnprovenError(f"{self._folder}, read back, lacks {len(buffers)} of the model's buffers")
        digests = list(self._digests.values())
        sha256 = digests[0] if len(digests) == 1 else dict(self._digests)
        return {"bytes": num_bytes, "sha256": sha256, "trained": evidence.verify(progress)}


def read_model(folder: str, *, max_held_bytes: float) -> Mapping[str, Tensor]:
    """Return the trained tensors of a whole model that this program exported, without its buffers.

    Above `max_held_bytes`, each tensor is read when it is accessed.

    Raises:
        ConfigError: the folder holds no tensors of a model, or a file cannot be read.
    """
    try:
        found = trained_below(folder, max_held_bytes=max_held_bytes)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{folder}; its model cannot be read ({error}); write or copy it again.") from error
    if not found:
        raise ConfigError(f"{folder}; it holds no tensors of a model; write or copy it again.")
    return found


def trained_below(folder: str, *, max_held_bytes: float) -> Mapping[str, Tensor]:
    """Return the tensors of an exported model that are no buffers.

    Raises:
        ValueError: a file of the model is no safetensors file.
    """
    files = [paths.join(folder, name) for name in paths.list_names(folder) if group_in(name) == MODEL]
    lists = [strict_json.loads(metadata_of(file).get(BUFFERS, "[]")) for file in files]
    buffers = {str(name) for names in lists if isinstance(names, list) for name in names}
    return tensors_below(folder, MODEL, max_held_bytes=max_held_bytes, left_out=buffers)


def _other_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return how a model's exported tensors differ in names or shapes from the trained ones, or None."""
    if found.keys() != expected.keys():
        return f"has {len(found)} tensors, of which {len(expected)} were trained and are in no other file"
    wrong = [name for name, tensor in expected.items() if found[name].shape != tensor.shape]
    return f"has {wrong[0]} as {described(found[wrong[0]])}" if wrong else None
