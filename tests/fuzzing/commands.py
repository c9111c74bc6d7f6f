"""Random command lines: every key of the composed config with values of every kind, and words that are no override."""

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, ListConfig, OmegaConf

from tests.fuzzing.server import REPOSITORY, Case
from tpu_experiments.config.messages import choices
from tpu_experiments.config.schema import GROUPS, Config, register

TOY = (
    "model=tiny",
    "debug=smoke",
    "model.size=full",
    "hw.runtime=eager",
    "data=sample_text",
    "trainer.max_stage_steps=1",
    "trainer.eval_every_steps=0",
    "sample.max_new_tokens=0",
    "trainer.max_eval_rows=2",
    "trainer.global_batch_rows=2",
    "logger=jsonl",
    "checkpoint.background=false",
    "output_dir={tmp}/out",
)
"""A run of one step, which every case begins with."""
TASKS: dict[str, tuple[float, tuple[str, ...]]] = {
    "train": (50, ()),
    "train both": (10, ("data=[sample_text,sample_chat]",)),
    "train random": (14, ("model.init=random",)),
    "prepare": (7, ("task=prepare",)),
    "generate": (6, ("task=generate", "task.prompt=Salut", "task.max_new_tokens=2", "task.run={tmp}/runs/done")),
    "evaluate": (6, ("task=evaluate", "task.run={tmp}/runs/done", "task.resamples=100", "task.max_documents=3")),
    "report": (4, ("task=report", "task.runs=[{tmp}/runs/done]")),
    "plan": (5, ("task=plan", "task.method=analytic", "hw=v5e8", "trainer.global_batch_rows=8")),
    "doctor": (2, ("task=doctor", "task.checks=[settings,versions,output_dir,model,data]", "task.timeout_seconds=1")),
    "sweep": (1, ("-m", "lora.r=4")),
    "resume_check": (0.4, ("task=resume_check", "checkpoint.every_steps=1", "trainer.max_stage_steps=4")),
}
"""Weight and words of each. The last two start processes of their own: seconds for each that goes far."""

