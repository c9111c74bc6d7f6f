"""Classifiers of texts: the logits of every text of a row, by the pooling and the head of transformers' own class.

The encoder runs over the packed rows. Its hidden states are pooled text by text with a one-hot matrix, and the class's
own forward pass does the rest, given each pooled state as the only token of a text. Legend: R rows, T tokens, K places
of a row for texts, H hidden, C labels."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.masking import LABEL, num_texts
from tpu_experiments.models.parts.dropout import NOISE, noise
from tpu_experiments.models.parts.rope import with_rope_in_kernel
from tpu_experiments.models.passes.forward import (
    hidden_of,
    in_module_dtype,
    mask_in_layers_alone,
    model_inputs,
    with_base,
)

POOLINGS = {"cls": "first", "bos": "first", "mean": "mean", "late": "late"}
"""Values of a config's `classifier_pooling`; a class without it reads the first token."""


class Texts(NamedTuple):
    """The texts of some rows."""

    rows: dict[str, Tensor]
    """The rows without the labels' places: there is padding."""
    belongs_RKT: Tensor
    """Whether a token belongs to the text at a place, boolean."""
    labels_RK: Tensor
    """Label of the text at a place, int32; 0 at empty places."""
    weights_RK: Tensor
    """1 where a place has a text, float32."""
    at_RKT: Tensor
    """Whether a place of the row is that of the label of the text at a place, boolean."""


def texts_of(rows: Mapping[str, Tensor]) -> Texts:
    """Take the labels out of rows: each has the last place of its text, which is learnt.

    A row may hold more than such places to be learnt (the check of the first gradients does).
    """
    ids_RT, segments_RT = rows["ids"], rows["segments"]
    is_last_RT = segments_RT != torch.roll(segments_RT, -1, dims=1)
    index_T = torch.arange(ids_RT.shape[1], dtype=torch.int32, device=ids_RT.device)
    is_last_RT = is_last_RT | (index_T == ids_RT.shape[1] - 1)
    is_label_RT = is_last_RT & (segments_RT > 0) & (rows["learn"] > 0)
    place_K = torch.arange(1, num_texts(ids_RT.shape[1]) + 1, dtype=torch.int32, device=ids_RT.device)
    rank_RT = is_label_RT.cumsum(1, dtype=torch.int32)
    at_RKT = is_label_RT[:, None] & (rank_RT[:, None] == place_K[:, None])
    own_RK = torch.where(at_RKT, segments_RT[:, None], 0).sum(-1, dtype=torch.int32)
    kept_RT = torch.where(is_label_RT, 0, segments_RT).to(segments_RT.dtype)
    belongs_RKT = (kept_RT[:, None] == own_RK[..., None]) & (own_RK > 0)[..., None]
    return Texts(
        {**rows, "ids": torch.where(is_label_RT, 0, ids_RT).to(ids_RT.dtype), "segments": kept_RT},
        belongs_RKT,
        torch.where(at_RKT, rows[LABEL][:, None], 0).sum(-1, dtype=torch.int32),
        at_RKT.any(-1).to(torch.float32),
        at_RKT,
    )


def class_logits(module: nn.Module, parameters: Mapping[str, Tensor], texts: Texts) -> Tensor:
    """Return the logits (R, K, C) of the texts, float32; those of empty places mean nothing.

    Args:
        parameters: float32 trainable parameters by name.
    """
    inputs = model_inputs(module, texts.rows, causal=False) | {"belongs_RKT": texts.belongs_RKT}
    first_RKT = texts.belongs_RKT & (texts.rows["positions"] == 0)[:, None]
    with noise(texts.rows.get(NOISE)), in_module_dtype(module, parameters) as cast, mask_in_layers_alone(module):
        own = {f"module.{name}": tensor for name, tensor in cast.items()}
        logits: Tensor = with_rope_in_kernel(
            module, lambda: functional_call(_Classifying(module), own, kwargs=inputs | {"first_RKT": first_RKT})
        )
    return logits.float()


