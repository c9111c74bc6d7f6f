"""Masked language modelling: its loss is that of transformers' classes, its draws those of transformers' collator."""

import copy
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from tests.data.small_tokenizers import byte_level, gemma, mistral
from tests.models.encoders import ENCODERS, packed_rows, source_of
from tests.models.test_longformer import run_of
from tests.objectives.test_replaced_token import num_reads
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.masking import MOST_PIECES, num_places
from tpu_experiments.data.batches import Batch
from tpu_experiments.models.parts.dropout import token_words
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.masked import Masked, starts_of
from tpu_experiments.objectives.vocabulary import Vocabulary, ranges
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.xla.replay import NUM_FIRST
from tpu_experiments.training.batches import with_noise

pytestmark = pytest.mark.xla
TOKENIZER = "tpu_experiments/samples/tokenizer"
MASK_ID = 4


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


def objective(*, chunk_tokens=None, vocabulary=None, **settings) -> Masked:
    made = Masked(**settings, computing=Computing(chunk_tokens))
    made.vocabulary = vocabulary or Vocabulary(MASK_ID, 512, ((0, 7),))
    return made


def drawn_rows(*, rows=2, seed=0, index=0, **sizes):
    """Rows with random words, as a step makes them."""
    found = packed_rows(rows=rows, **sizes)
    batch = with_noise(
        Batch(*(found[n].numpy() for n in ("ids", "learn", "positions", "segments")), labels=[""] * rows),
        seed=seed,
        index=index,
    )
    return found | {"noise": torch.from_numpy(batch.noise_G)}


def theirs(module, masking, rows):
    """The class's own loss, mean over the masked tokens, of every document alone."""
    losses = []
    for row in range(len(rows["ids"])):
        for number in (1, 2):
            here = rows["segments"][row] == number
            labels = torch.full_like(rows["ids"][row], -100)
            chosen = masking.picks_RKT[row].sum(0) > 0
            labels[chosen] = rows["ids"][row][chosen]
            out = module(input_ids=masking.rows["ids"][row][here][None].long(), labels=labels[here][None].long())
            count = int((labels[here] != -100).sum())
            losses.append(out.loss * count if count else torch.zeros(()))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("chunk_tokens", [None, 9])
@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda one: one.model_type)
def test_loss_and_gradient_are_those_of_the_class(encoder, chunk_tokens):
    torch.manual_seed(0)
    module = source_of(encoder).built(source_of(encoder).config, dtype=torch.float32).eval()
    own, rows = objective(chunk_tokens=chunk_tokens, mask_rate=0.3), drawn_rows()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    sums_R, counts_R = own.row_loss(module, parameters, rows)
    assert counts_R.sum() == own.count(rows) > 10
    expected = theirs(module, own.masking(rows), rows)
    torch.testing.assert_close(sums_R.sum(), expected, rtol=1e-5, atol=0)
    found = torch.autograd.grad(sums_R.sum(), list(parameters.values()), allow_unused=True)
    wanted = torch.autograd.grad(expected, list(module.parameters()), allow_unused=True)
    for name, ours, other in zip(parameters, found, wanted, strict=True):
        if other is None:  # DeBERTa's and BERT's heads keep a part that they do not use
            assert ours is None, name
        else:
            torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_scores_are_the_losses_and_hits_of_the_masked_tokens():
    module = source_of(ENCODERS[0]).built(source_of(ENCODERS[0]).config, dtype=torch.float32).eval()
    own, rows = objective(mask_rate=0.3, chunk_tokens=9), drawn_rows()
    parameters = dict(module.named_parameters())
    scores = own.scores(module, parameters, rows)
    with torch.no_grad():
        sums_R, counts_R = own.row_loss(module, parameters, rows)
    torch.testing.assert_close(scores.sums_R, sums_R)
    assert torch.equal(torch.roll(scores.weights_RT, 1, dims=1) > 0, own.chosen(rows))
    torch.testing.assert_close((scores.losses_RT * scores.weights_RT).sum(1), sums_R)
    assert torch.equal(scores.weights_RT.sum(1), counts_R)
    assert (scores.hits_RT <= scores.weights_RT).all()


