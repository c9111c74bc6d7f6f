"""DeBERTa-v3's pre-training model (arXiv 2111.09543): a generator of masked tokens, a discriminator of replaced ones.

transformers 5.23 has the encoder (`DebertaV2Model`) and the generator's head, but no model of both. Generator and
discriminator have one config; the generator has half the layers (`generator_layers` of the config sets them). What they
share is the embedding of words, and of absolute positions where the encoder's input has them, by gradient-disentangled
embedding sharing: the discriminator uses E_D = stop_grad(E_G) + E_delta, with E_delta zero at the start. The embedding
modules of the discriminator hold E_delta.

Where the encoder's input has no absolute positions (`position_biased_input: false`, as in DeBERTa-v3), the generator
adds them before its last layer, which then runs twice, as the enhanced mask decoder of microsoft/DeBERTa does. Its
queries are first the hidden states of the layer before plus the embedding of the position, then its own output; its
keys and values are those hidden states.

Legend: R rows, T tokens, H hidden, V vocabulary."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2Model, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2PreTrainedModel

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import REPLACED_TOKEN_MODEL
from tpu_experiments.models.huggingface import OWN_HEAD, HuggingFaceModel, ModelPart
from tpu_experiments.models.parts.attention import bidirectional_mask
from tpu_experiments.models.parts.dropout import NOISE, noise, other_noise
from tpu_experiments.models.parts.float32_gradients import cast_weights

WORDS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
GENERATOR, DISCRIMINATOR, HEAD = "generator.", "discriminator.", "replaced."
"""Prefixes of the names of parameters; the head is the discriminator's."""
SHARED = "generator.deberta."
"""Prefix of the generator's embeddings, which the discriminator's own are added to."""


class ReplacedTokenConfig(DebertaV2Config):
    """Config of generator and discriminator together; a type of its own, so that no auto class loads half of it."""

    model_type = "deberta-v2-replaced-token"


class ReplacedTokenModel(HuggingFaceModel):
    """Source of a generator and discriminator with random weights; the `model._target_` of `objective=rtd`."""

    def require_head(self, config: PretrainedConfig) -> None:
        """Require a DeBERTa of random weights, and the objective that trains both models.

        Raises:
            ConfigError: it is another model, a checkpoint, or another objective.
        """
        if self.head != OWN_HEAD:
            raise ConfigError(
                f"model._target_={REPLACED_TOKEN_MODEL}; its generator and discriminator are trained by objective=rtd "
                "alone, and write no text; for a run's discriminator, load its folder discriminator/ with AutoModel."
            )
        if not isinstance(config, DebertaV2Config):
            raise ConfigError(
                f"model={self.model.name}; objective=rtd trains DeBERTa's encoder, and this is a "
                f"{config.model_type!r}; take model=deberta_v3_base or one like it."
            )
        if not self.random:
            raise ConfigError(
                f"model.init={self.model.init}; objective=rtd trains from random weights: checkpoints of DeBERTa-v3 "
                "have no generator; set model.init=random."
            )

    def built(
        self, config: PretrainedConfig, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
    ) -> PreTrainedModel:
        """Build generator and discriminator with random weights; no code of a checkpoint is run."""
        return cast(PreTrainedModel, ReplacedTokenDetection._from_config(config, dtype=dtype))

    @property
    def export_config(self) -> PretrainedConfig:
        """The config of generator and discriminator together."""
        return ReplacedTokenConfig.from_dict(self.config.to_dict() | {"model_type": ReplacedTokenConfig.model_type})

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[ModelPart]:
        """Yield the discriminator, as `AutoModel` loads it."""
        own = discriminator_tensors(tensors)
        yield ModelPart("discriminator", self.config, DebertaV2Model.__name__, own)


