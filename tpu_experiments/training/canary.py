"""Layout canary: comparison of the first gradients on several devices with a host CPU reference.

Swapped shards of a weight, or a gradient summed over too few devices, raise no error, but the model learns little
(https://github.com/marin-community/marin/issues/4755). The canary runs the training program itself once on a few short
rows, one per device. It compares the resulting optimizer state (for AdamW the first moment, which is the gradient times
a constant) with that of the same step in plain torch, in float32, on the host's CPU. Then it restores parameters and
optimizer state.
"""

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.state import are_sharded_over_hosts, flat, to_host, zero_state
from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.schema import Config
from tpu_experiments.data.batches import Batch
from tpu_experiments.metrics.norms import grouped
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.objectives.base import REFERENCE
from tpu_experiments.optim.base import State
from tpu_experiments.optim.blockwise import decoded
from tpu_experiments.runtime.host_copies import on_host
from tpu_experiments.runtime.kernels.attention import without_attention_kernel
from tpu_experiments.runtime.ops import python_loop, unconstrained
from tpu_experiments.runtime.sharding import ABSMAX
from tpu_experiments.runtime.stacked import is_adapter_part, stacked
from tpu_experiments.training.batches import first_mix, has_noise, stage_rows, training_tensors, with_step_noise
from tpu_experiments.training.reference import referred
from tpu_experiments.training.step import TrainStep, stage_tensors

if TYPE_CHECKING:  # the trainer calls this module
    from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)
NUDGE = 0.02
"""Standard deviation of the values that replace an all-zero A or B: with B = 0 the gradient of A is 0, and the
comparison would show nothing."""
WARN_COSINE, STOP_COSINE = 0.98, 0.9
WARN_RATIO, STOP_RATIO = 0.05, 0.25
"""Limits of the smallest cosine, and of the relative difference of loss and gradient norm. Cosines measured on four
virtual devices with tiny models of two and six layers: 0.9999999 in float32; in bfloat16 0.99996 (Mistral, Qwen) and
0.9993 (Gemma 3), with gradient norms at most 0.3 % off; with two shards of one weight swapped 0.0 and below."""
SMALL = 1e-3
"""Share of its group's largest gradient norm below which a tensor is left out, since its cosine is rounding error."""


@dataclass
class Findings:
    """Differences between the devices' step and the reference step."""

    loss: float
    """Relative difference of the loss."""
    grad_norm: float
    """Relative difference of the global gradient norm."""
    cosine: dict[str, float] = field(default_factory=dict)
    """Smallest cosine of a tensor, by group of modules."""
    difference: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of a tensor, norm of the difference over norm, by group of modules."""
    worst: str = ""
    """Name of the tensor with the smallest cosine."""

    @property
    def smallest(self) -> float:
        """Return the smallest cosine of all groups."""
        return min(self.cosine.values())

    def exceeds(self, *, cosine: float, ratio: float) -> bool:
        """Return whether a difference exceeds the limits; NaN does."""
        return not (self.smallest >= cosine and max(self.loss, self.grad_norm) <= ratio)

    def __str__(self) -> str:
        groups = ", ".join(f"{g} {c:.5f} ({100 * self.difference[g]:.2f} %)" for g, c in self.cosine.items())
        return (
            f"loss {100 * self.loss:.3f} % off, gradient norm {100 * self.grad_norm:.3f} % off; smallest cosine and "
            f"largest difference of a tensor: {groups}; worst {self.worst}"
        )


@dataclass(frozen=True)
class Report:
    """Loss, gradient norm and optimizer state after one step, on the host under Hugging Face's names."""

    loss: float
    grad_norm: float
    state: dict[str, Tensor]
    """First slot of the optimizer state of every parameter, in float32, by `<parameter>/first`."""


