"""The sharding table: first match wins, every rule does something, nothing large stays whole by oversight."""

import pytest
import torch

from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.optim.adamw8bit import AdamW8bit
from tpu_experiments.optim.updates import optimizer_of
from tpu_experiments.runtime.sharding import ShardingTable, check_heads

FOUR = Mesh(fsdp=4)


def table(rules, *, mesh=FOUR, limit=0):
    return ShardingTable(ShardingConfig("mine", rules, limit), mesh=mesh)


def test_the_first_matching_rule_decides():
    rules = {"*.q_proj.weight": ["fsdp", None], "*_proj.weight": [None, "fsdp"]}
    assert table(rules).axes("layers.0.q_proj.weight", (8, 8)) == ("fsdp", None)
    assert table(rules).axes("layers.0.v_proj.weight", (8, 8)) == (None, "fsdp")


def test_what_no_rule_names_is_replicated():
    assert table({"*.weight": [None, "fsdp"]}).axes("layers.0.q_proj.lora_A", (8, 16)) == (None, None)
    assert table({}).axes("norm.weight", (7,)) == (None,)


def test_lengths_of_rows_are_split_as_the_rows_are_along_tensor_alone():
    rules = {"*.o_proj.weight": ["fsdp", "tensor"], "*_proj.weight": ["tensor", "fsdp"]}
    sharding = table(rules, mesh=Mesh(fsdp=2, tensor=2))
    assert sharding.axes("layers.0.q_proj.lora_magnitude_vector", (8,)) == ("tensor",)
    assert sharding.axes("layers.0:2:1.q_proj.lora_magnitude_vector/exp_avg", (2, 8)) == (None, "tensor")
    assert sharding.axes("layers.0.q_proj.lora_magnitude_vector", (7,)) == (None,)
    assert sharding.axes("layers.0.o_proj.lora_magnitude_vector", (8,)) == (None,)
    named = table({"*.lora_magnitude_vector": ["fsdp"], **rules}, mesh=Mesh(fsdp=2, tensor=2))
    assert named.axes("layers.0.o_proj.lora_magnitude_vector", (8,)) == ("fsdp",)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_bar_separates_alternatives(name):
    sharding = table({"*embed_tokens.weight|lm_head.weight": [None, "fsdp"]})
    assert sharding.axes(name, (10, 8)) == (None, "fsdp")
    sharding.check({name: (10, 8)})


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("name", ["layers.0.q_proj.weight", "model.layers.0:2:1.q_proj.weight", "norm.weight"])
def test_optimizer_state_is_sharded_like_its_parameter(make_config, optimizer, name):
    slots = optimizer_of(make_config(f"optim={optimizer}"))
    shape = {"l": (8, 16), "m": (2, 8, 16), "n": (16,)}[name[0]]
    sharding = table({"*q_proj.weight": ["fsdp", None], "*": ["fsdp"]})
    state = slots.init({name: torch.empty(shape, device="meta")})
    wanted = sharding.axes(name, shape)
    assert "fsdp" in wanted
    for slot, tensor in state[name].items():
        split = tuple(axis if size > 1 else None for axis, size in zip(wanted, tensor.shape, strict=True))
        assert sharding.axes(f"{name}/{slot}", tuple(tensor.shape)) == split
    assert sharding.axes("/count", (1,)) == (None,)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((16, 2048), (None, "fsdp")),  # two blocks of a row for each of the four devices
        ((16, 512), (None, None)),  # half a block
        ((128, 96), (None,)),  # blocks of several rows: whole on every device
    ],
)
def test_scales_of_8_bit_moments_are_split_where_blocks_are(shape, wanted):
    sharding = table({"*q_proj.weight": [None, "fsdp"]})
    moments = AdamW8bit(beta1=0.9, beta2=0.95, eps=1e-8)
    for name, layers in (("layers.0.q_proj.weight", ()), ("model.layers.0:2:1.q_proj.weight", (2,))):
        slots = moments.init({name: torch.empty(*layers, *shape, device="meta")})[name]
        leading = (None,) * len(layers)
        for moment in ("first", "second"):
            assert sharding.axes(f"{name}/{moment}", tuple(slots[moment].shape)) == (*leading, None, "fsdp")
            absmax = slots[f"{moment}_absmax"]
            assert sharding.axes(f"{name}/{moment}_absmax", tuple(absmax.shape)) == (*leading, *wanted)


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


def test_several_axes_split_a_tensor():
    rules = {"*.q_proj.weight": ["tensor", "fsdp"], "*": [["fsdp", "tensor"], None]}
    sharding = table(rules, mesh=Mesh(fsdp=4, tensor=2))
    assert sharding.axes("layers.0.q_proj.weight", (6, 8)) == ("tensor", "fsdp")
    assert sharding.axes("model.layers.0:2:1.q_proj.weight", (2, 6, 8)) == (None, "tensor", "fsdp")
    assert sharding.axes("embed.weight", (16, 3)) == (("fsdp", "tensor"), None)
    assert sharding.axes("layers.0.q_proj.weight/exp_avg", (6, 8)) == ("tensor", "fsdp")
    with pytest.raises(ConfigError, match=r"embed.weight is \(12, 3\) and 12 does not divide by the 8 devices; split"):
        sharding.axes("embed.weight", (12, 3))
    with pytest.raises(ConfigError, match=r"is \(6, 6\) and 6 does not divide by the 4 devices of sharding.mesh.fsdp;"):
        sharding.axes("layers.0.q_proj.weight", (6, 6))


