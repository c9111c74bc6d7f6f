"""A GGUF file as a checkpoint of transformers: a folder in the cache, made once and compared with llama.cpp.

Weights are decoded one tensor at a time, into the data type of the file; those of quantised blocks into float16, whose
11 bits hold a block's scale. The folder counts once it has its name: it is made beside it, and compared with what
llama.cpp computes from the file before that.
"""

import fcntl
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as library_log

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.storage.gguf.files import Header, read_header
from tpu_experiments.storage.gguf.settings import (
    ROPE_FREQS,
    config_values,
    end_ids,
    gguf_name,
    refusal,
    require_every_tensor,
)
from tpu_experiments.storage.gguf.tokenizer import tokenizer_of

log = logging.getLogger(__name__)
SHARD_BYTES = 2**31
F32, F16, BF16 = 0, 1, 30
"""ggml's numbers of data types that are no blocks."""
TYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
LINES = (
    "Știință și tehnică: „țară”, «înțeles», ăâîșț ĂÂÎȘȚ; ŞŢşţ și ăsta are 2 500 de lei.",
    "  Two blanks,   three,    four \t tabs\t\tand an end  ",
    "In 2024 1,234,567.89 lei, 3.14159 and 1000000; ½ ≠ ⅓ …",
    "first\n\nsecond;\n\nthird).\r\n  fourth\n",
    "日本語のテキスト、中文文本、한국어 텍스트, нещо на Български, कार्य",
    "🚀 👩\u200d👩\u200d👧 naïve café — 😶\u200d🌫️",
    "    if x == 3.14159:\treturn [1, 22, 333]  # it's they'll O'Reilly'Sons I'VE",
    "https://example.org/a_b?c=d&e=%20f#g",
)
"""Texts that hold what tokenizers differ in."""
TEXT = "The capital of Romania is Bucharest. Water boils at 100 degrees, and two and two make four. Ana are mere."
MOST_APART = 0.05
"""Most nats by which the two models' distributions may differ, on average over the tokens of `TEXT`: llama.cpp rounds
the inputs of quantised products to 8 bits. A wrong order of heads or a wrong RoPE gives several nats."""


