"""Samples of several prompts: each is what transformers' generate writes for it alone, in one program."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.generation.small import overrides, prompts_of
from tests.training.tiny import built
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.training.cached_sampler import CachedSampler, sampler_of
from tpu_experiments.training.evaluation import LOOK_EVERY, Sampler

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
    "states": ("xlstm_small", ("lora=none",)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_writes_what_passes_over_the_window_do(make_config, kind):
    architecture, more = KINDS[kind]
    words = overrides(architecture, "eager") if kind != "states" else [f"model={architecture}", "model.size=tiny"]
    config = make_config(
        *words, "model.dtype=float32", "hw.runtime=eager", "sample.window=64", "sample.temperature=0", *more
    )
    runtime = make_runtime(config)
    model = built(config, runtime)
    random = torch.Generator().manual_seed(0)
    calls = []
    parts = {"tokenizer": Numbers(), "settings": config.sample, "seed": 3, "runtime": runtime}
    averages = {name: tensor.clone() for name, tensor in model.trainable.items()}
    cached = sampler_of(model, config, evaluated=model.trainable, between=lambda: calls.append(1), **parts)
    assert isinstance(cached, CachedSampler)
    passes = Sampler(model.module, parameters=model.trainable, **parts)
    prompts = prompts_of(1, 17, 70)  # the last loses its start
    for tensor in model.trainable.values():
        tensor += torch.randn(tensor.shape, generator=random) * (0.1 if config.lora.r else 0.02)
    expected = passes.write(prompts, max_new_tokens=NEW, rows=2)
    assert cached.write(prompts, max_new_tokens=NEW, rows=2) == expected
    assert len(calls) == 2 * NEW
    assert not cached.copy.tensors, "no memory is held between samples"
    averaged = sampler_of(model, config, evaluated=averages, averages=averages, **parts)
    assert averaged.write(prompts, max_new_tokens=NEW, rows=2) == Sampler(
        model.module, parameters=averages, **parts
    ).write(prompts, max_new_tokens=NEW, rows=2)
    assert averaged.write(prompts, max_new_tokens=NEW, rows=2) != expected


CONV = "+model.tiny_arch.layer_types=[conv,full_attention]"


def test_a_cache_is_for_plain_torch_on_a_cpu_and_models_that_have_one(make_config):
    kinds = {}
    for name, words in {
        "xla": ("model=qwen05b", "hw.runtime=xla"),
        "eager": ("model=qwen05b", "hw.runtime=eager"),
        "encoder": ("experiment=modernbert_mlm", "debug=smoke", "hw.runtime=eager"),
        "convolutions": ("model=qwen05b", "hw.runtime=eager", "+model.tiny_arch.model_type=lfm2", CONV),
    }.items():
        config = make_config(*words, "model.size=tiny", "lora=none")
        runtime = make_runtime(config)
        parts = {"tokenizer": Numbers(), "settings": config.sample, "seed": 0, "runtime": runtime}
        model = built(config, runtime)
        kinds[name] = type(sampler_of(model, config, evaluated=model.trainable, **parts))
    assert kinds == {"xla": Sampler, "eager": CachedSampler, "encoder": Sampler, "convolutions": Sampler}


def test_a_cached_sample_ends_once_every_row_has_ended(make_config):
    config = make_config(*overrides("mistral7b", "eager"), "lora=none", "sample.temperature=0", "sample.window=64")
    runtime = make_runtime(config)
    model = built(config, runtime)
    tokenizer, calls = Numbers(), []
    parts = {"runtime": runtime, "settings": config.sample, "seed": 0, "tokenizer": tokenizer}
    sampler = sampler_of(model, config, evaluated=model.trainable, between=lambda: calls.append(1), **parts)
    (whole,) = sampler.write(prompts_of(5), max_new_tokens=40, rows=1)
    tokens = whole.split()
    end = next(index for index, token in enumerate(tokens) if index > 0 and token not in tokens[:index])
    tokenizer.all_special_ids = (int(tokens[end]),)
    calls.clear()
    assert sampler.write(prompts_of(5), max_new_tokens=40, rows=1) == [" ".join(tokens[:end])]
    assert len(calls) == end + 1
