"""Ranks and alphas of single modules (`lora.rank_pattern`, `lora.alpha_pattern`), held against PEFT's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.adapter_exports import require_equal_exports
from tests.models.test_lora_peft import overrides, require_equal_gradients, require_equal_steps, with_peft
from tests.training.tiny import Run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, lora_of, pattern_key
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.export.reading import read_adapter
from tpu_experiments.models.adapters.linear import LoraLinear
from tpu_experiments.models.adapters.lora import inject
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern:UserWarning"),
]
OF_PROJECTIONS = ["+lora.rank_pattern={q_proj: 4, down_proj: 3}", "+lora.alpha_pattern={q_proj: 4, up_proj: 40}"]
OF_LAYERS = [
    r"+lora.rank_pattern={layers.0.mlp.up_proj: 2, layers\.1\..*_proj: 12, q_proj: 5}",
    "+lora.alpha_pattern={.*.0.self_attn.k_proj: 3.5}",
]
CASES = {
    "projections": OF_PROJECTIONS,
    "layers": OF_LAYERS,
    "rslora": [*OF_PROJECTIONS, "lora.scaling=alpha_over_sqrt_r"],
    "dora": [*OF_LAYERS, "lora.dora=true"],
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_peft(make_config, case: str) -> None:
    run, model = with_peft(make_config(*overrides("qwen05b", *CASES[case])))
    assert len({len(p) for name, p in run.parameters.items() if name.endswith("lora_A")}) > 2
    require_equal_gradients(run, model)
    require_equal_steps(run, model, num_steps=8)


NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 10, 11)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
] + ["lm_head"]
PATTERNS = (
    *("q_proj", "proj", "layers.1", r"layers\.1\..*", "1.mlp.up_proj", ".*", "self_attn.(q|v)_proj", "v_proj|q_proj"),
    *("^model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj", "layers.1[01].*", "lm_head$", "head"),
)


def test_a_pattern_applies_where_peft_finds_it() -> None:
    from peft.utils.other import get_pattern_key

    chosen = [
        (pattern_key(keys, name), get_pattern_key(list(keys), name)) for name in NAMES for keys in two_of(PATTERNS)
    ]
    assert all(ours == theirs for ours, theirs in chosen)
    assert len({ours for ours, _ in chosen}) == len(PATTERNS) - len(("proj", "layers.1", "head")) + len(NAMES) - 1


def two_of(patterns: tuple[str, ...]) -> list[dict[str, int]]:
    """Every ordered pair of patterns."""
    return [{first: 1, second: 2} for first in patterns for second in patterns]


def test_the_first_of_several_patterns_applies() -> None:
    lora = LoraConfig(r=8, alpha=16.0, rank_pattern={"0.q_proj": 4, "q_proj": 2}, alpha_pattern={"q_proj": 1.0})
    assert [lora_of(lora, name).r for name in ("a.0.q_proj", "a.1.q_proj", "a.1.xq_proj")] == [4, 2, 8]
    assert lora_of(lora, "a.0.q_proj") == LoraConfig(r=4, alpha=1.0)


@pytest.mark.parametrize("init", ["b_zero", "pissa"])
@pytest.mark.parametrize("case", CASES)
def test_the_export_gives_the_same_logits_in_peft_merged_and_read_back(
    make_config, tmp_path: Path, case: str, init: str
) -> None:
    config = make_config(*overrides("qwen05b", *CASES[case], f"lora.init={init}"))
    found = require_equal_exports(config, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    times = 2 if init == "pissa" else 1
    assert written["rank_pattern"] == {name: times * rank for name, rank in config.lora.rank_pattern.items()}
    assert found.lora.rank_pattern == written["rank_pattern"]


def test_an_adapter_that_peft_wrote_is_read(make_config, tmp_path: Path) -> None:
    """Also with patterns of modules that have no adapter, which PEFT leaves in its file."""
    config = make_config(*overrides("qwen05b", *OF_LAYERS))
    run, model = with_peft(config)
    settings = model.peft_config["default"]
    settings.rank_pattern = {**settings.rank_pattern, "embed_tokens": 7}
    model.save_pretrained(str(tmp_path))
    found = read_adapter(str(tmp_path))
    assert found.tensors.keys() == run.parameters.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in run.parameters.items())
    assert found.lora.rank_pattern == config.lora.rank_pattern
    assert found.lora.alpha_pattern == config.lora.alpha_pattern


def test_patterns_of_a_part_of_a_larger_model_are_for_its_names_there(tmp_path: Path) -> None:
    """Gemma 3 4B's decoder is `model.language_model` in PEFT's files, and `model` here."""
    names = [f"model.language_model.layers.{layer}.mlp.up_proj" for layer in (0, 1)]
    parameters = {f"{name}.lora_A": torch.randn(2 + n, 5) for n, name in enumerate(names)}
    parameters |= {f"{name}.lora_B": torch.randn(3, 2 + n) for n, name in enumerate(names)}
    lora = LoraConfig(r=2, alpha=6.0, targets=["up_proj"], rank_pattern={"^model.layers.1.*": 3})
    write_adapter(str(tmp_path), parameters=parameters, initial={}, lora=lora, base_path="lab/base", revision=None)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == {names[1]: 3}
    assert read_adapter(str(tmp_path)).lora.rank_pattern == {"model.layers.1.mlp.up_proj": 3}


BROKEN = {
    "rank_pattern='q_proj'; it must be a table": {"rank_pattern": "q_proj"},
    "rank_pattern has 'q_proj': 0; a rank is": {"rank_pattern": {"q_proj": 0}},
    "rank_pattern has 'q_proj': 2.5; a rank is": {"rank_pattern": {"q_proj": 2.5}},
    "rank_pattern has 'q_proj': True; a rank is": {"rank_pattern": {"q_proj": True}},
    "alpha_pattern has 'q_proj': 0.0; a rank is": {"alpha_pattern": {"q_proj": 0.0}},
    "alpha_pattern has '('; it is no regular expression": {"alpha_pattern": {"(": 2}},
    "rank_pattern has '(p+)+x'; matching it may": {"rank_pattern": {"(p+)+x": 2}},
    "rank_pattern has '.*.*.*.*x'; matching it may": {"rank_pattern": {".*.*.*.*x": 2}},
    "up_proj.lora_A.weight (2, 5) with r=3": {"rank_pattern": {"up_proj": 3}},
}


@pytest.mark.parametrize("told", BROKEN)
def test_broken_patterns_are_refused(tmp_path: Path, told: str) -> None:
    parameters = {
        "model.layers.0.up_proj.lora_A": torch.randn(2, 5),
        "model.layers.0.up_proj.lora_B": torch.randn(3, 2),
    }
    lora = LoraConfig(r=2, alpha=6.0, targets=["up_proj"])
    write_adapter(str(tmp_path), parameters=parameters, initial={}, lora=lora, base_path="lab/base", revision=None)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | BROKEN[told]))
    with pytest.raises(ConfigError) as caught:
        read_adapter(str(tmp_path))
    assert told in str(caught.value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 8) for _ in range(3))


def test_only_adapters_of_one_scale_are_joined() -> None:
    model: Any = Attention()
    inject(model, LoraConfig(r=4, alpha=8.0, targets=["q_proj", "k_proj", "v_proj"], rank_pattern={"q_proj": 2}))
    joined = [[m.leaf for m in part.siblings.members] for part in model.children() if isinstance(part, LoraLinear)]
    assert joined == [["q_proj"], ["k_proj", "v_proj"], ["k_proj", "v_proj"]]
    assert model.q_proj.scale == 4.0


def test_adapters_of_one_scale_and_different_ranks_are_joined() -> None:
    model: Any = Attention()
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4.0}}
    inject(model, LoraConfig(r=4, alpha=8.0, targets=["q_proj", "k_proj"], **patterns))
    x = torch.randn(3, 12)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for part in (model.q_proj, model.k_proj):
        assert len(part.siblings.members) == 2
        change = 2 * x @ part.lora_A.T @ part.lora_B.T
        torch.testing.assert_close(part(x), nn.functional.linear(x, part.weight, part.bias) + change)


REFUSED = {
    "+lora.rank_pattern={q_proj: 0}": r"lora.rank_pattern has 'q_proj': 0; a rank is a whole number from 1",
    "+lora.alpha_pattern={q_proj: -1}": r"lora.alpha_pattern has 'q_proj': -1; it must be above 0 and finite",
    r"+lora.rank_pattern={\(: 2}": r"lora.rank_pattern has '\('; it is no regular expression",
}


@pytest.mark.parametrize("given", REFUSED)
def test_values_that_cannot_be_are_refused(make_config, given: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[given]):
        make_config(*overrides("qwen05b", given))


def test_patterns_need_adapters(make_config) -> None:
    with pytest.raises(ConfigError, match=r"lora.rank_pattern with lora=none; there are no adapters"):
        make_config("lora=none", "+lora.rank_pattern={q_proj: 2}")


def test_a_pattern_of_no_module_is_refused(make_config) -> None:
    config = make_config(*overrides("qwen05b", "+lora.rank_pattern={qproj: 2}"))
    with pytest.raises(ConfigError, match=r"lora.rank_pattern has 'qproj', which applies to no .*mean 'q_proj'"):
        Run(config, EagerRuntime(config.hw))
    config = make_config(*overrides("qwen05b", "+lora.rank_pattern={.*: 4, q_proj: 2}"))
    with pytest.raises(ConfigError, match=r"lora.rank_pattern has 'q_proj', which .* or an earlier one does"):
        Run(config, EagerRuntime(config.hw))