def make_checkpoint(file: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file to a folder, unless another process has written it meanwhile.

    Raises:
        ConfigError: the file cannot be read as a model, llama.cpp computes something else from it, or the disk is full.
    """
    _require_packages()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / "lock"):
            if not folder.exists():
                part = folder.with_name(f"{folder.name}.part")
                shutil.rmtree(part, ignore_errors=True)  # of a process that was ended
                part.mkdir()
                _make(file, part)
                part.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"model.path={file}; its checkpoint cannot be written to {folder} ({one_line(error)}); free some space, or "
            "`export XDG_CACHE_HOME=FOLDER` of a larger disk."
        ) from error


def _require_packages() -> None:
    try:
        import gguf  # noqa: F401
        import xllamacpp  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"model.path is a GGUF file, and {error.name} is not installed, which reads it; "
            "`pip install 'tpu_experiments[export]'`."
        ) from error


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time through; the lock of one that ends is free."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(file: Path, folder: Path) -> None:
    began, header = time.monotonic(), read_header(file)
    log.info("%s: decoding %d tensors (%.2f GiB)", file, len(header.tensors), header.nbytes / 2**30)
    tokenizer = tokenizer_of(header)
    tokenizer.save_pretrained(folder)
    freqs = _decoded(header, ROPE_FREQS).tolist() if ROPE_FREQS in header.tensors else None
    config = _config(header, freqs)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    names = {name: gguf_name(name, arch=header.values["general.architecture"]) for name in shapes}
    require_every_tensor(
        header,
        {names[name]: shape for name, shape in shapes.items()},
        used=() if freqs is None else (ROPE_FREQS,),
    )
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids(header)}), encoding="utf-8")
    _write_weights(header, folder, names=names, config=config)
    apart = _compared(file, folder, config=config)
    log.info("%s: read in %.1f s%s; kept in %s", file, time.monotonic() - began, apart, folder.with_suffix(""))


def _config(header: Header, freqs: list[float] | None) -> PretrainedConfig:
    values = config_values(header, freqs)
    kinds = {tensor.kind for tensor in header.tensors.values()}
    has_halves = kinds <= TYPES.keys() and BF16 not in kinds and F16 in kinds
    # Of quantised weights bfloat16 is what their models are trained in; float16 overflows in Gemma.
    dtype = torch.float32 if kinds == {F32} else torch.float16 if has_halves else torch.bfloat16
    try:
        config: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values, dtype=dtype)
    except Exception as error:  # each class checks its values in its own way
        raise refusal(header, f"transformers does not take its values ({one_line(error)})") from error
    return config


def _library() -> ModuleType:
    import gguf

    logging.getLogger("gguf").setLevel(logging.WARNING)
    return gguf


def _decoded(header: Header, name: str) -> Tensor:
    """Return a tensor of a file: values as they are, blocks as float16, or float32 where that would overflow.

    Raises:
        ConfigError: its data type is not known, or the file ends before it does.
    """
    gguf, stored = _library(), header.tensors[name]
    try:
        kind = gguf.GGMLQuantizationType(stored.kind)
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(stored.shape)
        length = count // block * nbytes
        if stored.start + length > header.nbytes:
            raise ConfigError(
                f"model.path={header.path}; it has {header.nbytes:,} bytes and {name} ends at byte "
                f"{stored.start + length:,}: it is cut off; download it again."
            )
        raw = np.fromfile(header.path, np.uint8, count=length, offset=stored.start)
        if stored.kind in TYPES:
            return torch.from_numpy(raw).view(TYPES[stored.kind]).reshape(stored.shape)
        rows = raw.reshape(*stored.shape[:-1], stored.shape[-1] // block * nbytes)
        whole = torch.from_numpy(gguf.quants.dequantize(rows, kind)).reshape(stored.shape)
    except ConfigError:
        raise
    except (ValueError, KeyError, NotImplementedError) as error:
        raise refusal(header, f"{name} is of ggml's data type {stored.kind}, which gguf does not decode") from error
    half = whole.half()
    return half if bool(half.isfinite().all()) else whole


def _weight(header: Header, name: str, stored: str, *, config: Any) -> Tensor:
    """Return a parameter, whose form in a file is what export/gguf.py writes."""
    tensor = _decoded(header, stored)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return tensor.float() - 1.0
    module = name.rpartition(".")[0]
    if config.model_type == "llama" and module.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
        pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
    return tensor


def _write_weights(header: Header, folder: Path, *, names: dict[str, str], config: PretrainedConfig) -> None:
    """Write safetensors of at most `SHARD_BYTES`, or of one tensor, and their index."""
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, stored in names.items():
        tensor = _weight(header, name, stored, config=config)
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > SHARD_BYTES:
            write()
        shard[name] = tensor
        total += tensor.nbytes
    write()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _compared(file: Path, folder: Path, *, config: PretrainedConfig) -> str:
    """Compare tokenizer and logits with llama.cpp's; return how far the logits are apart, for the log.

    Raises:
        ConfigError: llama.cpp cannot read the file, or gives something else.
    """
    from tpu_experiments.storage.gguf.llama_cpp import LlamaCppModel

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)  # tokenizer.json as it is
    try:
        theirs = LlamaCppModel(str(file))
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.path={file}; llama.cpp, with which it is compared, cannot read it ({one_line(error)}); "
            "`pip install 'tpu_experiments[export]'` has the release that it is compared with, or take another file."
        ) from error
    _require_same_tokens(file, tokenizer, theirs)
    ids = theirs.ids(TEXT)
    needed = 5 * sum(place.stat().st_size for place in folder.glob("*.safetensors")) // 2
    if needed > (free := psutil.virtual_memory().available):
        log.warning(
            "%s: its logits are not compared with llama.cpp's: %.1f GiB of host memory are needed, %.1f are free",
            file,
            needed / 2**30,
            free / 2**30,
        )
        return ""
    apart = _divergence(folder, theirs.log_probs(ids), ids)
    if not apart <= MOST_APART:
        raise ConfigError(
            f"model.path={file}; as it is read here the model computes something else than llama.cpp does from it "
            f"({apart:.3g} nats apart over {len(ids)} tokens, and rounding explains {MOST_APART}); name the checkpoint "
            "in safetensors that it was made of."
        )
    return f", {apart:.2g} nats from llama.cpp's ({theirs.name})"


def _require_same_tokens(file: Path, tokenizer: PreTrainedTokenizerFast, theirs: Any) -> None:
    for line in LINES:
        for adds in (False, True):
            own = list(tokenizer(line, add_special_tokens=adds)["input_ids"])
            if own != theirs.ids(line, adds=adds):
                raise ConfigError(
                    f"model.path={file}; as it is read here its tokenizer splits {line!r} otherwise than llama.cpp "
                    f"({own[:8]} and {theirs.ids(line, adds=adds)[:8]} ...); set model.tokenizer_path to the "
                    "tokenizer of the model, beside a checkpoint in safetensors."
                )


def _divergence(folder: Path, theirs_TV: Tensor, ids: list[int]) -> float:
    """Return the mean over tokens of KL(llama.cpp | here), nats, computed here in float32."""
    level, bars = library_log.get_verbosity(), library_log.is_progress_bar_enabled()
    library_log.set_verbosity_error()
    library_log.disable_progress_bar()
    try:
        how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        module = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **how)
    finally:
        library_log.set_verbosity(level)
        if bars:
            library_log.enable_progress_bar()
    with torch.no_grad():
        ours_TV = torch.log_softmax(module.eval()(torch.tensor([ids])).logits[0].float(), -1)
    return float((theirs_TV.exp() * (theirs_TV - ours_TV)).sum(-1).mean())
