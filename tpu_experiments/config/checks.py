"""Checks of the whole config, before any device is used; all problems are reported together."""

import dataclasses
import json
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_origin

from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.data_schema import ASKED, OWN_KEYS
from tpu_experiments.config.defaults import LANES
from tpu_experiments.config.errors import ConfigError, failure_of, suggest
from tpu_experiments.config.fields import walk
from tpu_experiments.config.folders import PACKAGE
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.model_schema import (
    AXES,
    OF_ROUNDED,
    PATTERNS,
    SAVABLE,
    LoraConfig,
    has_patterns,
    pattern_problem,
)
from tpu_experiments.config.packs import why_alone
from tpu_experiments.config.places import Kind, place_problem
from tpu_experiments.config.rollout_schema import rollout_problems
from tpu_experiments.config.schema import Config, ScheduleFreeAdamWConfig
from tpu_experiments.config.start import start_problems
from tpu_experiments.config.targets import target_problems
from tpu_experiments.config.task_schema import (
    AnswerTaskConfig,
    GenerateTaskConfig,
    PlanTaskConfig,
    PrepareTaskConfig,
    ServeTaskConfig,
    certifying_problems,
    doctoring_problems,
    evaluating_problems,
    exporting_problems,
    generating_problems,
    planning_problems,
    serving_problems,
    tokenizer_problems,
)
from tpu_experiments.config.tracing import tracing_problems

CHIPS_OF_A_HOST, CHIPS_OF_A_V4_OR_V5P_HOST = 8, 4
"""Largest number of chips of one v5e or v6e host, and of one v4 or v5p host, whose slices are named by cores."""
OF_TASKS = (
    *(planning_problems, doctoring_problems, certifying_problems, evaluating_problems),
    *(exporting_problems, tokenizer_problems),
)
OF_A_RUN = ("evaluate", "generate", "serve", "export", "quantize")
"""Tasks that take a run's own objective beside the data of the command, which it was not trained on."""
NEED_ONE_HOST = ("resume_check", "evaluate", "generate", "serve", "export", "quantize", "tokenizer")


def hardware_problems(config: Config) -> list[str]:
    """Return incompatible settings of `hw`, by themselves and with the task."""
    hw = config.hw
    problems = _block(hw.attention_block)
    if hw.runtime == "xla" and hw.device == "cuda":
        problems.append("hw.runtime=xla with hw.device=cuda; torch_xla 2.9 has no CUDA device; use hw.runtime=eager.")
    if hw.runtime == "eager" and hw.device == "tpu":
        problems.append("hw.runtime=eager with hw.device=tpu; plain torch cannot use a TPU; use hw.runtime=xla.")
    if hw.runtime == "torchtpu" and hw.device == "cuda":
        problems.append(
            "hw.runtime=torchtpu with hw.device=cuda; its programs are for TPUs, and for a CPU to try them; use "
            "hw.runtime=eager."
        )
    is_run = hw.runtime == "torchtpu" and config.task.name != "plan"
    if is_run and hw.device == "tpu" and hw.parallel == "spawn" and hw.num_devices > 1:
        problems.append(
            "hw.runtime=torchtpu with hw.parallel=spawn; on a TPU one process drives all chips; use hw.parallel=spmd."
        )
    if hw.runtime == "eager" and hw.parallel == "spmd":
        problems.append("hw.parallel=spmd with hw.runtime=eager; plain torch has no SPMD; use hw.parallel=spawn.")
    if hw.parallel == "inline" and hw.num_devices != 1:
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.parallel=inline; inline uses one device; use hw.parallel=spmd, "
            "or hw.num_devices=1."
        )
    if hw.parallel == "spawn" and hw.runtime == "xla" and hw.device == "cpu" and hw.num_devices != 1:
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.parallel=spawn on torch_xla's CPU device; it has no collectives "
            "between processes; use hw.parallel=spmd, or hw.runtime=eager, which uses gloo."
        )
    if "://" in hw.compile_cache:
        problems.append(
            f"hw.compile_cache={hw.compile_cache}; programs are read and written on this machine alone; name a "
            "local folder, or use hw.compile_cache=none."
        )
    return problems + _hosts(config)


