"""Classifiers: texts of a packed row against the class's own forward pass on each alone; weights of a new head."""

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from tests.models.encoders import ENCODERS, SMALL, Encoder, source_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.models.families.classification import class_logits, texts_of
from tpu_experiments.models.huggingface import CLASSIFIER, HuggingFaceModel, own_labels
from tpu_experiments.models.sources.build import describe
from tpu_experiments.models.sources.isolation import require_isolation

pytestmark = pytest.mark.xla
LABELS = ("da", "nu", "poate")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KINDS = (
    *ENCODERS,
    Encoder("modernbert", values={**ENCODERS[0].values, "classifier_pooling": "mean"}),
    Encoder("eurobert", values={**ENCODERS[1].values, "classifier_pooling": "mean"}),
    Encoder("eurobert", values={**ENCODERS[1].values, "classifier_pooling": "bos"}),
    Encoder("bert", values=NO_DROPOUT),
)
LENGTHS = (13, 1, 9)


def name_of(encoder):
    return f"{encoder.model_type}-{encoder.values.get('classifier_pooling', '')}"


@pytest.fixture(params=KINDS, ids=name_of)
def encoder(request):
    return request.param


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def module_of(source):
    """The class with large random weights, so that logits differ by more than rounding."""
    torch.manual_seed(0)
    module = source.built(source.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.add_(0.1)
    return module


def labelled_rows(*, total=40, first=0):
    """Two rows of three texts with labels 0, 1, 2 behind them, and padding; `first` rotates the texts."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(8, 512, (length,), generator=generator) for length in LENGTHS]
    rows = {
        name: torch.zeros(2, total, dtype=torch.int32) for name in ("ids", "learn", "positions", "segments", "label")
    }
    order = [[0, 1, 2], [2, 0, 1]]
    for row, numbers in enumerate(order):
        start = 0
        for place, number in enumerate(numbers, start=1):
            ids = texts[number]
            here = slice(start, start + len(ids) + 1)
            rows["ids"][row, here] = torch.cat([ids, torch.tensor([0])])
            rows["learn"][row, here.stop - 1], rows["label"][row, here.stop - 1] = 1, number
            rows["positions"][row, here] = torch.arange(len(ids) + 1)
            rows["segments"][row, here] = place
            start = here.stop
    return rows, texts, order


def test_texts_of_a_row_have_the_logits_of_each_alone(encoder):
    module = module_of(source_of(encoder, labels=LABELS))
    rows, texts, order = labelled_rows()
    found = texts_of(rows)
    with torch.no_grad():
        ours = class_logits(module, dict(module.named_parameters()), found)
        alone = torch.cat([module(input_ids=ids[None]).logits for ids in texts])
    assert found.labels_RK[:, :3].tolist() == order
    assert found.weights_RK.sum(1).tolist() == [3, 3]
    assert not torch.allclose(alone[0], alone[2], atol=1e-2)
    torch.testing.assert_close(ours[:, :3], alone[torch.tensor(order)], atol=2e-5, rtol=2e-5)


def test_padding_changes_nothing(encoder):
    module = module_of(source_of(encoder, labels=LABELS))
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        short, long = (class_logits(module, parameters, texts_of(labelled_rows(total=total)[0])) for total in (26, 60))
    torch.testing.assert_close(short[:, :3], long[:, :3], atol=2e-5, rtol=2e-5)


def test_the_check_before_a_run_passes_encoders(encoder, caplog):
    require_isolation(source_of(encoder, labels=LABELS), is_packed=True)
    assert "was not checked" not in caplog.text


def test_a_class_that_pools_in_another_way_is_refused():
    """ALBERT's pooler is not that of BERT: what would be trained is not what transformers loads."""
    with pytest.raises(ConfigError, match="not those that it computes for a document alone"):
        require_isolation(source_of(Encoder("albert", values=NO_DROPOUT), labels=LABELS), is_packed=False)


def test_rows_that_learn_every_token_have_the_last_as_label():
    rows, _, order = labelled_rows()
    everything = rows | {"learn": (rows["segments"] > 0).int()}
    found, wanted = texts_of(everything), texts_of(rows)
    assert found.labels_RK[:, :3].tolist() == order
    assert torch.equal(found.weights_RK, wanted.weights_RK)
    assert torch.equal(found.rows["segments"], wanted.rows["segments"])


def test_a_decoder_is_refused():
    arch = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}
    model = ModelConfig(name="x", path="", init="random", dtype="float32", arch=arch)
    with pytest.raises(ConfigError, match=r"'llama' is a decoder.*give an encoder"):
        HuggingFaceModel(model, seed=0, head=CLASSIFIER, causal=False, labels=LABELS)


def saved(folder, encoder, auto, **config_values):
    """A checkpoint of random weights of one of transformers' classes."""
    config = source_of(encoder).config
    for name, value in config_values.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    module = auto.from_config(config)
    module.save_pretrained(folder)
    return dict(module.named_parameters())


