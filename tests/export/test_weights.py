"""Merged weights compute what base and adapter compute, for every kind of adapter and base."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.full import write_model
from tpu_experiments.export.weights import Effect, whole_model
from tpu_experiments.models.adapters.lora import adapted_weights
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import attention_masks, logits_of
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.runtime.eager import EagerRuntime

pytestmark = pytest.mark.xla
TINY = ("model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "hw.runtime=eager")
KINDS = {
    "plain": (),
    "rsLoRA": ("lora.scaling=alpha_over_sqrt_r",),
    "PiSSA": ("lora.init=pissa",),
    "DoRA": ("lora.dora=true",),
    "over int8": ("model.base=int8",),
    "LoftQ over nf4": ("model.base=nf4", "lora.init=loftq"),
}
CASES = [
    *(("mistral7b", kind) for kind in KINDS),
    ("gemma3_270m", "plain"),
    ("qwen05b", "plain"),
    pytest.param("qwen05b", "DoRA", marks=pytest.mark.slow),
    pytest.param("gemma3_270m", "PiSSA", marks=pytest.mark.slow),
]


def trained(make_config, model, *words):
    """Config, the run after two steps, and what its checkpoint would hold."""
    config = make_config(f"model={model}", *TINY, *words)
    run = Run(config, EagerRuntime(config.hw))
    run.losses([random_batch(i, lr=1e-2) for i in range(2)])
    return config, run, {name: p.detach().cpu() for name, p in run.parameters.items()}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


def written(folder, model, tokenizer, dtype=torch.float32, effect=None):
    write_model(
        str(folder),
        tensors=model.tensors(effect=effect, dtype=dtype),
        shapes=model.shapes,
        config=model.config,
        architecture=model.architecture,
        dtype=dtype,
        tokenizer=tokenizer,
        max_shard_bytes=1e6,
    )


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_the_merged_model_computes_what_base_and_adapter_do(make_config, tmp_path, tokenizer, model, kind):
    config, run, tensors = trained(make_config, model, *KINDS[kind])
    seed = config.seed if kind == "PiSSA" else None
    source = run.model.source
    merged = whole_model(source, lora=config.lora, trained=tensors, reduced_with_seed=seed, origin="here")
    effect = Effect()
    written(tmp_path, merged, tokenizer, effect=effect)
    rows = {name: random_batch(9)[name][0] for name in ("ids", "learn", "positions", "segments")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    masks = attention_masks(rows["segments"], config=loaded.config)
    with torch.no_grad():
        ours = logits_of(run.model.module.eval(), run.parameters, rows)
        theirs = loaded(input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=masks).logits
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    assert effect.adapted == effect.changed == len(adapted_weights(run.model.module))
    assert loaded.config.tie_word_embeddings == source.config.tie_word_embeddings


def test_rounding_is_counted_once(make_config):
    """To bfloat16, a small adapter loses part of its change; the ratio is that of plain torch."""
    config, run, tensors = trained(make_config, "mistral7b")
    merged = whole_model(run.model.source, lora=config.lora, trained=tensors)
    effect = Effect()
    whole = dict(merged.tensors(effect=effect, dtype=torch.bfloat16))
    bases = {item.name: item.tensor for item in run.model.source.weights(list(whole))}
    asked = lost = 0.0
    for name in adapted_weights(run.model.module):
        change = whole[name] - bases[name]
        kept = whole[name].bfloat16().float() - bases[name].bfloat16().float()
        asked, lost = asked + float(change.square().sum()), lost + float((kept - change).square().sum())
    assert effect.facts()["lost_by_rounding"] == pytest.approx((lost / asked) ** 0.5, rel=1e-4)
    assert 0 < effect.facts()["lost_by_rounding"] < 1


def test_what_is_not_the_adapter_stays_bit_for_bit(make_config):
    config, run, tensors = trained(make_config, "qwen05b", "model.dtype=bfloat16")
    merged = dict(whole_model(run.model.source, lora=config.lora, trained=tensors).tensors())
    adapted = adapted_weights(run.model.module)
    bases = {item.name: item.tensor for item in run.model.source.weights(list(merged))}
    for name, tensor in merged.items():
        assert torch.equal(tensor.to(torch.bfloat16), bases[name]) == (name not in adapted), name


def test_tensors_of_another_model_are_refused(make_config):
    config, run, tensors = trained(make_config, "mistral7b")
    first = next(name for name in tensors if name.endswith("lora_A"))
    del tensors[first]
    with pytest.raises(ConfigError, match=rf"here; it targets \S+ and has no {first}; copy it again"):
        whole_model(run.model.source, lora=config.lora, trained=tensors, origin="here")


def test_nothing_but_the_run_decides(make_config):
    """The reference of a comparison holds the base as the run did: rounded first, widened then."""
    config, run, tensors = trained(make_config, "mistral7b", "model.dtype=bfloat16")
    wide = make_config("model=mistral7b", *TINY)
    runtime = EagerRuntime(config.hw)
    module = build_frozen(
        HuggingFaceModel(wide.model, seed=wide.seed),
        lora=config.lora,
        trained=tensors,
        place=runtime.place,
        rounded_to=torch.bfloat16,
    )
    held = dict(module.named_parameters())
    for item in run.model.source.weights(["model.embed_tokens.weight"]):
        assert torch.equal(held[item.name], item.tensor.float())
