"""The sharding table: first match wins, every rule does something, nothing large stays whole by oversight."""

from dataclasses import asdict

import pytest
import torch

from tpu_experiments.config.build import locate
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import ShardingConfig
from tpu_experiments.runtime.sharding import ShardingTable


def table(rules, *, num_devices=4, limit=0):
    return ShardingTable(ShardingConfig("mine", rules, limit), num_devices=num_devices)


def test_the_first_matching_rule_decides():
    rules = {"*.q_proj.weight": ["fsdp", None], "*_proj.weight": [None, "fsdp"]}
    assert table(rules).axes("layers.0.q_proj.weight", (8, 8)) == ("fsdp", None)
    assert table(rules).axes("layers.0.v_proj.weight", (8, 8)) == (None, "fsdp")


def test_what_no_rule_names_is_replicated():
    assert table({"*.weight": [None, "fsdp"]}).axes("layers.0.q_proj.lora_A", (8, 16)) == (None, None)
    assert table({}).axes("norm.weight", (7,)) == (None,)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_bar_separates_alternatives(name):
    sharding = table({"*embed_tokens.weight|lm_head.weight": [None, "fsdp"]})
    assert sharding.axes(name, (10, 8)) == (None, "fsdp")
    sharding.check({name: (10, 8)})


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("name", ["layers.0.q_proj.weight", "model.layers.0:2:1.q_proj.weight", "norm.weight"])
def test_optimizer_state_lies_as_its_parameter_does(make_config, optimizer, name):
    settings = asdict(make_config(f"optim={optimizer}").optim)
    make = locate(settings.pop("_target_"), key="optim")
    slots = make(**{key: value for key, value in settings.items() if key not in {"lr", "clip_norm"}})
    shape = {"l": (8, 16), "m": (2, 8, 16), "n": (16,)}[name[0]]
    sharding = table({"*q_proj.weight": ["fsdp", None], "*": ["fsdp"]})
    state = slots.init({name: torch.empty(shape, device="meta")})
    wanted = sharding.axes(name, shape)
    assert "fsdp" in wanted
    for slot, tensor in state[name].items():
        split = tuple(axis if size > 1 else None for axis, size in zip(wanted, tensor.shape, strict=True))
        assert sharding.axes(f"{name}/{slot}", tuple(tensor.shape)) == split
    assert sharding.axes("/count", (1,)) == (None,)


def test_a_dimension_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"o_proj.weight is \(8, 6\) and 6 does not divide by the 4 devices"):
        table({"*.o_proj.weight": [None, "fsdp"]}).axes("layers.0.o_proj.weight", (8, 6))


def test_only_split_dimensions_have_to_divide():
    assert table({"*": [None, "fsdp"]}).axes("a", (7, 8)) == (None, "fsdp")


def test_a_rule_for_another_number_of_dimensions_is_refused():
    with pytest.raises(ConfigError, match=r"has 2 entries but norm.weight is \(8,\)"):
        table({"norm*": [None, "fsdp"]}).axes("norm.weight", (8,))


def test_a_rule_that_matches_nothing_is_refused_with_names_that_exist():
    with pytest.raises(
        ConfigError, match=r"sharding=mine; rule '\*\.qproj' matches no parameter.*a\.q_proj, b\.q_proj"
    ):
        table({"*.qproj": [None]}).check({"a.q_proj": (4,), "b.q_proj": (4,)})


def test_a_large_parameter_that_stays_whole_is_refused():
    names = {"embed.weight": (100, 12), "norm.weight": (12,)}
    with pytest.raises(ConfigError, match=r"leaves embed.weight with 1,200 elements whole.*=1,199"):
        table({}, limit=1199).check(names)
    table({}, limit=1200).check(names)
    table({}, limit=0).check(names)
    table({"embed*": [None, "fsdp"]}, limit=1199).check(names)


@pytest.mark.parametrize("model", ["mistral7b", "gemma3_270m", "qwen05b"])
@pytest.mark.parametrize("num_devices", [1, 4, 8])
@pytest.mark.xla
def test_the_shipped_table_fits_every_model(make_config, model, num_devices):
    from tpu_experiments.models.build import describe
    from tpu_experiments.models.huggingface import HuggingFaceModel

    config = make_config(f"model={model}", "model.init=random", "sharding=fsdp", "lora=all_linear_r8")
    module, _ = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    sharding = ShardingTable(config.sharding, num_devices=num_devices)
    sharding.check(shapes)
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and "lora_" not in name}
    split = {name for name, shape in shapes.items() if any(sharding.axes(name, shape))}
    assert split == matrices
