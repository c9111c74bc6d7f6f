"""Decoder layers whose activations plain torch computes again in the backward pass (arXiv 1604.06174).

The eager runtime's counterpart of folded layers (stack/fold.py): same policies, same names, no stacks. A layer is
called with its weights as arguments, because functional_call has put the module's own (empty) parameters back by the
time the backward pass begins. What surrounded the forward pass (dropout's words, float32 gradients) is set up again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from tpu_experiments.config.model_schema import SAVED, keeps_output
from tpu_experiments.models.parts.bitnet import current_mix, mixed
from tpu_experiments.models.parts.dropout import current_noise, noise
from tpu_experiments.models.parts.float32_gradients import cast_weights
from tpu_experiments.models.stack.fold import LayerCall, decoder_layers
from tpu_experiments.models.stack.layer_graph import is_projection

MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._int_mm.default}


def recompute(module: nn.Module, *, remat: str, saved: Sequence[str] = ()) -> None:
    """Let the decoder layers of a module be computed again in the backward pass; changes the module in place.

    Args:
        remat: policy of what the forward pass saves for the backward pass, not `none`.
        saved: names saved in addition.
    """
    path, layers = decoder_layers(module)
    if len(layers):
        parent, _, leaf = path.rpartition(".")
        replacement = RecomputedLayers(layers, names={*SAVED[remat], *saved}, offload=remat == "offload")
        setattr(module.get_submodule(parent), leaf, replacement)


def is_recomputed(module: nn.Module) -> bool:
    """Return whether the layers of a module are computed again in the backward pass in plain torch."""
    return any(isinstance(part, RecomputedLayers) for part in module.modules())


class RecomputedLayers(nn.Module):
    """Replacement for the model's list of layers, with the names of the list; the model's own loop calls them.

    Args:
        names: values saved besides each layer's input (SAVABLE in config/model_schema.py).
        offload: whether the layers' inputs are kept in host memory until the backward pass.
    """

    casts_weights = True

    def __init__(self, layers: nn.ModuleList, *, names: set[str], offload: bool) -> None:
        super().__init__()
        self._names, self._offload = names, offload
        self._ranks: list[int] = []
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
            self._note_projections(layer)
        self._calls = [LayerCall(self, index) for index in range(len(layers))]

    def __iter__(self) -> Iterator[LayerCall]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        return self._calls[index]

    def layer(self, index: int) -> nn.Module:
        """Return the module that computes layer `index`."""
        return self._modules[str(index)]  # type: ignore[return-value]

    def run(self, index: int, hidden: Tensor, rest: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Compute layer `index` for the model's own loop."""
        layer, drawn, mix = self.layer(index), current_noise(), current_mix()
        weights = dict(layer.named_parameters())
        words = None if drawn is None else drawn.words_R

        def compute(hidden: Tensor) -> Any:
            self._ranks.clear()  # a recomputation ends within a layer, at the last tensor that is needed
            with noise(words), mixed(mix), cast_weights(weights, dtype=hidden.dtype) as cast:
                return functional_call(layer, cast, (hidden, *rest), keywords)

        if not torch.is_grad_enabled():
            return compute(hidden)
        contexts = partial(create_selective_checkpoint_contexts, self._policy) if self._names else noop_context_fn
        # Nothing that is recorded draws from the generator (runtime/cuda_graphs.py), whose state cannot be read there.
        drawing = not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
        with save_on_cpu(pin_memory=hidden.is_cuda) if self._offload else nullcontext():
            return checkpoint(compute, hidden, use_reentrant=False, context_fn=contexts, preserve_rng_state=drawing)

    def _note_projections(self, layer: nn.Module) -> None:
        """Let projections whose output is saved tell, while they compute, the rank of their adapter."""
        for name, part in layer.named_modules():
            if is_projection(part) and keeps_output(self._names, projection=name):
                adapter = getattr(part, "lora_B", None)
                rank = 0 if adapter is None else adapter.shape[1]
                part.register_forward_pre_hook(_appending(self._ranks, rank))
                part.register_forward_hook(lambda *_: self._ranks.clear())

    def _policy(self, _: Any, function: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        """Tell whether the result of an operation is saved.

        Of an adapted projection it is the frozen product: that of B with r numbers per token costs next to nothing.
        """
        if function in MATRIX_PRODUCTS:
            is_saved = bool(self._ranks) and args[-1].shape[0] != self._ranks[-1]
        else:
            is_saved = "attention" in self._names and "attention" in function.name()
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _appending(ranks: list[int], rank: int) -> Callable[..., None]:
    return lambda *_: ranks.append(rank)
