"""Whole runs of a reward model: started from instruction tuning, scored as transformers and PEFT score it, resumed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.training.runs import finished, losses, run

pytestmark = [
    pytest.mark.xla,
    pytest.mark.slow,
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
COMMON = (
    *("trainer.seq_len=128", "curriculum=single", "schedule=constant", "trainer.global_batch_rows=8"),
    *("trainer.max_stage_steps=4", "trainer.log_every_steps=1", "trainer.eval_every_steps=2"),
    *("checkpoint.every_steps=2", "optim.lr=1e-3", "sample.max_new_tokens=0", "hw.runtime=eager", "model=reader"),
)
WORDS = (*COMMON, "objective=reward", "data=stories_pairs_ro", "name=scores")
FULL, ADAPTERS = (*WORDS, "lora=none"), (*WORDS, "lora.r=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(*FULL, output_dir=folder)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    return folder, finished(*ADAPTERS, output_dir=folder)


def evaluated(folder, tmp_path):
    done = run(
        *("task=evaluate", f"task.run={folder / 'scores'}", "hw.runtime=eager"),
        f"task.documents={folder / 'tested.jsonl'}",
        output_dir=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "scores" / "test_results.json").read_text())["sources"]["stories_pairs_ro"]["trained"]


def pairs_of(folder):
    """The rows of the test split."""
    documents = [json.loads(line)["text"] for line in (folder / "tested.jsonl").read_text().splitlines()]
    lines = Path("tpu_experiments/samples/stories/pairs.jsonl").read_text().splitlines()
    pairs = [row for row in map(json.loads, lines) if any(row["prompt"] in text for text in documents)]
    assert len(pairs) == len(documents) > 0
    return pairs


def test_pairs_and_the_tokens_of_their_answers_are_counted_apart(whole):
    folder, result = whole
    lengths = sum(result["eval_measures"][f"{side}_tokens"] for side in ("chosen", "rejected"))
    assert result["eval_tokens"] == pytest.approx(lengths * result["eval_pairs"])
    card = (folder / "scores" / "README.md").read_text()
    assert f"Over {result['eval_pairs']} pairs, whose answers have {result['eval_tokens']:,} tokens" in card


def scores_of(model, tokenizer, folder):
    """Mean score of chosen and of rejected answers of the test split."""
    return scores_of_pairs(model, tokenizer, pairs_of(folder)).mean(0).tolist()


def scores_of_pairs(model, tokenizer, pairs):
    """Scores (D, 2) of chosen and rejected answers, each as the card calls the model."""
    found = []
    for pair in pairs:
        for side in ("chosen", "rejected"):
            turns = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[side]}]
            inputs = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
            with torch.no_grad():
                found.append(model(**inputs).logits[0, 0])
    return torch.stack(found).view(-1, 2)


def test_the_model_is_read_by_transformers(whole, tmp_path):
    folder, result = whole
    place = folder / "scores" / "model"
    config = json.loads((place / "config.json").read_text())
    assert config["architectures"] == ["MistralForSequenceClassification"]
    assert (config["id2label"], config["problem_type"]) == ({"0": "LABEL_0"}, "regression")
    own = evaluated(folder, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    chosen, rejected = scores_of(model, AutoTokenizer.from_pretrained(place), folder)
    assert own["rewards/chosen"]["value"] == pytest.approx(chosen, abs=1e-4)
    assert own["rewards/rejected"]["value"] == pytest.approx(rejected, abs=1e-4)
    assert own["loss"]["value"] < result["eval_loss_before"] - 0.1


def test_the_adapter_is_read_by_peft(adapted, tmp_path):
    from peft import PeftModel

    folder, result = adapted
    place = folder / "scores" / "adapter"
    settings = json.loads((place / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    own = evaluated(folder, tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(
        result["base_path"], id2label={0: "LABEL_0"}, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, place).eval()
    chosen, rejected = scores_of(model, AutoTokenizer.from_pretrained(place), folder)
    assert own["rewards/chosen"]["value"] == pytest.approx(chosen, abs=1e-4)
    assert own["rewards/rejected"]["value"] == pytest.approx(rejected, abs=1e-4)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    own_scores = scores_of(merged, AutoTokenizer.from_pretrained(place), folder)
    assert own_scores == pytest.approx([chosen, rejected], abs=1e-4)
    page = (place / "README.md").read_text()
    assert "id2label={0: 'LABEL_0'}" in page
    assert "score = model(**inputs).logits[0, 0]" in page


@pytest.mark.parametrize("name", ["whole", "adapted"])
def test_its_exports_give_the_scores_of_the_run(request, tmp_path, name):
    folder, _ = request.getfixturevalue(name)
    done = run("task=export", f"task.run={folder / 'scores'}", f"task.folder={tmp_path / 'forms'}", output_dir=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    own, written = evaluated(folder, tmp_path), sorted(place.name for place in (tmp_path / "forms").iterdir())
    assert written == (["merged"] if name == "whole" else ["merged", "peft"])
    for form in written:
        (parity,) = json.loads((tmp_path / "forms" / form / "parity.json").read_text())
        assert (parity["verdict"], parity["documents"]) == ("ok", 8)
        assert parity["max_score_diff"] < 1e-5
        assert parity["kept"] == pytest.approx(1, abs=1e-4)
    place = tmp_path / "forms" / "merged"
    assert json.loads((place / "config.json").read_text())["architectures"] == ["MistralForSequenceClassification"]
    assert not (place / "generation_config.json").exists()
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    chosen, rejected = scores_of(model, AutoTokenizer.from_pretrained(place), folder)
    assert own["rewards/chosen"]["value"] == pytest.approx(chosen, abs=1e-4)
    assert own["rewards/rejected"]["value"] == pytest.approx(rejected, abs=1e-4)
    page = (place / "README.md").read_text()
    assert "pipeline_tag: text-classification" in page
    assert "score = model(**inputs).logits[0, 0]" in page
    refused = run("task=export", f"task.run={folder / 'scores'}", "task.forms=[gguf]", output_dir=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "whose model gives scores; leave it out: its forms are peft and merged." in refused.stderr


def test_the_loss_of_training_and_of_the_test_has_the_margins_of_the_rows(whole, tmp_path):
    """Of the whole split and of rows of several pairs; the accuracy has none of them."""
    lines = Path("tpu_experiments/samples/stories/pairs.jsonl").read_text().splitlines()
    margins = {row["prompt"]: len(row["prompt"]) % 5 - 1.0 for row in map(json.loads, lines)}
    rows = [row | {"margin": margins[row["prompt"]]} for row in map(json.loads, lines)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    own = [f"data.stories_pairs_ro.{key}={file}" for key in ("path", "sample_path")]
    result = finished(*FULL, *own, "objective.margin=true", output_dir=tmp_path / "runs")
    folder = tmp_path / "runs"
    found = evaluated(folder, tmp_path)
    assert result["eval_loss_before"] > whole[1]["eval_loss_before"] + 0.3
    assert losses(folder) != losses(whole[0])
    place, pairs = folder / "scores" / "model", pairs_of(folder)
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    chosen, rejected = scores_of_pairs(model, AutoTokenizer.from_pretrained(place), pairs).unbind(1)
    given = torch.tensor([margins[pair["prompt"]] for pair in pairs])
    wanted = -torch.nn.functional.logsigmoid(chosen - rejected - given).mean()
    assert found["loss"]["value"] == pytest.approx(float(wanted), abs=1e-4)
    assert found["rewards/accuracies"]["value"] == pytest.approx(float((chosen > rejected).float().mean()))
    # Pairs that are selected have margins where the command says so: these are the same without their column.
    words = ("task=evaluate", f"task.run={place.parent}", "task.data=selected", *WORDS[:-1], "lora=none")
    done = run(*words, output_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    (results,) = place.parent.glob("test_results-*.json")
    plain = json.loads(results.read_text())["sources"]["stories_pairs_ro"]["trained"]["loss"]["value"]
    assert plain == pytest.approx(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()), abs=1e-4)


@pytest.mark.parametrize("words", [FULL, ADAPTERS], ids=["full", "adapters"])
def test_a_resumed_run_is_the_run_left_alone(whole, adapted, tmp_path, words):
    folder, result = whole if words is FULL else adapted
    assert run(*words, "trainer.max_stage_steps=2", output_dir=tmp_path).returncode == 0
    resumed = finished(*words, output_dir=tmp_path)
    assert (resumed["eval_loss_before"], resumed["eval_loss"]) == (result["eval_loss_before"], result["eval_loss"])
    assert losses(tmp_path) == losses(folder)


def test_a_run_of_instruction_tuning_is_gone_on_with_under_a_new_head(adapted, tmp_path):
    words = (*COMMON, "data=stories_ro", "lora.r=4", "trainer.max_stage_steps=2", "name=answers")
    done = run(*words, output_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    start = f"start.run={tmp_path / 'answers'}"
    done = run(*ADAPTERS, start, "trainer.max_stage_steps=2", "optim.lr=1e-12", output_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after, alone = (
        load_file(str(place / "adapter" / "adapter_model.safetensors"))
        for place in (tmp_path / "answers", tmp_path / "scores", adapted[0] / "scores")
    )
    head = "base_model.model.score.weight"
    assert set(after) == {*before, head} == set(alone)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-9, rtol=0)
    assert after[head].std() > 0.01


def test_texts_are_not_scored_by_it(adapted, tmp_path):
    run_of = f"task.run={adapted[0] / 'scores'}"
    done = run("task=evaluate", run_of, "task.data=selected", "data=sample_text", output_dir=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "its model gives scores and no text; select pairs of answers." in done.stderr
    for task in ("generate", "quantize", "serve"):
        done = run(f"task={task}", run_of, output_dir=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "was trained with objective=reward" in done.stderr
