"""Rows that the data decides: measured, told, kept by the run that began with them."""

import json
import logging

import numpy as np
import pytest

from tests.config.composing import composed
from tests.training.runs import run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.training.batches import load_run_tokenizer
from tpu_experiments.training.row_lengths import measure_rows


@pytest.fixture
def law(tmp_path):
    """200 questions and answers of 5 to 400 words, and the config that trains Qwen's architecture on them."""
    lengths = np.linspace(5, 400, 200).astype(int)
    rows = [{"messages": [{"role": "user", "content": f"Question {n}"},
                          {"role": "assistant", "content": " ".join(["law"] * n)}]} for n in lengths]  # fmt: skip
    path = tmp_path / "law.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("model=qwen05b", "model.size=tiny", "data=messages", f"data.messages.path={path}")
    return words, tmp_path, rows


def test_rows_hold_95_of_100_documents_of_the_prepared_data(law, caplog):
    words, folder, rows = law
    config = composed(*words, f"output_dir={folder}")
    tokenizer = load_run_tokenizer(config)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    with caplog.at_level(logging.INFO):
        found = measure_rows(config).trainer
    p95 = int(np.percentile(lengths, 95))
    assert found.seq_len == -(-p95 // 128) * 128
    assert found.seq_len * found.global_batch_rows == pytest.approx(8192, rel=0.5)
    assert "95 % of the documents of data.messages have" in caplog.text


def test_a_plan_assumes_rows_until_the_data_is_prepared(law, caplog):
    words, folder, _ = law
    config = composed(*words, f"output_dir={folder}")
    assert measure_rows(config, is_lookup=True).trainer.seq_len == 1024  # what this architecture takes at most
    assert "assumed until the data is prepared" in caplog.text
    assert not (folder / "prepared").exists()
    measured = measure_rows(config)
    assert measure_rows(config, is_lookup=True) == measured


def test_a_plan_of_data_that_is_nowhere_says_so(tmp_path, caplog):
    config = composed("model=tiny", "data=messages", f"data.messages.path={tmp_path / 'no.jsonl'}")
    assert measure_rows(config, is_lookup=True).trainer.seq_len == 128
    assert "no.jsonl" in caplog.text
    with pytest.raises(ConfigError, match=r"no\.jsonl"):
        measure_rows(config)


def test_what_is_typed_needs_no_data(tmp_path):
    words = ("model=mistral7b", "data=ultrachat_ro", "trainer.seq_len=512", "trainer.global_batch_rows=8")
    assert measure_rows(composed(*words, f"output_dir={tmp_path}")).trainer.seq_len == 512


@pytest.mark.xla
@pytest.mark.slow
def test_a_run_resumes_with_the_rows_that_it_began_with(law):
    words, folder, _ = law
    command = (*words, "lora=all_linear_r8", "trainer.seq_len=auto", "trainer.global_batch_rows=null", "name=a")
    command += ("curriculum=single", "trainer.max_stage_steps=2", "sample.max_new_tokens=0")
    first = run(*command, output_dir=folder)
    assert first.returncode == 0, first.stderr
    identity = json.loads((folder / "a" / "identity.json").read_text())
    assert (identity["trainer.seq_len"], identity["trainer.global_batch_rows"]) == (512, 16)
    assert "was finished before" in run(*command, output_dir=folder).stdout
    refused = run(*command, "trainer.seq_len=256", output_dir=folder)
    assert refused.returncode == 2
    assert "trainer.seq_len=512, now 256" in refused.stderr
