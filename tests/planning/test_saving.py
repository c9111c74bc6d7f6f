"""What a step saves where no line of conf/tuned.yaml is, chosen by formulas: when, with how many rows, and when not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.config.composing import composed
from tests.hub import HubServer
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import with_lengths
from tpu_experiments.config.schema import Config
from tpu_experiments.planning import saving
from tpu_experiments.planning import tuned as table
from tpu_experiments.planning.analytic import largest_stage
from tpu_experiments.planning.stored_plans import sizes_of
from tpu_experiments.planning.tuned import tuned
from tpu_experiments.storage.run_folder import RunFolder, with_settings_of_run

REPOSITORY = Path(__file__).parents[2]
LLAMA = ("model=llama31_8b", "data=ultrachat_ro")
V6E8 = (*LLAMA, "hw=v6e8")


@pytest.fixture(autouse=True)
def no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a line for Llama on v6e8."""
    monkeypatch.setattr(table, "lines", lambda: ())


def settled_of(*words: str) -> Config:
    return with_lengths(composed(*words), None)


def choice(config: Config) -> tuple[str, int | None]:
    return config.model.remat, config.trainer.micro_batch_rows


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("hw=v6e8",), ("save_dots", 1)),
        (("hw=v5p-8",), ("save_dots", None)),
        (("hw=v5e8",), ("layer_inputs", None)),
        (("hw=v6e8", "trainer.micro_batch_rows=2"), ("layer_inputs", 2)),
        (("hw=v6e8", "trainer.micro_batch_rows=1"), ("save_dots", 1)),
        (("hw=v6e8", "model.remat=save_dots"), ("save_dots", 1)),
        (("hw=v6e8", "lora.r=64"), ("save_dots", 1)),
        (("hw=v6e8", "lora.dora=true"), ("save_dots", 1)),
        (("hw=v6e8", "trainer.seq_len=8192"), ("layer_inputs", None)),
        (("hw=v6e8", "trainer.seq_len=1024"), ("save_dots", 4)),
    ],
)
def test_the_most_rows_that_fit_with_every_projection_saved(words, expected) -> None:
    """Llama 3.1 8B on v6e8 was compiled: 13,478 tokens/s a chip with one row, 10,049 with two of `layer_inputs`."""
    assert choice(tuned(settled_of(*LLAMA, *words))) == expected


LARGE = ("hw=v5e8", "model.micro_tokens=32768", "trainer.global_batch_rows=64")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("layer_inputs", 4)),
        (("model.remat=layer_inputs",), ("layer_inputs", 4)),
        (("model.remat=save_attention",), ("save_attention", 2)),
        (("trainer.micro_batch_rows=8",), ("layer_inputs", 8)),
        (("lora.r=1024",), ("layer_inputs", None)),
    ],
)
def test_fewer_rows_at_once_where_those_of_the_model_do_not_fit(words, expected) -> None:
    """Eight rows of Llama 3.1 8B on a v5e-8 are put at 17.7 GiB, four at 11.0."""
    assert choice(tuned(settled_of(*LLAMA, *LARGE, *words))) == expected


def test_a_preset_that_saves_projections_saves_fewer_of_a_larger_model() -> None:
    larger = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 48, "num_attention_heads": 32}
    arch = "model.arch={" + ",".join(f"{key}:{value}" for key, value in larger.items()) + "}"
    assert choice(tuned(settled_of("model=qwen05b", "data=ultrachat_ro", "hw=v5e8"))) == ("save_dots", None)
    assert choice(tuned(settled_of("model=qwen05b", "data=ultrachat_ro", "hw=v5e8", arch))) == ("layer_inputs", None)


@pytest.fixture
def uncounted(tmp_path: Path) -> str:
    """A folder with a config whose sizes no formula knows."""
    CONFIG_MAPPING["nemotron"]().save_pretrained(tmp_path / "nemotron")
    return f"model.path={tmp_path / 'nemotron'}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "layer_inputs"),
        (("model.init=random",), "save_dots"),
        (("model.remat=save_attention",), "save_attention"),
        (("tuned=off",), "save_dots"),
        (("hw=cpu",), "save_dots"),
    ],
)
def test_what_a_preset_saves_is_not_for_another_model_without_formulas(words, expected, uncounted, caplog) -> None:
    caplog.set_level("INFO")
    config = settled_of("model=qwen05b", "data=ultrachat_ro", "hw=v6e8", uncounted, *words)
    assert choice(tuned(config)) == (expected, None)
    assert ("the save_dots of model=qwen05b is for its own sizes" in caplog.text) == (expected == "layer_inputs")


def test_what_is_named_stays_for_another_model_too(uncounted, monkeypatch) -> None:
    monkeypatch.setattr(saving, "given", lambda config: {"model.remat"})
    config = settled_of("model=qwen05b", "data=ultrachat_ro", "hw=v6e8", uncounted)
    assert tuned(config) == config


