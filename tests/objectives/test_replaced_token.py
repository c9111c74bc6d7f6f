"""Replaced-token detection: masks, draws, labels, losses and gradients, against hand-made ones and transformers'."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2Model,
    ElectraConfig,
    ElectraForPreTraining,
)

from tests.training.runs import finished, records, run
from tests.training.tiny import random_batch
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.metrics.flops import replaced_token_flops
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.metrics.held_out import detection as detection_measures
from tpu_experiments.models.passes.gumbel import gumbel, sampled
from tpu_experiments.models.replaced_token import (
    SHARED,
    WORDS,
    ReplacedTokenDetection,
    ReplacedTokenModel,
    discriminator_tensors,
    embedded_words,
    replaced_logits_of,
)
from tpu_experiments.objectives.masked import num_places
from tpu_experiments.objectives.replaced_token import SUMS, ReplacedToken
from tpu_experiments.objectives.vocabulary import Vocabulary
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.xla.replay import NUM_FIRST
from tpu_experiments.tasks.setup import check_model
from tpu_experiments.training.batches import RunInputs, load_run_tokenizer
from tpu_experiments.training.trainer import Trainer

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


def objective_of(**settings):
    made = ReplacedToken(**settings)
    made.masked.vocabulary = Vocabulary(MASK, VOCABULARY, ((MASK, MASK),))
    return made


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
    chosen = objective.masked.chosen(rows)

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
    masked = objective.masked.chosen(rows)
    assert not found.replaced_RT[~masked].any()
    right = masked & (rows["ids"] == 17)
    assert right.sum() > 20
    assert found.replaced_RT[right].mean() < 0.5
    assert found.replaced_RT[masked & (rows["ids"] != 17)].mean() > 0.9


def test_detections_of_tokens_add_up_to_the_sums():
    module, rows = model_of(), rows_of(rows=16)
    parameters, objective = {n: p.detach() for n, p in parameters_of(module).items()}, objective_of(mask_rate=0.3)
    with torch.no_grad():  # about half of the tokens are taken for replaced
        parameters["replaced.classifier.bias"] -= objective.predictions(module, parameters, rows).logits_RT.median()
    found = dict(zip(SUMS, objective.sums(module, parameters, rows).tolist(), strict=True))
    scores = objective.document_scores(module, parameters, rows)
    replaced, said = scores.hits_RT >= 2, scores.hits_RT % 2 > 0
    assert 0 < found["found"] < min(found["said"], found["replaced"])
    counts = {"tokens": scores.weights_RT, "replaced": replaced, "said": said, "found": replaced & said}
    assert {name: float(each.sum()) for name, each in counts.items()} == {name: found[name] for name in counts}
    assert torch.equal(torch.roll(scores.weights_RT, 1, 1), (rows["segments"] > 0).float())
    assert float(scores.losses_RT.sum()) == pytest.approx(found["rtd_loss"], rel=1e-6)
    measures = detection_measures(np.array([[found[name] for name in ("tokens", "replaced", "said", "found")]]))
    told = objective.summary([found[name] for name in SUMS]).measures
    own = {"accuracy": "rtd_accuracy", "majority": "rtd_majority", "f1": "rtd_f1"}
    assert {name: float(measures[name][0]) for name in own} == pytest.approx(
        {n: told[other] for n, other in own.items()}
    )
    labels, guesses = replaced[scores.weights_RT > 0].numpy(), said[scores.weights_RT > 0].numpy()
    assert measures["precision"] == pytest.approx(labels[guesses].mean())
    assert measures["recall"] == pytest.approx(guesses[labels].mean())


def test_every_masked_token_becomes_the_mask_and_all_tokens_are_counted():
    rows, objective = rows_of(rows=16), objective_of(mask_rate=0.3)
    masking, chosen = objective.masked.masking(rows), objective.masked.chosen(rows)
    assert chosen.sum() > 20
    assert torch.equal(masking.rows["ids"], torch.where(chosen, MASK, rows["ids"]))
    assert objective.count(rows).tolist() == [int(chosen.sum()), int((rows["segments"] > 0).sum())]


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


def test_flops_are_counted_as_torch_counts_them():
    """Every product of a step; those that gather masked tokens, and of embeddings of distances, are added by hand."""
    config, rows = DebertaV2Config(**{**CONFIG, "hidden_size": 48}), rows_of()
    torch.manual_seed(0)
    module = ReplacedTokenDetection(config)
    objective = objective_of(mask_rate=0.3)
    with FlopCounterMode(display=False) as counter:
        sums, _ = objective.row_loss(module, parameters_of(module), rows)
        # A gradient of the embeddings needs that of every layer's input.
        sums.sum().backward()
    tokens, length = rows["ids"].numel(), rows["ids"].shape[1]
    counted = replaced_token_flops(config, seq_len=length, masked=num_places(length, rate=0.3) / length)
    runs = 4 + 2 + 1  # the discriminator's layers, the generator's, and its last one again
    projected = runs * 2 * 2.0 * (2 * config.position_buckets) * config.hidden_size**2
    gathered = 2 * 2.0 * tokens * num_places(length, rate=0.3) * config.hidden_size
    assert counter.get_total_flops() == counted.total * tokens + 3 * projected + gathered
    assert counted.model == counted.total


def config_of(make_config, *overrides):
    return make_config("experiment=deberta_v3_rtd", "debug=smoke", "trainer.canary.when=never", *overrides)


def step_of(config, runtime):
    """The trainer's step, as a run builds it."""
    inputs = RunInputs(load_run_tokenizer(config), {}, resolve_stages(config))
    trainer = Trainer(config, runtime, inputs=inputs, outputs=None, watch=Stopwatch())
    trainer.build()
    return trainer


