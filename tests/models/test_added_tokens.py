"""Embeddings with more rows than the checkpoint (`model.vocab_size`), whose rows are trained, held against PEFT's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.adapter_exports import base_of, require_equal_exports
from tests.models.test_lora_peft import require_equal_gradients, require_equal_steps, with_peft
from tests.training.tiny import Run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.peft import ADAPTER_FILE
from tpu_experiments.export.reading import read_adapter
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.models.sources.loaded import difference, part_of
from tpu_experiments.objectives.base import model_source
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.tasks.setup import check_added
from tpu_experiments.training.batches import load_run_tokenizer

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]
OLD, NEW = 4090, 4093
"""Rows of the checkpoint: less than the largest token of the batches and more than the shipped tokenizer's."""
SIZES: dict[str, Any] = {
    "vocab_size": OLD,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
TOKENS = [OLD + 1, 7, OLD, OLD + 2]


@pytest.fixture(params=["mistral", "qwen2"])
def checkpoint(request, tmp_path: Path) -> tuple[Path, bool]:
    """A folder of random weights, and whether its head is the embedding."""
    is_tied = request.param == "qwen2"
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base", is_tied


def words(checkpoint: tuple[Path, bool], *more: str) -> list[str]:
    folder, is_tied = checkpoint
    rows = f"embed_tokens: {TOKENS}" + ("" if is_tied else f", lm_head: {TOKENS}")
    return [
        f"model={'qwen05b' if is_tied else 'mistral7b'}",
        f"model.path={folder}",
        "model.tokenizer_path=tpu_experiments/samples/tokenizer",
        "model.dtype=float32",
        f"model.vocab_size={NEW}",
        f"+lora.trainable_token_indices={{{rows}}}",
        "lora=all_linear_r8",
        "hw.runtime=eager",
        *more,
    ]


def test_new_rows_begin_as_transformers_has_them(make_config, checkpoint) -> None:
    """As the mean, to which `mean_resizing` adds noise of 1e-9 of the variance."""
    run = Run(make_config(*words(checkpoint)), EagerRuntime(make_config().hw))
    resized = AutoModelForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32)
    resized.resize_token_embeddings(NEW)
    ours, theirs = base_of(run, 0).state_dict(), resized.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4 * float(tensor.std()) + 1e-12, rtol=0)
    assert torch.equal(ours["lm_head.weight"][:OLD], theirs["lm_head.weight"][:OLD])


def test_losses_gradients_and_exports_are_those_of_peft(make_config, checkpoint, tmp_path: Path) -> None:
    config = make_config(*words(checkpoint))
    run, model = with_peft(config)
    require_equal_gradients(run, model)
    require_equal_steps(run, model, num_steps=6)
    found = require_equal_exports(config, tmp_path / "adapter")
    assert TOKENS in found.lora.trainable_token_indices.values()


@pytest.mark.parametrize("has_rows", [True, False])
def test_an_adapter_that_peft_wrote_over_a_resized_base_is_read(
    make_config, checkpoint, tmp_path: Path, has_rows: bool
) -> None:
    """It has the embedding's own weight of the new size, and the head's."""
    kept = [word for word in words(checkpoint) if has_rows or "token_indices" not in word]
    run, model = with_peft(make_config(*kept))
    model.peft_config["default"].base_model_name_or_path = str(checkpoint[0])
    model.save_pretrained(str(tmp_path / "adapter"))
    written = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    assert any(tensor.shape[0] == NEW for tensor in written.values())
    found = read_adapter(str(tmp_path / "adapter"))
    assert all(torch.equal(found.tensors[name], value) for name, value in run.parameters.items())
    assert [found.lora.trainable_token_indices.get("model.embed_tokens")] == ([TOKENS] if has_rows else [None])
    own = dict(base_of(run, 0).named_parameters())
    assert "model.embed_tokens.weight" in found.tensors
    assert ("lm_head.weight" in found.tensors) != checkpoint[1]
    plain = make_config(*(word for word in kept if "vocab_size" not in word and "token_indices" not in word))
    told = r"set model.vocab_size=4093|has token 4092 of model.embed_tokens, which has 4090 rows"
    with pytest.raises(ConfigError, match=told):
        build_frozen(model_source(plain), lora=found.lora, trained=found.tensors, place=lambda tensor, name: tensor)
    assert all(torch.equal(found.tensors[name], own[name]) for name in found.tensors.keys() - run.parameters.keys())


def test_the_loaded_model_is_compared_without_the_new_rows(make_config, checkpoint) -> None:
    config = make_config(*words(checkpoint))
    source = model_source(config)
    assert difference(source, part_of(source), lora=config.lora, is_packed=True) < 1e-5


def test_rows_are_not_taken_away(make_config, checkpoint) -> None:
    config = make_config(*words(checkpoint, f"model.vocab_size={OLD - 1}"))
    with pytest.raises(ConfigError, match=rf"model.vocab_size={OLD - 1}; .* has {OLD} rows, and rows are added, not"):
        model_source(config)


def test_added_tokens_have_rows(make_config, checkpoint, caplog) -> None:
    config = make_config(*words(checkpoint, 'model.added_tokens=["<|new_turn|>","<|turn_over|>"]'))
    tokenizer = load_run_tokenizer(config)
    ids: Any = tokenizer.convert_tokens_to_ids(["<|new_turn|>", "<|turn_over|>"])
    assert tokenizer("a<|turn_over|>")["input_ids"][-1] == ids[1]
    check_added(config, tokenizer, vocab_size=max(ids) + 1)
    untrained = [token for token in ids if token not in TOKENS]
    assert (str(untrained) in caplog.text) == bool(untrained)
    with pytest.raises(
        ConfigError, match=rf"token {max(ids)}, and .* {max(ids)} rows; set model.vocab_size={max(ids) + 1}"
    ):
        check_added(config, tokenizer, vocab_size=max(ids))
