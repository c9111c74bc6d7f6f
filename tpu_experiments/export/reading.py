"""A LoRA adapter in PEFT's layout, this project's or another's, from a folder to tensors under the model's names."""

import json
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import LoraConfig
from tpu_experiments.export.peft import ADAPTER_FILE, read_layout
from tpu_experiments.io import paths

ADAPTER_CONFIG = "adapter_config.json"
"""Written after the tensors: where it is, they are whole."""
REFUSED = ("rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out", "modules_to_save")
"""Fields of PEFT that change what an adapter computes, or add to it; empty or false in a plain one."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on the host."""

    lora: LoraConfig
    """Rank, scale and targets."""
    tensors: dict[str, Tensor]
    """A and B of every adapted module."""
    base: str
    """What it names as its base."""


def read_adapter(folder: str) -> Adapter:
    """The adapter in a folder, local or remote.

    Raises:
        ConfigError: no adapter there, or one that is more than A and B.
    """
    try:
        config: dict[str, Any] = json.loads(paths.read_text(paths.join(folder, ADAPTER_CONFIG)))
        layout = load(paths.read_bytes(paths.join(folder, ADAPTER_FILE)))
        r, alpha = int(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}; no {ADAPTER_CONFIG} or no {ADAPTER_FILE} there; name the folder of a LoRA adapter that PEFT or "
            "this program wrote."
        ) from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{folder}; its adapter cannot be read ({error!r}); write or copy it again.") from error
    more = [f"{name}={config[name]}" for name in REFUSED if config.get(name)]
    more += [name for name in layout if not name.endswith((".lora_A.weight", ".lora_B.weight"))][:1]
    if config.get("peft_type") != "LORA" or more:
        raise ConfigError(
            f"{folder}; it is more than a plain LoRA adapter ({', '.join(more) or config.get('peft_type')}); merge it "
            "into its base with PEFT's merge_and_unload, save that, and give its folder as model.path or task.base."
        )
    tensors = read_layout(layout, initial={})
    targets = sorted({name.rpartition(".")[0] for name in tensors})
    scaling = "alpha_over_sqrt_r" if config.get("use_rslora") else "alpha_over_r"
    lora = LoraConfig(r=r, alpha=alpha, targets=targets, scaling=scaling)
    return Adapter(lora, tensors, base=str(config.get("base_model_name_or_path") or ""))