def _hosts(config: Config) -> list[str]:
    """Return what several hosts cannot run."""
    hw, problems = config.hw, []
    has_two_cores = hw.chip is not None and hw.chip.name in ("v4", "v5p")
    most = CHIPS_OF_A_V4_OR_V5P_HOST if has_two_cores else CHIPS_OF_A_HOST
    if hw.device == "tpu" and hw.num_devices > most * hw.num_hosts:
        kind = "v4 or v5p has 4 chips (two cores each, which are one device)" if has_two_cores else None
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.num_hosts={hw.num_hosts}; a host of "
            f"{kind or f'v5e or v6e has at most {CHIPS_OF_A_HOST} chips'}; write how many hosts there are, or use "
            f"{f'hw={hw.name} as it is' if has_two_cores else 'hw=v5e16 or hw=v6e16'}."
        )
    if hw.num_hosts <= 1:
        return problems
    if hw.num_devices % hw.num_hosts:
        problems.append(
            f"hw.num_hosts={hw.num_hosts} with hw.num_devices={hw.num_devices}; every host has as many devices; choose "
            "a multiple."
        )
    if hw.runtime == "eager" or hw.parallel != "spmd":
        problems.append(
            f"hw.num_hosts={hw.num_hosts} with hw.runtime={hw.runtime} hw.parallel={hw.parallel}; several hosts are "
            "one process each; use hw.runtime=xla or torchtpu with hw.parallel=spmd."
        )
    if config.task.name in NEED_ONE_HOST:
        problems.append(
            f"hw.num_hosts={hw.num_hosts} with task={config.task.name}; it runs on one host; use hw=v5e8 or hw=v6e8."
        )
    return problems


def _block(tokens: int) -> list[str]:
    below = tokens // 128 * 128
    if tokens == below:
        return []
    return [
        f"hw.attention_block={tokens}; the kernel's blocks are multiples of 128 tokens; use {below} or {below + 128}."
    ]


KINDS = {str: "a text", int: "a whole number", float: "a number"}
UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
"""NUL, and lone surrogates, which come from command lines that are not UTF-8."""

SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
MAX_NAME_LENGTH = 200  # a file name may have 255 bytes, and files named after the run add up to 30


def check(config: Config) -> None:
    """Check the whole config and raise one ConfigError that lists every problem found.

    Raises:
        ConfigError: at least one value is out of range or incompatible with another.
    """
    misplaced = list(_kind_problems(config))
    if misplaced:
        raise ConfigError("\n".join(misplaced))  # the rules below assume correct types
    problems = [problem for key, spec, _, value in walk(config) for problem in field_problems(spec, key, value)]
    if not problems:
        problems = _stages(config)  # divides by the values, so they must be in range
    for rule in RULES:
        problems += rule(config)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _kind_problems(config: Config) -> Iterator[str]:
    """Yield list and mapping items of another type than the schema's; OmegaConf lets some pass."""
    for key, _, hint, value in walk(config):
        if get_origin(hint) in (list, dict) and value is not None:
            kind = get_args(hint)[-1]
            items = value.values() if isinstance(value, dict) else value
            is_whole = isinstance(value, get_origin(hint))
            wrong = [item for item in items if not _is_of(item, kind)] if is_whole else [value]
            if wrong:
                yield f"{key}={value}; {wrong[0]!r} stands where {KINDS.get(kind, 'another kind of value')} belongs."


def _is_of(item: Any, kind: Any) -> bool:
    plain = get_origin(kind) or kind
    if plain is float:
        return isinstance(item, int | float) and not isinstance(item, bool)
    return plain is Any or (isinstance(item, plain) and not (plain is int and isinstance(item, bool)))


def field_problems(spec: "dataclasses.Field[Any]", key: str, value: Any) -> Iterator[str]:
    """Yield problems of one value outside its field's range and choices."""
    allowed = spec.metadata.get("allowed")
    place = spec.metadata.get("place")
    yield from _place_problems(key, value, kind=place)
    if allowed and value is not None and value not in allowed:
        yield f"{key}={value}; it is not a choice. {suggest(str(value), allowed)}"
    if (word := spec.metadata.get("word")) and type(value) is not int and value != word:
        yield f"{key}={'null' if value is None else value}; it must be a whole number or {word}."
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}={value}; it must be a finite number."
    elif isinstance(value, int | float):
        yield from _range_problems(key, value, spec.metadata)
    if place is None and not dataclasses.is_dataclass(value):
        yield from _value_problems(key, value)


