"""An adapter from a folder: what was written comes back; what is more than A and B is refused in a sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig, is_target, rounded_settings
from tpu_experiments.export import reading
from tpu_experiments.export.peft import ADAPTER_CONFIG, ADAPTER_FILE, write_adapter
from tpu_experiments.export.reading import read_adapter, require_rounded_alike
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.frozen import describe_trained

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
A_OF_FIRST = f"base_model.model.{MODULES[0]}.lora_A.weight"


def tensors_of(seed: int, *, dora: bool = False) -> dict[str, torch.Tensor]:
    """A (2, 5) and B (3, 2) of two modules, and lengths (3,)."""
    draws = torch.Generator().manual_seed(seed)
    shapes = {"lora_A": (2, 5), "lora_B": (3, 2)} | ({"lora_magnitude_vector": (3,)} if dora else {})
    return {f"{m}.{part}": torch.randn(shape, generator=draws) for m in MODULES for part, shape in shapes.items()}


def written(folder: Path, *, initial: dict[str, torch.Tensor] | None = None, **lora: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of rank 2; its parameters."""
    chosen = LoraConfig(r=2, alpha=6.0, targets=["q_proj", "down_proj"], **lora)
    where = {"base_path": "lab/base", "revision": None}
    parameters = tensors_of(0, dora=chosen.dora)
    write_adapter(str(folder), parameters=parameters, initial=initial or {}, lora=chosen, **where)
    return parameters


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("scaling", ["alpha_over_r", "alpha_over_sqrt_r"])
def test_what_was_written_comes_back(tmp_path: Path, scaling: str, dora: bool) -> None:
    parameters = written(tmp_path, scaling=scaling, init="a_zero", dropout=0.1, dora=dora)
    found = read_adapter(str(tmp_path))
    assert found.tensors.keys() == parameters.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in parameters.items())
    assert found.lora == LoraConfig(r=2, alpha=6.0, targets=list(MODULES), scaling=scaling, dora=dora)
    assert found.base == "lab/base"


@pytest.mark.xla
def test_that_of_rounded_weights_is_for_weights_that_are_rounded_so_and_not_for_peft(tmp_path: Path) -> None:
    from peft import PeftConfig

    lora = LoraConfig(r=2, alpha=6.0, targets=["q_proj", "down_proj"])
    parameters = tensors_of(0) | {f"{module}.lora_weight_scale": torch.rand(3, 1) for module in MODULES}
    model = ModelConfig(linear="lr_qat", linear_bits=3)
    write_adapter(
        str(tmp_path), parameters=parameters, initial={}, lora=lora, base_path="lab/base", revision=None,
        rounded=rounded_settings(model),
    )  # fmt: skip
    found = read_adapter(str(tmp_path))
    assert found.tensors.keys() == parameters.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in parameters.items())
    require_rounded_alike(found, model, key="task.adapter=x")
    for other in (ModelConfig(), ModelConfig(linear="lr_qat")):
        with pytest.raises(
            ConfigError, match=r"^task.adapter=x with .*use model.linear=lr_qat model.linear_bits=3 mod"
        ):
            require_rounded_alike(found, other, key="task.adapter=x")
    with pytest.raises((KeyError, ValueError), match="LR_QAT"):
        PeftConfig.from_pretrained(str(tmp_path))
    written(tmp_path)
    with pytest.raises(ConfigError, match=r"^task.adapter=x with .*are not rounded; use model.linear=plain\.$"):
        require_rounded_alike(read_adapter(str(tmp_path)), model, key="task.adapter=x")


def test_that_of_a_reduced_base_is_one_of_the_whole_base(tmp_path: Path) -> None:
    """Rank and alpha are doubled; scale B A is that of the parameters less that of the start."""
    start = tensors_of(1)
    parameters = written(tmp_path, initial=start, init="pissa")
    found = read_adapter(str(tmp_path))
    assert (found.lora.r, found.lora.alpha, found.lora.init) == (4, 12.0, "b_zero")
    for module in MODULES:
        now, then, whole = (
            tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"] for tensors in (parameters, start, found.tensors)
        )
        torch.testing.assert_close(whole, now - then)


