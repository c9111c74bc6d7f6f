"""The TPU's compiler takes both programs, and keys and values stay where they are."""

import math
import re

import pytest
import torch

from tests.models.generation.small import overrides
from tests.tiers import only
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import ShapesOfModel
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.planning.compiled import Compilers
from tpu_experiments.runtime.kernels.attention import without_attention_kernel
from tpu_experiments.runtime.xla.tracing import TracingRuntime
from tpu_experiments.tasks.plan.decoding import lowered_decoding

pytestmark = pytest.mark.xla
ROWS, LENGTH = 2, 128


@pytest.mark.slow
@pytest.mark.parametrize("model", only(["gemma3_270m"], ["mistral7b", "gemma3_270m"]))
def test_both_programs_compile_for_v6e_and_the_cache_is_written_in_place(make_config, tmp_path, model):
    config = make_config(*overrides(model, "xla"), "hw=v6e1", "model.dtype=bfloat16")
    how = ChoiceConfig(do_sample=True, top_p=0.9, repetition_penalty=1.1, no_repeat_ngram_size=3)
    with without_attention_kernel():  # the runtime installs the TPU's
        runtime = TracingRuntime(config.hw, sharding=config.sharding)
        with torch.no_grad():
            source = ShapesOfModel(config.model, seed=0)
            module = build_frozen(source, lora=LoraConfig(r=0), trained={}, place=runtime.place)
            settings = {"num_rows": ROWS, "max_new_tokens": 32, "tokens_per_call": 8, "seed": 0}
            decoder = Decoder(module, runtime=runtime, choice=how, **settings)
            read, write = lowered_decoding(decoder, length=LENGTH)
    with Compilers(1) as compilers:
        _, written = (compilers.submit(p, hw=config.hw, folder=str(tmp_path)).result() for p in (read, write))
    shapes = [a.shape for a in write.arguments if a.name.startswith("batch/layer")]
    cache_bytes = sum(2 * math.prod(shape) for shape in shapes)
    assert written.memory is not None
    assert written.memory.aliased >= cache_bytes
    text = written.optimized_hlo()
    assert text.count(" while(") >= 1
    (cache,) = {f"bf16[{','.join(map(str, shape))}]" for shape in shapes}
    assert cache in text
    copies = [line for line in text.splitlines() if re.search(rf"= {re.escape(cache)}\S* copy\(", line)]
    assert not copies, "a copy of the cache, at each call or for each token"