def check_first_gradients(trainer: "Trainer", model: "HostModel") -> dict[str, Any] | None:
    """Compare the first gradients with those of the host's model, and log or warn.

    Returns the findings as a dict on rank 0; None on other ranks, or if nothing was compared.

    Raises:
        TrainingStopped: cosine or norms are beyond `STOP_COSINE` or `STOP_RATIO`.
    """
    # Copies of trained tensors: before the step, their gradient and two moments.
    reason = "one device" if trainer.runtime.num_devices == 1 else skip_reason(trainer, copies=4)
    if trainer.config.objective.samples_rollouts:
        reason = reason or "the model writes its own rows, and there are none yet"
    if reason is not None:
        log.info("gradient check across devices: skipped (%s)", reason)
        return None
    batch, rows = canary_rows(trainer)
    if is_referred(trainer):
        batch, rows = with_reference(trainer, batch, rows, model=model)
    found = step_on_devices(trainer, batch)
    expected = step_on_host(model, rows) if trainer.runtime.rank == 0 else None
    findings = compare(found, expected) if expected is not None and expected.grad_norm > 0 else None
    is_far = findings is not None and findings.exceeds(cosine=STOP_COSINE, ratio=STOP_RATIO)
    if trainer.runtime.any_process(is_far):
        raise TrainingStopped(
            f"the first gradients on {trainer.runtime.num_devices} devices are not those of one: {findings}; look at "
            "sharding.rules, sharding.mesh and hw.parallel, try sharding=replicated, or start all the same with "
            "trainer.canary.when=never."
        )
    if findings is None:
        if expected is not None:
            log.info("gradient check across devices: skipped (the loss of its rows has no gradient)")
        return None
    is_odd = findings.exceeds(cosine=WARN_COSINE, ratio=WARN_RATIO)
    log.log(logging.WARNING if is_odd else logging.INFO, "gradient check across devices: %s", findings)
    return asdict(findings)


def skip_reason(trainer: "Trainer", *, copies: int) -> str | None:
    """Return why a canary with a model on the host does not run, or None if it does.

    Args:
        copies: float32 tensors of the size of each trained one that it needs beside the model.
    """
    config, settings = trainer.config, trainer.config.trainer.canary
    if settings.when == "never":
        return "trainer.canary.when=never"
    if are_sharded_over_hosts(trainer.parameters, trainer.runtime):
        return "the trained tensors are sharded over hosts, and its reference needs them whole on one"
    if settings.when == "always":
        return None
    if config.hw.device != "tpu":
        return "no TPU; trainer.canary.when=always runs it"
    report = trainer.model.report  # half as much again for the rest
    needed, free = 1.5 * 4 * (report.total + copies * report.trainable), psutil.virtual_memory().available
    if needed > free:
        return f"its float32 reference needs {needed / 2**30:.1f} GiB of host memory, {free / 2**30:.1f} GiB are free"
    return None


