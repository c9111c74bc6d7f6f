"""task=evaluate: its numbers against transformers and PEFT on the same texts, on every runtime; what it refuses."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config.composing import composed
from tests.training.runs import finished, run, sized
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenize import LEARN
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.tasks import evaluate
from tpu_experiments.tasks.evaluate.base_and_trained import ModelAndBase
from tpu_experiments.tasks.evaluate.inputs import held_out_of
from tpu_experiments.tasks.evaluate.subject import Subject, subject_of
from tpu_experiments.training.batches import load_run_tokenizer

pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("root_logger", "plain_attention"),
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
EAGER = ("hw.runtime=eager", "hw.num_threads=1")
TRAINING = (*EAGER, "trainer.max_stage_steps=4", "sample.max_new_tokens=0", "optim.lr=0.02")
NAME = "tiny_sample_text_sample_chat_cpu"
SEQ_LEN = 128
NEW = 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The outputs of a run of four steps a stage."""
    outputs = tmp_path_factory.mktemp("trained")
    finished(*TRAINING, output_dir=outputs)
    return outputs


def evaluated(outputs: Path, *overrides: str, file: str = f"{NAME}/test_results.json") -> dict:
    """Run the task in this process; its results."""
    evaluate.run(composed("task=evaluate", *sized(TRAINING), f"output_dir={outputs}", *overrides))
    return json.loads((outputs / file).read_text())


@pytest.fixture(scope="module")
def results(trained, tmp_path_factory) -> dict:
    """Of the run on its test split, two answers included."""
    documents = trained / "documents.jsonl"
    more = ("task.generate=2", "task.max_new_tokens=4", "task.by=title")
    return evaluated(trained, *more, f"task.documents={documents}")


def values(results, source="all", side="trained"):
    return {name: told["value"] for name, told in results["sources"][source][side].items()}


def rolling_sums(model, ids, learn):
    """Nats, hits and tokens of one document, window by window, as transformers computes them."""
    done, nats, hits, text_nats = 1, 0.0, 0, 0.0
    while done < len(ids):
        end = min(len(ids), SEQ_LEN if done == 1 else done + SEQ_LEN - 1)
        start = max(0, end - SEQ_LEN)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids[None, start:end])).logits[0].double()
        for place in range(done, end):
            if learn[place]:
                at = logits[place - 1 - start]
                loss = float(torch.logsumexp(at, 0) - at[ids[place]])
                nats, hits = nats + loss, hits + int(at.argmax() == ids[place])
                text_nats += loss * (ids[place] > 5)  # below are <s>, </s>, <pad> and the turn's markers
        done = end
    return np.array([nats, hits, learn[1:].sum(), text_nats])