def test_counts_are_those_of_transformers_collator(tokenizer):
    """Both are binomial: of n tokens a share p, within 4 standard deviations of it, each against the expectation."""
    ids = torch.randint(8, 4000, (64, 256), generator=torch.Generator().manual_seed(0))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = "<|im_end|>"
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
    inputs, labels = collator.torch_mask_tokens(ids.clone())
    own = Masked(tokenizer=tokenizer)
    assert own.vocabulary == Vocabulary(4, 4096, ((0, 4),))
    rows = {"ids": ids.int(), "learn": torch.ones_like(ids), "segments": torch.ones_like(ids)}
    rows["noise"] = torch.randint(-(2**31), 2**31, (64,), generator=torch.Generator().manual_seed(1)).int()
    masking = own.masking(rows)
    for read, chosen in ((inputs, labels != -100), (masking.rows["ids"], own.chosen(rows))):
        count = int(chosen.sum())
        kept = int((read == ids)[chosen].sum())
        masked = int((read == tokenizer.mask_token_id)[chosen].sum())
        for found, total, share in ((count, ids.numel(), 0.15), (masked, count, 0.8), (kept, count, 0.1)):
            assert abs(found - total * share) < 4 * math.sqrt(total * share * (1 - share))
        assert torch.equal(read[~chosen].long(), ids[~chosen])
        others = read[chosen & (read != ids) & (read != tokenizer.mask_token_id)].double()
        # the mean of n uniform numbers below 4096 has standard deviation 4096 / sqrt(12 n)
        assert abs(others.mean() - 2048) < 4 * 4096 / math.sqrt(12 * len(others))


def word_piece():
    vocabulary = [
        "[PAD]",
        "[CLS]",
        "[SEP]",
        "[UNK]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz.,",
        "##",
        "the",
        "wo",
        "##rd",
    ]
    vocabulary += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    names = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **{f"{name}_token": token for name, token in names.items()})


def word_rows(tokenizer, *texts, end):
    """A row of texts, each between special tokens; its ids and the offsets of each token in its text."""
    encodings = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
    ids = [i for e in encodings for i in [end, *e["input_ids"], end]]
    offsets = [o for e in encodings for o in [(0, 0), *e["offset_mapping"], (0, 0)]]
    segments = [n for n, e in enumerate(encodings, start=1) for _ in range(len(e["input_ids"]) + 2)]
    rows = {name: torch.tensor([values], dtype=torch.int32) for name, values in (("ids", ids), ("segments", segments))}
    return rows, np.array([offsets])


FAMILIES = {"byte_level": byte_level, "mistral": mistral, "gemma": gemma, "word_piece": word_piece}


@pytest.mark.parametrize("family", FAMILIES)
def test_words_are_those_of_the_text_and_of_transformers_collator(family):
    """The collator finds words by gaps between offsets, which those of SentencePiece do not leave."""
    tokenizer = FAMILIES[family]()
    end = tokenizer.convert_tokens_to_ids("[SEP]" if family == "word_piece" else "</s>")
    texts = ("Care este, a word more", "Da, nu!\nsau\tda")
    texts = ("the word , a wording .", "one bcd") if family == "word_piece" else texts
    rows, offsets = word_rows(tokenizer, *texts, end=end)
    own = Masked(whole_word=True)
    own.vocabulary, own.starts_V = Vocabulary(0, 2, ((end, end),)), starts_of(tokenizer)
    first_T, ids_T = own._first_places(rows, own.starts_V)[0], rows["ids"][0]
    is_end_T = ids_T == end
    assert torch.equal(first_T[is_end_T], torch.arange(len(ids_T), dtype=torch.int32)[is_end_T])
    found = [tokenizer.decode(ids_T[first_T == place]).strip() for place in first_T.unique() if ids_T[place] != end]
    assert found == [word for text in texts for word in text.split()]
    assert max(int((first_T == place).sum()) for place in first_T) > 2
    if family in ("byte_level", "word_piece"):
        theirs, _ = DataCollatorForLanguageModeling._calc_word_ids_and_prob_mask(offsets, is_end_T.numpy()[None])
        # Of the first text: the collator takes a line break for a word.
        here = ((rows["segments"][0] == 1) & ~is_end_T).numpy()
        ours, theirs = first_T.numpy()[here], theirs[0][here]
        assert np.array_equal(ours[:, None] == ours[None, :], theirs[:, None] == theirs[None, :])