MORE: dict[str, dict[str, Any]] = {
    "layer_replication=[[0, 1]]": {"layer_replication": [[0, 1]]},
    "bias=all, lora_bias=True": {"bias": "all", "lora_bias": True},
    "init_lora_weights=pissa_niter_16": {"init_lora_weights": "pissa_niter_16"},
    f"{A_OF_FIRST} (2, 5) with r=4": {"r": 4},
}


@pytest.mark.parametrize("told", MORE)
def test_more_than_a_and_b_is_refused(tmp_path: Path, told: str) -> None:
    written(tmp_path)
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | MORE[told]))
    assert complaint(tmp_path).startswith(f"{tmp_path}; it is more than a LoRA or DoRA adapter ({told}); merge it")


@pytest.mark.parametrize(
    "name",
    ["base_model.model.model.norm.weight", A_OF_FIRST.replace("lora_A", "lora_magnitude_vector"), "x.lora_B.bias"],
)
def test_a_tensor_that_is_no_a_or_b_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    save_file(load_file(tmp_path / ADAPTER_FILE) | {name: torch.ones(2)}, tmp_path / ADAPTER_FILE)
    assert f"({name} (2,) with r=2)" in complaint(tmp_path)


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_what_peft_saves_is_read_and_needs_no_names_of_targets(tmp_path: Path) -> None:
    """PEFT's own folder, its targets a pattern and its layers chosen by number."""
    from peft import LoraConfig as TheirConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("tpu_experiments/samples/tiny_base")
    theirs = TheirConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    model = get_peft_model(base, theirs)
    model.save_pretrained(str(tmp_path / "listed"))
    pattern = TheirConfig(r=3, lora_alpha=5, target_modules=r".*\.1\.self_attn\.(q|v)_proj")
    model = get_peft_model(model.unload(), pattern)
    model.save_pretrained(str(tmp_path / "pattern"))
    pattern.use_dora = True
    model = get_peft_model(model.unload(), pattern)
    model.save_pretrained(str(tmp_path / "dora"))
    for folder in ("listed", "pattern", "dora"):
        found = read_adapter(str(tmp_path / folder))
        assert found.lora.targets == [f"model.layers.1.self_attn.{part}_proj" for part in "qv"]
        assert (found.lora.r, found.lora.alpha, found.lora.dora) == (3, 5.0, folder == "dora")
    lengths = dict(model.named_parameters())
    for name in found.lora.targets:
        length = lengths[f"base_model.model.{name}.lora_magnitude_vector.default.weight"]
        assert torch.equal(found.tensors[f"{name}.lora_magnitude_vector"], length)


def test_lengths_that_are_missing_or_not_announced_are_refused(tmp_path: Path) -> None:
    written(tmp_path, dora=True)
    name = f"base_model.model.{MODULES[0]}.lora_magnitude_vector"
    whole = load_file(tmp_path / ADAPTER_FILE)
    save_file({key: tensor for key, tensor in whole.items() if key != name}, tmp_path / ADAPTER_FILE)
    assert f"use_dora=true and {MODULES[0]} has no lora_magnitude_vector" in complaint(tmp_path)
    save_file(whole, tmp_path / ADAPTER_FILE)
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": False}))
    assert f"({name} (3,) with r=2)" in complaint(tmp_path)


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    assert "no adapter_config.json or no adapter_model.safetensors there" in complaint(tmp_path)
    written(tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes(b"no tensors")
    assert "its adapter cannot be read (SafetensorError" in complaint(tmp_path)
    written(tmp_path / "other")
    for text in ("{}", "[]", '{"peft_type": 3}'):
        (tmp_path / "other" / ADAPTER_CONFIG).write_text(text)
        assert f"{ADAPTER_CONFIG}; it names no peft_type" in complaint(tmp_path / "other")


WRONG = {
    "r=None": {"r": None},
    "r=0": {"r": 0},
    "r=-2": {"r": -2},
    "r=2.5": {"r": 2.5},
    "r=True": {"r": True},
    "r='2'": {"r": "2"},
    "lora_alpha=None": {"lora_alpha": None},
    "lora_alpha='nan'": {"lora_alpha": "nan"},
    "lora_alpha=inf": {"lora_alpha": 1e400},
    "lora_alpha=0": {"lora_alpha": 0},
    "lora_alpha=True": {"lora_alpha": True},
    "target_modules=3": {"target_modules": 3},
    "target_modules=['q_proj', 3]": {"target_modules": ["q_proj", 3]},
    "exclude_modules={'a': 1}": {"exclude_modules": {"a": 1}},
    "layers_to_transform='0'": {"layers_to_transform": "0"},
    "layers_pattern=7": {"layers_pattern": 7},
    "use_dora='false'": {"use_dora": "false"},
    "use_rslora='no'": {"use_rslora": "no"},
}


@pytest.mark.parametrize("told", WRONG)
def test_settings_that_are_no_adapters_are_refused_by_name(tmp_path: Path, told: str) -> None:
    """Also those that float() takes, or that count as true."""
    written(tmp_path)
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | WRONG[told]).replace("Infinity", "1e400"))
    assert complaint(tmp_path).startswith(f"{file}; {told}; ")


