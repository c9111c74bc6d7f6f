"""A model's weights in the order and form of their upload: folded layers as one stack."""

import itertools
import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from tpu_experiments.config.sources import LoraConfig
from tpu_experiments.models.huggingface import HuggingFaceModel, Named
from tpu_experiments.models.lora import adapter_weights
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack


def stacked_weights(
    source: HuggingFaceModel,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    adapted: Mapping[str, bool],
    lora: LoraConfig,
    seed: int,
    initial: dict[str, Tensor],
) -> Iterator[Named]:
    """Yield base weights and their adapters under the (folded) module's names, the largest first.

    During its upload a tensor exists twice, which costs least while little else is allocated.

    Args:
        shapes: shapes of the module's base weights.
        adapted: base weights with an adapter, under Hugging Face's names (`lora.adapted_weights`).
        initial: receives PiSSA's initial A and B, under Hugging Face's names.
    """
    names = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
    weights = source.weights([part for name in names for part in hugging_face_names(name)])
    for name in names:
        made: dict[str, Tensor] = {}
        count = len(hugging_face_names(name))
        for index, base in enumerate(itertools.islice(weights, count)):
            is_adapted, is_transposed = base.name in adapted, adapted.get(base.name, False)
            items = adapter_weights(base, lora=lora, seed=seed, is_transposed=is_transposed) if is_adapted else [base]
            for item in items:
                if lora.init == "pissa" and item.name != base.name:
                    initial[item.name] = item.tensor.clone()
                _collect(made, item, base=base.name, name=name, index=index, count=count)
        del base, item  # otherwise they stay allocated while the next tensor is read
        while made:
            yield Named(*made.popitem())


def _collect(made: dict[str, Tensor], item: Named, *, base: str, name: str, index: int, count: int) -> None:
    """Copy one layer's tensor into its stack; `name` is that of the stack of `base`."""
    target = (
        name if item.name == base else name.removesuffix("weight") + item.name.removeprefix(base.removesuffix("weight"))
    )
    if not is_stack(name):
        made[target] = item.tensor
        return
    if target not in made:
        made[target] = item.tensor.new_empty(count, *item.tensor.shape)
    made[target][index] = item.tensor
