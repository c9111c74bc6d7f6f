"""The config of a model as transformers has it, of a GGUF file's values, and llama.cpp's names of its tensors.

What a file says of its model is used or refused: a value that nothing here knows may change what the model computes.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage.gguf.files import Header

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""transformers' types of models by llama.cpp's architectures."""
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
ROPE_FREQS = "rope_freqs.weight"
GEMMA_27B_LAYERS, GEMMA_27B_SCALAR = 62, 168
"""llama.cpp tells Gemma 3 27B, whose attention has another scale, by its number of layers."""
GEMMA_PERIOD = 6
"""llama.cpp's default for Gemma 3: every sixth layer attends to everything."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTHS = tuple(2**power for power in range(5, 21))
"""Context lengths of a pre-training that are tried: a file has the divisors of frequencies alone."""
IGNORED = {"rope.scaling.finetuned"}
IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""GGUF's names of special tokens by transformers'."""
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
INNER_OF_GEMMA = INNER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, *, arch: str) -> str:
    """Return llama.cpp's name of a parameter.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight", arch="llama")
    'blk.3.attn_q.weight'
    """
    module, _, leaf = name.removeprefix("model.").rpartition(".")
    inner = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if inner is None:
        return f"{OUTER[module]}.{leaf}"
    parts = INNER_OF_GEMMA if arch == "gemma3" else INNER
    return f"blk.{inner[1]}.{parts[inner[2]]}.{leaf}"


