"""Sizes of a model read from its transformers config, FLOPs of training per token, and the share of the chip's peak.

Known are dense decoders with grouped-query attention and a gated MLP, whose seven projections carry the names q, k,
v, o, gate, up and down, or whose q, k and v, and gate and up, are one matrix each, encoders, xLSTM, Qwen 3.5 and
Gemma 4; any other model type is refused rather than counted wrongly.

A multiply-add is 2 FLOPs. A dense forward pass is 2 N FLOPs per token for N elements of matrices (arXiv 2001.08361,
table 1), and the backward pass as much again for the gradient of the activations and once more for that of the
weights. LoRA needs no gradient of the frozen weights: about 4 N instead of 6 N. Attention is as in PaLM (arXiv
2204.02311, appendix B), but with the causal half that is needed: T / 2 keys per query, not T, fewer with a sliding
window."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.masking import num_texts
from tpu_experiments.config.model_schema import (
    ATTENTION_PROJECTIONS,
    MLP_PROJECTIONS,
    SAVED,
    LoraConfig,
    is_in_layer,
    is_named,
    is_saved,
    is_target,
    keeps_output,
    lora_of,
    tokens_of,
)
from tpu_experiments.config.recurrence import chunk_of, delta_chunk_of
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.modules import Matrix, Modules, read_modules

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
    inner_norms: ClassVar[int] = 0
    """RMSNorms over the MLP's inner size per layer. No field: the digests of stored plans are of the fields."""
    is_fused: ClassVar[bool] = False
    """Whether projections that read the same input are one matrix."""
    is_mlp_fused: ClassVar[bool] = False
    """Whether the two that the MLP multiplies its input with are one matrix, beside attention's three. No field."""
    ends_in_norm: ClassVar[bool] = False
    """Whether a norm follows the MLP's last matrix, of a layer with two norms. No field."""
    wide_norms: ClassVar[bool] = False
    """Whether a layer has an RMSNorm over the queries of all heads, and one over all keys. No field."""
    period: ClassVar[int] = 6
    """Layers of which the last attends to all, where `window` is `period` and the config does not say. No field."""
    qkv_bias: bool = False
    tied: bool = False
    """`tie_word_embeddings` where the config does not have it."""
    window: str = "none"
    """Which layers attend within `sliding_window`: `none`, `all`, `period` (all but each sixth), `late` (those from
    `max_window_layers`, when `use_sliding_window`)."""


@dataclass(frozen=True)
class BitNetFamily(Family):
    """A Llama with a norm in front of o_proj and one in front of down_proj."""

    inner_norms: ClassVar[int] = 1


@dataclass(frozen=True)
class PostNormFamily(Family):
    """Norms are behind attention and MLP, and none in front of them."""

    ends_in_norm: ClassVar[bool] = True


@dataclass(frozen=True)
class WideNormFamily(PostNormFamily):
    """Beside norms behind attention and MLP there are some over queries and keys, of all heads together."""

    wide_norms: ClassVar[bool] = True
    period: ClassVar[int] = 4


@dataclass(frozen=True)
class FusedFamily(Family):
    """Queries, keys and values are one matrix, and so are the two that the MLP multiplies its input with."""

    is_fused: ClassVar[bool] = True


@dataclass(frozen=True)
class FusedMlpFamily(Family):
    """The two matrices that the MLP multiplies its input with are one."""

    is_mlp_fused: ClassVar[bool] = True


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="all"),
    "qwen2": Family(qkv_bias=True, window="late"),
    "qwen3": Family(head_norms=2, window="late"),
    "gemma3_text": Family(norms=4, head_norms=2, tied=True, window="period"),
    "eurobert": Family(),
    "bitnet": BitNetFamily(norms=3),
    "qwen3_5_text": Family(head_norms=2),
    "smollm3": Family(tied=True),
    "phi3": FusedFamily(window="all"),
    "qwen3_moe": Family(head_norms=2, window="late"),
    "gemma4_text": Family(norms=4, head_norms=2, tied=True, window="period"),
    **dict.fromkeys(("granite", "ministral3"), Family()),
    **dict.fromkeys(("gemma", "ernie4_5"), Family(tied=True)),
    **dict.fromkeys(("cohere", "cohere2"), Family(norms=1, tied=True)),
    "gemma2": Family(norms=4, tied=True),
    "seed_oss": Family(qkv_bias=True),
    "exaone4": PostNormFamily(head_norms=2),
    "olmo2": WideNormFamily(),
    "olmo3": WideNormFamily(window="period"),
    "glm": FusedMlpFamily(),
    "glm4": FusedMlpFamily(norms=4),
}


BASE = "model"
"""First part of the names of a decoder's layers."""