NUMBERS = (
    *("0", "1", "-1", "2", "3", "5", "7", "8", "16", "127", "128", "-0", "00", "1_000", "0x10", "1e3", "0.5", "-0.5"),
    *(
        "1e-320",
        "1e308",
        "1e999",
        "-1e999",
        "nan",
        "inf",
        "-inf",
        ".5",
        "5.",
        str(2**31),
        str(2**31 - 1),
        str(-(2**31)),
    ),
    *(
        str(2**32),
        str(2**53 + 1),
        str(2**63 - 1),
        str(2**63),
        str(-(2**63)),
        str(2**64),
        "1" + "0" * 30,
        "1" + "0" * 400,
    ),
)
TEXTS = (
    *(
        "",
        '""',
        "''",
        "' '",
        "abc",
        "true",
        "false",
        "null",
        "None",
        "???",
        "none",
        "auto",
        ".",
        "..",
        "/",
        "//",
        "-",
        "*",
        "**",
    ),
    *(
        "'[a'",
        "'a]b'",
        "'!x'",
        "'a b'",
        "'a\tb'",
        "'a\nb'",
        "ăîșț",
        "日本",
        "🙂",
        "\u202e",
        "\udc80",
        "\udcff\udcfe",
        "x" * 300,
    ),
    *("x" * 5000, "'x=y'", "'a:b'", "a.b.c", "a/b/c", "../x", "~/x", "{tmp}/work", "{tmp}/keep/file.txt", "/proc/x"),
    *(
        "{tmp}/keep/file.txt/x",
        "foo://x",
        "file:///x",
        "'%s'",
        "'{}'",
        "'\\\\'",
        "os.system",
        "tpu_experiments",
        "builtins.print",
    ),
    *("tpu_experiments.", "tpu_experiments.config", "tpu_experiments..x", "tpu_experiments.config.errors.ConfigError"),
    *(
        "tpu_experiments.training.trainer.Trainer",
        "tpu_experiments.loggers.jsonl.NUM",
        "'1; import os'",
        "q_proj",
        "mistral",
    ),
)
NESTS = (
    *(
        "[]",
        "{}",
        "[[]]",
        "[null]",
        "[{}]",
        "{a:1}",
        "{a:{b:{c:1}}}",
        "[1,2]",
        "[a,b]",
        "['']",
        "['*']",
        "['**','?']",
        "['[']",
    ),
    *("{a:null}", "{a:[]}", "{0:1}", "{true:1}", "{'':1}", "[1,[2,[3,[4]]]]", "[nan]", "[-1]", "[1,a]", "['\udc80']"),
    *("[" * 60 + "]" * 60, "{a:" * 60 + "1" + "}" * 60, "[" + ",".join(["1"] * 2000) + "]", "['" + "x" * 3000 + "']"),
    *(
        "{sample_text:1}",
        "{text:{steps:1}}",
        "{'*':[fsdp]}",
        "{'*':[[fsdp,fsdp]]}",
        "{'*':fsdp}",
        "{'*':[1]}",
        "{'*':[null,{}]}",
    ),
)
INTERPOLATIONS = (
    *(
        "${oc.env:HOME}",
        "${oc.env:NOT_THERE}",
        "${seed}",
        "${nothing}",
        "${hw.name}",
        "${output_dir}",
        "${name}",
        "${.x}",
    ),
    *(
        "${",
        "$",
        "'${a'",
        "${${seed}}",
        "${oc.env:}",
        "${oc.decode:x}",
        "${oc.create:{a:1}}",
        "${hydra:runtime.cwd}",
        "${lora}",
    ),
    *(
        "${oc.select:lora.r}",
        "${oc.dict.keys:lora}",
        "${now:%Y}",
        "${x:y}",
        "${data}",
        "choice(1,2)",
        "range(3)",
        "int(x)",
    ),
    *(
        "int(3)",
        "str(1)",
        "float(nan)",
        "glob(*)",
        "sort(1)",
        "shuffle(a,b)",
        "interval(0,1)",
        "extend_list(1)",
        "json_str(x)",
    ),
)
ODD_WORDS = (
    *(
        "=",
        "==",
        "+",
        "~",
        "++",
        "+=1",
        "~=1",
        "=1",
        "a",
        "a=",
        "a==b",
        "+a",
        "~a=1",
        "[",
        "a[0]=1",
        "a.=1",
        ".a=1",
        "a..b=1",
    ),
    *(
        "seed",
        "seed=",
        "seed= 1",
        "seed =1",
        "seed==1",
        "SEED=1",
        "seed=1 ",
        " seed=1",
        "+seed=1",
        "++seed=1",
        "~seed",
        "seed.x=1",
    ),
    *(
        "logger=[[]]",
        "data=[[sample_text]]",
        "data={}",
        "data=sample_text,sample_chat",
        "data=[sample_text,sample_text]",
        "+data=[]",
    ),
    *(
        "data=null",
        "model=null",
        "~model",
        "~data",
        "~logger",
        "task=null",
        "~task",
        "~hw",
        "lora=[]",
        "lora={}",
        "lora=[none]",
    ),
    *(
        "experiment=null",
        "experiment=[mistral7b_ro]",
        "experiment=../data/wiki_ro",
        "model=../lora/none",
        "model@x=tiny",
    ),
    *(
        "model@lora=tiny",
        "+model@data.x=tiny",
        "/model=tiny",
        "model=/tiny",
        "model=tiny.yaml",
        "model=./tiny",
        "debug=smoke,null",
    ),
    *(
        "-x",
        "--x",
        "--",
        "---",
        "-c",
        "--cfg",
        "--cfg=x",
        "--cfg=job",
        "--info=x",
        "--info",
        "--resolve",
        "--package=lora",
    ),
    *(
        "--config-name=x",
        "--config-name=",
        "--config-path=/nowhere",
        "--config-dir=/nowhere",
        "--run",
        "--hydra-help",
        "--version",
    ),
    *("--shell-completion", "--experimental-rerun=x", "--config-dir={tmp}/keep", "--package=x --cfg=job", "-cd", "-cn"),
    *(
        "+plan=",
        "+plan=x",
        "+plan={tmp}/work",
        "+plan={tmp}/keep/file.txt",
        "plan=x",
        "++plan=[a]",
        "+plan={}",
        "+plan=gs:",
    ),
    *(
        "hydra.run.dir=",
        "hydra.job.chdir=true",
        "hydra.verbose=x",
        "hydra.verbose=true",
        "hydra/launcher=x",
        "hydra/launcher=basic",
    ),
    *(
        "hydra.searchpath=[x]",
        "hydra.searchpath=[file://{tmp}/keep]",
        "hydra.searchpath=x",
        "hydra.output_subdir=x",
        "hydra=null",
    ),
    *(
        "hydra.mode=MULTIRUN",
        "hydra.mode=x",
        "hydra.job.env_set={a:1}",
        "hydra/job_logging=default",
        "hydra.job.name=",
        "~hydra",
    ),
    *(
        "local=x",
        "+local=x",
        "local=null",
        "local=../lora/none",
        "\udc80",
        "\udc80=1",
        "seed=\udc80",
        "ă=1",
        "+ă=1",
        "x" * 4000,
        "x" * 4000 + "=1",
    ),
    *(
        "+hw.env.X=1",
        "+hw.env.=1",
        "+hw.env.'a b'=1",
        "+hw.env={'':1}",
        "+hw.env={'a=b':1}",
        "+hw.env.X=\udc80",
        "+hw.env.OMP_NUM_THREADS=x",
    ),
    *(
        "hw.rent.lr=1",
        "hw.chip.name=x",
        "hw.libtpu_flags.x=1",
        "sample.prompts.0=x",
        "lora.targets.0=x",
        "lora.targets.99=x",
        "lora.targets[0]=x",
    ),
    *(
        "model.arch.max_position_embeddings=abc",
        "+model.arch={}",
        "+model.arch.rope_scaling={a:1}",
        "+model.arch.layer_types=[x]",
    ),
    *(
        "+trainer.options.x=1",
        "+logger.jsonl.options.x=1",
        "logger.jsonl.options=x",
        "+logger.x._target_=y",
        "+data.x.path=y",
        "+data.x=1",
    ),
    *(
        "optim=[adamw,adafactor]",
        "optim=adafactor",
        "lora=none",
        "schedule=wsd",
        "curriculum=three_epochs",
        "curriculum=ro_two_stage",
    ),
    *(
        "sharding=fsdp_tensor",
        "sharding=replicated",
        "prepare.engine=ray",
        "plugins=[os]",
        "plugins=['']",
        "plugins=[..]",
        "hw=colab",
    ),
    *("hw.num_devices=0", "hw.parallel=spawn", "hw.parallel=spmd", "hw.device=cuda", "hw.num_hosts=2"),
)
ARCH_KEYS = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "sliding_window", "tie_word_embeddings"),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "hidden_act",
        "rope_scaling",
        "rope_parameters",
        "attention_dropout",
    ),
    *(
        "initializer_range",
        "use_cache",
        "torch_dtype",
        "dtype",
        "model_type",
        "layer_types",
        "attention_bias",
        "is_decoder",
    ),
    *(
        "architectures",
        "auto_map",
        "quantization_config",
        "partial_rotary_factor",
        "pretraining_tp",
        "return_dict",
        "id2label",
    ),
)
OTHER_TYPES = (
    "llama",
    "qwen2",
    "gemma3_text",
    "gpt2",
    "bert",
    "mamba",
    "mixtral",
    "phi",
    "t5",
    "gpt_oss",
    "falcon",
    "opt",
)


