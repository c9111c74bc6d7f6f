"""The run card: what it says is what result.json says, and its five lines load the adapter."""

import json
import re

import pytest
import yaml

from tests.training.runs import finished
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.training.card import card

pytestmark = pytest.mark.xla
SETTINGS = (
    "debug=smoke",
    "hw.runtime=eager",
    "trainer.max_stage_steps=2",
    "curriculum.stages.chat.replay=0.25",
    "name=carded",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("carded")
    return folder / "carded", finished(*SETTINGS, output_dir=folder)


def test_the_same_page_is_in_the_run_and_beside_the_adapter(run):
    folder, result = run
    text = (folder / "README.md").read_text()
    assert (folder / "adapter" / "README.md").read_text() == text
    for name in ("eval_loss", "eval_loss_before"):
        assert f"{result[name]:.4f}" in text
    for audit_hash in result["data_audit"].values():
        assert audit_hash in text
    assert "| chat | sample_chat, 25 % of sample_text | 8 x 64 | 2 |" in text
    assert result["config_hash"] in text
    assert result["sample_after"].splitlines()[0] in text


def test_the_hub_can_read_its_metadata(run):
    from huggingface_hub import ModelCard

    folder, result = run
    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == "peft"
    assert data.base_model is None, "a stand-in is no model of the Hub"
    found = {r.dataset_name: r.metric_value for r in data.eval_results}
    assert found == pytest.approx(result["eval_sources"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks transformers for it
def test_its_lines_load_the_adapter(run):
    folder, _ = run
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) == 5
    scope = {}
    exec(code, scope)
    assert type(scope["model"]).__name__ == "PeftModelForCausalLM"
    assert scope["tokenizer"].chat_template


def test_a_recipe_names_what_the_hub_has(run, make_config):
    folder, result = run
    config = make_config("experiment=mistral7b_ro")
    text = card(json.loads((folder / "result.json").read_text()), config, resolve_stages(config))
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["base_model"] == "mistralai/Mistral-7B-Instruct-v0.1"
    assert metadata["datasets"] == ["wikimedia/wikipedia", "OpenLLM-Ro/ro_sft_ultrachat"]
    config = make_config("experiment=gemma3_270m_chat")
    assert "datasets" not in yaml.safe_load(card(result, config, resolve_stages(config)).split("---")[1])
