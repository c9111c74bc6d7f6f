"""The training step as a function of (parameters, optimizer state, batch).

The same object runs on the device in the trainer, is traced on placeholders by the plan, and runs eagerly in the tests.
Per-stage trainable masks travel in the batch, so that every stage runs the same compiled program: 1 or 0 for each
parameter (for each layer of a stack), in the order of the parameters.
Legend: A accumulated micro-batches, R rows of a micro-batch, T tokens, G parts of a loss, N entries of the trainable
mask.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.schema import Config
from tpu_experiments.data.rows import TOKEN_ARRAYS
from tpu_experiments.metrics.norms import changes, group_norms
from tpu_experiments.models.adapters.padded import weights_with_adapters, with_adapters
from tpu_experiments.models.parts.bitnet import MIX, ternary_shares
from tpu_experiments.models.parts.dropout import NOISE, THRESHOLDS
from tpu_experiments.objectives.base import Computing, Rows
from tpu_experiments.optim.base import State, global_norm
from tpu_experiments.optim.loss_scale import adapted, scale_of
from tpu_experiments.optim.updates import DECAY, Updates, with_decay
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.ops import Constrain, Loop, LoopCall, Tensors, python_loop, unconstrained
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack

ACTIVE = "active"
"""Key of a batch that says by 1 or 0, float32 (1,), whether the step changes anything; without it, it does. Of packed
adapters, one that has ended keeps its place (training/pack.py)."""
TRAINS = "trains"
"""Key of the trainable mask in a batch, float32 (N,); without it every parameter is updated."""


def stage_tensors(stage: Stage, names: Iterable[str], *, stages: Iterable[Stage]) -> dict[str, Tensor]:
    """Return the tensors to add to a stage's batches.

    They are the trainable mask, if any stage has patterns, and the weight decay, if any stage has one of its own.
    """
    trains = trainable_mask(stage.trainable, names, stages=stages)
    found = {} if trains is None else {TRAINS: trains}
    return found if stage.weight_decay is None else found | {DECAY: torch.tensor([stage.weight_decay])}


def trainable_mask(patterns: Sequence[str], names: Iterable[str], *, stages: Iterable[Stage]) -> Tensor | None:
    """Return the trainable mask, float32 (N,), for a stage's patterns; None if no stage has patterns."""
    if not any(stage.trainable for stage in stages):
        return None
    parts = [part for name in names for part in hugging_face_names(name)]
    return torch.tensor([float(not patterns or _matches(part, patterns)) for part in parts])


def require_trainable_patterns(stages: Iterable[Stage], names: Sequence[str]) -> None:
    """Require every pattern of a stage to match a trainable parameter by its Hugging Face name.

    Raises:
        ConfigError: one matches none.
    """
    for stage in stages:
        for pattern in stage.trainable:
            if not any(_matches(name, [pattern]) for name in names):
                raise ConfigError(
                    f"curriculum.stages.{stage.name}.trainable has {pattern!r}, which matches none of the "
                    f"{len(names)} trainable parameters, {names[0]} and so on. {suggest(pattern, names)}"
                )


