"""Any language model of transformers: its config, its empty module and its weights one tensor at a time.

Nothing here holds a second copy of the model: the module is built on the meta device, and `weights` yields one host
tensor at a time. Of a model that sees or hears as well (Gemma 3 from 4B on) the decoder of text alone is loaded and
trained."""

import copy
import hashlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import logging as library_log

from tpu_experiments.config.errors import ConfigError, one_line, suggest
from tpu_experiments.config.messages import path_of_model
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.regular_files import require_regular_folder
from tpu_experiments.config.remote_code import require_no_code
from tpu_experiments.models.adapters.token_rows import vocabulary_modules
from tpu_experiments.models.families.classification import logit_layer
from tpu_experiments.models.parts.attention import FLASH
from tpu_experiments.models.parts.bitnet import ONLINE, bitnet_config, is_new_norm
from tpu_experiments.models.parts.experts import STATIC
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.passes.forward import BOOLEAN_MASKS, SHAPES, TOKENS, UNFIT, rehearse
from tpu_experiments.models.sources.buffers import (
    compute_buffers,
    keep_made_tensors,
    persistent_buffers,
    put_buffer,
    require_values,
)
from tpu_experiments.models.sources.conversion import (
    AnyStored,
    ConvertedTensor,
    converted_tensors,
    read_any,
    stored_tensors,
    with_packed,
)
from tpu_experiments.models.sources.unread import require_known
from tpu_experiments.quantisation.parts import PartsLayout, layout_of, rounds_inputs
from tpu_experiments.storage.gguf.opening import opened
from tpu_experiments.storage.given_folders import require_checkpoint
from tpu_experiments.storage.paths import find_local
from tpu_experiments.storage.tensors import not_finite

log = logging.getLogger(__name__)
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
"""Texts of a full disk, whether Python's client of the Hub says it or the one in Rust."""


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the text decoder; the same object where the model is nothing else."""
    text = config.get_text_config(decoder=True)
    is_part = text.model_type != config.model_type and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_part:  # transformers ties the head of the whole as the whole says
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text if is_part else config


def prefixes(decoder: PreTrainedModel, whole: PreTrainedModel) -> tuple[str, str]:
    """Return the prefix of layer names in a decoder, and in the multimodal model that contains it.

    Raises:
        LookupError: the model contains no module of the decoder's class.
    """
    kind = type(decoder.base_model)
    outer = [name for name, part in whole.named_modules() if type(part) is kind]
    if not outer:
        raise LookupError(f"{type(whole).__name__} has no {kind.__name__}")
    inner = decoder.base_model_prefix
    return (f"{inner}.", f"{outer[0]}.") if outer[0] else ("", "")


@dataclass(frozen=True)
class Head:
    """One of transformers' families of classes: what is on top of the layers."""

    auto: Any
    """Class whose `from_config` builds the model."""
    model_types: Collection[str]
    text: str
    advice: str


HEADS = {
    "causal_lm": Head(
        AutoModelForCausalLM,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "causal language model",
        "give a decoder that generates text, or train an encoder with objective=mlm",
    ),
    "masked_lm": Head(
        AutoModelForMaskedLM,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "masked language model",
        "give an encoder (modernbert, eurobert, deberta-v2, roberta), or train a decoder with objective=next_token",
    ),
    "sequence_classification": Head(
        AutoModelForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "classifier of sequences",
        "give another model, or another objective",
    ),
}
"""Values of an objective's `head` (objectives/base.py)."""
CLASSIFIER = "sequence_classification"
"""Key of `HEADS` of classifiers."""
OWN_HEAD = "own"
"""Value of an objective's `head` whose models have a source of their own, named by `model._target_`."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COUNTS = {
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
}
"""Values of a decoder's config that count something, with their upper bounds: far above any model, and low enough that
a module is built in seconds."""
_STATE = "their layers hand a state from token to token, past the mask that keeps documents and padding out"
NOT_BUILT = {
    "bitnet": "their weights would be trained as dense ones, without the ternary values that they compute with, which "
    "model.linear=bitnet trains",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "the gradients of a row's padding are NaN in their layers, since the deviation of zeros has none",
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "zamba", "zamba2"), _STATE),
}
"""Model types of transformers that would be trained wrongly here. Types that are not listed are checked by
isolation.py."""
XLSTM, LONGFORMER = "xlstm", "longformer"
OWN_CLASSES = {
    ("causal_lm", XLSTM): "tpu_experiments.models.families.xlstm:xLSTMForCausalLM",
    ("masked_lm", LONGFORMER): "tpu_experiments.models.families.longformer:LongformerForMaskedLM",
    (CLASSIFIER, LONGFORMER): "tpu_experiments.models.families.longformer:LongformerForSequenceClassification",
}
"""Classes of the project in the place of transformers', by head and model type, with the same parameters.

