"""Random tiny models with an adapter, on a runtime and in transformers itself."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.frozen import build_frozen

TIED = "model.embed_tokens.weight"
LORA = LoraConfig(r=4, alpha=8.0, targets=["q_proj", "v_proj", "down_proj"])


def overrides(architecture: str, runtime: str) -> list[str]:
    """Weights of a size at which attention decides what comes next."""
    model = [f"model={architecture}", "model.size=tiny", "model.dtype=float32", f"hw.runtime={runtime}"]
    return [*model, "+model.tiny_arch.initializer_range=0.2"]


def prompts_of(*lengths: int, seed: int = 3) -> list[list[int]]:
    """Random prompts of these lengths."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 4000, (length,), generator=random).tolist() for length in lengths]


def changed_weights(source: HuggingFaceModel) -> dict[str, Tensor]:
    """A and B that are not zero; and a small embedding, or a tied head repeats the last token for ever."""
    random = torch.Generator().manual_seed(5)
    module, _ = describe(source, lora=LORA)
    shapes = {n: p.shape for n, p in module.named_parameters() if n.endswith((".lora_A", ".lora_B"))}
    drawn = {name: torch.randn(shape, generator=random) * 0.1 for name, shape in shapes.items()}
    (embedding,) = source.weights([TIED])
    return drawn | {TIED: embedding.tensor * 0.02}


def with_adapter(config: Config, runtime: Any) -> torch.nn.Module:
    """The model as task=generate has it."""
    source = HuggingFaceModel(config.model, seed=config.seed)
    return build_frozen(source, lora=LORA, trained=changed_weights(source), place=runtime.place)


def merged(config: Config, *, attention: str = "sdpa") -> Any:
    """transformers' own model with the same weights and W + 2 B A in the place of adapted ones."""
    source = HuggingFaceModel(config.model, seed=config.seed)
    plain = copy.deepcopy(source.config)
    plain._attn_implementation = attention
    theirs: Any = AutoModelForCausalLM.from_config(plain, dtype=torch.float32).eval()
    own = dict(theirs.named_parameters())
    trained = changed_weights(source)
    with torch.no_grad():
        for weight in source.weights(list(own)):
            own[weight.name].copy_(weight.tensor)
        own[TIED].copy_(trained.pop(TIED))
        for name in [name for name in trained if name.endswith("lora_A")]:
            stem = name.removesuffix("lora_A")
            own[f"{stem}weight"] += 2 * trained[f"{stem}lora_B"] @ trained[name]
    theirs.generation_config.eos_token_id = None
    return theirs


def generated(theirs: Any, prompts: Sequence[list[int]], *, new: int, **how: Any) -> list[list[int]]:
    """What transformers' generate writes, each prompt for itself and without padding."""
    return [
        theirs.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0, **how)[
            0, len(ids) :
        ].tolist()
        for ids in prompts
    ]
