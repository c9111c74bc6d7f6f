"""The training step as a function of (parameters, optimizer state, batch).

One step, three lives: the trainer runs it on the device, the plan traces the same object on placeholders, the tests
run it eagerly. Legend: A accumulated micro-batches, R rows of a micro-batch, T tokens.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpu_experiments.models.forward import logits_of, row_losses, target_weights
from tpu_experiments.optim.base import Optimizer, State, clip, global_norm

Rows = Mapping[str, Tensor]
RowLoss = Callable[[nn.Module, Mapping[str, Tensor], Rows], tuple[Tensor, Tensor]]
"""(module, parameters, rows (R, T)) to per-row loss sums in nats (R,) and supervised tokens (R,)."""
SumOverProcesses = Callable[[list[Tensor]], list[Tensor]]
ROW_TENSORS = ("ids", "learn", "positions", "segments")


@dataclass
class StepOutput:
    """What a step reports; every field stays on the device."""

    loss: Tensor
    """Mean loss in nats per supervised token of the global batch, shape ()."""
    grad_norm: Tensor
    """Global gradient norm before clipping, shape ()."""
    row_losses_AR: Tensor
    """Loss sum of every row of this process, nats; names the rows when it is not finite."""
    num_supervised: Tensor
    """Supervised tokens of the global batch, shape ()."""


def next_token_loss(module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the next token, summed per row."""
    return row_losses(logits_of(module, parameters, rows), rows)


class TrainStep:
    """Forward, backward, reduction, clipping and update of one global batch."""

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: Optimizer,
        clip_norm: float | None,
        sum_over_processes: SumOverProcesses,
        row_loss: RowLoss = next_token_loss,
    ) -> None:
        self.module, self.optimizer, self.clip_norm = module, optimizer, clip_norm
        self.sum_over_processes, self.row_loss = sum_over_processes, row_loss

    def __call__(
        self, parameters: Mapping[str, Tensor], state: State, batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], State, StepOutput]:
        """New parameters, new state and the report; nothing is changed in place.

        Args:
            parameters: float32 trainable parameters by name.
            batch: `ids`, `learn`, `positions`, `segments` (A, R, T) int32 and `lr` (1,) float32.
        """
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        micro_batches = [{k: batch[k][i] for k in ROW_TENSORS} for i in range(batch["ids"].shape[0])]
        supervised = torch.stack([target_weights(rows)[1].sum() for rows in micro_batches]).sum()
        (total,) = self.sum_over_processes([supervised])
        total = total.clamp(min=1.0)  # a batch of padding only has a zero gradient, not 0 / 0
        grads: list[Tensor] = []
        losses: list[Tensor] = []
        for rows in micro_batches:
            sums_R, _ = self.row_loss(self.module, leaves, rows)
            micro = torch.autograd.grad(sums_R.sum() / total, list(leaves.values()))
            grads = [a + g for a, g in zip(grads, micro, strict=True)] if grads else list(micro)
            losses.append(sums_R.detach())
        with torch.no_grad():
            row_losses_AR = torch.stack(losses)
            *grads, loss = self.sum_over_processes([*grads, row_losses_AR.sum() / total])
            named = dict(zip(leaves, grads, strict=True))
            norm = global_norm(named)
            new_parameters, new_state = self.optimizer.update(
                parameters, clip(named, norm=norm, limit=self.clip_norm), state, lr=batch["lr"]
            )
        return new_parameters, new_state, StepOutput(loss, norm, row_losses_AR, total)


def commit(parameters: Mapping[str, Tensor], state: State, *, new: tuple[Mapping[str, Tensor], State]) -> None:
    """Write the new values into the tensors that live on the device (XLA then reuses their buffers)."""
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(new[0][name])
        for name, slots in state.items():
            for slot, tensor in slots.items():
                tensor.copy_(new[1][name][slot])


def seed_of(seed: int, step: int, rank: int) -> int:
    """Random state of one step, a function of its number, so that a resumed run draws what the first would have."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
