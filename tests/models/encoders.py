"""Small encoders of transformers, and rows of two documents for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.huggingface import CLASSIFIER, HuggingFaceModel

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Encoder:
    """A model type with an attention that it has, and the values that make it the model of its paper."""

    model_type: str
    attention: str = "sdpa"
    values: dict[str, Any] = field(default_factory=dict)


ENCODERS = (
    Encoder("modernbert", values={"local_attention": 8, "bos_token_id": 1, "eos_token_id": 2}),
    Encoder("eurobert", values={"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}),
    Encoder(
        "deberta-v2",
        attention="eager",
        values={
            "relative_attention": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
            "legacy": False,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    Encoder("roberta", values={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}),
    Encoder(
        "longformer",
        attention="eager",
        values={
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": 1,
            "attention_window": 8,
        },
    ),
)


def source_of(
    encoder: Encoder, *, attention: str | None = None, labels: Sequence[str] = (), **values: Any
) -> HuggingFaceModel:
    """A source of random weights in float32 with the head of masked language modelling, or that of these labels."""
    arch = {"model_type": encoder.model_type, **SMALL, **encoder.values, **values}
    model = ModelConfig(
        name="x", path="", init="random", dtype="float32", attention=attention or encoder.attention, arch=arch
    )
    head = CLASSIFIER if labels else "masked_lm"
    return HuggingFaceModel(model, seed=0, head=head, causal=False, labels=labels)


def packed_rows(*, rows: int = 2, lengths: tuple[int, int] = (21, 16), total: int = 40) -> dict[str, Tensor]:
    """Rows (rows, total) of two documents with padding behind, all tokens to be learnt."""
    generator = torch.Generator().manual_seed(1)
    segments, positions = torch.zeros(2, rows, total, dtype=torch.int32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        segments[:, start : start + length] = number
        positions[:, start : start + length] = torch.arange(length)
        start += length
    ids = torch.randint(8, 512, (rows, total), generator=generator, dtype=torch.int32) * (segments > 0)
    return {"ids": ids, "learn": (segments > 0).int(), "positions": positions, "segments": segments}
