"""Names of parameters stacked over layers, and their conversion to and from Hugging Face's names.

The stack of `model.layers.0` to `model.layers.31` is called `model.layers.0:32:1` (start, stop, step, as a range); with
a period of six, as in Gemma 3, there are `model.layers.0:18:6`, `model.layers.1:18:6`, ... Only device tensors and the
programs that use them have these names: checkpoints and exports have Hugging Face's.
"""

import re
from collections.abc import Mapping

from torch import Tensor

SIDE_TENSORS = ("weight_scale", "weight_absmax", "weight_nested", "weight_offset")
"""Last parts of the names of the scales of quantised weights, whose codes are called `weight` (quantised.py)."""
MAGNITUDE = "lora_magnitude_vector"
"""Last part of the name of DoRA's trained lengths of rows (models/adapters/dora.py), as in PEFT."""
LEARNT_SCALE = "lora_weight_scale"
"""Last part of the name of the trained scales of rounded weights (models/adapters/low_rank_qat.py)."""
TOKEN_ROWS = "trainable_tokens_delta"
"""Last part of the name of trained rows of an embedding or a head (models/adapters/token_rows.py), as in PEFT."""
EMBEDDING_PARTS = ("lora_embedding_A", "lora_embedding_B")
"""Last parts of the names of an embedding's adapter (models/adapters/embeddings.py), as in PEFT."""
ADAPTER_PARTS = ("lora_A", "lora_B", MAGNITUDE, LEARNT_SCALE, TOKEN_ROWS, *EMBEDDING_PARTS)
"""Last parts of the names of an adapter's trained tensors (models/adapters/lora.py)."""
OF_PARAMETERS = "parameter_adapters"
"""Name of the modules that hold adapters of parameters that are no module's `weight` (models/adapters/experts.py)."""
RANGE = re.compile(r"(?<=\.)(\d+):(\d+):(\d+)(?=\.)")


def is_stack(name: str) -> bool:
    """Return whether the parameter of this name has a leading layer axis."""
    return RANGE.search(name) is not None


def is_side_tensor(name: str) -> bool:
    """Return whether the parameter of this name holds scales of quantised weights; a checkpoint has none."""
    return name.rpartition(".")[2] in SIDE_TENSORS


def is_adapter_part(name: str) -> bool:
    """Return whether the parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_PARTS


def adapter_of(weight: str) -> str:
    """Return the name of the module that holds the adapter of a weight.

    >>> adapter_of("model.layers.0.mlp.experts.down_proj")
    'model.layers.0.mlp.experts.parameter_adapters.down_proj'
    """
    path, _, leaf = weight.rpartition(".")
    return path if leaf == "weight" else f"{path}.{OF_PARAMETERS}.{leaf}"


def weight_of(adapter: str) -> str:
    """Return the name of the weight whose adapter a module holds, the inverse of `adapter_of`."""
    path, of_parameter, leaf = adapter.rpartition(f".{OF_PARAMETERS}.")
    return f"{path}.{leaf}" if of_parameter else f"{adapter}.weight"


def is_of_parameter(name: str) -> bool:
    """Return whether an adapter, or one of its parts, is of a parameter that is no module's `weight`."""
    return f".{OF_PARAMETERS}." in name


def is_of_linear(name: str) -> bool:
    """Return whether the parameter of this name belongs to an adapter of a Linear, or of a matrix of experts."""
    return is_adapter_part(name) and name.rpartition(".")[2] not in (TOKEN_ROWS, *EMBEDDING_PARTS)


def is_of_rows(name: str) -> bool:
    """Return whether the parameter of this name holds trained rows of an embedding or a head."""
    return name.rpartition(".")[2] == TOKEN_ROWS


def is_magnitude(name: str) -> bool:
    """Return whether the parameter of this name holds DoRA's lengths of rows, which are always float32."""
    return name.rpartition(".")[2] == MAGNITUDE


def is_learnt_scale(name: str) -> bool:
    """Return whether the parameter of this name holds trained scales of rounded weights, which are always float32."""
    return name.rpartition(".")[2] == LEARNT_SCALE


def hugging_face_names(name: str) -> list[str]:
    """Return the names of the parameters stacked in `name`, in layer order; of no stack, `name` itself.

    >>> hugging_face_names("model.layers.1:6:2.mlp.up_proj.weight")[2]
    'model.layers.5.mlp.up_proj.weight'
    """
    found = RANGE.search(name)
    if found is None:
        return [name]
    return [name[: found.start()] + str(index) + name[found.end() :] for index in range(*map(int, found.groups()))]


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the tensors under Hugging Face's names, in layer order."""
    by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = tensor.unbind(0) if is_stack(name) else [tensor]
        by_name |= dict(zip(hugging_face_names(name), parts, strict=True))
    return {name: by_name[name] for name in sorted(by_name, key=_in_order)}


def stacked(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor `name` assembled from tensors under Hugging Face's names.

    `tensors` may read from storage: each name is looked up once.
    """
    if not is_stack(name):
        return tensors[name]
    names = hugging_face_names(name)
    first = tensors[names[0]]
    whole = first.new_empty((len(names), *first.shape))
    whole[0] = first
    for index, part in enumerate(names[1:], start=1):
        whole[index] = tensors[part]
    return whole


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
