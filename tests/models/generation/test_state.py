"""Generation from the state of an xLSTM: the tokens that transformers finds likeliest, in two programs a bucket."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.xlstm_package import drawn
from tests.models.generation.small import prompts_of
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.processes.launch import make_runtime

pytestmark = pytest.mark.xla
NEW, BUCKET = 14, 32


def likeliest(theirs: torch.nn.Module, ids: list[int]) -> list[int]:
    """What transformers' class writes, each token from all tokens before it and no state."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(NEW):
            logits = theirs(input_ids=torch.tensor([found]), use_cache=False).logits
            found.append(int(logits[0, -1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("runtime", ["xla", "eager"])
def test_same_tokens_as_transformers(make_config, runtime):
    config = make_config("model=xlstm_small", "model.size=tiny", "model.dtype=float32", f"hw.runtime={runtime}")
    source = HuggingFaceModel(config.model, seed=0)
    theirs = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
    trained = drawn({name: tuple(p.shape) for name, p in theirs.named_parameters()})
    theirs.load_state_dict(trained)
    prompts = prompts_of(1, 17, BUCKET)
    expected = [likeliest(theirs, ids) for ids in prompts]
    assert min(len(set(tokens)) for tokens in expected) > 3, "the model repeats itself, whatever it remembers"
    made = make_runtime(config)
    module = build_frozen(source, lora=LoraConfig(r=0), trained=trained, place=made.place)
    settings = {"num_rows": 3, "max_new_tokens": NEW, "tokens_per_call": 4, "seed": 0}
    decoder = Decoder(module, runtime=made, choice=ChoiceConfig(), **settings)
    before = made.counters().num_compiles
    for _ in range(2):
        *_, written = decoder.stream(prompts, draws=range(3), bucket=BUCKET)
        assert written == expected
    if runtime == "xla":
        assert made.counters().num_compiles - before == decoder.num_programs == 2
    kept = [tensor for name, tensor in decoder.buckets[BUCKET].state.items() if name.startswith("layer")]
    assert [tuple(tensor.shape) for tensor in kept] == [(3, 4, 16, 32), (3, 4, 16), (3, 4)] * 2  # of no slots
