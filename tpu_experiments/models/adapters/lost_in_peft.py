"""Adapters that PEFT would read as those of other modules."""

from transformers import PreTrainedModel, conversion_mapping
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

OF_EXPERTS = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
"""Targets that PEFT 0.21 takes for those of experts, by the model type whose conversions transformers uses."""


def lost_in_peft(model: PreTrainedModel, paths: list[str]) -> list[str]:
    """Return the modules whose adapters PEFT would read as those of other modules, and leave out.

    PEFT converts adapters as transformers 5 converts checkpoints: a dense `down_proj` beside experts is a target of
    theirs for it, and a name in the new form is renamed once more (Laguna's `shared_experts`).
    """
    kind = model.config.model_type
    like = {**getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {}), "mixtral": "mixtral"}.get(kind)
    moved = OF_EXPERTS.get(str(like), ())
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]

    def is_renamed(path: str) -> bool:
        renamed, _ = rename_source_key(f"{path}.lora_A.weight", renamings, [])
        return not f"{path}.lora_A.weight".endswith(renamed)

    return [path for path in paths if path.rpartition(".")[2] in moved or is_renamed(path)]
