"""task=quantize writes a model in a few bits, which transformers or this program reads, and says what it costs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests import forks
from tests.config.composing import composed
from tests.tasks.tiny_run import write_form, write_run
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.config.task_schema import QuantizeTaskConfig, exporting_problems
from tpu_experiments.export.quantised import chosen_weights
from tpu_experiments.export.vector_model import read_vector_model
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.tasks.export.readers import TransformersModel
from tpu_experiments.tasks.quantize import _read as read_back
from tpu_experiments.tasks.quantize import form_of
from tpu_experiments.tasks.setup import require_dense

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:You passed `quantization_config`:UserWarning"
    ),
]
SMALL = ("task.parity.documents=3", "task.parity.tokens=48", "task.parity.max_new_tokens=2", "task.parity.prompts=1")
METHODS = {
    "rtn": ("task.group=32",),
    "gptq": ("task.group=32", "task.rows=4"),
    "vptq": ("task.rows=2", "task.vector=4", "task.codebook=16", "task.outliers=0.05", "task.outlier_codebook=8"),
}


def quantize(*words, folder):
    return forks.run(["run.py", "task=quantize", *words, *SMALL, f"output_dir={folder}"])


@pytest.mark.parametrize("method", only(["vptq"], METHODS))
def test_a_run_is_written_compared_and_read_back(make_config, tmp_path, method):
    run = write_run(tmp_path / "made", make_config, "model=tiny")
    done = quantize(f"task.run={run}", f"task.method={method}", *METHODS[method], folder=tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # a tiny model in 1.5 bits may cost too much
    folder = run / "export" / method
    facts = json.loads((folder / "export.json").read_text())
    (parity,) = facts["parity"]
    assert parity["verdict"] in ("ok", "worse"), parity
    assert parity["perplexity_ratio_low"] <= parity["perplexity_ratio"] <= parity["perplexity_ratio_high"]
    assert facts["bits_per_weight"] == pytest.approx({"rtn": 5.0, "gptq": 5.0, "vptq": 1.3}[method], abs=0.4)
    assert (len(facts["lost"]) > 0) == (method != "rtn")
    assert not (run / "export" / f"{method}_layers").exists()
    if method == "vptq":
        model = read_vector_model(str(folder))
    else:
        config = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    with torch.no_grad():
        logits = model(torch.arange(5, 25)[None]).logits
    assert logits.isfinite().all()
    ids = list(range(5, 25))
    checked = read_back(str(folder), torch.float32, method=method).log_probs(ids)
    torch.testing.assert_close(log_probs(folder, ids), checked, atol=1e-5, rtol=1e-5)
    names = load_file(folder / "model.safetensors")
    assert any(name.endswith(("weight_packed", "weight_codebook")) for name in names)
    parts = [tensor for name, tensor in names.items() if ".weight_" in name and not name.endswith("_shape")]
    count = sum(int(t.prod()) for name, t in names.items() if name.endswith(".weight_shape"))
    stored = 8 * sum(tensor.nbytes for tensor in parts) / count
    assert facts["bits_per_weight"] == pytest.approx(stored, rel=1e-3), "indices end at whole bytes"
    assert "bits each" in (folder / "README.md").read_text()


def log_probs(folder, ids):
    """Of the folder as the base of this program's own model, which task=evaluate and task=generate build."""
    source = HuggingFaceModel(ModelConfig(name="x", path=str(folder), dtype="float32", attention="sdpa"), seed=0)
    assert not hasattr(source.config, "quantization_config"), "an export of decoded weights would carry it"
    module = build_frozen(source, lora=LoraConfig(r=0), trained={}, place=lambda tensor, name: tensor)
    row = torch.tensor([ids], dtype=torch.int32)
    batch = {"ids": row, "positions": torch.arange(len(ids), dtype=torch.int32)[None], "segments": torch.ones_like(row)}
    with torch.no_grad():
        return torch.log_softmax(logits_of(module, {}, batch)[0], -1)


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    """A folder of task=export, whose layout is that of integers with one scale for a row."""
    place = tmp_path_factory.mktemp("int8")

    def make(*words, **_):
        return composed(*words)

    return write_form(write_run(place / "made", make, "model=tiny"), make, "int8")


