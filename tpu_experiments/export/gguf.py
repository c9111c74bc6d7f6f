"""A whole model, or a LoRA adapter, as files of llama.cpp's format GGUF.

Weights are those that llama.cpp's own converter writes: in the architecture `llama` the rows of Q and K are in another
order, because its RoPE turns neighbouring values where transformers turns halves; Gemma's norms hold their 1. One-
dimensional weights stay float32. Several data types are written in one pass over the weights, a tensor at a time.
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, lora_of
from tpu_experiments.export.gguf_tokenizer import Vocabulary, vocabulary_of
from tpu_experiments.export.weights import WholeModel
from tpu_experiments.models.adapters.lora import scale_of
from tpu_experiments.models.passes.forward import window_of
from tpu_experiments.storage.gguf.settings import GEMMA_27B_LAYERS, GEMMA_PERIOD

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

ARCHITECTURES = {
    "MistralForCausalLM": "LLAMA",
    "LlamaForCausalLM": "LLAMA",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen3ForCausalLM": "QWEN3",
    "Gemma3ForCausalLM": "GEMMA3",
}
"""Name of llama.cpp's architecture (`gguf.MODEL_ARCH`) by class of transformers."""
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""Name in `gguf.LlamaFileType` by data type."""
F16_MAX = 65504.0
ADAPTER = "adapter-f32.gguf"


@dataclass(frozen=True)
class Metadata:
    """What a file says of its origin: GGUF's keys `general.*`."""

    name: str
    base: str
    """Base model: a Hub id or a folder."""
    license: str | None = None

    def add_to(self, writer: "GGUFWriter") -> None:
        """Add the metadata of the origin."""
        writer.add_name(self.name)
        writer.add_base_model_count(1)
        owner, _, name = self.base.rstrip("/").rpartition("/")
        writer.add_base_model_name(0, name)
        if owner and "/" not in owner:
            writer.add_base_model_organization(0, owner)
        if self.license is not None:
            writer.add_license(self.license)


def file_name(kind: str) -> str:
    """Return the name of the file of a data type."""
    return f"model-{kind}.gguf"


@dataclass(frozen=True)
class WrittenModels:
    """What was written of a model."""

    digests: dict[str, str]
    """SHA-256 of each file by its name."""
    notes: list[str]
    """What llama.cpp does otherwise than transformers, a sentence each."""
    doubles_blank: bool
    """See `gguf_tokenizer.Vocabulary`."""


def is_exact(kind: str, architecture: str) -> bool:
    """Return whether llama.cpp computes in float32 throughout with a file of this type.

    On a CPU it looks Gemma's GELU up in a table of float16 (`GGML_GELU_FP16`).
    """
    return kind == "f32" and ARCHITECTURES[architecture] != "GEMMA3"


def write_models(
    folder: str,
    *,
    model: WholeModel,
    tokenizer: PreTrainedTokenizerBase,
    types: Sequence[str],
    metadata: Metadata,
    ends: Sequence[int] = (),
) -> WrittenModels:
    """Write `model-<type>.gguf` of each type in one pass over the weights.

    Args:
        ends: `eos_token_id` of the model's generation_config.json.

    Raises:
        ConfigError: llama.cpp has no such architecture, RoPE or tokenizer, or float16 cannot hold a weight.
    """
    conversion = Conversion(model.config, model.architecture)
    vocabulary = vocabulary_of(tokenizer, config=model.config, ends=ends)
    files = [_ModelFile(folder, kind, conversion, model, vocabulary, metadata) for kind in dict.fromkeys(types)]
    try:
        for name, tensor in conversion.tensors(model):
            for file in files:
                file.write(name, tensor)
    finally:
        for file in files:
            file.close()
    digests = {file.name: file.digest() for file in files}
    return WrittenModels(digests, [*conversion.notes, *vocabulary.notes], vocabulary.doubles_blank)


class _ModelFile:
    """One file that is being written: metadata and the list of tensors at once, then tensor by tensor."""

    def __init__(
        self,
        folder: str,
        kind: str,
        conversion: "Conversion",
        model: WholeModel,
        vocabulary: Vocabulary,
        metadata: Metadata,
    ) -> None:
        gguf = library()
        self.name, self.kind, self._hash = file_name(kind), kind, hashlib.sha256()
        path = Path(folder) / self.name
        self.types = {name: storage_type(kind, shape) for name, shape in conversion.shapes(model).items()}
        self._writer = writer = gguf.GGUFWriter(path, conversion.arch)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.add_to(writer)
        count = sum(math.prod(shape) for shape in conversion.shapes(model).values())
        writer.add_size_label(gguf.size_label(count, count, 0, 0))
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
        if kind == "q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        conversion.add_settings(writer)
        vocabulary.add_to(writer)
        for name, shape in conversion.shapes(model).items():
            stored = gguf.quant_shape_to_byte_shape(shape, self.types[name])
            writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(stored), raw_dtype=self.types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        head = path.read_bytes()
        self._hash.update(head + bytes(-len(head) % writer.data_alignment))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, float32 on the host."""
        data = quantised(name, tensor, self.types[name])
        self._writer.write_tensor_data(data)
        self._hash.update(data.data)
        self._hash.update(bytes(-data.nbytes % self._writer.data_alignment))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def digest(self) -> str:
        """Return the SHA-256 of what was written."""
        return self._hash.hexdigest()


def library() -> ModuleType:
    """Return the package `gguf`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "task.forms has gguf, and the package gguf is not installed; `pip install 'tpu_experiments[export]'`."
        ) from error
    logging.getLogger("gguf").setLevel(logging.WARNING)  # a line for each file and its byte order
    return gguf


