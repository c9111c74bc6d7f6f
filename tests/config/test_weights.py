"""Weights of sources: which stages draw by them, and which settings are refused."""

from tests.config.composing import composed, refusal
from tpu_experiments.config.curriculum import resolve_stages


def test_weights_are_of_all_or_none_of_a_stages_sources() -> None:
    both = ("data=[sample_text,sample_chat]", "curriculum=single")
    stage = resolve_stages(composed(*both, "data.sample_text.weight=0.3", "data.sample_chat.weight=0.7"))[0]
    assert (stage.sources, stage.weights) == (("sample_text", "sample_chat"), (0.3, 0.7))
    said = refusal(*both, "data.sample_text.weight=0.3")
    assert "data.sample_text.weight=0.3; curriculum.stages.main takes sample_text, sample_chat, and sample_chat" in said
    assert "has no weight; give every source of a stage one, or none." in said
    assert "must be above 0" in refusal(*both, "data.sample_text.weight=0", "data.sample_chat.weight=1")


def test_weights_that_no_stage_would_go_by_are_refused() -> None:
    weights = ("data.sample_text.weight=0.3", "data.sample_chat.weight=0.7")
    said = refusal("data=[sample_text,sample_chat]", *weights)
    assert "data.sample_text.weight=0.3; no stage of curriculum=text_then_chat draws from sample_text beside" in said
    said = refusal("data=[sample_text,sample_chat]", "curriculum=single", "loader.order=written", *weights)
    assert "epochs are written with every row once; use loader.order=permutation." in said


def test_replayed_sources_are_drawn_by_weights_too() -> None:
    weights = ("data.sample_text.weight=1", "data.uk_law.weight=3")
    sources = "data=[sample_text,uk_law,sample_chat]"
    stages = (
        "+curriculum.stages.chat.replay_sources=[sample_text,uk_law]",
        "curriculum.stages.chat.sources=[sample_chat]",
    )
    config = composed(sources, *stages, "curriculum.stages.chat.replay=0.5", *weights)
    stage = resolve_stages(config)[-1]
    assert (stage.weights, stage.replay_weights) == ((), (1.0, 3.0))
