"""What people type by mistake or from habit gets one sentence that says what to type instead."""

import re
import shlex
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tests.config.composing import composed_as_typed, names, of_file
from tpu_experiments.config.compose import earlier_name
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.messages import argument_problem, is_of_composition, known_keys, sentence, uncomposable
from tpu_experiments.config.words import CHOICES, KEYS, machine_named, machines_near, with_machines
from tpu_experiments.storage.run_folder import open_run, with_earlier_name

TYPED = {
    "mode1=qwen05b": "there is no key mode1. Did you mean 'model'?",
    "model=mistral": "Did you mean 'mistral7b'?",
    "model=Mistral-7B": "Did you mean 'mistral7b'?",
    "model=QWEN05B": "Did you mean 'qwen05b'?",
    "model=gemma": "Did you mean 'gemma3_",
    "model=mistralai/Mistral-7B-v0.1": "write model=mistral7b model.path=mistralai/Mistral-7B-v0.1",
    "model=mistralai/Mistral-7B-Instruct-v0.1": "it is conf/model/mistral7b.yaml; write model=mistral7b.",
    "model=./my_model": "model.path=./my_model",
    "model=/ckpt/llama3": "write model=llama3_8b model.path=/ckpt/llama3",
    "model=my.safetensors": "model.path=my.safetensors",
    "data=ultrachat": "Did you mean 'ultrachat_ro'?",
    "data=mydata.jsonl": "write data=messages data.messages.path=mydata.jsonl for conversations",
    "data=/data/chats": "data=messages data.messages.path=/data/chats",
    "data=HuggingFaceH4/ultrachat_200k": "data.messages.path=HuggingFaceH4/ultrachat_200k",
    "data.path=x.jsonl": "write data.stories_ro.path=VALUE",
    "data.messages.path=x.jsonl": "messages is not selected; choose it: data=messages",
    "dataset=x.jsonl": "Here it is data=messages data.messages.path=x.jsonl.",
    "lr=1e-4": "Here it is optim.lr=1e-4.",
    "learning_rate=1e-4": "Here it is optim.lr=1e-4.",
    "trainer.learning_rate=1e-4": "Here it is optim.lr=1e-4.",
    "rank=16": "Here it is lora.r=16.",
    "r=16": "Here it is lora.r=16.",
    "lora_r=16": "Here it is lora.r=16.",
    "lora.rank=16": "Here it is lora.r=16.",
    "lora_alpha=32": "Here it is lora.alpha=32.",
    "lora.target_modules=[q_proj]": "Here it is 'lora.targets=[q_proj]'.",
    "epochs=3": "Here it is data.NAME.epochs=3",
    "num_train_epochs=3": "Here it is data.NAME.epochs=3",
    "batch_size=8": "Here it is trainer.global_batch_rows",
    "per_device_train_batch_size=8": "Here it is trainer.micro_batch_rows=8",
    "gradient_accumulation_steps=4": "Here it is trainer.global_batch_rows",
    "max_seq_length=1024": "Here it is trainer.seq_len=1024.",
    "max_steps=100": "Here it is trainer.max_stage_steps=100.",
    "bf16=true": "Here it is model.dtype=bfloat16",
    "load_in_4bit=true": "model.base=nf4 on a GPU",
    "gradient_checkpointing=true": "Here it is model.remat=",
    "warmup_ratio=0.1": "Here it is schedule.warmup_ratio=0.1.",
    "min_lr=1e-5": "Here it is schedule.min_lr=1e-5.",
    "schedule=reduce_lr_on_plateau": "Here it is schedule=constant, with curriculum.stages.NAME.exit.patience=N",
    "output=out": "Here it is output_dir=out.",
    "report_to=wandb": "'logger=[console,jsonl,tensorboard,wandb]'",
    "resume=true": "the same command with the same name= resumes its run",
    "device=tpu": "hw=NAME",
    "--model qwen05b": "--model qwen05b; a setting has no dashes. Write model=qwen05b.",
    "--model=qwen05b": "Write model=qwen05b.",
    "--lr 1e-4": "Here it is optim.lr=1e-4.",
    "--num-train-epochs 3": "data.NAME.epochs=3",
    "task=training": "Here it is task=train.",
    "task=eval": "Here it is task=evaluate.",
    "task=infer": "Here it is task=generate.",
    "task=merge": "Here it is task=export.",
    "task=quantise": "Did you mean 'quantize'?",
    "hw=tpu": "TPUs of that kind are",
    "hw=cuda": "Here it is hw=gpu.",
    "hw=v6e": "TPUs of that kind are v6e1, v6e4, v6e8, v6e16, v6e256.",
    "hw=tpu-v5e": "TPUs of that kind are v5e1, v5e4, v5e8, v5e16, v5e256.",
    "hw=v5litepod-2": "TPUs of that kind are v5e1, v5e4, v5e8, v5e16, v5e256.",
    "lora=16": "Write lora.r=16",
    "lora=r8": "Write lora.r=8",
    "lora=true": "lora=true; it is the name of no choice. Names that exist: all_linear_r16",
    "lora=qlora": "model.base=nf4",
    "debug=true": "Here it is debug=smoke.",
    "curriculum=3": "curriculum=3; it is the name of no choice.",
    "lora.r = 8": "lora.r = 8; there is no space beside =; write lora.r=8.",
    "lora.r= 8": "write lora.r=8.",
    "lora.r =8": "write lora.r=8.",
    "lora.r=8,16": "write 'lora.r=[8,16]' for a list, 'lora.r=\"8,16\"' for a text, or add -m to run once per value.",
    "data=guanaco,uk_law": "write 'data=[guanaco,uk_law]' for a list",
    "data=guanaco uk_law": "write data=uk_law, several as 'data=[A,B]'",
    "data=[guanaco": "close its brackets",
    "qwen05b": "write model=qwen05b",
    "train": "write task=train",
    "lora.r=abc": "it must be a whole number.",
    "lora.r=-4": "it must be at least 0.",
    "lora.r=10%": "it must be a whole number.",
    "trainer.seq_len=1k": "it must be a whole number or auto.",
    "optim.lr=2e-5x": "it must be a number.",
    "seed=None": "it must be a whole number.",
    "seed=null": "null is not allowed here",
    "output_dir=~/runs": "write output_dir=$HOME/runs or the whole path.",
    "\u201clora.r=8\u201d": "it has the typographic quote \u201c",
    "name=\u201crun\u201d": "it has the typographic quote \u201c",
    "FOO=bar": "A variable of the environment stands before the command: FOO=bar python run.py",
    "optim=adamw_torch": "Here it is optim=adamw.",
    "experiment=mistral": "Did you mean 'mistral7b_ro'?",
}
"""Command lines, with a part of the sentence that each is answered by."""


