"""Small copies of families in bfloat16, compiled for a TPU: what a CPU computes in float32 does not show that.

A kernel's arguments have one data type and one width there, which nothing asks of plain operations.
"""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.benchmarks.decoders import small_config
from tests.benchmarks.families import FAMILIES, words_of

FIRST = ("deepseek_v3", "olmo2")
"""Values that are narrower than queries and keys; a rotation in float32."""
WITHOUT_FORMULA = ("falcon_h1",)


@pytest.mark.parametrize(
    "model_type",
    [
        *FIRST,
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in (*FIRST, *WITHOUT_FORMULA)),
    ],
)
def test_a_step_of_a_small_copy_is_compiled(model_type: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small_config(model_type).save_pretrained(folder)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["max_position_embeddings"] = max(256, values.get("max_position_embeddings", 0))
    file.write_text(json.dumps(values))
    command = ["run.py", "~local", "task=plan", "task.programs=train", "task.method=compiled", "hw=v5e8"]
    command += ["model=tiny", "model.size=full", "model.dtype=bfloat16", *words_of(model_type, folder), "name=p"]
    command += ["model.tokenizer_path=tpu_experiments/samples/tokenizer", "data=sample_text", "trainer.seq_len=256"]
    done = forks.run([*command, "trainer.global_batch_rows=16", f"output_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr[-3000:]
    plan = json.loads((tmp_path / "plans" / "p" / "plan.json").read_text())
    assert (plan["method"], plan["fits"]) == ("compiled", True)
