"""What the decoder writes is what transformers' generate writes, token for token, in two programs a bucket."""

import pytest
import torch

from tests.models.generation.small import generated, merged, overrides, prompts_of, with_adapter
from tests.training.tiny import ARCHITECTURES
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.runtime.base import UnexpectedProgram
from tpu_experiments.runtime.processes.launch import make_runtime

pytestmark = pytest.mark.xla
NEW = 22  # the first token, then calls of 8, of which the last writes more than is asked for
SMALL, LARGE = 64, 96


def decoder_of(config, how=None, *, num_rows=3, new=NEW, seed=0):
    runtime = make_runtime(config)
    module = with_adapter(config, runtime)
    settings = {"num_rows": num_rows, "max_new_tokens": new, "tokens_per_call": 8, "seed": seed}
    return Decoder(module, runtime=runtime, choice=how or ChoiceConfig(), **settings)


def last(decoder, prompts, *, bucket, draws=None):
    *_, written = decoder.stream(prompts, draws=draws or range(len(prompts)), bucket=bucket)
    return written


@pytest.mark.parametrize(
    ("architecture", "runtime"),
    [
        *((architecture, "eager") for architecture in ARCHITECTURES),
        ("gemma3_270m", "xla"),
        *(pytest.param(architecture, "xla", marks=pytest.mark.slow) for architecture in ("mistral7b", "qwen05b")),
    ],
)
def test_same_tokens_as_transformers(make_config, architecture, runtime):
    """Windows of 48 (Mistral) and 32 (Gemma 3, five layers of six) are shorter than most of these."""
    config = make_config(*overrides(architecture, runtime))
    small, large = prompts_of(1, 37, SMALL), prompts_of(70, LARGE)
    expected = generated(merged(config), [*small, *large], new=NEW)
    assert min(len(set(tokens)) for tokens in expected) > 3, "the model repeats itself, whatever it attends to"
    decoder = decoder_of(config)
    before = decoder.runtime.counters().num_compiles
    assert last(decoder, small, bucket=SMALL) + last(decoder, large, bucket=LARGE) == expected
    if runtime == "xla":
        assert decoder.runtime.counters().num_compiles - before == decoder.num_programs == 4
    for _ in range(3):
        assert last(decoder, large, bucket=LARGE) + last(decoder, small, bucket=SMALL) == expected[3:] + expected[:3]
    if runtime == "xla":
        assert decoder.runtime.counters().num_compiles - before == 4


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize(
    "how", [{"no_repeat_ngram_size": 1}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}], ids=str
)
def test_same_tokens_with_repetition_control(make_config, runtime, how):
    config = make_config(*overrides("mistral7b", runtime))
    prompts = [ids + ids[:20] for ids in prompts_of(20, 33)]
    expected = generated(merged(config), prompts, new=NEW, **how)
    assert expected != generated(merged(config), prompts, new=NEW)
    assert last(decoder_of(config, ChoiceConfig(**how)), prompts, bucket=SMALL) == expected


CAPPED = ("model.tiny_arch.model_type=gemma2", "model.tiny_arch.attn_logit_softcapping=2.0")


@pytest.mark.slow
@pytest.mark.parametrize("more", [("model.attention=eager",), CAPPED], ids=["eager", "capped"])
def test_same_tokens_by_other_attention(make_config, more):
    """Masks that are added; and scores that are capped (Gemma 2), which sdpa does not know."""
    config = make_config(*overrides("gemma3_270m", "xla"), *(f"++{each}" for each in more))
    prompts = prompts_of(12, 60)
    expected = generated(merged(config, attention="eager"), prompts, new=NEW)
    assert last(decoder_of(config), prompts, bucket=SMALL) == expected


@pytest.mark.slow
def test_draws_are_the_same_whatever_else_is_in_the_batch(make_config):
    how = ChoiceConfig(do_sample=True, temperature=1.2, top_p=0.9)
    first, second, third = prompts_of(5, 40, 60)
    found = {}
    for runtime in ("eager", "xla"):
        config = make_config(*overrides("qwen05b", runtime))
        decoder = decoder_of(config, how)
        together = last(decoder, [first, second, third], bucket=SMALL, draws=[7, 8, 9])
        assert last(decoder, [third, first], bucket=LARGE, draws=[9, 7]) == [together[2], together[0]]
        assert last(decoder, [first], bucket=SMALL, draws=[10]) != [together[0]]
        found[runtime] = together
    assert found["eager"] == found["xla"]
    other = last(decoder_of(config, how, seed=1), [first], bucket=SMALL, draws=[7])
    assert other != [found["xla"][0]]


def test_one_token_needs_one_program(make_config):
    config = make_config(*overrides("mistral7b", "xla"))
    prompts = prompts_of(9)
    decoder = decoder_of(config, num_rows=1, new=1)
    before = decoder.runtime.counters().num_compiles
    assert list(decoder.stream(prompts, draws=[0], bucket=16)) == [generated(merged(config), prompts, new=1)]
    assert decoder.runtime.counters().num_compiles - before == decoder.num_programs == 1


def test_a_batch_of_another_shape_is_refused(make_config):
    decoder = decoder_of(make_config(*overrides("mistral7b", "xla")), num_rows=1)
    last(decoder, prompts_of(9), bucket=16)
    with pytest.raises(UnexpectedProgram, match="read 16 would be compiled again: ids was 1 x 16 int32 and is 2 x 16"):
        decoder.buckets[16].prefill_program(
            decoder.runtime.put(
                {
                    "ids": torch.ones(2, 16, dtype=torch.int32),
                    "pads": torch.zeros(2, dtype=torch.int32),
                    "uniforms": torch.zeros(2),
                },
                rows_dim=-1,
            )
        )
