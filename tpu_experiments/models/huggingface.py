"""Any causal language model of transformers: its config, its empty module and its weights one tensor at a time.

Nothing here holds a second copy of the model: the module is built on the meta device, and `weights` yields one host
tensor at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.sources import ModelConfig
from tpu_experiments.io.find import find_local
from tpu_experiments.models.attention import FLASH
from tpu_experiments.models.stored import StoredTensor, stored_tensors

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Named:
    """One parameter on the host, under Hugging Face's name."""

    name: str
    tensor: Tensor


class HuggingFaceModel:
    """The `model._target_` of every stock model."""

    def __init__(self, model: ModelConfig, *, seed: int) -> None:
        self.model, self.seed = model, seed
        self.random = model.init == "random" or model.size == "tiny"
        self.dtype = DTYPES[model.dtype]
        self.folder = None if self.random else self.find_folder()
        self.config = self._config()

    def find_folder(self) -> Path | None:
        """Where the checkpoint lies; a Hub id is downloaded."""
        return _local_folder(self.model)

    def _config(self) -> PretrainedConfig:
        if self.folder is not None:
            config = _config_of(self.folder)
        else:
            overlay = self.model.tiny_arch if self.model.size == "tiny" else {}
            config = config_from_arch({**self.model.arch, **overlay})
        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ConfigError(
                f"model={self.model.name}; transformers has no causal language model of type {config.model_type!r}; "
                "give a decoder that generates text."
            )
        config._attn_implementation = FLASH if self.model.attention == "flash" else self.model.attention
        return config

    @property
    def reference(self) -> str:
        """What an adapter names as its base: the full path of a local folder, or the Hub id."""
        local = local_path(self.model)
        return self.model.path if local is None else str(local)

    def empty(self) -> nn.Module:
        """The module with parameters on the meta device and its buffers (RoPE frequencies) on the host."""
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        module.tie_weights()
        _fill_buffers(module)
        return module

    def require_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every parameter is there in its shape, from the headers of the files alone.

        Raises:
            ConfigError: no safetensors, a parameter is missing, or it has another shape than config.json says.
        """
        if self.random:
            return
        for name, stored in self._stored(list(shapes)).items():
            if stored.shape != shapes[name]:
                raise ConfigError(
                    f"model.path={self.model.path}; the checkpoint has {name} as {stored.shape}, its config.json says "
                    f"{shapes[name]}; the two do not belong together."
                )

    def weights(self, names: list[str]) -> Iterator[Named]:
        """Yield every parameter of `names` once and in this order, in `dtype`, on the host.

        Raises:
            ConfigError: the checkpoint lacks a parameter.
        """
        if self.random:
            yield from self._random_weights(names)
        else:
            yield from self._checkpoint_weights(names)

    def _random_weights(self, names: list[str]) -> Iterator[Named]:
        torch.manual_seed(self.seed)
        # float32 first: the same draw in every dtype
        module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        parameters = dict(module.named_parameters())
        for name in names:
            yield Named(name, parameters[name].detach().to(self.dtype))

    def _checkpoint_weights(self, names: list[str]) -> Iterator[Named]:
        found = self._stored(names)
        for name in names:
            yield Named(name, found[name].read().to(self.dtype))

    def _stored(self, names: list[str]) -> dict[str, StoredTensor]:
        assert self.folder is not None
        stored = stored_tensors(self.folder)
        prefix = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)].base_model_prefix + "."
        found = {name: tensor for name in names if (tensor := _under_either_name(name, stored, prefix=prefix))}
        absent = [name for name in names if name not in found]
        if absent:
            raise ConfigError(
                f"model.path={self.model.path}; the checkpoint lacks {len(absent)} of {len(names)} parameters, "
                f"first {absent[0]!r}. {suggest(absent[0], list(stored)[:40])}"
            )
        return found


def _under_either_name(name: str, stored: Mapping[str, StoredTensor], *, prefix: str) -> StoredTensor | None:
    """A checkpoint of the model without its head (GPT-2's, for one) has the names without the model's prefix."""
    return stored.get(name) or stored.get(name.removeprefix(prefix))


def config_from_arch(arch: dict[str, Any]) -> PretrainedConfig:
    """A transformers config from the values of `model.arch`.

    Raises:
        ConfigError: transformers has no such model type.
    """
    values = dict(arch)
    model_type = str(values.pop("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.arch.model_type={model_type!r}; transformers has none. {suggest(model_type, CONFIG_MAPPING)}"
        )
    return CONFIG_MAPPING[model_type](**values)


def _config_of(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # not JSON, an unknown model_type, values that the config class refuses
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.path={folder}; transformers cannot use its config.json ({type(error).__name__}: {reason}); "
            "give a checkpoint of a model that this transformers knows, without code of its own."
        ) from error


def local_path(model: ModelConfig) -> Path | None:
    """`model.path` as a folder, from here or from the repository's root; None for a Hub id."""
    local = find_local(model.path)
    return local.resolve() if local is not None and local.is_dir() else None


def _local_folder(model: ModelConfig) -> Path:
    """The checkpoint's folder; a Hub id is downloaded into the Hub's cache (safetensors and configs only)."""
    local = local_path(model)
    if local is not None:
        if not (local / "config.json").exists():
            raise ConfigError(
                f"model.path={model.path}; no config.json there; it is not a Hugging Face checkpoint folder."
            )
        return local
    if model.path.startswith((".", "/", "~")) or model.path.count("/") != 1:
        raise ConfigError(
            f"model.path={model.path}; there is no such folder; give a checkpoint folder or a Hub id owner/name."
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    except Exception as error:  # the Hub client raises a dozen types: offline, gated, missing, no space
        raise ConfigError(
            f"model.path={model.path}; not a local folder, and the Hub did not give it ({type(error).__name__}); "
            "log in with `hf auth login` if it is gated, or download it elsewhere and set model.path=FOLDER."
        ) from error


def _fill_buffers(module: nn.Module) -> None:
    """Compute the buffers (not in any checkpoint) with transformers' own initialisation, leaving parameters alone."""
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark: do not touch
    for part in module.modules():
        own = {name: b for name, b in part._buffers.items() if b is not None and b.is_meta}
        if own:
            for name, buffer in own.items():
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
            module._init_weights(part)  # type: ignore[operator]
