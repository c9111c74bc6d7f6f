"""Masks and targets: causal, inside one document, inside the window; packed documents do not see each other."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Olmo2Config

from tests.training.tiny import ARCHITECTURES, Run, plain_config
from tpu_experiments.models.passes.forward import attention_masks, logits_of, target_weights, window_of
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = pytest.mark.xla
TINY = ("model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager")


class Window:
    def __init__(self, window=None, layer_types=None):
        self.sliding_window, self.layer_types = window, layer_types


def plain(segments, window):
    """The same rule, written as loops."""
    rows, length = segments.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for b in range(rows):
        for i in range(length):
            for j in range(i + 1):
                near = window is None or i - j < window
                mask[b, 0, i, j] = near and bool(segments[b, i] == segments[b, j])
    return mask


@pytest.fixture
def segments():
    generator = torch.Generator().manual_seed(3)
    borders = torch.sort(torch.randint(1, 20, (4, 3), generator=generator)).values
    return torch.stack([(torch.arange(20)[:, None] >= row).sum(1) + 1 for row in borders])


@pytest.mark.parametrize("window", [None, 1, 5])
def test_single_mask(segments, window):
    assert torch.equal(attention_masks(segments, config=Window(window)), plain(segments, window))


@pytest.mark.parametrize(("kind", "read"), [(MistralConfig, True), (LlamaConfig, False), (Olmo2Config, False)])
def test_a_window_is_that_of_a_class_that_has_one(segments, kind, read):
    """A config keeps any key of its file, and transformers' Llama reads none of that name."""
    config = kind(sliding_window=5)
    assert (config.sliding_window, window_of(config)) == (5, 5 if read else None)
    assert torch.equal(attention_masks(segments, config=config), plain(segments, 5 if read else None))


def test_one_mask_per_layer_type(segments):
    types = ["sliding_attention", "full_attention"]
    masks = attention_masks(segments, config=Window(4, types))
    assert torch.equal(masks["full_attention"], plain(segments, None))
    assert torch.equal(masks["sliding_attention"], plain(segments, 4))


def rows_of(lengths, *, seed=0, total=72):
    """One row that packs documents of these lengths, padding behind."""
    ids = torch.randint(5, 4000, (1, total), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    segments = torch.zeros(1, total, dtype=torch.int32)
    positions = torch.zeros(1, total, dtype=torch.int32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        segments[0, start : start + length] = number
        positions[0, start : start + length] = torch.arange(length)
        start += length
    return {"ids": ids, "segments": segments, "positions": positions, "learn": torch.ones_like(ids)}


@pytest.fixture(params=ARCHITECTURES)
def forward(request, make_config):
    config = make_config(f"model={request.param}", *TINY)
    run = Run(config, EagerRuntime(config.hw))
    with torch.no_grad():
        for name, value in run.parameters.items():
            if name.endswith("lora_B"):
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.05)

    def logits(rows):
        with torch.no_grad():
            return logits_of(run.model.module, run.parameters, rows)[0]

    return logits


def test_a_change_in_one_document_changes_no_other_and_nothing_before(forward):
    rows = rows_of([40, 24])  # 40 is longer than Gemma's window of 32
    changed = {name: t.clone() for name, t in rows.items()}
    changed["ids"][0, 10] += 1
    before, after = forward(rows), forward(changed)
    torch.testing.assert_close(after[:10], before[:10], atol=0, rtol=0)
    torch.testing.assert_close(after[40:64], before[40:64], atol=0, rtol=0)
    assert (after[10:40] - before[10:40]).abs().max() > 1e-3


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 36), min_size=2, max_size=6), st.data())
def test_whatever_is_in_a_document_changes_no_logit_of_another(forward, lengths, data):
    lengths = [length for i, length in enumerate(lengths) if sum(lengths[: i + 1]) <= 72]
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    start, stop = sum(lengths[:chosen]), sum(lengths[: chosen + 1])
    rows = rows_of(lengths)
    changed = {name: t.clone() for name, t in rows.items()}
    changed["ids"][0, start:stop] = torch.tensor(
        data.draw(st.lists(st.integers(5, 3999), min_size=stop - start, max_size=stop - start)), dtype=torch.int32
    )
    before, after = forward(rows), forward(changed)
    torch.testing.assert_close(after[:start], before[:start], atol=0, rtol=0)
    torch.testing.assert_close(after[stop : sum(lengths)], before[stop : sum(lengths)], atol=0, rtol=0)


def test_a_packed_document_has_the_logits_it_has_alone(forward):
    packed = rows_of([40, 24])
    alone = rows_of([24])
    alone["ids"][0, :24] = packed["ids"][0, 40:64]
    torch.testing.assert_close(forward(packed)[40:64], forward(alone)[:24], atol=2e-5, rtol=0)


def test_targets_never_cross_a_document_and_padding_is_not_learnt():
    rows = rows_of([40, 24])
    targets, weights = target_weights(rows)
    assert torch.equal(targets[0, :-1], rows["ids"][0, 1:])
    expected = torch.zeros(1, 72)
    expected[0, :39] = 1
    expected[0, 40:63] = 1
    assert torch.equal(weights, expected)


def test_only_learnt_tokens_are_targets():
    rows = rows_of([72])
    rows["learn"][0, :30] = 0
    _, weights = target_weights(rows)
    assert weights.sum() == 42
    assert weights[0, 29] == 1
    assert weights[0, 28] == 0
    assert weights[0, 71] == 0


@pytest.mark.parametrize("model", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_long_documents_have_the_logits_of_transformers_own_masks(make_config, model, attention):
    """96 tokens are beyond Mistral's window of 48 and Gemma's of 32."""
    config = make_config(f"model={model}", *TINY, f"model.attention={attention}")
    run = Run(config, EagerRuntime(config.hw))
    rows = rows_of([96], total=96)
    with torch.no_grad():
        ours = logits_of(run.model.module, run.parameters, rows)
        torch.manual_seed(config.seed)
        base = AutoModelForCausalLM.from_config(plain_config(run), dtype=torch.float32).eval()
        theirs = base(input_ids=rows["ids"], use_cache=False).logits  # B is zero: the base model's own
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", ARCHITECTURES[:2])
def test_the_window_matters(make_config, model):
    """Without it the same weights give other logits, so the test above can fail."""
    config = make_config(f"model={model}", "model.attention=sdpa", *TINY)
    run = Run(config, EagerRuntime(config.hw))
    rows = rows_of([96], total=96)
    with torch.no_grad():
        windowed = logits_of(run.model.module, run.parameters, rows)
        run.model.module.config.sliding_window = 1000
        open_ = logits_of(run.model.module, run.parameters, rows)
    assert (windowed[0, -1] - open_[0, -1]).abs().max() > 1e-3
