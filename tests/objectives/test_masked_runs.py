"""A whole run of masked language modelling: resumed, scored, reloaded by transformers; what it cannot do it says."""

import json
import math

import pytest
import torch
from transformers import AutoModelForMaskedLM

from tests.models.encoders import packed_rows
from tests.training.runs import finished, losses, run
from tpu_experiments.loggers.closing_lines import summary
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.storage.run_folder import RunFolder

pytestmark = pytest.mark.xla
MLM = ("model=modernbert_base", "objective=mlm", 'objective.mask_token="<|im_end|>"', "data=sample_text")
WORDS = (
    *(*MLM, "debug=smoke", "lora=none", "sharding=replicated", "hw.runtime=eager", "name=mlm"),
    *("trainer.max_stage_steps=4", "trainer.log_every_steps=1", "trainer.eval_every_steps=2"),
    *("curriculum=single", "schedule=constant", "checkpoint.every_steps=2", "objective.whole_word=true"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(*WORDS, output_dir=folder)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_left_alone(whole, tmp_path):
    folder, result = whole
    assert run(*WORDS, "trainer.max_stage_steps=2", output_dir=tmp_path).returncode == 0
    resumed = finished(*WORDS, output_dir=tmp_path)
    assert (resumed["eval_loss_before"], resumed["eval_loss"]) == (result["eval_loss_before"], result["eval_loss"])
    assert losses(tmp_path) == losses(folder)


@pytest.mark.slow
def test_four_devices_mask_the_same_tokens_and_learn_the_same(whole, tmp_path):
    words = [word for word in WORDS if word != "hw.runtime=eager"]
    result = finished(*words, "hw.parallel=spmd", "hw.num_devices=4", output_dir=tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole[0]), abs=1e-5)
    assert result["eval_loss"] == pytest.approx(whole[1]["eval_loss"], abs=1e-5)
    assert (result["num_compiles"], result["compiles_after_warmup"]) == (2, 0)


def test_measures_are_those_of_masked_tokens(whole):
    folder, result = whole
    assert set(result["eval_measures"]) == {"accuracy"}
    records = [json.loads(line) for line in (folder / "mlm" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record}
    assert "eval/masked_perplexity" in names
    assert not {"eval/perplexity", "eval/bits_per_byte"} & names


def test_the_model_is_what_transformers_loads(whole):
    model = AutoModelForMaskedLM.from_pretrained(whole[0] / "mlm" / "model", attn_implementation="sdpa").eval()
    rows = packed_rows(rows=1)
    with torch.no_grad():
        ours = logits_of(model, dict(model.named_parameters()), rows, causal=False)[0, :21]
        theirs = model(input_ids=rows["ids"][:, :21].long()).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_card_and_the_closing_lines_are_of_an_encoder(whole):
    folder, result = whole
    page = (folder / "mlm" / "model" / "README.md").read_text()
    assert "AutoModelForMaskedLM.from_pretrained(" in page
    assert "pipeline_tag: fill-mask" in page
    assert "Mean loss per masked token" in page
    assert "CausalLM" not in page
    lines = summary(result, folder=RunFolder(str(folder), "mlm"), arguments=())
    assert "(of masked tokens: perplexity" in lines
    assert "task=evaluate" in lines
    assert not [words for words in ("sample before", "task=generate", "task=export") if words in lines]


def test_adapters_are_refused(tmp_path):
    done = run(*WORDS, "lora=all_linear_r8", output_dir=tmp_path)
    assert done.returncode == 2
    assert "lora.r=8 with objective=mlm; adapters are for decoders" in done.stderr


@pytest.mark.slow
def test_documents_of_the_test_split_are_scored(whole, tmp_path):
    place = f"task.run={whole[0] / 'mlm'}"
    wanted = "task.pseudo_perplexity_documents=2"
    done = run("task=evaluate", place, wanted, "hw.runtime=eager", output_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "are of masked tokens" in done.stdout
    found = json.loads((whole[0] / "mlm" / "test_results.json").read_text())
    (source,) = found["sources"].values()
    assert found["objective"] == "mlm"
    assert "bits_per_byte" not in source["trained"]
    assert source["trained"]["loss"]["value"] < source["base"]["loss"]["value"]
    (beside,) = found["baselines"].values()
    assert beside["num_tokens"] == source["num_tokens"]
    assert beside["trained"]["accuracy"]["value"] == pytest.approx(source["trained"]["accuracy"]["value"])
    assert beside["trained"]["bigram"] == beside["base"]["bigram"]
    assert 0 < beside["trained"]["unigram"]["value"] < 0.2
    assert "above bigram" in done.stdout
    (pseudo,) = found["pseudo_perplexity"].values()
    assert pseudo["num_documents"] == 2
    loss = math.log(pseudo["trained"]["pseudo_perplexity"]["value"])
    assert 0.9 < loss / source["trained"]["loss"]["value"] < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["generate", "export", "serve"])
def test_tasks_for_decoders_say_so(whole, tmp_path, task):
    done = run(f"task={task}", f"task.run={whole[0] / 'mlm'}", output_dir=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "was trained with objective=mlm" in done.stderr
    assert "Traceback" not in done.stderr
