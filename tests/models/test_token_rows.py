"""Trained rows of an embedding or a head (`lora.trainable_token_indices`), held against PEFT's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.adapter_exports import require_equal_exports
from tests.models.test_lora_peft import overrides, require_equal_gradients, require_equal_steps, with_peft
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.peft import ADAPTER_CONFIG
from tpu_experiments.export.reading import read_adapter
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.next_token import next_token_loss, next_token_losses
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.stacked import TOKEN_ROWS

pytestmark = [
    pytest.mark.xla,  # importing peft imports torch_xla
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TOKENS = [*random_batch(0)["ids"][0, :, 3:6].flatten().tolist(), 0, 3]
"""Tokens of the first batch in no order, and padding."""
KEY = "+lora.trainable_token_indices="
IN_EMBEDDING = f"{KEY}{{embed_tokens: {TOKENS}}}"
IN_BOTH = f"{KEY}{{embed_tokens: {TOKENS}, lm_head: {TOKENS[:3]}}}"
CASES = {
    "embedding": ("mistral7b", IN_EMBEDDING),
    "embedding and head": ("mistral7b", IN_BOTH),
    "tied": ("qwen05b", IN_EMBEDDING),
    "scaled and tied": ("gemma3_270m", IN_EMBEDDING),
    "tied, both named": ("qwen05b", f"{KEY}{{lm_head: {TOKENS}, embed_tokens: {TOKENS}}}"),
    "DoRA and a norm": ("qwen05b", IN_EMBEDDING, "lora.dora=true", "lora.modules_to_save=[norm]"),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_peft(make_config, case: str) -> None:
    run, model = with_peft(make_config(*overrides(*CASES[case])))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert run.model.report.trainable == sum(p.numel() for p in run.parameters.values()) == trained
    require_equal_gradients(run, model)
    require_equal_steps(run, model, num_steps=8)


@pytest.mark.parametrize("case", CASES)
def test_the_export_gives_the_same_logits_in_peft_merged_and_read_back(make_config, tmp_path: Path, case: str) -> None:
    init = "b_zero" if case == "scaled and tied" else "pissa"
    found = require_equal_exports(make_config(*overrides(*CASES[case], f"lora.init={init}")), tmp_path)
    assert TOKENS in found.lora.trainable_token_indices.values()


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("case", ["embedding and head", "tied, both named"])
def test_an_adapter_that_peft_wrote_is_read(make_config, tmp_path: Path, case: str, is_list: bool) -> None:
    """PEFT takes a list for the embedding's tokens, and names a tied head without writing rows of it."""
    run, model = with_peft(make_config(*overrides(*CASES[case])))
    model.save_pretrained(str(tmp_path))
    if is_list and case.startswith("tied"):
        rewrite(tmp_path, trainable_token_indices=TOKENS)
    found = read_adapter(str(tmp_path))
    assert found.tensors.keys() == run.parameters.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in run.parameters.items())
    both = {"model.embed_tokens": TOKENS, "lm_head": TOKENS[:3]}
    kept = both if case == "embedding and head" else {"model.embed_tokens": TOKENS}
    assert found.lora.trainable_token_indices == kept


def rewrite(folder: Path, **values: Any) -> None:
    """Change fields of an adapter's settings."""
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_rows_without_their_tokens_are_refused(make_config, tmp_path: Path) -> None:
    _, model = with_peft(make_config(*overrides(*CASES["embedding"])))
    model.save_pretrained(str(tmp_path))
    rewrite(tmp_path, trainable_token_indices={"embed_tokens": TOKENS[:-1]})
    with pytest.raises(ConfigError, match=rf"embed_tokens has rows \({len(TOKENS)}, .* {len(TOKENS) - 1} tokens of it"):
        read_adapter(str(tmp_path))
    rewrite(tmp_path, trainable_token_indices={"embed_tokens": [1, 1]})
    with pytest.raises(ConfigError, match=r"it must be a list of different token ids, or a table of such"):
        read_adapter(str(tmp_path))
    rewrite(tmp_path, trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [4]})
    with pytest.raises(ConfigError, match=r"trainable_token_indices has lm_head, and the file no rows of it"):
        read_adapter(str(tmp_path))


