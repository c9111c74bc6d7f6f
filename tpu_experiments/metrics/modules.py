"""Shapes of a decoder's modules, read from transformers' own class on the meta device.

Every parameter of a layer has to be of a kind that is known here: a matrix that tokens are multiplied with, the stacked
matrices of experts, a vector, a convolution of each feature over a few tokens. Layers that hold a state, attention
to some chosen tokens and other mixers are refused, so that nothing is counted wrongly: tests/metrics/test_modules.py
holds every causal type of transformers against torch's counter of FLOPs.
"""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tpu_experiments.config.errors import ConfigError, one_line

if TYPE_CHECKING:
    from torch import nn

MIXERS = re.compile(r"(Attention|ShortConv)$")
"""Classes of modules that mix tokens in ways that are counted."""
STATES = ("A_log", "dt_bias", "time_decay", "recurrent_gate_weight", "rg_lru")
"""Parts of the names of parameters of a state that is handed from token to token."""
KINDS = ("full_attention", "sliding_attention", "conv")
"""Values of `layer_types` that are counted."""
UNLIKE = {
    "big_bird": "its attention is over blocks",
    "cpmant": "its queries meet a segment of their own",
    "diffllama": "its attention is the difference of two",
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "its layers predict and correct several streams"),
    "moshi": "its layers have several streams",
    "prophetnet": "its layers predict several tokens",
    "trocr": "its layers attend to pictures",
}
"""Model types whose modules compute more or less than products of all tokens."""
AFTER_MLP = re.compile(r"post_(feedforward|mlp|ffn|moe)_?\w*norm|ffn_post_norm|ln_2_post")
"""Names of a layer's norm that reads what its last matrix computes."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer, or several of one name that tokens choose from."""

    name: str
    layer: int | None
    """None: it is outside of the layers, the head excepted."""
    inputs: int
    outputs: int
    share: float = 1.0
    """Share of its elements that a token is multiplied with."""
    is_linear: bool = True
    """Whether it may have an adapter."""
    mixes: bool = False
    """Whether it is part of what mixes tokens, and not of the MLP."""


@dataclass(frozen=True)
class Mixing:
    """Widths of one layer's attention over all heads, in features; 0 of a layer without."""

    queries: int = 0
    keys: int = 0
    values: int = 0
    """Weighted values, which each head of queries has."""


@dataclass(frozen=True)
class Modules:
    """What a class of transformers is made of."""

    matrices: tuple[Matrix, ...]
    mixing: tuple[Mixing, ...]
    """Of each layer."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Of every parameter by name, a tied one once."""
    embedding: str
    """Name of the embedding's weight."""
    head: str
    """Name of the module that makes logits."""
    tied: bool
    ends_in_norm: bool
    """Whether a layer's last matrix is followed by a norm."""
    repeats: bool
    """Whether layers, or periods of them, differ in their weights alone, so that models/stack/fold.py folds them."""


def read_modules(config: Any) -> Modules:
    """Build the decoder of a transformers config without weights, and read it.

    Raises:
        ConfigError: transformers has no such decoder, or one with parts that are not counted.
    """
    return _read(json.dumps(config.to_dict(), sort_keys=True, default=str), _Held(config))


class _Held:
    """A config beside the key of the cache."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=8)
def _read(_key: str, held: _Held) -> Modules:
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(held.config)  # a class may write into its config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return modules_of(model)
    except ConfigError:
        raise
    except Exception as error:  # each class is made in its own way, and a run does not end for its FLOPs
        raise uncounted(config, f"transformers builds no decoder that can be read ({one_line(error)})") from error


def uncounted(config: Any, why: str) -> ConfigError:
    """Return the refusal of a model whose sizes are not read."""
    return ConfigError(f"model_type={config.model_type}; its FLOPs and bytes are not counted: {why}.")


def modules_of(model: Any) -> Modules:
    """Return what a model is made of.

    Raises:
        ConfigError: it has parts that are not counted.
    """
    from torch import nn

    config = model.config
    if config.model_type in UNLIKE:
        raise uncounted(config, UNLIKE[config.model_type])
    kinds = set(getattr(config, "layer_types", None) or ()) - set(KINDS)
    if kinds:
        raise uncounted(config, f"it has layers of {', '.join(sorted(map(str, kinds)))}")
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    count = getattr(config, "num_hidden_layers", None)
    layers = [(name, part) for name, part in lists if len(part) == count]
    if not layers:
        raise uncounted(config, f"it has no list of {count} layers")
    prefix, stack = layers[0]
    mixers = [_mixers(layer) for layer in stack]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(part): name for name, part in model.named_modules()}
    if head is None or embedding is None:
        raise uncounted(config, "it has no embedding or no head")
    tied = embedding.weight is head.weight or bool(getattr(config, "tie_word_embeddings", False))
    head_name = names[id(head)]
    shapes = _shapes(model, without=f"{head_name}.weight" if tied else "")
    if f"{names[id(embedding)]}.weight" not in shapes:
        raise uncounted(config, "its embedding has another name")
    matrices: list[Matrix] = []
    for name, part in model.named_modules():
        numbers = re.match(rf"{re.escape(prefix)}\.(\d+)\.", name)
        layer = int(numbers[1]) if numbers else None
        inside = name[numbers.end() :] if numbers else ""
        mixes = layer is not None and any(f"{inside}.".startswith(f"{one}.") for one in mixers[layer])
        if part is not head:
            matrices += _matrices(name, part, layer=layer, mixes=mixes, model=model)
    return Modules(
        matrices=tuple(matrices),
        mixing=tuple(_mixing(layer, own, config=config) for layer, own in zip(stack, mixers, strict=True)),
        shapes=tuple(shapes.items()),
        embedding=f"{names[id(embedding)]}.weight",
        head=head_name,
        tied=tied,
        ends_in_norm=any(AFTER_MLP.search(name) for name, _ in stack[0].named_children()),
        repeats=_repeats([_kind(layer) for layer in stack]),
    )


def _kind(layer: "nn.Module") -> Any:
    """Return a value that is equal for layers that differ only in their weights; one with buffers is equal to none."""
    if next(layer.buffers(), None) is not None:
        return id(layer)
    return [
        (
            name,
            type(part),
            {k: v for k, v in vars(part).items() if isinstance(v, str | int | float | None) and k != "layer_idx"},
            [(own, p.shape) for own, p in part.named_parameters(recurse=False)],
        )
        for name, part in layer.named_modules()
    ]


def _repeats(kinds: list[Any]) -> bool:
    """Return whether kinds repeat after some layers: from the first on with some left over, or all from the second."""
    for start in (0, 1):
        own = kinds[start:]
        for period in range(1, len(own) // 2 + 1):
            whole = len(own) // period * period
            if (whole == len(own) or not start) and all(own[n] == own[n % period] for n in range(whole)):
                return True
    return False


def _shapes(model: Any, *, without: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, one of several names once."""
    found = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name != without}
    return {name: tuple(model.get_parameter(name).shape) for name in found.values()}


