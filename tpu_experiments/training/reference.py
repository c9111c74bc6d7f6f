"""Log-probabilities of documents by the model as it starts, which some losses compare with (`REFERENCE`).

They are computed once, before the first step and without dropout, by one pass over the training rows and those of
evaluations, and stored as a float32 array (N, S) for each source, split and row length: a value for every segment of
every row, or (N, S, 2) for an objective with two. A run that finds such a file of the same start computes its first
batch again and takes the rest if that is equal to the bit, so the points of a sweep share it. A resumed run reads the
files that its checkpoint names.

<prepared data>/references/<source>-<length>-<split>-<key>.npy

Legend: N rows, G rows of a batch, T tokens, S segments.
"""

import hashlib
import io
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tpu_experiments.checkpoint.errors import TrainingStopped, on_rank_zero
from tpu_experiments.config.identity import flatten
from tpu_experiments.data.batches import Batch, fixed_batches
from tpu_experiments.data.prepared import Key
from tpu_experiments.data.rows import Rows, RowSource, RowsOver
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.objectives.base import REFERENCE, Objective
from tpu_experiments.optim.ema import held_of
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.host_copies import host_copy
from tpu_experiments.storage import paths
from tpu_experiments.training.evaluation import AHEAD, Told, evaluating, host_tensors

if TYPE_CHECKING:
    from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)
FOLDER = "references"
Values = NDArray[np.float32]
ValuesOf = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(module, parameters, rows (G, T)) to values (G, S), in a program."""


@dataclass(frozen=True)
class ReferencedRows(RowsOver):
    """Rows with their reference; a `RowSource`."""

    values_NS: Values | None
    """Values (N, S) or (N, S, 2) of the segments 1, 2, ... of each row; None while they are not known: 0 everywhere."""

    def take(self, index_M: NDArray[np.int64] | slice) -> Rows:
        """Return the rows at `index_M`, shape (M, T), each value at the last learnt token of its segment.

        A second value stands before the first learnt token.
        """
        rows = self.rows.take(index_M)
        reference_MT = np.zeros(rows.ids_NT.shape, np.float32)
        if self.values_NS is not None:
            reference_MT = _placed(rows.learn_NT, rows.segments_NT, self.values_NS[index_M])
        return rows.having(**{REFERENCE.name: reference_MT})


def _placed(learn_MT: NDArray[np.int32 | np.bool_], segments_MT: NDArray[np.int32], values_MS: Values) -> Values:
    """Return values (M, S) or (M, S, 2) of segments in their tokens' places, as `ReferencedRows.take` does, (M, T)."""
    reference_MT = np.zeros(learn_MT.shape, np.float32)
    row_L, column_L = np.nonzero(learn_MT)
    place_L = row_L * (learn_MT.shape[1] + 1) + segments_MT[row_L, column_L]
    is_last_L = np.append(place_L[1:] != place_L[:-1], True)[: len(place_L)]
    is_first_L = np.append(True, place_L[1:] != place_L[:-1])[: len(place_L)]
    segment_L = segments_MT[row_L, column_L] - 1
    for number, (is_here_L, before) in enumerate(((is_last_L, 0), (is_first_L, 1))[: values_MS.ndim - 1]):
        at = (row_L[is_here_L], segment_L[is_here_L], number)[: values_MS.ndim]
        reference_MT[row_L[is_here_L], column_L[is_here_L] - before] = values_MS[at]
    return reference_MT


def referred(rows: Batch, host: "Trainer", *, parameters: Mapping[str, Tensor]) -> Batch:
    """Return rows with the values that a model on the host gives them, without dropout."""
    module = host.model.module
    with evaluating(module):
        values_GS = host.objective.reference_values(module, dict(parameters), host_tensors(rows)).numpy()
    reference_GT = _placed(rows.learn_GT, rows.segments_GT, values_GS)
    return Batch.of(rows.arrays | {REFERENCE.name: reference_GT}, labels=rows.labels, noise_G=rows.noise_G)


