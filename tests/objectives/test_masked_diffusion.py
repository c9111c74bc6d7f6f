"""Masked diffusion: the bound against the sum over all masks, its two estimators, what is never masked or predicted."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from tests.models.encoders import SMALL, packed_rows
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.data.batches import Batch
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.isolation import require_isolation
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.masked_diffusion import MaskedDiffusion, times
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.tasks.setup import require_fit
from tpu_experiments.training.batches import with_noise

pytestmark = pytest.mark.xla
TOKENIZER = "tpu_experiments/samples/tokenizer"
MASK_ID, END_ID = 4, 2
DECODERS = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 3.0},
    "phi": {},  # its head has a bias, so that logits are computed for whole rows
}


def model_of(model_type="llama", **values) -> HuggingFaceModel:
    arch = {"model_type": model_type, **SMALL, **DECODERS.get(model_type, {}), **values}
    attention = "eager" if model_type == "gemma2" else "sdpa"
    model = ModelConfig(name="x", path="", init="random", dtype="float32", attention=attention, arch=arch)
    return HuggingFaceModel(model, seed=0, causal=False)


def built(model_type="llama", **values):
    torch.manual_seed(0)
    source = model_of(model_type, **values)
    return source.built(source.config, dtype=torch.float32).eval()


def objective(*, chunk_tokens=None, **settings) -> MaskedDiffusion:
    made = MaskedDiffusion(**settings, computing=Computing(chunk_tokens))
    made.mask_id, made.end_id = MASK_ID, END_ID
    return made


def words(count, *, seed=0, index=0):
    """Random words of the rows of a batch, as a step makes them."""
    empty = np.zeros((count, 1), np.int32)
    found = with_noise(Batch(empty, empty, empty, empty, [""] * count), seed=seed, index=index, is_spread=True)
    return torch.from_numpy(found.noise_G)


def drawn_rows(*, rows=2, **sizes):
    found = packed_rows(rows=rows, **sizes)
    return found | {"noise": words(rows)}


def one_document(rows):
    """Rows of one document of 9 tokens, of which the first is given."""
    ids = torch.arange(10, 19, dtype=torch.int32).expand(rows, 9).contiguous()
    index = torch.arange(9, dtype=torch.int32).expand(rows, 9).contiguous()
    ones = torch.ones(rows, 9, dtype=torch.int32)
    return {"ids": ids, "learn": (index > 0).int(), "positions": index, "segments": ones, "noise": words(rows)}


@torch.no_grad()
def losses_of(module, masked_N9):
    """Losses -log p (N, 9) of the document's tokens under these masks, by the module's own forward pass."""
    ids = torch.arange(10, 19).expand(masked_N9.shape)
    read = torch.where(masked_N9, MASK_ID, ids)
    logits = module(input_ids=read, attention_mask=torch.zeros(len(read), 1, 9, 9)).logits
    logits[..., MASK_ID] = -torch.inf
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * masked_N9


@pytest.fixture(scope="module")
def enumerated():
    """The module, every set of masked tokens (255, 9), and the sum of losses of each."""
    module = built(initializer_range=0.2)
    sets = torch.tensor([(False, *chosen) for chosen in itertools.product((False, True), repeat=8)][1:])
    return module, sets, losses_of(module, sets).sum(1)


def test_both_estimators_are_the_sum_over_all_masks(enumerated):
    """16,384 draws of each, within 4 standard errors of the sum over 255 masks; the exact number varies less."""
    module, sets, losses_N = enumerated
    sizes_N = sets.sum(1)
    shares_N = torch.tensor([1 / (size * math.comb(8, size)) for size in sizes_N.tolist()])
    bound = float((losses_N * shares_N).sum())
    own, rows = objective(), one_document(16384)
    numbers = (sets.long() << torch.arange(9)).sum(1)
    table = torch.zeros(512).index_put((numbers,), losses_N)
    spreads = {}
    for name in ("masked_by_chance", "masked_exactly"):
        masking = getattr(own, name)(rows)
        is_masked = masking.weights_RT > 0
        assert torch.equal(masking.rows["ids"] == MASK_ID, is_masked)
        weights_R = masking.weights_RT.amax(1)
        estimates_R = weights_R * table[(is_masked.long() << torch.arange(9)).sum(1)]
        spreads[name] = float(estimates_R.std())
        assert abs(float(estimates_R.mean()) - bound) < 4 * spreads[name] / 128
        if name == "masked_exactly":  # equally spaced times: every number as often
            assert is_masked.sum(1).bincount().tolist() == [0] + [2048] * 8
            torch.testing.assert_close(weights_R, 8 / is_masked.sum(1))
    assert spreads["masked_exactly"] < 0.8 * spreads["masked_by_chance"]
    # The objective's own numbers are these, row by row.
    some = {key: tensor[::64] for key, tensor in rows.items()}
    parameters = dict(module.named_parameters())
    scores = own.scores(module, parameters, some)
    torch.testing.assert_close(scores.sums_R, estimates_R[::64], rtol=1e-4, atol=1e-5)
    summary = own.summary(own.sums(module, parameters, some).tolist())
    assert summary.loss == pytest.approx(float(estimates_R[::64].mean()) / 8, rel=1e-5)
    error = float(estimates_R[::64].std(correction=0)) / 16 / 8
    ends = [math.log(summary.measures[f"perplexity_bound_{end}"]) for end in ("low", "high")]
    assert ends == pytest.approx([summary.loss - 1.96 * error, summary.loss + 1.96 * error], rel=1e-4)


def test_the_sum_over_all_masks_is_the_mean_over_orders(enumerated):
    """A token at a time by the chain rule, the mean over all orders of five."""
    module, _, _ = enumerated
    orders = list(itertools.permutations(range(1, 6)))
    masks = torch.zeros(len(orders), 5, 9, dtype=torch.bool)
    for row, order in enumerate(orders):
        for step in range(5):
            masks[row, step, list(order[step:])] = True
    losses = losses_of(module, masks.flatten(0, 1)).view(len(orders), 5, 9)
    chain = sum(losses[row, step, order[step]] for row, order in enumerate(orders) for step in range(5)) / len(orders)
    sets = torch.zeros(31, 9, dtype=torch.bool)
    sets[:, 1:6] = torch.tensor(list(itertools.product((False, True), repeat=5))[1:])
    shares = torch.tensor([1 / (size * math.comb(5, size)) for size in sets.sum(1).tolist()])
    torch.testing.assert_close((losses_of(module, sets).sum(1) * shares).sum(), chain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("chunk_tokens", [None, 9])
@pytest.mark.parametrize("model_type", DECODERS)
def test_loss_and_gradient_are_those_of_masked_documents(model_type, chunk_tokens):
    """Of every document alone, by the module's own forward pass, without the mask token among the predicted ones."""
    module, own, rows = built(model_type), objective(chunk_tokens=chunk_tokens), drawn_rows()
    rows["learn"][:, :3] = 0
    parameters = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    sums_R, counts_R = own.row_loss(module, parameters, rows)
    assert counts_R.tolist() == [34.0, 34.0]
    assert float(own.count(rows)) == 68
    masking, expected = own.masked_by_chance(rows), torch.zeros(())
    for row, number in itertools.product(range(2), (1, 2)):
        here = rows["segments"][row] == number
        ids, weights = masking.rows["ids"][row][here][None].long(), masking.weights_RT[row][here]
        logits = module(input_ids=ids, attention_mask=torch.zeros(1, 1, len(weights), len(weights))).logits[0]
        barred = torch.arange(logits.shape[-1]) == MASK_ID
        losses = F.cross_entropy(logits.masked_fill(barred, -1e30), rows["ids"][row][here].long(), reduction="none")
        expected = expected + (losses * weights).sum()
    torch.testing.assert_close(sums_R.sum(), expected, rtol=1e-5, atol=0)
    found = torch.autograd.grad(sums_R.sum(), list(parameters.values()))
    wanted = torch.autograd.grad(expected, list(module.parameters()))
    for name, ours, other in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    if model_type == "llama":
        head = dict(zip(parameters, found, strict=True))["lm_head.weight"]
        assert not head[MASK_ID].any()
        assert head[5].any()


