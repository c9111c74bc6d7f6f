"""Export of a whole model with quantised layers, in the layouts that transformers and inference servers read.

`int8`: W8A16, symmetric, one scale per output feature, in compressed-tensors' layout `pack-quantized` (four codes to an
int32): the only one that vLLM reads for 8-bit weights with 16-bit activations. `nf4`: bitsandbytes' own serialisation.
`bitnet`: the codes of ternary weights, four to a byte, as transformers' `BitLinear` has them.
Embeddings, norms, biases and the head stay in the data type of the export. Codes are made of the merged float32 weights
by `models.quantised`, so that a base that was int8 or NF4 in training is quantised anew, with its adapter in it.
Legend: N output features, K input features, G blocks of 64 weights."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.full import write_model
from tpu_experiments.export.weights import Effect, WholeModel
from tpu_experiments.models.adapters.quantised import ABSMAX, BLOCK, NESTED, NESTED_BLOCK, NF4, OFFSET, SCALE, Format
from tpu_experiments.models.parts.bitnet import ternary
from tpu_experiments.quantisation.parts import Size, grid_sizes
from tpu_experiments.runtime.dynamic_type import SIGNED

HEAD = "lm_head"
PACKED = 4
"""Codes of 8 bits in an int32, and codes of 2 bits in a byte."""
COMPRESSED_TENSORS, PACK_QUANTIZED = "0.15.0.1", "pack-quantized"
"""Version of compressed-tensors whose layout is written, and the layout."""
MAX_STATE_BYTES = 256
"""More than bitsandbytes' text of one weight's settings ever has."""
Shapes = Mapping[str, Tensor]
"""Empty tensors on the meta device, by name."""


class Holder(Protocol):
    """What weights a form can hold."""

    form: str
    needs: str
    """What a weight's shape must be, for a sentence."""

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether a weight (N, K) can be stored."""
        ...


class Layout(Holder, Protocol):
    """How a quantised weight is stored."""

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return the tensors that stand for the weight `name`, empty."""
        ...

    def encode(self, name: str, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return the tensors that stand for a float32 weight."""
        ...

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json; `kept` names the modules that are not quantised."""
        ...


@dataclass(frozen=True)
class Quantised:
    """What was written."""

    digests: dict[str, str]
    """SHA-256 of the files of weights, by name."""
    quantised: int
    """Number of quantised weights."""
    left: list[str] = field(default_factory=list)
    """Names of weights of the layers that the layout cannot hold, which stay in the export's data type."""
    note: str = ""
    """Why they do; empty where there are none."""


def pack_quantized(kept: list[str], *, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """Return the settings of symmetric integers in words of 32 bits as compressed-tensors writes them.

    Args:
        kept: names of the modules that are not quantised.
        inputs: how the quantised modules round their inputs.
        weights: bits and grouping of the integers, by its names.
    """
    weights = {"type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        # Without it compressed-tensors 0.15 expects plain int8 tensors beside rounded inputs, and with 2, 3 and 5 bits.
        "format": PACK_QUANTIZED,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": PACK_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": COMPRESSED_TENSORS,
    }


def empty_tensors(name: str, sizes: Mapping[str, Size]) -> Shapes:
    """Return the tensors that stand for the weight `name`, of sizes and types by the end of their names."""
    return {name + end: torch.empty(size, dtype=dtype, device="meta") for end, (size, dtype) in sizes.items()}


class Int8Layout:
    """Four codes to an int32, lowest byte first, each plus 128; compressed-tensors' `pack-quantized`."""

    form, needs = "int8", f"of a width that {PACKED} divides, as vLLM reads them"
    format = Format("int8")

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether four codes fill every int32 of a row."""
        return shape[1] % PACKED == 0

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return codes (N, K / 4), scales (N, 1) and the shape (2,), empty."""
        return empty_tensors(name, grid_sizes(8, shape[1], shape))

    def encode(self, name: str, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return codes, scales in float32 and the shape."""
        parts = self.format.quantise(weight_NK)
        # The sign bit turned over is the code plus 128; int32 is little-endian here as in the file.
        packed = (parts["weight"].view(torch.uint8) ^ 128).view(torch.int32)
        return {
            f"{name}_packed": packed,
            f"{name}_scale": parts[SCALE][:, None],
            f"{name}_shape": torch.tensor(weight_NK.shape),
        }

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the settings as compressed-tensors writes them."""
        return pack_quantized(kept, num_bits=8, strategy="channel")


class NF4Layout:
    """bitsandbytes' 4-bit weights with scales in 8 bits, as `save_pretrained` of a 4-bit model writes them."""

    form, needs = "nf4", f"of a width that {BLOCK} divides: bitsandbytes on a CPU decodes others wrongly"
    format = Format("nf4")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = str(dtype).removeprefix("torch.")

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether rows are whole blocks."""
        return shape[1] % BLOCK == 0

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return codes (N K / 2, 1), the scales (G,) and theirs, the two tables, and the settings, empty."""
        count = math.prod(shape)
        blocks = count // BLOCK
        sizes: dict[str, Size] = {
            "": ((count // 2, 1), torch.uint8),
            ".absmax": ((blocks,), torch.uint8),
            ".quant_map": ((len(NF4),), torch.float32),
            ".nested_absmax": ((math.ceil(blocks / NESTED_BLOCK),), torch.float32),
            ".nested_quant_map": ((len(SIGNED),), torch.float32),
            ".quant_state.bitsandbytes__nf4": ((MAX_STATE_BYTES,), torch.uint8),
        }
        return empty_tensors(name, sizes)

    def encode(self, name: str, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return codes, scales, tables, and the settings as bytes of JSON."""
        parts = self.format.quantise(weight_NK)
        state = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": self.dtype,
            "shape": list(weight_NK.shape),
            "nested_blocksize": NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": float(parts[OFFSET]),
        }
        return {
            name: parts["weight"].reshape(-1, 1),
            f"{name}.absmax": parts[ABSMAX].flatten(),
            f"{name}.quant_map": torch.tensor(NF4),
            f"{name}.nested_absmax": parts[NESTED],
            f"{name}.nested_quant_map": torch.tensor(SIGNED),
            f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the settings as transformers' BitsAndBytesConfig writes them."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": self.dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": kept,
        }


class TernaryLayout:
    """Four codes of 2 bits to a byte, each plus 1; row i of R bytes has the rows i, i + R, i + 2 R and i + 3 R.

    This is `transformers.integrations.bitnet.pack_weights`, for its `BitLinear`, which divides by `weight_scale`.
    """

    form, needs = "bitnet", f"whose number of output features {PACKED} divides"

    def __init__(self, dtype: torch.dtype) -> None:
        """Take the data type in which the weights were given to the layers in training."""
        self.dtype = dtype

    def holds(self, shape: tuple[int, int]) -> bool:
        """Return whether four codes fill every byte."""
        return shape[0] % PACKED == 0

    def shapes(self, name: str, shape: tuple[int, int]) -> Shapes:
        """Return codes (N / 4, K) and the factor (1,), empty."""
        rows, columns = shape
        sizes: dict[str, Size] = {"": ((rows // PACKED, columns), torch.uint8), "_scale": ((1,), torch.float32)}
        return empty_tensors(name, sizes)

    def encode(self, name: str, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return packed codes, and the factor that the weight was multiplied by before it was rounded."""
        codes_NK, inverse = ternary(weight_NK.to(self.dtype))
        parts = (codes_NK + 1).to(torch.uint8).chunk(PACKED)
        packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
        return {name: packed, f"{name}_scale": inverse.view(1)}

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the settings as transformers' BitNetQuantConfig writes them."""
        return {
            "quant_method": "bitnet",
            "linear_class": "bitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": kept,
        }


def chosen_weights(model: WholeModel, layout: Holder) -> list[str]:
    """Return the names of the weights of the layers that a form quantises.

    Raises:
        ConfigError: most weights of the layers cannot be quantised.
    """
    chosen = [name for name in model.shapes if name in model.linears and layout.holds(matrix_shape(model.shapes[name]))]
    inside = sum(empty.numel() for name, empty in model.shapes.items() if any(p.isdigit() for p in name.split(".")))
    covered = sum(model.shapes[name].numel() for name in chosen)
    if 2 * covered < inside:
        raise ConfigError(
            f"the form {layout.form}; {covered:,} of the {inside:,} weights in the layers of {model.architecture} are "
            f"in Linear modules {layout.needs}, and no others are quantised (GPT-2's Conv1D, stacked experts); write "
            "another form."
        )
    return chosen


def write_quantised(
    folder: str,
    layout: Layout,
    *,
    model: WholeModel,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    max_shard_bytes: float = math.inf,
    generation: str | None = None,
    effect: Effect | None = None,
    holds_all: bool = False,
) -> Quantised:
    """Write the model with its layers' weights in a layout of codes, one file's tensors in memory at a time.

    Args:
        dtype: of everything that is not quantised; int8's scales are float32.
        effect: receives what the adapters change, before quantisation.
        holds_all: whether every weight of the layers must be quantised.

    Raises:
        ConfigError: most weights of the layers cannot be quantised, or one that must be.
    """
    chosen = chosen_weights(model, layout)
    left = [name for name in model.shapes if name in model.linears and name not in chosen]
    if left and holds_all:
        raise ConfigError(
            f"task.forms has {layout.form}; {left[0]} is {matrix_shape(model.shapes[left[0]])}, and it holds weights "
            f"{layout.needs}; leave it out of task.forms."
        )
    quantised = frozenset(chosen)
    shapes: dict[str, Tensor] = {}
    for name, empty in model.shapes.items():
        own = empty if isinstance(empty, nn.Buffer) else empty.to(dtype)
        shapes |= layout.shapes(name, matrix_shape(empty)) if name in quantised else {name: own}
    # Every other matrix. The head is named also where it is tied, and no tensor of its own.
    others = [name.removesuffix(".weight") for name, t in model.shapes.items() if t.ndim == 2 and name not in quantised]
    kept = list(dict.fromkeys([HEAD, *others]))

    def encoded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.tensors(effect=effect, dtype=dtype):
            yield from layout.encode(name, tensor).items() if name in quantised else [(name, tensor)]
            del tensor  # otherwise it stays allocated while the next one is read

    digests = write_model(
        folder,
        tensors=encoded(),
        shapes=shapes,
        config=model.config,
        architecture=model.architecture,
        dtype=dtype,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        generation=generation,
        quantization=layout.config(kept),
    )
    note = ""
    if left:
        name = str(dtype).removeprefix("torch.")
        note = f"{len(left)} weights of the layers stay in {name}: {layout.form} is for weights {layout.needs}."
    return Quantised(digests, len(chosen), left, note)


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return (N, K) of a weight."""
    rows, columns = tensor.shape
    return rows, columns