class Compared(Protocol):
    """What `ReferencePass` reads of a trainer, or of task=evaluate's model."""

    runtime: Runtime
    model: BuiltModel
    parameters: dict[str, Tensor]
    objective: Objective

    def leave_if_requested(self) -> None:
        """Stop if that was requested."""
        ...


class ReferencePass:
    """Compute the values of rows with the current parameters; every process takes part and gets all."""

    def __init__(
        self,
        trainer: Compared,
        *,
        parameters: Mapping[str, Tensor] | None = None,
        values_of: ValuesOf | None = None,
        name: str = "reference",
    ) -> None:
        """Take what has the model; without `parameters` its own of the time of a pass are used.

        Args:
            values_of: computes them; None is the objective's `reference_values`.
            name: that of the program among those that a run expects.
        """
        self.trainer, self.runtime, self._given = trainer, trainer.runtime, parameters
        self.values_of = values_of or trainer.objective.reference_values
        self.program = self.runtime.program(self.values, name=name, held=lambda: held_of(self.parameters))

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters that values are computed with."""
        return self.trainer.parameters if self._given is None else self._given

    def run(self, rows: RowSource, *, global_rows: int) -> Iterator[Values]:
        """Yield the values (G, S) of every batch of the rows in order; those of padding are 0."""
        queued: list[Tensor] = []
        with evaluating(self.trainer.model.module):
            for batch in fixed_batches(rows, global_rows=global_rows):
                self.trainer.leave_if_requested()
                mine = batch.slice_process(*self.runtime.share)
                queued.append(self.program(self.runtime.put(host_tensors(mine), rows_dim=0)))
                if len(queued) > AHEAD:
                    yield host_copy(queued.pop(0)).numpy()
            while queued:
                yield host_copy(queued.pop(0)).numpy()

    def values(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the values (G, S) of the global batch; the program. Each process adds its rows to zeros."""
        rank, world_size = self.runtime.share
        with torch.no_grad():
            own = self.values_of(self.trainer.model.module, dict(self.parameters), batch)
            num = len(own)
            whole = F.pad(own, (*[0, 0] * (own.ndim - 1), rank * num, (world_size - 1 - rank) * num))
            (summed,) = self.runtime.sum_over_processes([whole])
            return self.runtime.constrain(summed, axes=())


def add_reference(trainer: "Trainer", rows: Mapping[Key, tuple[RowSource, int]], *, folder: str) -> None:
    """Give the run's rows their reference, stored or computed; before the first step, or of the run's checkpoint.

    Args:
        rows: rows without reference and those of a batch, by their key.
        folder: of prepared data.

    Raises:
        TrainingStopped: a file that the checkpoint names is missing or was changed.
    """
    progress, found = trainer.progress, trainer.inputs.reference
    assert found is not None, "the objective reads a reference"
    # Of a pack, those that a number on the device chooses.
    computed = ReferencePass(trainer, parameters=trainer.evaluated_parameters)
    for key, (source, global_rows) in rows.items():
        label = "/".join(map(str, key))
        if label in progress.reference:
            found[key] = _recorded(folder, *progress.reference[label])
            continue
        if progress.step > 0:
            raise TrainingStopped(
                f"{label}; the run has no reference for these rows, and its weights are trained already; start it "
                "again under another name."
            )
        name = _file_name(trainer, key, num_rows=source.num_rows, global_rows=global_rows)
        values_NS = _shared(computed, source, global_rows, path=paths.join(folder, FOLDER, name))
        if values_NS is None:
            values_NS = _computed(computed, source, global_rows, what=label)
            data = _encoded(values_NS)
            on_rank_zero(trainer.runtime, _writer(paths.join(folder, FOLDER, name), data))
        found[key] = values_NS
        progress.reference[label] = [name, hashlib.sha256(_encoded(values_NS)).hexdigest()]


