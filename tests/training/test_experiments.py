"""The tiny versions of the default and of every experiment run as wholes and compile what they said they would."""

import json
import os

import pytest

from tests.training.runs import REPOSITORY, finished, losses, records

pytestmark = pytest.mark.xla
REWARDED = ("reader_rl", "qwen05b_gsm8k", "gemma3_270m_format")
"""Recipes that learn from rewards: three programs more, of which one copies the weights and two write answers; that of
questions copies them already."""
IN_PLAIN_TORCH = ("smollm2_orders",)
"""Recipes that compile nothing."""
EXPERIMENTS = sorted(path.stem for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["default", *EXPERIMENTS],
)
def test_tiny_version_compiles_the_expected_programs(tmp_path, name):
    words = [] if name == "default" else [f"experiment={name}"]
    if name.endswith("_dpo") or name in REWARDED[1:]:  # the shipped pairs are few, and so are the problems
        words += ["curriculum.stages.main.epochs=30"]
    result = finished(*words, "debug=smoke", output_dir=tmp_path, as_typed=True)
    asks = result["skill"] is not None
    assert asks == (name in ("default", "reader_rl", "smollm2_orders"))
    more = name.endswith("_dpo") + (3 - asks) * (name in REWARDED)
    writes = not name.startswith("diffusion_") and not name.endswith(("_mlm", "_rtd", "_classify"))
    texts = 3 if asks else writes  # questions and samples with a cache: a copy of the weights, reading, writing
    expected = 0 if name in IN_PLAIN_TORCH else 2 + texts + more
    assert result["num_compiles"] == result["expected_programs"] == expected
    assert result["compiles_after_warmup"] == 0
    assert result["status"] == "finished"
    assert all(stage["steps"] == 6 for stage in result["stages"])
    require_golden(name, [*losses(tmp_path), result["eval_loss_before"], result["eval_loss"]])


def require_golden(name, found):
    """Logged training losses and the held-out ones before and after, as they were; UPDATE_GOLDEN=1 writes them anew."""
    file = REPOSITORY / "tests" / "golden" / "losses" / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text("".join(f"{loss!r}\n" for loss in found))
    assert found == pytest.approx([float(line) for line in file.read_text().split()], abs=1e-5)


@pytest.mark.slow
def test_the_padded_last_batch_of_an_epoch_compiles_nothing(tmp_path):
    """12 documents fill no whole number of batches; the last one is filled up with rows of zero weight."""
    overrides = (
        "experiment=qwen05b_uk_law",
        "debug=smoke",
        "trainer.max_stage_steps=null",
        "trainer.log_every_steps=1",
    )
    result = finished(*overrides, "data.uk_law.max_documents=12", "data.uk_law.eval_fraction=0.3", output_dir=tmp_path)
    (stage,) = result["stages"]
    assert stage["tokens"] < stage["steps"] * 8 * 64
    per_step = [r for r in records(tmp_path) if "train/loss" in r]
    assert len(per_step) == stage["steps"]
    assert result["num_compiles"] == result["expected_programs"] == 3
    assert result["compiles_after_warmup"] == 0


@pytest.mark.slow
def test_two_lengths_are_two_programs(tmp_path):
    overrides = ("model=mistral7b", "debug=smoke", "curriculum.stages.chat.seq_len=48", "sample.max_new_tokens=0")
    result = finished(*overrides, output_dir=tmp_path)
    assert result["num_compiles"] == result["expected_programs"] == 3
    assert result["compiles_after_warmup"] == 0


def test_main_job_leaves_a_whole_run_folder(tmp_path):
    overrides = (
        "trainer.max_stage_steps=4",
        "trainer.log_every_steps=2",
        "trainer.eval_every_steps=3",
        "sample.at=evaluations",
    )
    prompts = ("Scrie o poveste.", "Unde este București?")
    result = finished(*overrides, f"sample.prompts={list(prompts)}", output_dir=tmp_path)
    folder = tmp_path / result["name"]
    present = {path.name for path in folder.iterdir()}
    expected = {"config.yaml", "run.log", "metrics.jsonl", "tensorboard", "checkpoints", "adapter", "provenance.json"}
    assert expected | {"result.json", "identity.json"} <= present
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_model.safetensors",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "adapter_config.json",
        "README.md",
    }
    assert any(path.name.startswith("events.out") for path in (folder / "tensorboard").iterdir())
    assert "expecting 3 compiled programs" in (folder / "run.log").read_text()
    seconds = {"setup", "load", "trace", "compile", "train", "eval", "checkpoint"}
    assert seconds <= result["seconds"].keys()
    assert result["plan"]["reason"] == "hw=cpu has no chip to plan for"
    assert result["plan"]["step_seconds"]["measured"] > 0
    assert result["sample_before"]
    assert result["sample_after"]
    assert result["not_read"] == {"sample_text": {"id": 117, "title": 117, "url": 117}, "sample_chat": {"id": 133}}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [(r["step"], tag, text) for r in records for tag, text in r.items() if tag.startswith("sample")]
    during = [(step, "sample") for step in (3, 4, 6, 8)]  # every third step, and the end of each stage
    assert [(step, tag) for step, tag, _ in samples] == [(0, "sample"), *during, (8, "sample")]
    assert all(text.count("model: ") == 3 for *_, text in samples)
    assert all(f"prompt: {prompt}\n\nmodel: " in text for prompt in prompts for *_, text in samples)
    assert [stage["name"] for stage in result["stages"]] == ["text", "chat"]
    facts = json.loads((folder / "provenance.json").read_text())
    assert "seed" in json.dumps(facts)
