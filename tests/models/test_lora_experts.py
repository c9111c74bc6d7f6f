"""Adapters of a mixture's experts (`lora.target_parameters`), held against PEFT's."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.export.peft import ADAPTER_CONFIG, ADAPTER_FILE, write_adapter
from tpu_experiments.export.reading import read_adapter
from tpu_experiments.metrics.flops import flops_of_token, read_decoder
from tpu_experiments.models.adapters.experts import MATRICES
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.work import analytic_memory
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.stacked import is_of_parameter
from tpu_experiments.tasks.certify.numerics import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    SmallCheckpoint,
    alone,
    apart,
    write_random,
)

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    pytest.mark.usefixtures("plain_attention"),
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # it looks for the patterns of modules alone, and applies those of parameters all the same
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]
SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GEMMA = {"enable_moe_block": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},  # its matrices are (in, out), and have biases
    "gemma4_text": GEMMA,
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def checkpoint(kind: str, folder: Path, *, lora: LoraConfig) -> SmallCheckpoint:
    allowed = SIZES | KINDS[kind]
    config = CONFIG_MAPPING[kind](**allowed)
    return SmallCheckpoint(folder, write_random(config, folder), name=kind, lora=lora)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_exports_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=3, alpha=12.0, targets=["q_proj", "o_proj"], target_parameters=BOTH)
    made = checkpoint(kind, tmp_path, lora=lora)
    source, rows = made.source("eager"), made.rows(is_packed=True)
    found = made.adapts(source, rows, alone(made.reference, rows))
    assert found.peft == ""
    assert found.moves > 1e-3
    assert found.logits < TOLERANCE
    assert found.gradients is not None
    assert found.gradients < GRADIENT_TOLERANCE
    between, has_loop = made.folds(source, rows, lora=lora)
    assert between < TOLERANCE
    assert has_loop == (kind in ("qwen3_moe", "mixtral", "qwen2_moe"))  # the others' layers differ in attention
    assert made.exports(source, rows, lora=lora) < TOLERANCE


@pytest.mark.parametrize(
    ("parameters", "modules", "ranks"),
    [
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["q_proj"], {"experts.down_proj": 2}),
        (["experts.down_proj"], ["q_proj", "k_proj"], {}),
        (["layers.1.mlp.experts.gate_up_proj"], [], {}),
    ],
    ids=["both", "down_proj", "gate_up_proj of one layer"],
)
def test_a_file_that_peft_wrote_is_read(parameters, modules, ranks, tmp_path: Path) -> None:
    import peft

    made = checkpoint("qwen3_moe", tmp_path / "base", lora=LoraConfig(r=0))
    settings = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 12.0, "target_modules": modules, "target_parameters": parameters},
        **{"rank_pattern": ranks, "task_type": "CAUSAL_LM"},
    )
    model = peft.get_peft_model(made.reference, settings).eval()
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(str(tmp_path / "adapter"))
    found = read_adapter(str(tmp_path / "adapter"))
    source, rows = made.source("eager"), made.rows(is_packed=True)
    theirs = alone(model, rows)
    module = build_frozen(source, lora=found.lora, trained=found.tensors, place=lambda tensor, name: tensor).eval()
    with torch.no_grad():
        ours = logits_of(module, {}, rows)[0][rows["segments"][0] > 0]
    assert apart(ours, theirs) < TOLERANCE
    assert apart(alone(model.unload(), rows), theirs) > 1e-3
    write_adapter(
        str(tmp_path / "again"), parameters=found.tensors, initial={}, lora=found.lora, base_path="x", revision=None
    )
    before, after = (load_file(tmp_path / each / ADAPTER_FILE) for each in ("adapter", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_file_of_single_experts_is_refused_and_read_as_peft_writes_it_again(tmp_path: Path) -> None:
    """Adapters of transformers 4 have a module for each expert, which PEFT joins when it loads them."""
    import peft

    made = checkpoint("qwen3_moe", tmp_path / "base", lora=LoraConfig(r=0))
    sides = {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}
    torch.manual_seed(4)
    tensors = {}
    for layer, expert in itertools.product(range(3), range(4)):
        for leaf, (wide, high) in sides.items():
            name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{leaf}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(2, wide)
            tensors[f"{name}.lora_B.weight"] = torch.randn(high, 2) * 0.1
    old = tmp_path / "old"
    peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(sides), task_type="CAUSAL_LM").save_pretrained(str(old))
    save_file(tensors, old / ADAPTER_FILE)
    with pytest.raises(ConfigError, match=r"experts.0.down_proj.lora_A.weight is of one expert, .*save it again"):
        read_adapter(str(old))
    model = peft.PeftModel.from_pretrained(made.reference, str(old)).eval()
    model.save_pretrained(str(tmp_path / "new"))
    found = read_adapter(str(tmp_path / "new"))
    source, rows = made.source("eager"), made.rows(is_packed=True)
    module = build_frozen(source, lora=found.lora, trained=found.tensors, place=lambda tensor, name: tensor).eval()
    with torch.no_grad():
        ours = logits_of(module, {}, rows)[0][rows["segments"][0] > 0]
    theirs = alone(model, rows)
    assert apart(ours, theirs) < TOLERANCE
    assert apart(alone(model.unload(), rows), theirs) > 1e-3


def test_a_file_of_other_experts_is_refused(tmp_path: Path) -> None:
    made = checkpoint("qwen3_moe", tmp_path / "base", lora=LoraConfig(r=3, alpha=6.0, target_parameters=BOTH))
    built = made.built(made.source("eager"), lora=made.lora)
    written = dict(initial={}, lora=made.lora, base_path="x", revision=None)
    write_adapter(str(tmp_path), parameters=built.trainable, **written)
    tensors = load_file(tmp_path / ADAPTER_FILE)
    inner = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    for changed, told in (
        (
            {inner: tensors[inner][:-1].contiguous()},
            r"experts.base_layer.lora_A \(11, 32\) and .* of rank 3 of experts",
        ),
        ({inner: torch.empty(0, 32)}, r"experts.base_layer.lora_A \(0, 32\)"),
    ):
        save_file(tensors | changed, tmp_path / ADAPTER_FILE)
        with pytest.raises(ConfigError, match=told):
            read_adapter(str(tmp_path))
    save_file(tensors, tmp_path / ADAPTER_FILE)
    file = tmp_path / ADAPTER_CONFIG
    plain = file.read_text()
    file.write_text(json.dumps(json.loads(plain) | {"use_dora": True}))
    with pytest.raises(ConfigError, match=r"use_dora=true and .*experts.*down_proj has no lora_magnitude_vector"):
        read_adapter(str(tmp_path))
    file.write_text(plain)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_parameters": "experts.down_proj"}))
    with pytest.raises(ConfigError, match=r"target_parameters='experts.down_proj'; it must be a list of names"):
        read_adapter(str(tmp_path))


def test_parameters_and_flops_are_counted_as_injected() -> None:
    words = ("model=qwen3_30b_a3b", "model.init=random", "lora=all_linear_r8", "hw=v6e8", "sharding=fsdp")
    config = composed(*words, f"lora.target_parameters=[{','.join(BOTH)}]", "+lora.rank_pattern={experts.down_proj: 4}")
    arch, lora = config.model.arch, config.lora
    module, report = describe(HuggingFaceModel(config.model, seed=0), lora=lora)
    decoder = read_decoder(arch)
    assert decoder.adapter_parameters(lora) == report.trainable
    assert report.adapters == 4 * 48 + 2 * 48
    plain = replace(lora, target_parameters=[], rank_pattern={})
    of_experts = report.trainable - decoder.adapter_parameters(plain)
    flops, without = (flops_of_token(arch, seq_len=256, lora=each) for each in (lora, plain))
    assert flops.lora - without.lora == pytest.approx(6.0 * of_experts * 8 / 128)
    step = step_settings(config, resolve_stages(config)[0].geometry)
    memory, less = (analytic_memory(arch, step=replace(step, lora=each)) for each in (lora, plain))
    assert (memory.adapters - less.adapters) * 2**30 == pytest.approx(4 * of_experts / 8)
    assert (memory.optimizer - less.optimizer) * 2**30 == pytest.approx(8 * of_experts / 8)
    table = ShardingTable(config.sharding, mesh=mesh_of(config.hw, config.sharding))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    table.check(shapes)
    split = {name: table.axes(name, shape) for name, shape in shapes.items() if is_of_parameter(name)}
    assert len(split) == 4 * 48
    assert set(split.values()) == {("fsdp", None, None)}


REFUSED = {
    ("lora.dropout=0.1",): r"target_parameters=\[experts.down_proj\] with lora.dropout=0.1; adapters of experts",
    ("lora.dora=true",): r"target_parameters=\[experts.down_proj\] with lora.dora=true; experts have no",
    ("lora.init=pissa",): r"target_parameters=\[experts.down_proj\] with lora.init=pissa; use lora.init=b_zero",
    ("lora=none",): r"target_parameters=\[experts.down_proj\] with lora=none; all weights are trained",
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_adapters_of_experts_cannot_do_is_refused(make_config, given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=REFUSED[given]):
        make_config("model=qwen3_30b_a3b", *given, "lora.target_parameters=[experts.down_proj]")


UNKNOWN = {
    "experts.down_prj": r"has 'experts.down_prj', which matches no parameter. Did you mean 'mlp.experts.down_proj'",
    "q_proj.weight": r"has 'q_proj.weight', which matches .*0.self_attn.q_proj.weight, which is no matrix of experts",
}


@pytest.mark.parametrize("target", UNKNOWN)
def test_targets_that_are_no_matrices_of_experts_are_refused(target: str) -> None:
    config = composed("model=qwen3_30b_a3b", "model.size=tiny", f"lora.target_parameters=[{target}]")
    with pytest.raises(ConfigError, match=UNKNOWN[target]):
        describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)


def test_matrices_have_the_order_in_which_peft_wraps_them() -> None:
    """Of every class of experts in transformers, so that the names of a file say whose its tensors are."""
    count = 0
    for file in Path(transformers.models.__file__).parent.glob("*/modeling_*.py"):
        for text in file.read_text("utf-8").split("\n@use_experts_implementation")[1:]:
            own = re.findall(r"self\.(\w+) = nn\.Parameter", text.split("\nclass ")[1])
            matrices = [name for name in own if not name.endswith("_bias")]
            assert matrices == [name for name in MATRICES if name in own], file
            count += 1
    assert count > 50
