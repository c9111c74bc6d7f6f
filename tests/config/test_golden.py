"""Every choice composes and passes the checks, and what each recipe comes to is written down.

A changed value shows as a diff of tests/golden/configs; `UPDATE_GOLDEN=1 pytest tests/config/test_golden.py` rewrites
them.
"""

import functools
import itertools
import json
import os
import re
from pathlib import Path

import pytest

from tests.config.composing import CONF, composed, composed_as_typed, names, sources_of_pairs
from tests.jobs import TINY_JOB
from tests.tiers import only
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.messages import GROUPS
from tpu_experiments.config.objectives import OBJECTIVES
from tpu_experiments.config.schema import Config

GOLDEN = Path(__file__).parents[1] / "golden" / "configs"
TO_GIVE = {
    "mistral7b_ro_dpo": ["start.run=outputs/mistral7b_ro"],
    "reader_rl": ["start.run=outputs/reader_45"],
}
RECIPES = {
    "default": [],
    "tiny": [*TINY_JOB],
    **{name: [f"experiment={name}", *TO_GIVE.get(name, [])] for name in names("experiment")},
}
MODELS = ("tiny", "mistral7b", "gemma3_270m", "qwen05b")
DATA = ("wiki_ro", "ultrachat_ro", "uk_law")
OF_REWARDS = {"regex": ["regex.arguments.pattern=a+"], "length": ["length.arguments.most=9"]}
"""What rewards need beside their name."""
OF_CALLBACKS = {
    "notify": ["callbacks.notify.options.command=[true]"],
    "copy": ["callbacks.copy.options.to=copies"],
    "limit": ["callbacks.limit.options.hours=6"],
}
"""What callbacks need beside their name."""
HW = ("v5e8", "v6e8", "colab", "cpu")


@functools.cache
def recipe_config(recipe: str, *words: str) -> Config:
    """The config of a recipe, composed once for all tests that read it."""
    return composed_as_typed(*RECIPES[recipe], *words)


def as_text(config: Config) -> str:
    """One `key: value` per line, in the order of the schema."""
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in flatten(config).items())
    return "\n".join(lines) + "\n"


def require_golden(name: str, text: str) -> None:
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text.splitlines() == golden.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_flattened_config_is_the_golden_one(recipe: str) -> None:
    require_golden(recipe, as_text(recipe_config(recipe)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trial_changes_these_values_and_no_others(recipe: str) -> None:
    """What `debug=smoke` makes of the recipe: the lines that differ, and with a minus those that are gone."""
    whole, trial = (as_text(recipe_config(recipe, *words)).splitlines() for words in ([], ["debug=smoke"]))
    keys = {line.partition(": ")[0] for line in trial}
    gone = [f"-{key}" for line in whole if (key := line.partition(": ")[0]) not in keys]
    changed = [line for line in trial if line not in set(whole)]
    require_golden(f"{recipe}-smoke", "\n".join([*gone, *changed]) + "\n")


def test_no_golden_config_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {
        f"{name}{ending}" for name in RECIPES for ending in ("", "-smoke")
    }


@pytest.mark.parametrize("experiment", names("experiment"))
def test_an_experiment_is_named_after_its_file(experiment: str) -> None:
    assert recipe_config(experiment).name == experiment


@pytest.mark.parametrize("experiment", names("experiment"))
def test_a_trial_of_an_experiment_stays_out_of_its_folder(experiment: str) -> None:
    config = recipe_config(experiment, "debug=smoke")
    assert config.name != experiment
    assert (config.model.size, config.data_size, config.hw.device) == ("tiny", "sample", "cpu")


@pytest.mark.parametrize("model", only(["tiny"], MODELS))
def test_every_model_goes_with_every_source_and_machine(model: str) -> None:
    for data, hw in itertools.product(DATA, HW):
        config = composed(f"model={model}", f"data={data}", f"hw={hw}")
        assert config.name == f"{model}_{data}_{hw}"


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group in GROUPS for choice in names(group) if group not in ("sweep", "experiment")],
)
def test_every_choice_composes_under_its_file_name(group: str, choice: str) -> None:
    selected = [f"+{group}={choice}" if group == "local" else f"{group}={choice}"]
    if group == "hw":
        # A multiple of the chips of every machine, of which the largest can only be planned.
        selected += ["trainer.global_batch_rows=256", "task=plan"]
    if (group, choice) == ("curriculum", "stories"):
        selected += ["data=stories_text_ro"]  # its stages name sources
    if group == "data" and choice in sources_of_pairs():
        selected += ["objective=dpo"]
    if group == "objective" and OBJECTIVES[choice].reads_pairs:
        selected += ["data=stories_pairs_ro"]
    if group == "objective" and OBJECTIVES[choice].samples_rollouts:
        selected += ["data=gsm8k", "reward=number"]
    if group == "reward":
        selected += [
            "data=gsm8k",
            "objective=grpo",
            *(f"rollout.rewards.{each}" for each in OF_REWARDS.get(choice, ())),
        ]
    if group == "callbacks":
        selected += OF_CALLBACKS.get(choice, [])
    config = composed(*selected)
    part = getattr(config, group, None)
    if isinstance(part, dict):
        assert choice in part
    elif hasattr(part, "name"):
        assert part.name == choice


@pytest.mark.parametrize("sweep", names("sweep"))
def test_a_sweep_composes_at_its_first_point(sweep: str) -> None:
    from hydra import compose, initialize_config_dir

    if sweep.startswith("optuna"):
        pytest.importorskip("optuna", reason="the extra optuna is not installed")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", overrides=[f"sweep={sweep}"], return_hydra_config=True)
    values = {str(key): str(value) for key, value in whole.hydra.sweeper.params.items()}
    first = [f"{key}={re.findall(r'[-+.0-9e]*[0-9]', value)[0]}" for key, value in values.items()]
    assert first
    assert composed(f"sweep={sweep}", *first)


def test_the_global_files_are_those_of_the_four_overlay_groups() -> None:
    marked = {path.parent.name for path in CONF.rglob("*.yaml") if path.read_text().startswith("# @package _global_")}
    assert marked <= {"experiment", "sweep", "debug", "local"}
    assert {"experiment", "sweep", "debug"} <= marked
