"""Read words that people type from habit: keys of other trainers, and tasks and machines by other names."""

import re
from collections.abc import Collection, Sequence

_LR, _RANK, _STEPS = "optim.lr={value}", "lora.r={value}", "trainer.max_stage_steps={value}"
_EPOCHS = "data.NAME.epochs={value}, of each source NAME of data="
_ROWS = (
    "trainer.global_batch_rows, the rows of a step over all devices (rows of a device times devices times accumulation)"
)
_MICRO = "trainer.micro_batch_rows={value}, and trainer.global_batch_rows, the rows of a step over all devices"
_LENGTH, _DTYPE = "trainer.seq_len={value}", "model.dtype=bfloat16 or float32"
_REMAT = "model.remat=layer_inputs or none"
_RESUME = "not needed: the same command with the same name= resumes its run; start.run=FOLDER begins a new one from it"
_MODEL, _DATA = "model=NAME model.path={value}", "data=messages data.messages.path={value}"
_TEMPLATE = "model.chat_format=NAME or model.chat_template_path=FILE"
_ADAPTER = "start.run={value} to train it on, task.adapter={value} of task=generate"
_RUN = "task.run={value}, or start.run={value} to train it on"
KEYS = {
    **dict.fromkeys(("lr", "learning_rate", "learningrate"), _LR),
    **dict.fromkeys(("rank", "r", "lora_r", "lora_rank", "lora_dim"), _RANK),
    **{"alpha": "lora.alpha={value}", "lora_alpha": "lora.alpha={value}"},
    **{"dropout": "lora.dropout={value}", "lora_dropout": "lora.dropout={value}"},
    **dict.fromkeys(("target_modules", "lora_target", "lora_target_modules"), "'lora.targets=[{value}]'"),
    **{"use_dora": "lora.dora={value}", "use_rslora": "lora.scaling=alpha_over_sqrt_r"},
    **dict.fromkeys(("epochs", "epoch", "num_epochs", "num_train_epochs", "n_epochs"), _EPOCHS),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "train_steps", "total_steps", "iters"), _STEPS),
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size", "batch"), _ROWS),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "per_device_batch_size"), _MICRO),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "gradient_accumulation"), _ROWS),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "cutoff_len", "sequence_len"), _LENGTH),
    **dict.fromkeys(("seq_len", "seq_length", "block_size", "context_length", "model_max_length"), _LENGTH),
    **dict.fromkeys(("bf16", "fp16", "tf32", "torch_dtype", "dtype", "precision", "mixed_precision"), _DTYPE),
    **dict.fromkeys(("load_in_4bit", "qlora"), "model.base=nf4 on a GPU, model.base=int8 on a TPU"),
    **dict.fromkeys(("load_in_8bit", "quantization_bit"), "model.base=int8"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), _REMAT),
    **dict.fromkeys(("attn_implementation", "flash_attention", "flash_attn"), "model.attention=flash or sdpa"),
    **{"warmup_ratio": "schedule.warmup_ratio={value}", "warmup_steps": "schedule.warmup_steps={value}"},
    **{"weight_decay": "optim.weight_decay={value}", "max_grad_norm": "optim.clip_norm={value}"},
    **dict.fromkeys(("min_lr", "lr_end", "cosine_min_lr", "min_learning_rate"), "schedule.min_lr={value}"),
    **{"min_lr_rate": "schedule.floor={value}", "min_lr_ratio": "schedule.floor={value}"},
    **{"num_cycles": "schedule.cycles={value} of schedule=cosine_with_restarts"},
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"),
                    "schedule=cosine, linear, constant, wsd, cosine_with_restarts, polynomial or inverse_sqrt"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim=adamw, adamw8bit, adafactor, muon or schedule_free_adamw"),
    **dict.fromkeys(("save_steps", "save_every", "checkpoint_every"), "checkpoint.every_steps={value}"),
    **dict.fromkeys(("eval_steps", "eval_every"), "trainer.eval_every_steps={value}"),
    **dict.fromkeys(("logging_steps", "log_every"), "trainer.log_every_steps={value}"),
    **dict.fromkeys(("output", "out", "out_dir", "save_dir", "outdir"), "output_dir={value}"),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name"), "name={value}"),
    **dict.fromkeys(("report_to", "wandb", "use_wandb"), "'logger=[console,jsonl,tensorboard,wandb]'"),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "resume_from", "overwrite_output_dir"), _RESUME),
    **dict.fromkeys(("packing", "sample_packing"), "prepare.packing=best_fit, pad or none"),
    **dict.fromkeys(("deepspeed", "fsdp", "ddp", "tensor_parallel"), "sharding=fsdp, fsdp_tensor, hsdp or replicated"),
    **dict.fromkeys(("device", "devices", "num_gpus", "num_devices", "num_tpu_cores", "tpu", "gpus", "accelerator"),
                    "hw=NAME, the machine, such as hw=cpu or hw=v6e8"),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "model_path", "model_id", "pretrained"), _MODEL),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "dataset_path", "data_path", "train_file"), _DATA),
    **dict.fromkeys(("validation_file", "eval_file", "eval_data"), "data.NAME.eval_path={value}"),
    **dict.fromkeys(("chat_template", "template", "prompt_template"), _TEMPLATE),
    **{"prompt": "sample.prompt={value} in training, task.prompt={value} of task=generate"},
    **dict.fromkeys(("adapter", "adapter_name_or_path", "lora_path"), _ADAPTER),
    **dict.fromkeys(("run", "checkpoint_path", "checkpoint_dir"), _RUN),
    **dict.fromkeys(("mode", "command", "action", "stage"), "task=train, evaluate, generate, serve, export or plan"),
    **{"random_seed": "seed={value}", "workers": "prepare.workers={value}", "num_workers": "prepare.workers={value}"},
}  # fmt: skip
"""Keys of transformers, TRL, PEFT, axolotl and LLaMA-Factory, with what is written here."""
CHOICES = {
    "task": {
        **dict.fromkeys(("training", "finetune", "fine_tune", "sft", "fit", "lora", "pretrain"), "train"),
        **dict.fromkeys(("eval", "evaluation", "test", "validate", "benchmark"), "evaluate"),
        **dict.fromkeys(("infer", "inference", "predict", "chat", "sample", "ask"), "generate"),
        **dict.fromkeys(("merge", "save", "gguf", "upload", "push"), "export"),
        **dict.fromkeys(("server", "api", "deploy", "vllm"), "serve"),
        **dict.fromkeys(("resume", "continue"), "train, which resumes the run of the same name"),
        **dict.fromkeys(("check", "diagnose"), "doctor"),
        **dict.fromkeys(("search", "estimate", "cost"), "plan"),
        **dict.fromkeys(("preprocess", "tokenize", "data"), "prepare"),
    },
    "hw": dict.fromkeys(("cuda", "nvidia"), "gpu") | dict.fromkeys(("local", "none", "laptop"), "cpu"),
    "optim": dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw")
    | dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit")
    | dict.fromkeys(("schedule_free", "schedulefree", "adamw_schedule_free"), "schedule_free_adamw"),
    "schedule": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine, with schedule.floor=RATIO or schedule.min_lr=RATE",
        "cosine_warmup_with_min_lr": "cosine, with schedule.floor=RATIO or schedule.min_lr=RATE and a warm-up from 0",
        "warmup_stable_decay": "wsd",
        **dict.fromkeys(
            ("reduce_lr_on_plateau", "greedy"),
            "constant, with curriculum.stages.NAME.exit.patience=N to end a stage on a plateau; no rate reads losses",
        ),
    },
    "lora": {"full": "none", "false": "none", "no": "none", "qlora": "all_linear_r16 model.base=nf4"},
    "debug": dict.fromkeys(("true", "yes", "test", "tiny", "fast"), "smoke"),
}
"""Choices of a group by other names."""
MACHINE = re.compile(
    r"(?:tpu-)?(?:(v5litepod|v5lite|v5-lite|v5-lite-podslice|v5-lite-device|v5e|v5p|v4|v4-podslice|v5p-slice|v6e|v6e-slice|v7x|tpu7x)"
    r"|ct(5lp|5l|6e|5p|4p)(?:-[a-z]+)?)(?:[-_:]?(\d+)t?)?"
)
"""TPUs by the names of the Cloud TPU API, Google Kubernetes Engine and Compute Engine, with their number."""
GENERATIONS = {
    **dict.fromkeys(("v5litepod", "v5lite", "v5-lite", "v5-lite-podslice", "v5-lite-device", "5lp", "5l"), "v5e"),
    **dict.fromkeys(("v6e-slice", "6e"), "v6e"),
    **dict.fromkeys(("v5p-slice", "5p"), "v5p"),
    **dict.fromkeys(("v4-podslice", "4p"), "v4"),
    "tpu7x": "v7x",
}