def num_reads(metrics):
    return (metrics.metric_data("TransferFromDeviceTime") or (0,))[0]


def losses_on(config, runtime, *, num_steps):
    """Losses of some steps, as the trainer's step gives them."""
    trainer = step_of(config, runtime)
    # Rows of a length that no other test has: what this process has compiled before is not compiled again.
    sent = [random_batch(i, accumulation=1, rows=2, seq_len=24, dropout=0.5, lr=1e-3) for i in range(num_steps)]
    batches = [runtime.put(batch, rows_dim=1) for batch in sent]
    outputs = [trainer.step_program(batch) for batch in batches]
    runtime.wait()
    return outputs


def test_on_xla_one_program_without_a_host_read_trains_as_plain_torch_does(make_config):
    """With dropout of its own; one mask or draw that flips would move a loss by 1e-2."""
    import torch_xla.debug.metrics as met

    from tpu_experiments.runtime.xla.device import XlaRuntime

    words = ("model.tiny_arch.hidden_size=32", "model.tiny_arch.num_hidden_layers=1",
             "model.tiny_arch.vocab_size=4224")  # fmt: skip
    plain = config_of(make_config, "hw.runtime=eager", *words)
    expected = [float(output.loss) for output in losses_on(plain, make_runtime(plain), num_steps=5)]
    config = config_of(make_config, *words)
    runtime = XlaRuntime(config.hw, sharding=config.sharding, trace_every=50)
    before = runtime.counters().num_compiles
    met.clear_counters()
    reads = num_reads(met)
    outputs = losses_on(config, runtime, num_steps=NUM_FIRST + 2)
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    # The numbers that go into a traced program are read, to see whether they change.
    assert num_reads(met) - reads <= 2 * NUM_FIRST
    assert runtime.counters().num_compiles == before + 1
    assert runtime.counters().compiles_after_warmup == 0
    found = [float(output.loss.cpu()) for output in outputs]
    assert found[:5] == pytest.approx(expected, rel=1e-4)


