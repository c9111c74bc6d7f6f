"""Routed experts: the numbers of transformers' loop over experts, whatever the router chose."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_xla
from transformers import CONFIG_MAPPING
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.models.adapters.experts import adapt_matrix
from tpu_experiments.models.parts.experts import STATIC
from tpu_experiments.runtime.kernels import on_xla
from tpu_experiments.runtime.kernels.grouped import GroupedProducts, install_grouped_products

pytestmark = pytest.mark.xla
TOKENS, CHOSEN, EXPERTS, HIDDEN = 128, 2, 4, 32
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), CHOSEN),
}
KINDS = {
    "mixtral": MixtralExperts,
    "qwen2_moe": Qwen2MoeExperts,
    "qwen3_moe": Qwen3MoeExperts,
    "gemma4_text": Gemma4TextExperts,
    "gpt_oss": GptOssExperts,
}


@pytest.fixture
def grouped():
    torch_xla.device()  # before the first backward pass on the CPU
    install_grouped_products(GroupedProducts(Mesh(), target="interpreted"))
    yield
    install_grouped_products(None)


def experts_of(model_type: str) -> torch.nn.Module:
    kind = CONFIG_MAPPING[model_type]
    made = KINDS[model_type](kind(**SIZES))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def inputs(*, tokens: int = TOKENS, one_expert: bool = False) -> list[torch.Tensor]:
    """Hidden values, the experts chosen and their weights, and a gradient."""
    torch.manual_seed(1)
    hidden, grad = torch.randn(2, tokens, HIDDEN)
    logits = torch.randn(tokens, EXPERTS)
    if one_expert:  # all tokens meet in two experts, and two have none
        logits[:, :2] += 100.0
    weights, index = logits.softmax(-1).topk(CHOSEN)
    return [hidden, index, weights / weights.sum(-1, keepdim=True), grad]


def gradients(experts: torch.nn.Module, given: list[torch.Tensor], *, implementation: str) -> list[torch.Tensor]:
    """Output and gradients of the hidden values, the router's weights and the experts' parameters."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    hidden, index, weights, grad = given
    hidden, weights = (tensor.detach().requires_grad_() for tensor in (hidden, weights))
    out = experts(hidden, index, weights)
    (out * grad).sum().backward()
    torch_xla.sync()
    return [t.detach().cpu() for t in (out, hidden.grad, weights.grad, *(p.grad for p in experts.parameters()))]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("one_expert", [False, True], ids=["spread", "all tokens in two experts"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("model_type", KINDS)
def test_routed_experts_have_the_output_and_gradients_of_transformers(grouped, model_type, device, one_expert):
    chosen = torch_xla.device() if device == "xla" else torch.device("cpu")
    given = inputs(one_expert=one_expert)
    found = gradients(experts_of(model_type).to(chosen), [t.to(chosen) for t in given], implementation=STATIC)
    wanted = gradients(experts_of(model_type), given, implementation="eager")
    assert worst(found, wanted) < 2e-6


@pytest.mark.parametrize("one_expert", [False, True], ids=["spread", "all tokens in two experts"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapters_in_groups_compute_what_those_of_every_expert_do(
    grouped, kind: str, device: str, one_expert: bool
) -> None:
    """Output and gradients of the hidden values, the router's weights, the matrices and the adapters."""
    chosen = torch_xla.device() if device == "xla" else torch.device("cpu")
    given = inputs(one_expert=one_expert)
    found = gradients(adapted(kind).to(chosen), [tensor.to(chosen) for tensor in given], implementation=STATIC)
    install_grouped_products(None)
    wanted = gradients(adapted(kind), given, implementation=STATIC)
    assert len(found) == 3 + len(list(adapted(kind).parameters()))
    assert worst(found, wanted) < 2e-6


def adapted(kind: str) -> torch.nn.Module:
    """Experts with adapters of random values on both matrices."""
    holder = torch.nn.Module()
    holder.experts = experts_of(kind)
    for leaf in ("gate_up_proj", "down_proj"):
        adapt_matrix(holder, f"experts.{leaf}", r=3, scale=2.0)
    torch.manual_seed(3)
    for name, parameter in holder.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return holder.experts


def test_only_a_tpu_has_grouped_products_and_tokens_that_do_not_fill_tiles_meet_every_expert(grouped):
    hw = HwConfig(parallel="spmd", num_devices=8)
    assert on_xla.grouped_products_for(hw, mesh=Mesh(fsdp=8), device="CPU") is None
    products = on_xla.grouped_products_for(hw, mesh=Mesh(fsdp=8), device="TPU")
    assert products.parts_of(8 * 64, of_token=2) == 8
    assert products.parts_of(8 * 63, of_token=2) == products.parts_of(1020, of_token=8) == 0
    alone = on_xla.grouped_products_for(HwConfig(parallel="spawn", num_devices=8), mesh=Mesh(fsdp=8), device="tpu")
    assert alone.mesh.num_devices == 1
    given = inputs(tokens=3)
    found = gradients(experts_of("qwen3_moe"), given, implementation=STATIC)
    assert worst(found, gradients(experts_of("qwen3_moe"), given, implementation="eager")) < 2e-6


def test_tokens_split_over_devices_have_the_gradients_of_one(grouped):
    """Each device sorts its own tokens, and the gradients of experts are summed over all of them."""
    command = [sys.executable, "-m", "tests.models.split_experts"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    worst_of = {name: float(worst) for name, worst in map(str.split, done.stdout.splitlines())}
    assert set(worst_of) == {"split", "whole"}
    assert max(worst_of.values()) < 5e-6