def test_an_axis_with_one_device_splits_nothing():
    sharding = table({"*": ["tensor", "fsdp"]}, mesh=Mesh(fsdp=4))
    assert sharding.axes("a", (7, 8)) == (None, "fsdp")


def test_a_weight_claimed_by_an_axis_with_one_device_is_whole_and_refused():
    names = {"embed.weight": (100, 12)}
    with pytest.raises(ConfigError, match=r"leaves embed.weight with 1,200 elements whole"):
        table({"embed*": [None, "fsdp"]}, mesh=Mesh(data=4), limit=1199).check(names)
    table({"embed*": [None, ["data", "fsdp"]]}, mesh=Mesh(data=4), limit=1199).check(names)


def test_a_rule_for_adapters_needs_their_projection_only():
    names = {"layers.0.q_proj.weight": (8, 8)}
    table({"*.[qk]_proj.lora_B|*.up_proj.lora_B": ["tensor", None]}).check(names)
    with pytest.raises(ConfigError, match=r"rule '\*\.qproj\.lora_B' matches no parameter"):
        table({"*.qproj.lora_B": ["tensor", None]}).check(names)


class Arch:
    """Of a model with 4 heads of queries and 2 of keys and values."""

    num_attention_heads, num_key_value_heads = 4, 2

    def get_text_config(self):
        return self


def test_heads_divide_over_the_devices_that_share_them():
    check_heads(Mesh(fsdp=4, tensor=2), Arch())
    with pytest.raises(ConfigError) as caught:
        check_heads(Mesh(fsdp=2, tensor=4), Arch())
    assert str(caught.value) == (
        "sharding.mesh.tensor=4; the model has 4 heads and 2 heads of keys and values, which do not divide by it; use "
        "sharding.mesh.tensor=1 or 2."
    )


@pytest.mark.parametrize("model", only(["mistral7b"], ["mistral7b", "gemma3_270m", "qwen05b"]))
@pytest.mark.parametrize("lora", ["all_linear_r8", "none"])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("hsdp", Mesh(2, 4)), ("fsdp_tensor", Mesh(1, 4, 2)), ("fsdp_tensor", Mesh(4, 8, 8)), ("hsdp", Mesh(16, 16))],
)
@pytest.mark.xla
def test_the_shipped_meshes_fit_every_model(make_config, model, lora, name, mesh):
    from tpu_experiments.models.huggingface import HuggingFaceModel
    from tpu_experiments.models.sources.build import describe

    config = make_config(f"model={model}", "model.init=random", f"sharding={name}", f"lora={lora}")
    module, _ = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    sharding = ShardingTable(config.sharding, mesh=mesh)
    sharding.check(shapes)
    for key, shape in shapes.items():
        parts = {axis for axis in sharding.axes(key, shape) if axis}
        if len(shape) > 1 and "lora_" not in key:
            assert parts == set(mesh.names) - {"data"}
        elif key.endswith("lora_B") and name == "fsdp_tensor":
            assert parts == (set() if "o_proj" in key or "down_proj" in key else {"tensor"})


@pytest.mark.parametrize("model", ["mistral7b", "gemma3_270m", "qwen05b"])
@pytest.mark.parametrize("num_devices", [1, 4, 8])
@pytest.mark.xla
def test_the_shipped_table_fits_every_model(make_config, model, num_devices):
    from tpu_experiments.models.huggingface import HuggingFaceModel
    from tpu_experiments.models.sources.build import describe

    config = make_config(f"model={model}", "model.init=random", "sharding=fsdp", "lora=all_linear_r8")
    module, _ = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    sharding = ShardingTable(config.sharding, mesh=Mesh(fsdp=num_devices))
    sharding.check(shapes)
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and "lora_" not in name}
    split = {name for name, shape in shapes.items() if any(sharding.axes(name, shape))}
    assert split == matrices


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("layers.0.q_proj.weight_scale", (8,), ("fsdp",)),
        ("model.layers.0:2:1.q_proj.weight_scale", (2, 8), (None, "fsdp")),
        ("layers.0.q_proj.weight_absmax", (8, 3), ("fsdp", None)),
        ("layers.0.q_proj.weight_absmax", (7, 3), (None, None)),  # does not divide: whole
        ("layers.0.q_proj.weight_nested", (8,), (None,)),
        ("layers.0.o_proj.weight_scale", (8,), (None,)),  # the weight's inputs are split
        ("layers.0.o_proj.weight_absmax", (8, 4), (None, "fsdp")),
    ],
)
def test_scales_are_split_as_their_weights_where_they_divide(name, shape, axes):
    rules = {"*.q_proj.weight": ["fsdp", None], "*.o_proj.weight": [None, "fsdp"]}
    assert table(rules).axes(name, shape) == axes