def test_a_word_is_chosen_whole_and_its_tokens_are_replaced_one_by_one():
    """Words of 1 to 5 tokens: 15 % of the tokens in expectation, within 4 standard deviations of a sum over words."""
    generator = torch.Generator().manual_seed(0)
    own = objective(whole_word=True)
    own.starts_V = torch.zeros(512, dtype=torch.int32)
    own.starts_V[256:] = 1
    lengths = torch.randint(1, 6, (256, 256), generator=generator)
    is_start = torch.zeros(256, 256, dtype=torch.bool).scatter_(1, lengths.cumsum(1).clamp(max=255), True)
    ids = torch.randint(8, 256, (256, 256), generator=generator) + 248 * is_start
    rows = {"ids": ids.int(), "learn": torch.ones_like(ids), "segments": torch.ones_like(ids)}
    rows["noise"] = torch.randint(-(2**31), 2**31, (256,), generator=generator).int()
    chosen, masking = own.chosen(rows), own.masking(rows)
    assert torch.equal(chosen, masking.picks_RKT.sum(1) > 0)
    first = torch.cummax(torch.where(is_start, torch.arange(256), 0), 1).values
    assert torch.equal(chosen, chosen.gather(1, first))
    sizes = torch.zeros(256, 256).scatter_add_(1, first, torch.ones(256, 256))
    count, total = int(chosen.sum()), ids.numel()
    assert abs(count - 0.15 * total) < 4 * math.sqrt(0.15 * 0.85 * float((sizes**2).sum()))
    read = masking.rows["ids"]
    masked = int((read == MASK_ID)[chosen].sum())
    assert abs(masked - 0.8 * count) < 4 * math.sqrt(0.8 * 0.2 * count)
    # 0.9 of the tokens are changed; pairs of neighbours of a word agree as often as two draws do.
    pairs = chosen[:, 1:] & ~is_start[:, 1:]
    both = int((((read == MASK_ID)[:, 1:]) & ((read == MASK_ID)[:, :-1]))[pairs].sum())
    assert abs(both - 0.64 * int(pairs.sum())) < 5 * math.sqrt(0.64 * 0.36 * int(pairs.sum()))


def test_text_without_blanks_is_masked_in_parts():
    own = objective(whole_word=True, mask_rate=0.5)
    own.starts_V = torch.zeros(512, dtype=torch.int32)
    rows = drawn_rows(rows=64, lengths=(64, 64), total=128)
    rows["ids"] = rows["ids"].clamp(min=8)
    parts = own.chosen(rows).view(64, -1, MOST_PIECES)
    assert ((parts.sum(-1) == 0) | (parts.sum(-1) == MOST_PIECES)).all()
    assert 0.4 < parts[..., 0].float().mean() < 0.6


def test_a_vocabulary_that_marks_no_words_is_refused(tokenizer):
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])))
    made.add_special_tokens({"mask_token": "[MASK]"})
    with pytest.raises(ConfigError, match=r"objective\.whole_word=true; .* does not mark where words begin"):
        Masked(tokenizer=made, whole_word=True)
    assert Masked(tokenizer=tokenizer, mask_token="<|im_end|>", whole_word=True).starts_V.sum() > 100


def test_special_unlearnt_and_padding_tokens_are_never_chosen():
    own, rows = objective(mask_rate=0.9), drawn_rows(rows=16)
    rows["ids"][:, 5] = 3
    rows["learn"][:, 6:9] = 0
    chosen = own.chosen(rows)
    assert not chosen[:, 5].any()
    assert not chosen[:, 6:9].any()
    assert not chosen[:, 37:].any()
    assert chosen[:, 10].float().mean() > 0.5


