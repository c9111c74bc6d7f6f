"""Encoders: attention on both sides inside a document, masks ready on the device, and what does not go together."""

from functools import partial

import pytest
import torch
import torch_xla
from torch import nn
from transformers import AutoModelForMaskedLM

from tests.models.encoders import ENCODERS, SMALL, Encoder, packed_rows, source_of
from tests.models.plain_kernel import PlainKernel
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.contracted import LinearOfHeads
from tpu_experiments.models.passes.forward import attention_masks, logits_of
from tpu_experiments.models.sources.build import work_on_heads
from tpu_experiments.models.sources.isolation import require_isolation
from tpu_experiments.models.stack.fold import chains_of, fold
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.ops import Folding, python_loop
from tpu_experiments.runtime.stacked import hugging_face_names, stacked
from tpu_experiments.runtime.xla.loop import xla_loop

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(params=ENCODERS, ids=lambda one: one.model_type, scope="module")
def encoder(request):
    return request.param


def plain(segments, window):
    """The same rule, written as loops."""
    rows, length = segments.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for b in range(rows):
        for i in range(length):
            for j in range(length):
                near = window is None or abs(i - j) <= window
                mask[b, 0, i, j] = near and bool(segments[b, i] == segments[b, j])
    return mask


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_is_of_both_sides_and_of_one_document(window):
    class Config:
        sliding_window = window

    segments = packed_rows()["segments"]
    assert torch.equal(attention_masks(segments, config=Config(), causal=False), plain(segments, window))


def test_encoders_pass_the_check_before_a_run(encoder, caplog):
    require_isolation(source_of(encoder), is_packed=True)
    assert "was not checked" not in caplog.text


def test_packed_documents_have_the_logits_of_each_alone(encoder):
    source = source_of(encoder)
    torch.manual_seed(0)
    config = source.config
    module = source.built(config, dtype=torch.float32).eval()
    rows = packed_rows()
    with torch.no_grad():
        ours = logits_of(module, dict(module.named_parameters()), rows, causal=False)
        for number in (1, 2):
            here = rows["segments"][0] == number
            theirs = module(input_ids=rows["ids"][:, here].long()).logits
            torch.testing.assert_close(ours[:, here], theirs, atol=2e-5, rtol=2e-5)


def test_modernberts_local_layers_see_half_the_window_on_each_side():
    source = source_of(ENCODERS[0])
    masks = attention_masks(packed_rows()["segments"], config=source.config, causal=False)
    assert torch.equal(masks["sliding_attention"], plain(packed_rows()["segments"], 4))
    assert torch.equal(masks["full_attention"], plain(packed_rows()["segments"], None))


def test_a_decoder_attends_on_both_sides_where_the_objective_says_so(caplog):
    arch = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}
    model = ModelConfig(name="x", path="", init="random", dtype="float32", arch=arch)
    require_isolation(HuggingFaceModel(model, seed=0, causal=False), is_packed=True)
    assert "was not checked" not in caplog.text


def test_a_decoder_that_stays_causal_is_refused(monkeypatch):
    arch = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}
    model = ModelConfig(name="x", path="", init="random", dtype="float32", arch=arch)
    source = HuggingFaceModel(model, seed=0, causal=False)
    monkeypatch.setattr(
        "tpu_experiments.models.passes.forward.bidirectional_mask",
        lambda segments, window: attention_masks(segments, config=None),
    )
    with pytest.raises(ConfigError, match="no token changes the logits of those before it"):
        require_isolation(source, is_packed=True)


@pytest.mark.parametrize(
    ("head", "model_type", "says"),
    [
        ("masked_lm", "mistral", "no masked language model of type 'mistral'; give an encoder"),
        ("causal_lm", "modernbert", "no causal language model of type 'modernbert'; .* objective=mlm"),
        ("own", "llama", "makes its models itself"),
    ],
)
def test_a_model_without_the_objectives_head_is_refused(head, model_type, says):
    model = ModelConfig(name="x", path="", init="random", arch={"model_type": model_type, **SMALL})
    with pytest.raises(ConfigError, match=says):
        HuggingFaceModel(model, seed=0, head=head, causal=head == "causal_lm")