def test_a_model_of_the_hub_has_its_own_sizes_and_not_those_of_the_preset(tmp_path) -> None:
    """Its config.json is fetched, as for task=plan."""
    arch = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "config.json").write_text(json.dumps(arch))
    code = (
        "import json; from tests.config.composing import composed; "
        "from tpu_experiments.planning.stored_plans import sizes_of; "
        "print(json.dumps([sizes_of(composed('model=qwen05b', f'model.path={path}').model) for path in "
        "('org/set', 'org/other')]))"
    )
    with HubServer(tmp_path / "set") as hub:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=os.environ | hub.environment(tmp_path / "home"),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert json.loads(done.stdout) == [arch, None]
    assert sizes_of(composed("model=qwen05b").model)["num_hidden_layers"] == 24


def test_what_is_chosen_fits_and_the_next_number_of_rows_does_not() -> None:
    found = tuned(settled_of(*V6E8, "trainer.seq_len=1024"))
    more = replace(found, trainer=replace(found.trainer, micro_batch_rows=2 * found.trainer.micro_batch_rows))
    totals = [largest_stage(each, each.model.arch, resolve_stages(each))[1].total for each in (found, more)]
    assert totals[0] * saving.MARGIN + saving.BESIDE_GIB <= 31.25 < totals[1] * saving.MARGIN + saving.BESIDE_GIB


def test_the_stage_with_the_longest_rows_has_to_fit() -> None:
    longer = ("curriculum=single", "curriculum.stages.main.seq_len=8192", "trainer.seq_len=1024")
    assert choice(tuned(settled_of(*V6E8, *longer)))[0] == "layer_inputs"


def test_rows_are_not_cut_to_a_few_tokens(monkeypatch) -> None:
    monkeypatch.setattr(saving, "FEWEST_TOKENS", 8192)
    assert choice(tuned(settled_of(*V6E8))) == ("layer_inputs", None)


@pytest.mark.parametrize(
    "words",
    [
        ("tuned=off",),
        ("model.remat=none",),
        ("model.remat=save_attention",),
        ("model.saved=[q_proj]",),
        ("model.stack=unrolled",),
        ("model.size=tiny",),
        ("hw=cpu",),
        ("hw=h100",),
        ("objective=kto", "data=ultrafeedback_binarized", "curriculum=single"),
        ("objective=distillation",),
        ("objective=grpo", "reward=exact", "curriculum=single"),
        (r"+lora.rank_pattern={layers\.1\..*: 48}",),
        ("model.base=nf4",),
        ("model.linear=bitnet", "lora=none"),
        ("model=qwen35_08b", "hw=v6e8"),
        ("model=gemma4_e2b", "hw=v6e8"),
    ],
)
def test_what_formulas_do_not_hold_for_stays_as_configured(words) -> None:
    config = settled_of(*V6E8, *words)
    assert tuned(config) == config


@pytest.mark.parametrize("group", ["model", "trainer"])
def test_another_class_has_no_formula(group) -> None:
    config = settled_of(*V6E8)
    config = replace(config, **{group: replace(getattr(config, group), _target_="my_lab.Own")})
    assert tuned(config) == config


@pytest.mark.parametrize(
    "words", [("objective=dpo", "data=ultrafeedback_binarized", "curriculum=single"), ("model.base=int8",)]
)
def test_steps_that_cost_what_one_of_next_tokens_does(words) -> None:
    assert tuned(settled_of(*LLAMA, "hw=v5p-8", *words)).model.remat == "save_dots"


def test_a_policy_named_on_the_command_line_stays_where_it_is_the_shipped_one(monkeypatch) -> None:
    monkeypatch.setattr(saving, "given", lambda config: {"model.remat"})
    config = settled_of(*V6E8)
    assert tuned(config) == config


def test_a_continued_run_keeps_what_it_saves_and_its_rows(tmp_path) -> None:
    words = (*V6E8, f"output_dir={tmp_path}")
    first = tuned(settled_of(*words, "name=first"))
    RunFolder(str(tmp_path), "first").create(first)
    again = with_lengths(with_settings_of_run(composed(*words, "name=first")), None)
    assert choice(tuned(again, is_begun=True)) == choice(first) == ("save_dots", 1)
    RunFolder(str(tmp_path), "before").create(settled_of(*words, "name=before"))
    before = with_lengths(with_settings_of_run(composed(*words, "name=before")), None)
    assert tuned(before, is_begun=True) == before


def test_a_continued_run_has_rows_with_a_margin_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saving, "MARGIN", 1.9)
    words = (*V6E8, "trainer.seq_len=1024", f"output_dir={tmp_path}", "name=first")
    first = tuned(settled_of(*words))
    RunFolder(str(tmp_path), "first").create(first)
    again = with_lengths(with_settings_of_run(composed(*words)), None)
    assert choice(tuned(again, is_begun=True)) == choice(first) == ("save_dots", 2)


def test_the_choice_is_logged_once_made(caplog) -> None:
    caplog.set_level("INFO")
    found = tuned(settled_of(*V6E8))
    assert (
        "model.remat=save_dots trainer.micro_batch_rows=1: formulas put the largest step at 17.9 of 31.25 GiB; "
        "tuned=off leaves model.remat=layer_inputs" in caplog.text
    )
    assert tuned(found) == found
