"""Samples of several prompts: each is what transformers' generate writes for it alone, in one program."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.generation.small import overrides, prompts_of
from tests.training.tiny import built
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.stacked import stacked, unstacked
from tpu_experiments.training.cached_sampler import CachedSampler, Lengths, Writer, writes_with_cache
from tpu_experiments.training.evaluation import LOOK_EVERY, Sampler
from tpu_experiments.training.merged import MergedCopy

pytestmark = pytest.mark.xla
NEW = 10


class Numbers:
    """In the place of a tokenizer: a token is its number."""

    eos_token_id, all_special_ids = -1, ()

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def test_every_prompt_is_continued_as_if_it_were_alone(make_config):
    config = make_config(*overrides("mistral7b", "xla"), "lora=none", "sample.temperature=0", "sample.window=64")
    runtime = make_runtime(config)
    model = built(config, runtime)
    parts = {"runtime": runtime, "parameters": model.trainable, "settings": config.sample, "seed": 0}
    sampler = Sampler(model.module, tokenizer=Numbers(), **parts)
    prompts = prompts_of(1, 17, 54)
    plain = copy.deepcopy(model.source.config)
    plain._attn_implementation = "sdpa"
    torch.manual_seed(config.seed)
    theirs = AutoModelForCausalLM.from_config(plain, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    expected = [
        theirs.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, len(ids) :]
        for ids in prompts
    ]
    before = runtime.counters().num_compiles
    texts = sampler.run(prompts, max_new_tokens=NEW)
    assert texts == [" ".join(map(str, tokens.tolist())) for tokens in expected]
    assert runtime.counters().num_compiles - before == 1


def test_draws_follow_from_the_seed_alone(make_config):
    texts = {}
    for name, seed in (("xla", 0), ("eager", 0), ("eager", 1)):
        config = make_config(*overrides("mistral7b", name), "lora=none", "sample.temperature=1", "sample.window=64")
        runtime = make_runtime(config)
        model = built(config, runtime)
        parts = {"runtime": runtime, "parameters": model.trainable, "settings": config.sample, "seed": seed}
        sampler = Sampler(model.module, tokenizer=Numbers(), **parts)
        texts[name, seed] = sampler.run(prompts_of(5, 5), max_new_tokens=NEW)
        assert sampler.run(prompts_of(5, 5), max_new_tokens=NEW) == texts[name, seed]
    assert texts["xla", 0] == texts["eager", 0] != texts["eager", 1]
    first, second = texts["eager", 0]
    assert first != second
    assert len(set(first.split())) > NEW / 2, "random weights are near an even distribution"


def test_a_sample_ends_once_every_row_has_ended(make_config):
    """The end mark is the first token that is not the first one written."""
    config = make_config(*overrides("mistral7b", "eager"), "lora=none", "sample.temperature=0", "sample.window=64")
    runtime = make_runtime(config)
    model = built(config, runtime)
    tokenizer, prompts, calls = Numbers(), prompts_of(5), []
    parts = {"runtime": runtime, "parameters": model.trainable, "settings": config.sample, "seed": 0}
    sampler = Sampler(model.module, tokenizer=tokenizer, **parts, between=lambda: calls.append(1))
    (whole,) = sampler.run(prompts, max_new_tokens=40)
    assert len(calls) == 40
    tokens = whole.split()
    end = next(index for index, token in enumerate(tokens) if index > 0 and token not in tokens[:index])
    assert end < LOOK_EVERY
    tokenizer.all_special_ids = (int(tokens[end]),)
    calls.clear()
    assert sampler.run(prompts, max_new_tokens=40) == [" ".join(tokens[:end])]
    assert len(calls) == LOOK_EVERY


KINDS = {
    "plain": ("mistral7b", ()),
    "windows": ("gemma3_270m", ()),
    "drawn": ("qwen05b", ("sample.temperature=1",)),
    "lengths": ("qwen05b", ("lora.dora=true",)),
    "int8": ("qwen05b", ("model.base=int8",)),
    "all weights": ("qwen05b", ("lora=none",)),
    "states": ("xlstm_small", ("lora=none", "+model.tiny_arch.initializer_range=0.2")),
}


def cached_sampler(model, config, runtime, *, averages=None, lengths=None, between=lambda: None, **parts):
    """A sampler with a copy of its own."""
    copy = partial(MergedCopy, model, lora=config.lora, runtime=runtime, averages=averages)
    writer = Writer(copy, runtime=runtime, is_drawn=config.sample.temperature > 0, lengths=lengths)
    return CachedSampler(writer, between=between, **{"tokenizer": Numbers(), "settings": config.sample} | parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_writes_what_passes_over_the_window_do(make_config, kind):
    architecture, more = KINDS[kind]
    words = overrides(architecture, "eager") if kind != "states" else [f"model={architecture}", "model.size=tiny"]
    more = ("model.dtype=float32", "hw.runtime=eager", "sample.window=64", "sample.temperature=0", *more)
    config = make_config(*words, *more)
    runtime = make_runtime(config)
    model = built(config, runtime)
    random = torch.Generator().manual_seed(0)
    calls = []
    averages = {name: tensor.clone() for name, tensor in model.trainable.items()}
    cached = cached_sampler(model, config, runtime, seed=3, between=lambda: calls.append(1))
    parts = {"tokenizer": Numbers(), "settings": config.sample, "seed": 3, "runtime": runtime}
    prompts = prompts_of(1, 17, 70)  # the last loses its start
    for tensor in model.trainable.values():
        tensor += torch.randn(tensor.shape, generator=random) * (0.1 if config.lora.r else 0.02)
    expected = Sampler(model.module, parameters=model.trainable, **parts).write(prompts, max_new_tokens=NEW, rows=2)
    assert cached.write(prompts, max_new_tokens=NEW, rows=2) == expected
    assert len(calls) == 2 * NEW
    assert not cached.writer.copy.tensors, "no memory is held between samples"
    found = cached_sampler(model, config, runtime, averages=averages, seed=3).write(prompts, max_new_tokens=NEW, rows=2)
    passes = Sampler(model.module, parameters=averages, **parts)
    assert found == passes.write(prompts, max_new_tokens=NEW, rows=2) != expected


def test_xla_writes_samples_and_answers_by_three_programs(make_config):
    """Questions are not drawn where samples are, and both have the one shape of the longest."""
    texts = {}
    for name in ("xla", "eager"):
        config = make_config(*overrides("qwen05b", name), "lora=all_linear_r8", "sample.window=64")
        runtime = make_runtime(config)
        model = built(config, runtime)
        lengths = Lengths(24, 12) if name == "xla" else None
        sampler = cached_sampler(model, config, runtime, lengths=lengths, seed=3)
        asker = CachedSampler(
            sampler.writer, tokenizer=Numbers(), settings=replace(config.sample, temperature=0.0), seed=0
        )
        texts[name], random = [], torch.Generator().manual_seed(0)
        before = runtime.counters().num_compiles
        for _ in range(3):
            shapes = {own: tuple(tensor.shape) for own, tensor in unstacked(model.trainable).items()}
            drawn = {own: torch.randn(shapes[own], generator=random) * 0.1 for own in sorted(shapes)}
            for own in model.trainable:
                model.trainable[own] = runtime.place(stacked(drawn, own), name=own)
            texts[name].append(asker.write(prompts_of(*range(2, 24), *range(2, 24)), max_new_tokens=5, rows=32))
            texts[name].append(sampler.write(prompts_of(5, 9), max_new_tokens=12, rows=2))
        compiles = runtime.counters().num_compiles - before
        assert compiles == (3 if name == "xla" else 0)
    assert texts["xla"] == texts["eager"]
    assert len(texts["xla"][0]) == 44
    assert len({str(each) for each in texts["xla"]}) == 6
    assert {len(text.split()) for text in texts["xla"][0]} == {5}


CONV = "+model.tiny_arch.layer_types=[conv,full_attention]"
ASKED = "+data.sample_chat.questions.a=tpu_experiments/samples/orders/known_forms.jsonl"


@pytest.mark.parametrize(
    ("words", "is_cached"),
    [
        (("model=qwen05b", "hw.runtime=eager"), True),
        (("model=qwen05b", "hw.runtime=xla"), False),
        (("model=qwen05b", "hw.runtime=xla", "data=sample_chat", ASKED), True),
        (("model=qwen05b", "hw=v6e1", "data=sample_chat", ASKED), False),
        (("experiment=modernbert_mlm", "debug=smoke", "hw.runtime=eager"), False),
        (("model=qwen05b", "hw.runtime=eager", "+model.tiny_arch.model_type=lfm2", CONV), False),
    ],
)
def test_a_cache_is_for_a_cpu_and_models_that_have_one(make_config, words, is_cached):
    """XLA has one where there are questions."""
    assert writes_with_cache(make_config(*words, "model.size=tiny", "lora=none")) == is_cached


def test_a_cached_sample_ends_once_every_row_has_ended(make_config):
    config = make_config(*overrides("mistral7b", "eager"), "lora=none", "sample.temperature=0", "sample.window=64")
    runtime = make_runtime(config)
    model = built(config, runtime)
    tokenizer, calls = Numbers(), []
    sampler = cached_sampler(model, config, runtime, tokenizer=tokenizer, seed=0, between=lambda: calls.append(1))
    (whole,) = sampler.write(prompts_of(5), max_new_tokens=40, rows=1)
    tokens = whole.split()
    end = next(index for index, token in enumerate(tokens) if index > 0 and token not in tokens[:index])
    tokenizer.all_special_ids = (int(tokens[end]),)
    calls.clear()
    assert sampler.write(prompts_of(5), max_new_tokens=40, rows=1) == [" ".join(tokens[:end])]
    assert len(calls) == end + 1