@pytest.mark.parametrize("model_type", ["modernbert", "eurobert", "roberta", "mistral", "gemma3_text"])
def test_the_kernel_attends_to_both_sides_as_sdpa_does(model_type):
    """Windows included: half of ModernBERT's on each side, and a decoder's whole one."""
    values = {"mistral": {"sliding_window": 6}, "gemma3_text": {"sliding_window": 6, "head_dim": 16}}
    found = next((one for one in ENCODERS if one.model_type == model_type), Encoder(model_type))
    more = values.get(model_type, {}) | ({"num_key_value_heads": 2} if model_type in values else {})
    arch = {"model_type": model_type, **SMALL, **found.values, **more}
    head, rows, logits = "causal_lm" if more else "masked_lm", packed_rows(), []
    for attention in ("sdpa", "flash"):
        model = ModelConfig(name="x", path="", init="random", dtype="float32", attention=attention, arch=arch)
        source = HuggingFaceModel(model, seed=0, head=head, causal=False)
        require_isolation(source, is_packed=True)
        torch.manual_seed(0)
        module = source.built(source.config, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(logits_of(module, dict(module.named_parameters()), rows, causal=False))
    kernel = PlainKernel()
    install_attention_kernel(kernel)
    try:
        with torch.no_grad():
            logits.append(logits_of(module, dict(module.named_parameters()), rows, causal=False))
            work_on_heads(module, with_adapters=True)
            logits.append(logits_of(module, dict(module.named_parameters()), rows, causal=False))
    finally:
        install_attention_kernel(None)
    assert kernel.turned == [model_type != "roberta"] * SMALL["num_hidden_layers"] * 2
    of_heads = sum(isinstance(part, LinearOfHeads) for part in module.modules())
    assert of_heads == {"modernbert": 2, "roberta": 0}.get(model_type, 4) * SMALL["num_hidden_layers"]
    for by_others in logits[1:]:
        torch.testing.assert_close(by_others, logits[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_is_the_same_beside_a_kernel(encoder, attention):
    if attention == "sdpa" and encoder.attention == "eager":
        pytest.skip(f"{encoder.model_type} has eager attention alone")
    source, rows, logits = source_of(encoder, attention=attention), packed_rows(), []
    module = source.built(source.config, dtype=torch.float32).eval()
    kernel = PlainKernel()
    for installed in (None, kernel):
        install_attention_kernel(installed)
        try:
            with torch.no_grad():
                logits.append(logits_of(module, dict(module.named_parameters()), rows, causal=False))
        finally:
            install_attention_kernel(None)
    assert not kernel.turned
    torch.testing.assert_close(*logits, atol=0, rtol=0)


def test_an_encoder_is_not_computed_with_a_causal_kernel():
    module = source_of(ENCODERS[0], attention="flash").empty()
    rows = packed_rows()
    with pytest.raises(ConfigError, match="asks for is_causal"):
        logits_of(module, dict(module.named_parameters()), {n: t.to("meta") for n, t in rows.items()})


def test_a_model_with_attention_of_its_own_is_refused_the_kernel():
    own = next(encoder for encoder in ENCODERS if encoder.model_type == "deberta-v2")
    with pytest.raises(ConfigError, match=r"model\.attention=flash; deberta-v2 has .* use model.attention=eager"):
        source_of(own, attention="flash")


def test_the_class_is_that_of_masked_language_modelling(encoder):
    source = source_of(encoder)
    kind, own = type(AutoModelForMaskedLM.from_config(source.config)), type(source.empty())
    assert issubclass(own, kind)
    assert own.__name__ == kind.__name__
    assert (own is kind) == (encoder.model_type != "longformer")


FOLDED = {"modernbert": "1:7:3", "eurobert": "0:7:1", "deberta-v2": "0:7:1", "roberta": "0:7:1", "longformer": "0:7:1"}
"""The first layers of their stacks: ModernBERT's first layer has no norm, and then two are local and one is global."""


@pytest.mark.parametrize("where", only(["cpu"], ["cpu", "xla"]))
@pytest.mark.parametrize("folds", only(["modernbert", "deberta-v2"], FOLDED))
def test_folded_layers_compute_what_they_compute_one_by_one(folds, where):
    """DeBERTa's layers return a tuple, and give gradients to an embedding that all of them read."""
    source = source_of(next(one for one in ENCODERS if one.model_type == folds), num_hidden_layers=7)
    plain, rows = source.built(source.config, dtype=torch.float32).eval(), packed_rows()
    torch.manual_seed(0)
    weights_BTV = torch.randn(*rows["ids"].shape, 512) * (rows["segments"] > 0)[..., None]
    device, loop, remat = (
        ("cpu", python_loop, "none") if where == "cpu" else (torch_xla.device(), xla_loop, "layer_inputs")
    )

    def gradients(module, parameters, to):
        given = {name: tensor.to(to) for name, tensor in rows.items()}
        logits_BTV = logits_of(module, parameters, given, causal=False)
        loss = (logits_BTV * weights_BTV.to(to)).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return float(loss.detach()), {n: g if g is None else g.cpu() for n, g in zip(parameters, found, strict=True)}

    named = {name: p.detach().clone().requires_grad_() for name, p in plain.named_parameters()}
    loss, expected = gradients(plain, named, "cpu")
    folded = source.empty().eval()
    fold(folded, Folding(loop), rehearse=partial(source.rehearse, folded), remat=remat)
    assert any(f".{FOLDED[folds]}." in name for name, _ in folded.named_parameters())
    held = {name: p.detach() for name, p in plain.named_parameters()}
    own = {name: stacked(held, name).to(device).requires_grad_() for name, _ in folded.named_parameters()}
    for name, buffer in plain.named_buffers():
        parent, _, leaf = name.rpartition(".")
        folded.get_submodule(parent)._buffers[leaf] = buffer.to(device)
    found_loss, found = gradients(folded, own, device)
    assert found_loss == pytest.approx(loss, rel=1e-4)
    for name, gradient in found.items():
        parts = [expected[part] for part in hugging_face_names(name)]
        if parts[0] is None:
            assert gradient is None, name
            continue
        wanted = torch.stack(parts) if len(parts) > 1 else parts[0]
        assert float((gradient - wanted).abs().max()) < 2e-5 * float(wanted.abs().max()) + 1e-8, name


class Between(nn.Module):
    """Layers of which the second reads more than what the first returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(4))

    def forward(self, x):
        x = self.layers[0](x) + x
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def test_layers_with_something_between_them_are_not_folded():
    """Folded layers return nothing before the last of them, with which the model could compute."""
    module = Between()
    run = partial(module, torch.ones(1, 4, device="meta"))
    assert [chain.length for chain in chains_of([module.layers], rehearse=run)] == [1]
    assert fold(module, Folding(python_loop), rehearse=run, remat="none") == 0