@pytest.mark.parametrize("side", ["base", "trained"])
def test_the_numbers_are_those_of_transformers_on_the_same_texts(trained, results, side):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = trained / NAME / "adapter"
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(named, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(folder)).eval() if side == "trained" else model.eval()
    config = composed("task=evaluate", *sized(TRAINING), f"output_dir={trained}")
    texts = [json.loads(line) for line in (trained / "documents.jsonl").read_text().splitlines()]
    for name, held_out in held_out_of(config, tokenizer=load_run_tokenizer(config)).items():
        documents = [(ids, (flags & LEARN) > 0) for ids, flags in held_out.documents()]
        nats, hits, tokens, text_nats = sum(rolling_sums(model, ids, learn) for ids, learn in documents)
        found = values(results, name, side)
        assert results["sources"][name]["num_documents"] == len(documents)
        assert results["sources"][name]["num_tokens"] == tokens
        assert found["loss"] == pytest.approx(nats / tokens, abs=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
        assert found["accuracy"] == pytest.approx(hits / tokens, abs=2 / tokens)
        if held_out.kind == "text":
            num_bytes = sum(len(t["text"].encode()) for t in texts if t["source"] == name)
            assert results["sources"][name]["num_bytes"] == num_bytes
            assert found["bits_per_byte"] == pytest.approx(text_nats / math.log(2) / num_bytes, abs=1e-5)


def test_the_difference_is_between_the_two_on_the_same_documents(results):
    for comparison in results["sources"].values():
        base, trained, difference = (comparison[side]["loss"] for side in ("base", "trained", "difference"))
        assert difference["value"] == pytest.approx(trained["value"] - base["value"])
        assert difference["low"] <= difference["value"] <= difference["high"]
        assert 0 <= comparison["share_better"] <= 1
    assert abs(results["sources"]["all"]["difference"]["loss"]["value"]) > 1e-3
    assert results["loss"] == results["sources"]["all"]["trained"]["loss"]["value"]


def test_the_same_is_said_of_every_value_of_a_field(results):
    assert (results["by"], list(results["values"])) == ("title", ["sample_text"]), "conversations have no titles"
    values, whole = results["values"]["sample_text"], results["sources"]["sample_text"]
    lines = Path("tpu_experiments/samples/wiki_ro.jsonl").read_text(encoding="utf-8").strip().split("\n")
    titles = [json.loads(line)["title"] for line in lines]
    assert set(values) < set(titles)
    for count in ("num_documents", "num_tokens", "num_bytes"):
        assert sum(comparison[count] for comparison in values.values()) == whole[count]
    for side in ("base", "trained"):
        nats = [told["num_tokens"] * told[side]["loss"]["value"] for told in values.values()]
        assert sum(nats) / whole["num_tokens"] == pytest.approx(whole[side]["loss"]["value"])


def test_answers_are_held_against_the_real_ones(results, trained):
    answers = results["answers"]["sample_chat"]
    assert answers["answers"] == 2
    assert all(0 <= told["value"] <= 1 for side in ("base", "trained") for told in answers[side].values())
    chats = [json.loads(line) for line in (trained / "documents.jsonl").read_text().splitlines()]
    assert all(c["prompt"].endswith("assistant\n") and c["reference"] for c in chats if c["source"] == "sample_chat")


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_answers_are_what_transformers_writes_however_many_are_written_at_once(runtime):
    from transformers import AutoModelForCausalLM

    config = composed("task=evaluate", *sized(TRAINING), f"hw.runtime={runtime}", "task.adapter=none")
    made = make_runtime(config)
    before = made.counters().num_compiles
    built = ModelAndBase(
        made,
        config,
        subject=Subject(config, "base", "", ""),
        tokenizer=load_run_tokenizer(config),
        shape=(2, 64),
        max_new_tokens=NEW,
        max_prompts=3,
    )
    assert built.num_written == 2
    prompts = [[*range(100, 117)], [300, 7], [*range(40, 90)]]
    theirs = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    for number in (3, 1):
        texts = built.write(prompts[:number])
        for prompt, text in zip(prompts[:number], texts, strict=True):
            ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
            assert text == built.tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert built.runtime.counters().num_compiles - before == (1 if runtime == "xla" else 0)


def test_xla_has_the_same_numbers_from_one_program(trained, results):
    before = make_runtime(composed("hw.runtime=xla")).counters().num_compiles  # of this process
    found = evaluated(trained, "hw.runtime=xla")
    assert values(found) == pytest.approx(values(results), rel=1e-5)
    assert found["num_compiles"] - before == 1


@pytest.mark.slow
def test_two_processes_have_the_same_numbers(trained, results):
    (trained / NAME / "test_results.json").unlink()
    done = run("task=evaluate", *TRAINING, "hw.parallel=spawn", "hw.num_devices=2", output_dir=trained)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((trained / NAME / "test_results.json").read_text())
    assert values(found) == pytest.approx(values(results), rel=1e-6)
    assert "test split, base model -> adapter" in done.stdout
    assert "sample_chat" in done.stdout


def test_a_run_that_is_not_finished_is_known_by_its_checkpoint(trained, results, tmp_path):
    folder = tmp_path / NAME
    shutil.copytree(trained / NAME, folder)
    shutil.copytree(trained / "prepared", tmp_path / "prepared")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "adapter")
    found = evaluated(tmp_path)
    assert found["evaluated"] == "checkpoint"
    assert values(found) == pytest.approx(values(results), rel=1e-6)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="not finished and has no checkpoint"):
        subject_of(composed("task=evaluate", *sized(TRAINING), f"output_dir={tmp_path}"))


