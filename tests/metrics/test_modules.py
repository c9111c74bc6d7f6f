"""Sizes that are counted from modules, against torch's counter of FLOPs, the formulas, and a training program."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.decoders import small_config
from tests.benchmarks.families import FAMILIES
from tests.config.composing import composed
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.metrics import flops as flops_module
from tpu_experiments.metrics.flops import Counted, Recomputed, counted_decoder, flops_of_token, read_decoder
from tpu_experiments.models.adapters.lora import inject
from tpu_experiments.models.adapters.token_rows import vocabulary_modules
from tpu_experiments.models.stack.fold import decoder_layers, repetition
from tpu_experiments.objectives.base import trained_flops

pytestmark = pytest.mark.xla
SEQ_LEN, ROWS = 32, 2
BY_FORMULA = tuple(name for name in FAMILIES if name in flops_module.FAMILIES)
STATES = ("falcon_h1", "xlstm")
BY_MODULES = tuple(name for name in FAMILIES if name not in (*BY_FORMULA, *STATES))


def counts(config: Any) -> tuple[float, float, int, Counted]:
    """FLOPs of a row by torch and by us, elements of all parameters by torch, and what is counted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config._attn_implementation = config._experts_implementation = "eager"
    sizes = counted_decoder(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 3 + SEQ_LEN)[None], use_cache=False)
    scores = sum(2.0 * (each.queries + each.values) * SEQ_LEN for each in sizes.modules.mixing)  # all T x T of them
    ours = SEQ_LEN * (2.0 * (sum(sizes.multiplied.values()) + sizes.embedding) + scores)
    return counter.get_total_flops(), ours, sum(p.numel() for p in model.parameters()), sizes


@pytest.mark.parametrize("model_type", [*BY_MODULES, *BY_FORMULA])
def test_a_family_has_the_products_that_torch_counts(model_type: str) -> None:
    if model_type == "qwen3_5_text":
        with pytest.raises(ConfigError, match="linear_attention"):
            counts(small_config(model_type))
        return
    theirs, ours, parameters, sizes = counts(small_config(model_type))
    assert ours == theirs
    assert sizes.parameters == parameters


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    ],
)
def test_mixtures_without_a_formula_are_counted(model_type: str, values: dict[str, Any]) -> None:
    config = type(small_config(model_type))(**small_config(model_type).to_diff_dict() | values)
    assert isinstance(read_decoder(config), Counted)
    theirs, ours, parameters, sizes = counts(config)
    assert ours == theirs
    assert sizes.parameters == parameters