def answer(line: str) -> str:
    """What run.py says to a command line, without its `error: `."""
    words = shlex.split(line)
    problem = argument_problem(words)
    if problem is not None:
        return problem
    try:
        composed_as_typed(*with_machines(words, names("hw")))
    except ConfigError as error:
        return str(error)
    except (HydraException, OmegaConfBaseException) as error:
        return sentence(error)
    except Exception as error:
        if not is_of_composition(error):
            raise
        return uncomposable(error, words)
    raise AssertionError(f"{line} was accepted")


@pytest.mark.parametrize("line", TYPED)
def test_a_mistake_is_answered_by_what_to_type(line: str) -> None:
    said = answer(line)
    assert TYPED[line] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "-m lora.r=8",
        "-m lora.r=8,16 data=guanaco",
        "--cfg job --resolve",
        "--multirun seed=1,2",
        "--config-dir my_conf model=mine",
        "--config-dir=my_conf",
        "-cd my_conf",
        "--info defaults-tree",
        "name= seed=1",
        "~local ++data.law.fields.text=body +plan=best.yaml",
        "'sample.prompt=a = b'",
        "name= -m",
    ],
)
def test_what_hydra_reads_passes(line: str) -> None:
    assert argument_problem(shlex.split(line)) is None


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_habit_is_none_of_ours_and_names_one(key: str) -> None:
    ours = {known.replace("<name>", "NAME") for known in known_keys()}
    assert key not in {known for known in ours if "." not in known}
    named = re.findall(r"([a-z_]+(?:\.[A-Za-z_]+)*)=", KEYS[key])
    assert named or "global_batch_rows" in KEYS[key]
    assert [
        each for each in named if each.replace("messages", "NAME") not in ours and not each.startswith("task.")
    ] == []


