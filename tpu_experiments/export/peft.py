"""The adapter in PEFT's layout: `adapter_model.safetensors` and `adapter_config.json`.

PEFT loads it with `PeftModel.from_pretrained(base, folder)`; names are Hugging Face's with PEFT's prefix and suffix.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import LoraConfig
from tpu_experiments.io import paths

PREFIX = "base_model.model."
ADAPTER_FILE = "adapter_model.safetensors"


def write_adapter(
    folder: str,
    *,
    parameters: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    lora: LoraConfig,
    base_path: str,
    revision: str | None,
) -> dict[str, str]:
    """Write the adapter of host tensors `parameters` (`<module>.lora_A`, `<module>.lora_B`).

    Args:
        initial: PiSSA's A and B at the start. The adapter is meant for the unreduced base, so the export is
            B A - B0 A0, of rank 2 r.

    Returns:
        SHA-256 of the tensors' file by its name.
    """
    tensors = dict(parameters)
    r, alpha = lora.r, lora.alpha
    if initial:
        tensors = {name: _with_initial(name, t, initial[name].to(t)) for name, t in tensors.items()}
        r = 2 * lora.r
        alpha = lora.alpha * (2 if lora.scaling == "alpha_over_r" else math.sqrt(2))
    layout = {f"{PREFIX}{name}.weight": t.detach().contiguous() for name, t in tensors.items()}
    paths.make_dirs(folder)
    content = save(layout, metadata={"format": "pt"})
    paths.write_bytes_atomic(paths.join(folder, ADAPTER_FILE), content)
    config = adapter_config(
        lora, r=r, alpha=alpha, modules=_modules(parameters), base_path=base_path, revision=revision
    )
    paths.write_text_atomic(paths.join(folder, "adapter_config.json"), json.dumps(config, indent=2))
    return {ADAPTER_FILE: hashlib.sha256(content).hexdigest()}


UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "lora_bias")


def read_adapter_config(folder: str, lora: LoraConfig) -> LoraConfig:
    """`lora` with rank, scaling and targets of an adapter in PEFT's layout; B starts at zero.

    Raises:
        ConfigError: there is none, or it has what `models/lora.py` has not.
    """
    place = paths.join(folder, "adapter_config.json")
    if not paths.exists(place):
        raise ConfigError(f"task.adapter={folder}; no adapter_config.json there; name the folder of a PEFT adapter.")
    values = json.loads(paths.read_text(place))
    given = [name for name in UNSUPPORTED if values.get(name)]
    if values.get("peft_type") != "LORA" or values.get("bias", "none") != "none":
        given.append(f"peft_type={values.get('peft_type')} with bias={values.get('bias')}")
    targets = values.get("target_modules")
    if isinstance(targets, str):
        given.append(f"target_modules={targets!r}, a pattern")
    if given:
        raise ConfigError(
            f"task.adapter={folder}; it has {', '.join(given)}, which is not supported; merge it into the base model "
            "with PEFT (merge_and_unload), and evaluate that with model.path=FOLDER task.adapter=none."
        )
    scaling = "alpha_over_sqrt_r" if values.get("use_rslora") else "alpha_over_r"
    rank, alpha = int(values["r"]), float(values["lora_alpha"])
    return replace(lora, r=rank, alpha=alpha, scaling=scaling, targets=sorted(targets), init="b_zero", dropout=0.0)


def read_adapter(folder: str) -> dict[str, Tensor]:
    """The tensors of an adapter in PEFT's layout, named as the modules are.

    Raises:
        ConfigError: there is no such file, or it is no safetensors file.
    """
    place = paths.join(folder, ADAPTER_FILE)
    try:
        return read_layout(load(paths.read_bytes(place)), initial={})
    except FileNotFoundError as error:
        raise ConfigError(f"task.adapter={folder}; it holds no {ADAPTER_FILE}; save the adapter as one.") from error
    except SafetensorError as error:
        raise ConfigError(f"{place}; it is damaged ({error}); restore it.") from error


def read_layout(layout: Mapping[str, Tensor], *, initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that `write_adapter` made these tensors of."""
    found = {key.removeprefix(PREFIX).removesuffix(".weight"): tensor for key, tensor in layout.items()}
    for name, start in initial.items():
        rank = start.shape[0] if name.endswith("lora_A") else start.shape[1]
        found[name] = (found[name][:rank] if name.endswith("lora_A") else found[name][:, :rank]).contiguous()
    return found


def adapter_config(
    lora: LoraConfig, *, r: int, alpha: float, modules: list[str], base_path: str, revision: str | None
) -> dict[str, Any]:
    """The fields of PEFT's LoraConfig that define the adapter; the rest keep PEFT's defaults."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "revision": revision,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.scaling == "alpha_over_sqrt_r",
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _modules(parameters: Mapping[str, Tensor]) -> list[str]:
    """Full names of the adapted modules: exact for every choice of targets, globs included."""
    return sorted({name.rpartition(".")[0] for name in parameters})


def _with_initial(name: str, tensor: Tensor, start: Tensor) -> Tensor:
    if name.endswith("lora_A"):
        return torch.cat([tensor, start], dim=0)
    return torch.cat([tensor, -start], dim=1)
