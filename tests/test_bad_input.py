"""What only the data, the tokenizer, the model or the run folder can tell is refused before a run folder is made."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.saved import save_checkpoint
from tests.config.composing import composed
from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.tasks.setup import check_data, make_inputs
from tpu_experiments.tasks.train import run

pytestmark = pytest.mark.usefixtures("root_logger")
SAMPLES = Path(__file__).parents[1] / "tpu_experiments" / "samples"
LAID = "data=sample_text data.sample_text.path={tmp}/"
CHAT = "data=sample_chat data.sample_chat.format=messages data.sample_chat.path={tmp}/"
CASES = {
    "missing file": (LAID + "brokn.jsonl", ["there is no such file or folder. Did you mean broken.jsonl"]),
    "empty file": (LAID + "empty.jsonl", ["0 documents were read; point data.sample_text.path= at a file with"]),
    "broken line": (LAID + "broken.jsonl", ["line 2 of broken.jsonl is not JSON", "mend or remove the line"]),
    "unsupported file": (LAID + "rows.xlsx", ["the suffix '.xlsx' is not supported; convert the file to .jsonl"]),
    "no supervised token": (
        CHAT + "unanswered.json",
        ["no row is left to train on (1 documents were read, left out: 1 no_answer)"],
    ),
    "nothing to evaluate on": (
        "data=sample_chat data.sample_chat.eval_fraction=0",
        ["data.sample_chat.eval_fraction=0.0; of its 133 documents none is left to evaluate on", "eval_path=FILE"],
    ),
    "no chat template": (
        "model.tokenizer_path={tmp}/tokenizer",
        ["has no chat template; set model.chat_format=chatml"],
    ),
    "no tokenizer": ("model.tokenizer_path={tmp}/no_config", ["this folder holds no tokenizer"]),
    "no model folder": ("model.path={tmp}/nowhere", ["model.path={tmp}/nowhere; there is no such folder"]),
    "no config.json": ("model.path={tmp}/no_config", ["model.path={tmp}/no_config; no config.json there"]),
    "unknown target": (
        "lora.targets=[q_proj,kproj]",
        ["lora.targets has 'kproj', which matches no Linear of the model. Did you mean 'k_proj'?", "down_proj"],
    ),
    "tokenizer of another model": (
        "model.init=random model.arch.vocab_size=1000",
        ["data.sample_text has token id", "model=tiny has 1000 embeddings", "model.tokenizer_path"],
    ),
    "more devices than heads of keys": (
        "hw.parallel=spmd hw.num_devices=4 sharding=fsdp_tensor sharding.mesh.tensor=4",
        [
            "sharding.mesh.tensor=4; the model has 4 heads and 2 heads of keys and values",
            "use sharding.mesh.tensor=1 or",
        ],
    ),
    "a mesh that splits no weight": (
        "hw.parallel=spmd hw.num_devices=4 sharding.mesh={{data:4,fsdp:1}} sharding.max_replicated_elements=1000",
        ["sharding=fsdp leaves model.embed_tokens.weight with", "elements whole on every device"],
    ),
    "row longer than the checkpoint allows": (
        "model.path={tmp}/short ~model.arch.max_position_embeddings",
        ["trainer.seq_len=128 (stage text) is longer than model.path={tmp}/short allows (max_position_embeddings=64)"],
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bad inputs."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"text": "unu doi trei"}\n{"text": \n')
    (folder / "rows.xlsx").write_text("text\nunu\n")
    (folder / "unanswered.json").write_text('[{"messages": [{"role": "user", "content": "Salut"}]}]')
    shutil.copytree(SAMPLES / "tokenizer", folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    (folder / "no_config").mkdir()
    (folder / "no_weights").mkdir()
    config = (SAMPLES / "tiny_base" / "config.json").read_text()
    (folder / "no_weights" / "config.json").write_text(config)
    shutil.copytree(SAMPLES / "tiny_base", folder / "short")
    shorter = config.replace('"max_position_embeddings": 1024', '"max_position_embeddings": 64')
    assert shorter != config
    (folder / "short" / "config.json").write_text(shorter)
    return folder


@pytest.fixture
def refused(inputs: Path, tmp_path: Path) -> Callable[[str], str]:
    """Run the task in this process; the message, after a look that no run folder was made.

    What was prepared of the data stays: it is named by what it is, and the next start goes on with it.
    """

    def refused(overrides: str) -> str:
        config = composed(f"output_dir={tmp_path}/outputs", *overrides.format(tmp=inputs).split())
        with pytest.raises(ConfigError) as caught:
            run(config)
        assert {path.name for path in tmp_path.glob("*/*")} <= {"prepared"}
        return str(caught.value)

    return refused


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_sentence_before_there_is_a_run_folder(
    case: str, refused: Callable[[str], str], inputs: Path
) -> None:
    overrides, fragments = CASES[case]
    message = refused(overrides)
    assert len(message.splitlines()) == 1
    assert [f for f in fragments if f.format(tmp=inputs) not in message] == [], message


def test_a_checkpoint_without_weights_is_refused_before_there_is_a_run_folder(refused: Callable[[str], str]) -> None:
    assert "no model.safetensors" in refused("model.path={tmp}/no_weights")


def test_a_run_folder_of_another_config_lists_what_changed(tmp_path: Path) -> None:
    rows = ("trainer.seq_len=128", "trainer.global_batch_rows=16")
    first = composed("name=before", f"output_dir={tmp_path}", *rows, "lora.r=8", "optim.lr=0.0002")
    open_run(first).create(first)
    files = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        run(composed("name=before", f"output_dir={tmp_path}", "lora.r=4", "optim.lr=0.0003"))
    assert str(caught.value) == (
        f"name=before; {tmp_path}/before was made with lora.r=8, now 4; optim.lr=0.0002, now 0.0003; "
        "choose another name= or restore the values."
    )
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_folder_that_no_run_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    with pytest.raises(ConfigError, match=r"name=thesis; .*thesis exists and is not a run folder .*another name="):
        run(composed("name=thesis", f"output_dir={tmp_path}"))
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_other_data_than_the_checkpoint_was_trained_on_is_refused(tmp_path: Path) -> None:
    path = f"data.sample_text.path={tmp_path}/a.jsonl"
    overrides = ("name=grown", f"output_dir={tmp_path}", "data=sample_text", path)
    overrides += ("trainer.seq_len=128", "trainer.global_batch_rows=16")
    lines = (SAMPLES / "wiki_ro.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    config = composed(*overrides)
    folder = open_run(config)
    folder.create(config)
    inputs = make_inputs(config, resolve_stages(config))
    records = [StageRecord(inputs.stages[0].name, steps=7)]
    progress = Progress(stage_step=7, step=7, stages=records, data=inputs.audit_hashes).to_dict()
    save_checkpoint(folder.path("checkpoints"), step=7, groups={}, progress=progress, keep_last=1)
    check_data(folder, inputs, config=config)
    (tmp_path / "a.jsonl").write_text("".join(lines[1:]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"name=grown; its checkpoint of step 7 .* other data .*sample_text@128") as e:
        run(config)
    assert "choose another name=" in str(e.value)
