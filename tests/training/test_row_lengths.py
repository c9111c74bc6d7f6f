"""Rows that the data decides: measured, told, kept by the run that began with them."""

import json
import logging

import numpy as np
import pytest

from tests.config.composing import composed
from tests.training.runs import run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.prepare import length_to_hold, well_filled
from tpu_experiments.training.batches import load_run_tokenizer, prepare_sources, stages_with_data
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


def test_rows_hold_99_of_100_conversations_of_the_prepared_data(law, caplog):
    words, folder, rows = law
    config = composed(*words, f"output_dir={folder}")
    tokenizer = load_run_tokenizer(config)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    with caplog.at_level(logging.INFO):
        found = measure_rows(config).trainer
    p99 = int(np.percentile(lengths, 99, method="inverted_cdf"))
    assert found.seq_len == -(-p99 // 128) * 128
    assert found.seq_len * found.global_batch_rows == pytest.approx(8192, rel=0.5)
    assert f"99 % of the documents of data.messages have {p99:,} tokens or fewer" in caplog.text


@pytest.mark.parametrize(
    ("kind", "lengths", "row"),
    [
        ("text", [10] * 94 + [100] * 6, 100),
        ("text", [10] * 95 + [100] * 5, 10),
        ("chat", [10] * 98 + [20] * 2, 20),
        ("chat", [10] * 990 + [20] * 10, 10),
        ("chat", [100] * 995 + [400] * 4 + [9_000], 9_000),  # without it rows of 400 would leave 7.9 % of the tokens
        ("chat", [100] * 995 + [300] * 4 + [1_800], 300),  # 1.5 % of 102,500
        ("chat", [100] * 995 + [700] * 5, 700),
        ("chat", [], None),
    ],
)
def test_what_a_row_should_hold(kind, lengths, row):
    """95 % of texts; 99 % of conversations, and no more than 2 % of their tokens beyond."""
    lengths_D = np.array(lengths[::-1], np.int64)
    assert length_to_hold(lengths_D, kind=kind) == row
    if row and kind == "chat":
        assert np.maximum(lengths_D - row, 0).sum() <= 0.02 * lengths_D.sum()


@pytest.mark.parametrize(
    ("lengths", "at_least", "row"),
    [
        ([10] * 100, 10, 128),
        ([100] * 1000, 100, 512),  # five fill 98 % of it, one 78 % of 128
        ([70] * 1000, 70, 512),
        ([100] * 50 + [28] * 50, 100, 128),
        ([5_000, 100], 100, 128),
    ],
)
def test_rows_are_long_enough_to_be_filled(lengths, at_least, row):
    assert well_filled(np.array(lengths, np.int64), at_least=at_least) == row


@pytest.mark.parametrize("data", ["stories_ro", "sample_chat", "sample_text", "uk_law", "guanaco", "messages"])
def test_the_defaults_on_the_shipped_samples_give_no_finding(data, tmp_path):
    size = () if data.startswith(("stories", "sample")) else ("data_size=sample",)
    model = ("model=reader",) if data == "stories_ro" else ("model=tiny",)
    config = measure_rows(composed(*model, f"data={data}", *size, f"output_dir={tmp_path}"))
    sources = prepare_sources(config, tokenizer=load_run_tokenizer(config), stages=stages_with_data(config))
    manifests = [manifest for source in sources.values() for manifest in source.manifests.values()]
    assert [finding.message for finding in audit_findings(manifests)] == []
    train = manifests[0]["splits"]["train"]
    assert train.get("supervised_without_prompt", 0) == 0


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
    assert measure_rows(config, is_lookup=True).trainer.seq_len == 1024
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
