"""A whole run of masked diffusion: resumed, bounded, reloaded by transformers; what it cannot do it says."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.encoders import packed_rows
from tests.training.runs import finished, losses, run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.loggers.closing_lines import summary
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.tasks import generate

pytestmark = pytest.mark.xla
DIFFUSION = ("model=llama_mini", "model.attention=sdpa", "objective=masked_diffusion", "data=sample_text")
WORDS = (
    *(*DIFFUSION, 'objective.mask_token="<|im_end|>"', "debug=smoke", "lora=none", "sharding=replicated"),
    *("trainer.max_stage_steps=4", "trainer.log_every_steps=1", "trainer.eval_every_steps=2", "hw.runtime=eager"),
    *("curriculum=single", "schedule=constant", "checkpoint.every_steps=2", "name=diffusion", "optim.lr=3e-3"),
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


def test_a_bound_with_its_interval_is_shown_and_no_perplexity(whole):
    folder, result = whole
    measures = result["eval_measures"]
    assert set(measures) == {"perplexity_bound", "perplexity_bound_low", "perplexity_bound_high", "accuracy"}
    assert measures["perplexity_bound_low"] < measures["perplexity_bound"] < measures["perplexity_bound_high"]
    assert result["perplexity"] is None
    records = [json.loads(line) for line in (folder / "diffusion" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record}
    assert "eval/perplexity_bound" in names
    assert not {"eval/perplexity", "eval/masked_perplexity", "train/perplexity", "eval/bits_per_byte"} & names
    lines = summary(result, folder=RunFolder(str(folder), "diffusion"), arguments=())
    assert f"(perplexity <= {measures['perplexity_bound']:.2f}, 95 %: " in lines
    assert "perplexity bound" not in lines
    assert not [words for words in ("sample before", "task=export") if words in lines]


def test_transformers_loads_the_model_and_predicts_the_same(whole):
    folder = whole[0] / "diffusion" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    rows = packed_rows(rows=1)
    with torch.no_grad():
        ours = logits_of(model, dict(model.named_parameters()), rows, causal=False)[0, :21]
        theirs = model(input_ids=rows["ids"][:, :21].long(), attention_mask=torch.zeros(1, 1, 21, 21)).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    page = (folder / "README.md").read_text()
    assert "attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1])" in page
    assert "perplexity does not exceed" in page


@pytest.mark.usefixtures("root_logger")
def test_text_is_written_block_by_block(whole, make_config, tmp_path):
    (tmp_path / "prompts.txt").write_text("A fost odată\nÎn pădure trăia un urs.\n")

    def written(*overrides):
        output = tmp_path / "answers.jsonl"
        output.unlink(missing_ok=True)
        words = (f"task.run={whole[0] / 'diffusion'}", f"task.prompts_file={tmp_path / 'prompts.txt'}")
        small = ("task.buckets=[32]", "task.max_new_tokens=12", "task.denoising.block=8", "task.denoising.steps=4")
        generate.run(
            make_config("task=generate", *words, *small, f"task.output={output}", "hw.runtime=eager", *overrides)
        )
        return [json.loads(line) for line in output.read_text().splitlines()]

    found = written()
    assert [line["prompt"] for line in found] == ["A fost odată", "În pădure trăia un urs."]
    assert all(0 < line["num_tokens"] <= 12 for line in found)
    assert written("task.batch_rows=1") == found
    assert written("task.do_sample=true") != written("task.do_sample=true", "seed=1")
    with pytest.raises(ConfigError, match=r"denoising\.steps=9 with task\.denoising\.block=8; every step"):
        written("task.denoising.steps=9")


@pytest.mark.slow
def test_documents_of_the_test_split_have_a_bound(whole, tmp_path):
    done = run("task=evaluate", f"task.run={whole[0] / 'diffusion'}", "hw.runtime=eager", output_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "perplexity <=  bits per byte <=" in done.stdout
    assert "an upper bound of -log p" in done.stdout
    found = json.loads((whole[0] / "diffusion" / "test_results.json").read_text())
    (source,) = found["sources"].values()
    assert set(source["trained"]) == {"loss", "perplexity_bound", "bits_per_byte_bound", "accuracy"}
    assert source["trained"]["loss"]["value"] < source["base"]["loss"]["value"]
    assert "perplexity" not in found
    assert source["num_tokens"] == pytest.approx(source["num_documents"] * 291, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("task=export",),
        ("task=serve",),
        ("task=generate", "task.prompt=a", "task.repetition_penalty=1.2"),
        ("task=evaluate", "task.generate=2"),
    ],
    ids=lambda words: words[0],
)
def test_tasks_for_decoders_say_so(whole, tmp_path, words):
    done = run(*words, f"task.run={whole[0] / 'diffusion'}", output_dir=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "with objective=masked_diffusion" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_adapters_and_conversations_learn_the_end_of_answers(tmp_path):
    """A pretrained decoder, adapters, prompts as context, padding as the answer's end; in two programs."""
    words = ("model=tiny", "model.attention=sdpa", "objective=masked_diffusion", 'objective.mask_token="<pad>"')
    more = ("data=sample_chat", "curriculum=single", "prepare.packing=pad", "prepare.long_documents=truncate")
    few = ("trainer.max_stage_steps=3", "objective.end_padding=true", "trainer.seq_len=128", "name=answers")
    result = finished(*words, *more, *few, output_dir=tmp_path)
    assert (result["num_compiles"], result["compiles_after_warmup"]) == (2, 0)
    assert (tmp_path / "answers" / "adapter" / "adapter_model.safetensors").exists()
    assert result["eval_loss"] < result["eval_loss_before"]
