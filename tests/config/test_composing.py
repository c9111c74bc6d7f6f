"""What the tests compose from copies is what Hydra composes."""

from collections.abc import Sequence

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from tests.config.composing import CONF, composition
from tpu_experiments.config.compose import config_of


@pytest.mark.parametrize(
    "words",
    [
        ["model=qwen05b", "lora.r=3", "lora=all_linear_r8", "lora.dropout=0.1", "hw=v6e8"],
        ["experiment=mistral7b_ro", "debug=smoke", "trainer.max_stage_steps=4", "lora.targets=[q_proj]"],
        ["data=[sample_text,sample_chat]", "++data.sample_text.fields.text=body", "~curriculum.stages.chat"],
        ["model.arch={hidden_size: 8}", "sample.prompts=[a,b]", "++trainer.options.note=${name}"],
        ["hydra.job.name=x", "model=tiny"],
    ],
)
def test_values_over_copies_of_files_are_hydras_own(words: Sequence[str]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", overrides=list(words))
        for _ in range(2):
            found = composition(words)
            assert repr(found) == repr(whole)
            assert found._metadata.flags == whole._metadata.flags
            found.seed = 77  # of this copy alone


@pytest.mark.parametrize("word", ["lora.rnak=8", "model=mistrl7b", "seed=1,2", "~lora.nothing", "lora=[a", "lora.r=x"])
def test_what_is_refused_has_hydras_own_message(word: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(HydraException) as whole:
            compose("config", overrides=[word])
        with pytest.raises(HydraException) as found:
            composition([word])
    assert (type(found.value), str(found.value)) == (type(whole.value), str(whole.value))


@pytest.mark.parametrize("text", ["1E5", "1.10", "true", "12e5", "1_000", "007", "'1E5'"])
def test_a_text_that_looks_like_a_number_stays_as_it_was_typed(text):
    assert config_of(["~local", f"name={text}", f"model.revision={text}"]).name == text.strip("'")
    assert config_of(["~local", "model.revision=12e5"]).model.revision == "12e5"
    assert config_of(["~local", "optim.lr=1e-4"]).optim.lr == 1e-4


def test_a_model_that_is_named_brings_its_own_tokenizer(tmp_path):
    """The default preset's would be trained with, silently."""

    def tokenizer_of(*words):
        return config_of(["data=sample_text", "trainer.seq_len=128", *words]).model.tokenizer_path

    own, old, bare = tmp_path / "own", tmp_path / "old", tmp_path / "bare"
    for folder in (own, old, bare):
        folder.mkdir()
    (own / "tokenizer.json").write_text("{}")
    (old / "vocab.json").write_text("{}")
    shipped = tokenizer_of()
    assert shipped == "tpu_experiments/samples/stories/tokenizer"
    assert tokenizer_of(f"model.path={own}") is None
    assert tokenizer_of(f"model.path={old}") is None
    assert tokenizer_of("model.path=someone/model") is None
    assert tokenizer_of(f"model.path={bare}") == shipped, "it has none"
    assert tokenizer_of(f"model.path={own}", f"model.tokenizer_path={shipped}") == shipped
