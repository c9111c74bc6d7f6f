"""The sizes of a decoder, read from its transformers config, from which FLOPs and bytes are counted.

Supported are dense decoders with grouped-query attention and a gated MLP, whose seven projections have the names q, k,
v, o, gate, up and down; any other model type is refused rather than counted wrongly.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.sources import ATTENTION_PROJECTIONS, MLP_PROJECTIONS
from tpu_experiments.config.targets import is_target

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class Family:
    """What a model type has beside its seven projections, as transformers 5.23 builds it."""

    norms: int = 2
    """RMSNorms over the hidden size per layer."""
    head_norms: int = 0
    """RMSNorms over the head size per layer."""
    qkv_bias: bool = False
    tied: bool = False
    """`tie_word_embeddings` where the config does not have it."""
    window: str = "none"
    """Which layers attend within `sliding_window`: `none`, `all`, `period` (all but each sixth), `late` (those from
    `max_window_layers`, when `use_sliding_window`)."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="all"),
    "qwen2": Family(qkv_bias=True, window="late"),
    "qwen3": Family(head_norms=2, window="late"),
    "gemma3_text": Family(norms=4, head_norms=2, tied=True, window="period"),
}


@dataclass(frozen=True)
class Decoder:
    """Sizes of one model; every count is of elements, not bytes."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    windows: tuple[int | None, ...]
    """Number of tokens a layer attends to, the token itself included; None is all before it."""
    family: Family

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the matrices of one layer."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        mlp = [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return dict(zip(ATTENTION_PROJECTIONS + MLP_PROJECTIONS, attention + mlp, strict=True))

    @property
    def layer_matrices(self) -> int:
        """Elements of the seven matrices of one layer."""
        return sum(wide * high for wide, high in self.projections.values())

    @property
    def embedding(self) -> int:
        """Elements of the embedding; a head that is not tied has as many again."""
        return self.vocab_size * self.hidden

    @property
    def matrices(self) -> int:
        """Elements of all matrices, a tied head once."""
        return self.num_layers * self.layer_matrices + self.embedding * (1 if self.tied else 2)

    @property
    def vectors(self) -> int:
        """Elements of norms and biases."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.family.qkv_bias else 0
        norms = self.family.norms * self.hidden + self.family.head_norms * self.head_dim
        return self.num_layers * (norms + biases) + self.hidden

    @property
    def parameters(self) -> int:
        """Elements of everything, as `module.parameters()` counts them."""
        return self.matrices + self.vectors

    def adapted(self, targets: Iterable[str]) -> list[tuple[int, int]]:
        """Return (in, out) of every Linear that `lora.targets` names, by the rule of config/targets.py."""
        return [shape for _, shape in self.adapted_by_leaf(targets)]

    def adapted_by_leaf(self, targets: Iterable[str]) -> list[tuple[str, tuple[int, int]]]:
        """Return the result of `adapted` with the last part of each name."""
        wanted = list(targets)
        named = ((name, name.rpartition(".")[2], shape) for name, shape in self._linears())
        return [(leaf, shape) for name, leaf, shape in named if any(is_target(name, each) for each in wanted)]

    def adapter_parameters(self, *, rank: int, targets: Iterable[str]) -> int:
        """Count the elements of all A (rank, in) and B (out, rank)."""
        return sum(rank * (wide + high) for wide, high in self.adapted(targets))

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for layer in range(self.num_layers):
            for leaf, shape in self.projections.items():
                part = "self_attn" if leaf in ATTENTION_PROJECTIONS else "mlp"
                yield f"model.layers.{layer}.{part}.{leaf}", shape
        yield "lm_head", (self.hidden, self.vocab_size)


def read_decoder(arch: Any) -> Decoder:
    """Read the sizes from `model.arch` or from a transformers config.

    Raises:
        ConfigError: the model type is not supported here, or a size is missing.
    """
    kind = _value(arch, "model_type")
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError(
            f"model.arch.model_type={kind}; its FLOPs and bytes are not counted yet. {suggest(str(kind), FAMILIES)} A "
            "dense decoder with the seven projections takes one line in tpu_experiments/metrics/decoder.py."
        )
    missing = [name for name in REQUIRED if _value(arch, name) is None]
    if missing:
        raise ConfigError(f"model.arch.{missing[0]} is not set; task=plan counts from {', '.join(REQUIRED)}; set it.")
    hidden, heads = int(_value(arch, "hidden_size")), int(_value(arch, "num_attention_heads"))
    tied = _value(arch, "tie_word_embeddings")
    return Decoder(
        hidden=hidden,
        intermediate=int(_value(arch, "intermediate_size")),
        num_layers=int(_value(arch, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(_value(arch, "num_key_value_heads")),
        head_dim=int(_value(arch, "head_dim") or hidden // heads),
        vocab_size=int(_value(arch, "vocab_size")),
        tied=family.tied if tied is None else bool(tied),
        windows=_windows(arch, family),
        family=family,
    )


def _value(arch: Any, name: str) -> Any:
    return arch.get(name) if hasattr(arch, "get") else getattr(arch, name, None)


def _windows(arch: Any, family: Family) -> tuple[int | None, ...]:
    """Return the window of every layer, by `layer_types` where given, otherwise by the family's rule."""
    layers = range(int(_value(arch, "num_hidden_layers")))
    window = _value(arch, "sliding_window")
    kinds = _value(arch, "layer_types")
    if window is None:
        return (None,) * len(layers)
    if kinds:
        slides = [kind == "sliding_attention" for kind in kinds]
    elif family.window == "period":
        period = int(_value(arch, "sliding_window_pattern") or 6)
        slides = [(layer + 1) % period != 0 for layer in layers]
    elif family.window == "late":
        first = int(_value(arch, "max_window_layers") or 28) if _value(arch, "use_sliding_window") else len(layers)
        slides = [layer >= first for layer in layers]
    else:
        slides = [family.window == "all"] * len(layers)
    return tuple(int(window) if slide else None for slide in slides)
