"""Presets that no recipe uses: parameters to the digit, and a small copy of each against transformers and PEFT.

The copy has the preset's own config with its `tiny_arch`, but the RoPE of the whole model where the head's width allows
it: scaled RoPE is what a copy of default values would not have. Steps of folded layers are in test_fold.py."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.config.composing import composed
from tests.models.test_families import alone, packed_rows
from tests.models.untrained import move_logits
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.models.adapters.lora import adapted_weights
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.build import build_model, describe
from tpu_experiments.models.sources.isolation import require_isolation
from tpu_experiments.runtime.sharding import ShardingTable, check_heads

pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("plain_attention"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@dataclass(frozen=True)
class Preset:
    """What is known of a preset from its config.json and its published number of parameters."""

    name: str
    parameters: int
    adapted: int
    """Linear modules that `lora=all_linear_r16` adapts."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Of the whole model's config, in the place of `tiny_arch`'s."""


ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Of the copy's eight wavelengths, some shorter than this are left as they are, and the others scaled.
SCALED = {"rope_parameters": ROPE | {"original_max_position_embeddings": 64}}
PRESETS = (
    Preset("llama32_1b", 1_235_814_400, 112, SCALED),
    Preset("llama32_3b", 3_212_749_824, 196, SCALED),
    Preset("smollm3_3b", 3_075_098_624, 252),
    Preset("phi4_mini", 3_836_021_760, 128),
    Preset("gemma4_e2b", 4_628_569_344, 205),
    Preset("qwen3_30b_a3b", 30_532_122_624, 192),
)
each_preset = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)


@each_preset
def test_counts_are_the_published_ones(preset):
    config = composed(f"model={preset.name}", "model.init=random")
    _, report = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    assert report.total - report.trainable == preset.parameters
    assert report.adapters == preset.adapted
    assert read_decoder(config.model.arch).parameters == preset.parameters
    adapters = read_decoder(config.model.arch).adapter_parameters(config.lora)
    assert adapters == report.trainable


def test_files_of_lora_adapt_what_the_preset_names():
    def targets(*words):
        return composed(*words).lora.targets

    assert targets("model=phi4_mini", "lora=all_linear_r8") == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert targets("model=xlstm_small") == ["all-linear"]
    assert targets("model=phi4_mini", "lora.targets=[o_proj]") == ["o_proj"]
    assert targets("model=phi4_mini", "lora=none") == []
    assert "model.lora_targets" not in identity(composed("model=phi4_mini"))  # a run that has no such key is the same


@each_preset
def test_documents_of_a_row_are_apart(preset, tmp_path, monkeypatch, caplog):
    """By the check of a run: logits, of a small copy of the whole config, are those of each document alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = composed(f"model={preset.name}", "model.init=random")
    require_isolation(HuggingFaceModel(config.model, seed=0), is_packed=True)
    assert not caplog.records  # an unchecked model is a warning


@each_preset
@pytest.mark.parametrize("sharding", ["fsdp", "fsdp_tensor"])
def test_every_large_matrix_is_split(preset, sharding):
    config = composed(f"model={preset.name}", "model.init=random", f"sharding={sharding}", "hw=v5e8")
    module, _ = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    mesh = mesh_of(config.hw, config.sharding)
    table = ShardingTable(config.sharding, mesh=mesh)
    table.check(shapes)
    if (preset.name, sharding) == ("gemma4_e2b", "fsdp_tensor"):
        with pytest.raises(ConfigError, match="1 heads of keys and values"):
            check_heads(mesh, module.config)
    else:
        check_heads(mesh, module.config)
    split = sum(math.prod(shape) for name, shape in shapes.items() if any(table.axes(name, shape)))
    assert split > 0.99 * preset.parameters


@pytest.fixture(scope="module", params=PRESETS, ids=lambda preset: preset.name)
def copied(request, tmp_path_factory):
    """The config of a small copy, transformers' model with weights that move logits, and the folder it was saved in."""
    preset, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    config = composed(f"model={preset.name}", "model.size=tiny", "model.dtype=float32")
    tiny = {**config.model.tiny_arch, **preset.kept}
    source = HuggingFaceModel(replace(config.model, tiny_arch=tiny), seed=0)
    source.config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32, trust_remote_code=False).eval()
    move_logits(model)
    model.save_pretrained(folder)
    return config, model, folder


def built_of(config, folder, *, r: int):
    given = replace(config.model, path=str(folder), init="pretrained", size="full", arch={})
    source = HuggingFaceModel(given, seed=0)
    lora = LoraConfig(r=r, alpha=2.0 * r, targets=config.lora.targets)
    return build_model(source, lora=lora, seed=0, place=lambda tensor, name: tensor)


def logits_of_documents(built, rows):
    with torch.no_grad():
        return logits_of(built.module.eval(), built.trainable, rows)[0][rows["segments"][0] > 0]


def require_equal(ours, theirs):
    """To 1e-5 of the largest logit."""
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_a_packed_row_computes_what_transformers_does(copied):
    config, model, folder = copied
    rows = packed_rows()
    theirs = alone(model, rows)
    assert theirs.abs().max() > 0.1
    require_equal(logits_of_documents(built_of(config, folder, r=0), rows), theirs)


def test_an_adapter_computes_what_it_does_in_peft(copied, tmp_path):
    from peft import PeftModel

    config, model, folder = copied
    built, rows = built_of(config, folder, r=4), packed_rows()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in built.trainable.items():
            if name.endswith("lora_B"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    write_adapter(
        str(tmp_path),
        parameters={built.source.outer_name(name): tensor for name, tensor in built.trainable.items()},
        initial={},
        lora=LoraConfig(r=4, alpha=8.0, targets=config.lora.targets),
        base_path=str(folder),
        revision=None,
        is_transposed=any(adapted_weights(built.module).values()),
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    theirs = alone(PeftModel.from_pretrained(base, str(tmp_path)).eval(), rows)
    assert (alone(model, rows) - theirs).abs().max() > 1e-3 * theirs.abs().max()
    require_equal(logits_of_documents(built, rows), theirs)
