"""A model whose documents change one another, or that looks ahead, is refused before its first run; others are not.

Whether text may be written with a cache is found in the same way."""

import pytest
import torch

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.families import mlstm
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes import forward
from tpu_experiments.models.passes.generation import slot_masks
from tpu_experiments.models.sources.isolation import (
    MOST_PARAMETERS,
    decodes_with_cache,
    require_isolation,
    require_left_padding,
    small_copy,
)

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def source_of(model_type: str, *, attention: str = "sdpa", **values: object) -> HuggingFaceModel:
    """With the sizes of transformers' default config, which are those of a real model."""
    arch = {"model_type": model_type, **values}
    return HuggingFaceModel(ModelConfig(name="x", path="", init="random", attention=attention, arch=arch), seed=0)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        ("llama", "flash"),
        ("mixtral", "flash"),
        ("gemma2", "eager"),
        ("gemma3_text", "flash"),
        ("gpt2", "sdpa"),
        ("gpt_oss", "eager"),
        ("falcon", "eager"),
        ("smollm3", "sdpa"),
    ],
)
def test_decoders_pass(model_type, attention, caplog):
    require_isolation(source_of(model_type, attention=attention), is_packed=True)
    assert not caplog.records  # an unchecked model is a warning


def test_a_recurrent_model_is_refused_where_rows_are_packed(caplog, monkeypatch):
    source = source_of("xlstm")
    monkeypatch.setattr("tpu_experiments.models.huggingface.OWN_CLASSES", {})  # transformers' class as it is
    with pytest.raises(
        ConfigError, match=r"xlstm a document changes the logits of the next .* set prepare.packing=pad"
    ):
        require_isolation(source, is_packed=True)
    require_isolation(source, is_packed=False)
    assert not caplog.records


def test_an_xlstm_that_does_not_end_a_document_is_refused(monkeypatch):
    def over_one_document(cell, segments_BT, *, eps):
        return mlstm.over_rows(cell, torch.ones_like(segments_BT), eps=eps)

    monkeypatch.setattr("tpu_experiments.models.families.xlstm.over_rows", over_one_document)
    with pytest.raises(ConfigError, match="xlstm a document changes the logits of the next one"):
        require_isolation(source_of("xlstm"), is_packed=True)


def test_an_encoder_is_refused():
    with pytest.raises(ConfigError, match="bert are not those that it computes for a document alone"):
        require_isolation(source_of("bert", attention="eager"), is_packed=False)
    require_isolation(source_of("bert", attention="eager", is_decoder=True), is_packed=True)


def test_a_model_that_ignores_what_flash_is_given_is_refused():
    with pytest.raises(ConfigError, match="mpt"):
        require_isolation(source_of("mpt", attention="flash"), is_packed=True)
    require_isolation(source_of("mpt", attention="eager"), is_packed=True)


@pytest.mark.parametrize("is_packed", [True, False])
def test_masks_that_let_tokens_look_ahead_are_found(is_packed, monkeypatch):
    monkeypatch.setattr(
        forward, "causal_mask", lambda segments, window: segments[:, None, None] == segments[:, None, :, None]
    )
    with pytest.raises(ConfigError, match="changes the logits of those before it"):
        require_isolation(source_of("llama"), is_packed=is_packed)


def causal_of_whole_rows(segments):
    length = segments.shape[1]
    return torch.ones(length, length).tril().bool().expand(len(segments), 1, length, length)


def test_masks_that_leave_documents_together_are_found(monkeypatch):
    monkeypatch.setattr(forward, "causal_mask", lambda segments, window: causal_of_whole_rows(segments))
    with pytest.raises(ConfigError, match="a document changes the logits of the next one"):
        require_isolation(source_of("llama"), is_packed=True)
    require_isolation(source_of("llama"), is_packed=False)


def test_what_passed_is_not_checked_again(empty_cache, monkeypatch, caplog):
    source = source_of("llama")
    require_isolation(source, is_packed=True)
    assert len(list((empty_cache / "tpu_experiments" / "isolation").iterdir())) == 1
    without_copies(monkeypatch)
    require_isolation(source, is_packed=True)
    assert not caplog.records
    with pytest.raises(ConfigError, match="cannot be checked"):
        require_isolation(source_of("llama", rms_norm_eps=1e-3), is_packed=True)


def without_copies(monkeypatch) -> None:
    """Neither copy can be made, as of a class that ties its widths in a way of its own."""
    for copied in ("small_copy", "shallow_copy"):
        monkeypatch.setattr(f"tpu_experiments.models.sources.isolation.{copied}", lambda config: config.no_such_value)


def test_what_cannot_be_checked_is_refused_for_packed_rows_and_reported_for_others(monkeypatch, empty_cache, caplog):
    without_copies(monkeypatch)
    with pytest.raises(ConfigError, match=r"llama, which computes no small copy .* set prepare.packing=pad"):
        require_isolation(source_of("llama"), is_packed=True)
    require_isolation(source_of("llama"), is_packed=False)
    assert "was not checked" in caplog.text
    assert not (empty_cache / "tpu_experiments").exists(), "nothing passed"