def _value_problems(key: str, value: Any) -> Iterator[str]:
    """Yield values that no field may have at any depth: unwritable texts, numbers beyond 64 bits."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not dataclasses.is_dataclass(item):
                yield from _value_problems(key, name)
                yield from _value_problems(f"{key}.{name}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _value_problems(key, item)
    elif isinstance(value, str) and UNWRITABLE.search(value):
        yield f"{key}={value!r}; it holds {UNWRITABLE.findall(value)[0]!r}, which no file can hold; leave it out."
    elif isinstance(value, int) and abs(value) >= 2**63:
        digits = str(value)
        yield f"{key}={digits[:20]}... ({len(digits)} digits); it is beyond 64 bits; use less than 2^63."


def _place_problems(key: str, value: Any, *, kind: Kind | None) -> Iterator[str]:
    if kind is not None and value is not None:
        listed = [(key, one) for one in value] if isinstance(value, list) else [(key, value)]
        if isinstance(value, dict):
            listed = [(f"{key}.{name}", one) for name, one in value.items()]
        yield from filter(None, (place_problem(where, str(one), kind=kind) for where, one in listed))


def _range_problems(key: str, value: float, bounds: Any) -> Iterator[str]:
    tests = {
        "at_least": (lambda v, b: v >= b, "at least"),
        "above": (lambda v, b: v > b, "above"),
        "at_most": (lambda v, b: v <= b, "at most"),
        "below": (lambda v, b: v < b, "below"),
    }
    for name, (holds, words) in tests.items():
        if name in bounds and not holds(value, bounds[name]):
            yield f"{key}={value}; it must be {words} {bounds[name]}."


def _task(config: Config) -> list[str]:
    tasks = [module.name for module in pkgutil.iter_modules([str(PACKAGE / "tasks")])]
    if config.task.name in tasks:
        return [p for rule in OF_TASKS for p in rule(config.task)]
    return [f"task.name={config.task.name}; there is no such task. {suggest(config.task.name, tasks)}"]


def _name(config: Config) -> list[str]:
    if config.name is None:
        return []
    if len(config.name) > MAX_NAME_LENGTH:
        return [f"name={config.name}; it has {len(config.name)} letters; use at most {MAX_NAME_LENGTH}."]
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*", config.name):
        return []
    return [
        f"name={config.name}; it names a folder: use letters, digits and . _ + = , - only, the first a letter or digit."
    ]


def _entries(config: Config) -> list[str]:
    """Return problems with names of sources and stages, which are parts of prepared folders' names."""
    names = {f"data.{name}": name for name in config.data}
    names |= {f"curriculum.stages.{name}": name for name in config.curriculum.stages}
    return [
        f"{key}; its name is part of a folder's name: use letters, digits and . _ + = -."
        for key, name in names.items()
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,99}", str(name))
    ]


