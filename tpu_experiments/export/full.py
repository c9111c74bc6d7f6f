"""A whole model in Hugging Face's layout: the base of a random-weight run, or a fully trained model."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.io import paths

MODEL_FILE = "model.safetensors"


def write_model(
    folder: str,
    *,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    architecture: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Write host `tensors` under Hugging Face's names with config and tokenizer.

    Args:
        architecture: class name, for `architectures` in config.json.

    Returns:
        SHA-256 of the tensors' file.
    """
    layout = {name: t.detach().to(dtype).contiguous() for name, t in dict(tensors).items()}
    values = config.to_diff_dict() | {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    paths.make_dirs(folder)
    content = save(layout, metadata={"format": "pt"})
    paths.write_bytes_atomic(paths.join(folder, MODEL_FILE), content)
    paths.write_text_atomic(paths.join(folder, "config.json"), json.dumps(values, indent=2))
    _write_tokenizer(folder, tokenizer)
    return hashlib.sha256(content).hexdigest()


def _write_tokenizer(folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with tempfile.TemporaryDirectory() as local:
        tokenizer.save_pretrained(local)
        settings = Path(local) / "tokenizer_config.json"
        values = json.loads(settings.read_text(encoding="utf-8"))
        if values.get("tokenizer_class") == "TokenizersBackend":
            values["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows as well as 5
        settings.write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
        for file in sorted(Path(local).iterdir()):
            paths.write_bytes_atomic(paths.join(folder, file.name), file.read_bytes())