class Generator(DebertaV2ForMaskedLM):
    """DeBERTa's masked language model with the enhanced mask decoder."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__(config)
        if not config.position_biased_input:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the states (R, T, H) whose product with the embedding, plus the head's bias, are the logits."""
        encoder = self.deberta.encoder
        embedded_RTH = self.deberta.embeddings(input_ids=input_ids, position_ids=position_ids)
        if self.config.position_biased_input:
            hidden_RTH = _encoded(self.deberta, embedded_RTH, attention_mask)
        else:
            hidden_RTH = embedded_RTH
            given = {
                "attention_mask": attention_mask,
                "relative_pos": encoder.get_rel_pos(hidden_RTH),
                "rel_embeddings": encoder.get_rel_embedding(),
            }
            for layer in encoder.layer[:-1]:
                hidden_RTH, _ = layer(hidden_RTH, **given)
            query_RTH = hidden_RTH + self.position_embeddings(position_ids)
            for number in range(2):
                with other_noise(number):  # two masks of dropout, as two layers have
                    query_RTH, _ = encoder.layer[-1](hidden_RTH, query_states=query_RTH, **given)
            hidden_RTH = query_RTH
        head = self.lm_predictions.lm_head
        return cast(Tensor, head.LayerNorm(head.transform_act_fn(head.dense(hidden_RTH))))


class ReplacedTokenHead(nn.Module):
    """Binary classifier of every token, from its state and that of its document's first token ([CLS])."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_RTH: Tensor, first_RTH: Tensor) -> Tensor:
        """Return logits (R, T)."""
        mixed_RTH = self.LayerNorm(first_RTH + hidden_RTH)
        return cast(Tensor, self.classifier(self.activation(self.dense(mixed_RTH)))[..., 0])


class ReplacedTokenDetection(DebertaV2PreTrainedModel):
    """Generator and discriminator of one config."""

    base_model_prefix = "discriminator"

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__(config)
        self.generator = Generator(generator_config(config))
        self.discriminator = DebertaV2Model(config)
        self.replaced = ReplacedTokenHead(config)
        self.post_init()
        with torch.no_grad():
            for name in (WORDS, POSITIONS):
                delta = dict(self.discriminator.named_parameters()).get(name)
                if delta is not None:
                    delta.zero_()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """Return the discriminator's logits (R, T) of replacement; the generator reads the same tokens.

        Training calls the two one after the other, by `generator_hidden_of` and `replaced_logits_of`.
        """
        self.generator.hidden(input_ids, position_ids, attention_mask)
        embedded = embedded_words(dict(self.named_parameters()), input_ids, position_ids)
        return self.replaced_logits(embedded, position_ids, attention_mask)

    def replaced_logits(self, inputs_embeds: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (R, T) of embedded tokens (R, T, H)."""
        # The module would add its own embedding of positions, E_delta, to `inputs_embeds`, which has E_D already.
        embeddings = self.discriminator.embeddings
        embedded_RTH = embeddings.dropout(embeddings.LayerNorm(inputs_embeds))
        hidden_RTH = _encoded(self.discriminator, embedded_RTH, attention_mask)
        first_RT = torch.arange(position_ids.shape[1], device=position_ids.device) - position_ids
        first_RTH = torch.gather(hidden_RTH, 1, first_RT[..., None].long().expand(hidden_RTH.shape))
        return self.replaced(hidden_RTH, first_RTH)