def injected(config: Any, lora: LoraConfig) -> tuple[Any, int]:
    """A module without weights with adapters, and how many parameters are trained."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return module, inject(module, lora).trainable


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen2_moe", "gpt2", "gpt_neox", "olmo2", "xlstm"])
def test_what_adapters_train_is_counted_as_injected(model_type: str) -> None:
    """Of the embedding, which each class names in its way, and of experts."""
    config = small_config(model_type)
    plain = LoraConfig(r=4, alpha=8.0, targets=["all-linear"], ensure_weight_tying=True)
    sizes, (module, num_plain) = read_decoder(config), injected(config, plain)
    assert [sizes.embedding_name, sizes.head_name] == list(vocabulary_modules(module))
    leaf = sizes.embedding_name.rpartition(".")[2]
    settings: list[dict[str, Any]] = [{"targets": ["all-linear", leaf]}, {"trainable_token_indices": {leaf: [3, 5]}}]
    settings += [{"modules_to_save": [leaf]}]
    for lora in (replace(plain, **each) for each in settings):
        module, num_trained = injected(config, lora)
        rows, saved = sizes.hidden * sum(sizes.rows_by_name(lora).values()), sizes.saved_by_name(lora).values()
        assert sizes.adapter_parameters(lora) + rows + sum(map(math.prod, saved)) == num_trained > num_plain
        assert sizes.trains_head(lora) == module.get_output_embeddings().weight.requires_grad


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen2_moe"])
def test_adapters_of_experts_are_counted_as_injected(model_type: str) -> None:
    config = small_config(model_type)
    sizes = read_decoder(config)
    assert isinstance(sizes, Counted)
    plain = LoraConfig(r=4, alpha=8.0, targets=["all-linear"])
    lora = replace(plain, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    module, num_trained = injected(config, lora)
    assert sizes.adapter_parameters(lora) == num_trained
    share = config.num_experts_per_tok / module.get_parameter(next(iter(sizes.adapted_experts(lora)))).shape[0]
    how = {"seq_len": SEQ_LEN, "recomputed": Recomputed()}
    flops, less = (flops_of_token(config, lora=each, **how) for each in (lora, plain))
    of_experts = num_trained - sizes.adapter_parameters(plain)
    assert flops.lora - less.lora == pytest.approx(6.0 * of_experts * share)
    # A layer's last matrix is not computed again: that of experts, unless a shared expert follows.
    leaves = ("gate_up_proj", "down_proj")[: 2 if "shared_expert" in sizes.last_projection else 1]
    second = tuple(f"{leaf}.lora_B" for leaf in leaves)
    experts = ((name, p) for name, p in module.named_parameters() if p.ndim == 3)
    again = sum(p.numel() for name, p in experts if name.endswith(second))
    assert flops.recomputation - less.recomputation == pytest.approx(2.0 * again * share)


@pytest.mark.parametrize("model_type", [name for name in BY_FORMULA if name != "qwen3_5_text"])
@pytest.mark.parametrize("rank", [0, 4])
def test_modules_count_as_the_formula_does(model_type: str, rank: int) -> None:
    """FLOPs with every kind of recomputation, which the formulas have from training programs (test_flops.py)."""
    config = small_config(model_type)
    formula, counted = read_decoder(config), counted_decoder(config)
    lora = LoraConfig(r=rank, alpha=8.0, targets=["all-linear"])
    assert (counted.parameters, counted.matrices) == (formula.parameters, formula.matrices)
    assert (counted.windows, counted.tied) == (formula.windows, formula.tied)
    assert sum(counted.multiplied.values()) == sum(formula.multiplied.values())
    assert counted.adapted_by_name(lora) == formula.adapted_by_name(lora)
    assert counted.attention(SEQ_LEN) == formula.attention(SEQ_LEN)
    for saved in ((), ("attention",), ("attention", "q_proj", "up_proj")):
        how = {"seq_len": SEQ_LEN, "lora": lora, "recomputed": Recomputed(saved)}
        with pytest.MonkeyPatch.context() as patched:
            expected = flops_of_token(config, **how)
            patched.setattr(flops_module, "read_decoder", counted_decoder)
            assert flops_of_token(config, **how).total == pytest.approx(expected.total)


@pytest.mark.parametrize(
    ("model_type", "remat"),
    [("nemotron", "none"), ("nemotron", "layer_inputs"), ("gpt_neox", "none"), ("starcoder2", "layer_inputs")],
)
def test_a_training_program_has_the_products_that_are_counted(model_type: str, remat: str) -> None:
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    words = ["model=tiny", "model.dtype=float32", "model.attention=eager", f"model.remat={remat}", "lora.r=4"]
    config = composed(*words, "lora.targets=[all-linear]", "model.init=random")
    values = {name: value for name, value in small_config(model_type).to_diff_dict().items() if value is not None}
    arch = values | {"num_hidden_layers": 4, "vocab_size": 4096, "model_type": model_type}
    config = replace(config, model=replace(config.model, size="full", arch=arch, tiny_arch={}))
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    run = Run(config, runtime)
    batch = runtime.put(random_batch(0, rows=ROWS, seq_len=SEQ_LEN), rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops
    arch = run.model.source.config
    flops, sizes = trained_flops(config, arch, seq_len=SEQ_LEN), read_decoder(arch)
    assert isinstance(sizes, Counted)
    causal = flops.attention / 3
    every = sum(2.0 * (each.queries + each.values) * SEQ_LEN for each in sizes.modules.mixing)
    again = 1.0 if remat == "layer_inputs" else 0.0
    assert found / (ROWS * SEQ_LEN) == pytest.approx(flops.total + (3 + again) * (every - causal), rel=1e-9)


@pytest.mark.parametrize("model_type", [*BY_MODULES, "gemma2", "qwen3"])
def test_layers_repeat_where_they_are_folded(model_type: str) -> None:
    """By the rule of models/stack/fold.py, in the depth that the class has by default."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.benchmarks.decoders import IDS
    from tests.benchmarks.families import OWN

    config = CONFIG_MAPPING[model_type](**IDS, **OWN.get(model_type, {}))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    _, layers = decoder_layers(module)
    assert counted_decoder(config).modules.repeats == (repetition(layers, length=len(layers))[1] > 0)
    assert counted_decoder(config).modules.repeats == (model_type not in ("apertus", "deepseek_v3"))


@pytest.mark.parametrize("model_type", ["falcon_h1", "minimax", "mamba2"])
def test_a_state_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError, match=f"model_type={model_type}; its FLOPs and bytes are not counted"):
        read_decoder(small_config(model_type))


def test_settings_alone_load_no_transformers() -> None:
    with pytest.raises(ConfigError, match=r"model\.arch\.model_type=nemotron"):
        read_decoder(json.loads(small_config("nemotron").to_json_string()))


@pytest.mark.slow
def test_every_causal_type_is_counted_to_the_digit_or_refused() -> None:
    """Some 120 of transformers' 180 types; those that no small copy computes are left out."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    exact, wrong = 0, []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            theirs, ours, parameters, sizes = counts(small_config(model_type))
        except Exception:  # refused by us, or by the class itself, as it likes
            continue
        exact += 1
        # Convolutions of each feature over a few tokens are not counted.
        if not ours <= theirs <= 1.01 * ours or sizes.parameters != parameters:
            wrong.append((model_type, theirs / ours))
    assert exact > 100
    assert wrong == []