def test_tokens_are_learnt_from_both_sides():
    """Sequences that count on from a random start modulo 32: from ln 32 = 3.47 nats to below 1 in 100 steps."""
    small = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    module, own = built(**small, initializer_range=0.1), objective()
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.999), weight_decay=0)
    random, index = torch.Generator().manual_seed(0), torch.arange(16)

    def rows(number):
        ids = 8 + (torch.randint(0, 32, (24, 1), generator=random) + index).int() % 32
        ones = torch.ones_like(ids)
        given = {"ids": ids, "learn": ones * (index > 0), "positions": index.int().expand(24, 16), "segments": ones}
        return given | {"noise": words(24, index=number)}

    for number in range(100):
        sums_R, counts_R = own.row_loss(module, parameters, rows(number))
        optimizer.zero_grad()
        (sums_R.sum() / counts_R.sum()).backward()
        optimizer.step()
    summary = own.summary(own.sums(module, parameters, rows(1000)).tolist())
    assert summary.loss < 1.0
    assert summary.measures["accuracy"] > 0.7


def test_times_of_a_batch_are_equally_spaced_and_each_uniform():
    rows = {"noise": words(64), "segments": torch.tensor([[1, 2, 3]]).repeat(64, 1).int()}
    for column in times(rows).T:
        gaps = np.diff(np.sort(column.numpy()))
        assert gaps == pytest.approx(1 / 64, abs=1e-6)
    first = np.array(
        [float(times({"noise": words(64, index=i), "segments": torch.ones(64, 1).int()})[0]) for i in range(2000)]
    )
    assert abs(first.mean() - 0.5) < 4 / math.sqrt(12 * 2000)
    assert abs(np.quantile(first, 0.9) - 0.9) < 0.03


