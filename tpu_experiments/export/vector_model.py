"""A model whose weights are vectors of codebooks, read from a folder of task=quantize."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tpu_experiments.config.regular_files import read_regular, require_regular_folder
from tpu_experiments.quantisation.parts import VECTORS, from_parts
from tpu_experiments.quantisation.vectors import Encoded, Vectors, column_order


class VectorLinear(nn.Module):
    """A frozen Linear over indices: its weight is gathered from the codebooks at every call.

    All shapes are static, so it runs on torch_xla as one program. Legend: N output features, K input features.
    """

    def __init__(self, made: Encoded, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.made = made
        tensors = {name: tensor for name, tensor in vars(made).items() if tensor is not None}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        order = None if made.outliers_O is None else column_order(made.outliers_O, made.num_columns)
        self.register_buffer("order_K", order, persistent=False)
        self.bias = None if bias is None else bias.requires_grad_(False)

    def decoded(self) -> Tensor:
        """Return the decoded weight (N, K), float32."""
        names = [name for name in vars(self.made) if getattr(self, name, None) is not None]
        order: Any = self.order_K
        return Encoded(**{name: getattr(self, name) for name in names}).decode(order_K=order)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N), in the data type of `x`."""
        return F.linear(x, self.decoded().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def read_vector_model(folder: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of a folder, its quantised Linear modules as `VectorLinear`.

    Raises:
        ValueError: the folder holds no such model, or tensors are missing.
    """
    require_regular_folder(folder, key=folder)
    facts = json.loads(read_regular(Path(folder) / "config.json"))
    settings = dict(facts.get("quantization_config") or {})
    if settings.pop("quant_method", None) != VECTORS or settings.pop("format", None) != 1:
        raise ValueError(f"{folder}; its config.json has no quantization_config of {VECTORS}")
    settings.pop("ignore")
    how = Vectors(**settings)
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        tensors |= load_file(file)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    del config.quantization_config
    module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    for name in [n.removesuffix("_codebook") for n in tensors if n.endswith("weight_codebook")]:
        parts = {n.removeprefix(name): tensors.pop(n) for n in list(tensors) if n.startswith(f"{name}_")}
        path = name.removesuffix(".weight")
        parent, _, leaf = path.rpartition(".")
        dense: Any = module.get_submodule(path)
        # Its bias, if it has one, is filled below with the other tensors.
        setattr(module.get_submodule(parent), leaf, VectorLinear(from_parts(parts, how), dense.bias))
    lacking, more = module.load_state_dict(tensors, strict=False)
    tied = set(module._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    wrong = [name for name in lacking if name not in tied] + list(more)
    if wrong:
        raise ValueError(f"{folder}; {len(wrong)} tensors are missing or too many, first {wrong[0]}")
    module.tie_weights()
    return module.to(dtype).eval()
