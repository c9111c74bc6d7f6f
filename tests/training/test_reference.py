"""The stored reference: where its values stand, what it is of, who shares it, and that a resume reads the same."""

import json
import math

import numpy as np
import pytest

from tests.training.runs import REPOSITORY, finished, losses, records, run
from tpu_experiments.data.rows import Rows
from tpu_experiments.training.reference import ReferencedRows

pytestmark = pytest.mark.xla
WORDS = (
    *("objective=dpo", "data=stories_pairs_ro", "trainer.seq_len=128", "curriculum=single", "schedule=constant"),
    *("trainer.global_batch_rows=8", "trainer.max_stage_steps=6", "trainer.log_every_steps=1"),
    *("trainer.eval_every_steps=3", "trainer.max_eval_rows=8", "checkpoint.every_steps=3", "checkpoint.keep_last=9"),
    *("optim.lr=1e-3", "sample.max_new_tokens=0", "lora.init=a_zero", "name=pairs"),
)


def test_values_stand_at_the_last_learnt_token_of_their_segment():
    learn = [[0, 1, 1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1, 1, 0]]
    segments = [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 3, 3, 0]]
    ids = np.zeros((2, 8), np.int32)
    rows = Rows(ids, np.array(learn, np.bool_), ids, np.array(segments, np.int32), {"label": ids})
    values = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    found = ReferencedRows(rows, values).take(np.array([1, 0]))
    assert found.more["reference"].tolist() == [[0, 0, 4, 0, 5, 0, 6, 0], [0, 0, 1, 0, 0, 2, 0, 0]]
    assert found.more["reference"].dtype == np.float32
    assert set(found.more) == {"label", "reference"}
    unknown = ReferencedRows(rows, None).take(slice(0, 1))
    assert not unknown.more["reference"].any()


