"""The kernel inside torch_xla's graphs: traced by AOTAutograd, looped over by scan, split over chips."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config
import torch_xla
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch_xla.experimental.scan import scan

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.models.parts.attention import flash
from tpu_experiments.runtime.kernels.attention import AttentionCall, Scores, install_attention_kernel
from tpu_experiments.runtime.kernels.on_xla import XlaAttention, attention_kernel_for

pytestmark = pytest.mark.xla
LAYERS, ROWS, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 3, 2, 4, 2, 128, 16
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """What sdpa asks a layer of transformers for."""

    num_key_value_groups = HEADS // KV_HEADS


@pytest.fixture
def interpreted():
    install_attention_kernel(XlaAttention(mesh=Mesh(), target="interpreted"))
    yield
    install_attention_kernel(None)


def layer(hidden, weights, segments):
    """Attention with a residual branch; all (ROWS, LENGTH, WIDTH)."""
    q, k, v = ((hidden @ weights[name]).view(ROWS, LENGTH, -1, HEAD_DIM).transpose(1, 2) for name in "qkv")
    mixed, _ = flash(Attention(), q, k, v, segments, scaling=HEAD_DIM**-0.5, sliding_window=50)
    return hidden + mixed.reshape(ROWS, LENGTH, WIDTH) @ weights["o"]


def inputs() -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Layer input, stacked weights, segments (ROWS, 1, 1, LENGTH)."""
    torch.manual_seed(0)
    keys = KV_HEADS * HEAD_DIM
    weights = {n: torch.randn(LAYERS, WIDTH, w) / 8 for n, w in dict(q=WIDTH, k=keys, v=keys, o=WIDTH).items()}
    segments = torch.sort(torch.randint(1, 4, (ROWS, LENGTH))).values
    segments[:, -9:] = 0
    return torch.randn(ROWS, LENGTH, WIDTH), weights, segments[:, None, None].int()


def in_a_loop(hidden, weights, segments):
    for index in range(LAYERS):
        hidden = layer(hidden, {name: w[index] for name, w in weights.items()}, segments)
    return hidden


def one_layer(carry, weights):
    hidden, segments = carry
    return (layer(hidden, weights, segments), segments), None


def scanned(hidden, weights, segments):
    carry = (hidden, segments.float())  # scan wants gradients of what it carries, so no integers
    (hidden, _), _ = scan(
        one_layer, carry, weights, partition_fn=min_cut_rematerialization_partition, is_fn_pure=True
    )  # fmt: skip
    return hidden


def gradients(run, device, *, causal: bool) -> list[torch.Tensor]:
    """Output, gradients of the input and of every weight."""
    hidden, weights, segments = inputs()
    segments = segments if causal else segments.mT
    hidden = hidden.to(device).requires_grad_()
    weights = {name: w.to(device).requires_grad_() for name, w in weights.items()}
    out = run(hidden, weights, segments.to(device))
    out.square().sum().backward()
    torch_xla.sync()  # one program for all that follow
    return [t.detach().cpu() for t in (out, hidden.grad, *(w.grad for w in weights.values()))]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
def test_a_scanned_layer_with_the_kernel_has_the_gradients_of_sdpa(interpreted, causal):
    """Only the layer inputs are saved, so that the forward kernel runs again in the backward pass."""
    with functorch_config.patch(activation_memory_budget=0.0):
        by_kernel = gradients(scanned, torch_xla.device(), causal=causal)
    install_attention_kernel(None)
    for kernel, sdpa in zip(by_kernel, gradients(in_a_loop, "cpu", causal=causal), strict=True):
        torch.testing.assert_close(kernel, sdpa, atol=1e-5 * float(sdpa.abs().max()), rtol=0)


def test_only_a_tpu_has_a_kernel():
    hw = HwConfig(parallel="spmd", num_devices=8)
    assert attention_kernel_for(hw, mesh=Mesh(fsdp=8), device="CPU") is None
    assert attention_kernel_for(hw, mesh=Mesh(fsdp=8), device="TPU").mesh.num_shards == 8
    spawned = HwConfig(parallel="spawn", num_devices=8, attention_block=256)
    kernel = attention_kernel_for(spawned, mesh=Mesh(fsdp=8), device="tpu")
    assert (kernel.mesh.num_devices, kernel.max_block, kernel.holds_rows) == (1, 256, False)


@pytest.mark.parametrize(("name", "holds"), [("v6e8", True), ("colab", True), ("v5p-8", True), ("v4-8", False)])
def test_chips_with_little_vector_memory_take_long_rows_by_splash(name, holds):
    kernel = attention_kernel_for(composed(f"hw={name}").hw, mesh=Mesh(), device="tpu")
    assert kernel.holds_rows == holds
    call = AttentionCall(1, 8, 2, 2048, 128, "bfloat16", Scores(1.0), holds_rows=kernel.holds_rows)
    assert call.is_whole == holds
    assert dataclasses.replace(call, length=1024).is_whole


def test_dropout_is_refused(interpreted):
    q, k, segments = torch.ones(1, 4, 128, 8), torch.ones(1, 2, 128, 8), torch.ones(1, 1, 1, 128)
    with pytest.raises(ConfigError, match=r"has dropout=0\.1 of the weights"):
        flash(Attention(), q, k, k, segments, dropout=0.1)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_and_heads_split_over_devices_have_the_gradients_of_sdpa(tensor):
    """Rows that do not divide by the devices that share them are on all of them, and the kernel runs everywhere."""
    uneven = "6" if tensor == 1 else "3"
    command = [sys.executable, "-m", "tests.runtime.split_attention", str(tensor), "8", uneven]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert [(rows, lies) for rows, _, lies in found] == [("8", "split"), (uneven, "whole")]
    assert max(float(worst) for _, worst, _ in found) < 5e-6
