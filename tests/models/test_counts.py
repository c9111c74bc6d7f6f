"""Parameter counts of the three models, to the digit."""

import pytest

from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.build import describe

ALL = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
CASES = [
    ("mistral7b", 8, ALL, 20_971_520, 7_241_732_096, 224),
    ("mistral7b", 32, ALL, 83_886_080, 7_241_732_096, 224),
    ("mistral7b", 8, "[q_proj,v_proj]", 3_407_872, 7_241_732_096, 64),
    ("gemma3_270m", 8, ALL, 1_898_496, 268_098_176, 126),
    ("gemma3_270m", 32, ALL, 7_593_984, 268_098_176, 126),
    ("gemma3_270m", 8, "[q_proj,v_proj]", 368_640, 268_098_176, 36),
    ("qwen05b", 8, ALL, 4_399_104, 494_032_768, 168),
    ("qwen05b", 32, ALL, 17_596_416, 494_032_768, 168),
    ("qwen05b", 8, "[q_proj,v_proj]", 540_672, 494_032_768, 48),
]


@pytest.mark.xla
@pytest.mark.parametrize(("model", "r", "targets", "trainable", "base", "adapters"), CASES)
def test_counts(make_config, model, r, targets, trainable, base, adapters):
    config = make_config(f"model={model}", "model.init=random", f"lora.r={r}", f"lora.targets={targets}")
    _, report = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    assert (report.trainable, report.total - report.trainable, report.adapters) == (trainable, base, adapters)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("mistral7b", 7_241_732_096),
        ("qwen05b", 494_032_768),
        ("llama_mini", 114_150_144),
        ("llama3_8b", 8_030_261_248),
    ],
)
def test_rank_zero_trains_every_weight(make_config, model, base):
    config = make_config(f"model={model}", "model.init=random", "lora=none")
    _, report = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    assert (report.trainable, report.total, report.adapters) == (base, base, 0)