def _stages(config: Config) -> list[str]:
    rollout = config.rollout
    if not config.data or (config.objective.samples_rollouts and rollout.num_rows % rollout.updates):
        return []  # `_data` and `_rollout` report it
    try:
        resolve_stages(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _sharding(config: Config) -> list[str]:
    problems = []
    for glob, dims in config.sharding.rules.items():
        axes = [axis for dim in dims for axis in (dim if isinstance(dim, list) else [dim]) if axis is not None]
        problems += [
            f"sharding.rules[{glob!r}]; there is no mesh axis {axis!r}; write {', '.join(AXES)} or null."
            for axis in axes
            if axis not in AXES
        ]
        problems += [
            f"sharding.rules[{glob!r}] names {axis} {axes.count(axis)} times; an axis splits one dimension of a tensor."
            for axis in AXES
            if axes.count(axis) > 1
        ]
    try:
        mesh_of(config.hw, config.sharding)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _model(config: Config) -> list[str]:
    model = config.model
    problems = []
    if (model.init == "random" or model.size == "tiny") and "model_type" not in model.arch:
        setting = "model.size=tiny" if model.size == "tiny" else "model.init=random"
        problems.append(
            f"{setting} builds the model from model.arch, and model.arch.model_type is not set; "
            "add it, for example +model.arch.model_type=mistral."
        )
    arch = {**model.arch, **(model.tiny_arch if model.size == "tiny" else {})}
    limit = arch.get("max_position_embeddings")
    if isinstance(limit, int):
        problems += _length_problems(config, limit)
    elif limit is not None:
        problems.append(f"model.arch.max_position_embeddings={limit}; it must be a whole number.")
    if config.lora.r > 0 and not config.lora.targets and not config.lora.target_parameters:
        problems.append(f"lora.targets=[] with lora.r={config.lora.r}; name the modules to adapt, or use lora=none.")
    if config.lora.r == 0 and config.lora.targets:
        problems.append(
            f"lora.r=0 with lora.targets=[{', '.join(config.lora.targets)}]; an adapter of rank 0 has nothing to "
            "train; write lora=none, which has no targets, to train every weight, or lora.r=8."
        )
    problems += _variants(config)
    problems += _base(config)
    problems += _linear(config)
    problems += _rounded(config)
    key, chosen = "model.dtype", model.dtype
    if isinstance(config.task, AnswerTaskConfig):
        key, chosen = "task.dtype", config.task.dtype or model.dtype
    if chosen == "float16" and config.hw.runtime == "xla":
        problems.append(
            f"model.dtype=float16 with hw={config.hw.name}; torch_xla and TPUs compute in bfloat16 or float32; use "
            f"{key}=bfloat16, or plain torch (hw=t4, or hw=cpu hw.runtime=eager)."
        )
    if config.optim.b_lr_ratio != 1 and config.lora.r == 0:
        problems.append(
            f"optim.b_lr_ratio={config.optim.b_lr_ratio:g} with lora=none; only adapters have a B whose learning rate "
            "it scales; leave it at 1, or use adapters, for example lora=all_linear_r16."
        )
    problems += [
        f"model.saved has {name!r}; no value of a layer is called so. {suggest(name, SAVABLE)}"
        for name in config.model.saved
        if name not in SAVABLE
    ]
    return problems


def _variants(config: Config) -> list[str]:
    """Return what variants of adapters lack."""
    lora, base, problems = config.lora, config.model.base, []
    if lora.dora and lora.r == 0:
        problems.append(
            "lora.dora=true with lora=none; DoRA trains the lengths of adapted weights, and there are no adapters; use "
            "adapters, for example lora=all_linear_r16, or lora.dora=false."
        )
    if lora.init == "loftq" and base != "nf4":
        problems.append(
            f"lora.init=loftq with model.base={base}; LoftQ starts from what the codes of NF4 lose of a weight; use "
            "model.base=nf4, or lora.init=b_zero or pissa."
        )
    if lora.modules_to_save and lora.r == 0:
        problems.append(
            f"lora.modules_to_save=[{', '.join(lora.modules_to_save)}] with lora=none; all weights are trained; leave "
            "it out, or use adapters, for example lora=all_linear_r16."
        )
    if not all(lora.modules_to_save):
        problems.append("lora.modules_to_save has an empty name, which every module ends with; name modules.")
    problems += _of_experts(config) if lora.target_parameters else []
    problems += _token_rows(lora)
    for key in PATTERNS:
        problems += _patterns(f"lora.{key}", getattr(lora, key), has_adapters=lora.r > 0)
    return problems


def _of_experts(config: Config) -> Iterator[str]:
    """Yield what adapters of experts cannot be combined with; PEFT refuses the same, but for `model.linear`."""
    lora = config.lora
    given = f"lora.target_parameters=[{', '.join(lora.target_parameters)}]"
    if lora.r == 0:
        yield f"{given} with lora=none; all weights are trained; leave it out, or use adapters (lora=all_linear_r16)."
    if lora.dropout:
        yield f"{given} with lora.dropout={lora.dropout:g}; adapters of experts have no dropout; use lora.dropout=0."
    if lora.dora:
        yield f"{given} with lora.dora=true; experts have no trained lengths; use lora.dora=false."
    if lora.init in ("pissa", "loftq"):
        yield f"{given} with lora.init={lora.init}; use lora.init=b_zero or a_zero."
    if config.model.linear != "plain":
        yield f"{given} with model.linear={config.model.linear}; experts are not rounded; use model.linear=plain."


def _token_rows(lora: LoraConfig) -> Iterator[str]:
    """Yield what is wrong with rows that are trained."""
    key, given = "lora.trainable_token_indices", lora.trainable_token_indices
    if given and lora.r == 0:
        yield f"{key} with lora=none; all weights are trained; leave it out, or use adapters (lora=all_linear_r16)."
    for name, tokens in given.items():
        if not tokens or min(tokens) < 0 or len(set(tokens)) < len(tokens):
            yield f"{key} has {name!r}: {tokens!s:.60}; name at least one token, each once, by its id from 0."


def _patterns(key: str, patterns: Mapping[str, float], *, has_adapters: bool) -> Iterator[str]:
    """Yield what is wrong with values of single modules."""
    if patterns and not has_adapters:
        yield f"{key} with lora=none; there are no adapters; use adapters, for example lora=all_linear_r16."
    is_rank = key.endswith("rank_pattern")
    for pattern, value in patterns.items():
        if not (value >= 1 if is_rank else 0 < value < math.inf):
            wanted = "a whole number from 1; for no adapter, leave the module out of lora.targets"
            bound = f"a rank is {wanted}" if is_rank else "it must be above 0 and finite"
            yield f"{key} has {pattern!r}: {value:g}; {bound}."
        if problem := pattern_problem(pattern):
            yield f"{key} has {pattern!r:.80}; {problem}."


def _base(config: Config) -> list[str]:
    """Return what a quantised base cannot do."""
    model, problems = config.model, []
    if model.base != "dense" and config.lora.r == 0 and config.task.name == "train":
        problems.append(
            f"model.base={model.base} with lora=none; codes of {model.base} are not trained; use model.base=dense, or "
            "adapters, for example lora=all_linear_r16."
        )
    if model.base_activations == "int8" and model.base != "int8":
        problems.append(
            f"model.base_activations=int8 with model.base={model.base}; integers are multiplied with the codes of int8 "
            "weights only; use model.base=int8."
        )
    dtypes = {"model.dtype": model.dtype, "task.dtype": getattr(config.task, "dtype", None)}
    keys = [key for key, dtype in dtypes.items() if dtype == "float16"]
    if model.base == "int8" and keys:
        problems.append(
            f"model.base=int8 with {keys[-1]}=float16; sums over integer codes exceed float16's 65,504; use "
            "model.base=nf4 or dense."
        )
    return problems


def _linear(config: Config) -> list[str]:
    """Return what layers with quantised weights cannot do."""
    model, problems = config.model, []
    if model.linear_warmup_steps and model.linear != "bitnet":
        problems.append(
            f"model.linear_warmup_steps={model.linear_warmup_steps} with model.linear={model.linear}; nothing "
            "becomes ternary; set it to 0, or use model.linear=bitnet."
        )
    if model.linear != "bitnet":
        return problems
    if config.lora.r > 0 and config.task.name == "train":
        problems.append(
            f"model.linear={model.linear} with lora.r={config.lora.r}; all weights are trained, and an adapter would "
            "not be ternary; use lora=none."
        )
    if config.objective.trains_encoders:
        problems.append(
            f"model.linear={model.linear} with objective={config.objective.name}; transformers' BitNet is a decoder; "
            "use objective=next_token."
        )
    return problems


def _rounded(config: Config) -> list[str]:
    """Return what training of rounded weights (`model.linear=lr_qat`) cannot do."""
    model, lora = config.model, config.lora
    if model.linear != "lr_qat":
        given = {f"model.{key}": getattr(model, key) for key in OF_ROUNDED if getattr(model, key) != OF_ROUNDED[key]}
        if config.optim.scale_lr_ratio != 0.01:
            given["optim.scale_lr_ratio"] = config.optim.scale_lr_ratio
        return [
            f"{key}={value} with model.linear={model.linear}; no weight is rounded to integers in training; leave it "
            "out, or use model.linear=lr_qat."
            for key, value in given.items()
        ]
    if lora.r == 0:
        if config.task.name not in ("train", "plan", "resume_check"):
            return []  # the base, or a merged model
        return [
            "model.linear=lr_qat with lora=none; adapters decide how its weights are rounded; use lora=all_linear_r32."
        ]
    wrong = {
        f"model.base={model.base}": (model.base != "dense", "its weights are held in one byte each already", "dense"),
        "lora.dora=true": (lora.dora, "scales are trained, and lengths of rows would be the same again", "false"),
        f"lora.init={lora.init}": (
            lora.init not in ("b_zero", "a_zero"),
            "adapters begin as zero, and are in units of the integers",
            "b_zero",
        ),
        f"lora.dropout={lora.dropout:g}": (lora.dropout > 0, "adapters have no input that could be dropped", "0"),
        f"objective={config.objective.name}": (
            not config.objective.takes_rounded_weights,
            "it is for decoders that predict the next token",
            "next_token",
        ),
    }
    return [
        f"{setting} with model.linear=lr_qat; {reason}; use {setting.partition('=')[0]}={instead}."
        for setting, (is_wrong, reason, instead) in wrong.items()
        if is_wrong
    ]


def _length_problems(config: Config, limit: int) -> list[str]:
    lengths = {"sample.window": config.sample.window}
    if isinstance(config.trainer.seq_len, int):
        lengths["trainer.seq_len"] = config.trainer.seq_len
    for name, stage in config.curriculum.stages.items():
        if stage.seq_len:
            lengths[f"curriculum.stages.{name}.seq_len"] = stage.seq_len
    return [
        f"{key}={length} is longer than model={config.model.name} allows (max_position_embeddings={limit}); "
        f"use {limit} or less."
        for key, length in lengths.items()
        if length > limit
    ]


def _sample(config: Config) -> list[str]:
    if config.sample.max_new_tokens < config.sample.window:
        return []
    return [
        f"sample.max_new_tokens={config.sample.max_new_tokens}; it leaves no room for the prompt in "
        f"sample.window={config.sample.window}; use less, or a longer window."
    ]


def _data(config: Config) -> list[str]:
    if not config.data:
        return ["data=[]; no source is selected; name at least one, for example data=sample_text."]
    problems = [
        f"data.{name}.eval_fraction={source.eval_fraction} and data.{name}.test_fraction={source.test_fraction}; "
        "nothing is left to train on; their sum must be below 1."
        for name, source in config.data.items()
        if source.eval_fraction + source.test_fraction >= 1
    ]
    problems += [
        f"data.{name}.{path_key}={getattr(source, path_key)} and data.{name}.{split_key}={getattr(source, split_key)}; "
        f"the {split} split is one or the other; leave one out."
        for name, source in config.data.items()
        for split, (path_key, split_key) in OWN_KEYS.items()
        if getattr(source, path_key) and getattr(source, split_key)
    ]
    problems += [
        f"data.{name}.{key} with data.{name}.format={source.format}; it says how an instruction is asked; write "
        f"data.{name}.format=instruction, or leave it out."
        if source.format != "instruction"
        else f"data.{name}.{key}={getattr(source, key)!r:.80}; it has no {place}; write it where that belongs."
        for name, source in config.data.items()
        for key, places in ASKED.items()
        for place in places
        if (text := getattr(source, key)) is not None and (source.format != "instruction" or place not in text)
    ]
    problems += [
        f"data.{name}.keep.{each}={json.dumps(values, default=str)}; name at least one value, each a text, a number, "
        "true or false."
        for name, source in config.data.items()
        for each, values in source.keep.items()
        if not values or not all(isinstance(value, str | int | float) for value in values)
    ]
    problems += [
        f"data.{name}.duplicates.near_copies=keep; nothing looks for near copies; set data.{name}.duplicates.near=0.8."
        for name, source in config.data.items()
        if source.duplicates.near_copies == "keep" and source.duplicates.near is None
    ]
    asked = [(f"data.{name}.questions", each) for name, source in config.data.items() for each in source.questions]
    problems += [
        f"{key}; {each!r} is no name of a set; use letters, digits, '_' and '-', at most 40."
        for key, each in asked
        if not SET_NAME.fullmatch(each)
    ]
    sets = [each for _, each in asked]
    problems += [
        f"{key}.{each}; another source has a set of this name; give it another."
        for i, (key, each) in enumerate(asked)
        if each in sets[:i]
    ]
    if config.data_size == "full":
        return problems
    return problems + [
        f"data_size=sample; data.{name}.sample_path is not set; set it, or use data_size=full."
        for name, source in config.data.items()
        if source.sample_path is None
    ]


def _packing(config: Config) -> list[str]:
    prepare, problems = config.prepare, []
    if prepare.packing == "none" and config.hw.runtime == "xla":
        problems.append(
            "prepare.packing=none with hw.runtime=xla; every batch length would be another program; use "
            "prepare.packing=best_fit or pad, or hw.runtime=eager."
        )
    if prepare.packing != "best_fit" and prepare.long_documents == "split":
        problems.append(
            f"prepare.long_documents=split with prepare.packing={prepare.packing}; a row holds one document and no "
            "piece of one; use prepare.long_documents=truncate or drop."
        )
    return problems


def _objective(config: Config) -> list[str]:
    return [*config.objective.problems(config.prepare), *_pairs(config), *_teacher(config), *_rollout(config)]


def _teacher(config: Config) -> list[str]:
    """Return problems of the teachers of sources, and of the task that writes them."""
    objective, task = config.objective, config.task
    asked = {}
    if isinstance(task, PrepareTaskConfig):
        asked = {f"task.{name}": getattr(task, name) for name in ("teacher", "teacher_requests")}
    asked = {key: value for key, value in asked.items() if value is not None}
    if not objective.teacher_entries():
        told = {f"data.{name}.teacher": source.teacher for name, source in config.data.items()}
        if task.name in OF_A_RUN or (task.name == "prepare" and not asked):
            told = {}
        return [
            f"{key}={value} with objective={objective.name}; only objective=distillation reads a teacher; choose it, "
            "or leave the key out."
            for key, value in {**asked, **told}.items()
            if value is not None
        ]
    if not asked or config.hw.num_hosts == 1:
        return []
    return [
        f"{next(iter(asked))} with hw.num_hosts={config.hw.num_hosts}; predictions are written by one host; prepare "
        "them on one, or import vLLM's."
    ]


def _pairs(config: Config) -> list[str]:
    """Preference pairs go with an objective that compares answers, and with no other."""
    name, reads_pairs = config.objective.name, config.objective.reads_pairs
    return [
        f"data.{source}.kind={each.kind} with objective={name}; it compares the answers of preference pairs; choose "
        f"a source of pairs, such as data=ultrafeedback_binarized, or data.{source}.kind=preference for rows of pairs."
        if reads_pairs
        else f"data.{source}.kind=preference with objective={name}; it does not compare the two answers of a pair; set "
        "objective=dpo, or another objective of preferences."
        for source, each in config.data.items()
        if reads_pairs != (each.kind == "preference") and config.task.name not in OF_A_RUN
    ]


def _rollout(config: Config) -> list[str]:
    """Return what a rollout lacks where the model writes its own rows, and what it sets where there is none."""
    objective, rollout = config.objective, config.rollout
    if config.task.name in OF_A_RUN:
        return []
    if not objective.samples_rollouts:
        return [
            f"rollout.rewards has {name} with objective={objective.name}; the model writes no answers that it could "
            "reward; use objective=grpo, or leave the reward out."
            for name in list(rollout.rewards)[:1]
        ]
    problems = [*rollout_problems(rollout, objective=objective.name), *_prompts(config), *_rows_of_rollout(config)]
    if config.trainer.guard.spike_action == "rollback":
        problems.append(
            f"trainer.guard.spike_action=rollback with objective={objective.name}; its losses are around 0, and a "
            "spike is a multiple of their median; leave it out."
        )
    return problems + (_adapters_of_server(config) if rollout.sampler == "openai" else [])


def _adapters_of_server(config: Config) -> list[str]:
    """Return what a server that answers prompts cannot load (vLLM 0.32, lora/peft_helper.py)."""
    adapters = "use adapters, for example lora=all_linear_r16, or rollout=default"
    given = {
        "lora=none": (config.lora.r == 0, "it trains whole weights, of which a server loads none", adapters),
        "lora.dora=true": (
            config.lora.dora,
            "vLLM loads no lengths of weights",
            "use lora.dora=false, or rollout=default",
        ),
        "lora.rank_pattern or lora.alpha_pattern": (
            has_patterns(config.lora),
            "vLLM scales all adapters by one lora.alpha and lora.r",
            "leave them out, or use rollout=default",
        ),
        f"lora.modules_to_save=[{', '.join(config.lora.modules_to_save)}]": (
            bool(config.lora.modules_to_save),
            "vLLM loads no modules that are trained whole",
            "leave it out, or use rollout=default",
        ),
        f"lora.target_parameters=[{', '.join(config.lora.target_parameters)}]": (
            bool(config.lora.target_parameters),
            "vLLM loads adapters of experts in another layout",
            "leave it out, or use rollout=default",
        ),
        "lora.trainable_token_indices": (
            bool(config.lora.trainable_token_indices),
            "vLLM loads no rows of embeddings",
            "leave it out, or use rollout=default",
        ),
        f"model.vocab_size={config.model.vocab_size}": (
            config.model.vocab_size is not None,
            "its base has the checkpoint's rows",
            "leave it out, or use rollout=default",
        ),
        f"model.linear={config.model.linear}": (
            config.model.linear == "lr_qat",
            "its adapters are rounded with the weights, which a server does not do",
            "use model.linear=plain, or rollout=default",
        ),
    }
    return [
        f"rollout.sampler=openai with {key}; {what}; {remedy}."
        for key, (is_given, what, remedy) in given.items()
        if is_given
    ]


def _prompts(config: Config) -> list[str]:
    """Return what stages of prompts cannot do."""
    name = config.objective.name
    problems = [
        f"data.{source}.kind={each.kind} with objective={name}; its prompts are the questions of conversations; choose "
        f"a source of conversations, such as data=gsm8k, or data.{source}.kind=chat for rows that have a question."
        for source, each in config.data.items()
        if each.kind == "text"
    ]
    given = {f"data.{source}.weight={each.weight}": each.weight is not None for source, each in config.data.items()}
    given["loader.order=written"] = config.loader.order == "written"
    for key, stage in config.curriculum.stages.items():
        given[f"curriculum.stages.{key}.replay={stage.replay}"] = stage.replay > 0
        given[f"curriculum.stages.{key}.shorter={stage.shorter}"] = stage.shorter > 1
        for length in ("tokens", "tokens_per_parameter"):
            if (value := getattr(stage, length)) is not None:
                problems.append(
                    f"curriculum.stages.{key}.{length}={value} with objective={name}; how long answers get is known "
                    f"when they are written; use curriculum.stages.{key}.steps or .epochs."
                )
        if stage.learn == "all":
            problems.append(
                f"curriculum.stages.{key}.learn=all with objective={name}; prompts are not written by the model, and "
                "have no reward; leave it out."
            )
    return problems + [
        f"{setting} with objective={name}; it orders prepared rows, and the model writes its own; leave it out."
        for setting, is_given in given.items()
        if is_given
    ]


def _rows_of_rollout(config: Config) -> list[str]:
    """Return where the rows of a step, or of a prompt and its answer, are not those of the rollout."""
    rollout, trainer = config.rollout, config.trainer
    rows = {"trainer.global_batch_rows": trainer.global_batch_rows}
    lengths = {"trainer.seq_len": trainer.seq_len if isinstance(trainer.seq_len, int) else None}
    for name, stage in config.curriculum.stages.items():
        rows[f"curriculum.stages.{name}.global_batch_rows"] = stage.global_batch_rows
        lengths[f"curriculum.stages.{name}.seq_len"] = stage.seq_len
    of_steps = f"rollout.prompts={rollout.prompts} x samples={rollout.samples} / updates={rollout.updates}"
    problems = [
        f"{key}={given}; a step has the {rollout.step_rows} rows of {of_steps}; leave it out, or change these."
        for key, given in rows.items()
        if given is not None and given != rollout.step_rows
    ]
    wanted = f"rollout.max_new_tokens={rollout.max_new_tokens}"
    longer = rollout.max_new_tokens + (rollout.max_prompt_tokens or LANES)
    for key, length in lengths.items():
        if length is None:
            continue
        room = length - rollout.max_new_tokens
        if room < 1:
            problems.append(
                f"{wanted} with {key}={length}; it leaves no room for a prompt; use less, or longer rows, "
                f"{key}={longer}."
            )
        elif room < (rollout.max_prompt_tokens or 0):
            problems.append(
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} with {wanted} and {key}={length}; a row leaves "
                f"{room} tokens for a prompt; use at most as many, or longer rows, {key}={longer}."
            )
    return problems