def test_a_row_without_a_masked_token_has_no_loss():
    module = source_of(ENCODERS[0]).built(source_of(ENCODERS[0]).config, dtype=torch.float32).eval()
    own, rows = objective(), drawn_rows()
    rows["learn"][0] = 0
    with torch.no_grad():
        sums_R, counts_R = own.row_loss(module, dict(module.named_parameters()), rows)
    assert (float(sums_R[0]), float(counts_R[0])) == (0.0, 0.0)
    assert float(sums_R[1]) > 0


def test_more_chosen_tokens_than_places_are_cut():
    own = objective(mask_rate=0.1)
    rows = drawn_rows(rows=512)
    places = num_places(40, rate=0.1)
    rows["noise"] = torch.arange(512, dtype=torch.int32)
    assert own.masking(rows).picks_RKT.shape[1] == places
    assert torch.equal(own.masking(rows).weights_RK.sum(1), own.chosen(rows).sum(1).float())
    assert num_places(1024, rate=0.3) == 400
    assert num_places(8, rate=0.5) == 8


@pytest.mark.parametrize("whole_word", [False, True])
def test_draws_are_the_same_on_torch_xla(make_config, whole_word):
    device = make_runtime(make_config("hw.runtime=xla"))
    own, rows = objective(mask_rate=0.3, whole_word=whole_word), drawn_rows(rows=8)
    if whole_word:
        own.starts_V = (torch.arange(512) % 3 == 0).int()
    here = own.masking(rows)
    if whole_word:
        own.starts_V = device.place(own.starts_V, name="starts_of_words")
    there = own.masking({name: device.place(tensor, name=name) for name, tensor in rows.items()})
    assert torch.equal(here.rows["ids"], there.rows["ids"].cpu())
    assert torch.equal(here.picks_RKT, there.picks_RKT.cpu())
    assert torch.equal(here.targets_RK, there.targets_RK.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["modernbert_base", "eurobert_210m", "deberta_v3_base", "roberta_base"])
def test_a_step_on_xla_is_one_program_without_a_host_read(make_config, model):
    import torch_xla.debug.metrics as met

    more = ("model.size=tiny", "model.dtype=float32", "sharding=replicated", "lora=none")
    words = (f"model={model}", "objective=mlm", *more)
    run, batches = run_of(make_config(*words))
    compiles = run.runtime.counters().num_compiles
    met.clear_counters()
    outputs = [run.program(batch) for batch in batches[:NUM_FIRST]]  # traced; the numbers that go into them are read
    run.runtime.wait()
    reads = num_reads(met)
    outputs += [run.program(batch) for batch in batches[NUM_FIRST:]]
    run.runtime.wait()
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    assert num_reads(met) == reads
    assert run.runtime.counters().num_compiles == compiles + 1
    plain, sent = run_of(make_config(*words, "hw.runtime=eager"))
    expected = [float(plain.program(batch).loss) for batch in sent]
    assert [float(output.loss.cpu()) for output in outputs] == pytest.approx(expected, rel=1e-5)


def test_words_of_tokens_are_independent():
    words = token_words(torch.arange(4096, dtype=torch.int32), length=64, site=0)
    bits = (words < 0).double().numpy()
    seen = np.corrcoef(bits.T) - np.eye(64)  # a correlation of 4,096 pairs of bits has standard deviation 1/64
    assert np.abs(seen).max() < 5.5 / 64
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / math.sqrt(bits.size)
    other = (token_words(torch.arange(4096, dtype=torch.int32), length=64, site=1) < 0).double().numpy()
    assert abs(np.corrcoef(bits.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(bits.size)


def test_a_tokenizer_without_a_mask_token_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"has no mask token; .*objective\.mask_token="):
        Masked(tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"objective\.mask_token=\[MASK\]; the tokenizer .* does not know it"):
        Masked(tokenizer=tokenizer, mask_token="[MASK]")
    assert Masked(tokenizer=tokenizer, mask_token="<|im_end|>").vocabulary.mask_id == 4


def test_shares_above_one_are_refused():
    with pytest.raises(ConfigError, match="together they exceed 1"):
        Masked(replace_mask=0.9, replace_random=0.2)


def test_ranges_of_ids():
    assert ranges([3, 4, 9]) == ((3, 4), (9, 9))
    assert ranges([]) == ()