@pytest.mark.parametrize("group", CHOICES)
def test_a_choice_of_habit_names_a_choice(group: str) -> None:
    known = set(names(group))
    assert [word for word in CHOICES[group] if word in known] == []
    assert {re.split("[ ,]", meant)[0] for meant in CHOICES[group].values()} <= known


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("v5litepod-8", "v5e8"),
        ("v5litepod-16", "v5e16"),
        ("v5e-8", "v5e8"),
        ("V5E8", "v5e8"),
        ("v6e-8", "v6e8"),
        ("v6e_4", "v6e4"),
        ("tpu-v6e-1", "v6e1"),
        ("v5p-8", "v5p-8"),
        ("v5p8", "v5p-8"),
        ("tpu7x-8", "v7x-8"),
        ("v4-8", "v4-8"),
        ("ct5lp-hightpu-8t", "v5e8"),
        ("ct6e-standard-4t", "v6e4"),
        ("ct5p-hightpu-4t", "v5p-8"),
        ("tpu-v5-lite-podslice-8", "v5e8"),
        ("T4", "t4"),
        ("v5litepod-2", None),
        ("v5p-128", None),
        ("v9x-8", None),
        ("cuda", None),
    ],
)
def test_machines_by_their_makers_names(typed: str, meant: str | None) -> None:
    assert machine_named(typed, names("hw")) == meant


@pytest.mark.parametrize("name", names("hw"))
def test_a_machine_keeps_its_name(name: str) -> None:
    assert with_machines([f"hw={name}"], names("hw")) == [f"hw={name}"]


def test_every_accelerator_type_is_an_alias() -> None:
    for name in names("hw"):
        rent = of_file("hw", name).get("rent")
        assert not rent or machine_named(rent.accelerator_type, names("hw")) == name


def test_aliases_in_a_sweep() -> None:
    assert with_machines(["-m", "hw=v6e-8,v5litepod-4"], names("hw")) == ["-m", "hw=v6e8,v5e4"]
    assert machines_near("a100", names("hw")) == ""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/ckpt/my_llama", "my_llama"),
        ("./my_llama/", "my_llama"),
        ("outputs/first/model", "first-model"),
        ("/hub/models--a--b/snapshots/0a1b2c", "models--a--b-snapshots-0a1b2c"),
        ("owner/Llama-3.2-1B", "Llama-3.2-1B"),
        ("/runs/big/checkpoint-500", "big-checkpoint-500"),
        ("/data/of mine", "of-mine"),
        ("/", "qwen05b"),
        ("Qwen/Qwen2.5-0.5B", "qwen05b"),
    ],
)
def test_a_model_of_ones_own_names_its_run(path: str, name: str) -> None:
    words = ("model=qwen05b", f'model.path="{path}"', "data=guanaco")
    assert composed_as_typed(*words).name == f"{name}_guanaco_cpu"
    assert composed_as_typed(*words, "name=mine").name == "mine"
    assert composed_as_typed(*words, "model.init=random").name == "qwen05b_guanaco_cpu"


def test_a_run_that_began_under_the_name_of_its_preset_goes_on(tmp_path: Path) -> None:
    words = ("model=qwen05b", "model.path=/ckpt/mine", "data=guanaco", f"output_dir={tmp_path}")
    config = composed_as_typed(*words)
    assert with_earlier_name(config, earlier=earlier_name(config)).name == "mine_guanaco_cpu"
    before = composed_as_typed(*words, "name=qwen05b_guanaco_cpu")
    open_run(before).create(before)
    assert with_earlier_name(config, earlier=earlier_name(config)).name == "qwen05b_guanaco_cpu"
    other = composed_as_typed(*words, "model.path=/ckpt/other")
    assert with_earlier_name(other, earlier=earlier_name(other)).name == "other_guanaco_cpu"
    assert earlier_name(composed_as_typed(*words, "name=given")) is None