They are imported when a model is of theirs."""
DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
"""Model types whose layers with a state are computed by models/families/delta_net.py, in the place of transformers'
modules."""


@dataclass(frozen=True)
class ModelPart:
    """A model that is finished by itself, out of the parameters of the trained one."""

    name: str
    """Its folder in the run folder."""
    config: PretrainedConfig
    architecture: str
    tensors: dict[str, Tensor]


class HuggingFaceModel:
    """Source of a checkpoint's or of random weights; the `model._target_` of every stock model."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        seed: int,
        head: str = "causal_lm",
        causal: bool = True,
        labels: Sequence[str] = (),
    ) -> None:
        """Read the model's config.

        Args:
            head: key of `HEADS`, or `OWN_HEAD`.
            causal: whether the model is called with causal masks.
            labels: what a classifier tells apart, in the order of its logits; empty for other models.

        Raises:
            ConfigError: the config cannot be used, or does not go with the head or with attention on both sides.
        """
        self.model, self.seed, self.head, self.causal = model, seed, head, causal
        self.reads_all = True
        """Whether the checkpoint may have no tensors that this model has not; False for its first layers alone."""
        self.random = model.init == "random" or model.size == "tiny"
        self.dtype = DTYPES[model.dtype]
        self.folder = None if self.random else self.find_folder()
        self.packing: PartsLayout | None = None
        """How the checkpoint holds quantised weights, which are decoded when they are read; None: it has none."""
        self.whole_config = self._config()
        self.config = decoder_config(self.whole_config)
        if self.config.model_type == XLSTM:
            from tpu_experiments.models.families.xlstm import require_settings

            require_settings(model, self.config)
        self.config._attn_implementation = self._attention()
        self.config._experts_implementation = STATIC
        self.labels_of_checkpoint = None if self.folder is None else own_labels(self.config)
        if labels:
            set_labels(self.config, labels)

    def _attention(self) -> str:
        """Return transformers' name of the attention.

        Raises:
            ConfigError: the kernel is asked for, and does not compute the attention of this type of model.
        """
        if self.config.model_type == XLSTM:  # it has none, and its class takes no other name
            return "eager"
        if self.model.attention == "flash" and self.config.model_type in (*BOOLEAN_MASKS, LONGFORMER):
            raise ConfigError(
                f"model.attention=flash; {self.config.model_type} has attention of its own, which no kernel computes; "
                "use model.attention=eager."
            )
        return FLASH if self.model.attention == "flash" else self.model.attention

    def find_folder(self) -> Path | None:
        """Return the checkpoint's folder; a Hub id is downloaded."""
        return _local_folder(self.model)

    def _config(self) -> PretrainedConfig:
        if self.folder is not None:
            config = _config_of(self.folder, self.model)
            self._note_packing(config)
        else:
            overlay = self.model.tiny_arch if self.model.size == "tiny" else {}
            config = config_from_arch({**self.model.arch, **overlay})
        if self.model.linear == "bitnet":
            config = bitnet_config(config, origin=self._config_origin)
        self.require_head(config)
        if config.model_type in NOT_BUILT and self.model.linear == "plain":
            raise ConfigError(
                f"model={self.model.name}; models of type {config.model_type!r} are not built here: "
                f"{NOT_BUILT[config.model_type]}; take a model with attention over ready masks and plain weights."
            )
        problems = count_problems(decoder_config(config), where=self._config_origin)
        if problems:
            raise ConfigError("\n".join(problems))
        self._resize(decoder_config(config))
        return config

    def _resize(self, config: PretrainedConfig) -> None:
        """Give the config the rows of `model.vocab_size`, and note those of the checkpoint.

        Raises:
            ConfigError: it has more, or names none.
        """
        self.stored_rows = int(getattr(config, "vocab_size", 0))
        rows = self.model.vocab_size
        if rows is None:
            return
        if rows < self.stored_rows or not self.stored_rows:
            raise ConfigError(
                f"model.vocab_size={rows}; {self._config_origin} has {self.stored_rows} rows, and rows are added, not "
                "taken away; use a larger number, or leave it out."
            )
        config.vocab_size = rows

    @cached_property
    def _resized(self) -> set[str]:
        """Names of the parameters that have more rows than the checkpoint's."""
        if self.random or self.model.vocab_size is None:
            return set()
        places = vocabulary_modules(self._on_meta_once)
        return {f"{name}.{leaf}" for name, part in places.items() for leaf, _ in part.named_parameters(recurse=False)}

    def _of_checkpoint(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a parameter has in the checkpoint."""
        return (self.stored_rows, *shape[1:]) if name in self._resized else shape

    def _with_new_rows(self, name: str, stored: Tensor) -> Tensor:
        """Return a parameter with the rows that the checkpoint lacks.

        They are the mean of its own, as transformers' `mean_resizing` has it but for noise of 1e-9 of the variance.
        """
        if name not in self._resized:
            return stored
        mean = stored.to(torch.float32).mean(0, keepdim=True).to(stored.dtype)
        return torch.cat([stored, mean.expand(self.config.vocab_size - self.stored_rows, *mean.shape[1:])])

    def _note_packing(self, config: PretrainedConfig) -> None:
        """Set `packing` and take it out of the config: what is computed, and exported, has decoded weights.

        Raises:
            ConfigError: they are of a kind that is not decoded here, or `model.base` would quantise them again.
        """
        if self.model.linear != "plain":
            return
        settings = getattr(config, "quantization_config", None)
        if isinstance(settings, Mapping) and rounds_inputs(settings):
            raise ConfigError(
                f"model.path={self.model.path}; its layers round their inputs to 8 bits; here only the run that was "
                "trained so computes them: name it with task.run=, or write its form merged and name that."
            )
        if settings is None or config.model_type == "bitnet":  # `NOT_BUILT` says what the latter needs
            return
        self.packing = layout_of(settings) if isinstance(settings, Mapping) else None
        if self.packing is None:
            known = settings if isinstance(settings, Mapping) else {}
            kind = (
                " ".join(str(known[name]) for name in ("quant_method", "format") if name in known) or "no known method"
            )
            raise ConfigError(
                f"model.path={self.model.path}; its weights are quantised by {kind:.60}, which is not decoded here; "
                "take the model that it was made of, whose frozen weights model.base=nf4 or int8 holds as codes."
            )
        if self.model.base != "dense":
            raise ConfigError(
                f"model.base={self.model.base} with model.path={self.model.path}; its weights have a few bits already "
                "and are decoded when they are read; leave model.base=dense."
            )
        del config.quantization_config

    def require_head(self, config: PretrainedConfig) -> None:
        """Require transformers to have a class of the objective's head for this type of model.

        Raises:
            ConfigError: it has none.
        """
        head = HEADS.get(self.head)
        if head is None:
            raise ConfigError(
                f"model={self.model.name}; the objective makes its models itself (head={self.head!r}); take a model "
                "whose model._target_ is made for it."
            )
        is_encoder = config.model_type in HEADS["masked_lm"].model_types
        if self.head == CLASSIFIER and self.causal == is_encoder:
            raise ConfigError(
                f"model={self.model.name}; a {config.model_type!r} is "
                + (
                    "an encoder, and the objective scores texts by a decoder; give one (mistral, qwen2, gemma3_text)."
                    if is_encoder
                    else "a decoder, and the objective classifies with attention on both sides; give an encoder "
                    "(modernbert, eurobert, deberta-v2, roberta)."
                )
            )
        has_own_class = self.runs_code and head.auto.__name__ in (getattr(config, "auto_map", None) or {})
        if config.model_type not in head.model_types and not has_own_class:
            raise ConfigError(
                f"model={self.model.name}; transformers has no {head.text} of type {config.model_type!r}; "
                f"{head.advice}."
            )

    def built(
        self, config: PretrainedConfig, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
    ) -> PreTrainedModel:
        """Build a module with random weights, as training calls it.

        Args:
            dtype: data type of the weights; None is that of the config.
        """
        own = OWN_CLASSES.get((self.head, config.model_type))
        if own is not None:
            return cast(PreTrainedModel, resolve_name(own)._from_config(config, dtype=dtype))
        model = self.built_by_transformers(config, dtype=dtype, trust_remote_code=trust_remote_code)
        if config.model_type in DELTA_NETS:
            from tpu_experiments.models.families.delta_net import with_delta_nets

            with_delta_nets(model)
        return model

    def built_by_transformers(
        self, config: PretrainedConfig, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
    ) -> PreTrainedModel:
        """Build a module with random weights by transformers' class for the objective's head."""
        auto = HEADS[self.head].auto
        return cast(PreTrainedModel, auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code))

    @property
    def runs_code(self) -> bool:
        """Whether the checkpoint's own Python code is run."""
        return self.model.remote_code == "run" and not self.random

    @property
    def reference(self) -> str:
        """The base model as an adapter names it: the full path of a local folder, or the Hub id."""
        local = local_path(self.model)
        return self.model.path if local is None else str(local)

    def empty(self) -> nn.Module:
        """Build the module with parameters on the meta device and its buffers (models/sources/buffers.py) on the host.

        Raises:
            ConfigError: its config's values are inconsistent, or the checkpoint lacks a buffer or has a broken one.
        """
        try:
            module = self._on_meta(self.config)
            module.tie_weights()
            unset = compute_buffers(module)
            keep_made_tensors(module, lambda: self.rehearse(module))
            self.fill_buffers(module, unset)
            require_values(module, origin=self._config_origin)
        except ConfigError:
            raise
        except UNFIT as error:
            if self._computes_alone():
                raise self.misfit(error) from error
            raise ConfigError(
                f"{self._config_origin}; transformers' {self.config.model_type} cannot compute with these values "
                f"({one_line(error)}); mend them."
            ) from error
        return module

    def misfit(self, error: Exception) -> ConfigError:
        """Return the refusal of a class that computes its config's values, but not as training calls it."""
        way = "use model.attention=eager" if self.model.attention != "eager" else "take another model"
        return ConfigError(
            f"{self._config_origin} with model.attention={self.model.attention}; transformers' "
            f"{self.config.model_type} does not compute with the masks and positions of documents "
            f"({one_line(error)}); {way}."
        )

    def _computes_alone(self) -> bool:
        """Return whether transformers computes a row with the config's values, called in its own way."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = config._experts_implementation = "eager"
        try:
            with torch.device("meta"), torch.no_grad():
                module = self.built_by_transformers(config, dtype=self.dtype, trust_remote_code=self.runs_code)
                whole: Any = module.base_model if self.head == CLASSIFIER else module
                whole(input_ids=torch.ones(1, TOKENS, dtype=torch.int64), use_cache=False)
        except UNFIT as error:
            return not SHAPES.search(str(error)) and isinstance(error, RuntimeError)
        return True

    def fill_buffers(self, module: PreTrainedModel, unset: set[str]) -> None:
        """Give a module the buffers that the checkpoint holds; those of random weights are what its class draws.

        Args:
            unset: names of the buffers that transformers' initialisation does not set.

        Raises:
            ConfigError: the checkpoint lacks one, or has it in another shape or with values that are NaN or infinite.
        """
        held = persistent_buffers(module)
        lost = sorted(unset - held.keys())
        if lost:
            raise ConfigError(
                f"{self._config_origin}; transformers' {self.config.model_type} sets {lost[0]!r} neither from the "
                "checkpoint nor from the config; take another model."
            )
        if not self.random:
            for name, value in self._stored_buffers(module, held, unset).items():
                put_buffer(module, name, value)
        elif unset:
            for name in unset:
                put_buffer(module, name, self._drawn_buffers[name].to(held[name].dtype))

    @cached_property
    def _drawn_buffers(self) -> dict[str, Tensor]:
        """Persistent buffers of a module of random weights."""
        with torch.random.fork_rng(devices=[]):
            return persistent_buffers(self.built(self.config, dtype=self.dtype, trust_remote_code=False))

    def _stored_buffers(
        self, module: PreTrainedModel, held: Mapping[str, Tensor], unset: Collection[str]
    ) -> dict[str, Tensor]:
        """Read the buffers that the checkpoint holds, in the data types in which transformers loads them."""
        if not held:
            return {}
        optional = module._keys_to_ignore_on_load_missing or ()
        may_lack = {n for n in held if any(re.search(pattern, n) for pattern in optional)} - set(unset)
        names = [n for n in held if n not in may_lack or self._stored_name(n) in self._tensors_by_name]
        exact = tuple(module._keep_in_fp32_modules_strict or ())
        found: dict[str, Tensor] = {}
        for name, stored in self._stored(names, kind="buffers").items():
            own = held[name]
            if stored.shape != own.shape:
                raise self._refusal_of_shape(name, stored.shape, tuple(own.shape))
            is_exact = own.is_floating_point() and any(part in name for part in exact)
            value = read_any(stored).to(torch.float32 if is_exact else own.dtype)
            bad = not_finite(value)
            if bad is not None and not torch.equal(value, own.to(value.dtype)):  # a mask may have infinite values
                raise self._refusal_of(name, bad)
            found[name] = value
        return found

    def rehearse(self, module: nn.Module) -> None:
        """Run a module of this source on the meta device; raises what it raises over inconsistent values."""
        whole: Any = module
        # A classifier's own forward pass pools with masks of padding alone.
        rehearse(whole.base_model if self.head == CLASSIFIER else module, causal=self.causal)

    def _on_meta(self, config: PretrainedConfig) -> PreTrainedModel:
        with torch.device("meta"):
            return self.built(config, dtype=self.dtype, trust_remote_code=self.runs_code)

    @property
    def export_config(self) -> PretrainedConfig:
        """The config that an export of all parameters has."""
        if self.model.linear != "bitnet":
            return self.config
        config = copy.deepcopy(self.config)
        config.quantization_config = dict(ONLINE)
        return config

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[ModelPart]:
        """Yield the models that are exported beside the one of all parameters, given its host tensors."""
        yield from ()

    @property
    def _config_origin(self) -> str:
        """Origin of the config's values, for error messages."""
        return f"model={self.model.name} (model.arch)" if self.folder is None else f"model.path={self.folder}"

    def require_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every parameter is present in its shape, and every tensor known, by the headers of the files.

        Of tied weights that are stored twice the values are compared.

        Raises:
            ConfigError: there are no safetensors, a parameter is missing, its shape is not that of config.json, or the
                checkpoint has tensors that nothing reads (models/sources/unread.py).
        """
        if self.random:
            return
        if self.reads_all:
            self._require_no_stray()
        for name, stored in self._stored([name for name in shapes if name not in self.new_head]).items():
            wanted = self._of_checkpoint(name, shapes[name])
            if stored.shape != wanted:
                raise self._refusal_of_shape(name, stored.shape, wanted)

    def _require_no_stray(self) -> None:
        assert self.folder is not None
        if (self.folder / "adapter_config.json").exists():
            raise ConfigError(
                f"model.path={self.model.path}; adapter_config.json beside the weights names an adapter, which "
                "transformers would load over its base and nothing loads here; merge it into the weights, or remove "
                "the adapter's files from that folder."
            )
        if getattr(self.whole_config, "transformers_weights", None) is not None:
            raise ConfigError(
                f"model.path={self.model.path}; its config.json has transformers_weights="
                f"{self.whole_config.transformers_weights}, other files than model.safetensors; save the model anew "
                "with transformers' save_pretrained."
            )
        module, found = self._tied_on_meta, self._tensors_by_name
        outer = {name: self._stored_name(name) for name in (*module.state_dict(), *self._tied)}
        used = {outer[names[0]] for names in self._tied.values()} | {
            stored for name, stored in outer.items() if name not in self._tied
        }
        twins = {self.outer_name(n): outer[names[0]] for names in self._tied.values() for n in names}
        is_part = self.whole_config is not self.config
        require_known(
            found,
            used=used,
            twins={name: twin for name, twin in twins.items() if name != twin},
            whole=self._on_meta(self.whole_config) if is_part else module,
            is_part=is_part,
            other_heads=None if self.head == "causal_lm" else f"{module.base_model_prefix}.",
            origin=f"model.path={self.model.path}",
        )

    @cached_property
    def _tied_on_meta(self) -> PreTrainedModel:
        """The empty module with its tied weights."""
        module = self._on_meta_once
        module.tie_weights()
        return module

    @cached_property
    def _tied(self) -> dict[str, list[str]]:
        """Names of every weight that has several, in the order of the module, by each of them."""
        by_tensor: dict[int, list[str]] = {}
        for name, parameter in self._tied_on_meta.named_parameters(remove_duplicate=False):
            by_tensor.setdefault(id(parameter), []).append(name)
        return {name: names for names in by_tensor.values() if len(names) > 1 for name in names}

    def weights(self, names: list[str]) -> Iterator[Named]:
        """Yield every parameter of `names` once and in this order, in `dtype`, on the host.

        Each is checked for values that are NaN or infinite (storage/tensors.py has the cost).

        Raises:
            ConfigError: the checkpoint lacks a parameter, or one has a value that is NaN or infinite.
        """
        for item in self._random_weights(names) if self.random else self._checkpoint_weights(names):
            bad = not_finite(item.tensor)
            if bad is not None:
                raise self._refusal_of(item.name, bad)
            yield item
            del item  # otherwise it stays allocated while the next one is read

    def _random_weights(self, names: list[str]) -> Iterator[Named]:
        torch.manual_seed(self.seed)
        # float32 first: the same draw in every dtype
        module = self.built(self.config, dtype=torch.float32, trust_remote_code=False)
        parameters = dict(module.named_parameters())
        for name in names:
            yield Named(name, parameters[name].detach().to(self.dtype))

    def _checkpoint_weights(self, names: list[str]) -> Iterator[Named]:
        found = self._stored([name for name in names if name not in self.new_head])
        for name in names:
            if name in self.new_head:
                yield Named(name, self._drawn(name, self.new_head[name]).to(self.dtype))
            else:
                yield Named(name, self._with_new_rows(name, found[name].read()).to(self.dtype))

    @cached_property
    def new_head(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of parameters that the checkpoint does not give, which are drawn.

        They are those of a classifier's head that the checkpoint lacks, and, if the checkpoint is not a classifier of
        the same labels, the matrix and bias of the logits; and norms that a Llama lacks as a BitNet, which are 1.
        """
        if self.random:
            return {}
        if self.model.linear == "bitnet":
            named = self._on_meta_once.named_parameters()
            absent = {n: tuple(p.shape) for n, p in named if is_new_norm(n) and n not in self._tensors_by_name}
            if absent:
                log.info("%d norms that the checkpoint lacks begin as 1, first %s", len(absent), next(iter(absent)))
            return absent
        if self.head != CLASSIFIER:
            return {}
        module = self._on_meta_once
        own = head_parameters(module)
        is_same = self.labels_of_checkpoint == own_labels(self.config)
        last = () if is_same else tuple(f"{logit_layer(module)}.{leaf}" for leaf in ("weight", "bias"))
        outer = {name: self.outer_name(name) for name in own}
        new = {n: shape for n, shape in own.items() if n in last or outer[n] not in self._tensors_by_name}
        if new:
            log.info("the head is new: %s are drawn by seed=%d", ", ".join(new), self.seed)
        return new

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw a parameter of a new head from a hash of the seed and its name, as BERT's (arXiv 1810.04805).

        Matrices are normal with the config's `initializer_range`, norms are 1 and biases 0.
        """
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(shape, generator=generator) * float(getattr(self.config, "initializer_range", 0.02))

    def _refusal_of_shape(self, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> ConfigError:
        return ConfigError(
            f"model.path={self.model.path}; the checkpoint has {name} as {stored}, its config.json says {wanted}; the "
            "two do not belong together."
        )

    def _refusal_of(self, name: str, bad: str) -> ConfigError:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.random:
            return ConfigError(
                f"model={self.model.name}; drawn at random, {bad} of {name} are NaN or infinite as {dtype}; look at "
                "what model.arch and model.tiny_arch say of the start (initializer_range)."
            )
        file = self._stored([name])[name].file.name
        return ConfigError(
            f"model.path={self.model.path}; {file} has {bad} of {name} that are NaN or infinite as {dtype}; it is "
            "damaged, or was saved by a training that had diverged: download it again, or take another checkpoint."
        )

    @property
    def tied_names(self) -> dict[str, list[str]]:
        """Names of tied parameters, all by the first, in the checkpoint's model."""
        groups = {tuple(map(self.outer_name, names)) for names in self._tied.values()}
        return {first: others for first, *others in sorted(groups)}

    def outer_name(self, name: str) -> str:
        """Return a decoder parameter's name in the checkpoint's model, which may be multimodal."""
        inner, outer = self._prefixes
        return outer + name.removeprefix(inner) if name.startswith(inner) else name

    @cached_property
    def _prefixes(self) -> tuple[str, str]:
        """Prefixes of the names of the decoder's layers, in `empty()` and in the checkpoint's model."""
        if self.whole_config is self.config or self.random:
            return "", ""
        return prefixes(self._on_meta(self.config), self._on_meta(self.whole_config))

    def _stored(self, names: list[str], *, kind: str = "parameters") -> dict[str, AnyStored | ConvertedTensor]:
        found, outer = self._tensors_by_name, [self._stored_name(name) for name in names]
        absent = [name for name in outer if name not in found]
        if absent:
            raise ConfigError(
                f"model.path={self.model.path}; the checkpoint lacks {len(absent)} of {len(names)} {kind}, "
                f"first {absent[0]!r}. {suggest(absent[0], list(found)[:40])}"
            )
        return {name: found[whole] for name, whole in zip(names, outer, strict=True)}

    def _stored_name(self, name: str) -> str:
        """Return a parameter's name in the checkpoint: of a tied one that which is there.

        One of an encoder alone (AutoModel) lacks the first part.
        """
        whole = self.outer_name(name)
        if whole in self._tensors_by_name:
            return whole
        held = [twin for n in self._tied.get(name, ()) if (twin := self.outer_name(n)) in self._tensors_by_name]
        if held:
            return held[0]
        if self.head != CLASSIFIER:
            return whole
        inner = whole.removeprefix(f"{self._on_meta_once.base_model_prefix}.")
        return inner if inner in self._tensors_by_name else whole

    @cached_property
    def _on_meta_once(self) -> PreTrainedModel:
        return self._on_meta(self.config)

    @cached_property
    def _tensors_by_name(self) -> dict[str, AnyStored | ConvertedTensor]:
        """Every tensor of the checkpoint under its name in the model; cached, so that files are indexed once."""
        assert self.folder is not None
        stored = stored_tensors(self.folder)
        held = stored if self.packing is None else with_packed(stored, self.packing)
        return converted_tensors(held, self._on_meta(self.whole_config))


def own_labels(config: PretrainedConfig) -> list[str]:
    """Return the labels that a config names, in the order of the logits; transformers' own two where it names none."""
    return [str(config.id2label[number]) for number in sorted(config.id2label)] if config.id2label else []


def set_labels(config: PretrainedConfig, labels: Sequence[str]) -> None:
    """Make the config that of a classifier of these labels."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    # Of a single output, a score: transformers' pipeline and vLLM would make a probability of it otherwise.
    config.problem_type = "single_label_classification" if len(labels) > 1 else "regression"


def head_parameters(module: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters of a classifier's head: all outside of the base model, and its pooler.

    BERT's pooler is in its base model; checkpoints of masked language models may lack it.
    """
    inner, pooler = f"{module.base_model_prefix}.", f"{module.base_model_prefix}.pooler."
    named = ((name, tuple(p.shape)) for name, p in module.named_parameters())
    return {name: shape for name, shape in named if not name.startswith(inner) or name.startswith(pooler)}


def config_from_arch(arch: dict[str, Any]) -> PretrainedConfig:
    """Build a transformers config from the values of `model.arch`.

    Raises:
        ConfigError: transformers has no such model type, or its class refuses the values.
    """
    values = dict(arch)
    model_type = str(values.pop("model_type"))
    if "auto_map" in values:
        raise ConfigError("model.arch.auto_map; a model of random weights has no code beside it; leave it out.")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.arch.model_type={model_type!r}; transformers has none. {suggest(model_type, CONFIG_MAPPING)}"
        )
    try:
        return CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # each class checks its values in its own way
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.arch; transformers' {model_type} does not take these values ({reason}); mend the one it names."
        ) from error


