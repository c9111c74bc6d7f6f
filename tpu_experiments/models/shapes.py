"""A model's names, shapes and data types without its weights, for plans."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tpu_experiments.models.huggingface import HuggingFaceModel, Named, local_path


class ShapesOfModel(HuggingFaceModel):
    """A model source whose weights are on the meta device; nothing is downloaded.

    The config is that of a local checkpoint, otherwise that of `model.arch`.
    """

    def find_folder(self) -> Path | None:
        """Return the folder of a local checkpoint; None for a Hub id."""
        return local_path(self.model)

    def require_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Accept any checkpoint: no weights are read."""

    def weights(self, names: list[str]) -> Iterator[Named]:
        """Yield a tensor without data for each name."""
        parameters = dict(self.empty().named_parameters())
        for name in names:
            yield Named(name, torch.empty_like(parameters[name], dtype=self.dtype, device="meta"))