@pytest.mark.parametrize("kind", ["LOHA", "IA3", "LOKR", "VERA", "OFT", "PROMPT_TUNING"])
def test_another_kind_of_adapter_is_refused_by_its_kind(tmp_path: Path, kind: str) -> None:
    """It has none of LoRA's settings."""
    written(tmp_path)
    file = tmp_path / ADAPTER_CONFIG
    values = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("r", "lora_alpha")}
    file.write_text(json.dumps(values | {"peft_type": kind}))
    assert complaint(tmp_path).startswith(f"{file}; peft_type={kind}, and only LoRA and DoRA are read here; merge it")


def complaint(folder: Path) -> str:
    """What the reader says."""
    with pytest.raises(ConfigError) as caught:
        read_adapter(str(folder))
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    written(tmp_path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / ADAPTER_FILE).items()}
    tensors[A_OF_FIRST][1, 2:4] = value
    save_file(tensors, tmp_path / ADAPTER_FILE)
    told = f"{tmp_path / ADAPTER_FILE}; it has 2 of 10 values of {A_OF_FIRST} that are NaN or infinite; "
    assert complaint(tmp_path).startswith(told)


def test_an_adapter_of_nothing_but_nan_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(tmp_path / ADAPTER_FILE).items()}
    save_file(tensors, tmp_path / ADAPTER_FILE)
    assert f"it has 10 of 10 values of {A_OF_FIRST} that are NaN or infinite" in complaint(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    save_file({}, tmp_path / ADAPTER_FILE)
    assert complaint(tmp_path).startswith(f"{tmp_path / ADAPTER_FILE}; it holds no tensors")


def set_in_config(folder: Path, **values: Any) -> None:
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


CHOSEN: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "down_proj"]},
    "whole names": {"target_modules": list(MODULES)},
    "ends of names": {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]},
    "a pattern": {"target_modules": r"model\.layers\.\d\.(self_attn|mlp)\.(q|down)_proj"},
    "all": {"target_modules": "all-linear"},
    "numbers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 1]},
    "numbers below a name": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 1],
                             "layers_pattern": "layers"},
    "others left out": {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    "a pattern that is none": {"target_modules": ["q_proj", "down_proj"], "exclude_modules": "(("},
    "a pattern without an end": {"target_modules": ["q_proj", "down_proj"], "exclude_modules": "(.+)+(.*)*z"},
    "names that no module has": {"target_modules": ["q_proj", "down_proj", "w1"]},
}  # fmt: skip


@pytest.mark.parametrize("how", CHOSEN)
def test_targets_in_any_form_that_peft_takes_are_those_of_the_file(tmp_path: Path, how: str) -> None:
    written(tmp_path)
    set_in_config(tmp_path, **CHOSEN[how])
    found = read_adapter(str(tmp_path))
    assert found.lora.targets == list(MODULES)
    assert all(any(is_target(module, each) for module in MODULES) for each in found.carried.targets)