def test_a_second_value_stands_before_the_first_learnt_token():
    learn, segments = [[0, 1, 1, 0, 0, 1, 0, 0]], [[1, 1, 1, 1, 2, 2, 2, 0]]
    ids = np.zeros((1, 8), np.int32)
    rows = Rows(ids, np.array(learn, np.bool_), ids, np.array(segments, np.int32), {})
    values = np.arange(1, 5, dtype=np.float32).reshape(1, 2, 2)
    assert ReferencedRows(rows, values).take(slice(0, 1)).more["reference"].tolist() == [[2, 0, 1, 0, 4, 3, 0, 0]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(*WORDS, output_dir=folder)


def references(folder):
    return {path.name: path.read_bytes() for path in (folder / "prepared" / "references").iterdir()}


@pytest.mark.slow
def test_a_run_begins_at_ln_2_and_compiles_nothing_more(whole):
    folder, result = whole
    assert losses(folder)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(folder)[-1] < 0.6
    assert result["compiles_after_warmup"] == 0
    assert len(references(folder)) == 2
    lengths = sum(result["eval_measures"][f"{side}_tokens"] for side in ("chosen", "rejected"))
    assert result["eval_tokens"] == pytest.approx(lengths * result["eval_pairs"])
    before, *_, after = (record for record in records(folder) if "eval/loss" in record)
    assert before["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["eval/rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert after["eval/rewards/margins"] > 0.1
    assert result["perplexity"] is None


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bytes(whole, tmp_path):
    folder, _ = whole
    stopped = (*WORDS, "trainer.max_stage_steps=3")
    finished(*stopped, output_dir=tmp_path)
    made = references(tmp_path)
    assert made == references(folder), "computed again to the bit"
    finished(*WORDS, output_dir=tmp_path)
    assert references(tmp_path) == made
    assert losses(tmp_path) == losses(folder)
    adapters = [(each / "pairs" / "adapter" / "adapter_model.safetensors").read_bytes() for each in (folder, tmp_path)]
    assert adapters[0] == adapters[1]


@pytest.mark.slow
def test_a_changed_reference_is_refused_by_a_resume_and_computed_again_by_a_new_run(tmp_path):
    finished(*WORDS, "trainer.max_stage_steps=3", output_dir=tmp_path)
    made = references(tmp_path)
    for path in (tmp_path / "prepared" / "references").iterdir():
        values = np.load(path)
        values[0, 0] += 1
        np.save(path, values)
    done = run(*WORDS, output_dir=tmp_path)
    assert done.returncode != 0
    assert "the reference that this run was trained against was changed" in done.stderr
    done = run(*WORDS, "name=other", output_dir=tmp_path)
    assert done.returncode == 0
    assert "the reference is computed again" in done.stderr
    assert references(tmp_path) == made
    done = run(*WORDS, "name=third", "optim.lr=5e-4", output_dir=tmp_path)
    assert "rows taken from" in done.stderr
    assert "computed" not in "".join(line for line in done.stderr.splitlines() if "reference:" in line)


@pytest.fixture(scope="module")
def second(whole):
    """A run that started from the first one, and the references before it."""
    folder, _ = whole
    before = references(folder)
    done = run(*WORDS, "name=second", f"start.run={folder / 'pairs'}", output_dir=folder)
    assert done.returncode == 0, done.stderr
    return folder, before


@pytest.mark.slow
def test_the_reference_of_a_warm_start_is_that_run_and_not_the_base(second):
    folder, before = second
    lines = [json.loads(line) for line in (folder / "second" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["train/loss"] for line in lines if "train/loss" in line) == pytest.approx(math.log(2), abs=1e-6)
    made = references(folder)
    assert len(made) == 4
    values = {name: np.load(folder / "prepared" / "references" / name) for name in made}
    (new,) = (values[name] for name in made if name not in before and "train" in name)
    (old,) = (values[name] for name in before if "train" in name)
    assert np.abs(new - old).max() > 1


@pytest.mark.slow
def test_test_pairs_are_compared_with_the_model_that_the_run_started_from(second):
    folder, _ = second
    found = {}
    for name in ("pairs", "second"):
        done = run(f"task.run={folder / name}", "task=evaluate", output_dir=folder)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads((folder / name / "test_results.json").read_text())["sources"]["stories_pairs_ro"]
        base, trained = (
            {key: each["value"] for key, each in found[name][side].items()} for side in ("base", "trained")
        )
        assert base["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert (base["rewards/accuracies"], base["rewards/margins"]) == (0.5, 0)
        assert trained["loss"] < 0.6
        assert trained["rewards/accuracies"] > 0.6
        assert found[name]["difference"]["rewards/accuracies"]["low"] > 0
    assert "the model that it started from -> adapter" in done.stdout
    of_first = found["pairs"]["trained"]["logps/chosen"]["value"]
    assert found["second"]["base"]["logps/chosen"]["value"] == pytest.approx(of_first, rel=1e-5)
    assert found["pairs"]["base"]["logps/chosen"]["value"] != pytest.approx(of_first, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("start", [("lora.init=pissa",), ("lora.init=loftq", "model.base=nf4")], ids=str)
def test_a_run_that_began_with_adapters_of_the_base_is_evaluated_against_them(tmp_path, start):
    """The reference of task=evaluate is that of training, also of a run that goes on from such a one."""
    text = (REPOSITORY / "tpu_experiments/samples/stories/pairs.jsonl").read_text()
    (tmp_path / "pairs.jsonl").write_text("\n".join(text.splitlines()[:80]))
    source = "data.stories_pairs_ro"
    unasked = (f"~{source}.questions.{name}" for name in ("one_person", "several_persons"))
    words = (*WORDS[:-2], *start, "lora.r=4", "hw.runtime=eager", f"{source}.path={tmp_path / 'pairs.jsonl'}", *unasked)
    words = (*words, "trainer.max_eval_rows=64")
    for name, more in {"first": (), "second": (f"start.run={tmp_path / 'first'}",)}.items():
        done = run(*words, *more, f"name={name}", output_dir=tmp_path)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / name / "result.json").read_text())
        done = run(
            *(f"task.run={tmp_path / name}", "task=evaluate", "task.split=evaluation", "hw.runtime=eager"),
            output_dir=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / name / "evaluation_results.json").read_text())["sources"]["stories_pairs_ro"]
        assert found["num_documents"] == result["eval_pairs"]
        for side, suffix in (("base", "_before"), ("trained", "")):
            own = result[f"eval_measures{suffix}"]
            assert {each: found[side][each]["value"] for each in own} == pytest.approx(own, abs=1e-4)


def of_single(tmp_path):
    """Words of a KTO run on two good answers and a bad one in turn."""
    text = (REPOSITORY / "tpu_experiments/samples/stories/pairs.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()[:400]]
    sides = ("chosen", "rejected", "chosen")
    single = [
        {
            "prompt": row["prompt"],
            "completion": row[sides[n % 3]],
            "label": sides[n % 3] == "chosen",
            "half": "ab"[n % 2],
        }
        for n, row in enumerate(rows)
    ]
    path = tmp_path / "single.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in single))
    source = "data.stories_pairs_ro"
    unasked = (f"~{source}.questions.{name}" for name in ("one_person", "several_persons"))
    return (*WORDS, "objective=kto", f"{source}.path={path}", f"{source}.format=auto", *unasked)


@pytest.mark.slow
def test_a_stopped_run_of_single_answers_goes_on_with_the_same_bytes(tmp_path):
    """KTO, whose reference has two values a segment; nothing is compiled after the warm-up. It is evaluated alike."""
    words = of_single(tmp_path)
    folders = tmp_path / "whole", tmp_path / "stopped"
    result = finished(*words, output_dir=folders[0])
    assert result["compiles_after_warmup"] == 0
    assert losses(folders[0])[0] == pytest.approx(0.5, abs=1e-6)
    assert losses(folders[0])[-1] < 0.49
    finished(*words, "trainer.max_stage_steps=3", output_dir=folders[1])
    finished(*words, output_dir=folders[1])
    assert references(folders[0]) == references(folders[1])
    assert {np.load(f).ndim for f in (folders[0] / "prepared" / "references").iterdir()} == {3}
    assert losses(folders[0]) == losses(folders[1])
    adapters = [(each / "pairs" / "adapter" / "adapter_model.safetensors").read_bytes() for each in folders]
    assert adapters[0] == adapters[1]
    done = run(f"task.run={folders[0] / 'pairs'}", "task=evaluate", "task.by=half", output_dir=folders[0])
    assert done.returncode == 0, done.stderr
    assert "reward of good" in done.stdout
    found = json.loads((folders[0] / "pairs" / "test_results.json").read_text())
    own = found["sources"]["stories_pairs_ro"]
    base, trained = ({name: each["value"] for name, each in own[side].items()} for side in ("base", "trained"))
    assert (base["loss"], base["rewards/auc"], base["kl"]) == (0.5, 0.5, 0)
    assert trained["loss"] < 0.49
    assert trained["rewards/auc"] > 0.6
    assert own["difference"]["rewards/auc"]["low"] > 0
    assert trained["rewards/margins"] > 0 <= trained["kl"]
    parts = found["values"]["stories_pairs_ro"].values()
    assert sum(part["num_documents"] for part in parts) == own["num_documents"]
    (record,) = [each for each in records(folders[0]) if "eval/loss" in each][-1:]
    assert result["ranked_by"] == "rewards/accuracies"
    assert result["eval_answers"] <= result["eval_tokens"]
    assert found["documents_are"] == "rows of answers"
    assert result["eval_measures"]["rewards/accuracies"] == record["eval/rewards/accuracies"]