@dataclass
class Values:
    """Values of an architecture, taken one at a time, so that what is left is known."""

    header: Header
    arch: str

    def __post_init__(self) -> None:
        start = f"{self.arch}."
        self.left = {k.removeprefix(start): v for k, v in self.header.values.items() if k.startswith(start)}

    def take(self, name: str, default: Any = None) -> Any:
        """Return a value of the architecture.

        Raises:
            ConfigError: it is absent and has no default.
        """
        if name not in self.left and default is None:
            raise refusal(self.header, f"its header has no {self.arch}.{name}")
        return self.left.pop(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of the architecture.

        Raises:
            ConfigError: it is absent and has no default, or is no finite number.
        """
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise refusal(self.header, f"{self.arch}.{name}={value!r:.60} is no number")
        return float(value)

    def require_none_left(self) -> None:
        """Refuse what was not taken.

        Raises:
            ConfigError: a value is left.
        """
        for name, value in self.left.items():
            if name not in IGNORED:
                raise refusal(self.header, f"{self.arch}.{name}={value!r:.60} is not known here")


def refusal(header: Header, what: str) -> ConfigError:
    """Return the refusal of a file that cannot be read as a model."""
    return ConfigError(
        f"model.path={header.path}; as a model to train this GGUF file is not read: {what}; name the checkpoint in "
        "safetensors that it was made of."
    )


def config_values(header: Header, freqs: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the fields of transformers' config with `model_type`.

    Args:
        freqs: the tensor of divisors of RoPE's frequencies, if the file has it.

    Raises:
        ConfigError: the architecture or one of its values is not known here, or of another kind.
    """
    try:
        return _config_values(header, freqs)
    except ConfigError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise refusal(header, f"a value of its header is of another kind ({error!s:.80})") from error


def _config_values(header: Header, freqs: Sequence[float] | None) -> dict[str, Any]:
    arch = str(header.values.get("general.architecture"))
    if header.values.get("general.type", "model") != "model":
        raise refusal(header, f"it holds an object of type {header.values['general.type']!r:.40}, not a model")
    if arch not in MODEL_TYPES:
        raise refusal(header, f"its architecture is {arch:.40}, and {', '.join(MODEL_TYPES)} are known")
    values = Values(header, arch)
    found: dict[str, Any] = {"model_type": MODEL_TYPES[arch]}
    found |= {ours: values.take(theirs) for theirs, ours in SIZES.items()}
    heads = found["num_attention_heads"]
    for name, value in found.items():
        if name != "model_type" and not (isinstance(value, int) and value > 0):
            raise refusal(header, f"its {name} is {value!r:.60}, not one positive number")
    found["num_key_value_heads"] = values.take("attention.head_count_kv", heads)
    found["rms_norm_eps"] = float(f"{values.number('attention.layer_norm_rms_epsilon'):.6g}")  # float32 in the file
    found["head_dim"] = _head_dim(values, found["hidden_size"] // heads)
    found["vocab_size"] = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    if values.take("vocab_size", found["vocab_size"]) != found["vocab_size"]:
        raise refusal(header, f"its embedding has {found['vocab_size']} rows, another number than {arch}.vocab_size")
    found["tie_word_embeddings"] = "output.weight" not in header.tensors
    found["rope_parameters"] = _rope(values, found, freqs)
    if arch == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        found["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if arch == "gemma3":
        found |= _of_gemma(values, found)
    values.require_none_left()
    return found | _ends(header)


def _head_dim(values: Values, default: int) -> int:
    sizes = {values.take(name, default) for name in ("attention.key_length", "attention.value_length")}
    sizes.add(values.take("rope.dimension_count", next(iter(sizes))))
    if len(sizes) != 1:
        raise refusal(values.header, f"its heads have keys, values and rotations of different sizes, {sorted(sizes)}")
    return int(sizes.pop())


def _rope(values: Values, sizes: Mapping[str, Any], freqs: Sequence[float] | None) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": values.number("rope.freq_base", 10000.0)}
    kind = values.take("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
    elif kind != "none":
        raise refusal(values.header, f"its RoPE is scaled by {kind!r:.40}")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = values.take("rope.scaling.original_context_length")
        rope["beta_fast"] = values.number("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = values.number("rope.scaling.yarn_beta_slow", 1.0)
    return rope if freqs is None else _llama3(values.header, rope, freqs, head_dim=sizes["head_dim"])


def _llama3(header: Header, rope: dict[str, Any], freqs: Sequence[float], *, head_dim: int) -> dict[str, Any]:
    """Return Llama 3's scaled RoPE, whose divisors of frequencies are those of the file."""
    factor, (low, high) = max(freqs), LLAMA3_ROPE.values()
    if factor <= 0:
        raise refusal(header, f"its {ROPE_FREQS} are not those of Llama 3's RoPE: the largest is {factor:g}")
    for length in LLAMA3_LENGTHS:
        turns = (length * rope["rope_theta"] ** (-2 * pair / head_dim) / (2 * math.pi) for pair in range(head_dim // 2))
        parts = (min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns)
        divisors = [1 / ((1 - part) / factor + part) for part in parts]
        is_same = len(divisors) == len(freqs) and all(map(partial(math.isclose, rel_tol=1e-4), divisors, freqs))
        if rope["rope_type"] == "default" and is_same:
            own = {"rope_type": "llama3", "factor": round(factor, 4), "original_max_position_embeddings": length}
            return rope | own | LLAMA3_ROPE
    raise refusal(header, f"its {ROPE_FREQS} are not those of Llama 3's RoPE")


def _of_gemma(values: Values, found: Mapping[str, Any]) -> dict[str, Any]:
    layers = found["num_hidden_layers"]
    own: dict[str, Any] = {"sliding_window": values.take("attention.sliding_window")}
    pattern = values.take("attention.sliding_window_pattern", GEMMA_PERIOD)
    if isinstance(pattern, int):
        pattern = [(index + 1) % pattern != 0 for index in range(layers)]
    own["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10000.0)}
    own["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    own["query_pre_attn_scalar"] = GEMMA_27B_SCALAR if layers == GEMMA_27B_LAYERS else found["head_dim"]
    own["final_logit_softcapping"] = values.take("final_logit_softcapping", 0.0) or None
    return own


def _ends(header: Header) -> dict[str, Any]:
    return {f"{name}_token_id": token_id(header, key) for name, key in IDS.items()}


def token_id(header: Header, key: str) -> int | None:
    """Return the id of a special token; None where the file names none.

    An id of padding outside the vocabulary is none either: nothing here pads with it, and files have -1 there.

    Raises:
        ConfigError: it is no id of the file's tokens.
    """
    index, tokens = header.values.get(f"tokenizer.ggml.{key}_token_id"), header.values.get("tokenizer.ggml.tokens")
    if index is None:
        return None
    is_whole = isinstance(index, int) and not isinstance(index, bool)
    if is_whole and 0 <= index < (len(tokens) if isinstance(tokens, list) else 2**32 - 1):
        return int(index)
    if key == "padding":
        return None
    count = f"{len(tokens):,} tokens" if isinstance(tokens, list) else "no list of tokens"
    raise refusal(header, f"tokenizer.ggml.{key}_token_id={index!r:.40}, and it has {count}")


def end_ids(header: Header) -> list[int]:
    """Return the ids that end an answer: of the text, of a turn and of a message."""
    found = (token_id(header, name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(index for index in found if index is not None))


def require_every_tensor(header: Header, shapes: Mapping[str, tuple[int, ...]], *, used: Collection[str] = ()) -> None:
    """Require a file to have each tensor of a model in its shape, and no others.

    Args:
        shapes: of the model's parameters, under llama.cpp's names.
        used: further tensors that were read.

    Raises:
        ConfigError: one is missing, of another shape, or unknown.
    """
    for name, shape in shapes.items():
        found = header.tensors.get(name)
        if found is None or found.shape != shape:
            has = "nothing" if found is None else str(found.shape)
            raise refusal(header, f"it has {name} as {has}, and its sizes say {shape}")
    extra = sorted(header.tensors.keys() - shapes.keys() - set(used))
    if extra:
        raise refusal(header, f"{len(extra)} of its tensors are not known here, first {extra[0]:.60}")