def pooling_of(module: nn.Module) -> str:
    """Return how the class pools: `first` token, `mean`, or `late`, the mean of all tokens' logits.

    Raises:
        ConfigError: in another way.
    """
    config: Any = module.config
    named = getattr(config, "classifier_pooling", None) or "cls"
    if named not in POOLINGS:
        raise ConfigError(
            f"model.arch.classifier_pooling={named}; it is not computed for several texts in a row; use one of "
            f"{', '.join(POOLINGS)}."
        )
    return POOLINGS[named]


def last_scores(module: nn.Module, parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor], *, num: int) -> Tensor:
    """Return the only logit of segments 1, 2, ... of every row, each at its last token (R, S), float32, by a decoder.

    As transformers' classes have it, the last token is the last one that is not `pad_token_id`, since a text may end
    with that (an end-of-sequence token that pads). Segments that are not there have 0.

    Args:
        num: S, the places of a row for segments.
    """
    hidden_RTH, head_1H = hidden_of(module, parameters, rows, head=logit_layer(module))
    # In float32 and no matrix product: a score rounded to bf16 has 8 bits, and so have a TPU's factors.
    scores_RT = (hidden_RTH.float() * head_1H[0].float()).sum(-1)
    segments_RT, padding = rows["segments"], getattr(module.config, "pad_token_id", None)
    is_text_RT = segments_RT > 0 if padding is None else (segments_RT > 0) & (rows["ids"] != padding)
    number_S1 = torch.arange(1, num + 1, dtype=torch.int32, device=segments_RT.device)[:, None]
    index_T = torch.arange(segments_RT.shape[1], dtype=torch.int32, device=segments_RT.device)
    own_RST = (segments_RT[:, None] == number_S1) & is_text_RT[:, None]
    last_RS1 = torch.where(own_RST, index_T, -1).amax(-1, keepdim=True)
    return torch.where(index_T == last_RS1, scores_RT[:, None], 0.0).sum(-1)


def logit_layer(module: Any) -> str:
    """Return the name of a classifier's last linear layer, whose output are the logits.

    Raises:
        ConfigError: there is none.
    """
    count, inner = module.config.num_labels, f"{module.base_model_prefix}."
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part.out_features == count and not name.startswith(inner)
    ]
    if not found:
        raise ConfigError(
            f"model.arch.model_type={module.config.model_type}; transformers' classifier of it has no linear layer for "
            f"its {count} labels; take another model."
        )
    return found[-1]


class _Classifying(nn.Module):
    """A classifier of sequences, for the texts of packed rows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, belongs_RKT: Tensor, first_RKT: Tensor, **inputs: Any) -> Tensor:
        whole: Any = self.module
        hidden_RTH = getattr(whole, whole.base_model_prefix)(**inputs).last_hidden_state
        pooling = pooling_of(whole)
        if pooling == "first":
            return _head(whole, first_RKT.to(hidden_RTH.dtype) @ hidden_RTH)
        if pooling == "mean":
            return _head(whole, _means(hidden_RTH, belongs_RKT))
        return _means(_head(whole, hidden_RTH), belongs_RKT)


def _means(values_RTN: Tensor, belongs_RKT: Tensor) -> Tensor:
    """Return the mean over each text's tokens (R, K, N); of an empty place 0."""
    sums_RKN = belongs_RKT.to(values_RTN.dtype) @ values_RTN
    return sums_RKN / belongs_RKT.sum(-1, keepdim=True).clamp(min=1).to(values_RTN.dtype)


def _head(whole: Any, hidden_RNH: Tensor) -> Tensor:
    """Return the logits (R, N, C) that the class gives for texts of one token with these hidden states."""
    rows, count, width = hidden_RNH.shape
    states_M1H = hidden_RNH.reshape(rows * count, 1, width)
    probe = copy.copy(whole)
    base = getattr(whole, whole.base_model_prefix)
    probe._modules = {**whole._modules, whole.base_model_prefix: with_base(states_M1H, base)}
    ids_M1 = torch.zeros(rows * count, 1, dtype=torch.long, device=hidden_RNH.device)
    logits_MC: Tensor = probe(input_ids=ids_M1).logits
    return logits_MC.view(rows, count, -1)