def machine_named(name: str, known: Collection[str]) -> str | None:
    """Return the machine of conf/hw that somebody means by another name; None where there is none.

    >>> machine_named("v5litepod-8", ["v5e8", "v6e8"])
    'v5e8'
    """
    lower = name.strip().lower()
    if lower in known:
        return lower
    found = MACHINE.fullmatch(lower)
    if found is None or found[3] is None:
        return None
    generation = _generation(found)
    # A v4's or v5p's cores are counted by Google, but its chips in the name of a Compute Engine machine.
    count = 2 * int(found[3]) if found[2] and generation in ("v4", "v5p") else int(found[3])
    return next((each for each in (f"{generation}{count}", f"{generation}-{count}") if each in known), None)


def machines_near(name: str, known: Collection[str]) -> str:
    """Return a sentence that names the machines of the generation somebody means; empty where it is none."""
    found = MACHINE.fullmatch(name.strip().lower())
    generation = _generation(found) if found else "v" if "tpu" in name.lower() else None
    near = [each for each in known if generation and re.fullmatch(rf"{generation}[a-z\d]*-?\d+", each)]
    near.sort(key=lambda each: [int(part) if part.isdigit() else 0 for part in re.findall(r"\d+|\D+", each)])
    return f"TPUs of that kind are {', '.join(near)}." if near else ""


def _generation(found: re.Match[str]) -> str:
    named = found[1] or found[2]
    return GENERATIONS.get(named, named)


def with_machines(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the arguments with the machines of `hw=` by their names here; others unchanged.

    >>> with_machines(["hw=v6e-8,v5litepod-4", "seed=1"], ["v6e8", "v5e4"])
    ['hw=v6e8,v5e4', 'seed=1']
    """

    def named(argument: str) -> str:
        key, _, value = argument.partition("=")
        if key != "hw" or not value or value in known:
            return argument
        return "hw=" + ",".join(machine_named(each, known) or each for each in value.split(","))

    return [named(argument) for argument in arguments]


def of_habit(key: str, value: str) -> str | None:
    """Return how a key of another trainer is written here, for the end of a sentence; None for any other key."""
    known = KEYS.get(key.rpartition(".")[2].lower().replace("-", "_"))
    return None if known is None else f"Here it is {known.format(value=value.strip('[]') or 'VALUE')}."
