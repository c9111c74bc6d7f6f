"""Muon (Jordan et al., 2024: https://kellerjordan.github.io/posts/muon/) as a pure function; AdamW for the rest.

The momentum of a matrix is replaced by an orthogonal matrix near it, which a Newton-Schulz iteration finds by products
alone. Equal to torch.optim.Muon, tested. Stacks of layers, experts and each adapter's A and B are matrices one by one:
the iteration has leading dimensions.
On several devices a stack's matrices are exchanged, so that each device has whole ones (`spread_over`).
Other split matrices stay split, and XLA adds the products over the split dimension up, five times an update.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tpu_experiments.config.model_schema import AXES
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.base import Named, State, own_ndim
from tpu_experiments.optim.facts import is_matched
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.sharding import EXPERTS
from tpu_experiments.runtime.stacked import ADAPTER_PARTS, is_stack

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the iteration's polynomial, as in the reference: singular values end between about 0.7 and 1.2, not at 1."""
EPS = 1e-7
"""Smallest norm that momentum is divided by: A of an adapter has none at the first step, where B is zero."""


class Muon:
    """Muon with float32 momentum for matrices inside layers, AdamW for embeddings, heads, norms and biases."""

    def __init__(
        self,
        *,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        ns_dtype: str,
        adjust_lr_fn: str,
        adamw: Sequence[str],
        beta1: float,
        beta2: float,
        eps: float,
    ) -> None:
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self.ns_dtype: torch.dtype = getattr(torch, ns_dtype)
        self.adjust_lr_fn, self.patterns = adjust_lr_fn, tuple(adamw)
        self.adamw = AdamW(beta1=beta1, beta2=beta2, eps=eps)
        self.spread: Callable[[Tensor], Tensor] = lambda matrices: matrices
        """Placement of matrices (N, rows, columns) on the devices of a run, `spread_over`."""

    def takes(self, name: str, parameter: Tensor) -> bool:
        """Return whether the parameter is a matrix of a layer or of an adapter, and not one that `adamw` matches."""
        return is_hidden_matrix(name, parameter) and not is_matched(name, self.patterns)

    def init(self, parameters: Named) -> State:
        matrices = {name: p for name, p in parameters.items() if self.takes(name, p)}
        state = self.adamw.init({name: p for name, p in parameters.items() if name not in matrices})
        return state | {name: {"momentum": torch.zeros_like(p, dtype=torch.float32)} for name, p in matrices.items()}

    def update(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        matrices = {name: p for name, p in parameters.items() if "momentum" in state[name]}
        rest = {name: p for name, p in parameters.items() if name not in matrices}
        new_parameters, new_state = self.adamw.update(rest, grads, state, lr=lr, decay=decay)
        for name, p in matrices.items():
            momentum = self.momentum * state[name]["momentum"] + (1 - self.momentum) * grads[name]
            ahead = self.momentum * momentum + (1 - self.momentum) * grads[name] if self.nesterov else momentum
            matrices_NRC = self.spread(ahead.reshape(-1, *ahead.shape[-2:]).to(self.ns_dtype))
            step = orthogonal(matrices_NRC, steps=self.ns_steps).to(p.dtype).reshape(p.shape)
            new_parameters[name] = p * (1 - lr * decay[name]) - lr * self._factor(p) * step
            new_state[name] = {"momentum": momentum}
        return new_parameters, new_state

    def _factor(self, parameter: Tensor) -> float:
        """Return the factor of the learning rate, of the last two dimensions.

        `match_rms_adamw` (arXiv 2502.16982): a root mean square of 0.2, about that of AdamW's steps.
        """
        rows, columns = parameter.shape[-2:]
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix inside a layer or of an adapter, or a batch of them.

    Embeddings and heads are outside of the numbered layers; of other tensors with two dimensions, such as the decays of
    state-space layers, the name does not end in `weight`.
    """
    leaf = name.rpartition(".")[2]
    if leaf in ADAPTER_PARTS:
        return leaf in ADAPTER_PARTS[:2]
    is_in_layer = is_stack(name) or any(part.isdigit() for part in name.split("."))
    return is_in_layer and (name.endswith(EXPERTS) or (leaf == "weight" and own_ndim(name, parameter) == 2))


def spread_over(runtime: Runtime) -> Callable[[Tensor], Tensor]:
    """Return a constraint that gives each device whole ones of several matrices (N, rows, columns).

    Each matrix then crosses the network twice an update, and no device repeats the products of another.
    """

    def spread(matrices: Tensor) -> Tensor:
        if runtime.num_devices == 1 or matrices.shape[0] == 1:
            return matrices
        return runtime.constrain(matrices, axes=(AXES,))

    return spread


def orthogonal(matrices: Tensor, *, steps: int) -> Tensor:
    """Return matrices (N, rows, columns) with singular values near 1; of zero, zero.

    Args:
        steps: iterations, each with three products in the matrices' type.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # the smaller square
    norm = x.float().square().sum((-2, -1), keepdim=True).sqrt()
    x = x / norm.to(x.dtype).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
