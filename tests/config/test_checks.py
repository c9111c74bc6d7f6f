"""Every refused config is answered by sentences that name key=value, what is wrong and what to do."""

import re
import sys
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from tests.config.composing import composed, refusal
from tpu_experiments.config.checks import check
from tpu_experiments.config.compose import require_single_choices
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.messages import sentence
from tpu_experiments.config.schema import GROUPS

CASES = {
    "unknown key": (
        ["lora.rnak=8"],
        ["lora.rnak=8; there is no key lora.rnak. Did you mean 'r'?", "alpha, alpha_"],
    ),
    "unknown key, letters swapped": (["laro.r=8"], ["laro.r=8; there is no key laro. Did you mean 'lora'?"]),
    "unknown group": (["modelo=tiny"], ["modelo=tiny; there is no key modelo. Did you mean 'model'?"]),
    "key of another group": (["lora.clip_norm=1"], ["lora.clip_norm=1; ", "Did you mean optim.clip_norm?"]),
    "unknown key of a source": (["data.sample_text.pth=x"], ["data.sample_text.pth=x; ", "Did you mean 'path'?"]),
    "unknown key, added": (["++lora.rank=3"], ["lora.rank=3; there is no such key. Did you mean 'r'?"]),
    "unknown top-level key, added": (["+sede=1"], ["sede=1; there is no such key. Did you mean 'seed'?"]),
    "rank of no adapter": (
        ["lora.r=0"],
        ["lora.r=0 with lora.targets=[q_proj, ", "write lora=none, which has no targets"],
    ),
    "removed key": (["~lora.r"], ["~lora.r; a setting cannot be removed; give it another value"]),
    "removed group": (["~lora"], ["lora=???; no choice is made; write lora=NAME", "all_linear_r16"]),
    "nothing to remove": (["~loar"], ["~loar; there is nothing of that name", "Did you mean 'lora'?"]),
    "not a whole number": (["lora.r=abc"], ["lora.r=abc; it must be a whole number."]),
    "not a whole number, fraction": (["seed=1.5"], ["seed=1.5; it must be a whole number."]),
    "not a number": (["lora.alpha=x"], ["lora.alpha=x; it must be a number."]),
    "not a list": (["lora.targets=q_proj"], ["lora.targets=q_proj; it must be a list; write 'lora.targets=[q_proj]'."]),
    "null": (["lora.r=null"], ["lora.r=null; null is not allowed here; give a value"]),
    "not finite": (["optim.lr=nan"], ["optim.lr=nan; it must be a finite number."]),
    "unknown model": (["model=mistrl7b"], ["there is no conf/model/mistrl7b.yaml. Did you mean 'mistral7b'?"]),
    "unknown source": (["data=wiki"], ["there is no conf/data/wiki.yaml. Did you mean 'wiki_ro'?"]),
    "unknown source of two": (["data=[wiki_ro,ultrachat]"], ["data=ultrachat; ", "Did you mean 'ultrachat_ro'?"]),
    "unknown machine": (["hw=v6"], ["hw=v6; there is no conf/hw/v6.yaml. Did you mean 'v6e8'?"]),
    "unknown experiment": (["experiment=mistral_ro"], ["experiment=mistral_ro; ", "Did you mean 'mistral7b_ro'?"]),
    "unknown task": (["task=trainn"], ["task=trainn; there is no conf/task/trainn.yaml. Did you mean 'train'?"]),
    "unknown task name": (["task.name=trainn"], ["task.name=trainn; there is no such task. Did you mean 'train'?"]),
    "empty choice": (["model="], ["model=; it has no value.", "mistral7b"]),
    "open bracket": (["model=[tiny"], ["model=[tiny; the value cannot be read; close its brackets"]),
    "unquoted =": (["model.path=a=b"], ["model.path=a=b; the value cannot be read", "'model.path=\"VALUE\"'"]),
    "no value": (["lora"], ["'lora' is no key=value; write lora=VALUE"]),
    "several values": (["seed=1,2"], ["seed=1,2; a comma separates values", "add -m to run once per value"]),
    "source not selected": (
        ["data.wiki_ro.path=x"],
        ["data.wiki_ro.path=x; wiki_ro is not selected; choose it: data=wiki_ro, or add it: 'data=["],
    ),
    "unknown stage": (["curriculum.stages.txt.steps=3"], ["has no txt. Did you mean 'text'?", "conf/curriculum"]),
    "new stage": (["+curriculum.stages.warm.steps=3"], ["the command line cannot add one", "conf/curriculum"]),
    "unknown option": (["trainer.options.x=1"], ["trainer.options has no x.", "write '+trainer.options.x=1'"]),
    "pairs with an objective of texts": (
        ["data=orca_dpo_pairs", "curriculum=single"],
        [
            "data.orca_dpo_pairs.kind=preference with objective=next_token; it does not compare the two answers",
            "set objective=dpo",
        ],
    ),
    "no choice": (["hw.device=gpu"], ["hw.device=gpu; it is not a choice. Did you mean 'tpu'?"]),
    "out of range": (["lora.dropout=1"], ["lora.dropout=1.0; it must be below 1."]),
    "name with a slash": (["name=a/b"], ["name=a/b; it names a folder: use letters"]),
    "name that leaves the folder": (["name=.."], ["name=..; it names a folder"]),
    "no output folder": (["output_dir="], ["output_dir=; it is empty; name a folder"]),
    "batch over the mesh": (
        ["hw.parallel=spmd", "hw.num_devices=4", "trainer.global_batch_rows=10"],
        ["trainer.global_batch_rows=10 is not a multiple of hw.num_devices=4 (hw=cpu); use 8 or 12."],
    ),
    "micro-batch": (
        ["trainer.micro_batch_rows=3"],
        ["trainer.micro_batch_rows=3 does not divide the 16 rows", "use one of 1, 2, 4, 8, 16."],
    ),
    "row too long": (
        ["trainer.seq_len=2048"],
        ["trainer.seq_len=2048 is longer than model=tiny allows (max_position_embeddings=1024); use 1024 or less."],
    ),
    "row of a stage too long": (
        ["curriculum.stages.chat.seq_len=4096"],
        ["curriculum.stages.chat.seq_len=4096 is longer than model=tiny allows"],
    ),
    "DoRA without adapters": (["lora=none", "lora.dora=true"], ["lora.dora=true with lora=none; DoRA trains"]),
    "LoftQ over a dense base": (["lora.init=loftq"], ["lora.init=loftq with model.base=dense;", "model.base=nf4"]),
    "LoftQ over int8": (["lora.init=loftq", "model.base=int8"], ["lora.init=loftq with model.base=int8;"]),
    "adapters on ternary weights": (
        ["model.linear=bitnet"],
        ["model.linear=bitnet with lora.r=16; all weights are trained", "use lora=none."],
    ),
    "a ternary encoder": (
        ["model.linear=bitnet", "lora=none", "objective=mlm"],
        ["model.linear=bitnet with objective=mlm; transformers' BitNet is a decoder"],
    ),
    "warm-up of nothing": (
        ["model.linear_warmup_steps=9"],
        ["model.linear_warmup_steps=9 with model.linear=plain; nothing becomes ternary; set it to 0"],
    ),
    "rounded weights without adapters": (
        ["model.linear=lr_qat", "lora=none"],
        ["model.linear=lr_qat with lora=none; adapters decide how its weights are rounded; use lora=all_linear_r32."],
    ),
    "rounded weights in NF4": (
        ["model.linear=lr_qat", "model.base=nf4"],
        ["model.base=nf4 with model.linear=lr_qat; its weights are held in one byte each already; use model.base="],
    ),
    "lengths of rounded rows": (
        ["model.linear=lr_qat", "lora.dora=true"],
        ["lora.dora=true with model.linear=lr_qat; scales are trained", "use lora.dora=false."],
    ),
    "singular directions of rounded weights": (
        ["model.linear=lr_qat", "lora.init=pissa"],
        ["lora.init=pissa with model.linear=lr_qat; adapters begin as zero", "use lora.init=b_zero."],
    ),
    "dropout where nothing is multiplied": (
        ["model.linear=lr_qat", "lora.dropout=0.1"],
        ["lora.dropout=0.1 with model.linear=lr_qat; adapters have no input that could be dropped; use"],
    ),
    "a rounded encoder": (
        ["model.linear=lr_qat", "objective=mlm"],
        ["objective=mlm with model.linear=lr_qat; it is for decoders that predict the next token"],
    ),
    "warm-up of rounding": (
        ["model.linear=lr_qat", "model.linear_warmup_steps=9"],
        ["model.linear_warmup_steps=9 with model.linear=lr_qat; nothing becomes ternary; set it to 0"],
    ),
    "bits of nothing": (
        ["model.linear_bits=3"],
        ["model.linear_bits=3 with model.linear=plain; no weight is rounded to integers in training; leave it out"],
    ),
    "a rate of no scales": (
        ["optim.scale_lr_ratio=1"],
        ["optim.scale_lr_ratio=1.0 with model.linear=plain; no weight is rounded to integers in training"],
    ),
    "more bits than a byte has beside its sign": (
        ["model.linear=lr_qat", "model.linear_bits=8"],
        ["model.linear_bits=8; it must be at most 7."],
    ),
    "no adapter target": (["lora.targets=[]"], ["lora.targets=[] with lora.r=16; name the modules", "lora=none"]),
    "saved name": (["model.saved=[up_porj]"], ["model.saved has 'up_porj'", "Did you mean 'up_proj'?"]),
    "steps and epochs": (
        ["curriculum.stages.text.steps=60", "curriculum.stages.text.epochs=1"],
        ["curriculum.stages.text.steps=60 and curriculum.stages.text.epochs=1.0; only one can end the stage"],
    ),
    "rows of a word": (["trainer.seq_len=long"], ["trainer.seq_len=long; it must be a whole number or auto."]),
    "rows of a fraction": (["trainer.seq_len=1.5"], ["trainer.seq_len=1.5; it must be a whole number or auto."]),
    "rows of nothing": (["trainer.seq_len=null"], ["trainer.seq_len=null; it must be a whole number or auto."]),
    "steps and tokens": (
        ["curriculum.stages.text.steps=60", "curriculum.stages.text.tokens=5000"],
        ["curriculum.stages.text.steps=60 and curriculum.stages.text.tokens=5000; only one can end the stage"],
    ),
    "tokens, and tokens a parameter": (
        ["curriculum.stages.text.tokens=5000", "curriculum.stages.text.tokens_per_parameter=20"],
        ["curriculum.stages.text.tokens=5000 and curriculum.stages.text.tokens_per_parameter=20.0; only one can end"],
    ),
    "no tokens a parameter": (
        ["curriculum.stages.text.tokens_per_parameter=0"],
        ["curriculum.stages.text.tokens_per_parameter=0.0; it must be above 0."],
    ),
    "average of everything": (["optim.ema=1"], ["optim.ema=1.0; it must be below 1."]),
    "nothing to replay": (
        ["curriculum.stages.text.replay=0.1"],
        ["curriculum.stages.text.replay=0.1; no stage is before it whose data could be replayed"],
    ),
    "replay of what is there": (
        ["curriculum.stages.chat.replay=0.1", "curriculum.stages.chat.replay_sources=[sample_chat]"],
        ["curriculum.stages.chat.replay_sources has sample_chat, which is one of the stage's own sources"],
    ),
    "replay of what is not selected": (
        ["curriculum.stages.chat.replay=0.1", "curriculum.stages.chat.replay_sources=[wiki_ro]"],
        ["curriculum.stages.chat.replay_sources=[wiki_ro]; wiki_ro is not selected by data="],
    ),
    "replay of everything": (["curriculum.stages.chat.replay=1.0"], ["replay=1.0; it must be below 1"]),
    "exit test without evaluations": (
        ["curriculum.stages.chat.exit.patience=3", "trainer.eval_every_steps=0"],
        ["curriculum.stages.chat.exit.patience=3 uses evaluations, and trainer.eval_every_steps=0 makes none"],
    ),
    "rows that cannot be shorter": (
        ["curriculum.stages.text.shorter=5"],
        ["curriculum.stages.text.shorter=5 does not divide rows of 128 tokens", "use one of 1, 2, 4, 8, 16"],
    ),
    "stage without a source": (
        ["data=wiki_ro", "curriculum.stages.text.kind=chat"],
        ["curriculum=text_then_chat; no stage has a source among data=[wiki_ro]; select"],
    ),
    "stage of a source that is not selected": (
        ["curriculum.stages.text.sources=[sample_txt]"],
        ["curriculum.stages.text.sources=[sample_txt]; sample_txt is not selected", "Did you mean 'sample_text'?"],
    ),
    "no source": (["data=[]"], ["data=[]; no source is selected; name at least one"]),
    "no sample": (
        ["data_size=sample", "data.sample_text.sample_path=null"],
        ["data_size=sample; data.sample_text.sample_path is not set"],
    ),
    "xla on cuda": (["hw.device=cuda"], ["hw.runtime=xla with hw.device=cuda; ", "use hw.runtime=eager"]),
    "eager on a TPU": (["hw=v5e8", "hw.runtime=eager", "hw.parallel=spawn"], ["hw.device=tpu; plain torch cannot"]),
    "TorchTPU on a GPU": (
        ["hw=gpu", "hw.runtime=torchtpu"],
        ["hw.runtime=torchtpu with hw.device=cuda; its programs are for TPUs, and for a CPU to try them; "],
    ),
    "a table of another compiler": (
        ["task=plan", "hw=v6e8", "task.libtpu=.venv-torchtpu", "task.search.table=fast.yaml"],
        ["task.libtpu=.venv-torchtpu with task.search.table=fast.yaml; the table holds settings for"],
    ),
    "training by TorchTPU in processes": (
        ["hw=v6e8", "hw.runtime=torchtpu", "hw.parallel=spawn"],
        ["hw.runtime=torchtpu with hw.parallel=spawn; on a TPU one process drives all chips; use hw.parallel=spmd."],
    ),
    "eager and spmd": (["hw.runtime=eager", "hw.parallel=spmd"], ["plain torch has no SPMD; use hw.parallel=spawn"]),
    "inline on four": (["hw.num_devices=4"], ["hw.num_devices=4 with hw.parallel=inline; ", "use hw.parallel=spmd"]),
    "more vector memory than a chip has": (
        ["hw=v6e8", "hw.fusion_memory_mib=200"],
        ["hw.fusion_memory_mib=200; it must be"],
    ),
    "blocks of 200 tokens": (["hw.attention_block=200"], ["hw.attention_block=200; ", "use 128 or 256"]),
    "spawn on torch_xla's CPU": (
        ["hw.parallel=spawn", "hw.num_devices=4"],
        ["hw.num_devices=4 with hw.parallel=spawn on torch_xla's CPU device", "use hw.parallel=spmd"],
    ),
    "packing none on xla": (
        ["prepare.packing=none", "prepare.long_documents=drop"],
        [
            "prepare.packing=none with hw.runtime=xla; every batch length would be another program; use "
            "prepare.packing=best_fit or pad, or hw.runtime=eager."
        ],
    ),
    "split documents, one a row": (
        ["prepare.packing=pad"],
        ["prepare.long_documents=split with prepare.packing=pad; ", "use prepare.long_documents=truncate or drop."],
    ),
    "split documents, no packing": (
        ["prepare.packing=none", "hw.runtime=eager"],
        ["prepare.long_documents=split with prepare.packing=none; "],
    ),
    "no room for the prompt": (["sample.max_new_tokens=500"], ["sample.max_new_tokens=500; it leaves no room"]),
    "target outside": (["optim._target_=os.system"], ["optim._target_=os.system; it is outside tpu_experiments"]),
    "target without a module": (
        ["optim._target_=tpu_experiments.optim.adamx.AdamW"],
        ["there is no module tpu_experiments.optim.adamx"],
    ),
    "target without a class": (
        ["optim._target_=tpu_experiments.optim.adamw.Adam"],
        ["tpu_experiments.optim.adamw has no Adam. Did you mean 'AdamW'?"],
    ),
    "base schema": (["optim=base"], ["optim._target_=???; it has no value; set it"]),
    "a recipe without the run that it goes on from": (
        ["experiment=mistral7b_ro_dpo"],
        ["start.run=<run of mistral7b_ro>; ", "write start.run=outputs/mistral7b_ro"],
    ),
    "undefined interpolation": (["output_dir=${nowhere}"], ["output_dir; ", "nowhere"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_message_says_what_is_wrong_and_what_to_do(case: str) -> None:
    overrides, fragments = CASES[case]
    message = refusal(*overrides)
    assert len(message.splitlines()) == 1
    assert [fragment for fragment in fragments if fragment not in message] == [], message
    assert message.endswith((".", "?", "'"))
    assert not [word for word in ("struct", "full_key", "DictConfig", "Could not", "None") if word in message]


def test_every_problem_is_reported_together() -> None:
    message = refusal(
        "seed=-1",
        "name=a/b",
        "hw.num_devices=3",
        "trainer.seq_len=4096",
        "lora.targets=[]",
        "optim._target_=os.system",
    )
    keys = [line.split("=")[0] for line in message.splitlines()]
    assert sorted(keys) == [
        "hw.num_devices",
        "lora.targets",
        "name",
        "optim._target_",
        "seed",
        "trainer.seq_len",
    ]


def test_the_problems_of_all_stages_are_reported_once_each() -> None:
    message = refusal(
        "curriculum.stages.text.shorter=5",
        "curriculum.stages.chat.steps=2",
        "curriculum.stages.chat.epochs=2",
        "trainer.micro_batch_rows=3",
    )
    starts = [line.split("=")[0] for line in message.splitlines()]
    assert starts == ["curriculum.stages.text.shorter", "curriculum.stages.chat.steps", "trainer.micro_batch_rows"]


def test_an_unknown_mesh_axis_is_refused() -> None:
    config = composed()
    config.sharding.rules["*.norm.weight"] = ["model"]
    with pytest.raises(
        ConfigError,
        match=r"^sharding.rules\['\*.norm.weight'\]; there is no mesh axis 'model'; write data, fsdp, tensor or null.$",
    ):
        check(config)


def test_an_axis_splits_one_dimension() -> None:
    config = composed()
    config.sharding.rules["*.o_proj.weight"] = [["fsdp", "tensor"], "fsdp"]
    with pytest.raises(ConfigError, match=r"names fsdp 2 times; an axis splits one dimension of a tensor.$"):
        check(config)


def test_a_mesh_of_other_devices_is_refused_once() -> None:
    message = refusal("hw.parallel=spmd", "hw.num_devices=4", "sharding=hsdp", "sharding.mesh.data=3")
    assert message == (
        "sharding.mesh has data=3, fsdp=-1, tensor=1 and hw.num_devices=4; 3 does not divide 4; choose sizes whose "
        "product is 4, one of them -1 for what the others leave."
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("loar: {r: 8}", "loar in experiment/mine.yaml; there is no key loar. Did you mean 'lora'?"),
        ("lora: {rnk: 8}", "lora.rnk in experiment/mine.yaml; there is no key lora.rnk. Did you mean 'r'?"),
        ("lora: {r: eight}", "lora.r in experiment/mine.yaml; it must be a whole number."),
    ],
)
def test_a_mistake_in_a_yaml_file_is_refused_too(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nname: mine\n{line}\n")
    assert refusal(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine").startswith(message)


@pytest.fixture
def foreign_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package beside ours whose module must not run while a config is checked."""
    package = tmp_path / "foreign_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "trainers.py").write_text("from pathlib import Path\n\n\nclass Mine:\n    pass\n\n\nraise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "foreign_package"


@pytest.mark.parametrize("point", ["model", "optim", "trainer", "data.sample_text", "logger.console"])
def test_nothing_outside_the_allowed_prefixes_is_imported(point: str, foreign_package: str) -> None:
    message = refusal(f"{point}._target_={foreign_package}.trainers.Mine")
    assert message.startswith(f"{point}._target_={foreign_package}.trainers.Mine; it is outside tpu_experiments")
    assert foreign_package not in sys.modules


def test_a_prefix_is_a_package_and_not_the_beginning_of_a_name() -> None:
    assert "is outside" in refusal("trainer._target_=tpu_experiments_of_another.Trainer")


def test_a_plugin_is_looked_up_without_running_its_module(foreign_package: str) -> None:
    allowed = f"plugins=[{foreign_package}]"
    assert composed(allowed, f"trainer._target_={foreign_package}.trainers.Mine").plugins == [foreign_package]
    assert composed(allowed, f"trainer._target_={foreign_package}.trainers.Path")  # imported there
    assert "Did you mean 'Mine'?" in refusal(allowed, f"trainer._target_={foreign_package}.trainers.Mind")
    assert f"{foreign_package}.trainers" not in sys.modules


def test_a_group_of_one_choice_takes_no_list() -> None:
    groups = ("task", "hw", "curriculum", "lora", "objective", "optim", "schedule", "sharding", "trainer")
    with pytest.raises(ConfigError, match=r"^model takes exactly one choice; write model=NAME .*qwen05b"):
        require_single_choices(dict.fromkeys(groups, "x"))


def test_a_local_file_that_is_not_there_is_refused() -> None:
    require_single_choices({**dict.fromkeys(GROUPS, "x"), "local": "default"})
    with pytest.raises(ConfigError, match=r"^local=mine; there is no conf/local/mine.yaml"):
        require_single_choices({**dict.fromkeys(GROUPS, "x"), "local": "mine"})


def test_a_sweeper_that_is_not_installed_is_named_with_what_brings_it() -> None:
    missing = MissingConfigException("x", missing_cfg_file="hydra/sweeper/optuna", options=["basic"])
    assert sentence(missing) == (
        "hydra/sweeper=optuna; hydra-optuna-sweeper is not installed; pip install -e '.[optuna]' does that."
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["data.sample_chat.asked_as='{instruction} {input}'"],
            "data.sample_chat.format=alternating; it says how",
        ),
        (["data.sample_chat.asked_as='{instruction}'", "data.sample_chat.format=instruction"], "it has no {input}"),
        (["data.sample_chat.asked_alone_as=x", "data.sample_chat.format=instruction"], "it has no {instruction}"),
    ],
)
def test_how_an_instruction_is_asked(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        composed("data=sample_chat", "curriculum=single", *words)
