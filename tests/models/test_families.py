"""Each family of decoders: a checkpoint that transformers wrote is loaded, computes what transformers computes, and is
trained on torch_xla, with the adapters that the table of conf/model/README.md has."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.benchmarks.decoders import table
from tests.models.plain_kernel import PlainKernel
from tests.tiers import only
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.models.adapters.lora import adapted_weights
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.isolation import require_isolation
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.kernels.attention import install_attention_kernel

pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("plain_attention"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
MANUAL = Path(__file__).parents[2] / "conf" / "model" / "README.md"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = {"num_key_value_heads": 4}
DELTA = ["linear_attention", "full_attention"] * 2
DELTA_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} | dict.fromkeys(
    ("linear_key_head_dim", "linear_value_head_dim"), 16
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """One line of the table."""

    name: str
    model_type: str
    attention: str = "flash"
    values: dict[str, Any] = field(default_factory=dict)
    """Of the config, beside SIZES."""

    def config(self) -> PretrainedConfig:
        """A tiny config of the family."""
        if self.model_type == "gemma3":
            vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
            vision |= {"image_size": 28, "patch_size": 14}
            return CONFIG_MAPPING["gemma3"](text_config=SIZES | self.values, vision_config=vision)
        kind = CONFIG_MAPPING[self.model_type]
        settable = {name: value for name, value in SIZES.items() if not isinstance(getattr(kind, name, None), property)}
        return kind(**settable | self.values)


FAMILIES = (
    Family("Llama", "llama"),
    Family("Mistral", "mistral", values={"sliding_window": 8}),
    Family("Mixtral", "mixtral", values={"num_local_experts": 4}),
    Family("Qwen 2", "qwen2"),
    Family("Qwen 3", "qwen3"),
    Family("Qwen 3 MoE", "qwen3_moe", values=EXPERTS),
    Family("Qwen 3.5, text", "qwen3_5_text", values={"num_hidden_layers": 4, "layer_types": DELTA, **DELTA_HEADS}),
    Family("Gemma 2", "gemma2", values={"sliding_window": 8}),
    Family("Gemma 3, text", "gemma3_text", values={"sliding_window": 8}),
    Family("Gemma 3, multimodal", "gemma3", values={"sliding_window": 8}),
    Family("Phi", "phi", values=FULL),
    Family("Phi-3", "phi3"),
    Family("OLMo 2", "olmo2"),
    Family("SmolLM 3", "smollm3", values={"no_rope_layers": [1, 0]}),
    Family("Granite", "granite"),
    Family("Falcon", "falcon", attention="eager", values={"num_kv_heads": 4}),
    Family("GPT-2", "gpt2", values=dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    Family("GPT-NeoX", "gpt_neox", values=FULL),
    Family("GPT-OSS", "gpt_oss", attention="eager", values={"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("xLSTM", "xlstm", attention="sdpa", values={"num_heads": 4}),
)
REFUSED = (
    ("BERT", "bert", "`bert` (an encoder)"),
    ("BitNet", "bitnet", "`bitnet` (ternary weights, unless `model.linear=bitnet`)"),
    ("Mamba", "mamba", "`mamba`, `mamba2`, `rwkv` and `jamba` (a state beside the attention)"),
)


REFUSED_ATTENTION = {("falcon", "flash"), ("gpt_oss", "flash"), ("gpt_oss", "sdpa"), ("gemma2", "sdpa")} | {
    ("xlstm", "flash"),
    ("xlstm", "eager"),
}


def require_line(family: Family, adapted: list[str]) -> None:
    """The manual's line of the family has these adapters; Gemma 3's is that of its text model."""
    lines = MANUAL.read_text(encoding="utf-8").splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ") for line in lines if line.startswith("| `")}
    name = {"gemma3": "gemma3_text"}.get(family.model_type, family.model_type)
    assert cells[f"| `{name}`"][3] == ", ".join(adapted)


TRAINED_IN_EVERY_RUN = ("mixtral", "gpt2")


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def written(family, tmp_path_factory):
    """Transformers' model with weights that move logits, and the folder it was saved in."""
    folder = tmp_path_factory.mktemp(family.model_type)
    torch.manual_seed(0)
    config = family.config()
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return model, folder


def source_of(family: Family, folder: Path, *, attention: str | None = None) -> HuggingFaceModel:
    model = ModelConfig(name="x", path=str(folder), dtype="float32", attention=attention or family.attention)
    return HuggingFaceModel(model, seed=0)


def built_of(source: HuggingFaceModel, *, r: int, dora: bool = False):
    lora = LoraConfig(r=r, alpha=2.0 * r, targets=["all-linear"], dora=dora)
    return build_model(source, lora=lora, seed=0, place=lambda tensor, name: tensor)


def packed_rows() -> dict[str, torch.Tensor]:
    return {name: tensor[0, :1] for name, tensor in random_batch(3).items() if name not in ("lr",)}


