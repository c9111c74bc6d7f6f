"""Replaced-token detection: masks, draws, labels, losses and gradients, against hand-made ones and transformers'."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2Model, ElectraConfig, ElectraForPreTraining

from tests.training.tiny import random_batch
from tpu_experiments.models.gumbel import gumbel, sampled
from tpu_experiments.models.replaced_token import (
    SHARED,
    WORDS,
    ReplacedTokenDetection,
    discriminator_tensors,
    embedded_words,
    replaced_logits_of,
)
from tpu_experiments.objectives.replaced_token import ReplacedToken, most_masks

pytestmark = pytest.mark.xla
VOCABULARY, MASK = 4000, 4
DELTA = f"discriminator.{WORDS}"
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "initializer_range": 0.2,
}


def model_of(**values):
    torch.manual_seed(0)
    return ReplacedTokenDetection(DebertaV2Config(**{**CONFIG, **values}))


def parameters_of(module, *, delta=0.1):
    """Its parameters as training holds them; E_delta as after some steps."""
    found = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name in found:
        if name in (DELTA, DELTA.replace("word", "position")):
            found[name] = delta * torch.randn(found[name].shape, generator=torch.Generator().manual_seed(1))
    return {name: p.requires_grad_() for name, p in found.items()}


def rows_of(seed=3, **shape):
    batch = random_batch(seed, dropout=0.5, **shape)
    return {name: tensor[0] for name, tensor in batch.items() if name != "lr"}


@dataclass
class Tokens:
    """What the objective reads of a tokenizer."""

    mask_token_id: int = MASK
    all_special_ids: tuple[int, ...] = ()


def objective_of(**settings):
    return ReplacedToken(tokenizer=Tokens(), **settings)


def test_the_discriminator_leaves_the_shared_embedding_alone():
    """Its gradients are those of a plain embedding E_D whose gradient belongs to E_delta, and to nothing of E_G."""
    module, rows = model_of(), rows_of()
    parameters = parameters_of(module)
    logits = replaced_logits_of(module, parameters, rows["ids"], rows)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    own = {name: p for name, p in parameters.items() if not name.startswith("generator.")}
    grads = torch.autograd.grad((logits * weights).sum(), list(parameters.values()), allow_unused=True)
    by_name = dict(zip(parameters, grads, strict=True))
    assert all(by_name[name] is None for name in parameters if name.startswith("generator."))

    whole = DebertaV2Model(module.config)
    whole.load_state_dict({n: t.detach() for n, t in discriminator_tensors(parameters).items()})
    embedded = whole.embeddings(input_ids=rows["ids"])
    mask = (rows["segments"][:, :, None] == rows["segments"][:, None, :])[:, None]
    hidden = whole.encoder(embedded, mask).last_hidden_state
    starts = torch.arange(hidden.shape[1]) - rows["positions"]
    first = torch.stack([hidden[row, starts[row].long()] for row in range(len(hidden))])
    expected = module.replaced(hidden, first)
    torch.testing.assert_close(logits, expected)
    (expected * weights).sum().backward()
    theirs = {f"discriminator.{name}": p.grad for name, p in whole.named_parameters()}
    assert theirs[DELTA].abs().sum() > 0
    for name in own:
        if name in theirs:
            torch.testing.assert_close(by_name[name], theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_parts_of_the_loss_reach_their_own_model_alone(biased):
    module, rows = model_of(position_biased_input=biased), rows_of()
    parameters = parameters_of(module)
    sums, counts = objective_of().row_loss(module, parameters, rows)
    assert sums.shape == counts.shape == (4, 2)
    for part, prefixes in enumerate([("generator.",), ("discriminator.", "replaced.")]):
        grads = torch.autograd.grad(
            sums[:, part].sum(), list(parameters.values()), allow_unused=True, retain_graph=True
        )
        for (name, _), grad in zip(parameters.items(), grads, strict=True):
            is_own = name.startswith(prefixes)
            # The part of the layers that the enhanced mask decoder does not need is in no model of it.
            assert (grad is not None and bool(grad.abs().sum() > 0)) == is_own, name
    (group, other) = objective_of(generator_rate=0.5).parameter_groups(list(parameters), clip_norm=1.0)
    assert {*group.names, *other.names} == parameters.keys()
    assert (group.rate, other.rate, group.clip_norm) == (0.5, 1.0, 1.0)


def test_losses_are_transformers_own():
    """Its masked language model's cross-entropy (with absolute positions in the input), and Electra's of the labels."""
    module, rows = model_of(position_biased_input=True), rows_of()
    parameters, objective = parameters_of(module), objective_of(rtd_weight=7.0)
    alone = {"segments": torch.ones_like(rows["segments"]), "positions": torch.arange(32).expand(4, 32)}
    rows = rows | alone
    sums, counts = objective.row_loss(module, parameters, rows)
    losses = sums.sum(0) / counts.sum(0)
    slots, taken = objective.slots(rows)
    chosen = torch.zeros_like(rows["ids"], dtype=torch.bool).scatter(1, slots, taken > 0)

    config = copy.deepcopy(module.config)
    config.num_hidden_layers, config.legacy = 2, False
    generator = DebertaV2ForMaskedLM(config)
    generator.load_state_dict(
        {n.removeprefix("generator."): p.detach() for n, p in parameters.items() if n.startswith("generator.")}
    )
    masked = torch.where(chosen, MASK, rows["ids"]).long()
    found = generator(masked, labels=torch.where(chosen, rows["ids"], -100).long())
    torch.testing.assert_close(losses[0], found.loss, rtol=1e-5, atol=0)

    predictions = objective.predictions(module, parameters, rows)
    electra = ElectraForPreTraining(ElectraConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1,
                                                  num_attention_heads=1, intermediate_size=8))  # fmt: skip
    electra.discriminator_predictions.forward = lambda _: predictions.logits_RT
    expected = electra(
        rows["ids"].long() % 8, attention_mask=torch.ones_like(rows["ids"]), labels=predictions.replaced_RT.long()
    )
    torch.testing.assert_close(losses[1], 7.0 * expected.loss, rtol=1e-5, atol=0)


def test_padding_and_other_documents_change_nothing():
    module, rows = model_of(), rows_of()
    parameters = {name: p.detach() for name, p in parameters_of(module).items()}
    found = replaced_logits_of(module, parameters, rows["ids"], rows)
    second = rows["segments"] == 2
    changed = torch.where(second, rows["ids"], (rows["ids"] + 1) % VOCABULARY)
    other = replaced_logits_of(module, parameters, changed, rows)
    torch.testing.assert_close(found[second], other[second])
    assert not torch.equal(found[rows["segments"] == 1], other[rows["segments"] == 1])


def test_labels_are_electras():
    """A token is labelled as replaced if it differs from the original, not if it was masked."""
    module = model_of(initializer_range=0.02)
    rows = rows_of(rows=16)
    parameters = parameters_of(module)
    bias = "generator.lm_predictions.lm_head.bias"
    with torch.no_grad():  # the generator is nearly sure of one token, which is often right
        rows["ids"][:, ::2] = 17
        parameters[bias][17] = 9.0
    objective = objective_of(mask_rate=0.5)
    found = objective.predictions(module, parameters, rows)
    slots, taken = objective.slots(rows)
    masked = torch.zeros(rows["ids"].shape).scatter(1, slots, taken) > 0
    assert not found.replaced_RT[~masked].any()
    right = masked & (rows["ids"] == 17)
    assert right.sum() > 20
    assert found.replaced_RT[right].mean() < 0.5
    assert found.replaced_RT[masked & (rows["ids"] != 17)].mean() > 0.9


def test_masks_are_a_share_of_what_is_learnt_and_no_special_token():
    rows = rows_of(rows=64, seq_len=128)
    rows["ids"][:, ::3] = 7
    objective = ReplacedToken(tokenizer=Tokens(all_special_ids=(7,)))
    slots, taken = objective.slots(rows)
    assert slots.shape == (64, most_masks(128, 0.15)) == (64, 36)
    assert all(len(set(row.tolist())) == 36 for row in slots)
    masked = torch.zeros(rows["ids"].shape).scatter(1, slots, taken) > 0
    able = (rows["learn"] > 0) & (rows["segments"] > 0) & (rows["ids"] != 7)
    assert not masked[~able].any()
    count = int(able.sum())
    # Five standard deviations of a binomial.
    assert abs(int(masked.sum()) - 0.15 * count) < 5 * (count * 0.15 * 0.85) ** 0.5
    again = objective.slots({**rows, "noise": rows["noise"] + 1})
    assert not torch.equal(again[0], slots)
    torch.testing.assert_close(objective.count(rows), torch.stack([taken.sum(), (rows["segments"] > 0).sum().float()]))


def test_a_draw_has_the_softmax_as_its_distribution():
    """By Pearson's statistic over 20,000 draws of 8 values; 24.3 is exceeded once in 1,000 times (7 degrees)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -2.5])
    words = torch.arange(20_000, dtype=torch.int32) * 7919
    counts = torch.bincount(sampled(logits.expand(len(words), -1), words), minlength=8)
    expected = torch.softmax(logits, -1) * len(words)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3
    noise = gumbel(words[:100], 1000)
    assert noise.isfinite().all()
    # Mean and deviation of the standard Gumbel distribution, over 100,000 values.
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.std()) == pytest.approx(1.2825, abs=0.02)


