"""task=export: each form is what was trained, its proof is true, and nothing is written over."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config.composing import composed
from tests.training.runs import finished
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.weights import whole_model
from tpu_experiments.storage import paths
from tpu_experiments.tasks import export
from tpu_experiments.tasks.export.forms import WRITERS, write_merged
from tpu_experiments.tasks.export.parity import compare
from tpu_experiments.tasks.export.proof import Proof
from tpu_experiments.tasks.export.readers import TransformersModel
from tpu_experiments.tasks.export.subject import Subject, subject_of

pytest_plugins = ("tests.gcs",)
pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("root_logger", "plain_attention"),
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TRAINING = (
    "hw.runtime=eager",
    "hw.num_threads=1",
    "model.dtype=bfloat16",
    "trainer.max_stage_steps=6",
    "trainer.eval_every_steps=0",
    "sample.max_new_tokens=0",
    "optim.lr=0.02",
)
SHORT = ("task.parity.documents=2", "task.parity.tokens=64", "task.parity.prompts=1", "task.parity.max_new_tokens=8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run, in bfloat16."""
    outputs = tmp_path_factory.mktemp("trained")
    return outputs / finished(*TRAINING, output_dir=outputs)["name"]


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run, beside its prepared data."""
    shutil.copytree(trained.parent / "prepared", tmp_path / "prepared")
    shutil.copytree(trained, tmp_path / trained.name)
    return tmp_path / trained.name


def configured(run: Path, *words: str):
    return composed("task=export", f"task.run={run}", f"output_dir={run.parent}", "hw.num_threads=1", *SHORT, *words)


def exported(run: Path, *words: str):
    config = configured(run, *words)
    return export.exported(config, config.task)


def facts(run: Path, form: str):
    return json.loads((run / "export" / form / "export.json").read_text())


def test_both_forms_are_proven_and_complete(run):
    found = exported(run)
    (peft,), (merged,) = found.values()
    assert [p.verdict for p in (peft, merged)] == ["ok", "ok"]
    assert (peft.reader.split()[0], merged.reader.split()[0]) == ("PEFT", "transformers")
    assert peft.arithmetic == "float32"
    assert peft.max_log_prob_diff < 1e-5, "the same float32 tensors, put together by PEFT"
    assert merged.max_log_prob_diff > 1e-5, "rounded to bfloat16"
    assert abs(merged.perplexity_ratio - 1) < 2e-3
    assert peft.lines == merged.lines > 50
    assert peft.different_lines == merged.different_lines == 0
    assert 0 < facts(run, "merged")["merge"]["lost_by_rounding"] < 1
    for form in ("peft", "merged"):
        for name, file in facts(run, form)["files"].items():
            assert paths.size_of(str(run / "export" / form / name)) == file["bytes"]
        assert "# Parity with the trained model" in (run / "export" / form / "parity.md").read_text()


def test_in_float32_the_merge_is_the_adapter_to_1e5(run):
    ((merged,),) = exported(run, "task.forms=[merged]", "task.dtype=float32").values()
    assert merged.max_log_prob_diff < 1e-5
    assert merged.same_greedy == merged.greedy == 8


def test_complete_forms_are_left_alone_and_others_written_anew(run):
    exported(run)
    weights = run / "export" / "merged" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    exported(run)
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(weights.read_bytes()[:-1])
    exported(run, "task.forms=[merged]")
    assert weights.stat().st_size == facts(run, "merged")["files"]["model.safetensors"]["bytes"]
    exported(run, "task.forms=[merged]", "task.dtype=float32")
    assert facts(run, "merged")["dtype"] == "float32"


def test_an_export_that_was_killed_is_begun_again(run, monkeypatch):
    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Proof, "check", dies)
        with pytest.raises(KeyboardInterrupt):
            exported(run, "task.forms=[merged]")
    names = {path.name for path in (run / "export" / "merged").iterdir()}
    assert "model.safetensors" in names
    assert "export.json" not in names
    assert exported(run, "task.forms=[merged]")
    assert "export_begun.json" not in {path.name for path in (run / "export" / "merged").iterdir()}


def test_a_folder_of_somebody_else_is_not_touched(run):
    (run / "export" / "merged").mkdir(parents=True)
    (run / "export" / "merged" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"it holds thesis\.tex and no export\.json.*task\.folder="):
        exported(run)
    assert not (run / "export" / "peft").exists()
    assert (run / "export" / "merged" / "thesis.tex").read_text() == "mine"


def test_an_adapter_that_does_nothing_is_refused(run):
    file = run / "adapter" / "adapter_model.safetensors"
    save_file({name: t * 0 if "lora_B" in name else t for name, t in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="adapted weights are the base's bit for bit"):
        exported(run, "task.forms=[merged]")
    assert not (run / "export" / "merged" / "export.json").exists()


@pytest.fixture
def proof(run):
    config = configured(run)
    with Proof(subject_of(config, config.task), config) as proof:
        yield proof


def perturbed(folder: Path, *, change) -> None:
    file = folder / "model.safetensors"
    save_file({name: change(name, t) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})


DEFECTS = {
    "another scale": (lambda name, t: t * 1.05 if "q_proj" in name else t, "perplexity"),
    "a layer of the base": (lambda name, t: t * 0 if "layers.0.mlp.down" in name else t, "perplexity"),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_an_export_of_something_else_is_worse(run, proof, case):
    """What is read is what lies on the disk: tensors changed after writing are found."""
    exported(run, "task.forms=[merged]", "task.dtype=float32")
    change, word = DEFECTS[case]
    folder = run / "export" / "merged"
    perturbed(folder, change=change)
    trained = proof._trained()
    read = TransformersModel(str(folder), dtype=torch.float32)
    found = compare(trained, read, form="merged", arithmetic=torch.float32, is_exact=True, max_ratio=None)
    assert found.verdict == "worse"
    assert word in found.reason or "log-probabilities differ" in found.reason


def test_another_tokenizer_is_worse(run, proof):
    exported(run, "task.forms=[merged]")
    folder = run / "export" / "merged"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    read = TransformersModel(str(folder), dtype=torch.float32)
    found = compare(proof._trained(), read, form="merged", arithmetic=torch.float32, is_exact=False, max_ratio=None)
    assert found.verdict == "worse"
    assert "its tokenizer splits" in found.reason
    assert found.first_different_line


def scaled_down(folder: str, subject: Subject):
    """Write a merge of half the adapter."""
    with_half = replace(subject.origin.lora, alpha=subject.origin.lora.alpha / 2)
    halved = whole_model(subject.source, lora=with_half, trained=subject.origin.trained)
    return write_merged(folder, replace(subject, model=replace(halved, config=subject.model.config)))


def test_worse_ends_with_exit_code_1_and_is_not_uploaded(run, capsys, monkeypatch):
    monkeypatch.setitem(WRITERS, "merged", scaled_down)
    with pytest.raises(SystemExit) as ended:
        export.run(configured(run, "task.forms=[merged]"))
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "worse" in out
    assert "times what training changed" in out
    with pytest.raises(ConfigError, match=r"worse than the trained model.*nothing is uploaded"):
        export.run(configured(run, "task.forms=[merged]", "task.push=me/ro"))


def test_without_its_data_it_is_not_checked_and_says_why(run):
    shutil.move(run.parent / "prepared", run.parent / "elsewhere")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("test_fraction: 0.05", "test_fraction: 0.0"))
    ((merged,),) = exported(run, "task.forms=[merged]").values()
    assert merged.verdict == "not checked"
    assert "held-out text" in merged.reason
    shutil.rmtree(run.parent / "prepared", ignore_errors=True)
    shutil.move(run.parent / "elsewhere", run.parent / "prepared")
    (run / "config.yaml").write_text(text)
    ((merged,),) = exported(run, "task.forms=[merged]").values()
    assert merged.verdict == "ok", "what was not compared is compared by the next command"


def test_another_limit_is_another_comparison(run):
    limit = "task.parity.max_perplexity_ratio"
    for asked in (1.02, 1.01):
        ((merged,),) = exported(run, "task.forms=[merged]", f"{limit}={asked}").values()
        assert (merged.verdict, merged.max_perplexity_ratio) == ("ok", asked)


def test_a_verdict_of_the_earlier_comparison_is_not_kept(run):
    """It called lower perplexity worse."""
    exported(run, "task.forms=[merged]")
    place = run / "export" / "merged" / "export.json"
    stored = json.loads(place.read_text())
    (parity,) = stored["parity"]
    for name in ("rounding", "beyond_rounding", "kept", "kept_low", "kept_high"):
        del parity[name]
    parity["verdict"] = "worse"
    place.write_text(json.dumps(stored))
    ((merged,),) = exported(run, "task.forms=[merged]").values()
    assert merged.verdict == "ok"
    assert merged.kept == pytest.approx(1, abs=0.05)


def test_to_a_bucket(run, gcs_bucket):
    place = f"{gcs_bucket}/exports/mine"
    ((peft,), (merged,)) = exported(run, f"task.folder={place}").values()
    assert (peft.verdict, merged.verdict) == ("ok", "ok")
    assert {"export.json", "model.safetensors", "parity.md"} <= set(paths.list_names(f"{place}/merged"))
    assert "export_begun.json" not in paths.list_names(f"{place}/merged")


def test_an_adapter_without_its_run(run):
    config = composed(
        "task=export",
        f"task.adapter={run / 'adapter'}",
        "model=tiny",
        "data=[sample_text]",
        "task.forms=[merged]",
        f"output_dir={run.parent}",
        "name=alone",
        *SHORT,
    )
    ((merged,),) = export.exported(config, config.task).values()
    assert merged.verdict == "ok"
    assert (run.parent / "exports" / "alone" / "merged" / "export.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("task.forms=[gguff]",), "task.forms has 'gguff'; there is no such form. Did you mean 'gguf'?"),
        (("task.weights=base",), "an export is of what was trained"),
        (("task.push=mine",), "write owner/name"),
    ],
)
def test_wrong_settings_are_refused(trained, words, sentence):
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.").replace("?", r"\?")):
        configured(trained, *words)


@pytest.mark.slow
def test_a_fully_trained_model_has_no_adapter(tmp_path):
    """By default it is written whole; asked for, its adapter is refused."""
    folder = tmp_path / finished(*TRAINING, "lora=none", "optim.lr=0.002", output_dir=tmp_path)["name"]
    found = exported(folder)
    assert [(Path(place).name, parity.verdict) for place, (parity,) in found.items()] == [("merged", "ok")]
    with pytest.raises(ConfigError, match=r"has no adapter; leave it out of task\.forms"):
        exported(folder, "task.forms=[peft]")


def test_nothing_named_is_refused():
    config = composed("task=export")
    with pytest.raises(ConfigError, match=r"it needs task\.run=FOLDER of a run, or task\.adapter=FOLDER"):
        export.exported(config, config.task)


@pytest.mark.slow
def test_a_run_in_a_bucket_whose_base_was_drawn_at_random(tmp_path, gcs_bucket):
    """Its base lies beside it in the bucket, where PEFT cannot read."""
    random = ("model=qwen05b", "model.size=tiny")
    name = finished(*TRAINING, *random, output_dir=tmp_path)["name"]
    place = f"{gcs_bucket}/runs/{name}"
    for file in (tmp_path / name).rglob("*"):
        if file.is_file() and "tensorboard" not in file.parts:
            paths.copy_file(str(file), f"{place}/{file.relative_to(tmp_path / name)}")
    shutil.rmtree(tmp_path / name)
    words = (f"task.run={place}", f"output_dir={tmp_path}", "task.forms=[peft]", "hw.num_threads=1", *SHORT)
    config = composed("task=export", *words)
    ((peft,),) = export.exported(config, config.task).values()
    assert (peft.verdict, peft.reader.split()[0]) == ("ok", "PEFT")
    assert "export.json" in paths.list_names(f"{place}/export/peft")