def alone(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers computes for each document of a row by itself."""
    segments = rows["segments"][0]
    parts = [rows["ids"][:, segments == number].long() for number in segments[segments > 0].unique()]
    with torch.no_grad():
        return torch.cat([model(input_ids=part, use_cache=False).logits[0] for part in parts])


def test_a_packed_row_computes_what_transformers_does(family, written):
    model, folder = written
    source = source_of(family, folder)
    require_isolation(source, is_packed=True)
    built, rows = built_of(source, r=4), packed_rows()
    with torch.no_grad():
        ours = logits_of(built.module.eval(), built.trainable, rows)[0][rows["segments"][0] > 0]
    torch.testing.assert_close(ours, alone(model, rows), atol=2e-5, rtol=2e-5)


@pytest.fixture
def kernel():
    """A kernel that is installed, as on a TPU whatever the model's attention is."""
    made = PlainKernel()
    install_attention_kernel(made)
    yield made
    install_attention_kernel(None)


@pytest.mark.parametrize("attention", ["flash", "sdpa", "eager"])
def test_every_attention_computes_what_transformers_does_beside_a_kernel(family, written, attention, kernel):
    model, folder = written
    rows = packed_rows()
    try:
        source = source_of(family, folder, attention=attention)
        built = built_of(source, r=0)
    except ConfigError as error:
        has_it = (family.model_type, attention) not in REFUSED_ATTENTION
        if has_it or f"model.attention={attention}" not in str(error):
            raise
        return
    assert (family.model_type, attention) not in REFUSED_ATTENTION
    with torch.no_grad():
        ours = logits_of(built.module.eval(), built.trainable, rows)[0][rows["segments"][0] > 0]
    torch.testing.assert_close(ours, alone(model, rows), atol=2e-5, rtol=2e-5)
    layers = family.values.get("layer_types", ["full_attention"] * SIZES["num_hidden_layers"])
    assert len(kernel.turned) == (layers.count("full_attention") if attention == "flash" else 0)


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_give_the_same_logits_in_peft(family, written, tmp_path, dora):
    from peft import PeftModel

    _, folder = written
    source = source_of(family, folder)
    built, rows = built_of(source, r=4, dora=dora), packed_rows()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in built.trainable.items():
            if name.endswith("lora_B"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
        ours = logits_of(built.module.eval(), built.trainable, rows)[0][rows["segments"][0] > 0]
    write_adapter(
        str(tmp_path),
        parameters={source.outer_name(name): tensor for name, tensor in built.trainable.items()},
        initial={},
        lora=LoraConfig(r=4, alpha=8.0, targets=["all-linear"], dora=dora),
        base_path=str(folder),
        revision=None,
        is_transposed=any(adapted_weights(built.module).values()),
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    before = alone(base.eval(), rows)
    theirs = alone(PeftModel.from_pretrained(base, str(tmp_path)).eval(), rows)
    assert (before - theirs).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.fixture
def trained(family, written, make_config):
    """Losses of three steps on torch_xla and without it, and the names of adapted modules."""
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config()
    model = replace(config.model, path=str(written[1]), init="pretrained", size="full", dtype="float32")
    lora = replace(config.lora, r=4, alpha=8.0, targets=["all-linear"])
    config = replace(config, model=replace(model, attention=family.attention, arch={}), lora=lora)
    run = Run(config, XlaRuntime(config.hw, sharding=config.sharding))
    batches = [random_batch(0, lr=1e-2)] * 3
    losses, plain = run.losses(batches), Run(config, EagerRuntime(config.hw)).losses(batches)
    leaves = sorted({name.split(".")[-2] for name in adapted_weights(run.model.module)})
    return losses, plain, leaves


@pytest.mark.parametrize(
    "family", only(TRAINED_IN_EVERY_RUN, FAMILIES, name=lambda one: one.model_type), indirect=True, scope="module"
)
def test_three_steps_on_torch_xla(trained, family):
    losses, plain, adapted = trained
    assert losses == sorted(losses, reverse=True), losses
    assert losses[2] < losses[0] - 0.01
    assert losses == pytest.approx(plain, abs=2e-4)
    require_line(family, adapted)


@pytest.mark.parametrize("one", [family for family in FAMILIES if family.attention == "eager"], ids=lambda f: f.name)
def test_flash_is_refused_where_it_would_leave_something_out(one, tmp_path):
    one.config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.attention=flash.* use model\.attention=eager"):
        source_of(one, tmp_path, attention="flash").empty()


@pytest.mark.parametrize(("name", "model_type", "why"), REFUSED)
def test_what_is_refused_says_so(name, model_type, why, tmp_path):
    Family(name, model_type).config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(model_type)):
        require_isolation(source_of(Family(name, model_type, "eager"), tmp_path), is_packed=False)
    assert why in " ".join(MANUAL.read_text(encoding="utf-8").split())


def test_the_table_of_every_decoder_is_that_of_its_results():
    lines = (BENCHMARKS / "decoders.jsonl").read_text(encoding="utf-8").splitlines()
    written = (BENCHMARKS / "decoders.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in written if line.startswith("|")] == list(table([json.loads(line) for line in lines]))
