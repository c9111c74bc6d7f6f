"""xLSTM (arXiv 2503.13427) for packed rows on torch_xla: transformers' xLSTM with a forward pass of its own.

Names, shapes, random weights and config of the parameters are those of transformers' `xLSTMForCausalLM` (5.23), which
loads what is exported here and whose checkpoints are loaded. Its own forward pass carries the state from one document
of a row to the next, and its kernel for training unrolls chunks of 64 tokens, which compile for minutes. The cell is in
models/families/mlstm.py. Legend: B rows, T tokens, H hidden, N heads, E width of values of a head, V vocabulary."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import xLSTMConfig
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.xlstm.modeling_xlstm import xLSTMPreTrainedModel

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.families.mlstm import Cell, State, one_token, over_rows, with_last_state


def require_settings(model: ModelConfig, config: Any) -> None:
    """Refuse settings of attention, and forms of the weights that are not built.

    Raises:
        ConfigError: the config or the settings have one of them.
    """
    name = f"model={model.name}"
    if model.attention != "sdpa":
        raise ConfigError(
            f"model.attention={model.attention}; {name} is an xLSTM, which has no attention; leave it at sdpa, "
            "where it has no effect."
        )
    if model.remat in ("save_attention", "save_dots") or model.saved:
        key = f"model.saved={model.saved}" if model.saved else f"model.remat={model.remat}"
        raise ConfigError(
            f"{key}; {name} is an xLSTM, whose layers have none of the values that it saves; use "
            "model.remat=layer_inputs, offload or none, and model.saved=[]."
        )
    if config.weight_mode != "single":
        raise ConfigError(
            f"model.arch.weight_mode={config.weight_mode}; {name} is built with a matrix for each projection; use "
            "weight_mode=single."
        )
    if config.tie_word_embeddings:
        raise ConfigError(
            f"model.arch.tie_word_embeddings=true; transformers' xLSTM has a head of its own beside the embedding "
            f"({name}); set it to false."
        )


class Memory:
    """State of one layer between calls: None before the first one, which reads whole prompts."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state


class StateCache:
    """States of all layers, in the place of a cache of keys and values.

    Args:
        layers: their states (`State`); None makes empty ones for as many layers.
    """

    def __init__(self, num_layers: int, layers: Sequence[tuple[Tensor, ...]] | None = None) -> None:
        states = [None] * num_layers if layers is None else [State(*kept) for kept in layers]
        self.memories = [Memory(state) for state in states]

    def kept(self) -> list[State]:
        """Return the states that there are, in the order of layers."""
        return [memory.state for memory in self.memories if memory.state is not None]


class RMSNorm(nn.Module):
    """RMSNorm in float32, rounded before it is scaled."""

    def __init__(self, width: int, *, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        return self.scaled(self.normalised(hidden_BTH.float()).to(hidden_BTH.dtype))

    def normalised(self, hidden: Tensor) -> Tensor:
        """Divide by the root of the mean square over the last dimension."""
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)

    def scaled(self, hidden: Tensor) -> Tensor:
        """Apply weight and bias."""
        hidden = hidden * self.weight
        return hidden if self.bias is None else hidden + self.bias


class HeadNorm(RMSNorm):
    """Layer norm of each head's part, (B, T, N, E) to (B, T, N * E)."""

    def forward(self, heads_BTNE: Tensor) -> Tensor:
        values = heads_BTNE.float()
        centred = values - values.mean(-1, keepdim=True)
        return self.scaled(self.normalised(centred).to(heads_BTNE.dtype).flatten(2))


