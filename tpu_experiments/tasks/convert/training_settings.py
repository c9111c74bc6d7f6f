"""Settings of the training that TRL, LLaMA-Factory and axolotl share: they are transformers' `TrainingArguments`."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tpu_experiments.config.folders import CONF
from tpu_experiments.config.messages import choices
from tpu_experiments.tasks.convert.table import Draft, Key, as_number, equal, idle, missing

MAIN = "curriculum.stages.main"
"""The one stage of `curriculum=single`."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla"), "adamw"),
    **dict.fromkeys(("adamw_torch_npu_fused", "paged_adamw", "paged_adamw_32bit", "adamw_anyprecision"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
    "ao_adamw_8bit": "adamw8bit",
}
"""Optimizers there, and the file of conf/optim that is the same; others are refused, those of its other files too: Muon
is scaled in several ways, Adafactor by the weights here, and an average of AdamW has no schedule."""
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
}
"""Schedules there, and the file of conf/schedule; others are refused."""
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
    "seed": 42,
    "save_strategy": "steps",
    "eval_strategy": "no",
}
"""transformers' own values of keys that are not given."""
PICTURES = "pictures and sound are not trained on"
OF_DEVICES = "devices are axes of `sharding.mesh`"
OF_LOGGERS = "`logger=` has console, jsonl, TensorBoard, W&B, MLflow and trackio"
OF_OTHER_METHODS = "there is no such method here"
OF_TOKENIZER = "a tokenizer is read as it is saved; save it with these tokens and name it by `model.tokenizer_path`"
OF_ADDED = (
    "`model.added_tokens` adds special tokens, and `model.vocab_size` rows for them; write them there, or save the "
    "tokenizer with them"
)
OF_EMBEDDINGS = "an embedding's adapter has the rate of the others"
"""Reasons that several programs' tables have."""
BATCH = "rows of a step over all devices: micro-batch x accumulation x `task.devices`"
KEYS: dict[str, Key] = {
    "learning_rate": equal("optim.lr"),
    "weight_decay": equal("optim.weight_decay", "matrices alone decay, embeddings included, as there"),
    "adam_beta1": equal("optim.beta1"),
    "adam_beta2": equal("optim.beta2"),
    "adam_epsilon": equal("optim.eps"),
    "max_grad_norm": equal("optim.clip_norm", "0 there is null here: no clipping"),
    "lr_scheduler_type": equal("schedule, schedule.floor", "constant has no warm-up, as there"),
    "lr_scheduler_kwargs": equal(
        "schedule.floor, schedule.cycles", "`min_lr_rate` and `min_lr`, of restarts `num_cycles`"
    ),
    "warmup_ratio": equal("schedule.warmup_ratio", "without `warmup_steps`"),
    "warmup_steps": equal("schedule.warmup_steps, schedule.warmup_ratio", "below 1 it is a ratio, as there"),
    "num_train_epochs": equal(f"{MAIN}.epochs"),
    "max_steps": equal(f"{MAIN}.steps", "above 0 in the place of the epochs, as there"),
    "per_device_train_batch_size": equal("trainer.global_batch_rows", BATCH),
    "gradient_accumulation_steps": equal("trainer.global_batch_rows", BATCH),
    "optim": equal("optim", "AdamW of 32 and of 8 bits, paged or not"),
    "seed": equal("seed", "orders and dropout are drawn in another way, so no step is equal"),
    "logging_steps": equal("trainer.log_every_steps", "a share of the steps (below 1) is left to the default here"),
    "eval_strategy": equal("trainer.eval_every_steps", "`no` is 0; `epoch` is left to the default here"),
    "evaluation_strategy": equal("trainer.eval_every_steps", "an older name of `eval_strategy`"),
    "eval_steps": equal("trainer.eval_every_steps"),
    "save_strategy": equal("checkpoint.every_steps", "`no` is 0; `epoch` is left to the default here"),
    "save_steps": equal("checkpoint.every_steps"),
    "save_total_limit": equal("checkpoint.keep_last"),
    "load_best_model_at_end": equal(f"{MAIN}.exit.ends_with", "by the held-out loss"),
    "report_to": equal("logger", "console, jsonl and TensorBoard are always on; W&B, MLflow and trackio by name"),
    "run_name": idle("the run's name is `name=`, the folder that a run resumes in"),
    "project": idle("`logger.wandb.options.project` names a project of W&B"),
    "output_dir": idle("runs are in `output_dir=`/`name=`"),
    "logging_dir": idle("TensorBoard's files are in the run's folder"),
    "logging_strategy": idle("records are about 20 in a run, or every `trainer.log_every_steps`"),
    "logging_first_step": idle("the first step is always logged"),
    "log_level": idle("the log is `run.log` in the run's folder"),
    "disable_tqdm": idle("there is a bar where the console is a terminal"),
    "include_num_input_tokens_seen": idle("tokens are always counted"),
    "bf16": equal("model.dtype"),
    "fp16": equal("model.dtype", "GPUs in plain torch alone (`hw.runtime=eager`)"),
    "tf32": idle("products of float32 are not rounded"),
    "bf16_full_eval": idle("evaluations run as the training does"),
    "fp16_full_eval": idle("evaluations run as the training does"),
    "gradient_checkpointing": idle("`model.remat` says what is kept for the backward pass"),
    "gradient_checkpointing_kwargs": idle("`model.remat` says what is kept for the backward pass"),
    "activation_checkpointing": idle("`model.remat` says what is kept for the backward pass"),
    "activation_offloading": idle("`model.remat=offload` keeps them in the host's memory"),
    "torch_compile": idle("every program is compiled"),
    "torch_compile_backend": idle("every program is compiled by XLA"),
    "torch_compile_mode": idle("every program is compiled by XLA"),
    "use_liger_kernel": idle("the loss is computed in chunks, `trainer.loss_chunk_tokens`"),
    "auto_find_batch_size": idle("`task=plan` finds the micro-batch that fits"),
    "per_device_eval_batch_size": idle("evaluations have the training's micro-batch"),
    "eval_accumulation_steps": idle("no logits of an evaluation are kept"),
    "eval_on_start": idle("there is always an evaluation before the first step"),
    "eval_delay": idle("evaluations change nothing"),
    "do_train": idle("`task=train` trains"),
    "do_eval": idle("held-out rows are evaluated where there are some"),
    "do_predict": idle("`task=generate` and `task=evaluate task.generate=N` write answers"),
    "predict_with_generate": idle("`task=evaluate task.generate=N` writes answers"),
    "save_only_model": idle("checkpoints have the optimizer's state, so that a run resumes"),
    "save_safetensors": idle("files of tensors are safetensors"),
    "overwrite_output_dir": idle("the same name with another config is refused; `name=` begins another run"),
    "push_to_hub": idle("`task=export task.push=owner/name` uploads"),
    "hub_model_id": idle("`task=export task.push=owner/name` uploads"),
    "hub_strategy": idle("`task=export task.push=owner/name` uploads"),
    "hub_private_repo": idle("`task.push_private` of `task=export`"),
    "hub_token": idle("the Hub's token is in the environment (HF_TOKEN)"),
    "dataloader_num_workers": idle("rows are prepared once and read by threads, `loader`"),
    "dataloader_pin_memory": idle("rows are sent ahead, `loader.device_prefetch_size`"),
    "dataloader_persistent_workers": idle("rows are prepared once and read by threads, `loader`"),
    "dataloader_prefetch_factor": idle("`loader.loader_prefetch_size`"),
    "dataloader_drop_last": idle("every step has all its rows, the last of an epoch too"),
    "remove_unused_columns": idle("fields that are not read are listed in the audit"),
    "ddp_timeout": idle("devices are one program"),
    "ddp_find_unused_parameters": idle("devices are one program"),
    "ddp_bucket_cap_mb": idle("devices are one program"),
    "ddp_broadcast_buffers": idle("devices are one program"),
    "ddp_backend": idle("devices are one program"),
    "local_rank": idle("devices are one program"),
    "deepspeed": idle("`sharding=fsdp` (the default), `hsdp`, `fsdp_tensor` or `replicated`"),
    "fsdp": idle("`sharding=fsdp` is the default"),
    "fsdp_config": idle("`sharding=fsdp` is the default"),
    "fsdp_transformer_layer_cls_to_wrap": idle("`sharding=fsdp` is the default"),
    "accelerator_config": idle("devices are one program"),
    "parallelism_config": idle("`sharding.mesh` names the axes"),
    "average_tokens_across_devices": idle("a loss is always the mean over the tokens of the global batch"),
    "trust_remote_code": idle("code of a checkpoint runs only where `model.remote_code=run` is typed"),
    "full_determinism": idle("a run gives the same numbers twice"),
    "ignore_data_skip": idle("a run resumes at its place in the data"),
    "resume_from_checkpoint": missing("a run resumes by itself; `start.run=FOLDER` begins from a run or adapter here"),
    "label_smoothing_factor": missing("the loss of a token is not smoothed", 0.0),
    "neftune_noise_alpha": missing("no noise is added to embeddings"),
    "optim_args": missing("options of an optimizer are keys of `optim`; write them there"),
    "optim_target_modules": missing("all adapters, or all weights, have the same optimizer"),
    "group_by_length": missing("rows are in a random order; packing (`prepare.packing=best_fit`) leaves no padding"),
    "train_sampling_strategy": missing("rows are in a random order", "random"),
    "metric_for_best_model": missing("the best evaluation is that of the lowest held-out loss", "loss", "eval_loss"),
    "greater_is_better": missing("the best evaluation is that of the lowest held-out loss"),
    "data_seed": missing("`seed` is that of the data's order too"),
    **dict.fromkeys(
        (
            *("activation_checkpointing_kwargs", "liger_kernel_config", "use_cache", "torch_empty_cache_steps"),
            *("log_on_each_node", "logging_nan_inf_filter", "log_level_replica", "trackio_bucket_id"),
            *("trackio_static_space_id", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
            *("include_for_metrics", "batch_eval_metrics", "save_on_each_node", "enable_jit_checkpoint", "debug"),
            *("hub_always_push", "hub_revision", "restore_callback_states_from_checkpoint", "skip_memory_metrics"),
            *("dataloader_multiprocessing_context", "dataloader_in_order", "label_names", "length_column_name"),
            *("ddp_static_graph",),
        ),
        idle("it belongs to how transformers' Trainer logs, evaluates, saves or moves data"),
    ),
    "use_cpu": idle("`hw=` names the machine"),
    "no_cuda": idle("`hw=` names the machine"),
}
"""Keys of transformers' TrainingArguments."""


# ---- rates, schedule, length --------------------------------------------------------------------------------


def set_optimizer(draft: Draft, *, key: str = "optim") -> None:
    """Choose the optimizer and set its numbers."""
    name = str(draft.value(key)).lower()
    if name == "adafactor":
        draft.refuse(key, "Adafactor here scales its steps by the size of the weights, which it does not there")
    elif name not in OPTIMIZERS:
        draft.refuse(key, f"there is no such optimizer here; those that are the same: {', '.join(sorted(OPTIMIZERS))}")
    else:
        draft.choose("optim", OPTIMIZERS[name], of=key)
    set_number(draft, "learning_rate", "optim.lr", above=0.0)
    set_number(draft, "weight_decay", "optim.weight_decay")
    for there, here in (("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps")):
        set_number(draft, there, f"optim.{here}")
    clip = draft.number("max_grad_norm")
    draft.set("optim.clip_norm", clip or None, of="max_grad_norm")


def set_number(draft: Draft, there: str, here: str, *, above: float | None = None) -> None:
    """Set a number of the same meaning."""
    value = draft.value(there)
    if value is None:
        return
    found = as_number(value)
    if found is None or not math.isfinite(found) or (above is not None and found <= above):
        draft.refuse(there, f"it is no number{'' if above is None else f' above {above:g}'}")
    else:
        draft.set(here, found, of=there)


def set_whole(draft: Draft, there: str, here: str, *, at_least: int = 1) -> None:
    """Set a whole number of the same meaning."""
    value = draft.value(there)
    if value is None:
        return
    found = as_number(value)
    if found is None or found != int(found) or found < at_least:
        draft.refuse(there, f"it is no whole number from {at_least}")
    else:
        draft.set(here, int(found), of=there)


def set_schedule(draft: Draft, *, key: str = "lr_scheduler_type") -> None:
    """Choose the schedule, its warm-up and where it ends."""
    name = str(draft.value(key)).lower()
    if name not in SCHEDULES:
        draft.refuse(key, f"there is no such schedule here; those that are the same: {', '.join(SCHEDULES)}")
        return
    draft.choose("schedule", SCHEDULES[name], of=key)
    if SCHEDULES[name] != "constant":
        draft.set("schedule.floor", 0.0, of=key)
    set_end_of_schedule(draft, name=name)
    if name == "constant":
        draft.set("schedule.warmup_steps", 0, of=key)
        return
    set_warmup(draft)


def set_end_of_schedule(draft: Draft, *, name: str) -> None:
    """Set the rate at the end, which `lr_scheduler_kwargs` has."""
    there = "lr_scheduler_kwargs"
    options = draft.mapping(there)
    for option, value in options.items():
        if option == "min_lr_rate" and name == "cosine_with_min_lr":
            draft.set("schedule.floor", value, of=there)
        elif option == "min_lr" and name == "cosine_with_min_lr":
            rate = draft.number("learning_rate")
            lowest = as_number(value)
            if lowest is None or not rate:
                draft.refuse(there, "min_lr is no number")
            else:
                draft.set("schedule.floor", lowest / rate, of=there)
        elif option == "num_cycles" and name == "cosine_with_restarts":
            draft.set("schedule.cycles", value, of=there)
        else:
            draft.refuse(there, f"{option} of {name} has no equal here")


def set_warmup(draft: Draft) -> None:
    """Set the warm-up: a number of steps, or a share of them."""
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if ratio is not None and not draft.is_given("warmup_steps"):
        if 0 <= ratio < 1:
            draft.set("schedule.warmup_ratio", ratio, of="warmup_ratio")
        else:
            draft.refuse("warmup_ratio", "it is no share of the steps, from 0 to below 1")
    elif ratio and steps == 0:
        draft.refuse("warmup_ratio", "which of the two applies beside warmup_steps: 0 differs among versions; keep one")
    elif steps is not None and 0 < steps < 1:
        draft.set("schedule.warmup_ratio", steps, of="warmup_steps")
    else:
        set_whole(draft, "warmup_steps", "schedule.warmup_steps", at_least=0)


def set_length(draft: Draft, *, epochs: str = "num_train_epochs") -> None:
    """Set the length of the training: steps, or epochs."""
    draft.groups["curriculum"] = "single"
    steps = draft.number("max_steps")
    if steps is not None and steps > 0:
        set_whole(draft, "max_steps", f"{MAIN}.steps")
    else:
        set_number(draft, epochs, f"{MAIN}.epochs", above=0.0)


def set_row_length(draft: Draft, *, key: str, is_paired: bool) -> None:
    """Set the length of a row, which of a pair has both answers."""
    length = draft.number(key)
    if length is None or length != int(length) or length < 8:
        draft.refuse(key, "it is no whole number from 8")
        return
    draft.set("trainer.seq_len", int(length) * (2 if is_paired else 1), of=key)
    if is_paired:
        draft.note(key, "a row has both answers of a pair, each with its prompt, and so twice the tokens")


def set_batch(draft: Draft, *, micro: str = "per_device_train_batch_size") -> None:
    """Set the rows of a step over all devices."""
    parts = {key: draft.number(key) for key in (micro, "gradient_accumulation_steps")}
    for key, value in parts.items():
        if value is None or value < 1 or value != int(value):
            draft.refuse(key, "it is no whole number from 1")
            return
    rows = int(math.prod(value for value in parts.values() if value is not None)) * draft.devices
    draft.set("trainer.global_batch_rows", rows, of=tuple(parts))


# ---- precision, records, checkpoints ------------------------------------------------------------------------


def set_dtype(draft: Draft, *, default: str) -> None:
    """Set the data type of the arithmetic."""
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.flag(key):
            draft.set("model.dtype", dtype, of=key)
            return
    draft.set("model.dtype", default, of=[key for key in ("bf16", "fp16") if draft.is_given(key)])


def set_intervals(draft: Draft) -> None:
    """Set the steps between records, evaluations and checkpoints, which change nothing that is learnt."""
    for there, here in (("logging_steps", "trainer.log_every_steps"), ("eval_steps", "trainer.eval_every_steps")):
        found = draft.number(there)
        if found is not None and found >= 1:
            draft.set(here, int(found), of=there)
    strategy = "evaluation_strategy" if draft.is_given("evaluation_strategy") else "eval_strategy"
    if str(draft.value(strategy)).lower() in ("no", "false"):
        draft.set("trainer.eval_every_steps", 0, of=strategy)
    if str(draft.value("save_strategy")).lower() in ("no", "false"):
        draft.set("checkpoint.every_steps", 0, of="save_strategy")
    else:
        found = draft.number("save_steps")
        if found is not None and found >= 1:
            draft.set("checkpoint.every_steps", int(found), of="save_steps")
    limit = draft.number("save_total_limit")
    if limit is not None and limit >= 1:
        draft.set("checkpoint.keep_last", int(limit), of="save_total_limit")
    if draft.flag("load_best_model_at_end") or str(draft.value("save_strategy")) == "best":
        draft.set(f"{MAIN}.exit.ends_with", "best", of=["load_best_model_at_end"])


def set_loggers(draft: Draft, names: list[str], *, key: str, project: Any = None) -> None:
    """Choose the loggers: ours, and those of theirs that conf/logger has."""
    names = [str(name) for name in names]
    known = [name for name in names if name in choices("logger") and name != "tensorboard"]
    unknown = [name for name in names if name not in (*choices("logger"), "none", "all")]
    draft.choose("logger", ["console", "jsonl", "tensorboard", *known], of=key)
    if unknown:
        draft.note(key, f"there is no logger {', '.join(unknown)} here")
    if project and "wandb" in known:
        draft.set("logger.wandb.options.project", str(project), of=key)


# ---- models and adapters ------------------------------------------------------------------------------------

VARIANT = re.compile(r"(-(instruct|it|base|hf|chat|pt|bnb-4bit|v0\.1))+$")
"""Endings of names of the same architecture."""


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the models of conf/model that have a checkpoint on the Hub, by the last part of its name."""
    found = {}
    for name in choices("model"):
        values = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
        path = str(values.get("path", ""))
        if path.count("/") == 1:
            found[_plain(path)] = {"name": name, **values}
    return found


def _plain(path: str) -> str:
    """Return the last part of a model's id without the owner and the variant."""
    return VARIANT.sub("", Path(path).name.lower().removeprefix("meta-"))


NAMED = {
    r"qwen(1\.5|2|2\.5)-\d": "qwen2",
    r"qwen3-[\d.]+b$": "qwen3",
    r"llama-[23]|tinyllama": "llama",
    r"mistral-7b": "mistral",
    r"gemma-2-": "gemma2",
}
"""Architectures by the beginning of a model's id; of another architecture no module would have the names."""


def set_model(draft: Draft, *, key: str) -> str | None:
    """Choose the model; return its architecture where conf/model has it."""
    path = draft.value(key)
    if not isinstance(path, str) or not path.strip():
        draft.refuse(key, "it names no model")
        return None
    preset = presets().get(_plain(path))
    if preset is None:
        draft.choose("model", "base", of=key)
        draft.set("model.name", re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name).strip(".-") or "model", of=key)
    else:
        draft.choose("model", preset["name"], of=key)
        draft.set("model.tokenizer_path", None, of=key)
    draft.set("model.path", path, of=key)
    if preset is None:
        named = (known for pattern, known in NAMED.items() if re.match(pattern, _plain(path)))
        return next(named, None)
    arch = preset.get("arch", {})
    return str(arch["model_type"]) if "model_type" in arch else architecture_of(preset)


