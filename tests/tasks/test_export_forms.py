"""task=export writes int8 and nf4 of a whole run, compares them, puts a card beside each, and lists an upload."""

import json

import pytest
from huggingface_hub import ModelCard

from tests import forks
from tests.training.runs import finished

pytestmark = [pytest.mark.xla, pytest.mark.slow]
FORMS = ("peft", "int8", "nf4")


@pytest.fixture(scope="module", params=["dense", "int8"])
def exported(request, tmp_path_factory):
    """A run's folder with the forms, and what the command printed."""
    folder = tmp_path_factory.mktemp("exported")
    base = f"model.base={request.param}"
    finished("debug=smoke", "hw.runtime=eager", "trainer.max_stage_steps=2", base, "name=made", output_dir=folder)
    words = [f"task.run={folder / 'made'}", f"task.forms=[{','.join(FORMS)}]", "task.push=me/ro"]
    small = ["task.parity.documents=2", "task.parity.tokens=64", "task.parity.max_new_tokens=4"]
    done = forks.run(["run.py", "task=export", *words, *small, f"output_dir={folder}"])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "made" / "export", done


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_compared_and_has_its_card(exported, form):
    folder, _ = exported
    facts = json.loads((folder / form / "export.json").read_text())
    (parity,) = facts["parity"]
    assert (parity["form"], parity["verdict"]) == (form, "ok")
    assert parity["max_log_prob_diff"] > 0 or form == "peft"
    text = (folder / form / "README.md").read_text()
    assert f"| {form} | ok | {parity['export_perplexity']:.4f} |" in text
    assert facts["files"]["tokenizer.json"]["sha256"] in text
    assert f'from_pretrained("{folder / form}"' in text.replace('(base, "', '("')
    assert ModelCard(text).data.tags[0] == "tpu_experiments"


def test_the_libraries_keep_quiet(exported):
    _, done = exported
    for noise in ("Loading weights", "Compressing", "kernels", "Warning", "it/s"):
        assert noise not in done.stdout + done.stderr


def test_the_upload_is_listed(exported):
    folder, done = exported
    assert "nothing was uploaded: task.push_dry_run=false creates me/ro on the Hub (private)" in done.stdout
    size = (folder / "int8" / "model.safetensors").stat().st_size
    assert f"{size:,}  int8/model.safetensors" in done.stdout
