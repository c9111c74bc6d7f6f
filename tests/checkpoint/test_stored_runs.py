"""Run folders that an earlier version of this program wrote go on, to the bytes that it ended with.

tests/golden/runs holds two runs of eight steps as they were after four, an adapter and a whole model, and their
prepared data. They were written on 2026-11-24, before the packages io and logging became storage and loggers. A version
that cannot read them has to say so in a sentence, and gets runs of its own beside these.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests import forks

REPOSITORY = Path(__file__).parents[2]
RUNS = REPOSITORY / "tests" / "golden" / "runs"
COMMAND = [
    "model=tiny",
    "model.init=random",
    "model.arch.hidden_size=32",
    "model.arch.intermediate_size=64",
    "model.arch.num_hidden_layers=2",
    "model.arch.num_attention_heads=2",
    "model.arch.num_key_value_heads=1",
    "model.arch.head_dim=16",
    "data=sample_text",
    "curriculum=single",
    "hw.runtime=eager",
    "hw.num_threads=1",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=4",
    "trainer.max_stage_steps=8",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=5",
    "sample.max_new_tokens=0",
]
KINDS = {
    "adapter": (
        ("lora.r=2", "lora.targets=[q_proj,v_proj]"),
        "adapter/adapter_model.safetensors",
        "1a11c898c545fe02c719662f87884ec8e29470c7b186b97ca52230da78205802",
    ),
    "model": (
        ("lora=none",),
        "model/model.safetensors",
        "e647477fd592e716aff2a2ec743e37ea948e12b620ab1cb332901f88866a53d3",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_run_resumes_to_the_bytes_it_ended_with(kind: str, tmp_path: Path) -> None:
    words, exported, sha256 = KINDS[kind]
    shutil.copytree(RUNS / kind, tmp_path / kind)
    shutil.copytree(RUNS / "prepared", tmp_path / "prepared")
    command = ["run.py", *COMMAND, *words, f"name={kind}", f"output_dir={tmp_path}"]
    done = forks.run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed at step 4" in done.stdout + done.stderr
    result = json.loads((tmp_path / kind / "result.json").read_text())
    assert result["status"] == "finished"
    names = {place.name for place in (RUNS / "prepared").iterdir()}
    assert {place.name for place in (tmp_path / "prepared").iterdir()} == names, "the prepared data was not read"
    assert hashlib.sha256((tmp_path / kind / exported).read_bytes()).hexdigest() == sha256
