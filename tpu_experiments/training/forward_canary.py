"""Forward canary: held-out losses of a few short rows on the device against plain torch on the host.

A kernel that leaves out RoPE, a wrong mask or a kernel of another layer raises no error, on one chip or on many: the
run only learns less. Before the first step the run's own evaluation program, at its own shape, computes rows of several
packed documents, one row at a time, so that it need not be compiled for it. The same rows go through the same model in
plain torch, in float32, on the host's CPU. The model is whole on both sides: with layers left out the device would
compile another program than the run's, which takes longer than the whole model's few hundred tokens on the host.

What rounding may change is computed, not assumed: the host repeats its losses with inputs and outputs of all modules
rounded as the device rounds. `STOP` times that difference is the limit, for random weights and trained ones, for two
layers and for eighty, and where rounding decides (routers, quantised inputs). It is 1 for a device that rounds as
often; tests/benchmarks/RESULTS.md has what was measured, of right programs and of wrong ones.
"""

import copy
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.state import to_host
from tpu_experiments.config.schema import Config
from tpu_experiments.data.batches import PADDING_LABEL, Batch
from tpu_experiments.models.passes.forward import window_of
from tpu_experiments.runtime.kernels.attention import without_attention_kernel
from tpu_experiments.training.canary import HostModel, is_referred, perturbed, skip_reason, write_parameters
from tpu_experiments.training.reference import referred

if TYPE_CHECKING:  # the trainer calls this module
    from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)
WARN, STOP = 3.0, 6.0
SHARES = (2, 4, 8, 8)
"""Parts of `trainer.canary.max_tokens` that each row has: one mean loss may be right by chance, four are not."""
PADDING = 3
"""Tokens of padding of the first row; each further one has one more."""
SMALLEST = 8
"""Tokens of the shortest document that a row is filled up with."""
MOST_FOR_WINDOW = 4
"""Multiple of `trainer.canary.max_tokens` up to which the first row is made longer than the model's sliding window."""
FLOAT32_BITS = 24
BITS = {"bfloat16": 8, "float16": 11, "float32": 20}
"""Bits of a rounded value, by data type; sums in another order leave about 20 of float32's 24."""
FEWER_BITS = (0, 1)
"""Bits less in each repetition on the host, whose differences count half with each bit less."""
LOSS_BITS = 22
"""Bits of a row's mean loss that its sum, of some hundred nats in float32, leaves."""


class Document(NamedTuple):
    """Token ids (L,) of a held-out document as it is packed, which of them are learnt, and further arrays of tokens."""

    ids: NDArray[np.int32]
    learn: NDArray[np.int32]
    more: dict[str, NDArray[Any]]