def _matrices(name: str, part: "nn.Module", *, layer: int | None, mixes: bool, model: Any) -> Iterator[Matrix]:
    """Yield the matrices that are parameters of this very module.

    Raises:
        ConfigError: one of its parameters is of no known kind.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(part, nn.Embedding | nn.Conv1d):
        return
    stacked = [own for own, p in part.named_parameters(recurse=False) if p.ndim == 3 and "bias" not in own]
    for own, p in part.named_parameters(recurse=False):
        is_linear = isinstance(part, nn.Linear | Conv1D)
        if any(state in own for state in STATES):
            raise uncounted(model.config, f"its layers hold a state ({name}.{own})")
        if p.ndim < 2 or "bias" in own:
            continue
        if p.ndim == 2 and own == "weight":
            wide, high = p.shape if isinstance(part, Conv1D) else reversed(p.shape)
            yield Matrix(name if is_linear else f"{name}.{own}", layer, wide, high, 1.0, is_linear, mixes)
        elif p.ndim == 3 and type(part).__name__.endswith("Experts") and model.config.hidden_size in p.shape[1:]:
            hidden, inner = model.config.hidden_size, p.numel() // model.config.hidden_size
            wide, high = (inner, hidden) if own == stacked[-1] else (hidden, inner)
            yield Matrix(f"{name}.{own}", layer, wide, high, _chosen(name, model) / p.shape[0], False, mixes)
        else:
            raise uncounted(model.config, f"{name}.{own} is of no known kind")


def _chosen(name: str, model: Any) -> int:
    """Return how many of a module's experts compute a token.

    Raises:
        ConfigError: neither a module beside them nor the config says it.
    """
    beside = model.get_submodule(name.rpartition(".")[0])
    found = {part.top_k for part in beside.modules() if isinstance(getattr(part, "top_k", None), int)}
    named = (getattr(model.config, name, None) for name in ("num_experts_per_tok", "top_k_experts"))
    found = found or {each for each in named if each is not None}
    if len(found) != 1 or not isinstance(one := found.pop(), int):
        raise uncounted(model.config, f"how many experts of {name} compute a token is not known")
    return one


def _mixers(layer: "nn.Module") -> list[str]:
    """Return the names in a layer of the outermost modules that mix tokens."""
    found: list[str] = []
    for name, part in layer.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not is_inside and MIXERS.search(type(part).__name__):
            found.append(name)
    return found


def _mixing(layer: "nn.Module", mixers: list[str], *, config: Any) -> Mixing:
    """Return the widths of a layer's attention, from the names of its `_mixers`.

    Raises:
        ConfigError: it mixes tokens otherwise.
    """
    found = Mixing()
    if not mixers:
        raise uncounted(config, f"{type(layer).__name__} has no attention that is known")
    for name in mixers:
        part = layer.get_submodule(name)
        if type(part).__name__.endswith("ShortConv"):
            continue
        one = _widths(part, config=config)
        found = Mixing(found.queries + one.queries, found.keys + one.keys, found.values + one.values)
    return found


def _widths(attention: "nn.Module", *, config: Any) -> Mixing:
    """Return the widths of one attention: those of its last matrix, or of what makes keys.

    Raises:
        ConfigError: it has no last matrix as wide as the model.
    """
    from transformers.pytorch_utils import Conv1D

    linears: dict[str, tuple[int, int]] = {}
    for name, part in attention.named_modules():
        shape: tuple[int, ...] = getattr(getattr(part, "weight", None), "shape", ())
        if len(shape) == 2:
            wide, high = shape if isinstance(part, Conv1D) else reversed(shape)
            linears[name.rpartition(".")[2]] = wide, high
    outputs = [wide for wide, high in linears.values() if high == config.hidden_size]
    if not outputs:
        raise uncounted(config, f"{type(attention).__name__} has no matrix that ends it")
    heads, values = config.num_attention_heads, outputs[-1]
    latent = getattr(config, "kv_lora_rank", None) is not None
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim) if latent else values
    if latent:
        keys = queries
    elif "k_proj" in linears:
        keys = linears["k_proj"][1]
    elif len(linears) == 2:  # one matrix makes queries, keys and values
        keys = max(high for _, high in linears.values()) - queries
        keys //= 2
    else:
        keys = queries
    return Mixing(queries, keys, values)