def test_what_is_given_is_never_masked():
    """Prompts, padding, and the mask token itself, whose loss would be infinite."""
    own, rows = objective(), drawn_rows(rows=64)
    rows["learn"][:, :8] = 0
    rows["ids"][:, 12] = MASK_ID
    given = torch.zeros(64, 40, dtype=torch.bool)
    given[:, :8] = given[:, 12] = given[:, 37:] = True
    for masking in (own.masked_by_chance(rows), own.masked_exactly(rows)):
        assert not (masking.weights_RT > 0)[given].any()
        assert torch.equal(masking.rows["ids"][given], rows["ids"][given])
        assert (masking.weights_RT > 0)[~given].float().mean() > 0.4
    assert float(own.count(rows)) == 64 * 28


def test_padding_behind_an_answer_is_learnt_as_its_end():
    own, rows = objective(end_padding=True), drawn_rows(rows=3, lengths=(21, 0))
    rows["learn"][:, :9] = 0
    rows["learn"][1] = 0  # a row without an answer
    for name in ("ids", "learn", "positions", "segments"):
        rows[name][2] = 0  # a row that fills up the batch
    whole = own.ended(rows)
    assert whole["ids"][0, 21:].tolist() == [END_ID] * 19
    assert whole["positions"][0].tolist() == list(range(40))
    assert whole["segments"][0].tolist() == [1] * 40
    assert float(own.count(rows)) == 12 + 19
    assert all(torch.equal(whole[name][1:], rows[name][1:]) for name in rows)
    assert all(torch.equal(whole[name][0, :21], rows[name][0, :21]) for name in ("ids", "learn", "positions"))
    with torch.no_grad():
        module = built()
        scores = own.scores(module, dict(module.named_parameters()), rows)
    assert scores.weights_R.tolist() == [12, 0, 0]


def test_draws_are_the_same_on_torch_xla(make_config):
    device = make_runtime(make_config("hw.runtime=xla"))
    own, rows = objective(end_padding=True), drawn_rows(rows=8)
    placed = {name: device.place(tensor, name=name) for name, tensor in rows.items()}
    for mask in (own.masked_by_chance, own.masked_exactly):
        here, there = mask(own.ended(rows)), mask(own.ended(placed))
        assert torch.equal(here.rows["ids"], there.rows["ids"].cpu())
        torch.testing.assert_close(here.weights_RT, there.weights_RT.cpu(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_decoders_with_windows_attend_within_them_on_both_sides(model_type, caplog):
    require_isolation(model_of(model_type, num_key_value_heads=2, sliding_window=4), is_packed=True)
    assert "was not checked" not in caplog.text


def test_mask_tokens_that_cannot_be_used_are_refused(make_config):
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    with pytest.raises(ConfigError, match=r"has no mask token; .*objective\.mask_token="):
        MaskedDiffusion(tokenizer=tokenizer)
    chat = (
        "objective=masked_diffusion",
        'objective.mask_token="<|im_end|>"',
        "data=[sample_chat]",
        "curriculum=single",
    )
    with pytest.raises(ConfigError, match=r"<\|im_end\|>; the chat format writes it into every conversation of data\."):
        require_fit(make_config(*chat), tokenizer)
    with pytest.raises(ConfigError, match=r"end_padding=true with prepare\.packing=best_fit; .*prepare\.packing=pad"):
        make_config("objective=masked_diffusion", "objective.end_padding=true")
