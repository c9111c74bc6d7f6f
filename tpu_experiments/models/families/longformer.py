"""Longformer (arXiv 2004.05150) for packed rows on torch_xla: transformers' model with a forward pass of its own.

Names, shapes and random weights are those of transformers' classes (5.23), which load what is exported here and whose
checkpoints are loaded. Their own forward pass takes a mask of padding alone, so that documents of a row see one
another, and reads on the host in every step whether a token is global. Here scores are those of all pairs of tokens,
masked: the band saves neither time nor memory. Legend: B rows, T tokens, H hidden, N heads, D width of a head."""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LongformerConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.longformer import modeling_longformer as theirs

from tpu_experiments.models.parts.attention import bidirectional_mask


class Masks(NamedTuple):
    """Where a token may attend, true where it may, and which tokens are global."""

    near_B1TT: Tensor
    """Tokens of its document within half of the layer's window on each side, and its global tokens."""
    whole_B1TT: Tensor | None = None
    """Tokens of its document; None where no token is global."""
    global_BT1: Tensor | None = None
    """Whether a token attends to its whole document, by projections of its own; None where none does."""


class BandAttention(nn.Module):
    """Attention within a band, and of global tokens; the projections of transformers' module under their names."""

    def __init__(self, whole: theirs.LongformerSelfAttention) -> None:
        super().__init__()
        self.num_heads, self.dropout = whole.num_heads, whole.dropout
        for name, part in whole.named_children():
            self.add_module(name, part)

    def forward(self, hidden_states: Tensor, attention_mask: Masks, **_: Any) -> tuple[Tensor]:
        """Map (B, T, H) to (B, T, H), with the signature that transformers' layer calls."""
        masks, hidden_BTH = attention_mask, hidden_states
        near_BTH = self._attend(hidden_BTH, masks.near_B1TT, suffix="")
        if masks.whole_B1TT is None or masks.global_BT1 is None:
            # A step takes the gradient of every weight: that of the global projections is zero, through one token.
            for name in ("query_global", "key_global", "value_global"):
                near_BTH = near_BTH + 0.0 * self.get_submodule(name)(hidden_BTH[:, :1])
            return (near_BTH,)
        whole_BTH = self._attend(hidden_BTH, masks.whole_B1TT, suffix="_global")
        return (torch.where(masks.global_BT1, whole_BTH, near_BTH),)

    def _attend(self, hidden_BTH: Tensor, mask_B1TT: Tensor, *, suffix: str) -> Tensor:
        query, key, value = (
            self.get_submodule(name + suffix)(hidden_BTH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        scores_BNTT = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
        scores_BNTT = scores_BNTT.masked_fill(~mask_B1TT, torch.finfo(scores_BNTT.dtype).min)
        weights_BNTT = torch.softmax(scores_BNTT, dim=-1, dtype=torch.float32).to(value.dtype)
        weights_BNTT = F.dropout(weights_BNTT, self.dropout, self.training)
        return (weights_BNTT @ value).transpose(1, 2).flatten(2)


class LongformerModel(theirs.LongformerModel):
    """Embedding and layers, over rows of documents."""

    reads_segments = True
    """Whether `attention_mask` is the numbers of documents (B, T), in the place of masks."""
    has_global = False
    """Whether the first token of each document is global, as that of a classifier is."""

    def __init__(self, config: LongformerConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        for layer in self.encoder.layer:
            layer.attention.self = BandAttention(layer.attention.self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> theirs.LongformerBaseModelOutputWithPooling:
        """Return the last hidden states (B, T, H).

        Args:
            attention_mask: numbers of documents (B, T); None: every row is one document.
            position_ids: (B, T), from `padding_idx + 1` on in each document; None: those of one document.
        """
        segments_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        first = self.embeddings.padding_idx + 1
        if position_ids is None:
            index_T = torch.arange(first, first + input_ids.shape[1], device=input_ids.device)
            position_ids = index_T.expand_as(input_ids)
        hidden_BTH = self.embeddings(input_ids=input_ids, position_ids=position_ids)
        windows = cast(list[int], self.config.attention_window)
        global_BT = position_ids == first if self.has_global else None
        masks = {window: _masks(segments_BT, global_BT, reach=window // 2) for window in set(windows)}
        for layer, window in zip(self.encoder.layer, windows, strict=True):
            hidden_BTH = layer(hidden_BTH, attention_mask=masks[window])[0]
        pooled = None if self.pooler is None else self.pooler(hidden_BTH)
        return theirs.LongformerBaseModelOutputWithPooling(last_hidden_state=hidden_BTH, pooler_output=pooled)


def _masks(segments_BT: Tensor, global_BT: Tensor | None, *, reach: int) -> Masks:
    """Return the masks of layers whose tokens see `reach` others on each side."""
    near_B1TT = bidirectional_mask(segments_BT, window=reach)
    if global_BT is None:
        return Masks(near_B1TT)
    whole_B1TT = bidirectional_mask(segments_BT, window=None)
    return Masks(near_B1TT | whole_B1TT & global_BT[:, None, None, :], whole_B1TT, global_BT[..., None])


class LongformerForMaskedLM(theirs.LongformerForMaskedLM):
    """Encoder with the head of masked language modelling; no token is global, as in transformers by default."""

    reads_segments = True

    def __init__(self, config: LongformerConfig) -> None:
        theirs.LongformerPreTrainedModel.__init__(self, config)
        self.longformer = LongformerModel(config, add_pooling_layer=False)
        self.lm_head = theirs.LongformerLMHead(config)
        self.post_init()


class LongformerForSequenceClassification(theirs.LongformerForSequenceClassification):
    """Encoder with a classifier's head; the first token of each document is global."""

    reads_segments = True

    def __init__(self, config: LongformerConfig) -> None:
        theirs.LongformerPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.longformer = LongformerModel(config, add_pooling_layer=False)
        self.longformer.has_global = True
        self.classifier = theirs.LongformerClassificationHead(config)
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        """Return the logits (B, labels) of rows of one document."""
        hidden_BTH = self.longformer(input_ids, **inputs).last_hidden_state
        return SequenceClassifierOutput(logits=self.classifier(hidden_BTH))
