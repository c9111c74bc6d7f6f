"""Modules that are trained whole beside adapters (`lora.modules_to_save`), held against PEFT's."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.adapter_exports import require_equal_exports
from tests.models.test_lora_peft import overrides, require_equal_gradients, require_equal_steps, with_peft
from tests.training.tiny import Run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.export.peft import ADAPTER_CONFIG, ADAPTER_FILE
from tpu_experiments.export.reading import read_adapter
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.stacked import is_adapter_part

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
CASES = {
    "head": ("mistral7b", "lora.modules_to_save=[lm_head]"),
    "embedding and norms": ("mistral7b", "lora.modules_to_save=[embed_tokens,norm]"),
    "a projection": ("mistral7b", "lora.modules_to_save=[layers.0.mlp.up_proj,lm_head]"),
    "tied": ("qwen05b", "lora.modules_to_save=[embed_tokens]", "lora.ensure_weight_tying=true"),
    "tied, by the head": ("qwen05b", "lora.modules_to_save=[lm_head]", "lora.ensure_weight_tying=true"),
    "DoRA": ("mistral7b", "lora.modules_to_save=[lm_head,norm]", "lora.dora=true"),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_peft(make_config, case: str) -> None:
    run, model = with_peft(make_config(*overrides(*CASES[case])))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert run.model.report.trainable == sum(p.numel() for p in run.parameters.values()) == trained
    assert not all(map(is_adapter_part, run.parameters))
    require_equal_gradients(run, model)
    require_equal_steps(run, model, num_steps=8)


@pytest.mark.parametrize("init", ["b_zero", "pissa"])
@pytest.mark.parametrize("case", CASES)
def test_the_export_gives_the_same_logits_in_peft_merged_and_read_back(
    make_config, tmp_path: Path, case: str, init: str
) -> None:
    require_equal_exports(make_config(*overrides(*CASES[case], f"lora.init={init}")), tmp_path)


@pytest.mark.parametrize("case", ["embedding and norms", "tied", "tied, by the head"])
def test_an_adapter_that_peft_wrote_is_read(make_config, tmp_path: Path, case: str) -> None:
    """PEFT writes a head that is tied to the trained embedding once more."""
    run, model = with_peft(make_config(*overrides(*CASES[case])))
    model.save_pretrained(str(tmp_path))
    assert ("base_model.model.lm_head.weight" in load_file(tmp_path / ADAPTER_FILE)) == case.startswith("tied")
    found = read_adapter(str(tmp_path))
    assert found.tensors.keys() == run.parameters.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in run.parameters.items())


def test_a_copy_of_a_tied_embedding_is_not_read_as_the_embedding(make_config, tmp_path: Path) -> None:
    """PEFT's own default unties the two."""
    run, model = with_peft(make_config(*overrides(*CASES["tied"])))
    model.save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / ADAPTER_FILE)
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, tmp_path / ADAPTER_FILE)
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ensure_weight_tying": False}))
    found = read_adapter(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight is the embedding and the head \(tie_word_"):
        build_frozen(run.model.source, lora=found.lora, trained=found.tensors, place=lambda tensor, name: tensor)


def test_a_file_without_a_module_s_tensors_is_refused(make_config, tmp_path: Path) -> None:
    _, model = with_peft(make_config(*overrides(*CASES["head"])))
    model.save_pretrained(str(tmp_path))
    shutil.copy(tmp_path / ADAPTER_FILE, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, tmp_path / ADAPTER_FILE)
    with pytest.raises(ConfigError, match=r"modules_to_save has lm_head, and the file no tensor of it; copy it again"):
        read_adapter(str(tmp_path))
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": "lm_head"}))
    with pytest.raises(ConfigError, match=r"modules_to_save='lm_head'; it must be a list of names"):
        read_adapter(str(tmp_path))


REFUSED = {
    "lora.modules_to_save=[lm_heads]": r"lora.modules_to_save has 'lm_heads', with which no .* Did you mean 'lm_head'",
    "lora.modules_to_save=[embed_tokens]": r"is the embedding and the head .*; set lora.ensure_weight_tying=true",
}


@pytest.mark.parametrize("given", REFUSED)
def test_modules_that_cannot_be_are_refused(make_config, given: str) -> None:
    config = make_config(*overrides("qwen05b", given))
    with pytest.raises(ConfigError, match=REFUSED[given]):
        Run(config, EagerRuntime(config.hw))


def test_codes_are_not_trained(make_config) -> None:
    config = make_config(*overrides("mistral7b", "lora.modules_to_save=[o_proj]", "model.base=int8"))
    with pytest.raises(ConfigError, match=r"lora.modules_to_save=\[o_proj\] matches .*o_proj.weight, which is held as"):
        Run(config, EagerRuntime(config.hw))


def test_modules_to_save_need_adapters(make_config) -> None:
    with pytest.raises(ConfigError, match=r"lora.modules_to_save=\[lm_head\] with lora=none; all weights are trained"):
        make_config("lora=none", "lora.modules_to_save=[lm_head]")


def test_a_target_inside_a_saved_module_gets_no_adapter(make_config) -> None:
    config = make_config(*overrides("mistral7b", "lora.modules_to_save=[mlp]"))
    run = Run(config, EagerRuntime(config.hw))
    adapted = {name.rpartition(".")[0] for name in run.parameters if is_adapter_part(name)}
    assert adapted
    assert all(".self_attn." in name for name in adapted)
    module, _ = describe(run.model.source, lora=LoraConfig(r=2, targets=["q_proj"], modules_to_save=["mlp"]))
    assert {n for n, p in module.named_parameters() if ".mlp." in n and not p.requires_grad} == set()