def _encoded(model: DebertaV2Model, embedded_RTH: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the last hidden states (R, T, H); a model's own forward takes no mask (R, 1, T, T)."""
    encoded = model.encoder(embedded_RTH, attention_mask, output_hidden_states=False)
    return cast(Tensor, encoded.last_hidden_state)


def generator_config(config: DebertaV2Config) -> DebertaV2Config:
    """Return the generator's config: half the layers, at least one, or `generator_layers`; the head's weight is tied.

    Raises:
        ConfigError: the discriminator's config is one that the two cannot share.
    """
    wrong = {
        "embedding_size": getattr(config, "embedding_size", config.hidden_size) != config.hidden_size,
        "conv_kernel_size": getattr(config, "conv_kernel_size", 0) > 0,
        "type_vocab_size": config.type_vocab_size > 0,
    }
    if any(wrong.values()):
        name = next(name for name, is_wrong in wrong.items() if is_wrong)
        raise ConfigError(
            f"model.arch has {name}={getattr(config, name)}; generator and discriminator of objective=rtd are "
            "DeBERTa-v3's, whose embedding is as wide as its layers, without convolution and token types; leave it out."
        )
    layers = getattr(config, "generator_layers", None) or max(1, config.num_hidden_layers // 2)
    made = copy.deepcopy(config)
    made.num_hidden_layers, made.legacy = layers, False
    return made


def embedded_words(parameters: Mapping[str, Tensor], ids_RT: Tensor, positions_RT: Tensor) -> Tensor:
    """Return the discriminator's embedding (R, T, H), stop_grad(E_G) + E_delta, in the data type of the parameters.

    E_G and E_delta are added before anything is rounded, as in an export, which has their sum.
    """
    found = F.embedding(ids_RT, parameters[SHARED + WORDS].detach())
    found = found + F.embedding(ids_RT, parameters[DISCRIMINATOR + WORDS])
    if SHARED + POSITIONS in parameters:
        found = found + F.embedding(positions_RT, parameters[SHARED + POSITIONS].detach())
        found = found + F.embedding(positions_RT, parameters[DISCRIMINATOR + POSITIONS])
    return found


class _Generating(nn.Module):
    """The generator's part of a model, which holds the whole, so that functional_call finds its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Tensor:
        whole: Any = self.module
        return cast(Tensor, whole.generator.hidden(**inputs))


class _Discriminating(_Generating):
    """The discriminator's part of a model."""

    def forward(self, **inputs: Tensor) -> Tensor:
        whole: Any = self.module
        return cast(Tensor, whole.replaced_logits(**inputs))


def _called(
    part: _Generating, parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor], **inputs: Tensor
) -> Tensor:
    """Call a part with `parameters` in the module's data type; their gradients are float32."""
    dtype: Any = part.module.dtype
    given = inputs | {
        "position_ids": rows["positions"],
        "attention_mask": bidirectional_mask(rows["segments"], window=None),
    }
    with noise(rows.get(NOISE)), cast_weights(parameters, dtype=dtype) as cast_parameters:
        own = {f"module.{name}": tensor for name, tensor in cast_parameters.items()}
        return cast(Tensor, functional_call(part, own, kwargs=given))


def generator_hidden_of(
    module: nn.Module, parameters: Mapping[str, Tensor], ids_RT: Tensor, rows: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the generator's states (R, T, H), and its head's weight (V, H) and bias (V,), float32.

    Args:
        ids_RT: tokens with masks among them, in the place of those of `rows`.
    """
    hidden_RTH = _called(_Generating(module), parameters, rows, input_ids=ids_RT)
    return hidden_RTH, parameters[SHARED + WORDS], parameters[GENERATOR + "lm_predictions.lm_head.bias"]


def replaced_logits_of(
    module: nn.Module, parameters: Mapping[str, Tensor], ids_RT: Tensor, rows: Mapping[str, Tensor]
) -> Tensor:
    """Return the discriminator's logits (R, T), float32: above 0 it takes a token for replaced.

    Args:
        ids_RT: tokens with replaced ones among them, in the place of those of `rows`.
    """
    dtype: Any = module.dtype
    embedded_RTH = embedded_words(parameters, ids_RT, rows["positions"]).to(dtype)
    return _called(_Discriminating(module), parameters, rows, inputs_embeds=embedded_RTH).float()


def discriminator_tensors(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the discriminator as `DebertaV2Model`, with E_G + E_delta as its embeddings."""
    own = {n.removeprefix(DISCRIMINATOR): t for n, t in parameters.items() if n.startswith(DISCRIMINATOR)}
    for name in (WORDS, POSITIONS):
        if name in own:
            own[name] = own[name] + parameters[SHARED + name]
    return own
