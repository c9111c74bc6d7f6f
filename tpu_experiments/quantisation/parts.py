"""The tensors that stand for a quantised weight in a file, and the weight that they decode to.

Integers are in compressed-tensors' layout `pack-quantized`: words of 32 bits, scales, the shape. Vectors of codebooks
(VPTQ) have a layout of this program: indices without gaps in bytes, codebooks in float16, the shape. A tensor's name is
that of the weight and an end. Legend: N output features, K input features, G groups of a row."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.quantisation.packing import packed_bytes, unpacked_bytes, unpacked_words
from tpu_experiments.quantisation.vectors import Encoded, Vectors, index_bits

COMPRESSED_TENSORS = "compressed-tensors"
"""`quant_method` of config.json for integers."""
VECTORS = "tpu_experiments_vptq"
"""`quant_method` of config.json for weights as vectors of codebooks."""
SHAPE = "_shape"
"""End of the name of the tensor that holds N and K."""
Size = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Integers:
    """Symmetric integers of some bits, with a scale for each group of a row."""

    bits: int
    group: int | None
    """Columns of a group; None: a row has one scale."""

    def sizes(self, shape: tuple[int, int]) -> dict[str, Size]:
        """Return size and data type of every tensor that stands for a weight (N, K), by the end of its name."""
        return grid_sizes(self.bits, self.group or shape[1], shape)

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight (N, K), float32."""
        scales_NG, (rows, columns) = parts["_scale"].to(torch.float32), parts[SHAPE].tolist()
        codes_NK = unpacked_words(parts["_packed"], bits=self.bits, columns=columns)
        scales_NG1, codes_NGC = scales_NG[..., None], codes_NK.view(rows, scales_NG.shape[1], -1)
        return (codes_NGC.to(torch.float32) * scales_NG1).view(rows, columns)


@dataclass(frozen=True)
class CodebookVectors:
    """Vectors of codebooks."""

    how: Vectors

    def sizes(self, shape: tuple[int, int]) -> dict[str, Size]:
        """Return the result of `vector_sizes`."""
        return vector_sizes(self.how, shape)

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight (N, K), float32."""
        return from_parts(parts, self.how).decode()


PartsLayout = Integers | CodebookVectors


def rounds_inputs(settings: Mapping[str, Any]) -> bool:
    """Return whether `quantization_config` of config.json has layers round what they are given."""
    groups = settings.get("config_groups")
    return isinstance(groups, Mapping) and any(
        isinstance(group, Mapping) and bool(group.get("input_activations")) for group in groups.values()
    )


def layout_of(settings: Mapping[str, Any]) -> PartsLayout | None:
    """Return the layout that `quantization_config` of config.json names; None for one that is not decoded here."""
    try:
        if settings.get("quant_method") == VECTORS and settings.get("format") == 1:
            own = {name: value for name, value in settings.items() if name not in ("quant_method", "format", "ignore")}
            is_sized = all(isinstance(value, int | float) and value >= 0 for value in own.values())
            return CodebookVectors(Vectors(**own)) if is_sized and own["length"] and own["size"] else None
        if settings.get("quant_method") != COMPRESSED_TENSORS or settings.get("format") != "pack-quantized":
            return None
        (group,) = settings["config_groups"].values()
        weights, bits = group["weights"], int(group["weights"]["num_bits"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    is_plain = weights.get("type") == "int" and weights.get("symmetric") is True and not weights.get("dynamic")
    if not is_plain or rounds_inputs(settings) or not 2 <= bits <= 8:
        return None
    if weights.get("strategy") == "channel":
        return Integers(bits, None)
    size = weights.get("group_size")
    return Integers(bits, size) if weights.get("strategy") == "group" and isinstance(size, int) and size > 0 else None


def grid_sizes(bits: int, group: int, shape: tuple[int, int]) -> dict[str, Size]:
    """Return size and data type of words, scales and shape of a weight (N, K), by the end of the name."""
    rows, columns = shape
    return {
        "_packed": ((rows, math.ceil(columns / (32 // bits))), torch.int32),
        "_scale": ((rows, columns // group), torch.float32),
        SHAPE: ((2,), torch.int64),
    }


def index_shapes(how: Vectors, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, int], int]]:
    """Return the shape of each array of indices of a weight (N, K), and the bits of an index."""
    rows, columns = shape
    few = how.num_outliers(columns)
    found = {"_indices": ((rows // how.length, columns - few), index_bits(how.size))}
    if how.residual:
        found["_residual_indices"] = ((rows // how.length, columns - few), index_bits(how.residual))
    if few:
        found["_outlier_indices"] = ((rows // how.outlier_length, few), index_bits(how.outlier_size))
    return found


def vector_sizes(how: Vectors, shape: tuple[int, int]) -> dict[str, Size]:
    """Return size and data type of every tensor that stands for a weight (N, K), by the end of its name."""
    few = how.num_outliers(shape[1])
    sizes: dict[str, Size] = {
        end: ((math.ceil(math.prod(size) * bits / 8),), torch.uint8)
        for end, (size, bits) in index_shapes(how, shape).items()
    }
    sizes["_codebook"] = ((how.size, how.length), torch.float16)
    if how.residual:
        sizes["_residual_codebook"] = ((how.residual, how.length), torch.float16)
    if few:
        book = (how.outlier_size, how.outlier_length)
        sizes |= {"_outliers": ((few,), torch.int32), "_outlier_codebook": (book, torch.float16)}
    return sizes | {SHAPE: ((2,), torch.int64)}


def as_parts(made: Encoded, how: Vectors) -> dict[str, Tensor]:
    """Return the tensors of an encoded weight as they are written."""
    rows = made.indices_VK.shape[0] * how.length
    few = 0 if made.outliers_O is None else len(made.outliers_O)
    shape = (rows, made.indices_VK.shape[1] + few)
    indices = {"_indices": made.indices_VK, "_residual_indices": made.residual_VK, "_outlier_indices": made.outlier_VO}
    books = {
        "_codebook": made.codebook_CL,
        "_residual_codebook": made.residual_CL,
        "_outlier_codebook": made.outlier_CL,
    }
    parts = {
        end: packed_bytes(found, bits=bits)
        for end, (_, bits) in index_shapes(how, shape).items()
        if (found := indices[end]) is not None
    }
    parts |= {end: book.to(torch.float16) for end, book in books.items() if book is not None}
    parts |= {} if made.outliers_O is None else {"_outliers": made.outliers_O}
    return parts | {SHAPE: torch.tensor(shape)}


def from_parts(parts: Mapping[str, Tensor], how: Vectors) -> Encoded:
    """Return the encoded weight of tensors that `as_parts` wrote."""
    rows, columns = parts[SHAPE].tolist()
    indices = {
        end: unpacked_bytes(parts[end], bits=bits, shape=size)
        for end, (size, bits) in index_shapes(how, (rows, columns)).items()
    }
    books = {end: parts[end].to(torch.float32) for end in parts if end.endswith("codebook")}
    return Encoded(
        indices_VK=indices["_indices"],
        codebook_CL=books["_codebook"],
        residual_VK=indices.get("_residual_indices"),
        residual_CL=books.get("_residual_codebook"),
        outliers_O=parts.get("_outliers"),
        outlier_VO=indices.get("_outlier_indices"),
        outlier_CL=books.get("_outlier_codebook"),
    )