def _targets(config: Config) -> list[str]:
    """Return problems with every `_target_`: outside the allowed prefixes, or missing.

    Its module is looked up, but never imported, here.
    """
    swap_points: dict[str, Any] = {
        "model": config.model,
        "objective": config.objective,
        "optim": config.optim,
        "trainer": config.trainer,
    }
    swap_points |= {f"data.{name}": source for name, source in config.data.items()}
    swap_points |= {f"logger.{name}": logger for name, logger in config.logger.items()}
    swap_points |= {f"callbacks.{name}": callback for name, callback in config.callbacks.items()}
    prefixes = ("tpu_experiments", *config.plugins)
    problems = []
    for key, node in swap_points.items():
        target = node._target_
        if not any(target == prefix or target.startswith(prefix + ".") for prefix in prefixes):
            problems.append(
                f"{key}._target_={target}; it is outside {', '.join(prefixes)}; to allow it add its package to "
                f"'plugins=[...]'."
            )
        else:
            try:
                problems += target_problems(target, key=key)
            except Exception as error:  # the source is no Python, or an __init__ of its packages raised
                problems.append(f"{key}._target_={target}; {failure_of(error)}")
    return problems


def _optim(config: Config) -> list[str]:
    """Return a problem if parameters would be averaged twice."""
    if not config.optim.ema or config.optim._target_ != ScheduleFreeAdamWConfig._target_:
        return []
    return [
        f"optim.ema={config.optim.ema:g} with optim=schedule_free_adamw, which averages its steps itself; leave "
        "optim.ema out."
    ]