def storage_type(kind: str, shape: Sequence[int]) -> "GGMLQuantizationType":
    """Return the type of one tensor in a file of `kind`, as llama.cpp's converter chooses it."""
    types = library().GGMLQuantizationType
    if len(shape) == 1:
        return types.F32
    if kind == "q8_0" and shape[-1] % library().GGML_QUANT_SIZES[types.Q8_0][0]:
        return types.F16
    return types[kind.upper()]


def quantised(name: str, tensor: Tensor, kind: "GGMLQuantizationType") -> np.ndarray[Any, Any]:
    """Return a float32 tensor in a storage type.

    Raises:
        ConfigError: a value is beyond float16.
    """
    gguf = library()
    if kind == gguf.GGMLQuantizationType.F16 and (largest := float(tensor.abs().max())) > F16_MAX:
        raise ConfigError(
            f"task.gguf_types; {name} has the value {largest:.4g}, and float16 ends at {F16_MAX:.0f}; "
            "write bf16 or f32."
        )
    return np.ascontiguousarray(gguf.quants.quantize(tensor.contiguous().numpy(), kind))


class Conversion:
    """Names, settings and weights of a model as llama.cpp's architecture has them.

    Raises:
        ConfigError: llama.cpp has no such architecture, or computes something else than `config` says.
    """

    def __init__(self, config: PretrainedConfig, architecture: str) -> None:
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                f"task.forms has gguf, and models of class {architecture} are not written in it; it is written for "
                f"{', '.join(ARCHITECTURES)}; leave gguf out of task.forms."
            )
        gguf = library()
        self.config: Any = config
        self.kind = ARCHITECTURES[architecture]
        arch = gguf.MODEL_ARCH[self.kind]
        self.arch: str = gguf.MODEL_ARCH_NAMES[arch]
        self._names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        self._rope_freqs: str = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
        rope: dict[str, Any] = self.config.rope_parameters
        self.rope: dict[str, Any] = rope.get("full_attention", rope)
        self.local_rope: dict[str, Any] = rope.get("sliding_attention", {})
        self.heads = int(self.config.num_attention_heads)
        self.kv_heads = int(getattr(self.config, "num_key_value_heads", None) or self.heads)
        self.head_dim = int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads)
        self._require_known()

    def _require_known(self) -> None:
        activation = getattr(self.config, "hidden_activation", None) or getattr(self.config, "hidden_act", None)
        if activation != ("gelu_pytorch_tanh" if self.kind == "GEMMA3" else "silu"):
            raise self._refusal(f"its activation is {activation}")
        kinds = ("default", "linear", "yarn", *(("llama3",) if self.kind == "LLAMA" else ()))
        kind = self.rope["rope_type"]
        if kind not in kinds:
            raise self._refusal(f"its RoPE is of type {kind}; {', '.join(kinds)} are known")
        if self.local_rope.get("rope_type", "default") != "default":
            raise self._refusal(f"the RoPE of its local layers is of type {self.local_rope['rope_type']}")
        for rope in (self.rope, self.local_rope):
            if rope.get("partial_rotary_factor", 1.0) != 1.0:
                raise self._refusal(f"its RoPE turns only a part of each head ({rope['partial_rotary_factor']})")
        if kind == "yarn":
            strange = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if self.rope.get(name)]
            strange += ["truncate=false"] if self.rope.get("truncate") is False else []
            if strange:
                raise self._refusal(f"its YaRN RoPE has {', '.join(strange)}")
        if getattr(self.config, "attn_logit_softcapping", None):
            raise self._refusal(f"it has attn_logit_softcapping={self.config.attn_logit_softcapping}")
        if getattr(self.config, "use_bidirectional_attention", None):
            raise self._refusal("its attention is bidirectional")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"task.forms has gguf, and llama.cpp's architecture {self.arch} cannot compute this "
            f"{self.config.model_type}: {what}; leave gguf out of task.forms."
        )

    @property
    def notes(self) -> list[str]:
        """What llama.cpp does otherwise than transformers, a sentence each."""
        window = window_of(self.config)
        if self.kind == "GEMMA3" or not window or window >= self.config.max_position_embeddings:
            return []
        return [
            f"llama.cpp's architecture {self.arch} has no sliding window, and this model has one of {window} tokens in "
            f"a context of {self.config.max_position_embeddings}: beyond {window} tokens the two differ."
        ]

    def name(self, name: str) -> str:
        """Return llama.cpp's name of a tensor."""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise self._refusal(f"it has no tensor for {name}")
        return str(found)

    def shapes(self, model: WholeModel) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the order of `tensors`."""
        extra = {name: tuple(tensor.shape) for name, tensor in self._extra().items()}
        return extra | {self.name(name): tuple(shape.shape) for name, shape in model.shapes.items()}

    def tensors(self, model: WholeModel) -> Iterator[tuple[str, Tensor]]:
        """Yield llama.cpp's name and the float32 tensor on the host, one in memory at a time."""
        yield from self._extra().items()
        for name, tensor in model.tensors():
            yield self.name(name), self._weight(name, tensor)
            del tensor

    def _weight(self, name: str, tensor: Tensor) -> Tensor:
        if self.kind == "GEMMA3" and name.endswith("norm.weight"):
            tensor = tensor + 1.0
            return tensor * self._scale_of_queries() if name.endswith("q_norm.weight") else tensor
        return self.rows(name, tensor)

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight, bias or LoRA B, (out, ...), with its rows in llama.cpp's order."""
        module = name.rpartition(".")[0]
        if self.kind != "LLAMA" or not module.endswith(("q_proj", "k_proj")):
            return tensor
        heads = self.heads if module.endswith("q_proj") else self.kv_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    def _scale_of_queries(self) -> float:
        """Return what Gemma's queries lack of the scale that llama.cpp takes: 1 in all published models."""
        is_27b = self.config.num_hidden_layers == GEMMA_27B_LAYERS
        taken = self.config.hidden_size // self.heads if is_27b else self.head_dim
        return math.sqrt(taken / self.config.query_pre_attn_scalar)

    def _extra(self) -> dict[str, Tensor]:
        """Return the divisors of RoPE's frequencies, (head_dim / 2), of Llama 3's scaled RoPE; else nothing."""
        if self.rope["rope_type"] != "llama3":
            return {}
        rope = self.rope
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -exponents / (2 * math.pi)
        part = ((turns - low) / (high - low)).clamp(0, 1)
        return {self._rope_freqs: 1 / ((1 - part) / factor + part)}

    def add_settings(self, writer: "GGUFWriter") -> None:
        """Add the hyperparameters."""
        config = self.config
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.rope["rope_theta"])
        self._add_scaled_rope(writer)
        if self.kind == "GEMMA3":
            self._add_local_layers(writer)
            if config.final_logit_softcapping:
                writer.add_final_logit_softcapping(config.final_logit_softcapping)

    def _add_scaled_rope(self, writer: "GGUFWriter") -> None:
        types, rope = library().RopeScalingType, self.rope
        if rope["rope_type"] not in ("linear", "yarn"):
            return
        writer.add_rope_scaling_type(types[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)

    def _add_local_layers(self, writer: "GGUFWriter") -> None:
        """Add Gemma's sliding window, the layers that have it, and their RoPE base."""
        is_local = [kind == "sliding_attention" for kind in self.config.layer_types]
        writer.add_sliding_window(self.config.sliding_window)
        writer.add_rope_freq_base_swa(self.local_rope.get("rope_theta", self.rope["rope_theta"]))
        if is_local != [(index + 1) % GEMMA_PERIOD != 0 for index in range(len(is_local))]:
            writer.add_sliding_window_pattern(is_local)


def write_adapter_file(
    folder: str,
    *,
    config: PretrainedConfig,
    architecture: str,
    parameters: Mapping[str, Tensor],
    lora: LoraConfig,
    metadata: Metadata,
) -> dict[str, str]:
    """Write a LoRA adapter as `ADAPTER`, which llama.cpp adds to a GGUF file of the base when it loads.

    Args:
        parameters: `<module>.lora_A` (r, in) and `.lora_B` (out, r) on the host; not of DoRA, which llama.cpp lacks.
        lora: the rank of `parameters` and their scale, which is written as the alpha that is it times the rank. A
            file has one alpha, which llama.cpp divides by each module's rank, so that B holds what a module has more.

    Returns:
        SHA-256 of the file by its name.
    """
    gguf = library()
    conversion = Conversion(config, architecture)
    path = Path(folder) / ADAPTER
    writer = gguf.GGUFWriter(path, conversion.arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    metadata.add_to(writer)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    alpha = scale_of(lora) * lora.r
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name in sorted(parameters):
        module, _, part = name.rpartition(".")
        tensor = parameters[name].to(torch.float32)
        if part == "lora_B":
            own = lora_of(lora, module)
            tensor = tensor * (scale_of(own) * own.r / alpha)
            tensor = conversion.rows(name, tensor)
        data = np.ascontiguousarray(tensor.numpy())
        writer.add_tensor(f"{conversion.name(f'{module}.weight')}.{part.lower()}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {ADAPTER: hashlib.sha256(path.read_bytes()).hexdigest()}