class MLSTMLayer(nn.Module):
    """Projections, gates and the cell of one layer."""

    def __init__(self, config: xLSTMConfig) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_heads, config.use_bias
        queries, values = int(hidden * config.qk_dim_factor), int(hidden * config.v_dim_factor)
        self.num_heads, self.cap, self.eps = heads, config.gate_soft_cap, config.eps
        self.q = nn.Linear(hidden, queries, bias=bias)
        self.k = nn.Linear(hidden, queries, bias=bias)
        self.v = nn.Linear(hidden, values, bias=bias)
        self.ogate_preact = nn.Linear(hidden, values, bias=bias)
        self.igate_preact = nn.Linear(hidden, heads)
        self.fgate_preact = nn.Linear(hidden, heads)
        self.multihead_norm = HeadNorm(values, eps=config.norm_eps, bias=bias)
        self.out_proj = nn.Linear(values, hidden, bias=bias)

    def forward(self, hidden_BTH: Tensor, segments_BT: Tensor, memory: Memory | None = None) -> Tensor:
        """Return (B, T, H).

        Args:
            segments_BT: numbers of documents; not read for the next token of a `memory` that has a state.
            memory: receives the state after the last token.
        """
        cell = Cell(
            query_BNTD=self._by_head(self.q(hidden_BTH)),
            key_BNTD=self._by_head(self.k(hidden_BTH)),
            value_BNTE=self._by_head(self.v(hidden_BTH)),
            input_BNT=self._gate(self.igate_preact, hidden_BTH),
            forget_BNT=self._gate(self.fgate_preact, hidden_BTH),
        )
        if memory is None:
            made_BNTE = over_rows(cell, segments_BT, eps=self.eps)
        elif memory.state is None:
            made_BNTE, memory.state = with_last_state(cell, segments_BT, eps=self.eps)
        else:
            made_BNTE, memory.state = one_token(cell, memory.state, eps=self.eps)
        normed = self.multihead_norm(made_BNTE.transpose(1, 2))
        return cast(Tensor, self.out_proj(torch.sigmoid(self.ogate_preact(hidden_BTH)) * normed))

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _gate(self, part: nn.Module, hidden_BTH: Tensor) -> Tensor:
        """Return a gate before its activation, soft-capped as in transformers, (B, N, T) float32."""
        gate = part(hidden_BTH)
        return cast(Tensor, (self.cap * torch.tanh(gate / self.cap)).float().transpose(1, 2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: xLSTMConfig) -> None:
        super().__init__()
        hidden, bias, multiple = config.hidden_size, config.use_bias, config.ffn_round_up_to_multiple_of
        inner = int((hidden * config.ffn_proj_factor + multiple - 1) // multiple * multiple)
        self.proj_up_gate = nn.Linear(hidden, inner, bias=bias)
        self.proj_up = nn.Linear(hidden, inner, bias=bias)
        self.proj_down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        return cast(Tensor, self.proj_down(F.silu(self.proj_up_gate(hidden_BTH)) * self.proj_up(hidden_BTH)))


class Block(nn.Module):
    """One layer: the cell and the MLP, each behind its norm and beside the residual stream."""

    def __init__(self, config: xLSTMConfig) -> None:
        super().__init__()
        self.norm_mlstm = RMSNorm(config.hidden_size, eps=config.norm_eps, bias=config.use_bias)
        self.mlstm_layer = MLSTMLayer(config)
        self.norm_ffn = RMSNorm(config.hidden_size, eps=config.norm_eps, bias=config.use_bias)
        self.ffn = FeedForward(config)

    def forward(self, hidden_BTH: Tensor, segments_BT: Tensor, memory: Memory | None = None) -> Tensor:
        hidden_BTH = hidden_BTH + self.mlstm_layer(self.norm_mlstm(hidden_BTH), segments_BT, memory)
        return hidden_BTH + cast(Tensor, self.ffn(self.norm_ffn(hidden_BTH)))


class Backbone(xLSTMPreTrainedModel):
    """Embedding, layers and last norm."""

    def __init__(self, config: xLSTMConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.out_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the last hidden states (B, T, H).

        Args:
            attention_mask: segments (B, T), the numbers of documents; None: every row is one document.
            past_key_values: empty states, filled by this call; or those of the tokens before, which it replaces.
        """
        segments_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden_BTH = self.embeddings(input_ids)
        for index, block in enumerate(self.blocks):
            more = () if past_key_values is None else (past_key_values.memories[index],)
            hidden_BTH = block(hidden_BTH, segments_BT, *more)
        return BaseModelOutput(last_hidden_state=self.out_norm(hidden_BTH))


class xLSTMForCausalLM(xLSTMPreTrainedModel):  # noqa: N801  # transformers' name, which exports carry
    """Decoder with its head; a module of transformers' names and shapes."""

    reads_segments = True
    """Whether `attention_mask` is the numbers of documents (B, T), in the place of masks."""

    def __init__(self, config: xLSTMConfig) -> None:
        super().__init__(config)
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def empty_cache(self) -> StateCache:
        """Return a cache for `past_key_values` of whole prompts."""
        return StateCache(self.config.num_hidden_layers)

    def filled_cache(self, layers: Sequence[tuple[Tensor, ...]]) -> StateCache:
        """Return a cache for `past_key_values` of the next token, given the states that layers keep."""
        return StateCache(self.config.num_hidden_layers, layers)

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **inputs: Any) -> CausalLMOutput:
        """Return logits (B, T, V), soft-capped, float32.

        Args:
            logits_to_keep: number of last tokens whose logits are computed; 0 is all.
        """
        hidden_BTH = self.backbone(input_ids=input_ids, **inputs).last_hidden_state
        logits = self.lm_head(hidden_BTH[:, -logits_to_keep:]).float()
        cap = self.config.output_logit_soft_cap
        return CausalLMOutput(logits=cap * torch.tanh(logits / cap))