def architecture_of(preset: Mapping[str, Any] | None) -> str | None:
    """Return the architecture of a model of conf/model whose file extends another's."""
    for base in (preset or {}).get("defaults", []):
        if base in choices("model"):
            values = yaml.safe_load((CONF / "model" / f"{base}.yaml").read_text(encoding="utf-8"))
            return str(values.get("arch", {}).get("model_type") or "") or architecture_of(values)
    return None


OF_PEFT = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), "q_proj v_proj"
    ),
    "phi3": "qkv_proj",
}
"""Modules that PEFT adapts by default, by architecture (peft/utils/constants.py, 0.21)."""


def targets_of(draft: Draft, value: Any, *, key: str) -> list[str]:
    """Return the modules of an adapter as `lora.targets`: names, or a regular expression over whole names."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    if not isinstance(value, str):
        draft.refuse(key, "it is no list of names")
        return ["all-linear"]
    text = str(value).strip()
    if text in ("all-linear", "all"):
        return ["all-linear"]
    if re.fullmatch(r"[\w.,\s-]+", text):
        return [each.strip() for each in text.split(",") if each.strip()]
    found = globs_of(text)
    if found is None:
        draft.refuse(key, "it is a regular expression that is no list of names or shell patterns; name the modules")
        return ["all-linear"]
    return found


MOST_GLOBS = 256
TOKEN = re.compile(
    r"\((?:\?:)?([\w|.]+)\)(\?)?|(\[\\d\]\+|\\d\+|\[0-9\]\+|\.\*|\.\+)|\[(\d)-(\d)\](\+)?|(\\\.|\.)|(\w+)"
)
"""Parts of a regular expression that shell patterns have too."""
OF_PARTS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
"""Projections of the parts of a layer; a pattern of `self_attn.up_proj`, as alternatives multiply, matches nothing."""
OF_WRAPPERS = ("_checkpoint_wrapped_module", "cross_attn")
"""Names that no decoder here has."""


def globs_of(pattern: str, *, is_whole: bool = True) -> list[str] | None:
    """Return shell patterns that match what a regular expression of names does; None of one that has no such equal.

    >>> globs_of(r"model.language_model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj")
    ['*layers.*.mlp.up_proj', '*layers.*.self_attn.q_proj']
    """
    found: list[str] = []
    for branch in _alternatives(pattern):
        globs = _globs_of_branch(branch, is_whole=is_whole)
        if globs is None:
            return None
        found += globs
    return list(dict.fromkeys(found))


def _globs_of_branch(branch: str, *, is_whole: bool) -> list[str] | None:
    found, at, text = [""], 0, branch.removeprefix("^").removesuffix("$")
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            return None
        group, optional, many, low, high, repeated, _, word = match.groups()
        parts = [word or "."]
        if group is not None:
            parts = [*group.split("|"), *([""] if optional else [])]
        elif many is not None:
            parts = ["*"]
        elif low is not None:
            parts = [f"[{low}-{high}]" + ("*" if repeated else "")]
        found = [before + part for before in found for part in parts]
        at = match.end()
        if len(found) > MOST_GLOBS:
            return None
    is_closed = is_whole or branch.endswith("$")
    return [_of_decoder(each if is_closed else f"{each}*") for each in found if not _matches_nothing(each)]


def _matches_nothing(glob: str) -> bool:
    """Return whether a pattern names a projection of another part of the layer, or a part that no decoder has."""
    parts = glob.split(".")
    projections = [name for names in OF_PARTS.values() for name in names]
    wrong = [part in OF_PARTS and parts[-1] in projections and parts[-1] not in OF_PARTS[part] for part in parts]
    return any(wrong) or any(part in OF_WRAPPERS for part in parts)


def _of_decoder(glob: str) -> str:
    """Return a pattern without the names of a vision model around its decoder, which alone is trained here."""
    prefix, layers, rest = glob.partition("layers.")
    is_decoder = prefix.replace("language_model", "").replace("model", "").strip(".*") == ""
    return f"*layers.{rest}" if layers and is_decoder else glob


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern outside of its groups."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(pattern):
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            found.append(pattern[begin:at])
            begin = at + 1
    return [*found, pattern[begin:]]