class ExpertMatrix(NamedTuple):
    """A matrix that each expert of a layer has."""

    experts: int
    chosen: int
    """Experts that compute a token."""
    wide: int
    """Inputs."""
    high: int
    """Outputs."""


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
        fused_mlp = {
            "gate_up_proj": (self.hidden, 2 * self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }
        if self.family.is_fused:
            found = {"qkv_proj": (self.hidden, queries + 2 * keys), "o_proj": (queries, self.hidden)}
            return found | fused_mlp
        if self.family.is_mlp_fused:
            return dict(zip(ATTENTION_PROJECTIONS, attention, strict=True)) | fused_mlp
        mlp = [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return dict(zip(ATTENTION_PROJECTIONS + MLP_PROJECTIONS, attention + mlp, strict=True))

    @property
    def copies(self) -> dict[str, int]:
        """Number of layers that have each of `projections`."""
        return dict.fromkeys(self.projections, self.num_layers)

    @property
    def matrices_of_layers(self) -> int:
        """Elements of the matrices of all layers."""
        return sum(self.copies[name] * wide * high for name, (wide, high) in self.projections.items())

    @property
    def multiplied(self) -> dict[str, float]:
        """Elements of the matrices of all layers that a token is multiplied with."""
        return {name: float(self.copies[name] * wide * high) for name, (wide, high) in self.projections.items()}

    @property
    def embedding(self) -> int:
        """Elements of the embedding; a head that is not tied has as many again."""
        return self.vocab_size * self.hidden

    @property
    def embedding_name(self) -> str:
        """Name of the embedding."""
        return f"{BASE}.embed_tokens"

    @property
    def head_name(self) -> str:
        """Name of the head, also of one that is tied."""
        return "lm_head"

    @property
    def matrices(self) -> int:
        """Elements of all matrices, a tied head once."""
        return self.matrices_of_layers + self.embedding * (1 if self.tied else 2)

    @property
    def vectors(self) -> int:
        """Elements of norms and biases."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.family.qkv_bias else 0
        norms = self.family.norms * self.hidden + self.family.head_norms * self.head_dim
        norms += self.family.inner_norms * self.intermediate
        norms += self.family.wide_norms * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * (norms + biases) + self.hidden

    @property
    def parameters(self) -> int:
        """Elements of everything, as `module.parameters()` counts them."""
        return self.matrices + self.vectors

    @property
    def inner(self) -> int:
        """Features inside the MLP of a token."""
        return self.intermediate

    @property
    def stacked(self) -> frozenset[str]:
        """Names of `projections` that are no Linear, which `model.base` leaves dense."""
        return frozenset()

    def saves(self, name: str, names: Collection[str]) -> bool:
        """Return whether the output of one of `projections` is saved under names; those of experts never are."""
        return name not in self.stacked and keeps_output(names, projection=name)

    @property
    def last_projection(self) -> str:
        """Name of the projection after which a layer ends."""
        return MLP_PROJECTIONS[-1]

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm follows a layer's last projection (Gemma 3)."""
        return self.family.norms > 2 or self.family.ends_in_norm

    def reads_last(self, lora: LoraConfig) -> bool:
        """Return whether the backward pass reads the output of a layer's last projection.

        It does where a norm follows, or a trained length (DoRA).
        """
        return self.ends_in_norm or lora.dora

    def attention(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of scores and weighted values, forward, over a row that is one document."""
        keys = sum(mean_keys(seq_len, window=window, causal=causal) for window in self.windows)
        return 4.0 * self.num_heads * self.head_dim * keys

    def rule(self, seq_len: int) -> float:
        """Return the part of `attention` that no policy saves by name: none of attention itself."""
        return 0.0

    def attention_backward(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of the gradients of `attention`: two products for each one forward."""
        return 2.0 * self.attention(seq_len, causal=causal)

    def adapted(self, lora: LoraConfig) -> list[tuple[int, int]]:
        """Return (in, out) of every Linear that has an adapter, by the rules of config/model_schema.py."""
        return list(self.adapted_by_name(lora).values())

    def adapted_by_name(self, lora: LoraConfig) -> dict[str, tuple[int, int]]:
        """Return the result of `adapted` by the names of the Linears."""
        named = ((n, shape) for n, shape in self._linears() if any(is_target(n, each) for each in lora.targets))
        found = {n: shape for n, shape in named if lora.r and not is_saved(f"{n}.weight", lora)}
        if self.embedding_rank(lora):
            found[self.embedding_name] = self.vocab_size, self.hidden
            if self.shares_adapter(lora):
                found.pop(self.head_name, None)
        return found

    def embedding_rank(self, lora: LoraConfig) -> int:
        """Return the rank of the embedding's adapter; 0 of none."""
        names = (self.embedding_name, self.head_name) if self.shares_adapter(lora) else (self.embedding_name,)
        is_adapted = lora.r and any(is_named(each, target) for each in names for target in lora.targets)
        return lora_of(lora, self.embedding_name).r if is_adapted else 0

    def shares_adapter(self, lora: LoraConfig) -> bool:
        """Return whether the head has the adapter of the embedding, if that has one."""
        return self.tied and lora.ensure_weight_tying

    def rows_by_name(self, lora: LoraConfig) -> dict[str, int]:
        """Return how many rows of the embedding and of the head are trained; a tied head's are the embedding's."""
        names = (self.embedding_name,) if self.tied else (self.embedding_name, self.head_name)
        counts = {name: len(tokens_of(lora, name)) for name in names}
        return {name: count for name, count in counts.items() if lora.r and count}

    def has_equal_layers(self, lora: LoraConfig) -> bool:
        """Return whether adapters have one rank and scale in all layers, which then fold into a loop."""
        found: dict[str, set[tuple[int, float]]] = {}
        for name in (*self.adapted_by_name(lora), *self.adapted_experts(lora)):
            own = lora_of(lora, name)
            found.setdefault(name.rpartition(".")[2], set()).add((own.r, own.alpha))
        return all(len(kinds) == 1 for kinds in found.values())

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Count the elements of all A (rank, in) and B (out, rank)."""
        experts = self.adapted_experts(lora).items()
        return self._of_linears(lora) + sum(
            lora_of(lora, name).r * each.experts * (each.wide + each.high) for name, each in experts
        )

    def multiplied_adapters(self, lora: LoraConfig) -> int:
        """Count the elements of all A and B that a token is multiplied with, of its own experts alone."""
        experts = self.adapted_experts(lora).items()
        return self._of_linears(lora) + sum(
            lora_of(lora, name).r * each.chosen * (each.wide + each.high) for name, each in experts
        )

    def _of_linears(self, lora: LoraConfig) -> int:
        linears = self.adapted_by_name(lora)
        return sum(lora_of(lora, name).r * (wide + high) for name, (wide, high) in linears.items())

    def adapted_experts(self, lora: LoraConfig) -> dict[str, ExpertMatrix]:
        """Return the matrices of experts that have adapters (`lora.target_parameters`), by name."""
        targets = lora.target_parameters if lora.r else []
        hit = ((name, each) for name, each in self._experts() if any(is_named(name, target) for target in targets))
        return {name: each for name, each in hit if not is_saved(name, lora)}

    def saved_by_name(self, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of `lora.modules_to_save` by name, a tied head as the embedding.

        Norms of layers with attention alone, and no biases.
        """
        embedding, head = f"{self.embedding_name}.weight", f"{self.head_name}.weight"
        saved = {name: shape for name, shape in self._weights().items() if is_saved(name, lora)} if lora.r else {}
        if self.tied and head in saved:
            del saved[head]
            saved[embedding] = (self.vocab_size, self.hidden)
        return saved

    def trains_head(self, lora: LoraConfig) -> bool:
        """Return whether the head has a gradient of its own."""
        saved = self.saved_by_name(lora)
        name = self.embedding_name if self.tied else self.head_name
        return not lora.r or f"{name}.weight" in saved

    def _weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that `saved_by_name` knows, the head's also where it is tied."""
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (high, wide) for name, (wide, high) in self._linears()}
        found[f"{self.embedding_name}.weight"] = (self.vocab_size, self.hidden)
        found[f"{BASE}.norm.weight"] = (self.hidden,)
        norms = [f"{place}_layernorm" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
        of_heads = ["self_attn.q_norm", "self_attn.k_norm"]
        for layer in range(self.num_layers):
            named = dict.fromkeys(norms[: self.family.norms], (self.hidden,))
            named |= dict.fromkeys(of_heads[: self.family.head_norms], (self.head_dim,))
            found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in named.items()}
        return found

    def _experts(self) -> Iterator[tuple[str, ExpertMatrix]]:
        """Yield the matrices of experts by name."""
        yield from ()

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for layer in range(self.num_layers):
            for leaf, shape in self.projections.items():
                part = "self_attn" if leaf in (*ATTENTION_PROJECTIONS, "qkv_proj") else "mlp"
                yield f"model.layers.{layer}.{part}.{leaf}", shape
        yield "lm_head", (self.hidden, self.vocab_size)


@dataclass(frozen=True)
class EncoderFamily:
    """What an encoder's layer and head multiply with, beside four square matrices of attention."""

    gated: bool = False
    """Whether the MLP has three matrices (GLU, arXiv 2002.05202) and not two."""
    head_dense: bool = True
    """Whether the head has a square matrix before that of the vocabulary."""
    relative: bool = False
    """Whether scores have products of queries and keys with embeddings of distances (arXiv 2006.03654)."""
    has_global: ClassVar[bool] = False
    """Whether a layer has a second query, key and value, for global tokens. No field: as `Family.inner_norms`."""


@dataclass(frozen=True)
class LongformerFamily(EncoderFamily):
    """An encoder whose global tokens have projections of their own (arXiv 2004.05150)."""

    has_global: ClassVar[bool] = True


ENCODERS = {
    "modernbert": EncoderFamily(gated=True),
    "eurobert": EncoderFamily(gated=True, head_dense=False),
    "roberta": EncoderFamily(),
    "bert": EncoderFamily(),
    "longformer": LongformerFamily(),
    "deberta-v2": EncoderFamily(relative=True),
}


@dataclass(frozen=True)
class Encoder(Decoder):
    """Sizes of an encoder with the head of masked language modelling."""

    kind: EncoderFamily
    fused: bool
    """Whether query, key and value are one matrix, and so are the two that the MLP multiplies its input with."""
    tables: int
    """Rows of the embeddings of positions, distances and types."""
    num_vectors: int
    """Elements of norms and biases."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the matrices of one layer."""
        hidden, inner, wide = self.hidden, self.intermediate, self.num_heads * self.head_dim
        inputs = 2 if self.kind.gated else 1
        if self.fused:
            found = {"Wqkv": (hidden, 3 * wide), "Wo": (wide, hidden), "Wi": (hidden, inputs * inner)}
            return found | {"mlp.Wo": (inner, hidden)}
        more = ("query_global", "key_global", "value_global") if self.kind.has_global else ()
        found = dict.fromkeys(("query", "key", "value", *more, "dense"), (hidden, wide))
        return found | {"intermediate": (hidden, inner), "output": (inner, hidden)}

    @property
    def matrices(self) -> int:
        """Elements of all matrices, a tied head once."""
        more = self.tables * self.hidden + (self.hidden**2 if self.kind.head_dense else 0)
        return super().matrices + more

    @property
    def vectors(self) -> int:
        """Elements of norms and biases."""
        return self.num_vectors


def _read_encoder(arch: Any, *, kind: str) -> Encoder:
    """Read an encoder's sizes, as transformers 5.23 builds it; EuroBERT's are a decoder's."""
    hidden, inner, layers = (int(_value(arch, n)) for n in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, vocab = int(_value(arch, "num_attention_heads")), int(_value(arch, "vocab_size"))
    positions = int(_value(arch, "max_position_embeddings"))
    if kind == "modernbert":  # norms without bias, none before the first layer's attention; embedding, last and head
        tables, vectors = 0, (2 * layers - 1 + 3) * hidden + vocab
    else:  # biases of six matrices, two norms with bias; norms of embedding and head, the head's matrix, its bias
        biases = 9 + (3 if ENCODERS[kind].has_global else 0)
        vectors = layers * (biases * hidden + inner) + 5 * hidden + vocab
        types = _value(arch, "type_vocab_size")
        types = {"bert": 2, "roberta": 2, "longformer": 2}.get(kind, 0) if types is None else int(types)
        span = int(_value(arch, "position_buckets") or positions)
        tables = types + (2 * span if kind == "deberta-v2" else positions)
        vectors += 2 * hidden if "layer_norm" in str(_value(arch, "norm_rel_ebd") or "") else 0
    return Encoder(
        hidden=hidden,
        intermediate=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tied=True,
        windows=(None,) * layers,
        family=Family(),
        kind=ENCODERS[kind],
        fused=kind == "modernbert",
        tables=tables,
        num_vectors=vectors,
    )


@dataclass(frozen=True)
class Recurrent(Decoder):
    """Sizes of an xLSTM (models/families/xlstm.py); `head_dim` is the width of a head's values."""

    query_dim: int
    """Width of a head's queries and keys."""
    biased: bool
    """Whether projections and norms have biases; those of the gates do in any case."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the matrices of one layer."""
        hidden, inner = self.hidden, self.intermediate
        queries, values = self.num_heads * self.query_dim, self.num_heads * self.head_dim
        found = {"q": (hidden, queries), "k": (hidden, queries), "v": (hidden, values)}
        found |= {"ogate_preact": (hidden, values), "out_proj": (values, hidden)}
        found |= dict.fromkeys(("igate_preact", "fgate_preact"), (hidden, self.num_heads))
        return found | dict.fromkeys(("proj_up_gate", "proj_up"), (hidden, inner)) | {"proj_down": (inner, hidden)}

    @property
    def embedding_name(self) -> str:
        """Name of the embedding."""
        return "backbone.embeddings"

    @property
    def last_projection(self) -> str:
        """Name of the projection after which a layer ends."""
        return "proj_down"

    @property
    def vectors(self) -> int:
        """Elements of norms and biases."""
        norms = 2 * self.hidden + self.num_heads * self.head_dim
        gates = 2 * self.num_heads
        biases = norms + sum(high for _, high in self.projections.values()) if self.biased else gates
        return self.num_layers * (norms + biases) + self.hidden

    def attention(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of the cell's products, forward, over a row that is one document.

        They are scores and weighted values within a chunk, causal half, and where a row has several chunks, those that
        write and read the state.
        """
        chunk = chunk_of(seq_len)
        within = 2.0 * self.num_heads * (self.query_dim + self.head_dim) * mean_keys(chunk, window=None)
        across = 4.0 * self.num_heads * self.query_dim * self.head_dim if chunk < seq_len else 0.0
        return self.num_layers * (within + across)

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for layer in range(self.num_layers):
            for leaf, shape in self.projections.items():
                part = "ffn" if leaf.startswith("proj_") else "mlstm_layer"
                yield f"backbone.blocks.{layer}.{part}.{leaf}", shape
        yield "lm_head", (self.hidden, self.vocab_size)


def _read_recurrent(arch: Any) -> Recurrent:
    """Read an xLSTM's sizes, with the defaults of transformers 5.23."""
    hidden, layers = int(_required(arch, "hidden_size")), int(_required(arch, "num_hidden_layers"))
    heads = int(_required(arch, "num_heads"))
    multiple = int(_value(arch, "ffn_round_up_to_multiple_of") or 64)
    inner = int((hidden * float(_value(arch, "ffn_proj_factor") or 2.667) + multiple - 1) // multiple * multiple)
    queries, values = _value(arch, "qk_dim_factor"), _value(arch, "v_dim_factor")
    return Recurrent(
        hidden=hidden,
        intermediate=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=int(hidden * (1.0 if values is None else values)) // heads,
        vocab_size=int(_required(arch, "vocab_size")),
        tied=False,
        windows=(None,) * layers,
        family=Family(),
        query_dim=int(hidden * (0.5 if queries is None else queries)) // heads,
        biased=bool(_value(arch, "use_bias")),
    )


@dataclass(frozen=True)
class DeltaHybrid(Decoder):
    """Sizes of Qwen 3.5: layers of Gated DeltaNet (models/families/delta_net.py) beside layers of gated attention."""

    num_delta: int
    """Layers of Gated DeltaNet."""
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    convolution: int
    """Tokens that the convolution reads."""
    attends: tuple[bool, ...]
    """Whether each layer has attention."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the matrices of layers of either kind; queries of attention come with their gate."""
        hidden, found = self.hidden, super().projections
        found["q_proj"] = (hidden, 2 * self.num_heads * self.head_dim)
        values = self.value_heads * self.value_width
        found |= {"in_proj_qkv": (hidden, self.channels), "in_proj_z": (hidden, values), "out_proj": (values, hidden)}
        return found | dict.fromkeys(("in_proj_b", "in_proj_a"), (hidden, self.value_heads))

    @property
    def channels(self) -> int:
        """Queries, keys and values of all heads of a layer of Gated DeltaNet."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def copies(self) -> dict[str, int]:
        """Number of layers that have each of `projections`."""
        whole = dict.fromkeys(self.projections, self.num_delta)
        whole |= dict.fromkeys(ATTENTION_PROJECTIONS, self.num_layers - self.num_delta)
        return whole | dict.fromkeys(MLP_PROJECTIONS, self.num_layers)

    @property
    def vectors(self) -> int:
        """Elements of norms, convolutions, and of the two vectors that make decays."""
        of_delta = self.channels * self.convolution + self.value_width + 2 * self.value_heads
        of_attention = (self.num_layers - self.num_delta) * 2 * self.head_dim
        return (2 * self.num_layers + 1) * self.hidden + self.num_delta * of_delta + of_attention

    def attention(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of scores and weighted values, and of the products of the delta rule, forward."""
        keys = (self.num_layers - self.num_delta) * mean_keys(seq_len, window=None, causal=causal)
        return self.rule(seq_len) + 4.0 * self.num_heads * self.head_dim * keys

    def rule(self, seq_len: int) -> float:
        """Return the FLOPs per token of the products of the delta rule, forward.

        Within a chunk these are four products of its tokens, and two for each round of inverting its matrix; where a
        row has several chunks, those that write, change and read the state.
        """
        chunk, wide, high = delta_chunk_of(seq_len), self.key_width, self.value_width
        within = 4.0 * chunk * (wide + high)
        count = -(-seq_len // chunk)
        across = 2.0 * wide * (3 * high + wide + chunk) + 2.0 * wide * wide * high / chunk * (count - 2) / count
        inverse = self._rounds(chunk) * self._product(chunk)
        return self.num_delta * self.value_heads * (within + (across if count > 1 else 0.0)) + inverse

    def attention_backward(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of the gradients of `attention`; that of the inverse is two products."""
        chunk = delta_chunk_of(seq_len)
        of_inverse = (1 - 2 * self._rounds(chunk)) * self._product(chunk)
        return super().attention_backward(seq_len, causal=causal) + of_inverse

    def _rounds(self, chunk: int) -> int:
        """Return the rounds of inverting a chunk's matrix that have products."""
        return max(0, chunk.bit_length() - 2)

    def _product(self, chunk: int) -> float:
        """Return the FLOPs per token of two products of the chunks' matrices with matrices as large."""
        return 4.0 * self.num_delta * self.value_heads * chunk * chunk

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for layer, attends in enumerate(self.attends):
            for leaf, shape in self.projections.items():
                is_mlp, is_attention = leaf in MLP_PROJECTIONS, leaf in ATTENTION_PROJECTIONS
                if is_mlp or is_attention == attends:
                    part = "mlp" if is_mlp else "self_attn" if attends else "linear_attn"
                    yield f"model.layers.{layer}.{part}.{leaf}", shape
        yield "lm_head", (self.hidden, self.vocab_size)


def _read_delta(arch: Any) -> DeltaHybrid:
    """Read the sizes of Qwen 3.5, with the defaults of transformers 5.23."""
    layers = int(_required(arch, "num_hidden_layers"))
    every = int(_value(arch, "full_attention_interval") or 4)
    kinds = _value(arch, "layer_types")
    attends = (
        tuple(k == "full_attention" for k in kinds) if kinds else tuple((n + 1) % every == 0 for n in range(layers))
    )
    defaults = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    own = {name: int(_value(arch, f"linear_{name}") or number) for name, number in defaults.items()}
    return DeltaHybrid(
        hidden=int(_required(arch, "hidden_size")),
        intermediate=int(_required(arch, "intermediate_size")),
        num_layers=layers,
        num_heads=int(_required(arch, "num_attention_heads")),
        num_kv_heads=int(_required(arch, "num_key_value_heads")),
        head_dim=int(_value(arch, "head_dim") or 256),
        vocab_size=int(_required(arch, "vocab_size")),
        tied=bool(_value(arch, "tie_word_embeddings")),
        windows=(None,) * layers,
        family=FAMILIES["qwen3_5_text"],
        num_delta=attends.count(False),
        key_heads=own["num_key_heads"],
        value_heads=own["num_value_heads"],
        key_width=own["key_head_dim"],
        value_width=own["value_head_dim"],
        convolution=int(_value(arch, "linear_conv_kernel_dim") or 4),
        attends=attends,
    )


@dataclass(frozen=True)
class Mixture(Decoder):
    """Sizes of a decoder whose layers have routed experts in the place of an MLP, as Qwen 3's; all are held in memory.

    The matrices of a layer's experts count as two: one that their inputs are multiplied with, one for their outputs.
    `intermediate` is the width of one expert.
    """

    experts: int
    chosen: int
    """Experts that compute a token."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the matrices of one layer."""
        found = {name: shape for name, shape in super().projections.items() if name in ATTENTION_PROJECTIONS}
        inner = self.experts * self.intermediate
        found |= {"gate": (self.hidden, self.experts), "gate_up_proj": (self.hidden, 2 * inner)}
        return found | {self.last_projection: (inner, self.hidden)}

    @property
    def inner(self) -> int:
        """Features inside the MLP of a token: those of its own experts."""
        return self.chosen * self.intermediate

    @property
    def stacked(self) -> frozenset[str]:
        """Names of the router and the matrices of experts."""
        return frozenset(("gate", "gate_up_proj", self.last_projection))

    @property
    def multiplied(self) -> dict[str, float]:
        """Elements of the matrices of all layers that a token is multiplied with, of a token's own experts alone."""
        share = {name: self.chosen / self.experts for name in ("gate_up_proj", self.last_projection)}
        return {name: count * share.get(name, 1.0) for name, count in super().multiplied.items()}

    def _experts(self) -> Iterator[tuple[str, ExpertMatrix]]:
        """Yield the matrices of experts by name."""
        shapes = {"gate_up_proj": (self.hidden, 2 * self.intermediate), "down_proj": (self.intermediate, self.hidden)}
        for layer in range(self.num_layers):
            for leaf, shape in shapes.items():
                yield f"model.layers.{layer}.mlp.experts.{leaf}", ExpertMatrix(self.experts, self.chosen, *shape)

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, shape in super()._linears():
            if name.rpartition(".")[2] not in self.stacked:
                yield name, shape


def _read_mixture(arch: Any, dense: Decoder) -> Mixture:
    """Read the experts of Qwen 3's mixtures.

    Raises:
        ConfigError: some layers have no experts, or a size is missing.
    """
    step, plain = _value(arch, "decoder_sparse_step"), _value(arch, "mlp_only_layers")
    if plain or step not in (None, 1):
        raise ConfigError(
            f"model.arch.decoder_sparse_step={step} with model.arch.mlp_only_layers={plain}; the FLOPs of layers of "
            "experts beside dense ones are not counted yet."
        )
    names = {field.name: getattr(dense, field.name) for field in fields(dense)}
    sizes = {"intermediate": "moe_intermediate_size", "experts": "num_experts", "chosen": "num_experts_per_tok"}
    return Mixture(**names | {name: int(_required(arch, key)) for name, key in sizes.items()})


@dataclass(frozen=True)
class Gemma4(Decoder):
    """Sizes of Gemma 4's dense text models: two widths of heads, shared keys and values, embeddings of every layer.

    A matrix whose shape differs between layers has a name for each, which ends with that of the module.
    """

    wide_dim: int
    """Width of the heads of layers that attend to everything."""
    wide_kv_heads: int
    """Heads of keys and values in those layers."""
    num_sharing: int
    """Layers, the last ones, that read keys and values of a layer before them."""
    sharing_intermediate: int
    """Features inside the MLP of those layers."""
    keys_are_values: bool
    """Whether layers that attend to everything have no values of their own."""
    of_layer: int
    """Features that the embeddings of a token have for each layer; 0 for none."""
    of_layer_vocab: int
    """Rows of those embeddings."""

    def _variant(self, layer: int) -> tuple[bool, bool]:
        return self.windows[layer] is None, layer >= self.num_layers - self.num_sharing

    def _of_layer(self, layer: int) -> dict[str, tuple[int, int]]:
        is_wide, shares = self._variant(layer)
        width = self.wide_dim if is_wide else self.head_dim
        queries, keys = self.num_heads * width, (self.wide_kv_heads if is_wide else self.num_kv_heads) * width
        inner = self.sharing_intermediate if shares else self.intermediate
        kind, size = "wide." if is_wide else "", "sharing." if shares else ""
        found = {f"{kind}q_proj": (self.hidden, queries), f"{kind}o_proj": (queries, self.hidden)}
        if not shares:
            found[f"{kind}k_proj"] = (self.hidden, keys)
            if not (is_wide and self.keys_are_values):
                found[f"{kind}v_proj"] = (self.hidden, keys)
        found |= {f"{size}gate_proj": (self.hidden, inner), f"{size}up_proj": (self.hidden, inner)}
        found |= {f"{size}down_proj": (inner, self.hidden)}
        if self.of_layer:
            found |= {"per_layer_input_gate": (self.hidden, self.of_layer)}
            found |= {"per_layer_projection": (self.of_layer, self.hidden)}
        return found

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the matrices of layers of every kind, and of that which makes embeddings for all layers."""
        found: dict[str, tuple[int, int]] = {}
        for layer in range(self.num_layers):
            found |= self._of_layer(layer)
        made = {"per_layer_model_projection": (self.hidden, self.num_layers * self.of_layer)}
        return found | (made if self.of_layer else {})

    @property
    def copies(self) -> dict[str, int]:
        """Number of layers that have each of `projections`."""
        found = Counter(name for layer in range(self.num_layers) for name in self._of_layer(layer))
        return dict(found | Counter({"per_layer_model_projection": 1} if self.of_layer else {}))

    @property
    def matrices(self) -> int:
        """Elements of all matrices, a tied head once."""
        return super().matrices + self.of_layer_vocab * self.num_layers * self.of_layer

    @property
    def vectors(self) -> int:
        """Elements of norms; the scalars of layers are no parameters."""
        norms = (4 + (self.of_layer > 0)) * self.hidden
        count = self.hidden + self.of_layer
        for layer in range(self.num_layers):
            is_wide, shares = self._variant(layer)
            count += norms + (1 if shares else 2) * (self.wide_dim if is_wide else self.head_dim)
        return count

    def attention(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of scores and weighted values, forward, over a row that is one document."""
        each = ((self.wide_dim if window is None else self.head_dim, window) for window in self.windows)
        return sum(
            4.0 * self.num_heads * width * mean_keys(seq_len, window=window, causal=causal) for width, window in each
        )

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for layer in range(self.num_layers):
            for name, shape in self._of_layer(layer).items():
                leaf = name.rpartition(".")[2]
                part = "self_attn." if leaf in ATTENTION_PROJECTIONS else "mlp." if leaf in MLP_PROJECTIONS else ""
                yield f"model.layers.{layer}.{part}{leaf}", shape
        yield "lm_head", (self.hidden, self.vocab_size)


def _read_gemma4(arch: Any) -> Gemma4:
    """Read the sizes of a dense text model of Gemma 4, with the defaults of transformers 5.23.

    Raises:
        ConfigError: it has experts, or a size is missing.
    """
    values: Mapping[str, Any] = arch if hasattr(arch, "get") else arch.to_dict()
    if values.get("enable_moe_block"):
        raise ConfigError("model.arch.enable_moe_block=true; the FLOPs of Gemma 4's experts are not counted yet.")
    layers = int(_required(values, "num_hidden_layers"))
    period = ["sliding_attention"] * 5 + ["full_attention"]
    kinds = [*(values.get("layer_types") or [period[n % 6] for n in range(layers)])[:-1], "full_attention"]
    width, heads = int(values.get("head_dim") or 256), int(_required(values, "num_key_value_heads"))
    inner, sharing = int(_required(values, "intermediate_size")), int(values.get("num_kv_shared_layers") or 0)
    equal = bool(values.get("attention_k_eq_v"))
    of_one = {str(n): each for n, each in (values.get("per_layer_config") or {}).items()}
    wide: dict[str, Any] = next(
        (of_one.get(str(n), {}) for n, kind in enumerate(kinds) if kind == "full_attention"), {}
    )
    if values.get("per_layer_config") is None:
        wide = {"head_dim": values.get("global_head_dim") or 512}
        wide |= {"num_key_value_heads": values.get("num_global_key_value_heads")} if equal else {}
    of_layer = values.get("hidden_size_per_layer_input")
    tied = values.get("tie_word_embeddings")
    return Gemma4(
        hidden=int(_required(values, "hidden_size")),
        intermediate=inner,
        num_layers=layers,
        num_heads=int(_required(values, "num_attention_heads")),
        num_kv_heads=heads,
        head_dim=width,
        vocab_size=int(_required(values, "vocab_size")),
        tied=True if tied is None else bool(tied),
        windows=tuple(None if kind == "full_attention" else int(values.get("sliding_window") or 512) for kind in kinds),
        family=FAMILIES["gemma4_text"],
        wide_dim=int(wide.get("head_dim") or width),
        wide_kv_heads=int(wide.get("num_key_value_heads") or heads),
        num_sharing=sharing,
        sharing_intermediate=inner * (2 if values.get("use_double_wide_mlp") else 1),
        keys_are_values=equal,
        of_layer=256 if of_layer is None else int(of_layer),
        of_layer_vocab=int(values.get("vocab_size_per_layer_input") or 262144),
    )


@dataclass(frozen=True)
class Counted(Decoder):
    """Sizes of any other decoder, from the modules of transformers' class (metrics/modules.py).

    `head_dim` is the width of a head's queries in the widest layer. `intermediate` is half of what the matrices of an
    MLP make of a token, the last one excepted, of the experts of a token alone: the features inside a gated MLP.
    """

    modules: Modules

    def _key(self, matrix: Matrix) -> str:
        """Return the name of a matrix without its layer, with its size where layers differ."""
        return f"{matrix.inputs}x{matrix.outputs}.{re.sub(r'[.][0-9]+[.]', '.', matrix.name)}"

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of all matrices but the head."""
        return {self._key(each): (each.inputs, each.outputs) for each in self.modules.matrices}

    @property
    def copies(self) -> dict[str, int]:
        """Number of layers that have each of `projections`."""
        return dict(Counter(map(self._key, self.modules.matrices)))

    @property
    def stacked(self) -> frozenset[str]:
        """Matrices that are no Linear."""
        return frozenset(self._key(each) for each in self.modules.matrices if not each.is_linear)

    @property
    def multiplied(self) -> dict[str, float]:
        """Elements of the matrices of all layers that a token is multiplied with."""
        shares = {self._key(each): each.share for each in self.modules.matrices}
        return {name: count * shares[name] for name, count in super().multiplied.items()}

    @property
    def matrices(self) -> int:
        """Elements of all matrices and tables, a tied head once."""
        linear = {f"{each.name}.weight" if each.is_linear else each.name for each in self.modules.matrices}
        tables = {name for name, shape in self.modules.shapes if len(shape) == 2 and name.endswith("weight")}
        return sum(math.prod(shape) for name, shape in self.modules.shapes if name in linear | tables)

    @property
    def vectors(self) -> int:
        """Elements of norms, biases and convolutions."""
        return sum(math.prod(shape) for _, shape in self.modules.shapes) - self.matrices

    @property
    def last_projection(self) -> str:
        """Name of the matrix after which a layer ends."""
        inside = (each for each in self.modules.matrices if each.layer is not None and not each.mixes)
        return [self._key(each) for each in inside if each.outputs == self.hidden][-1]

    def has_equal_layers(self, lora: LoraConfig) -> bool:
        """Return whether layers fold into a loop."""
        return self.modules.repeats and super().has_equal_layers(lora)

    @property
    def embedding_name(self) -> str:
        """Name of the embedding."""
        return self.modules.embedding.removesuffix(".weight")

    @property
    def head_name(self) -> str:
        """Name of the head, also of one that is tied."""
        return self.modules.head

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm follows a layer's last matrix."""
        return self.modules.ends_in_norm

    def attention(self, seq_len: int, *, causal: bool = True) -> float:
        """Return the FLOPs per token of scores and weighted values, forward, over a row that is one document."""
        widths = (each.queries + each.values for each in self.modules.mixing)
        return sum(
            2.0 * width * mean_keys(seq_len, window=window, causal=causal)
            for width, window in zip(widths, self.windows, strict=True)
        )

    def _weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that `saved_by_name` knows, the head's also where it is tied."""
        found = {name: shape for name, shape in self.modules.shapes if name.endswith("weight")}
        return found | ({f"{self.head_name}.weight": found[self.modules.embedding]} if self.tied else {})

    def _experts(self) -> Iterator[tuple[str, ExpertMatrix]]:
        """Yield the matrices of experts by name."""
        shapes = dict(self.modules.shapes)
        for each in self.modules.matrices:
            shape = shapes.get(each.name, ())
            if len(shape) == 3:  # the sizes of `each` are of all experts together
                count = shape[0]
                wide, high = each.inputs, each.outputs // count
                if each.name.endswith("down_proj"):
                    wide, high = each.inputs // count, each.outputs
                yield each.name, ExpertMatrix(count, round(each.share * count), wide, high)

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for each in self.modules.matrices:
            if each.is_linear:
                yield each.name, (each.inputs, each.outputs)
        yield self.head_name, (self.hidden, self.vocab_size)


def counted_decoder(config: Any) -> Counted:
    """Read the sizes of a decoder whose family has no formula here.

    Raises:
        ConfigError: it has parts that are not counted.
    """
    modules = read_modules(config)
    shapes, heads = dict(modules.shapes), config.num_attention_heads
    vocab, hidden = shapes[modules.embedding]
    widest = max(modules.mixing, key=lambda each: each.queries)
    inner: defaultdict[int, float] = defaultdict(float)
    for each in modules.matrices:
        if each.layer is not None and not each.mixes and each.outputs != hidden:
            inner[each.layer] += each.outputs * each.share
    return Counted(
        hidden=hidden,
        intermediate=round(max(inner.values(), default=0) / 2),
        num_layers=len(modules.mixing),
        num_heads=heads,
        num_kv_heads=max(1, heads * widest.keys // max(1, widest.queries)),
        head_dim=widest.queries // heads,
        vocab_size=vocab,
        tied=modules.tied,
        windows=_windows(config, Family(window="late" if hasattr(config, "use_sliding_window") else "all")),
        family=Family(),
        modules=modules,
    )


def _required(arch: Any, name: str) -> Any:
    value = _value(arch, name)
    if value is None:
        raise ConfigError(f"model.arch.{name} is not set; task=plan counts from it; set it.")
    return value


def read_decoder(arch: Any) -> Decoder:
    """Read the sizes from `model.arch` or from a transformers config, of an encoder too.

    What has no formula here is counted from transformers' class, where a transformers config is given: a command that
    only reads its settings loads neither torch nor transformers.

    Raises:
        ConfigError: the model type is not supported here, or a size is missing.
    """
    try:
        return _read_by_formula(arch)
    except ConfigError:
        if not hasattr(arch, "to_dict"):
            raise
    return counted_decoder(arch)


def _read_by_formula(arch: Any) -> Decoder:
    kind = _value(arch, "model_type")
    if kind in ENCODERS and kind not in FAMILIES:
        return _read_encoder(arch, kind=kind)
    if kind == "xlstm":
        return _read_recurrent(arch)
    if kind == "qwen3_5_text":
        return _read_delta(arch)
    if kind == "gemma4_text":
        return _read_gemma4(arch)
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError(
            f"model.arch.model_type={kind}; its FLOPs and bytes are not counted yet. {suggest(str(kind), FAMILIES)} A "
            "dense decoder with the seven projections takes one line in tpu_experiments/metrics/flops.py."
        )
    if family.is_mlp_fused and _value(arch, "attention_bias"):  # GLM's is of queries, keys and values
        family = replace(family, qkv_bias=True)
    missing = [name for name in REQUIRED if _value(arch, name) is None]
    if missing:
        raise ConfigError(f"model.arch.{missing[0]} is not set; task=plan counts from {', '.join(REQUIRED)}; set it.")
    hidden, heads = int(_value(arch, "hidden_size")), int(_value(arch, "num_attention_heads"))
    tied = _value(arch, "tie_word_embeddings")
    found = Decoder(
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
    return _read_mixture(arch, found) if kind == "qwen3_moe" else found


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
        period = int(_value(arch, "sliding_window_pattern") or family.period)
        slides = [(layer + 1) % period != 0 for layer in layers]
    elif family.window == "late":
        first = int(_value(arch, "max_window_layers") or 28) if _value(arch, "use_sliding_window") else len(layers)
        slides = [layer >= first for layer in layers]
    else:
        slides = [family.window == "all"] * len(layers)
    return tuple(int(window) if slide else None for slide in slides)


Trainable = Literal["lora", "full"]


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one training step per token of a full row; the parts do not overlap."""

    forward: float
    """Forward pass through the frozen (or trained) matrices of the layers."""
    activation_gradient: float
    """Gradient with respect to the inputs of the same matrices."""
    weight_gradient: float
    """Gradient with respect to the matrices; 0 with LoRA, but where adapters decide how they are rounded."""
    recomputation: float
    """Layers recomputed by the backward pass, attention and adapters included; 0 without."""
    attention: float
    """Scores and weighted values, forward and backward, of decoders the causal half only."""
    head: float
    """Logits, forward and backward."""
    lora: float
    """Adapters, forward and backward; 0 without."""

    @property
    def total(self) -> float:
        """FLOPs that the step executes."""
        return sum(asdict(self).values())

    @property
    def model(self) -> float:
        """FLOPs that model FLOPs utilisation counts: all but the recomputation."""
        return self.total - self.recomputation


def utilisation(flops: float, *, seconds: float, peak_tflops: float, num_devices: int) -> float:
    """Return the share of the devices' peak, 0 to 1: FLOPs / (seconds x peak FLOP/s of all devices).

    With the FLOPs that the model needs, and tokens that are not padding, it is the model FLOPs utilisation (MFU); with
    all that is executed, recomputation and padding included, the hardware's (HFU): arXiv 2204.02311, appendix B.
    """
    return flops / (seconds * peak_tflops * 1e12 * num_devices)


def trainable(config: Config) -> Trainable:
    """Return what is trained: adapters or the whole model."""
    return "lora" if config.lora.r else "full"


def recomputes(config: Config) -> bool:
    """Return whether the backward pass recomputes layers, on either runtime: unless everything is saved."""
    return config.model.remat != "none" and config.model.stack == "scanned"


def saved_names(config: Config) -> tuple[str, ...]:
    """Return what is saved of layers that are recomputed: `attention`, and projections by name."""
    return (*SAVED.get(config.model.remat, ()), *config.model.saved)


def decoder_flops(config: Config, arch: Any, *, seq_len: int, causal: bool = True, forwards: int = 1) -> FlopsPerToken:
    """Return the FLOPs per token of the configured training of a decoder.

    Args:
        causal: whether attention is to the tokens before alone.
        forwards: forward passes over rows of as many tokens, only one of which has a backward pass.

    Raises:
        ConfigError: a model that is not counted here.
    """
    again = recomputes(config) and (config.hw.runtime != "xla" or read_decoder(arch).has_equal_layers(config.lora))
    return flops_of_token(
        arch,
        seq_len=seq_len,
        lora=config.lora,
        recomputed=Recomputed(saved_names(config), kernel=config.model.attention == "flash") if again else None,
        causal=causal,
        rounded=config.model.linear == "lr_qat",
        forwards=forwards,
    )


def scored_flops(config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs per token of a decoder whose head is a single row, forward and for both gradients."""
    return replace(decoder_flops(config, arch, seq_len=seq_len), head=6.0 * int(_value(arch, "hidden_size")))


def encoder_flops(arch: Any, *, seq_len: int, places: int, config: Config, has_global: bool = False) -> FlopsPerToken:
    """Return FLOPs per token of masked language modelling with full training.

    Attention is over the whole row, or the window on both sides: no causal half. The head is of the places for masked
    tokens alone. DeBERTa's embeddings of distances are projected once a micro-batch, which is not counted. Of
    Longformer's attention the band is counted, though all pairs of tokens are computed (families/longformer.py), for
    global tokens once more; of a classifier the global projections are counted, of every token.

    Args:
        places: places of a row for masked tokens, which the head computes whether they are filled or not.
        has_global: whether Longformer has global tokens.

    Raises:
        ConfigError: a model type that is not in `ENCODERS`, or adapters.
    """
    kind = _value(arch, "model_type")
    family = ENCODERS.get(str(kind))
    if family is None or config.lora.r:
        what = f"model.arch.model_type={kind}" if family is None else f"lora.r={config.lora.r} with an encoder"
        raise ConfigError(f"{what}; its FLOPs are not counted; counted are {', '.join(ENCODERS)} with lora=none.")
    hidden, layers = int(_value(arch, "hidden_size")), int(_value(arch, "num_hidden_layers"))
    heads = int(_value(arch, "num_attention_heads"))
    shared = int(_value(arch, "num_key_value_heads") or heads) / heads
    matrices: float = (3 if family.gated else 2) * hidden * int(_value(arch, "intermediate_size"))
    matrices += (2 + 2 * shared) * hidden * hidden
    matrices += 3 * hidden * hidden if family.has_global and has_global else 0
    attention = 4.0 * hidden * sum(keys_of_encoder(arch, seq_len=seq_len))
    if family.relative:
        span = int(_value(arch, "position_buckets") or _value(arch, "max_position_embeddings"))
        attention += layers * len(_value(arch, "pos_att_type") or ()) * 2.0 * hidden * 2 * span
    columns = int(_value(arch, "vocab_size")) + (hidden if family.head_dense else 0)
    head = 2.0 * hidden * (places / seq_len * columns + places)  # and the product that gathers the places
    forward = 2.0 * layers * matrices
    return FlopsPerToken(
        forward=forward,
        activation_gradient=forward,
        weight_gradient=forward,
        recomputation=forward + attention if recomputes(config) else 0.0,
        attention=3 * attention,
        head=3 * head - 2.0 * hidden * places,  # no gradient of the places
        lora=0.0,
    )


def classifier_flops(arch: Any, *, seq_len: int, labels: int, config: Config) -> FlopsPerToken:
    """Return FLOPs per token of a classifier with full training: those of its encoder, and of its head.

    The head is a square matrix and that of the labels. It is computed at every place where a text could be in a row,
    or at every token where a class takes the mean of the tokens' logits (EuroBERT), and the states are gathered by a
    product.

    Raises:
        ConfigError: as of `encoder_flops`.
    """
    encoder = encoder_flops(arch, seq_len=seq_len, places=0, config=config, has_global=True)
    hidden, is_late = int(_value(arch, "hidden_size")), _value(arch, "classifier_pooling") == "late"
    places, columns = num_texts(seq_len), hidden + max(2, labels)
    matrices = 2.0 * hidden * columns * (1.0 if is_late else places / seq_len)
    gathering = 2.0 * places * (max(2, labels) if is_late else hidden)
    return replace(encoder, head=3 * matrices + 2 * gathering)  # no gradient of the places


def keys_of_encoder(arch: Any, *, seq_len: int) -> list[float]:
    """Return the mean keys of a query, for every layer."""
    layers, window = int(_value(arch, "num_hidden_layers")), _value(arch, "local_attention")
    bands = _value(arch, "attention_window")
    if bands is not None:
        each = [bands] * layers if isinstance(bands, int) else bands
        return [mean_keys(seq_len, window=int(band) // 2, causal=False) for band in each]
    if window is None:
        return [float(seq_len)] * layers
    every = int(_value(arch, "global_attn_every_n_layers") or 3)
    kinds = _value(arch, "layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    local = 2 * mean_keys(seq_len, window=int(window) // 2 + 1) - 1
    return [local if kind == "sliding_attention" else float(seq_len) for kind in kinds]


def replaced_token_flops(arch: Any, *, seq_len: int, masked: float) -> FlopsPerToken:
    """Return FLOPs per token of DeBERTa-v3's generator and discriminator (models/replaced_token.py), all trained.

    Every token attends to all of its row, and to the embeddings of `2 * position_buckets` distances, as a query and as
    a key. The generator's last layer counts twice (its enhanced mask decoder). Not counted is the projection of those
    embeddings, once in a layer of a micro-batch: that of as many tokens.

    Args:
        masked: share of the tokens whose logits are computed; training reserves some more slots for them.
    """
    hidden, inner = int(_value(arch, "hidden_size")), int(_value(arch, "intermediate_size"))
    num_layers = int(_value(arch, "num_hidden_layers"))
    is_repeated = not _value(arch, "position_biased_input")
    runs = num_layers + int(_value(arch, "generator_layers") or max(1, num_layers // 2)) + is_repeated
    buckets = int(_value(arch, "position_buckets") or -1)
    distances = 2 * (buckets if buckets > 0 else int(_value(arch, "max_position_embeddings")))
    kinds = _value(arch, "pos_att_type") or ()
    # The generator's head begins with a matrix of the layers' width, and so does the discriminator's.
    forward = runs * 2.0 * (4 * hidden**2 + 2 * hidden * inner) + 2 * 2.0 * hidden**2
    attention = runs * 2.0 * hidden * (2 * seq_len + len(kinds) * distances)
    return FlopsPerToken(
        forward=forward,
        activation_gradient=forward,
        weight_gradient=forward,
        recomputation=0.0,
        attention=3 * attention,
        head=3 * 2.0 * (masked * int(_value(arch, "vocab_size")) * hidden + hidden),
        lora=0.0,
    )


def flops_by_length(
    flops_of: Callable[[int], FlopsPerToken], *, seq_lens: Iterable[int], is_recomputed: bool
) -> dict[int, FlopsPerToken]:
    """Return FLOPs per token for each row length; empty for a model that is not supported.

    Args:
        flops_of: FLOPs per token of a row length; raises ConfigError for a model that is not supported.
        is_recomputed: whether layers were folded, or are recomputed in plain torch; others recompute nothing.
    """
    try:
        counted = {seq_len: flops_of(seq_len) for seq_len in seq_lens}
    except ConfigError:
        return {}
    return counted if is_recomputed else {length: replace(each, recomputation=0.0) for length, each in counted.items()}


def mean_keys(seq_len: int, *, window: int | None, causal: bool = True) -> float:
    """Return the mean number of keys per query over a row that is one document; packed rows need fewer.

    Args:
        causal: otherwise keys are on both sides of the query, as far as `window` on each.
    """
    if not causal:
        return 2 * mean_keys(seq_len, window=window + 1) - 1 if window else float(seq_len)
    reach = min(window or seq_len, seq_len)
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


@dataclass(frozen=True)
class Recomputed:
    """Layers that the backward pass recomputes from their inputs."""

    saved: Collection[str] = ()
    """Exceptions that are saved: `attention`, or projections by name."""
    kernel: bool = True
    """Attention is a kernel, which saves what its own backward pass needs where attention is saved."""


def flops_of_token(
    arch: Any,
    *,
    seq_len: int,
    lora: LoraConfig,
    recomputed: Recomputed | None = None,
    causal: bool = True,
    rounded: bool = False,
    forwards: int = 1,
) -> FlopsPerToken:
    """Return FLOPs per token of forward, backward and recomputation; the optimizer's are not counted.

    Under LoRA nothing needs the gradient of the first layer's input; a scanned stack computes it, so it is counted. Not
    counted are the norms of DoRA, which a micro-batch needs once: they are as many FLOPs as the frozen weights' product
    with `lora.r` tokens. With dropout, DoRA multiplies adapted weights twice: with the input, and with what is left.

    Args:
        causal: a token attends to those before it alone.
        rounded: adapters decide how weights are rounded (`model.linear=lr_qat`): nothing is multiplied by them, and the
            gradient of every adapted weight is computed. Not counted are B A and its gradients, which a micro-batch
            needs four times: each is as many FLOPs as the weights' product with `lora.r` tokens.
        forwards: forward passes, only one of which has a backward pass.

    Raises:
        ConfigError: a model that `read_decoder` does not support.
    """
    decoder = read_decoder(arch)
    layers, head = 2.0 * sum(decoder.multiplied.values()), 2.0 * decoder.embedding
    attention = decoder.attention(seq_len, causal=causal)
    adapters = 0.0 if rounded or not lora.r else 2.0 * decoder.multiplied_adapters(lora)
    # Of an embedding's A a token reads one column; the head that shares the adapter multiplies by both.
    adapters += (
        2.0 * decoder.embedding_rank(lora) * (decoder.hidden if decoder.shares_adapter(lora) else -decoder.vocab_size)
    )
    adapted = 2.0 * sum(wide * high for wide, high in decoder.adapted(lora))
    whole = decoder.saved_by_name(lora)
    saved = 2.0 * sum(math.prod(shape) for name, shape in whole.items() if len(shape) > 1 and is_in_layer(name))
    twice, again = lora.dora and lora.dropout > 0, 0.0
    if recomputed is not None:
        rule = decoder.rule(seq_len)
        again = rule + _recomputed(decoder, recomputed, attention=attention - rule, lora=lora, rounded=rounded)
    return FlopsPerToken(
        forward=forwards * layers,
        activation_gradient=layers,
        weight_gradient=(adapted if rounded else 0.0) + saved if lora.r else layers,
        recomputation=again,
        attention=forwards * attention + decoder.attention_backward(seq_len, causal=causal),
        head=head * (forwards + (2 if decoder.trains_head(lora) else 1)),
        # The second product of a weight has no gradient of it.
        lora=(2 + forwards) * adapters + ((1 + forwards) * adapted if twice else 0.0),
    )


def _recomputed(decoder: Decoder, how: Recomputed, *, attention: float, lora: LoraConfig, rounded: bool) -> float:
    """Return the FLOPs of the layers that the backward pass recomputes, without `rule`.

    An adapter's first product is never recomputed, its second where the projection is.
    """
    is_last_read = decoder.reads_last(lora)
    again = {
        name: elements
        for name, elements in decoder.multiplied.items()
        if not decoder.saves(name, how.saved) and (name != decoder.last_projection or is_last_read)
    }
    twice = lora.dora and lora.dropout > 0
    linears = decoder.adapted_by_name(lora).items()
    leaves = {name.rpartition(".")[2] for name in again}
    repeated = [(name, shape) for name, shape in linears if name.rpartition(".")[2] in leaves]
    ranks = {name: 0 if rounded else lora_of(lora, name).r for name, _ in repeated}
    adapters = sum((ranks[name] + (wide if twice else 0)) * high for name, (wide, high) in repeated)
    experts = ((n, each) for n, each in decoder.adapted_experts(lora).items() if n.rpartition(".")[2] in leaves)
    adapters += sum(lora_of(lora, name).r * each.chosen * each.high for name, each in experts)
    share = 1.0 if "attention" not in how.saved else 0.0 if how.kernel else 0.5  # plain operations need the scores
    return 2.0 * (sum(again.values()) + adapters) + share * attention