@contextmanager
def silent() -> Iterator[None]:
    """Keep from the terminal what transformers tells those who call it themselves: warnings and progress bars."""
    level, bars = library_log.get_verbosity(), library_log.is_progress_bar_enabled()
    library_log.set_verbosity_error()
    library_log.disable_progress_bar()
    try:
        yield
    finally:
        library_log.set_verbosity(level)
        if bars:
            library_log.enable_progress_bar()


def global_value(config: PretrainedConfig, name: str) -> Any:
    """Return a config's value, or None; the one of the whole model where its layers have values of their own.

    transformers refuses to give such a value (Gemma 4's `head_dim`).
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return config.to_dict().get(name)


def count_problems(config: PretrainedConfig, *, where: str) -> list[str]:
    """Return a sentence for every size of a model that is no positive integer or exceeds its bound."""
    problems = []
    for name, most in COUNTS.items():
        value = global_value(config, name)
        each = value if isinstance(value, list) and value else [value]  # some classes have one of each layer
        are_counts = all(isinstance(one, int) and not isinstance(one, bool) and 0 < one <= most for one in each)
        if value is not None and not are_counts:
            problems.append(f"{where} has {name}={value!r:.60}; it must be a whole number from 1 to {most}.")
    return problems


def _config_of(folder: Path, model: ModelConfig) -> PretrainedConfig:
    require_regular_folder(folder, key=f"model.path={model.path}")
    try:
        values, _ = PretrainedConfig.get_config_dict(folder)
        require_no_code(values, source=f"model.path={model.path}", remote_code=model.remote_code)
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=model.remote_code == "run")
        if model.remote_code == "ignore" and hasattr(config, "auto_map"):
            del config.auto_map  # an export contains none of the code that it names
        return config
    except ConfigError:
        raise
    except Exception as error:  # not JSON, an unknown model_type, values that the config class refuses
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.path={folder}; transformers cannot use its config.json ({type(error).__name__}: {reason}); "
            "give a checkpoint of a model that this transformers knows, without code of its own."
        ) from error


def local_path(model: ModelConfig) -> Path | None:
    """Return `model.path` as a folder, relative to here or to the repository's root; None for a Hub id.

    Raises:
        ConfigError: it is a GGUF file that cannot be read as a model.
    """
    local = find_local(model.path)
    folder = None if local is None else opened(local, revision=model.revision)
    return folder.resolve() if folder is not None and folder.is_dir() else None


SMALL_FILES = ("*.json", "*.jinja", "tokenizer*")
"""Patterns of a checkpoint's files without weights."""


