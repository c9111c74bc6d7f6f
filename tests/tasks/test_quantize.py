"""task=quantize writes a model in a few bits, which transformers or this program reads, and says what it costs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests import forks
from tests.tasks.tiny_run import write_run
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.task_schema import QuantizeTaskConfig, exporting_problems
from tpu_experiments.export.quantised import chosen_weights
from tpu_experiments.export.vector_model import read_vector_model
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.tasks.quantize import form_of

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
    names = load_file(folder / "model.safetensors")
    assert any(name.endswith(("weight_packed", "weight_codebook")) for name in names)
    parts = [tensor for name, tensor in names.items() if ".weight_" in name and not name.endswith("_shape")]
    count = sum(int(t.prod()) for name, t in names.items() if name.endswith(".weight_shape"))
    stored = 8 * sum(tensor.nbytes for tensor in parts) / count
    assert facts["bits_per_weight"] == pytest.approx(stored, rel=1e-3), "indices end at whole bytes"
    assert "bits each" in (folder / "README.md").read_text()


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
