"""Whole runs of experiment=xlstm_pretrain in its tiny version: what they export, and what is done with it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import finished, run

pytestmark = pytest.mark.xla
WORDS = ("experiment=xlstm_pretrain", "debug=smoke", "hw.runtime=eager", "sample.max_new_tokens=0", "name=mine")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two steps."""
    place = tmp_path_factory.mktemp("run")
    finished(*WORDS, "trainer.max_stage_steps=2", output_dir=place, as_typed=True)
    return place / "mine"


def test_transformers_loads_the_export_and_goes_on_writing_from_its_cache(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tpu_experiments.models.families.xlstm import xLSTMForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32).eval()
    result = json.loads((trained / "result.json").read_text())
    assert sum(p.numel() for p in loaded.parameters()) == result["num_parameters"]
    (file,) = (trained / "checkpoints").glob("*/parameters.safetensors")
    own = xLSTMForCausalLM(loaded.config).eval()
    own.load_state_dict(load_file(file))
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    ids = torch.tensor([tokenizer("Dunărea este un fluviu.")["input_ids"]])
    with torch.no_grad():
        expected = loaded(ids, use_cache=False).logits
        assert (own(ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert loaded(ids, use_cache=True).cache_params is not None


@pytest.mark.slow
def test_a_run_is_evaluated_writes_and_is_exported_again(trained: Path) -> None:
    again = (f"task.run={trained}", "hw=cpu", "hw.num_threads=1")
    for words in (
        ("task=evaluate", "hw.runtime=eager"),
        ("task=generate", "hw.runtime=eager", "task.prompt=Salut", "task.max_new_tokens=4", "task.buckets=[32]"),
        ("task=export",),
    ):
        done = run(*words, *again, output_dir=trained.parent, as_typed=True)
        assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads((trained / "test_results.json").read_text())["sources"]["fineweb_edu"]["trained"]
    assert 0 < scores["bits_per_byte"]["value"] < 10
    done = run("task=export", "task.forms=[gguf]", *again, output_dir=trained.parent, as_typed=True)
    assert done.returncode == 2
    assert "leave gguf out of task.forms" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_is_killed_resumed_and_equal(tmp_path: Path) -> None:
    done = run(*WORDS, "task=resume_check", output_dir=tmp_path, as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "resume_check" / "mine" / "resume_check.json").read_text())
    assert found["equal"]
    assert [check["name"] for check in found["checks"] if not check["equal"]] == []
