"""The export proves itself as a checkpoint does: what lies in `adapter/` or `model/` is read back and looked at."""

import hashlib
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load
from torch import Tensor

from tpu_experiments.export.full import MODEL_FILE
from tpu_experiments.export.peft import ADAPTER_FILE, read_layout
from tpu_experiments.io import paths
from tpu_experiments.io.tensor_file import described, unequal
from tpu_experiments.models.build import BuiltModel
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.progress import Progress
from tpu_experiments.training.proof import Answers, Start, UnprovenError
from tpu_experiments.training.saved import shapes_of, to_host
from tpu_experiments.training.saving import on_first, stopping


class Export:
    """What a run exported, read back through the safetensors library."""

    def __init__(self, folder: str, *, digest: str | None, model: BuiltModel, start: Start) -> None:
        """`digest` is the SHA-256 of the tensors' file as it was written; None on processes that wrote none."""
        self._digest, self._model, self._start = digest, model, start
        self.path = paths.join(folder, ADAPTER_FILE if start.is_adapter else MODEL_FILE)

    def proof(self, progress: Progress, *, answers: Answers, runtime: Runtime) -> dict[str, Any]:
        """The verdict, for result.json; every process takes part.

        Raises:
            TrainingStopped: the file is not what was trained.
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
        """The file's tensors under the names that the run trained them by."""
        found = load(paths.read_bytes(self.path))
        return read_layout(found, initial=self._model.initial) if self._start.is_adapter else found

    def _looked_at(self, progress: Progress) -> dict[str, Any]:
        paths.forget_cached(self.path)
        content = paths.read_bytes(self.path)
        digest = hashlib.sha256(content).hexdigest()
        if digest != self._digest:
            raise UnprovenError(f"{self.path}, read back, differs from what was written")
        found = self.tensors()
        if self._start.is_adapter:
            complaint = unequal(found, to_host(self._model.trainable))
        else:
            complaint = self._other_shapes(found)
        if complaint is not None:
            raise UnprovenError(f"{self.path}, read back, {complaint}")
        return {"bytes": len(content), "sha256": digest, "trained": self._start.verdict(found, progress)}

    def _other_shapes(self, found: Mapping[str, Tensor]) -> str | None:
        """How a whole model's tensors, which are of another type than the trained ones, differ from them."""
        expected = shapes_of(self._model.trainable)
        if found.keys() != expected.keys():
            return f"has {len(found)} tensors, not the {len(expected)} that were trained"
        wrong = [name for name, tensor in expected.items() if found[name].shape != tensor.shape]
        return f"has {wrong[0]} as {described(found[wrong[0]])}" if wrong else None
