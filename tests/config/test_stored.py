"""A run's config read back under another command's machine; one that is damaged is told in a sentence."""

import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import DATA_KEYS, MODEL_KEYS, UNSET, config_of_run, flatten, identity, require_same
from tpu_experiments.storage.run_folder import config_yaml

RECIPES = (["lora=all_linear_r8", "optim=adafactor"], ["experiment=mistral7b_ro", "debug=smoke"], ["model=qwen05b"])


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_what_the_run_was_trained_with_comes_back_and_the_machine_stays(recipe):
    trained, command = composed(*recipe), composed("task=evaluate", "hw.runtime=eager", "hw.num_threads=3")
    found = config_of_run(command, text=config_yaml(trained), place="config.yaml")
    theirs, ours, own = flatten(trained), flatten(found), flatten(command)
    for key, value in ours.items():
        group = key.partition(".")[0]
        assert value == (theirs if group in MODEL_KEYS + DATA_KEYS else own)[key], key
    assert type(found.model) is type(trained.model)
    assert all(type(source).__module__.startswith("tpu_experiments") for source in found.data.values())


def test_other_keys_can_be_left_to_the_command():
    trained, command = composed("data=sample_text"), composed("task=evaluate", "data=sample_chat")
    found = config_of_run(command, text=config_yaml(trained), place="config.yaml", keys=MODEL_KEYS)
    assert list(found.data) == ["sample_chat"]


@pytest.mark.parametrize(
    "text", ["", "model: [", "just words", "model: {name: x}", "{}"], ids=["empty", "cut", "words", "part", "nothing"]
)
def test_a_damaged_file_is_reported_in_a_sentence(text):
    with pytest.raises(ConfigError, match=r"place\.yaml; it is not what this program writes"):
        config_of_run(composed("task=evaluate"), text=text, place="place.yaml")


def test_a_key_of_another_version_is_named():
    text = config_yaml(composed()).replace("lora:\n", "lora:\n  rank_of_old: 3\n")
    with pytest.raises(ConfigError, match="rank_of_old"):
        config_of_run(composed("task=evaluate"), text=text, place="place.yaml")


def test_keys_of_a_source_that_say_nothing_are_no_part_of_a_run():
    known = identity(composed("data=sample_text"))
    names = {key: key.rpartition(".")[2] for key in known}
    assert not [key for key, name in names.items() if name in UNSET and UNSET[name] == known[key]]
    changed = identity(composed("data=sample_text", "data.sample_text.quoting=none"))
    assert changed == known | {"data.sample_text.quoting": "none"}


COMPUTES = (
    ("seed=8", "seed"),
    ("optim.lr=3e-4", "optim.lr"),
    ("lora.r=3", "lora.r"),
    ("lora.dropout=0.5", "lora.dropout"),
    ("model.dtype=bfloat16", "model.dtype"),
    ("trainer.seq_len=64", "trainer.seq_len"),
    ("trainer.global_batch_rows=24", "trainer.global_batch_rows"),
    ("data.sample_text.named_splits=ignore", "data.sample_text.named_splits"),
    ("schedule.warmup_steps=3", "schedule.warmup_steps"),
)
"""Overrides that change what is computed, and the key that names each."""
COMPUTES_NOT = (
    *("hw.num_threads=3", "checkpoint.every_steps=7", "trainer.log_every_steps=3", "logger=jsonl"),
    *(
        "model.row_tokens=256",
        "data.sample_text.p95_tokens=30",
        "model.step_tokens=512",
    ),  # its rows are its own already
)
TINY = ("model=tiny", "data=sample_text", "trainer.seq_len=128", "trainer.global_batch_rows=16")


@pytest.mark.parametrize(("override", "key"), COMPUTES)
def test_another_computation_is_no_resume_of_a_run(override, key):
    with pytest.raises(ConfigError, match=rf"was made with (.*; )?{key}="):
        require_same(identity(composed(*TINY)), composed(*TINY, override), folder="outputs/run")


@pytest.mark.parametrize("override", COMPUTES_NOT)
def test_a_run_resumes_with_what_changes_no_number(override):
    require_same(identity(composed(*TINY)), composed(*TINY, override), folder="outputs/run")