def with_small_files(model: ModelConfig) -> ModelConfig:
    """Return the model with the folder of its config and tokenizer in the place of a Hub id; no weights are fetched.

    A preset of conf/model whose files the Hub does not give stays as it is: its config is `model.arch`.

    Raises:
        ConfigError: there is no such folder, or the Hub did not give another's files.
    """
    if model.init == "random" or model.size == "tiny":
        return model
    require_checkpoint(model.path)
    if local_path(model) is not None:
        return model
    try:
        return replace(model, path=str(_fetched(model, *SMALL_FILES)), revision=None)
    except ConfigError:
        if model.path != path_of_model(model.name):
            raise
        return model


def _local_folder(model: ModelConfig) -> Path:
    """Return the checkpoint's folder; a Hub id is downloaded into the Hub's cache.

    Only safetensors, configs and tokenizer files are fetched, and Python files where `model.remote_code=run`.

    Raises:
        ConfigError: there is no such folder or no config.json in it, or the download failed.
    """
    require_checkpoint(model.path)
    local = local_path(model)
    return _fetched(model, "*.safetensors", *SMALL_FILES) if local is None else local


def _fetched(model: ModelConfig, *patterns: str) -> Path:
    """Download files of a Hub id into the Hub's cache, with Python files where `model.remote_code=run`.

    Raises:
        ConfigError: the download failed.
    """
    from huggingface_hub import constants, snapshot_download

    try:
        wanted = [*patterns, *(["*.py"] if model.remote_code == "run" else [])]
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=wanted))
    except Exception as error:  # the Hub client raises a dozen types: offline, gated, missing, no space
        if NO_SPACE.search(str(error)):
            raise ConfigError(
                f"model.path={model.path}; its weights do not fit on the disk of the Hub's cache "
                f"({constants.HF_HUB_CACHE}), which is full; free some space, or `export HF_HOME=FOLDER` of a larger "
                "disk."
            ) from error
        raise ConfigError(
            f"model.path={model.path}; not a local folder, and the Hub did not give it ({type(error).__name__}); "
            "log in with `hf auth login` if it is gated, or download it elsewhere and set model.path=FOLDER."
        ) from error


class ShapesOfModel(HuggingFaceModel):
    """A model source whose weights are on the meta device; nothing is downloaded.

    The config is that of a local checkpoint, otherwise that of `model.arch`.
    """

    def find_folder(self) -> Path | None:
        """Return the folder of a local checkpoint; None for a Hub id."""
        return local_path(self.model)

    def require_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Accept any checkpoint: no weights are read."""

    def fill_buffers(self, module: PreTrainedModel, unset: set[str]) -> None:
        """Leave the buffers that a checkpoint holds as they are: none is read."""

    def weights(self, names: list[str]) -> Iterator[Named]:
        """Yield a tensor without data for each name."""
        parameters = dict(self.empty().named_parameters())
        for name in names:
            yield Named(name, torch.empty_like(parameters[name], dtype=self.dtype, device="meta"))


def shapes_only(kind: Any) -> type[HuggingFaceModel]:
    """Return the class of a source of such models whose weights are on the meta device."""
    is_stock = kind is HuggingFaceModel or not (isinstance(kind, type) and issubclass(kind, HuggingFaceModel))
    return ShapesOfModel if is_stock else type("Shapes", (ShapesOfModel, kind), {})