LEFT_OUT: dict[str, dict[str, Any]] = {
    "target_modules=['q_proj']": {"target_modules": ["q_proj"]},
    "target_modules='.*q_proj'": {"target_modules": ".*q_proj"},
    "layers_to_transform=[0]": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0]},
    "layers_to_transform=0": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 0},
    "layers_pattern='blocks'": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 1],
                                "layers_pattern": "blocks"},
    "exclude_modules=['down_proj']": {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["down_proj"]},
    r"exclude_modules='.*\\.mlp\\..*'": {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*\.mlp\..*"},
}  # fmt: skip


@pytest.mark.parametrize("told", LEFT_OUT)
def test_tensors_that_peft_leaves_out_are_refused(tmp_path: Path, told: str) -> None:
    """PEFT would compute without them."""
    written(tmp_path)
    set_in_config(tmp_path, **LEFT_OUT[told])
    said = complaint(tmp_path)
    assert re.search(f"it has tensors of ({'|'.join(MODULES)}), which PEFT leaves out", said)
    assert told in said


@pytest.mark.xla
@pytest.mark.parametrize("values", [*CHOSEN.values(), *LEFT_OUT.values()], ids=[*CHOSEN, *LEFT_OUT])
def test_modules_are_chosen_as_peft_chooses_them(values: dict[str, Any]) -> None:
    from peft import LoraConfig as TheirConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if values["target_modules"] == "all-linear":
        pytest.skip("PEFT lists the modules before it chooses")
    if reading._is_endless(values.get("exclude_modules")):
        pytest.skip("PEFT would fail of it, or take for ever")
    theirs = TheirConfig(**values)
    names = [f"model.layers.{n}.{m}" for n in (0, 1, 11) for m in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj")]
    for name in [*names, "lm_head", "model.embed_tokens"]:
        assert reading._is_selected(name, values) == bool(check_target_module_exists(theirs, name)), name


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("lost", ["layers.1.", "q_proj"])
def test_a_file_without_the_tensors_of_a_module_that_it_targets_is_refused(tmp_path: Path, lost: str) -> None:
    """PEFT warns of them, and computes without."""
    from peft import LoraConfig as TheirConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    folder = "tpu_experiments/samples/tiny_base"
    theirs = TheirConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), theirs).save_pretrained(str(tmp_path))
    source = HuggingFaceModel(ModelConfig(name="x", path=folder, dtype="float32"), seed=0)
    whole = read_adapter(str(tmp_path))
    describe_trained(source, lora=whole.whole, trained=whole.tensors, origin="it")
    kept = {name: each for name, each in load_file(tmp_path / ADAPTER_FILE).items() if lost not in name}
    save_file(kept, tmp_path / ADAPTER_FILE)
    part = read_adapter(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"it targets \S*{lost}\S* and has no \S+;"):
        describe_trained(source, lora=part.whole, trained=part.tensors, origin="it")


def test_a_module_that_is_trained_whole_may_be_written_three_times(tmp_path: Path) -> None:
    """As PEFT does where the base was resized: as it is read, as it is held, and as it was before."""
    written(tmp_path, modules_to_save=["lm_head"])
    start = "base_model.model.lm_head"
    whole = load_file(tmp_path / ADAPTER_FILE)
    head = torch.randn(7, 5)
    more = {f"{start}.weight": head, f"{start}.modules_to_save.weight": head.clone()}
    save_file({**whole, **more, f"{start}.original_module.weight": head + 1}, tmp_path / ADAPTER_FILE)
    found = read_adapter(str(tmp_path)).tensors
    assert torch.equal(found["lm_head.weight"], head)
    assert not [name for name in found if "module" in name]
    save_file({**whole, **more, f"{start}.modules_to_save.weight": head + 1}, tmp_path / ADAPTER_FILE)
    assert f"{start}.modules_to_save.weight and {start}.weight are one weight, and their values differ" in (
        complaint(tmp_path)
    )
