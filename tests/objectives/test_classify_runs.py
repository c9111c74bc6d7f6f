"""Whole runs of a classifier: resumed, scored, reloaded by transformers and PEFT; what it cannot do it says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.training.runs import finished, losses, run
from tpu_experiments.loggers.closing_lines import summary
from tpu_experiments.storage.run_folder import RunFolder

pytestmark = [
    pytest.mark.xla,
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LABELS = ["advanced", "basic", "expert", "intermediate"]
DATA = ("data.uk_law.kind=text", "data.uk_law.format=text", "+data.uk_law.fields.text=question")
WORDS = (
    *("model=modernbert_base", "objective=classify", "data=uk_law", *DATA, "data.uk_law.label_field=difficulty"),
    *("debug=smoke", "sharding=replicated", "curriculum=single", "schedule=constant", "optim.lr=1e-3"),
    *("trainer.max_stage_steps=4", "trainer.log_every_steps=1", "trainer.eval_every_steps=2"),
    *("checkpoint.every_steps=2", "name=labels"),
)
FULL = (*WORDS, "lora=none", "hw.runtime=eager")
ADAPTERS = (*WORDS, "hw.runtime=eager", "lora.r=4", "lora.targets=[all-linear]", "lora.dropout=0.1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(*FULL, output_dir=folder)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    return folder, finished(*ADAPTERS, output_dir=folder)


def test_measures_are_of_texts(whole):
    folder, result = whole
    assert 0 < result["eval_texts"] <= result["eval_tokens"]
    assert set(result["eval_measures"]) == {"accuracy", "macro_f1", "majority"}
    assert result["perplexity"] is None
    records = [json.loads(line) for line in (folder / "labels" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record}
    assert "eval/macro_f1" in names
    assert not [name for name in names if "perplexity" in name or "bits_per_byte" in name]


def test_the_labels_are_in_the_config_of_the_run_and_of_the_model(whole):
    folder, _ = whole
    place = folder / "labels"
    assert json.loads((place / "identity.json").read_text())["objective.labels"] == LABELS
    config = json.loads((place / "model" / "config.json").read_text())
    assert config["architectures"] == ["ModernBertForSequenceClassification"]
    assert config["id2label"] == {str(number): label for number, label in enumerate(LABELS)}


def loss_of(model, tokenizer, rows):
    """Mean loss of the rows' questions, each as a user calls the model."""
    nats = []
    for row in rows:
        logits = model(**tokenizer(row["question"], return_tensors="pt")).logits[0]
        nats.append(-torch.log_softmax(logits.float(), -1)[model.config.label2id[row["difficulty"]]])
    return torch.stack(nats).mean().item()


def rows_of_test(folder):
    """The rows of the test split, by task=evaluate's own list of its documents."""
    wanted = [json.loads(line)["text"].strip() for line in (folder / "tested.jsonl").read_text().splitlines()]
    lines = Path("tpu_experiments/samples/uk_law.jsonl").read_text().splitlines()
    rows = {row["question"]: row for row in map(json.loads, lines)}
    found = [row for text, row in rows.items() if any(text in own for own in wanted)]
    assert len(found) == len(wanted) > 0
    return found


def evaluated(folder, tmp_path):
    done = run(
        *("task=evaluate", f"task.run={folder / 'labels'}", "hw.runtime=eager"),
        f"task.documents={folder / 'tested.jsonl'}",
        output_dir=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "labels" / "test_results.json").read_text())


def test_the_test_split_is_scored_as_transformers_scores_it(whole, tmp_path):
    folder, _ = whole
    text, found = evaluated(folder, tmp_path)
    place = folder / "labels" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(place)
    rows = rows_of_test(folder)
    with torch.no_grad():
        expected = loss_of(model, tokenizer, rows)
    assert found["loss"] == pytest.approx(expected, abs=1e-4)
    own = found["labels"]["uk_law"]
    assert own["num_texts"] == len(rows)
    assert sum(own["labelled"].values()) == len(rows)
    assert own["trained"]["accuracy"]["value"] == found["accuracy"]
    assert found["majority"] == max(own["labelled"].values()) / len(rows)
    assert "perplexity" not in found["sources"]["uk_law"]["trained"]
    assert "majority: the accuracy of giving every text the most frequent label" in text
    assert "bits per byte" not in text


def test_peft_loads_adapter_and_head(adapted, tmp_path):
    from peft import PeftModel

    folder, result = adapted
    place = folder / "labels"
    settings = json.loads((place / "adapter" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["classifier", "head"])
    _, found = evaluated(folder, tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(result["base_path"])
    start = {name: tensor.clone() for name, tensor in base.named_parameters()}
    model = PeftModel.from_pretrained(base, place / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "adapter")
    with torch.no_grad():
        expected = loss_of(model, tokenizer, rows_of_test(folder))
    assert found["loss"] == pytest.approx(expected, abs=1e-4)
    assert found["evaluated"] == "adapter"
    saved = dict(model.named_parameters())
    head = "base_model.model.classifier.modules_to_save.default.weight"
    assert not torch.equal(saved[head], start["classifier.weight"])


def test_the_card_and_the_closing_lines_are_of_a_classifier(whole, adapted):
    folder, result = whole
    page = (folder / "labels" / "model" / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained(" in page
    assert "pipeline_tag: text-classification" in page
    assert "| macro f1 |" in page
    assert "per token" not in page
    assert "`advanced`, `basic`, `expert`, `intermediate`" in page
    lines = summary(result, folder=RunFolder(str(folder), "labels"), arguments=())
    assert "macro f1" in lines
    assert not [words for words in ("perplexity", "sample before", "task=generate", "task=export") if words in lines]
    page = (adapted[0] / "labels" / "adapter" / "README.md").read_text()
    assert "base = AutoModelForSequenceClassification.from_pretrained(" in page
    assert "id2label={0: 'advanced'" in page


@pytest.mark.slow
@pytest.mark.parametrize("words", [FULL, ADAPTERS], ids=["full", "adapters"])
def test_a_resumed_run_is_the_run_left_alone(whole, adapted, tmp_path, words):
    folder, result = whole if words is FULL else adapted
    assert run(*words, "trainer.max_stage_steps=2", output_dir=tmp_path).returncode == 0
    resumed = finished(*words, output_dir=tmp_path)
    assert (resumed["eval_loss_before"], resumed["eval_loss"]) == (result["eval_loss_before"], result["eval_loss"])
    assert losses(tmp_path) == losses(folder)


@pytest.mark.slow
def test_four_devices_learn_the_same_with_two_programs(whole, tmp_path):
    words = [word for word in FULL if word != "hw.runtime=eager"]
    result = finished(*words, "hw.parallel=spmd", "hw.num_devices=4", output_dir=tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole[0]), abs=1e-5)
    assert result["eval_loss"] == pytest.approx(whole[1]["eval_loss"], abs=1e-5)
    assert (result["num_compiles"], result["compiles_after_warmup"]) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["generate", "export", "serve"])
def test_tasks_for_decoders_say_so(whole, adapted, tmp_path, task):
    for folder, _ in (whole, adapted):
        done = run(f"task={task}", f"task.run={folder / 'labels'}", output_dir=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "was trained with objective=classify" in done.stderr
        assert "Traceback" not in done.stderr
