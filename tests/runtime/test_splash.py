"""The very kernels of the TPU, interpreted on the CPU, against plain attention; and the numbers they are cut by."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
from transformers.models.mistral.modeling_mistral import apply_rotary_pos_emb

from tests.models.plain_kernel import mask_of
from tpu_experiments.runtime.kernels import attention
from tpu_experiments.runtime.kernels.attention import AttentionCall, Scores
from tpu_experiments.runtime.kernels.splash import arguments_of, attention_function, lowered

pytestmark = pytest.mark.xla  # they go backward on the CPU, which fixes autograd's queues
# The first and the third take several blocks.
MISTRAL = AttentionCall(2, 8, 2, 256, 128, "float32", Scores(128**-0.5, window=100), rotates=True, max_block=128)
GEMMA = AttentionCall(2, 4, 1, 128, 256, "float32", Scores(256**-0.5, soft_cap=30.0), rotates=True)
# 200 tokens are padded to 256
QWEN = AttentionCall(2, 6, 2, 200, 64, "float32", Scores(64**-0.5), rotates=True, max_block=128)
PLAIN = AttentionCall(1, 2, 1, 128, 128, "float32", Scores(0.1))
# Encoders: a token attends to both sides, to 40 tokens on each, or to its whole document; the last in one block.
LOCAL = AttentionCall(2, 4, 4, 384, 64, "float32", Scores(0.125, window=41, causal=False), max_block=128)
WHOLE = AttentionCall(2, 4, 2, 200, 64, "float32", Scores(0.125, causal=False), rotates=True, max_block=128)
ONE_BLOCK = AttentionCall(1, 8, 8, 128, 128, "float32", Scores(0.1, causal=False), rotates=True)
# One block of several parts, the last of them shorter; 380 tokens are padded to 384.
PARTS = AttentionCall(2, 4, 2, 380, 64, "float32", Scores(0.125), rotates=True)
CAPPED = AttentionCall(1, 8, 2, 384, 128, "float32", Scores(0.1, window=200, soft_cap=20.0), rotates=True)
AROUND = AttentionCall(1, 2, 2, 512, 64, "float32", Scores(0.125, window=65, causal=False))
# Two blocks of two parts each, and a window that reaches into the block before.
BLOCKS = AttentionCall(1, 4, 2, 1024, 64, "float32", Scores(0.125, window=600, soft_cap=9.0), True, max_block=512)
NARROW = AttentionCall(1, 4, 1, 384, 16, "float32", Scores(0.25, window=48), rotates=True)


def random_inputs(call: AttentionCall) -> list[torch.Tensor]:
    """q, k, v, the gradient of the output, cosines and sines, and segments: three documents of random length and
    padding at the end. Sines are not those of one angle for both halves of a head, nor do they go with the cosines."""
    generator = torch.Generator().manual_seed(0)
    queries = (call.rows, call.heads, call.length, call.head_dim)
    keys = (call.rows, call.kv_heads, call.length, call.head_dim)
    turns = (2, call.rows, call.length, call.head_dim)
    tensors = [torch.randn(shape, generator=generator) for shape in (queries, keys, keys, queries, turns)]
    borders = torch.sort(torch.randint(1, call.length - 9, (call.rows, 2), generator=generator)).values
    segments = 1 + (torch.arange(call.length)[None, :, None] >= borders[:, None, :]).sum(2)
    segments[:, -9:] = 0
    return [*tensors, segments.to(torch.int32)]


@functools.cache
def compiled(call: AttentionCall, direction: str):
    """Without the compiler's expensive passes, which took most of these tests' time."""
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(attention_function(call, direction=direction, target="interpreted"), compiler_options=quickly)


def by_kernel(call: AttentionCall, q, k, v, grad, turns, segments) -> list[torch.Tensor]:
    """Output, dq, dk, dv, heads first."""
    *qkv, do = (t.transpose(1, 2).flatten(2).numpy() for t in (q, k, v, grad))
    given = [*qkv, segments.numpy(), *([turns.numpy()] if call.rotates else [])]
    out, log_sum = compiled(call, "forward")(*given)
    gradients = compiled(call, "backward")(*given, out, log_sum, do)
    found = (torch.from_numpy(np.array(t)) for t in (out, *gradients))
    return [t.unflatten(2, (-1, call.head_dim)).transpose(1, 2) for t in found]


def by_formula(call: AttentionCall, q, k, v, grad, turns, segments) -> list[torch.Tensor]:
    """The same in float64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    groups = call.heads // call.kv_heads
    turned = apply_rotary_pos_emb(q, k, *turns.double()) if call.rotates else (q, k)
    scores = turned[0] @ turned[1].repeat_interleave(groups, 1).mT * call.scores.scale
    if call.scores.soft_cap:
        scores = call.scores.soft_cap * torch.tanh(scores / call.scores.soft_cap)
    scores = scores.masked_fill(~mask_of(segments, call.scores), -torch.inf)
    out = torch.softmax(scores, -1) @ v.repeat_interleave(groups, 1)
    out.backward(grad.double())
    return [t.detach().float() for t in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(
    "call",
    [MISTRAL, GEMMA, QWEN, PLAIN, LOCAL, WHOLE, ONE_BLOCK, PARTS, CAPPED, AROUND, NARROW, BLOCKS],
    ids=[
        *("mistral", "gemma", "qwen", "not turned", "local encoder", "encoder", "encoder of one block"),
        *("parts", "parts with window and cap", "parts of a local encoder", "narrow heads", "blocks of parts"),
    ],
)
def test_the_kernels_compute_attention_and_its_gradients(call):
    inputs = random_inputs(call)
    for kernel, formula in zip(by_kernel(call, *inputs), by_formula(call, *inputs), strict=True):
        torch.testing.assert_close(kernel, formula, atol=1e-5 * float(formula.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("whole_bytes", [attention.WHOLE_BYTES, 0], ids=["whole rows", "splash"])
def test_cosines_and_sines_in_float32_turn_heads_in_bfloat16(whole_bytes, monkeypatch):
    """As OLMo's do; rounded to bfloat16 they would move the output three times as far as its own rounding."""
    monkeypatch.setattr(attention, "WHOLE_BYTES", whole_bytes)
    call = dataclasses.replace(MISTRAL, dtype="bfloat16", rotation_dtype="float32")
    assert arguments_of(call, direction="forward")[4].dtype == jax.numpy.float32
    *tensors, turns, segments = random_inputs(call)
    tensors = [tensor.bfloat16() for tensor in tensors]
    expected = by_formula(call, *tensors, turns, segments)[0]
    flat = [jax.numpy.asarray(t.transpose(1, 2).flatten(2).float().numpy(), dtype=call.dtype) for t in tensors[:3]]

    def apart(turns: torch.Tensor) -> float:
        run = attention_function(call, direction="forward", target="interpreted")
        out = torch.from_numpy(np.array(run(*flat, segments.numpy(), turns.numpy())[0], dtype=np.float32))
        return float((out.unflatten(2, (call.heads, -1)).transpose(1, 2) - expected).norm() / expected.norm())

    assert apart(turns) < 0.005
    assert apart(turns) < 0.9 * apart(turns.bfloat16().float())


@pytest.mark.parametrize("call", [MISTRAL, QWEN, LOCAL, WHOLE], ids=["mistral", "qwen", "local encoder", "encoder"])
def test_rows_that_do_not_fit_are_computed_by_splash(call, monkeypatch):
    monkeypatch.setattr(attention, "WHOLE_BYTES", 0)
    compiled.cache_clear()
    assert not call.is_whole
    inputs = random_inputs(call)
    for kernel, formula in zip(by_kernel(call, *inputs), by_formula(call, *inputs), strict=True):
        torch.testing.assert_close(kernel, formula, atol=1e-5 * float(formula.abs().max()), rtol=1e-5)
    compiled.cache_clear()


@pytest.mark.parametrize("call", [MISTRAL, ONE_BLOCK, QWEN, PARTS], ids=["mistral", "one block", "qwen", "parts"])
def test_the_backward_pass_reads_the_layer_of_a_number_out_of_stacks(call):
    """The same numbers, and none of another layer; heads of fewer than 128 features, and rows that are padded, are
    copied out first."""
    q, k, v, grad, turns, segments = random_inputs(call)
    *qkv, do = (t.transpose(1, 2).flatten(2).numpy() for t in (q, k, v, grad))
    rest = [segments.numpy(), *([turns.numpy()] if call.rotates else [])]
    results = compiled(call, "forward")(*qkv, *rest)
    expected = compiled(call, "backward")(*qkv, *rest, *results, do)
    stacks = [np.full((3, *t.shape), np.nan, dtype=np.float32) for t in qkv]
    for stack, tensor in zip(stacks, qkv, strict=True):
        stack[1] = tensor
    stacked = dataclasses.replace(call, layers=3)
    assert stacked.reads_by_number == (call in (MISTRAL, ONE_BLOCK))
    found = compiled(stacked, "backward")(*stacks, *rest, *results, np.int32(1), do)
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_nothing_crosses_from_one_segment_to_another():
    q, k, v, grad, turns, segments = random_inputs(GEMMA)
    inside = (segments == 2)[:, None, :, None]
    assert inside.any(2).all()
    others = [torch.where(inside, t + 1, t) for t in (q, k, v)]
    before = by_kernel(GEMMA, q, k, v, grad, turns, segments)
    after = by_kernel(GEMMA, *others, grad, turns, segments)
    for old, new in zip(before, after, strict=True):
        same = (old == new).all(3, keepdim=True)
        assert same[(~inside).expand_as(same)].all()
        assert not same[inside.expand_as(same)].all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 500])
def test_only_blocks_with_a_visible_pair_are_visited(window, causal):
    scores = Scores(1.0, window=window, causal=causal)
    call = AttentionCall(1, 1, 1, 1152, 64, "bfloat16", scores, max_block=128)
    mask = mask_of(torch.ones(1, 1152), scores)[0, 0]
    blocks = mask.view(9, 128, 9, 128).any(3).any(1)
    assert call.visited_blocks == int(blocks.sum())


@pytest.mark.parametrize(
    ("length", "padded", "block"),
    [(1, 128, 128), (128, 128, 128), (1000, 1024, 1024), (1100, 1536, 768), (2048, 2048, 1024), (13 * 128, 2048, 1024)],
)
def test_rows_of_any_length_are_cut_into_large_blocks(length, padded, block):
    call = AttentionCall(1, 1, 1, length, 64, "bfloat16", Scores(1.0))
    assert (call.padded_length, call.block) == (padded, block)


@pytest.mark.parametrize(
    ("length", "window", "block"),
    [(1024, 65, 1024), (8192, 65, 256), (2048, 512, 512), (2048, 300, 256), (8192, 4096, 1024)],
)
def test_blocks_of_long_rows_are_no_longer_than_the_window(length, window, block):
    assert AttentionCall(1, 1, 1, length, 64, "bfloat16", Scores(1.0, window=window)).block == block


@pytest.mark.parametrize(("length", "block"), [(300, 384), (512, 512), (1024, 512), (8192, 512)])
def test_blocks_of_wide_heads_are_shorter(length, block):
    assert AttentionCall(8, 4, 1, length, 256, "bfloat16", Scores(1.0)).block == block
    assert AttentionCall(8, 4, 1, length, 192, "bfloat16", Scores(1.0)).block == block
    assert AttentionCall(8, 4, 1, length, 128, "float32", Scores(1.0)).block == block


def test_a_window_as_long_as_the_row_is_none():
    assert dataclasses.replace(MISTRAL, scores=Scores(1.0, window=256)).window is None
    assert dataclasses.replace(MISTRAL, scores=Scores(1.0, window=255)).window == 255


@pytest.mark.parametrize(
    ("direction", "length", "num_kernels"),
    [
        ("forward", 128, 1),
        ("backward", 128, 1),
        ("forward", 9216, 3),  # splash: q and k are turned by kernels of their own
        ("backward", 9216, 6),  # and dq and dk are turned back; dq has a kernel too
    ],
)
def test_each_chip_gets_its_rows(direction, length, num_kernels):
    """Lowered for 8 chips in a process that has none: the kernel sees one row of eight."""
    from jax._src.lib import xla_client

    scores = Scores(0.125)
    call = AttentionCall(8, 8, 2, length, 128, "bfloat16", scores, rotates=True, num_shards=8, max_block=128)
    text = xla_client.XlaComputation(lowered(call, direction=direction, target="tpu")).as_hlo_text()
    found = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(found) == num_kernels
    shape = f"bf16[1,{length},1024]" if call.is_whole else f"bf16[{length},1024]"
    assert any(shape in kernel for kernel in found)
    assert not any("bf16[8" in kernel for kernel in found)
    assert text.count("sharding={devices=[8,1,1]<=[8]}") >= 4
    assert "sharding={devices=[1,8,1,1]<=[8]}" in text
    assert text.count('custom_call_target="SPMDShardToFullShape"') == (2 if direction == "forward" else 3)


def test_each_chip_gets_its_rows_of_stacks():
    from jax._src.lib import xla_client

    call = AttentionCall(8, 16, 8, 128, 128, "bfloat16", Scores(0.125), True, num_shards=4, head_shards=2, layers=3)
    text = xla_client.XlaComputation(lowered(call, direction="backward", target="tpu")).as_hlo_text()
    (kernel,) = (line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line)
    assert kernel.count("bf16[3,2,128,1024]") == 1
    assert kernel.count("bf16[3,2,128,512]") == 2
    assert text.count("sharding={devices=[1,4,1,2]<=[8]}") >= 3
    assert "dynamic-slice" not in text


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_chip_gets_its_heads(direction):
    """8 chips, pairs of which share 8 heads of queries and 2 of keys: the kernel sees two rows of eight, 4 heads, 1."""
    from jax._src.lib import xla_client

    call = AttentionCall(8, 8, 2, 128, 128, "bfloat16", Scores(0.125), rotates=True, num_shards=4, head_shards=2)
    assert (call.of_one_chip.heads, call.of_one_chip.kv_heads) == (4, 1)
    text = xla_client.XlaComputation(lowered(call, direction=direction, target="tpu")).as_hlo_text()
    kernels = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert any("bf16[2,4,128,128]" in kernel for kernel in kernels)
    assert not any("bf16[2,8," in kernel or "bf16[2,128,1024]" in kernel for kernel in kernels)
    assert "sharding={devices=[4,1,2]<=[8]}" in text
    assert "sharding={devices=[1,4,1,1,2]<=[8] last_tile_dim_replicate}" in text
    assert call.flops("fwd") == 2 * call.of_one_chip.flops("fwd")


def test_whole_rows_compute_the_scores_that_their_parts_meet():
    assert [call.num_blocks for call in (MISTRAL, GEMMA, QWEN, PARTS)] == [2, 1, 2, 1]
    assert GEMMA.flops("fwd") == 2 * 2 * 4 * 128 * 128 * 256
    assert 2 * GEMMA.flops("bwd") == 5 * GEMMA.flops("fwd")
    assert MISTRAL.exponentials("bwd") == 8 * 128**2 * (2 + 1)
    row = dataclasses.replace(MISTRAL, length=16384)
    assert not row.is_whole
    assert 2 * (row.flops("dkv") + row.flops("dq")) == 7 * row.flops("fwd")
    long = dataclasses.replace(GEMMA, length=1024, head_dim=128, dtype="bfloat16")
    assert long.exponentials("fwd") == long.exponentials("bwd") == 4 * 1024**2 * 10 // 16  # tiles of 256 x 256
    window = dataclasses.replace(long, scores=Scores(1.0, window=100))
    assert window.exponentials("fwd") == 4 * 256 * (256 + 3 * 384)
    assert window.exponentials("bwd") == 4 * 256 * (3 * 384 + 256)
    both = dataclasses.replace(long, scores=Scores(1.0, causal=False))
    assert both.exponentials("fwd") == 4 * 1024**2


@pytest.mark.parametrize("phase", ["fwd", "bwd"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 500])
def test_parts_meet_every_token_that_they_see(window, causal, phase):
    """And no group of 128 that none of them sees."""
    scores = Scores(1.0, window=window, causal=causal)
    call = AttentionCall(1, 1, 1, 896, 64, "bfloat16", scores)
    mask = mask_of(torch.ones(1, 896), scores)[0, 0]
    mask = mask if phase == "fwd" else mask.T
    parts = call.meetings(phase)
    assert [token for part, _ in parts for token in range(part.start, part.stop)] == list(range(896))
    for part, others in parts:
        groups = mask[part].view(-1, 7, 128).any(2).any(0)
        assert groups.nonzero().flatten().tolist() == list(range(others.start // 128, others.stop // 128))
