"""The export proves itself as a checkpoint does: what lies in `adapter/` or `model/` is read back and looked at.

A whole model is read here for tasks too; an adapter is by export/reading.py.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load
from torch import Tensor

from tpu_experiments.checkpoint.reading import tensors_below
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.full import MODEL
from tpu_experiments.export.peft import ADAPTER_FILE, read_layout
from tpu_experiments.io import paths
from tpu_experiments.io.tensor_file import described, unequal
from tpu_experiments.models.build import BuiltModel
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.progress import Progress
from tpu_experiments.training.proof import Answers, Look, Start, UnprovenError
from tpu_experiments.training.saved import shapes_of, to_host
from tpu_experiments.training.saving import on_first, stopping


class Export:
    """A run's exported adapter or model, read back through the safetensors library."""

    def __init__(
        self, folder: str, *, digests: Mapping[str, str], model: BuiltModel, start: Start, max_held_bytes: float
    ) -> None:
        """`digests` is the SHA-256 of each file of tensors as it was written; empty on processes that wrote none."""
        self._folder, self._digests, self._model, self._start = folder, digests, model, start
        self._max_held_bytes = max_held_bytes

    def proof(self, progress: Progress, *, answers: Answers, runtime: Runtime) -> dict[str, Any]:
        """Verify the export and return the verdict for result.json; every process takes part.

        Raises:
            TrainingStopped: the export differs from what was trained.
        """
        found = on_first(runtime, lambda: self._looked_at(progress)) or {}
        dtype = str(self._model.source.dtype).removeprefix("torch.")
        if self._start.is_adapter or dtype == "float32":
            try:
                found["answer"] = answers.compared(self.tensors)
            except UnprovenError as error:
                raise stopping(error) from error
        else:
            found["answer"] = {"note": f"the export is {dtype} and what was trained float32, so answers differ"}
        return found

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the files' tensors under the run's parameter names; a large model's are read one by one."""
        if self._start.is_adapter:
            layout = load(paths.read_bytes(paths.join(self._folder, ADAPTER_FILE)))
            return read_layout(layout, initial=self._model.initial)
        return tensors_below(self._folder, MODEL, max_held_bytes=self._max_held_bytes)

    def _looked_at(self, progress: Progress) -> dict[str, Any]:
        look, num_bytes = Look(self._start), 0
        expected = shapes_of(self._model.trainable)
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
                found = read_layout(found, initial=self._model.initial)
                complaint = unequal(found, to_host(self._model.trainable))
            else:
                complaint = _other_shapes(found, {name: expected.pop(name) for name in found if name in expected})
            if complaint is not None:
                raise UnprovenError(f"{place}, read back, {complaint}")
            look.at(found)
            del found  # else it stands beside the next file
        if not self._start.is_adapter and expected:
            raise UnprovenError(f"{self._folder}, read back, lacks {len(expected)} of the tensors that were trained")
        digests = list(self._digests.values())
        sha256 = digests[0] if len(digests) == 1 else dict(self._digests)
        return {"bytes": num_bytes, "sha256": sha256, "trained": look.verdict(progress)}


def read_model(folder: str, *, max_held_bytes: float) -> Mapping[str, Tensor]:
    """Return the tensors of a whole model that this program exported.

    Above `max_held_bytes`, each is read when it is accessed.

    Raises:
        ConfigError: there are none, or a file there cannot be read.
    """
    try:
        found = tensors_below(folder, MODEL, max_held_bytes=max_held_bytes)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{folder}; its model cannot be read ({error}); write or copy it again.") from error
    if not found:
        raise ConfigError(f"{folder}; it holds no tensors of a model; write or copy it again.")
    return found


def _other_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return how a model's exported tensors differ in names or shapes from the trained ones, or None."""
    if found.keys() != expected.keys():
        return f"has {len(found)} tensors, of which {len(expected)} were trained and are in no other file"
    wrong = [name for name, tensor in expected.items() if found[name].shape != tensor.shape]
    return f"has {wrong[0]} as {described(found[wrong[0]])}" if wrong else None
