"""The gated delta rule where products of float32 read bfloat16, as a TPU's do.

    python -m tests.benchmarks.delta_precision

XLA computes a float32 product on a TPU by one pass over operands rounded to bfloat16, summed in float32. Here every
product of the rule and of its gradients is computed so, or in three such passes, on a CPU; what comes out is compared
with the rule in float64. Beside it: what rounding the inputs (queries, keys and values are bfloat16 in a bfloat16
model) and the result (which the next projection reads in bfloat16) costs by itself.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_experiments.models.families.gated_delta import Rule, over_rows

HEADS, TOKENS, WIDTH = 16, 2048, 128
"""Qwen 3.5 0.8B's."""


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


class Passes(TorchDispatchMode):
    """Computes products in one bfloat16 pass, or in three: high x high, high x low, low x high."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return func(*args, **(kwargs or {}))
        left, right = args
        high_left, high_right = rounded(left), rounded(right)
        product = func(high_left, high_right)
        if self.number == 3:
            product = (
                product + func(high_left, rounded(right - high_right)) + func(rounded(left - high_left), high_right)
            )
        return product


def inputs(kind: str, *, seed: int) -> dict[str, Tensor]:
    """Random rules: keys of a shared direction of some weight, slow or fast decays, learning rates up to 1."""
    generator = torch.Generator().manual_seed(seed)
    shared, slow = {"independent": (0.0, 0.0), "alike": (2.0, 0.0), "alike, slow decay": (2.0, 5.0)}[kind]
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    direction = normal(1, HEADS, 1, WIDTH)
    return {
        "query": rounded(normal(1, HEADS, TOKENS, WIDTH) + shared * direction),
        "key": rounded(normal(1, HEADS, TOKENS, WIDTH) + shared * direction),
        "value": rounded(normal(1, HEADS, TOKENS, WIDTH)),
        "log_decay": -torch.nn.functional.softplus(normal(1, HEADS, TOKENS) - slow),
        "rate": normal(1, HEADS, TOKENS).sigmoid(),
        "pull": normal(1, HEADS, TOKENS, WIDTH),
    }


def computed(given: dict[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The rule's result and the gradients of its inputs."""
    tensors = {name: each.to(dtype).clone().requires_grad_() for name, each in given.items() if name != "pull"}
    # The rule is float32 whatever it is given; the reference needs it as it is given.
    real = Tensor.float
    if dtype == torch.float64:
        Tensor.float = lambda self: self  # type: ignore[method-assign,assignment]
    try:
        rule = Rule(*(tensors[name] for name in ("query", "key", "value", "log_decay", "rate")))
        made = over_rows(rule, torch.ones(1, TOKENS, dtype=torch.int32))
        made.backward(given["pull"].to(made.dtype))
    finally:
        Tensor.float = real  # type: ignore[method-assign]
    return {"result": made.detach()} | {name: each.grad for name, each in tensors.items() if each.grad is not None}


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Distance over the reference's length."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def main() -> None:
    torch.set_num_threads(1)
    for kind in ("independent", "alike", "alike, slow decay"):
        given = inputs(kind, seed=0)
        exact = computed(given, dtype=torch.float64)
        print(f"{kind}: the result rounded to bfloat16 is {apart(rounded(exact['result']), exact['result']):.1e} apart")
        for name, passes in (("float32", nullcontext()), ("one pass", Passes(1)), ("three passes", Passes(3))):
            with passes:
                found = computed(given, dtype=torch.float32)
            print(f"  {name:14}", ", ".join(f"{key} {apart(found[key], exact[key]):.1e}" for key in exact), flush=True)


if __name__ == "__main__":
    main()