def _checkpoint(config: Config) -> list[str]:
    keep_best = config.checkpoint.keep_best
    if not keep_best or config.trainer.eval_every_steps != 0:
        return []
    return [
        f"checkpoint.keep_best={keep_best} uses held-out loss and trainer.eval_every_steps=0 evaluates no step "
        "between the first and the last; set trainer.eval_every_steps=, or checkpoint.keep_best=0."
    ]


def _generating(config: Config) -> list[str]:
    task = config.task
    if not isinstance(task, AnswerTaskConfig):
        return []
    problems = []
    if isinstance(task, GenerateTaskConfig):
        problems += generating_problems(task)
    if isinstance(task, ServeTaskConfig):
        problems += serving_problems(task)
    if config.hw.parallel == "spawn" or (config.hw.parallel == "spmd" and not isinstance(task, GenerateTaskConfig)):
        problems.append(
            f"hw.parallel={config.hw.parallel} with task={task.name}; one process and, but for task=generate, one "
            "device writes; use hw=cpu, v5e1 or v6e1, or add hw.parallel=inline hw.num_devices=1."
        )
    return problems


def _start(config: Config) -> list[str]:
    return start_problems(config.start)


def _sweeping(config: Config) -> list[str]:
    pack, task = config.sweeping.pack, config.task
    if isinstance(task, PlanTaskConfig) and task.pack > 1:
        alone = why_alone(config)
        if alone is not None:
            return [f"task.pack={task.pack}; {alone}, and such runs share no program; use task.pack=1."]
        if task.explore != "none" or task.compare:
            together = "with task.explore or task.compare; a pack is planned by itself; leave them out."
            return [f"task.pack={task.pack} {together}"]
    if pack in ("off", "auto") or (pack.isdigit() and int(pack) > 1):
        return []
    return [f"sweeping.pack={pack}; write auto, off, or the largest number of points in one program, 2 or more."]


RULES: tuple[Callable[[Config], list[str]], ...] = (
    _task,
    _name,
    _entries,
    _data,
    hardware_problems,
    _sharding,
    _model,
    _sample,
    _packing,
    _objective,
    _optim,
    tracing_problems,
    _targets,
    _checkpoint,
    _start,
    _generating,
    _sweeping,
)
