"""What the denoiser writes is what LLaDA's sampler writes, in one program a bucket, whatever else is in the batch."""

import math

import pytest
import torch

from tests.models.encoders import SMALL
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.config.task_schema import ChoiceConfig, DenoisingConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.denoising import Denoiser, ranks
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.processes.launch import make_runtime

pytestmark = pytest.mark.xla
MASK_ID, BUCKET = 4, 16


def source_of(**values):
    arch = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "initializer_range": 0.3, **values}
    model = ModelConfig(name="x", path="", init="random", dtype="float32", attention="sdpa", arch=arch)
    return HuggingFaceModel(model, seed=0, causal=False)


def denoiser_of(runtime, *, how=None, new=24, num_rows=3, seed=0, source=None, **settings):
    module = build_frozen(source or source_of(), lora=LoraConfig(r=0), trained={}, place=runtime.place)
    more = {"choice": how or ChoiceConfig(), "settings": DenoisingConfig(**{"block": 8, "steps": 4} | settings)}
    return Denoiser(module, runtime=runtime, mask_id=MASK_ID, num_rows=num_rows, max_new_tokens=new, seed=seed, **more)


def prompts_of(*lengths):
    random = torch.Generator().manual_seed(3)
    return [torch.randint(10, 500, (length,), generator=random).tolist() for length in lengths]


def last(denoiser, prompts, *, draws=None, bucket=BUCKET):
    *_, written = denoiser.stream(prompts, draws=draws or range(len(prompts)), bucket=bucket)
    return written


@torch.no_grad()
def of_llada(prompt, *, new, block, steps):
    """Greedy sampling as ML-GSAI/LLaDA's generate.py: a prompt alone, as many tokens a step, the surest kept."""
    source = source_of()
    torch.manual_seed(0)
    module = source.built(source.config, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *[MASK_ID] * new]])
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    for begin in range(len(prompt), ids.shape[1], block):
        for _ in range(steps):
            logits = module(input_ids=ids, attention_mask=mask).logits
            logits[..., MASK_ID] = -torch.inf
            chosen = logits.argmax(-1)
            sure = torch.softmax(logits.double(), -1).gather(-1, chosen[..., None])[..., 0]
            sure = torch.where(ids == MASK_ID, sure, -torch.inf)
            sure[:, begin + block :] = -torch.inf
            kept = sure[0].topk(block // steps).indices
            ids[0, kept] = chosen[0, kept]
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_greedy_answers_are_lladas_in_one_program(make_config, runtime):
    device = make_runtime(make_config(f"hw.runtime={runtime}"))
    denoiser, prompts = denoiser_of(device), prompts_of(3, 11, BUCKET)
    before = device.counters().num_compiles
    stages = list(denoiser.stream(prompts, draws=range(3), bucket=BUCKET))
    assert [len(answers[0]) for answers in stages] == [8, 16, 24]
    assert stages[2] == [of_llada(prompt, new=24, block=8, steps=4) for prompt in prompts]
    assert all(stages[2][row][:8] == stages[0][row] for row in range(3))
    assert all(MASK_ID not in answer for answer in stages[2])
    assert last(denoiser, prompts[1:]) == stages[2][1:]
    if runtime == "xla":
        assert device.counters().num_compiles - before == denoiser.num_programs == 1


def test_an_answer_may_end_within_a_block_and_take_uneven_steps(make_config):
    device = make_runtime(make_config("hw.runtime=eager"))
    (prompt,) = prompts_of(5)
    assert last(denoiser_of(device, new=13, steps=8), [prompt]) == [of_llada(prompt, new=16, block=8, steps=8)[:13]]
    (answer,) = last(denoiser_of(device, new=8, steps=3), [prompt])
    assert len(answer) == 8
    assert MASK_ID not in answer


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_draws_depend_on_their_number_and_the_seed_alone(make_config, remasking):
    device = make_runtime(make_config("hw.runtime=eager"))
    prompts, how = prompts_of(4, 9, 16), ChoiceConfig(do_sample=True, temperature=1.5)
    one = last(denoiser_of(device, how=how, remasking=remasking), prompts)
    assert last(denoiser_of(device, how=how, remasking=remasking), prompts[1:2], draws=[1]) == one[1:2]
    assert last(denoiser_of(device, how=how, remasking=remasking, num_rows=5), prompts) == one
    others = last(denoiser_of(device, how=how, remasking=remasking, seed=1), prompts)
    assert not [a for a, b in zip(one, others, strict=True) if a == b]
    assert len({tuple(answer) for answer in last(denoiser_of(device, how=how), [prompts[0]] * 3)}) == 3


def test_drawn_tokens_have_the_models_probabilities(make_config):
    """One masked token after one prompt, 2,048 draws: the four likeliest within 4 standard deviations."""
    device, (prompt,), source = make_runtime(make_config("hw.runtime=eager")), prompts_of(6), source_of()
    how = ChoiceConfig(do_sample=True, temperature=0.5, top_k=0)
    denoiser = denoiser_of(device, how=how, new=1, num_rows=2048, block=1, steps=1, source=source)
    found = torch.tensor(last(denoiser, [prompt] * 2048))[:, 0].bincount(minlength=512)
    torch.manual_seed(0)
    module = source.built(source.config, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = module(torch.tensor([[*prompt, MASK_ID]]), attention_mask=torch.zeros(1, 1, 7, 7)).logits[0, -1]
    logits[MASK_ID] = -torch.inf
    shares = torch.softmax(logits / 0.5, -1)
    for token in shares.topk(4).indices.tolist():
        share = float(shares[token])
        assert abs(int(found[token]) - 2048 * share) < 4 * math.sqrt(2048 * share * (1 - share))
    assert found[MASK_ID] == 0


def test_ranks_count_larger_values_and_earlier_equal_ones():
    assert ranks(torch.tensor([[0.5, 2.0, 0.5, 0.1, 2.0]])).tolist() == [[2, 0, 3, 4, 1]]