REFUSED = {
    "a decoder": (("objective=rtd", "lora=none"), "model=tiny; the objective makes its models itself"),
    "an adapter": (("experiment=deberta_v3_rtd", "debug=smoke", "lora=all_linear_r8"), "lora.r=8 with objective=rtd"),
    "its model alone": (
        (
            "model=deberta_v3_base",
            "model.size=tiny",
            "lora=none",
            "model._target_=tpu_experiments.models.replaced_token.ReplacedTokenModel",
        ),
        "are trained by objective=rtd alone, and write no text",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused(make_config, case):
    overrides, words = REFUSED[case]
    config = make_config(*overrides)
    with pytest.raises(ConfigError, match=words):
        check_model(config, resolve_stages(config))


def test_a_checkpoint_has_no_generator(make_config):
    config = make_config(
        "experiment=deberta_v3_rtd", "model.init=pretrained", "model.path=tpu_experiments/samples/tiny_base"
    )
    with pytest.raises(ConfigError, match="trains DeBERTa's encoder, and this is a 'mistral'"):
        ReplacedTokenModel(config.model, seed=0, head="own", causal=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    words = ("experiment=deberta_v3_rtd", "debug=smoke", "hw.runtime=eager", "data.wiki_ro.test_fraction=0.3")
    return folder, finished(*words, output_dir=folder, as_typed=True)


@pytest.mark.slow
def test_documents_of_the_test_split_are_scored(whole):
    folder, result = whole
    place = f"task.run={folder / result['name']}"
    done = run("task=evaluate", place, "hw.runtime=eager", output_dir=folder, as_typed=True)
    assert done.returncode == 0, done.stderr
    assert "loss and accuracy are the discriminator's" in done.stdout
    found = json.loads((folder / result["name"] / "test_results.json").read_text())
    assert (found["objective"], "perplexity" in found) == ("rtd", False)
    (source,) = found["sources"].values()
    assert set(source["trained"]) == {"loss", "accuracy"}
    assert source["trained"]["loss"]["value"] < source["base"]["loss"]["value"]
    assert source["num_tokens"] > 100
    (detection,) = found["detection"].values()
    for side in ("base", "trained"):
        assert detection[side]["accuracy"]["value"] == pytest.approx(source[side]["accuracy"]["value"])
        assert 0.8 < detection[side]["majority"]["value"] < 0.95
    assert detection["num_tokens"] == source["num_tokens"]
    assert "F1 are of finding the replaced tokens" in done.stdout


@pytest.mark.slow
def test_a_run_exports_a_discriminator_that_auto_model_loads(whole):
    """Its states are those of the run's checkpoint, and the folder of all parameters is no model of that class."""
    tmp_path, result = whole
    place = result["parts"]["discriminator"]
    loaded = AutoModel.from_pretrained(place)
    stored = load_file(f"{result['adapter_path']}/model.safetensors")
    module = model_of(**json.loads((Path(result["adapter_path"]) / "config.json").read_text()))
    ids = torch.arange(5, 45)[None]
    rows = {"positions": torch.arange(40)[None], "segments": torch.ones(1, 40, dtype=torch.int32)}
    module.eval()
    with torch.no_grad():
        expected = replaced_logits_of(module, stored, ids, rows)
        hidden = loaded(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        module.load_state_dict(stored)
        torch.testing.assert_close(module.replaced(hidden, hidden[:, :1]), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="deberta-v2-replaced-token"):
        AutoModel.from_pretrained(result["adapter_path"])
    assert len(AutoTokenizer.from_pretrained(place)) == loaded.config.vocab_size
    measured = result["eval_measures"]
    assert measured["rtd_majority"] > 0.5
    assert set(measured) >= {"generator_loss", "generator_accuracy", "rtd_loss", "rtd_accuracy", "rtd_majority"}
    both = measured["generator_loss"] + 50 * measured["rtd_loss"]
    assert result["eval_loss"] == pytest.approx(both, rel=1e-6)
    assert result["perplexity"] is None
    assert result["proof"]["answer"]["equal_bits"]
    logged = records(tmp_path)
    assert not any("perplexity" in name for record in logged for name in record)
    assert "AutoModel.from_pretrained" in (Path(result["adapter_path"]) / "README.md").read_text()


@pytest.mark.slow
def test_a_killed_run_resumes_as_if_it_had_not_been(tmp_path):
    words = ("experiment=deberta_v3_rtd", "debug=smoke", "name=mine", "task=resume_check", "hw.runtime=eager")
    done = run(*words, "checkpoint.keep_last=9", output_dir=tmp_path, as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "resume_check" / "mine" / "resume_check.json").read_text())["equal"]