def command_case(number: int, *, seed: int, fixtures: Path) -> Case:
    """The case of this number; the same for the same seed."""
    draw = random.Random(f"{seed} command {number}")
    task = draw.choices(list(TASKS), [weight for weight, _ in TASKS.values()])[0]
    words = [_word(draw, task) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    given = tuple(dict.fromkeys((*TOY, *TASKS[task][1], *words)))

    def lay(place: Path) -> None:
        (place / "keep").mkdir()
        (place / "keep" / "file.txt").write_text("Nobody may write here.\n")
        shutil.copytree(fixtures / "prepared", place / "out" / "prepared")
        if "runs/done" in " ".join(given):
            shutil.copytree(fixtures / "runs" / "done", place / "runs" / "done")

    return Case(number, task, given, lay=lay, guarded=("keep",) if task == "evaluate" else ("keep", "runs"), said=words)


def given_case(number: int, words: Sequence[str], *, fixtures: Path, beside: Sequence[str]) -> Case:
    """A command line as it is given, with files in the folder that it is run in."""

    def lay(place: Path) -> None:
        if fixtures.exists():
            shutil.copytree(fixtures / "prepared", place / "out" / "prepared")
        for file in beside:
            shutil.copy(file, place / "work")

    return Case(number, "given", (*TOY, *words), lay=lay, said=list(words))


def _word(draw: random.Random, task: str) -> str:
    kinds: dict[Callable[[random.Random, str], str], int] = {
        _leaf: 60,
        _of_same_type: 22,
        _node: 6,
        _group: 5,
        _added: 5,
        _removed: 4,
        _element: 3,
        _arch: 14 if task in ("train random", "plan") else 2,
        _odd: 14,
    }
    return draw.choices(list(kinds), list(kinds.values()))[0](draw, task)


def hostile(draw: random.Random) -> str:
    """A value as it stands on a command line."""
    return draw.choice(draw.choices((NUMBERS, TEXTS, NESTS, INTERPOLATIONS), (4, 4, 3, 2))[0])


def _leaf(draw: random.Random, task: str) -> str:
    return f"{draw.choice(_keys(task))[0]}={hostile(draw)}"


def _of_same_type(draw: random.Random, task: str) -> str:
    """A value of the key's own type: most of these go far."""
    key, value = draw.choice(_keys(task))
    allowed = _allowed(key)
    if allowed:
        return f"{key}={draw.choice(allowed)}"
    if isinstance(value, bool):
        return f"{key}={draw.choice(('true', 'false'))}"
    if isinstance(value, int | float) or value is None:
        return f"{key}={draw.choice(NUMBERS)}"
    if isinstance(value, ListConfig | list):
        return f"{key}={draw.choice([n for n in NESTS if n.startswith('[')])}"
    if isinstance(value, DictConfig | dict):
        return f"{key}={draw.choice([n for n in NESTS if n.startswith('{')])}"
    return f"{key}={draw.choice(TEXTS)}"


def _node(draw: random.Random, task: str) -> str:
    key = draw.choice(_keys(task))[0]
    parents = [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)] or [key]
    return f"{draw.choice(('', '', '+', '++'))}{draw.choice(parents)}={hostile(draw)}"