def test_a_run_is_evaluated_by_its_own_config_and_not_by_the_command_s(trained, results):
    other = ("lora=all_linear_r8", "data=sample_chat", f"task.run={trained / NAME}", "task.max_documents=1")
    found = evaluated(trained, *other)
    assert set(found["sources"]) == {"sample_text", "sample_chat", "all"}
    assert found["sources"]["sample_text"]["num_documents"] == 1
    assert found["documents_in_split"] == results["documents_in_split"]
    assert found["sources"]["sample_text"]["base"]["loss"]["low"] is None


def test_other_data_can_be_selected(trained, results):
    selected = ("data=sample_chat", f"task.run={trained / NAME}", "task.data=selected")
    found = evaluated(trained, *selected, file=f"{NAME}/test_results-sample_chat.json")
    assert values(found, "sample_chat") == values(results, "sample_chat")


def test_an_adapter_needs_no_run_and_the_base_no_adapter(trained, results):
    file = f"evaluations/{NAME}/test_results.json"
    adapter = evaluated(trained, f"task.adapter={trained / NAME / 'adapter'}", file=file)
    assert values(adapter) == values(results)
    base = evaluated(trained, "task.adapter=none", file=file)
    assert values(base, side="base") == values(results, side="base")
    assert base["sources"]["all"]["trained"] is None
    assert base["loss"] == results["sources"]["all"]["base"]["loss"]["value"]


@pytest.mark.slow
def test_a_fully_trained_model_is_beside_the_weights_it_began_with(results, tmp_path):
    finished(*TRAINING, "lora=none", "optim.lr=1e-4", output_dir=tmp_path)
    found = evaluated(tmp_path, "lora=none", "optim.lr=1e-4")
    assert found["evaluated"] == "model"
    assert values(found, side="base") == pytest.approx(values(results, side="base"), rel=1e-5)
    assert abs(values(found)["loss"] - values(results, side="base")["loss"]) > 1e-3


REFUSED = {
    "no run": (["name=nothing"], "is no run folder; train first"),
    "another config": (["lora=all_linear_r8"], "was made with lora.r=16, now 8"),
    "no such adapter": (["task.adapter=/nowhere"], "no adapter_config.json or no adapter_model.safetensors there"),
    "no test split": (
        ["task.adapter=none", "data.sample_text.test_fraction=0", "data.sample_chat.test_fraction=0"],
        "no source holds a document back for it",
    ),
    "too long": (["task.seq_len=4096"], "task.seq_len=4096 is longer than model=tiny allows"),
    "no room": (["task.generate=1", "task.max_new_tokens=128"], "it leaves no room for the prompt"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_are_a_sentence(trained, reason):
    overrides, sentence = REFUSED[reason]
    before = sorted(trained.rglob("*results*.json"))
    with pytest.raises(ConfigError, match=sentence):
        evaluate.run(composed("task=evaluate", *sized(TRAINING), f"output_dir={trained}", *overrides))
    assert sorted(trained.rglob("*results*.json")) == before


def test_other_data_than_was_trained_on_is_refused(trained, tmp_path):
    folder = tmp_path / NAME
    shutil.copytree(trained / NAME, folder)
    result = json.loads((folder / "result.json").read_text())
    result["data_audit"] = {key: "0" * 16 for key in result["data_audit"]}
    (folder / "result.json").write_text(json.dumps(result))
    shutil.copytree(trained / "prepared", tmp_path / "prepared")
    with pytest.raises(ConfigError, match="it was trained on other data"):
        evaluated(tmp_path)


def test_an_adapter_of_another_model_is_refused(trained, tmp_path):
    shutil.copytree(trained / NAME / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    some = next(name for name in tensors if "layers.0." in name and name.endswith("lora_A.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != some}, file)
    with pytest.raises(ConfigError, match="does not belong to model=tiny: it lacks 1 of"):
        evaluated(trained, f"task.adapter={tmp_path / 'adapter'}")
    save_file({name.replace("layers.0.", "layers.90."): tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(ConfigError, match=r"it has tensors of model\.layers\.90\.\S+, which PEFT leaves out"):
        evaluated(trained, f"task.adapter={tmp_path / 'adapter'}")
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace("layers.0.", "layers.90."))
    with pytest.raises(ConfigError, match=r"'model\.layers\.90\..*', which matches no Linear of the model"):
        evaluated(trained, f"task.adapter={tmp_path / 'adapter'}")
