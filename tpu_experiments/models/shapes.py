"""A model's names, shapes and data types without its weights: what a plan needs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tpu_experiments.models.huggingface import HuggingFaceModel, Named, local_path


class ShapesOfModel(HuggingFaceModel):
    """Weights on the meta device; the config of a local checkpoint, else that of `model.arch`: nothing is fetched."""

    def find_folder(self) -> Path | None:
        """The folder of a local checkpoint."""
        return local_path(self.model)

    def require_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Nothing to look for."""

    def weights(self, names: list[str]) -> Iterator[Named]:
        """A tensor without data for each name."""
        parameters = dict(self.empty().named_parameters())
        for name in names:
            yield Named(name, torch.empty_like(parameters[name], dtype=self.dtype, device="meta"))
