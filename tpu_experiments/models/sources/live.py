"""The weights of a model that is being trained, as a decoder takes them: layer by layer, in the module's data type.

Layers may be folded, and weights padded to hold adapters. A program takes its slices from the stacks when it begins, so
that a decoder needs no copy of the weights between its calls, and always has the current ones.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models.sources.build import BuiltModel, describe, placed_buffers
from tpu_experiments.runtime.ops import PlaceTensor
from tpu_experiments.runtime.stacked import is_learnt_scale, is_magnitude, unstacked


class LiveModel:
    """A module without weights and what it is called with; `LiveWeights` of a decoder.

    Args:
        parameters: current values of the trained weights, or a view of them.
        held: the device's own tensors behind them.
    """

    def __init__(
        self,
        model: BuiltModel,
        *,
        lora: LoraConfig,
        parameters: Mapping[str, Tensor],
        held: Callable[[], Mapping[str, Tensor]],
        place: PlaceTensor,
    ) -> None:
        self._trained, self._parameters, self.held = model, parameters, held
        self.module: nn.Module
        self.module, _ = describe(model.source, lora=lora)
        self.module.requires_grad_(False)
        placed_buffers(self.module, place=place)
        self._shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by the names of the module's parameters, in the data types of a frozen model."""
        current, dtype = dict(self._parameters), self._trained.source.dtype  # averages are computed here, once
        frozen = {name: each for name, each in self._trained.module.named_parameters() if name not in current}
        whole = unstacked({**frozen, **current})
        own = {name: whole[name][tuple(map(slice, shape))] for name, shape in self._shapes.items()}
        cast = (name for name in unstacked(current) if not (is_magnitude(name) or is_learnt_scale(name)))
        return own | {name: own[name].to(dtype) for name in cast}