def masks_by_parameter(trains_N: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return boolean masks per parameter that broadcast with it; of a stack, one entry per layer."""
    masks, start = {}, 0
    for name, parameter in parameters.items():
        count = len(hugging_face_names(name))
        own = trains_N[start : start + count] > 0
        masks[name] = own.view(count, *[1] * (parameter.ndim - 1)) if is_stack(name) else own.view(())
        start += count
    return masks


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


RowLoss = Callable[[nn.Module, Mapping[str, Tensor], Rows], tuple[Tensor, Tensor]]
"""(module, parameters, rows (R, T)) to per-row loss sums in nats (R,) and supervised tokens (R,); with parts (R, G)."""
ReportedLoss = Callable[[nn.Module, Mapping[str, Tensor], Rows], tuple[Tensor, Tensor, Tensor]]
"""As `RowLoss`, with K sums of every row that log records show, (R, K), without a gradient."""
Count = Callable[[Rows], Tensor]
"""(rows (R, T)) to the number of predictions that their loss is the sum over, shape (); with parts (G,)."""
SumOverProcesses = Callable[[list[Tensor]], list[Tensor]]
OF_THE_STEP = ("lr", ACTIVE, TRAINS, DECAY)
"""Tensors of a batch that are not of its rows."""


@dataclass
class StepOutput:
    """Report of a step; every field stays on the device."""

    loss: Tensor
    """Mean loss in nats per supervised token of the global batch, shape (); of a loss with parts, the sum of means."""
    grad_norm: Tensor
    """Global gradient norm before clipping, shape (). If it or the loss is not finite, nothing was updated."""
    row_losses_AR: Tensor
    """Loss sum in nats of every row of this process, shape (A, R); identifies the rows that are not finite.

    The sum over all rows, divided by `num_supervised`, is `loss`."""
    num_supervised: Tensor
    """Supervised tokens of the global batch, shape (); with parts, the sum of their counts."""
    norms: Tensor | None = None
    """Norms of gradient (before clipping) and update by group of parameters, shape (2, groups); None if not
    computed."""
    shares: Tensor | None = None
    """Shares of the codes -1, 0 and 1 by layer before the update, shape (layers, 3); None if not computed."""
    loss_scale: Tensor | None = None
    """Factor by which the loss was multiplied for its gradient, shape (); None outside float16."""
    reported: Tensor | None = None
    """Sums over the global batch that the objective reports, shape (K,); None if it reports none."""


# ---- loss ---------------------------------------------------------------------------------------------------


def computing_of(config: Config, runtime: Runtime) -> Computing:
    """Return how this process computes losses."""
    shards = num_shards(config) // runtime.share[1]
    return Computing(config.trainer.loss_chunk_tokens, shards, runtime.loop, runtime.constrain, runtime.place)


# ---- step ---------------------------------------------------------------------------------------------------


class TrainStep:
    """Forward, backward, reduction, clipping and update of one global batch."""

    def __init__(
        self,
        module: nn.Module,
        *,
        updates: Updates,
        sum_over_processes: SumOverProcesses,
        row_loss: RowLoss,
        count: Count,
        loop: Loop = python_loop,
        constrain: Constrain = unconstrained,
        norm_groups: Mapping[str, Sequence[str]] | None = None,
        ternary: Sequence[str] = (),
        reported: ReportedLoss | None = None,
    ) -> None:
        """Take the parts of a step.

        Args:
            reported: `row_loss` with further sums of every row, which the step adds up and returns.
            ternary: weights whose codes are counted by layer.
        """
        self.norm_groups, self.ternary, self.reported = norm_groups, ternary, reported
        self.module, self.updates = module, updates
        self.sum_over_processes, self.row_loss, self.count = sum_over_processes, row_loss, count
        self.loop, self.constrain = loop, constrain

    def __call__(
        self, parameters: Mapping[str, Tensor], state: State, batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], State, StepOutput]:
        """Return new parameters, new state and the report; nothing is changed in place.

        A step whose loss or gradient norm is not finite leaves parameters and state, its count included, unchanged.

        Args:
            parameters: float32 trainable parameters by name.
            batch: `ids`, `learn`, `positions`, `segments` (A, R, T) int32, `lr` (1,) float32, and `noise` (A, R)
                int32 where adapters have dropout, `trains` (N,) where a stage of the run does not train everything,
                `weight_decay` (1,) where a stage has one of its own, `ternary_mix` (A, R) in a warm-up of quantisation.
        """
        total = self.counted(batch)
        scale = scale_of(state)
        grads, kept = self.gradients(parameters, batch, total if scale is None else total / scale)
        return self.updated(parameters, state, batch, grads=grads, kept=kept, total=total)

    def counted(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of predictions in the global batch, at least 1: shape (), with parts (G,)."""
        names = row_tensors(batch)
        micro_batches = [{k: batch[k][i] for k in names} for i in range(batch["ids"].shape[0])]
        supervised = torch.stack([self.count(rows) for rows in micro_batches]).sum(0)
        (total,) = self.sum_over_processes([supervised])
        return total.clamp(min=1.0)  # a batch of padding only has a zero gradient, not 0 / 0

    def updated(
        self,
        parameters: Mapping[str, Tensor],
        state: State,
        batch: Mapping[str, Tensor],
        *,
        grads: Sequence[Tensor],
        kept: Tensor,
        total: Tensor,
    ) -> tuple[dict[str, Tensor], State, StepOutput]:
        """Reduce, clip and apply this process's gradients; the result is that of the step.

        Args:
            grads: those of the loss multiplied by the loss scale, if there is one, in the order of `parameters`.
            kept: what `losses` keeps of every row, (A, R, ...).
            total: that of `counted`.
        """
        scale, row_losses_AR, report_ARK = scale_of(state), kept, None
        if self.reported is not None:
            num = 1 if total.ndim == 0 else len(total)
            # A tensor of its own: a view of a view keeps the one between alive, and such a call is not replayed.
            row_losses_AR, report_ARK = kept[..., :num].clone(), kept[..., num:]
            row_losses_AR = row_losses_AR.reshape(*row_losses_AR.shape[:2], *total.shape)
        if total.ndim > 0:
            # Rescaled, so that the rows' losses are one number each and their sum over one count is the loss.
            count = total.sum()
            row_losses_AR, total = (row_losses_AR / total).sum(-1) * count, count
        with torch.no_grad():
            more = [] if report_ARK is None else [report_ARK.sum((0, 1))]
            *grads, loss = self.sum_over_processes([*grads, *more, row_losses_AR.sum() / total])
            reported = grads.pop() if more else None
            if scale is not None:  # a power of two: nothing is rounded
                grads = [g / scale for g in grads]
            named = dict(zip(parameters, grads, strict=True))
            chosen = masks_by_parameter(batch[TRAINS], parameters) if TRAINS in batch else {}
            named |= {name: torch.where(mask, named[name], 0.0) for name, mask in chosen.items()}
            norm = global_norm(named)
            state = with_decay(state, batch[DECAY]) if DECAY in batch else state
            clipped = self.updates.clipped(named, norm=norm)
            new_parameters, new_state = self.updates.update(parameters, clipped, state, lr=batch["lr"])
            # Loss and norm are sums over all processes and devices, so either all of them update or none does. XLA
            # fuses the `where` into the update's loops, so it costs no pass over memory.
            is_finite = finite(loss) & finite(norm)
            if ACTIVE in batch:
                is_finite = is_finite & (batch[ACTIVE] > 0)[0]
            where = {name: chosen[name] & is_finite if name in chosen else is_finite for name in state}
            new_parameters = {n: torch.where(where[n], new_parameters[n], p) for n, p in parameters.items()}
            new_state = {name: select_where(slots, new_state[name], where=where[name]) for name, slots in state.items()}
            if scale is not None:
                overflowed = finite(loss) & ~finite(norm)
                new_state[""] |= adapted(state[""], scale=scale, is_finite=is_finite, overflowed=overflowed)
            norms = None
            if self.norm_groups:
                norms = group_norms([named, changes(parameters, new_parameters)], self.norm_groups)
            shares = ternary_shares(parameters, self.ternary) if self.ternary else None
            # Replicated: reading a sharded tensor would compile a further program in the middle of a run.
            row_losses_AR = self.constrain(row_losses_AR, axes=())
        output = StepOutput(loss, norm, row_losses_AR, total, norms, shares, scale, reported)
        return new_parameters, new_state, output

    def gradients(
        self, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor], total: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return gradients of this process's loss, in the order of `parameters`, and what is kept of rows (A, R, ...).

        Micro-batches run in a device loop, so that the program's size does not depend on their number.
        """
        names, weights = row_tensors(batch), weights_with_adapters()

        def loss_of(leaves: Sequence[Tensor], tensors: Tensors, others: Tensors) -> tuple[Tensor, Tensor]:
            rows = dict(zip(names, tensors, strict=True))
            with with_adapters(dict(zip(weights, others[1:], strict=True))):
                sums_R, kept = self.losses(self.module, dict(zip(parameters, leaves, strict=True)), rows)
            return mean_loss(sums_R, others[0]), kept

        xs = tuple(batch[k] for k in names)
        others = (total, *weights.values())
        return summed_gradients(loss_of, tuple(parameters.values()), xs, others, loop=self.loop)

    def losses(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the rows' loss sums (R,) or (R, G), to be differentiated, and what a step keeps of every row.

        These are the same sums, or of an objective that reports some (R, G + K), with K of those behind the losses.
        """
        if self.reported is None:
            sums_R, _ = self.row_loss(module, parameters, rows)
            return sums_R, sums_R
        sums_R, _, report_RK = self.reported(module, parameters, rows)
        return sums_R, torch.cat([sums_R.reshape(len(sums_R), -1), report_RK], dim=1)


def summed_gradients(
    loss_of: Callable[[Sequence[Tensor], Tensors, Tensors], tuple[Tensor, Tensor]],
    values: Tensors,
    xs: Tensors,
    others: Tensors,
    *,
    loop: Loop,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of `values`, summed over micro-batches, and what is kept of their rows (A, R, ...).

    Args:
        loss_of: (values, tensors of a micro-batch, others) to its loss () and what is kept of its rows (R, ...).
        xs: tensors with an entry for every micro-batch.
    """

    def micro(weights: Sequence[Tensor], tensors: Tensors, others: Tensors) -> tuple[list[Tensor], Tensor]:
        # On autograd's device thread, gradients may briefly outlive the call. Every tensor alive when torch_xla
        # takes the graph becomes an output of the program, so the next step would be a different program.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            leaves = [w.detach().requires_grad_() for w in weights]
            loss, kept = loss_of(leaves, tensors, others)
            return list(torch.autograd.grad(loss, leaves)), kept.detach()

    num = len(others)

    def body(carry: Tensors, tensors: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
        grads, kept = micro(consts[num:], tensors, consts[:num])
        return tuple(a + g for a, g in zip(carry, grads, strict=True)), (kept,)

    if len(xs[0]) == 1:
        grads, kept = micro(values, tuple(x[0] for x in xs), others)
        return grads, kept[None]
    zeros = tuple(torch.zeros_like(value) for value in values)
    summed, (kept,) = loop(LoopCall(body, carry=zeros, xs=xs, consts=(*others, *values)))
    return list(summed), kept


def mean_loss(sums: Tensor, total: Tensor) -> Tensor:
    """Return the rows' sums (R,) over the number of predictions (); of sums (R, G) over (G,) all parts' together."""
    return sums.sum() / total if total.ndim == 0 else (sums.sum(0) / total).sum()


def row_tensors(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of a batch's tensors that have an entry for every row."""
    known = (*TOKEN_ARRAYS, NOISE, THRESHOLDS, MIX)
    further = (name for name in batch if name not in known and name not in OF_THE_STEP)
    return (*(name for name in known if name in batch), *further)


def finite(x: Tensor) -> Tensor:
    """Return where x is finite.

    `torch.isfinite` would compare with infinity, which becomes a float64 input of the program.
    """
    return (x - x) == 0  # inf - inf and NaN - NaN are NaN


def select_where(old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, where: Tensor) -> dict[str, Tensor]:
    """Return the new slots where `where` is true, else the old ones.

    Args:
        where: shape (), or (layers, 1, ...) with as many dimensions as the parameter, which a slot may not have.
    """
    found = {}
    for name, tensor in old.items():
        own = where if where.ndim in (0, tensor.ndim) else where.view(-1, *[1] * (tensor.ndim - 1))
        found[name] = torch.where(own, new[name], tensor)
    return found


def commit(parameters: Mapping[str, Tensor], state: State, *, new: tuple[Mapping[str, Tensor], State]) -> None:
    """Write the new values into the device's tensors in place (XLA then reuses their buffers)."""
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(new[0][name])
        for name, slots in state.items():
            for slot, tensor in slots.items():
                tensor.copy_(new[1][name][slot])


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return the random seed of one step, a function of its number, so that a resumed run draws the same.

    It seeds torch's generator, of which dropout inside sdpa attention draws (`attention_dropout`), and code of users.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
