"""The tiny recipes from scratch: killed and resumed, scored on the test split, reloaded by transformers.

test_replaced_token.py does the same for deberta_v3_rtd, test_experiments.py counts the programs of all.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tests.training.runs import finished, run

pytestmark = [pytest.mark.xla, pytest.mark.slow]
CLASSES = {
    "llama_mini_pretrain": AutoModelForCausalLM,
    "modernbert_mlm": AutoModelForMaskedLM,
    "eurobert_mlm": AutoModelForMaskedLM,
    "deberta_v3_mlm": AutoModelForMaskedLM,
}


def words(recipe):
    source = "fineweb_edu" if recipe.startswith("llama") else "wiki_ro"
    small = ("debug=smoke", "hw.runtime=eager", "sample.max_new_tokens=0", "name=mine")
    return (f"experiment={recipe}", *small, f"data.{source}.test_fraction=0.3")


@pytest.fixture(scope="module", params=CLASSES)
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    finished(*words(request.param), output_dir=folder, as_typed=True)
    return request.param, folder / "mine"


def test_documents_of_the_test_split_are_scored(whole):
    _, folder = whole
    done = run("task=evaluate", f"task.run={folder}", "hw.runtime=eager", output_dir=folder.parent, as_typed=True)
    assert done.returncode == 0, done.stderr
    (source,) = json.loads((folder / "test_results.json").read_text())["sources"].values()
    assert source["trained"]["loss"]["value"] < source["base"]["loss"]["value"]


def test_transformers_reloads_the_weights_of_the_last_checkpoint(whole):
    recipe, folder = whole
    model, info = CLASSES[recipe].from_pretrained(folder / "model", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    (trained,) = (folder / "checkpoints").glob("*/parameters.safetensors")
    fresh = CLASSES[recipe].from_config(model.config, dtype=torch.float32)
    missing, unexpected = fresh.load_state_dict(load_file(trained), strict=False)
    tied = set(fresh.state_dict()) - set(dict(fresh.named_parameters()))
    assert not set(missing) - tied
    assert not unexpected
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder / "model")("Dunărea este un fluviu.")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, fresh.eval()(ids).logits)


@pytest.mark.parametrize("recipe", CLASSES)
def test_a_killed_run_resumes_as_if_it_had_not_been(recipe, tmp_path):
    done = run(*words(recipe), "task=resume_check", output_dir=tmp_path, as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "resume_check" / "mine" / "resume_check.json").read_text())["equal"]