REFUSED = {
    f"{KEY}{{embed: [3]}}": r"has 'embed', which is neither the embedding nor the head. Did you mean",
    f"{KEY}{{embed_tokens: [999999]}}": r"has token 999999 of embed_tokens, which has \d+ rows",
    f"{KEY}{{lm_head: [3]}}": r"has 'lm_head' with none of model.embed_tokens, which is the same matrix",
    f"{KEY}{{lm_head: [3], embed_tokens: [4]}}": r"has 'lm_head' with other tokens than model.embed_tokens",
}


@pytest.mark.parametrize("given", REFUSED)
def test_rows_that_cannot_be_are_refused(make_config, given: str) -> None:
    config = make_config(*overrides("qwen05b", given))
    with pytest.raises(ConfigError, match=rf"lora.trainable_token_indices {REFUSED[given]}"):
        Run(config, EagerRuntime(config.hw))


@pytest.mark.parametrize("more", ["lora.modules_to_save=[embed_tokens]", "lora.targets=[q_proj,embed_tokens]"])
def test_a_matrix_is_trained_in_one_way(make_config, more: str) -> None:
    config = make_config(*overrides("mistral7b", IN_EMBEDDING, more))
    with pytest.raises(ConfigError, match=r"has 'embed_tokens', which lora.modules_to_save or lora.targets has too"):
        Run(config, EagerRuntime(config.hw))


@pytest.mark.parametrize("tokens", ["[]", "[-1]", "[3, 3]"])
def test_tokens_are_named_once(make_config, tokens: str) -> None:
    with pytest.raises(ConfigError, match=r"has 'embed_tokens': .*; name at least one token, each once, by its id"):
        make_config(*overrides("qwen05b", f"{KEY}{{embed_tokens: {tokens}}}"))


def test_rows_need_adapters(make_config) -> None:
    with pytest.raises(ConfigError, match=r"lora.trainable_token_indices with lora=none; all weights are trained"):
        make_config("lora=none", f"{KEY}{{embed_tokens: [3]}}")


def test_steps_change_the_rows_of_their_tokens_alone(make_config) -> None:
    """Those of tokens that no row has decay, as every matrix does."""
    config = make_config(*overrides(*CASES["embedding"]))
    run = Run(config, EagerRuntime(config.hw))
    name = f"model.embed_tokens.{TOKEN_ROWS}"
    before = run.parameters[name].clone()
    matrix = run.model.module.get_parameter("model.embed_tokens.weight").clone()
    run.losses([random_batch(0)])
    moved = (run.parameters[name] - before * (1 - 1e-3 * 0.01)).abs().amax(1) > 1e-5
    assert moved.tolist() == [True] * (len(TOKENS) - 2) + [token in random_batch(0)["ids"] for token in TOKENS[-2:]]
    assert torch.equal(run.model.module.get_parameter("model.embed_tokens.weight"), matrix)


@pytest.mark.parametrize("loss", ["rows", "tokens"])
@pytest.mark.parametrize("case", ["embedding and head", "tied", "scaled and tied"])
def test_losses_from_chunks_of_logits_have_the_gradients_of_whole_rows(make_config, case: str, loss: str) -> None:
    """Of the head only the rows' gradients are computed."""
    run = Run(make_config(*overrides(*CASES[case])), EagerRuntime(make_config().hw))
    rows = {name: random_batch(0)[name][0] for name in ("ids", "learn", "positions", "segments")}
    found = []
    for chunk_tokens in (None, 24):
        leaves = {name: (p * 1.1).requires_grad_() for name, p in run.parameters.items()}
        computing = Computing(chunk_tokens=chunk_tokens)
        if loss == "rows":
            sums = next_token_loss(run.model.module, leaves, rows, computing=computing, z_loss=1e-3)[0]
        else:
            losses, weights = next_token_losses(run.model.module, leaves, rows, computing=computing)
            sums = (losses * weights * torch.linspace(0.5, 2, losses.shape[1])).sum(1)
        (sums * torch.tensor([1.0, 0.5, 2.0, 3.0])).sum().backward()
        found.append({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any(name.endswith(TOKEN_ROWS) for name in found[0])
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=2e-4 * float(grad.abs().max()), rtol=0)