def test_a_copy_that_stays_wide_is_not_built(monkeypatch):
    monkeypatch.setattr("tpu_experiments.models.sources.isolation.small_copy", lambda config: config)
    with pytest.raises(ConfigError, match=r"the copy has [\d,]{10,} parameters"):
        require_isolation(source_of("llama", hidden_size=16384, intermediate_size=53248), is_packed=True)
    assert MOST_PARAMETERS < 10**9


def test_a_class_that_ties_its_widths_is_checked_with_them(monkeypatch):
    monkeypatch.setattr("tpu_experiments.models.sources.isolation.small_copy", lambda config: config.no_such_value)
    small = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 40}
    require_isolation(source_of("llama", num_hidden_layers=30, **small), is_packed=True)
    monkeypatch.setattr(forward, "causal_mask", lambda segments, window: causal_of_whole_rows(segments))
    with pytest.raises(ConfigError, match="a document changes the logits of the next one"):
        require_isolation(source_of("llama", num_hidden_layers=31, **small), is_packed=True)


def test_what_a_model_computes_from_some_length_on_is_reached_by_the_copy():
    """Llama 4 scales queries by positions of the row, from 8,192 tokens on."""
    config = source_of("llama4_text", attention="eager").config
    assert config.floor_scale == 8192
    assert small_copy(config).floor_scale < 9
    assert small_copy(config).attention_chunk_size < 9
    with pytest.raises(ConfigError, match="a document changes the logits of the next one"):
        require_isolation(source_of("llama4_text", attention="eager"), is_packed=True)
    require_isolation(source_of("llama4_text", attention="eager", attn_temperature_tuning=False), is_packed=True)


@pytest.mark.parametrize("model_type", ["bloom", "xlm"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_class_that_takes_no_ready_masks_is_refused(model_type, is_packed):
    with pytest.raises(ConfigError, match=f"transformers' {model_type} does not compute with the masks and positions"):
        require_isolation(source_of(model_type, attention="eager"), is_packed=is_packed)


def test_padding_in_front_of_a_prompt_is_refused_where_it_changes_logits(empty_cache):
    with pytest.raises(ConfigError, match="marian computes other logits for a prompt with padding in front of it"):
        require_left_padding(source_of("marian", is_decoder=True))
    require_left_padding(source_of("llama", attention="flash"))
    require_left_padding(source_of("falcon", attention="sdpa"))  # its class has an attention of its own
    assert len(list((empty_cache / "tpu_experiments" / "isolation").iterdir())) == 2


def test_the_copy_has_every_kind_of_layer():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    copy = small_copy(source_of("gemma3_text", num_hidden_layers=18, layer_types=kinds * 3).config)
    assert copy.layer_types == kinds
    assert copy.num_hidden_layers == 6
    assert copy.sliding_window < 9


def test_the_copy_has_layers_with_and_without_rope():
    copy = small_copy(source_of("smollm3").config)
    assert copy.no_rope_layers == [1, 1, 1, 0]
    assert copy.num_hidden_layers == 4


def test_a_copy_may_keep_the_form_of_rope_and_the_width_of_a_head():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = source_of("phi3", rope_parameters={**rope, "original_max_position_embeddings": 4096}).config
    plain, own = small_copy(config), small_copy(config, keeps_rope=True)
    assert (plain.rope_parameters["rope_type"], own.rope_parameters["rope_type"]) == ("default", "longrope")
    assert plain.hidden_size // plain.num_attention_heads == 64
    assert own.hidden_size // own.num_attention_heads == config.hidden_size // config.num_attention_heads == 96
    assert (plain.max_position_embeddings, own.max_position_embeddings) == (64, config.max_position_embeddings)
    assert own.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("model_type", "values", "is_cached"),
    [
        ("llama", {"attention": "flash"}, True),
        ("gemma3_text", {"attention": "flash"}, True),
        ("gpt2", {}, True),
        ("xlstm", {}, True),
        ("marian", {"is_decoder": True}, False),  # positions from a row's first slot
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, False),  # states not known here
        ("falcon_h1", {}, False),
    ],
)
def test_what_a_cache_writes_is_what_passes_write_or_it_is_not_used(model_type, values, is_cached):
    source = source_of(model_type, **values)
    for _ in range(2):  # the second time as it is recorded
        assert decodes_with_cache(source) == is_cached


def test_a_cache_that_forgets_a_token_is_not_used(monkeypatch):
    def without_first(pads_B, *, slot, num_slots, module):
        return slot_masks(pads_B + 1, slot=slot, num_slots=num_slots, module=module)

    monkeypatch.setattr("tpu_experiments.models.passes.generation.slot_masks", without_first)
    assert not decodes_with_cache(source_of("llama"))