def test_an_export_has_the_sum_of_both_embeddings(tmp_path):
    """A discriminator that AutoModel loads has the states of the trained one, at tokens without padding."""
    from transformers import AutoModel

    module, rows = model_of(), rows_of()
    parameters = {name: p.detach() for name, p in parameters_of(module).items()}
    whole = DebertaV2Model(module.config)
    whole.load_state_dict(discriminator_tensors(parameters))
    whole.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    length = int((rows["segments"][0] == 1).sum())
    ids = rows["ids"][:, :length].long()
    hidden = loaded(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    expected = replaced_logits_of(module, parameters, rows["ids"], rows)[:, :length]
    torch.testing.assert_close(module.replaced(hidden, hidden[:, :1]), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        loaded.embeddings.word_embeddings(ids), embedded_words(parameters, ids, rows["positions"][:, :length])
    )


def test_deltas_start_at_zero_and_the_generator_has_half_the_layers():
    module = model_of(position_biased_input=True)
    parameters = dict(module.named_parameters())
    for name in (DELTA, DELTA.replace("word", "position")):
        assert not parameters[name].any()
        assert parameters[name.replace("discriminator.", SHARED)].any()
    assert len(module.generator.deberta.encoder.layer) == 2
    assert len(model_of(generator_layers=1).generator.deberta.encoder.layer) == 1


def test_the_enhanced_mask_decoder_is_microsofts():
    """Its loop over the last layer (apps/models/masked_language_model.py), written out."""
    module, rows = model_of(), rows_of()
    generator = module.generator
    ids = rows["ids"].long()
    mask = (rows["segments"][:, :, None] == rows["segments"][:, None, :])[:, None]
    with torch.no_grad():
        encoder = generator.deberta.encoder
        states = encoder(generator.deberta.embeddings(ids), mask, output_hidden_states=True).hidden_states
        hidden = states[-2]
        query = generator.position_embeddings(rows["positions"]) + hidden
        for layer in [encoder.layer[-1] for _ in range(2)]:
            query, _ = layer(hidden, mask, query_states=query, relative_pos=None,
                             rel_embeddings=encoder.get_rel_embedding())  # fmt: skip
        logits = generator.lm_predictions(query, generator.deberta.embeddings.word_embeddings)
        found = generator.hidden(ids, rows["positions"], mask)
        found = F.linear(
            found, generator.deberta.embeddings.word_embeddings.weight, generator.lm_predictions.lm_head.bias
        )
    torch.testing.assert_close(found, logits)
