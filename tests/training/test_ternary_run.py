"""A run with ternary weights: two decays in one program, shares in the log, resumed, packed."""

import json
from pathlib import Path

import pytest

from tests import forks
from tests.training.runs import SAME_SUMS, finished, records

pytestmark = [pytest.mark.xla, pytest.mark.slow]
WORDS = (
    "experiment=bitnet_pretrain",
    "debug=smoke",
    "model.linear_warmup_steps=3",
    "trainer.norms_every_steps=2",
    "trainer.log_every_steps=2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ternary")
    result = finished(*WORDS, output_dir=place, as_typed=True)
    assert result["num_compiles"] == result["expected_programs"] == 3
    assert result["compiles_after_warmup"] == 0
    return place / str(result["name"])


def test_shares_of_every_layer_are_in_the_log(folder: Path) -> None:
    found = [record for record in records(folder.parent) if "ternary/zero_layer_01" in record]
    assert len(found) == 6  # of 12 steps, every second
    for record in found:
        shares = [record[f"ternary/{name}_layer_00"] for name in ("minus", "zero", "plus")]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0.2


def test_packed_weights_are_read_by_transformers(folder: Path) -> None:
    words = ["run.py", "task=export", f"task.run={folder}", "task.forms=[merged,bitnet]"]
    done = forks.run([*words, f"output_dir={folder.parent}"], env=SAME_SUMS)
    assert done.returncode == 0, done.stdout + done.stderr
    place = folder / "export"
    (merged,), (packed,) = (json.loads((place / form / "parity.json").read_text()) for form in ("merged", "bitnet"))
    assert merged["verdict"] == packed["verdict"] == "ok"
    assert packed["max_log_prob_diff"] < 1e-5
    size = {form: (place / form / "model.safetensors").stat().st_size for form in ("merged", "bitnet")}
    assert size["bitnet"] < size["merged"]


def test_it_is_evaluated_and_writes(folder: Path) -> None:
    words = (f"task.run={folder}", "hw.runtime=eager", f"output_dir={folder.parent}")
    for task in (["task=evaluate"], ["task=generate", "task.prompt=Salut", "task.max_new_tokens=4"]):
        done = forks.run(["run.py", *task, *words], env=SAME_SUMS)
        assert done.returncode == 0, done.stdout + done.stderr
    (source,) = json.loads((folder / "test_results.json").read_text())["sources"].values()
    assert 0 < source["trained"]["bits_per_byte"]["value"] < 10


def test_it_resumes_exactly(tmp_path: Path) -> None:
    done = forks.run(["run.py", *WORDS, "task=resume_check", f"output_dir={tmp_path}"], env=SAME_SUMS)
    assert done.returncode == 0, done.stdout + done.stderr