def _group(draw: random.Random, task: str) -> str:
    group = draw.choice(list(GROUPS))
    value = draw.choice(choices(group)) if draw.random() < 0.5 else hostile(draw)
    return f"{draw.choice(('', '', '', '+', '~', '++'))}{group}={value}"


def _added(draw: random.Random, task: str) -> str:
    key = draw.choice(_keys(task))[0]
    new = draw.choice((f"{key}.x", f"{key.rpartition('.')[0]}.x".lstrip("."), "x", f"{key}.0", key))
    return f"{draw.choice(('+', '++'))}{new}={hostile(draw)}"


def _removed(draw: random.Random, task: str) -> str:
    key = draw.choice(_keys(task))[0]
    return draw.choice((f"~{key}", f"~{key.rpartition('.')[0] or key}", f"~{key}={hostile(draw)}", f"~{key}.x"))


def _element(draw: random.Random, task: str) -> str:
    key = draw.choice(_keys(task))[0]
    return f"{key}{draw.choice(('.0', '[0]', '.x', '.-1', '[]', '.', '..x', '[x'))}={hostile(draw)}"


def _arch(draw: random.Random, task: str) -> str:
    if draw.random() < 0.1:
        return f"model.arch.model_type={draw.choice(OTHER_TYPES)}"
    return f"++model.arch.{draw.choice(ARCH_KEYS)}={hostile(draw)}"


def _odd(draw: random.Random, task: str) -> str:
    return draw.choice(ODD_WORDS)


@cache
def _keys(task: str) -> tuple[tuple[str, Any], ...]:
    """Every key of the composed config with its value, and those of the schema under a source, stage or logger."""
    register()
    words = [w for w in (*TOY, *TASKS[task][1]) if "{tmp}" not in w and w != "-m"]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        composed = compose("config", overrides=["~local", *words])
    return tuple(_leaves(composed))


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in node:
        key = f"{prefix}{name}"
        value = None if OmegaConf.is_missing(node, name) else node[name]
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


@cache
def _allowed(key: str) -> tuple[str, ...]:
    """The choices of a key, by its last part, over the whole schema."""
    return _choices_of().get(key.rpartition(".")[2], ())


@cache
def _choices_of() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    kinds = [Config, *(kind for group in GROUPS.values() for kind in group.values())]
    while kinds:
        kind = kinds.pop()
        for spec in dataclasses.fields(kind):
            if spec.metadata.get("allowed"):
                found[spec.name] = tuple(spec.metadata["allowed"])
            made = spec.default_factory
            if isinstance(made, type) and dataclasses.is_dataclass(made):
                kinds.append(made)
    return found
