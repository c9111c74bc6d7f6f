"""Logits of a trained adapter, of its export in PEFT, merged into transformers' model, and read back."""

from pathlib import Path
from typing import Any

import torch

from tests.training.tiny import Run, plain_config, random_batch
from tpu_experiments.config.schema import Config
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.export.reading import Adapter, read_adapter
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.passes.forward import attention_masks, logits_of
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime


def require_equal_exports(config: Config, folder: Path) -> Adapter:
    """Train three steps and write the adapter; the logits of all four agree to 1e-5. Return what is read back."""
    from peft import PeftModel

    run = Run(config, EagerRuntime(config.hw))
    run.losses([random_batch(i) for i in range(3)])
    write_adapter(
        str(folder), parameters=run.parameters, initial=run.model.taken_out, lora=config.lora, base_path="base",
        revision=None, tied=run.model.source.tied_names,
    )  # fmt: skip
    base = base_of(run, config.seed)
    rows, given = _rows_and_masks(base)
    with torch.no_grad():
        ours = logits_of(run.model.module.eval(), run.parameters, rows)
        theirs = PeftModel.from_pretrained(base, str(folder)).eval()(**given, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)

    found = read_adapter(str(folder))
    source = run.model.source
    frozen = build_frozen(source, lora=found.lora, trained=found.tensors, place=lambda tensor, name: tensor)
    plain = base_of(run, config.seed)
    plain.load_state_dict(dict(whole_model(source, lora=found.lora, trained=found.tensors).tensors()), strict=False)
    with torch.no_grad():
        again = logits_of(frozen.eval(), {}, rows)
        whole = plain.eval()(**given, use_cache=False).logits
    torch.testing.assert_close(ours, again, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, whole, atol=1e-5, rtol=0)
    return found


def _rows_and_masks(base: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    masks = attention_masks(rows["segments"], config=base.config)
    return rows, {"input_ids": rows["ids"], "position_ids": rows["positions"], "attention_mask": masks}


def base_of(run: Run, seed: int) -> Any:
    """Transformers' model of a run's base: drawn as the run drew it, or with the weights of its checkpoint."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base, source = AutoModelForCausalLM.from_config(plain_config(run), dtype=torch.float32), run.model.source
    if not source.random:
        named = [name for name, _ in base.named_parameters()]
        base.load_state_dict({item.name: item.tensor for item in source.weights(named)}, strict=False)
        base.tie_weights()
    return base
