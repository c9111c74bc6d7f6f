"""Which runs can share a program with others (training/pack.py)."""

from tpu_experiments.config.model_schema import has_patterns
from tpu_experiments.config.schema import Config

DRAWN_BY_SHAPE = ("b_zero", "a_zero")
"""Values of `lora.init` for which the base stays as it is, and adapters do not depend on its weights."""


def why_alone(config: Config) -> str | None:
    """Return why a point shares its program with no other; None where it can."""
    lora, hw = config.lora, config.hw
    if config.task.name not in ("train", "plan"):
        return f"task={config.task.name} trains nothing"
    if lora.r == 0:
        return "lora.r=0 trains all weights"
    if lora.dora:
        return "lora.dora=true needs the base's weights for each adapter"
    if has_patterns(lora):
        key = "rank_pattern" if lora.rank_pattern else "alpha_pattern"
        return f"lora.{key} gives each module a scale of its own, and a pack has one for each adapter"
    if lora.modules_to_save:
        return f"lora.modules_to_save=[{','.join(lora.modules_to_save)}] trains more than adapters"
    if lora.target_parameters:
        return f"lora.target_parameters=[{','.join(lora.target_parameters)}] gives each expert an adapter of its own"
    if lora.trainable_token_indices:
        return "lora.trainable_token_indices trains more than adapters"
    if lora.init not in DRAWN_BY_SHAPE:
        return f"lora.init={lora.init} depends on the base's weights"
    if config.model.linear != "plain":
        return f"model.linear={config.model.linear} trains more than adapters"
    if config.objective.why_alone is not None:
        return config.objective.why_alone
    if hw.parallel == "spawn" or hw.num_hosts > 1:
        return f"hw.parallel={hw.parallel} on {hw.num_hosts} hosts trains in several processes"
    return None
