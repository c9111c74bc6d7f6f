"""The adapter that the main job writes, loaded by PEFT onto the base it names, gives the logits of our own model."""

import json

import pytest
import torch

from tests.checkpoint.saved import load_latest
from tests.training.runs import finished
from tests.training.tiny import built, random_batch
from tpu_experiments.models.passes.forward import attention_masks, logits_of
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = [
    pytest.mark.xla,
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.mark.slow
def test_peft_gives_the_same_logits(make_config, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = finished("trainer.max_stage_steps=3", "sample.max_new_tokens=0", output_dir=tmp_path)
    folder = tmp_path / result["name"]
    named = json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(named, dtype=torch.float32)
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    masks = attention_masks(rows["segments"], config=base.config)
    inputs = {"input_ids": rows["ids"], "position_ids": rows["positions"], "attention_mask": masks, "use_cache": False}
    with torch.no_grad():
        untrained = base(**inputs).logits
        theirs = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()(**inputs).logits
        config = make_config("hw.runtime=eager")
        model = built(config, EagerRuntime(config.hw))
        trained = load_latest(str(folder / "checkpoints"))[1]["parameters"]
        ours = logits_of(model.module.eval(), trained, rows)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    assert (theirs - untrained).abs().max() > 1e-2