def _computed(computed: ReferencePass, rows: RowSource, global_rows: int, *, what: str) -> Values:
    told, parts, began = Told(f"reference of {what}, rows"), [], time.monotonic()
    for number, values_GS in enumerate(computed.run(rows, global_rows=global_rows), start=1):
        parts.append(values_GS)
        told(number * global_rows, rows.num_rows)
    whole = np.concatenate(parts)[: rows.num_rows]
    used_S = np.flatnonzero(whole.any(axis=(0, *range(2, whole.ndim))))
    seconds = time.monotonic() - began
    log.info("reference: %d rows of %s computed in %.1f s with the weights at the start", rows.num_rows, what, seconds)
    return np.ascontiguousarray(whole[:, : int(used_S[-1]) + 1 if len(used_S) else 1])


def _shared(computed: ReferencePass, rows: RowSource, global_rows: int, *, path: str) -> Values | None:
    """Return the values of a file if those of the first batch are the same when computed now."""
    found: Values | None
    try:
        found = _decoded(paths.read_bytes(path))
    except (FileNotFoundError, ValueError):
        found = None
    fits = found is not None and len(found) == rows.num_rows
    if computed.runtime.any_process(not fits):
        return None
    assert found is not None, "it fits"
    first = rows.take(slice(0, global_rows))
    (again_GS,) = computed.run(first, global_rows=global_rows)
    width = found.shape[1]
    again_GS = again_GS[: first.num_rows]
    is_same = np.array_equal(again_GS[:, :width], found[: len(again_GS)]) and not again_GS[:, width:].any()
    if computed.runtime.any_process(not is_same):
        log.warning("%s; its first batch is not what this model computes; the reference is computed again.", path)
        return None
    log.info("reference: %d rows taken from %s", rows.num_rows, path)
    return found


def _recorded(folder: str, name: str, sha256: str) -> Values:
    """Return the values of a file that a checkpoint names."""
    path = paths.join(folder, FOLDER, name)
    try:
        data = paths.read_bytes(path)
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() != sha256:
        what = "was changed" if data else "is missing"
        raise TrainingStopped(
            f"{path}; the reference that this run was trained against {what}, and the weights at its start are gone; "
            "restore the file, or start again under another name."
        )
    return _decoded(data)


def _file_name(trainer: "Trainer", key: Key, *, num_rows: int, global_rows: int) -> str:
    """Return a name that tells everything that the values depend on."""
    config, point = trainer.config, trainer.inputs.start
    source, split, length = key
    prefixes = ["model.", "hw.device", "hw.runtime", "trainer.loss_chunk_tokens", "sharding."]
    begins_as_base = config.lora.r > 0 and config.lora.init in ("b_zero", "a_zero") and point is None
    if not begins_as_base:
        prefixes.append("lora.")
    if getattr(trainer.model.source, "random", False) or not begins_as_base:
        prefixes.append("seed")
    facts = {
        "settings": {name: value for name, value in flatten(config).items() if name.startswith(tuple(prefixes))},
        "start": None if point is None else point.sha256,
        "data": trainer.inputs.audit_hashes[f"{source}@{length}"],
        "rows": [num_rows, global_rows],
        "devices": trainer.runtime.num_devices,
        "torch": torch.__version__,
    }
    if trainer.objective.num_references > 1:
        facts["values"] = trainer.objective.num_references
    if trainer.seat.program is not None:
        facts["program"] = trainer.seat.program  # its sums may be in another order
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{source}-{length}-{split}-{digest[:16]}.npy"


def _encoded(values_NS: Values) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values_NS, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def _decoded(data: bytes) -> Values:
    values: Any = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    if values.dtype != np.float32 or values.ndim not in (2, 3):
        raise ValueError(f"an array of {values.dtype} with {values.ndim} dimensions")
    found: Values = values
    return found


def _writer(path: str, data: bytes) -> Callable[[], None]:
    def write() -> None:
        paths.make_dirs(paths.folder_of(path))
        paths.write_bytes_atomic(path, data)

    return write
