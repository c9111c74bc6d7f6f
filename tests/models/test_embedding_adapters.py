"""LoRA on the embedding and on a head that is tied to it, held against PEFT's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.adapter_exports import require_equal_exports
from tests.models.test_lora_peft import (
    overrides,
    randomise_b,
    require_equal_gradients,
    require_equal_steps,
    with_peft,
)
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.peft import ADAPTER_FILE
from tpu_experiments.export.reading import read_adapter
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.passes.forward import has_plain_head, logits_of
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
TARGETS = "lora.targets=[q_proj,down_proj,embed_tokens]"
TIED = "lora.ensure_weight_tying=true"
CASES = {
    "untied": ("mistral7b", TARGETS),
    "untied, head too": ("mistral7b", "lora.targets=[q_proj,embed_tokens,lm_head]", "lora.scaling=alpha_over_sqrt_r"),
    "tied": ("qwen05b", TARGETS, TIED),
    "tied, by the head": (
        "qwen05b",
        "lora.targets=[q_proj,lm_head]",
        TIED,
        "+lora.rank_pattern={embed_tokens: 3, lm_head: 3}",
    ),
    "scaled and tied": ("gemma3_270m", TARGETS, TIED),
}
APART = ("gemma3_270m", TARGETS)
"""The embedding alone of two that are one matrix."""


@pytest.mark.parametrize("case", [*CASES, "apart"])
def test_losses_and_gradients_are_those_of_peft(make_config, case: str) -> None:
    run, model = with_peft(make_config(*overrides(*CASES.get(case, APART))))
    own = {id(p): p.numel() for p in run.parameters.values()}
    assert run.model.report.trainable == sum(own.values())
    assert run.model.report.adapters == sum(name.endswith("_A") for name in run.parameters)
    assert has_plain_head(run.model.module) == (case in ("untied", "apart"))
    require_equal_gradients(run, model)
    require_equal_steps(run, model, num_steps=8)


@pytest.mark.parametrize("case", CASES)
def test_the_export_gives_the_same_logits_in_peft_merged_and_read_back(make_config, tmp_path: Path, case: str) -> None:
    found = require_equal_exports(make_config(*overrides(*CASES[case])), tmp_path)
    assert "model.embed_tokens" in found.lora.targets


@pytest.mark.parametrize("case", [*CASES, "apart"])
def test_an_adapter_that_peft_wrote_is_read(make_config, tmp_path: Path, case: str) -> None:
    """PEFT writes the embedding's own weight beside it, and the adapter of a tied head once more."""
    config = make_config(*overrides(*CASES.get(case, APART)))
    run, model = with_peft(config)
    randomise_b(run, model)
    model.save_pretrained(str(tmp_path))
    is_by_name = "embed_tokens" in config.lora.targets
    written = load_file(tmp_path / ADAPTER_FILE)
    assert ("base_model.model.model.embed_tokens.base_layer.weight" in written) == is_by_name
    assert ("base_model.model.lm_head.lora_A.weight" in written) == (case not in ("untied", "apart"))
    found = read_adapter(str(tmp_path))
    more = {name for name in found.tensors if name.endswith("weight")}
    assert found.tensors.keys() - more == run.parameters.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in run.parameters.items())
    bases = {"model.embed_tokens.weight", *(["lm_head.weight"] if case == "untied, head too" else [])}
    assert more == (bases if is_by_name else set())
    frozen = build_frozen(run.model.source, lora=found.lora, trained=found.tensors, place=lambda tensor, name: tensor)
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    with torch.no_grad():
        ours, again = logits_of(run.model.module.eval(), run.parameters, rows), logits_of(frozen.eval(), {}, rows)
    torch.testing.assert_close(ours, again, atol=1e-5, rtol=0)
    if case != "apart":
        merged = dict(whole_model(run.model.source, lora=found.lora, trained=found.tensors).tensors())
        plain = whole_model(run.model.source, lora=config.lora, trained=run.parameters)
        assert all(torch.equal(merged[name], tensor) for name, tensor in plain.tensors())


def test_the_embedding_alone_of_a_tied_pair_is_exported_beside_its_base(make_config, tmp_path: Path) -> None:
    """PEFT computes as we do; merged, the two would be one matrix again."""
    config = make_config(*overrides(*APART))
    with pytest.raises(ConfigError, match=r"it adapts model.embed_tokens and not the head, which is the same matrix"):
        require_equal_exports(config, tmp_path)
    assert "model.embed_tokens" in read_adapter(str(tmp_path)).lora.targets


REFUSED = {
    ("lora.targets=[q_proj,lm_head]",): r"matches lm_head, .*; set lora.ensure_weight_tying=true for one adapter of",
    (TARGETS, "lora.dora=true"): r"lora.dora=true and lora.targets has model.embed_tokens; an embedding's adapter has",
    (TARGETS, "lora.init=pissa"): r"lora.init=pissa and lora.targets has model.embed_tokens; an embedding's adapter",
    (TARGETS, "lora.modules_to_save=[embed_tokens]", TIED): r"lora.targets has model.embed_tokens, which lora.modules",
    (TARGETS, TIED, "+lora.rank_pattern={embed_tokens: 3}"): r"gives model.embed_tokens rank 3 .* and lm_head, which",
}


@pytest.mark.parametrize("words", REFUSED)
def test_adapters_of_embeddings_that_cannot_be_are_refused(make_config, words: tuple[str, ...]) -> None:
    config = make_config(*overrides("qwen05b", *words))
    with pytest.raises(ConfigError, match=REFUSED[words]):
        Run(config, EagerRuntime(config.hw))
