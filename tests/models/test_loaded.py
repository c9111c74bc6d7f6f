"""What is loaded computes what transformers computes from the same files, or the run is refused."""

import json
import logging
import os
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.encoders import ENCODERS, SMALL
from tests.models.test_buffers import HELD, VALUES
from tests.models.test_buffers import written as written_with_buffers
from tests.models.test_families import FAMILIES, SIZES
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.models import huggingface
from tpu_experiments.models.huggingface import CLASSIFIER, HuggingFaceModel
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.sources import buffers, build, conversion, loaded
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.loaded import difference, fault_of_written, part_of, require_loaded, with_layers
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.tasks.setup import check_loaded, set_up

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("plain_attention", "no_records")]
WEIGHTS = "model.safetensors"
LORA = LoraConfig(r=4, alpha=8.0, targets=["all-linear"])
NONE = LoraConfig(r=0)


@pytest.fixture
def no_records(tmp_path, monkeypatch):
    """No checkpoint has passed before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def source_of(folder, *, attention="eager", head="causal_lm", **more):
    return HuggingFaceModel(ModelConfig(name="x", path=str(folder), attention=attention), seed=0, head=head, **more)


def saved(folder, kind="qwen2", *, auto=AutoModelForCausalLM, **values):
    """A checkpoint of transformers whose every weight is another than that of an untrained model."""
    torch.manual_seed(0)
    of_kind = CONFIG_MAPPING[kind]
    settable = {name: v for name, v in SIZES.items() if not isinstance(getattr(of_kind, name, None), property)}
    return randomised(auto.from_config(of_kind(**settable | values), dtype=torch.float32), folder)


def randomised(model, folder):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return folder


def refused(folder, *, lora=LORA, **more):
    with pytest.raises(ConfigError) as caught:
        require_loaded(source_of(folder, **more), lora=lora, is_packed=True)
    message = str(caught.value)
    assert message.startswith(f"model.path={folder}")
    assert message.endswith(".")
    return message


# ---- right readers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", only(["gemma3", "mixtral", "xlstm"], {f.model_type: f for f in FAMILIES}))
@pytest.mark.parametrize("lora", [LORA, NONE], ids=["adapters", "all weights"])
def test_every_family_passes(family, lora, tmp_path):
    one = next(each for each in FAMILIES if each.model_type == family)
    torch.manual_seed(0)
    folder = randomised(AutoModelForCausalLM.from_config(one.config(), dtype=torch.float32), tmp_path)
    source = source_of(folder, attention=one.attention if one.attention != "flash" else "eager")
    part = part_of(source)
    assert part.is_whole
    assert difference(source, part, lora=lora, is_packed=True) < 1e-5


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.model_type)
def test_encoders_and_classifiers_of_them_pass(encoder, tmp_path):
    config = CONFIG_MAPPING[encoder.model_type](**SMALL | encoder.values)
    randomised(AutoModelForMaskedLM.from_config(config, dtype=torch.float32), tmp_path)
    for head, more in (("masked_lm", {}), (CLASSIFIER, {"labels": ["a", "b", "c"]})):
        source = source_of(tmp_path, head=head, causal=False, attention=encoder.attention, **more)
        assert difference(source, part_of(source), lora=NONE, is_packed=True) < 1e-5


@pytest.mark.parametrize("kind", VALUES)
def test_buffers_pass(kind, tmp_path):
    written_with_buffers(kind, tmp_path)
    source = source_of(tmp_path)
    assert difference(source, part_of(source), lora=LORA, is_packed=kind != "phi3") < 1e-5


def test_of_a_large_model_the_first_layers_of_every_kind_are_loaded(tmp_path, monkeypatch):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 5]
    saved(tmp_path, "gemma3_text", num_hidden_layers=8, layer_types=kinds, sliding_window=8)
    source = source_of(tmp_path)
    assert str(part_of(source)) == "all 8 layers"
    monkeypatch.setattr(loaded, "BYTES", 0)
    part = part_of(source)
    assert str(part) == "the first 3 of 8 layers"
    built = with_layers(source, part.layers).empty()
    assert part.nbytes == 4 * sum(p.numel() for p in built.parameters())
    assert difference(source, part, lora=LORA, is_packed=True) < 1e-5
    monkeypatch.setattr(loaded, "MOST_BYTES", 0)
    assert part_of(source).layers == 1
    assert source.config.num_hidden_layers == len(source.config.layer_types) == 8


def test_of_a_large_multimodal_model_too(tmp_path, monkeypatch):
    family = next(one for one in FAMILIES if one.model_type == "gemma3")
    config = family.config()
    config.text_config.num_hidden_layers, config.text_config.layer_types = 4, ["sliding_attention"] * 4
    torch.manual_seed(0)
    randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)
    monkeypatch.setattr(loaded, "BYTES", 0)
    source = source_of(tmp_path)
    part = part_of(source)
    assert str(part) == "the first 2 of 4 layers"
    assert difference(source, part, lora=LORA, is_packed=True) < 1e-5


# ---- wrong readers ------------------------------------------------------------------------------------------

BIAS = "model.layers.0.self_attn.q_proj.bias"
UP = "model.layers.1.mlp.up_proj.weight"


def weights_changed(change):
    """A reader whose parameters are changed by `change(name, tensor)`."""
    plain = HuggingFaceModel._checkpoint_weights

    def mutant(self, names):
        for item in plain(self, names):
            yield Named(item.name, change(item.name, item.tensor))

    return lambda patch: patch.setattr(HuggingFaceModel, "_checkpoint_weights", mutant)


def names_changed(change):
    """A reader that looks for a parameter under the name `change(name)`."""
    plain = HuggingFaceModel._stored_name
    return lambda patch: patch.setattr(HuggingFaceModel, "_stored_name", lambda self, name: plain(self, change(name)))


def read_changed(change):
    plain = conversion.StoredTensor.read_as_stored
    return lambda patch: patch.setattr(
        conversion.StoredTensor, "read_as_stored", lambda self: change(self, plain(self))
    )


def no_buffers(patch):
    patch.setattr(HuggingFaceModel, "_stored_buffers", lambda *_: {})


def experts_unsorted(patch):
    """Sorts names as text, in which expert 10 is before expert 2."""
    patch.setattr(conversion, "dot_natural_key", lambda name: name)


def no_rope(patch):
    plain = huggingface.compute_buffers

    def mutant(module):
        found = plain(module)
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq"):
                buffers.put_buffer(module, name, torch.zeros_like(buffer))
        return found

    patch.setattr(huggingface, "compute_buffers", mutant)


def swapped(one, other):
    return lambda name: name.replace(one, "\0").replace(other, one).replace("\0", other)


def shifted(self, tensor):
    """Reads one element further into the file."""
    return tensor.flatten().roll(1).view(tensor.shape) if tensor.ndim > 1 else tensor


EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 4}
MUTANTS = {
    "a weight left at zero": ("qwen2", {}, weights_changed(lambda n, t: t * 0 if n == UP else t)),
    "biases left out": ("qwen2", {}, weights_changed(lambda n, t: t * 0 if n.endswith("k_proj.bias") else t)),
    "one bias left out": ("qwen2", {}, weights_changed(lambda n, t: t * 0 if n == BIAS else t)),
    "norms left at one": ("qwen2", {}, weights_changed(lambda n, t: t * 0 + 1 if "input_layernorm" in n else t)),
    "bfloat16 for float32": ("qwen2", {}, weights_changed(lambda n, t: t.to(torch.bfloat16).to(t.dtype))),
    "one weight in bfloat16": ("qwen2", {}, weights_changed(lambda n, t: t.bfloat16().float() if n == UP else t)),
    "transposed": ("qwen2", {}, weights_changed(lambda n, t: t.T if n.endswith("q_proj.weight") else t)),
    "gate for up": ("llama", {}, names_changed(swapped("gate_proj", "up_proj"))),
    "layers exchanged": ("llama", {}, names_changed(swapped("layers.0", "layers.1"))),
    "norms exchanged": ("llama", {}, names_changed(swapped("input_layernorm", "post_attention_layernorm"))),
    "keys for values": ("llama", {}, names_changed(swapped("k_proj", "v_proj"))),
    "one element further": ("llama", {}, read_changed(shifted)),
    "halves exchanged": ("phi3", {}, weights_changed(lambda n, t: t.roll(t.shape[0] // 2, 0) if "gate_up" in n else t)),
    "experts in the order of text": ("mixtral", EXPERTS, experts_unsorted),
    "no RoPE": ("llama", {}, no_rope),
    "rows of the embedding shifted": ("llama", {}, weights_changed(lambda n, t: t.roll(1, 0) if "embed" in n else t)),
    "embedding for an untied head": ("llama", {"tie_word_embeddings": False}, names_changed(
        lambda name: "model.embed_tokens.weight" if name == "lm_head.weight" else name)),
    "biases of routers not read": ("glm4_moe", VALUES["glm4_moe"], no_buffers),
    "scalars of activations not read": ("apertus", {}, no_buffers),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("lora", [LORA, NONE], ids=["adapters", "all weights"])
def test_a_wrong_reader_is_found(mutant, lora, tmp_path, monkeypatch):
    kind, values, patch = MUTANTS[mutant]
    if kind in HELD:
        written_with_buffers(kind, tmp_path)
    else:
        saved(tmp_path, kind, **values)
    source = source_of(tmp_path)
    assert difference(source, part_of(source), lora=lora, is_packed=True) < 1e-5
    patch(monkeypatch)
    message = refused(tmp_path, lora=lora)
    assert "as it is loaded here it computes other logits than transformers" in message
    assert "with all 2 layers " in message


@pytest.mark.parametrize("lora", [LORA, NONE], ids=["adapters", "all weights"])
def test_a_weight_that_no_reader_yields_is_named(lora, tmp_path, monkeypatch):
    saved(tmp_path)
    plain = build.stacked_weights

    def mutant(*given, **more):
        return (item for item in plain(*given, **more) if item.name != UP)

    monkeypatch.setattr(build, "stacked_weights", mutant)
    with pytest.raises(ConfigError, match=rf"Qwen2ForCausalLM; 1 of its parameters were not loaded, first '{UP}'"):
        build_model(source_of(tmp_path), lora=lora, seed=0, place=lambda tensor, name: tensor)


def test_a_model_that_cannot_compute_with_its_adapters_is_refused(tmp_path, monkeypatch):
    saved(tmp_path)

    def broken(*_, **__):
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(loaded.forward, "logits_of", broken)
    message = refused(tmp_path)
    assert "the model that would be trained does not (ValueError: too many values to unpack)" in message


def test_files_that_transformers_cannot_load_are_refused(tmp_path, monkeypatch):
    saved(tmp_path)
    source = source_of(tmp_path)

    def broken(*_, **__):
        raise OSError("no such file")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(ConfigError, match=r"cannot compute with all 2 layers \(OSError: no such file\)"):
        require_loaded(source, lora=LORA, is_packed=True)


# ---- what is written ----------------------------------------------------------------------------------------


def written_again(folder, config, **changed):
    """A model that a run of this config wrote, with something changed in config.json."""
    saved(folder, **config)
    source = source_of(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changed))
    return fault_of_written(source, str(folder))


def test_a_written_model_is_read_by_transformers(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert written_again(tmp_path, {}) is None
    assert f"check of {tmp_path} by transformers: with all 2 layers they are " in caplog.text


CHANGED = {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}, "hidden_act": "relu"}


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_that_lost_a_value_is_found(name, tmp_path):
    fault = written_again(tmp_path, {}, **{name: CHANGED[name]})
    assert fault is not None
    assert fault.startswith(f"{tmp_path}, read back by transformers ")
    assert "computes other logits: with all 2 layers" in fault


def test_a_written_model_that_transformers_cannot_read_is_found(tmp_path):
    fault = written_again(tmp_path, {}, num_attention_heads=7)
    assert fault is not None
    assert "it cannot compute with all 2 layers" in fault


# ---- where it is called -------------------------------------------------------------------------------------

RUN = ("model=tiny", "model.size=full", "model.attention=eager", "data=[sample_text]", "debug=smoke", "lora=none")


def test_a_run_is_refused_before_it_has_a_folder(tmp_path, make_config, monkeypatch):
    saved(tmp_path / "base")
    config = make_config(*RUN, "model.size=full", f"model.path={tmp_path / 'base'}", f"output_dir={tmp_path / 'runs'}")
    folder = open_run(config, may_lengthen=False)
    MUTANTS["keys for values"][2](monkeypatch)
    with pytest.raises(ConfigError, match="other logits than transformers"):
        set_up(config, folder)
    assert not (tmp_path / "runs").exists()
    canary = replace(config.trainer.canary, when="never")
    check_loaded(replace(config, trainer=replace(config.trainer, canary=canary)))


# ---- once for each set of files -----------------------------------------------------------------------------


def lines(caplog):
    return [record.message for record in caplog.records if "check of the loaded model" in record.message]


def test_files_that_have_passed_are_not_compared_again(tmp_path, caplog):
    saved(tmp_path)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            require_loaded(source_of(tmp_path), lora=LORA, is_packed=True)
        assert len(lines(caplog)) == 1
        assert ": with all 2 layers they are " in lines(caplog)[0]
        status = (tmp_path / WEIGHTS).stat()
        os.utime(tmp_path / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        require_loaded(source_of(tmp_path), lora=LORA, is_packed=True)
        assert len(lines(caplog)) == 2


def test_what_was_refused_is_not_recorded(tmp_path, monkeypatch):
    saved(tmp_path)
    with monkeypatch.context() as patch:
        MUTANTS["keys for values"][2](patch)
        refused(tmp_path)
        refused(tmp_path)
    require_loaded(source_of(tmp_path), lora=LORA, is_packed=True)


def test_random_weights_and_too_little_memory_are_said(tmp_path, caplog, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(loaded.psutil, "virtual_memory", lambda: type("Free", (), {"available": 1})())
    random = HuggingFaceModel(
        ModelConfig(name="x", path="", init="random", arch={"model_type": "llama", **SIZES}), seed=0
    )
    with caplog.at_level(logging.INFO):
        require_loaded(random, lora=LORA, is_packed=True)
        require_loaded(source_of(tmp_path), lora=LORA, is_packed=True)
    first, second = lines(caplog)
    assert "skipped (random weights)" in first
    assert "skipped (all 2 layers need 0.0 GiB of host memory, 0.0 GiB are free)" in second
