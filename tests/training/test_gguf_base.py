"""A run on a GGUF file learns what a run on the folder that it was made of learns, and goes on from that file alone."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.export.test_gguf import METADATA, SAMPLES, whole
from tests.training.runs import finished, losses, run
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.gguf import write_models
from tpu_experiments.storage.gguf.files import PINNED, sha256_of

pytestmark = pytest.mark.xla
SHORT = (
    "hw.runtime=eager",
    "trainer.max_stage_steps=2",
    "trainer.log_every_steps=1",
    "trainer.max_eval_rows=8",
    "sample.max_new_tokens=0",
)


@pytest.mark.slow
def test_a_run_on_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = load_tokenizer(str(SAMPLES / "tokenizer"), revision=None, chat_template_path=None)
    base = AutoModelForCausalLM.from_pretrained(SAMPLES / "tiny_base")
    write_models(str(tmp_path), model=whole(base), tokenizer=tokenizer, types=["bf16", "f16"], metadata=METADATA)
    file = tmp_path / "model-bf16.gguf"
    own = (f"model.path={file}", "model.tokenizer_path=null", "name=small", *SHORT)
    finished("name=small", *SHORT, output_dir=tmp_path / "folder")
    finished(*own, output_dir=tmp_path / "file")
    assert losses(tmp_path / "file") == losses(tmp_path / "folder")
    folder = tmp_path / "file" / "small"
    identity = json.loads((folder / "identity.json").read_text())
    assert (identity["model.path"], identity["model.revision"]) == (str(file), PINNED + sha256_of(file))
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert Path(adapter["base_model_name_or_path"], "config.json").exists()

    shutil.rmtree(tmp_path / "cache")  # made again by whoever needs it
    asked = ("task=generate", f"task.run={folder}", "task.prompt=Ana", "task.max_new_tokens=4")
    answered = run(*asked, output_dir=tmp_path)
    assert answered.returncode == 0, answered.stderr

    shutil.copy(tmp_path / "model-f16.gguf", file)
    refused = run(*own, output_dir=tmp_path / "file")
    assert refused.returncode == 2
    assert f"model.revision='{identity['model.revision']}', now '{PINNED}" in refused.stderr
    refused = run(*asked, output_dir=tmp_path)
    assert refused.returncode == 2
    assert "it is another file than the one that was trained on" in refused.stderr