def canary_rows(trainer: "Trainer") -> tuple[Batch, Batch]:
    """Return a global batch (G, T) of padding with one short row per device, and these rows alone."""
    stage, (_, world) = trainer.inputs.stages[0], trainer.runtime.share
    geometry = stage.geometry
    batch = stage_rows(trainer.inputs, stage, config=trainer.config).batch(0, global_rows=geometry.global_rows)
    length = min(batch.ids_GT.shape[1], max(8, trainer.config.trainer.canary.max_tokens // geometry.num_shards))
    row_indices = shard_rows(geometry, world_size=world)
    arrays = {}
    for name, array in batch.arrays.items():
        arrays[name] = array * 0
        for number, place in enumerate(row_indices):
            stop = length - number % 4  # rows of different lengths expose a mean over devices instead of tokens
            kept = (place, slice(stop))[: array.ndim]
            arrays[name][kept] = array[kept]
    if trainer.config.objective.reads_pairs:
        arrays |= halved(arrays["segments"])
    arrays["learn"] = (arrays["segments"] > 0).astype(batch.learn_GT.dtype)
    if trainer.config.objective.reads_pairs:
        arrays["learn"] *= arrays["positions"] > 0  # where a second reference stands; no first token is predicted
    few = {name: array[(row_indices, slice(length))[: array.ndim]] for name, array in arrays.items()}
    whole = Batch.of(arrays, labels=batch.labels)
    if has_noise(trainer.config, trainer.model.module):
        whole = with_step_noise(whole, stage.index, 0, config=trainer.config)
    noise = None if whole.noise_G is None else whole.noise_G[row_indices]
    return whole, Batch.of(few, labels=[batch.labels[place] for place in row_indices], noise_G=noise)


def is_referred(trainer: "Trainer") -> bool:
    """Return whether the canaries' rows have a reference, by the host's model.

    A loss is flat far from its reference: with 0 in its place every answer of KTO has a loss of 0.5 and no gradient,
    and a pair a loss of 0, if its chosen answer is much likelier. Of several processes the first alone has that model.
    """
    return trainer.config.objective.reads_reference() and trainer.runtime.share[1] == 1


def with_reference(trainer: "Trainer", batch: Batch, rows: Batch, *, model: "HostModel") -> tuple[Batch, Batch]:
    """Return what `canary_rows` returns with the reference of the host's model."""
    with without_attention_kernel():
        few = referred(rows, model.trainer, parameters=model.trainer.parameters)
    arrays = batch.arrays
    reference_GT = np.zeros_like(arrays[REFERENCE.name])
    place = shard_rows(trainer.inputs.stages[0].geometry, world_size=trainer.runtime.share[1])
    reference_GT[place, : rows.ids_GT.shape[1]] = few.arrays[REFERENCE.name]
    return Batch.of(arrays | {REFERENCE.name: reference_GT}, labels=batch.labels, noise_G=batch.noise_G), few


def halved(segments_GT: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
    """Return positions and segments of rows of two segments, a pair, which have the same tokens as these rows."""
    index_T = np.arange(segments_GT.shape[1], dtype=np.int32)
    length_G1 = (segments_GT > 0).sum(1, keepdims=True).astype(np.int32)
    half_G1 = length_G1 // 2
    is_token_GT = index_T < length_G1
    positions_GT = (index_T - np.where(index_T < half_G1, 0, half_G1)) * is_token_GT
    return {"positions": positions_GT, "segments": np.where(index_T < half_G1, 1, 2).astype(np.int32) * is_token_GT}


def shard_rows(geometry: Geometry, *, world_size: int) -> list[int]:
    """Return one row index of the global batch per data shard, cycling through the micro-batches."""
    per_process = geometry.num_shards // world_size
    micro = geometry.micro_rows * per_process
    row_indices = []
    for shard in range(geometry.num_shards):
        process, own = divmod(shard, per_process)
        start = process * geometry.accumulation * micro + shard % geometry.accumulation * micro
        row_indices.append(start + own * geometry.micro_rows)
    return row_indices


def perturbed(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return host parameters under Hugging Face's names, with small random values in zero adapters."""
    found = {}
    for name, tensor in parameters.items():
        found[name] = tensor
        if is_adapter_part(name) and not tensor.any():
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            found[name] = torch.randn(tensor.shape, generator=generator) * NUDGE
    return found


def step_on_devices(trainer: "Trainer", batch: Batch) -> Report:
    """Run the run's own program once on its devices, then restore parameters and state."""
    runtime, stage = trainer.runtime, trainer.inputs.stages[0]
    before = to_host(trainer.parameters)
    # The state is placed after the parameters, as below: torch_xla orders a program's results by when the tensors that
    # they replace were placed, and the first step would be compiled again.
    write_parameters(trainer, perturbed(before))
    trainer.state.update(trainer.fresh_state())
    mine = batch.slice_process(*runtime.share)
    everything = stage_tensors(replace(stage, trainable=()), trainer.parameters, stages=trainer.inputs.stages)
    tensors = canary_tensors(mine, stage.geometry, lr=stage.lr, config=trainer.config)
    output = trainer.step_program(runtime.put(tensors | everything, rows_dim=1))
    runtime.wait()
    report = Report(float(on_host(output.loss)), float(on_host(output.grad_norm)), first_slots(trainer.state))
    write_parameters(trainer, before)
    trainer.state.update(trainer.fresh_state())
    return report


def canary_tensors(rows: Batch, geometry: Geometry, *, lr: float, config: Config) -> dict[str, Tensor]:
    """Return the tensors of the rows in the run's first step."""
    return training_tensors(rows, geometry, lr=lr, mix=first_mix(config), inputs=config.objective.inputs())


def write_parameters(trainer: "Trainer", tensors: Mapping[str, Tensor]) -> None:
    """Write host tensors under Hugging Face's names into the run's own parameters."""
    for name in trainer.model.order:  # a resume places them in this order too, and traces the same programs
        # A copy: in plain torch the step would write into the tensor itself.
        trainer.parameters[name] = trainer.runtime.place(stacked(tensors, name).clone(), name=name)


class HostModel:
    """The run's model in plain torch and float32 on the host's CPU, with the values of `perturbed`.

    It is loaded at first use, once for all canaries.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    @cached_property
    def trainer(self) -> "Trainer":
        """The run's trainer with host tensors; call it inside `without_attention_kernel`."""
        host, config = copy.copy(self._trainer), self._trainer.config
        host.runtime = copy.copy(host.runtime)
        vars(host.runtime).update(
            loop=python_loop,
            constrain=unconstrained,
            device=torch.device("cpu"),
            share=(0, 1),
            place=lambda tensor, *, name: tensor,
            put=lambda batch, *, rows_dim: dict(batch),
            sum_over_processes=list,
            program=lambda function, *, name, held: function,
        )
        host.objective = host.build_objective()
        model = build_model(
            host.model_source(),
            lora=config.lora,
            seed=config.seed,
            place=lambda tensor, *, name: tensor.to(torch.float32) if tensor.is_floating_point() else tensor,
        )
        model.module.float()  # the data type of trained weights, which it has none of, is that of all
        parameters = perturbed(model.trainable)
        host.model = replace(model, trainable=parameters)
        host.parameters = host.evaluated_parameters = parameters
        host.evaluator = host.build_evaluator()
        return host


def step_on_host(model: HostModel, rows: Batch) -> Report:
    """Run the same step in plain torch and float32 on the CPU."""
    with without_attention_kernel():
        host = model.trainer
        config, parameters, stage = host.config, host.parameters, host.inputs.stages[0]
        host.model.module.train()  # with dropout, whose masks equal those on the devices
        updates = replace(host.build_updates(parameters), is_scaled=False)
        step = TrainStep(
            host.model.module,
            updates=updates,
            sum_over_processes=list,
            row_loss=host.row_loss,
            count=host.objective.count,
        )
        state = zero_state(updates, parameters, zeros=lambda shape, *, name, dtype: torch.zeros(shape, dtype=dtype))
        geometry = Geometry(rows.num_rows, rows.num_rows, 1, 1, rows.ids_GT.shape[1])
        _, new, output = step(parameters, state, canary_tensors(rows, geometry, lr=stage.lr, config=config))
    return Report(float(output.loss), float(output.grad_norm), first_slots(new))


def first_slots(state: State) -> dict[str, Tensor]:
    """Return the first slot that an optimizer keeps for every parameter, on the host, by `<parameter>/first`.

    8-bit codes are decoded: they are numbers around 127, whose cosine is near 1 for any two gradients.
    """
    found = {}
    for name, slots in state.items():
        if not name:
            continue
        first = next(iter(slots))
        chosen = {slot: slots[slot] for slot in (first, first + ABSMAX) if slot in slots}
        host = to_host(flat({name: chosen}))
        for key in (key for key in host if key.endswith(f"/{first}")):
            absmax = host.get(key + ABSMAX)
            own = key.removesuffix(f"/{first}")
            found[f"{own}/first"] = host[key] if absmax is None else decoded(host[key], absmax, signed=True)
    return found


def compare(found: Report, expected: Report) -> Findings:
    """Return cosine and relative difference of every tensor, as the worst of each group of modules."""
    findings = Findings(
        _relative_difference(found.loss, expected.loss), _relative_difference(found.grad_norm, expected.grad_norm)
    )
    names = {name.removesuffix("/first"): name for name in expected.state}
    smallest = 2.0
    for group, members in grouped(list(names)).items():
        norms = {name: float(expected.state[names[name]].norm()) for name in members}
        for name in members:
            if norms[name] <= SMALL * max(norms.values()):
                continue
            ours, theirs = found.state[names[name]].double().flatten(), expected.state[names[name]].double().flatten()
            cosine = float(ours @ theirs / (ours.norm() * theirs.norm()))
            cosine = cosine if cosine == cosine else -1.0  # NaN: one tensor is zero or not finite
            off = float((ours - theirs).norm() / theirs.norm())
            findings.cosine[group] = min(cosine, findings.cosine.get(group, 1.0))
            findings.difference[group] = max(off, findings.difference.get(group, 0.0))
            if cosine < smallest:
                smallest, findings.worst = cosine, name
    return findings


def _relative_difference(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-30)