@dataclass
class LossFindings:
    """Mean losses of rows in nats, and how far the device's are from the host's."""

    found: list[float]
    """On the device."""
    expected: list[float]
    """On the host, in float32."""
    rounded: list[list[float]]
    """On the host with rounded values, by `FEWER_BITS`."""
    draws: bool = False
    """Whether the model reads tokens that it draws itself (`reads_draws`)."""

    @property
    def difference(self) -> float:
        """Return the root mean square of device minus host; of rows with draws, of the half that is nearest.

        Where rounding changes a drawn token, a right row's loss moves as a wrong one's.
        """
        squares = sorted((a - b) ** 2 for a, b in zip(self.found, self.expected, strict=True))
        if not all(map(math.isfinite, squares)):
            return math.nan
        kept = squares[: -(-len(squares) // 2)] if self.draws else squares
        return math.sqrt(sum(kept) / len(kept))

    @property
    def rounding(self) -> float:
        """Return the root mean square of what rounding changes."""
        squares = [
            ((a - b) / 2**fewer) ** 2
            for fewer, row in zip(FEWER_BITS, self.rounded, strict=True)
            for a, b in zip(row, self.expected, strict=True)
        ]
        return max(math.sqrt(sum(squares) / len(squares)), 2.0**-LOSS_BITS * max(map(abs, self.expected)))

    @property
    def ratio(self) -> float:
        """Return the difference in multiples of what rounding changes."""
        return self.difference / self.rounding

    def __str__(self) -> str:
        rows = ", ".join(f"{a:.5f} ({a - b:+.1e})" for a, b in zip(self.found, self.expected, strict=True))
        return (
            f"{rows} nats a token, the difference from the host's loss in brackets; {self.difference:.1e} as a root "
            f"mean square is {self.ratio:.2g} times what rounding changes ({self.rounding:.1e})"
        )


def check_losses(trainer: "Trainer", model: HostModel) -> dict[str, Any] | None:
    """Compare held-out losses of the device with those of the host's model, and log or warn.

    Call it before a checkpoint is restored: it leaves the trained tensors as they were built, and the optimizer's state
    at zero. Returns the findings as a dict on rank 0; None on other ranks, or if nothing was compared.

    Raises:
        TrainingStopped: the difference is beyond `STOP`, or no number, or the two predicted other numbers of tokens.
    """
    began = time.monotonic()
    reason = _skip_reason(trainer)
    if reason is not None:
        log.info("check of the device's losses against the host's: skipped (%s)", reason)
        return None
    rows = probe_rows(trainer)
    if is_referred(trainer):
        rows = rows_with_reference(model, rows)
    found, tokens = losses_on_device(trainer, rows)
    findings, fault = None, ""
    if trainer.runtime.rank == 0:
        expected, expected_tokens, rounded = losses_on_host(model, rows)
        findings = LossFindings(found, expected, rounded, trainer.objective.reads_draws)
        if tokens != expected_tokens:
            fault = f"it predicts {_counts(tokens)} tokens of {len(rows)} rows and the host {_counts(expected_tokens)}"
        elif not findings.ratio <= STOP:
            fault = f"{findings}, and the limit is {STOP:g}"
    if trainer.runtime.any_process(bool(fault)):
        raise TrainingStopped(
            f"{trainer.config.hw.device}; the device's held-out losses are not those of the host's CPU: {fault}; try "
            "model.attention=eager, then model.stack=unrolled, which shows where they part, and report it; or start "
            "all the same with trainer.canary.when=never."
        )
    if findings is None:
        return None
    level = logging.WARNING if findings.ratio > WARN else logging.INFO
    seconds = time.monotonic() - began
    log.log(level, "check of the device's losses against the host's: %s; it took %.1f s", findings, seconds)
    return asdict(findings) | {"difference": findings.difference, "rounding": findings.rounding, "seconds": seconds}


def _skip_reason(trainer: "Trainer") -> str | None:
    """Return why this canary does not run, or None if it does."""
    if trainer.seat.number > 0:
        return "the pack's first run does it, and all have one program"
    reason = skip_reason(trainer, copies=1)  # as it is trained, in float32 anyway
    if reason is None and not held_out_documents(trainer):
        return "no held-out document has a token to predict"
    return reason


def _counts(tokens: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in tokens)


# ---- rows ---------------------------------------------------------------------------------------------------


def probe_rows(trainer: "Trainer") -> list[Batch]:
    """Return rows (1, T) of several held-out documents of uneven lengths, one behind the other, then some padding.

    Documents are cut to their first token and their end, where answers and labels are.
    """
    documents, batch = cycle(held_out_documents(trainer)), _first_batch(trainer)
    rows = []
    for number, (length, first) in enumerate(_lengths(trainer, longest=batch.ids_GT.shape[1])):
        arrays = _no_rows((1, length), like=batch)
        start, end, segment = 0, length - PADDING - number, 0
        while not segment or end - start >= SMALLEST:
            document, left = next(documents), end - start
            wanted = first if not segment else left if left < 3 * SMALLEST else left * 5 // 8
            size, segment = min(wanted, left, len(document.ids)), segment + 1
            kept = np.r_[0, len(document.ids) - size + 1 : len(document.ids)]
            place = (0, slice(start, start + size))
            for name, own in {"ids": document.ids, "learn": document.learn, **document.more}.items():
                arrays[name][place] = own[kept]
            arrays["positions"][place], arrays["segments"][place] = np.arange(size), segment
            start += size
        noise = None if batch.noise_G is None else batch.noise_G[[number % batch.num_rows]]
        rows.append(Batch.of(arrays, labels=[f"canary:{number}"], noise_G=noise))
    return rows


def _lengths(trainer: "Trainer", *, longest: int) -> list[tuple[int, int]]:
    """Return the length of each row, and the largest of its first document."""
    budget = trainer.config.trainer.canary.max_tokens
    window = window_of(trainer.model.source.config) or 0
    lengths = [min(longest, max(16, budget // share)) for share in SHARES]
    firsts = [length * 5 // 8 for length in lengths]
    beyond = window + max(SMALLEST, window // 4)
    if firsts[0] < beyond <= min(longest - 2 * SMALLEST, MOST_FOR_WINDOW * budget):
        firsts[0], lengths[0] = beyond, min(longest, beyond + lengths[0] // 2)
    return list(zip(lengths, firsts, strict=True))


def held_out_documents(trainer: "Trainer") -> list[Document]:
    """Return the held-out documents that have something to predict, the longest first."""
    found = []
    for batches in trainer.held_out.values():
        for batch in batches:
            of_tokens = {name: array for name, array in batch.more.items() if array.ndim > 1}
            for row, segments in enumerate(batch.segments_GT):
                for segment in range(1, int(segments.max(initial=0)) + 1):
                    place = (row, segments == segment)
                    if batch.learn_GT[place][1:].any():
                        more = {name: array[place] for name, array in of_tokens.items()}
                        found.append(Document(batch.ids_GT[place], batch.learn_GT[place], more))
    return sorted(found, key=lambda document: -len(document.ids))


def _first_batch(trainer: "Trainer") -> Batch:
    return next(batch for batches in trainer.held_out.values() for batch in batches)


def _no_rows(shape: tuple[int, ...], *, like: Batch) -> dict[str, NDArray[Any]]:
    own = {name: (*shape, *array.shape[2:])[: array.ndim] for name, array in like.arrays.items()}
    return {name: np.zeros(own[name], array.dtype) for name, array in like.arrays.items()}


def _in_shape(row: Batch, shape: tuple[int, ...], *, place: int) -> Batch:
    """Return a batch of padding (G, T) with a row at a place."""
    arrays = _no_rows(shape, like=row)
    for name, own in row.arrays.items():
        arrays[name][(place, slice(row.ids_GT.shape[1]))[: own.ndim]] = own[0]
    labels = [PADDING_LABEL] * shape[0]
    labels[place] = row.labels[0]
    return Batch.of(arrays, labels=labels, noise_G=None if row.noise_G is None else np.repeat(row.noise_G, shape[0]))


# ---- losses -------------------------------------------------------------------------------------------------


def losses_on_device(trainer: "Trainer", rows: Sequence[Batch]) -> tuple[list[float], list[float]]:
    """Run the run's own evaluation program on each row, on all devices in turn; return mean losses and predictions."""
    shape = _first_batch(trainer).ids_GT.shape
    places = [number * shape[0] // len(rows) for number in range(len(rows))]
    before = to_host(trainer.parameters)
    telling = _telling(trainer, before)
    is_changed = any(telling[name] is not tensor for name, tensor in before.items())
    if is_changed:
        write_parameters(trainer, telling)
    losses = _losses(trainer, [_in_shape(row, shape, place=place) for row, place in zip(rows, places, strict=True)])
    if is_changed:
        write_parameters(trainer, before)
        trainer.state.update(trainer.fresh_state())  # behind the parameters, as a resume places them
    return losses


def losses_on_host(model: HostModel, rows: Sequence[Batch]) -> tuple[list[float], list[float], list[list[float]]]:
    """Return the rows' mean losses in float32 and predictions, then the losses with rounded values (`FEWER_BITS`)."""
    with without_attention_kernel():
        host = copy.copy(model.trainer)
        host.evaluated_parameters = _telling(host, host.parameters)
        host.evaluator = host.build_evaluator()
        exact, tokens = _losses(host, rows)
        rounded = []
        for fewer in FEWER_BITS:
            with rounded_values(host.model.module, bits=_bits(host.config) - fewer):
                rounded.append(_losses(host, rows)[0])
    return exact, tokens, rounded


def rows_with_reference(model: HostModel, rows: Sequence[Batch]) -> list[Batch]:
    """Return the rows with the reference of the host's model."""
    with without_attention_kernel():
        host = model.trainer
        return [referred(row, host, parameters=_telling(host, host.parameters)) for row in rows]


def _losses(trainer: "Trainer", rows: Sequence[Batch]) -> tuple[list[float], list[float]]:
    sums = [trainer.evaluator.sums_of(row) for row in rows]
    return [loss / max(tokens, 1.0) for loss, tokens in sums], [tokens for _, tokens in sums]


def _telling(trainer: "Trainer", parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained tensors by whose loss a fault is seen: `perturbed`, and random matrices with a gain of 1.

    Attention with the usual start is nearly a mean over the tokens: in bfloat16 rounding hides a missing rotation.
    """
    found = perturbed(parameters)
    if getattr(trainer.model.source, "random", False):
        for name, tensor in found.items():
            gain = float(tensor.std()) * tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 1.0
            if 0 < gain < 1:
                found[name] = tensor / gain
    return found


def _bits(config: Config) -> int:
    """Return the bits to which the device's products round.

    A TPU multiplies float32 as bfloat16, XLA's default there.
    """
    return BITS["bfloat16" if config.hw.device == "tpu" else config.model.dtype]


@contextmanager
def rounded_values(module: nn.Module, *, bits: int) -> Iterator[None]:
    """Round float32 inputs and outputs of every module inside the block to some bits of precision."""
    factor = 2.0 ** (FLOAT32_BITS - bits) + 1

    def rounded(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        scaled = value * factor  # Dekker's split, Numerische Mathematik 18 (1971)
        return scaled - (scaled - value)

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(rounded, inputs))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return tuple(map(rounded, output)) if type(output) is tuple else rounded(output)

    handles = [part.register_forward_pre_hook(before) for part in module.modules()]
    handles += [part.register_forward_hook(after) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