def test_int8_of_task_export_is_a_base_too(int8):
    ids = list(range(5, 25))
    expected = TransformersModel(str(int8), dtype=torch.float32).log_probs(ids)
    torch.testing.assert_close(log_probs(int8, ids), expected, atol=1e-5, rtol=1e-5)


def test_such_a_base_is_not_trained_on_and_not_quantised_again(int8, make_config):
    words = ("model=mistral7b", f"model.path={int8}", "trainer.seq_len=64", "data=sample_chat")
    with pytest.raises(ConfigError, match=r"its weights have a few bits, .* model\.base=nf4 holds the frozen weights"):
        require_dense(make_config(*words))
    with pytest.raises(ConfigError, match=r"model\.base=nf4 with model\.path=.*leave model\.base=dense"):
        require_dense(make_config(*words, "model.base=nf4"))


@pytest.mark.parametrize("change", ["another part", "another size", "a part less", "a negative shape"])
def test_parts_that_are_not_those_of_the_settings_are_refused(int8, tmp_path, change):
    tensors = load_file(int8 / "model.safetensors")
    name = next(key.removesuffix("_packed") for key in tensors if key.endswith("weight_packed"))
    if change == "another part":
        tensors[f"{name}_g_idx"] = torch.zeros(128, dtype=torch.int32)
    elif change == "another size":
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"].repeat(1, 2)
    elif change == "a part less":
        del tensors[f"{name}_scale"]
    else:
        tensors[f"{name}_shape"] = -tensors[f"{name}_shape"]
    shutil.copytree(int8, tmp_path / "changed")
    save_file(tensors, tmp_path / "changed" / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"has {name} as .*the two do not belong together"):
        log_probs(tmp_path / "changed", [5, 6])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_tasks_read_what_was_written(make_config, tmp_path, method):
    run = write_run(tmp_path / "made", make_config, "model=tiny")
    assert quantize(f"task.run={run}", f"task.method={method}", *METHODS[method], folder=tmp_path).returncode in (0, 1)
    words = ("model=mistral7b", f"model.path={run / 'export' / method}", f"output_dir={tmp_path}")
    for task in (
        ("task=generate", "task.prompt=Ce?", "task.max_new_tokens=4", "task.buckets=[32]"),
        ("task=evaluate", "task.adapter=none", "data=sample_chat", "trainer.seq_len=64"),
    ):
        done = forks.run(["run.py", *task, *words])
        assert done.returncode == 0, done.stdout + done.stderr
    done = forks.run(["run.py", *words, "data=sample_chat", "trainer.seq_len=64"])
    assert done.returncode == 2
    assert "its weights have a few bits, for task=evaluate and task=generate" in done.stdout + done.stderr


def task_of(**settings):
    return QuantizeTaskConfig(name="quantize", **settings)


def test_settings_of_another_method_are_refused():
    (problem,) = exporting_problems(task_of(method="rtn", rows=3))
    assert problem.startswith("task.rows=3 with task.method=rtn")
    (problem,) = exporting_problems(task_of(method="vptq", bits=3))
    assert problem.startswith("task.bits=3 with task.method=vptq")
    assert exporting_problems(task_of(method="vptq", outliers=0.01)) == []


def test_what_no_weight_divides_into_is_refused(make_config):
    config = make_config("model=tiny")
    whole = whole_model(HuggingFaceModel(config.model, seed=0), lora=LoraConfig(r=0), trained={})
    with pytest.raises(ConfigError, match=r"that task\.group=24 divides"):
        chosen_weights(whole, form_of(task_of(method="rtn", group=24)))
    with pytest.raises(ConfigError, match=r"set an even task\.vector"):
        form_of(task_of(method="vptq", vector=3, outliers=0.1))
