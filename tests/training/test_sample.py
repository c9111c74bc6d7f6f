"""Samples of several prompts: each is what transformers' generate writes for it alone, in one program."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.generation.small import overrides, prompts_of
from tests.training.tiny import built
from tpu_experiments.runtime.processes.launch import make_runtime
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
