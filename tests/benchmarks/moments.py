"""Bytes of optimizer state of the presets, and losses with 8-bit moments beside float32 ones on a tiny model.

    python -m tests.benchmarks.moments

State is counted from `init` on tensors without data. The tiny model (two layers 256 wide, float32, plain torch) reads
the same four batches again and again, 80 steps at a learning rate of 1e-3, so that its loss falls.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.config.composing import composed
from tests.training.tiny import Run, configured, random_batch
from tpu_experiments.models.adapters.lora import inject
from tpu_experiments.runtime.eager import EagerRuntime

MODELS = ("gemma3_270m", "qwen05b", "mistral7b")
ADAPTERS = ("lora=none", "lora=all_linear_r16")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")
NUM_STEPS, NUM_BATCHES = 80, 4


def main() -> None:
    """Print both tables."""
    print("| model | trained parameters | " + " | ".join(f"{name}, bytes each" for name in OPTIMIZERS) + " |")
    for model in MODELS:
        for adapters in ADAPTERS:
            print(f"| {model}, {adapters} | {' | '.join(state_of(model, adapters))} |")
    print("| tiny | " + " | ".join(f"loss of steps 1, 20, 40, 80 with {name}" for name in OPTIMIZERS[:2]) + " |")
    for adapters in ("lora=none", "lora=all_linear_r32"):
        print(f"| {adapters} | {' | '.join(losses_of(adapters, name) for name in OPTIMIZERS[:2])} |")


def state_of(model: str, adapters: str) -> list[str]:
    """Number of trained parameters, and bytes of state for each of them by optimizer."""
    config = composed(f"model={model}", adapters)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model.arch))
    if config.lora.r:
        inject(module, config.lora)
    trained = {n: p for n, p in module.named_parameters() if "lora_" in n or not config.lora.r}
    count, found = sum(p.numel() for p in trained.values()), []
    for name in OPTIMIZERS:
        state = configured(composed(f"model={model}", adapters, f"optim={name}"))(trained).init(trained)
        found.append(sum(t.nbytes for slots in state.values() for t in slots.values()) / count)
    return [f"{count:,}", *(f"{each:.3f}" for each in found)]


def losses_of(adapters: str, optimizer: str) -> str:
    """Training losses in nats per token."""
    config = composed(
        "model=mistral7b",
        "model.size=tiny",
        "model.tiny_arch.hidden_size=256",
        "model.dtype=float32",
        "hw.runtime=eager",
        adapters,
        f"optim={optimizer}",
    )
    run = Run(config, EagerRuntime(config.hw), updates=configured(config))
    losses = run.losses([random_batch(step % NUM_BATCHES) for step in range(NUM_STEPS)])
    return ", ".join(f"{losses[step - 1]:.4f}" for step in (1, 20, 40, 80))


if __name__ == "__main__":
    main()