def loaded(folder, *, labels=LABELS, seed=0, attention="sdpa"):
    model = ModelConfig(name="x", path=str(folder), dtype="float32", attention=attention)
    source = HuggingFaceModel(model, seed=seed, head=CLASSIFIER, causal=False, labels=labels)
    shapes = {name: tuple(p.shape) for name, p in source.empty().named_parameters()}
    source.require_weights(shapes)
    return source, {named.name: named.tensor for named in source.weights(list(shapes))}


@pytest.mark.parametrize("encoder", [*ENCODERS, KINDS[-1]], ids=name_of)
def test_a_checkpoint_of_masked_language_modelling_gets_a_new_head(tmp_path, encoder):
    theirs = saved(tmp_path, encoder, AutoModelForMaskedLM)
    source, weights = loaded(tmp_path, attention=encoder.attention)
    module = source.empty()
    prefix = f"{module.base_model_prefix}."
    kept = [name for name in weights if name in theirs]
    assert any(name.startswith(prefix) for name in kept)
    assert all(torch.equal(weights[name], theirs[name]) for name in kept if name not in source.new_head)
    new = set(weights) - set(kept)
    assert new <= source.new_head.keys()
    assert all(".pooler." in name or not name.startswith(prefix) for name in source.new_head)
    _, again = loaded(tmp_path, attention=encoder.attention)
    _, other = loaded(tmp_path, attention=encoder.attention, seed=1)
    for name in source.new_head:
        assert torch.equal(weights[name], again[name])
        if weights[name].ndim == 2:
            assert not torch.equal(weights[name], other[name])
            std = source.config.initializer_range
            assert weights[name].std().item() == pytest.approx(std, rel=0.3)  # 192 draws: 5 % is one deviation
        else:
            assert set(weights[name].unique().tolist()) <= {0.0, 1.0}


def test_modernberts_prediction_head_is_taken_as_transformers_does(tmp_path):
    theirs = saved(tmp_path, ENCODERS[0], AutoModelForMaskedLM)
    source, weights = loaded(tmp_path)
    assert torch.equal(weights["head.dense.weight"], theirs["head.dense.weight"])
    assert set(source.new_head) == {"classifier.weight", "classifier.bias"}


def test_an_encoder_alone_is_a_checkpoint_too(tmp_path):
    """As objective=rtd exports its discriminator."""
    theirs = saved(tmp_path, ENCODERS[2], AutoModel)
    source, weights = loaded(tmp_path, attention="eager")
    assert set(source.new_head) == {
        f"{part}.{leaf}" for part in ("pooler.dense", "classifier") for leaf in ("weight", "bias")
    }
    assert all(torch.equal(weights[f"deberta.{name}"], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("labels", [LABELS, LABELS[::-1], LABELS[:2]])
def test_a_classifier_keeps_its_logits_for_the_same_labels_alone(tmp_path, labels):
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    theirs = saved(tmp_path, ENCODERS[0], AutoModelForSequenceClassification, **names)
    source, weights = loaded(tmp_path, labels=labels)
    assert own_labels(source.config) == list(labels)
    assert weights["classifier.weight"].shape[0] == len(labels)
    is_same = labels == LABELS
    assert bool(source.new_head) != is_same
    assert torch.equal(weights["classifier.weight"], theirs["classifier.weight"]) == is_same
    assert torch.equal(weights["head.dense.weight"], theirs["head.dense.weight"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_peft_reads_the_head_beside_the_adapters(encoder, tmp_path):
    from peft import PeftModel

    lora = LoraConfig(r=2, targets=["all-linear"])
    source = source_of(encoder, labels=LABELS)
    module, _ = describe(source, lora=lora)
    torch.manual_seed(0)
    trained = {name: torch.randn(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    write_adapter(str(tmp_path), parameters=trained, initial={}, lora=lora, base_path="base", revision=None)
    model = PeftModel.from_pretrained(source.built(source.config, dtype=torch.float32), tmp_path)
    named = dict(model.named_parameters())
    whole = {name.replace("modules_to_save.default.", ""): name for name in named if ".modules_to_save." in name}
    assert whole.keys() == {f"base_model.model.{name}" for name in trained if ".lora_" not in name}
    for name, tensor in trained.items():
        outer = f"base_model.model.{name}"
        torch.testing.assert_close(named[whole.get(outer, f"{outer}.default.weight")], tensor, atol=0, rtol=0)


def test_with_adapters_the_head_is_trained_whole(encoder):
    lora = LoraConfig(r=2, targets=["all-linear"])
    module, _ = describe(source_of(encoder, labels=LABELS), lora=lora)
    prefix = f"{module.base_model_prefix}."
    for name, parameter in module.named_parameters():
        is_head = not name.startswith(prefix) or ".pooler." in name
        assert parameter.requires_grad == (is_head or ".lora_" in name), name
        assert not (is_head and ".lora_" in name), name
