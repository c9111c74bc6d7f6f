"""Arguments of TRL's commands, and their conversion (huggingface/trl 1.x): sft, dpo, kto, reward, grpo, rloo."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from tpu_experiments.tasks.convert.sources import (
    FORMAT_KINDS,
    add_source,
    hold_out,
    names_of_sources,
    path_of,
    resolved,
    text_in,
)
from tpu_experiments.tasks.convert.table import Draft, Key, Tool, as_number, equal, idle, missing, without_equal
from tpu_experiments.tasks.convert.training_settings import (
    BATCH,
    DEFAULTS,
    KEYS,
    MAIN,
    OF_DEVICES,
    OF_LOGGERS,
    OF_OTHER_METHODS,
    OF_PEFT,
    set_batch,
    set_intervals,
    set_length,
    set_loggers,
    set_model,
    set_number,
    set_optimizer,
    set_row_length,
    set_schedule,
    set_whole,
    targets_of,
)

OF_SERVERS = "`rollout=vllm rollout.url=` asks a server; by default the devices of the training write"
OF_SAMPLING = "an answer is drawn from all tokens, by the temperature alone"
RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "grpo": 1e-6, "rloo": 1e-6}
"""Learning rates of the commands where none is given."""
BETAS = {"dpo": 0.1, "kto": 0.1, "grpo": 0.0, "rloo": 0.05}
SAMPLES = {"grpo": 8, "rloo": 2}
"""The same of `beta` and `num_generations`."""
SPECIAL = {
    "per_device_train_batch_size": equal("trainer.global_batch_rows, rollout.prompts, rollout.updates", BATCH),
    "gradient_accumulation_steps": equal("trainer.global_batch_rows, rollout.prompts, rollout.updates", BATCH),
}
KEYS_OF_TRL: dict[str, Key] = {
    **KEYS,
    **SPECIAL,
    "model_name_or_path": equal(
        "model, model.path", "a model of `conf/model` where its file has the same architecture"
    ),
    "model_revision": equal("model.revision"),
    "model_init_kwargs": missing("options of transformers' loader are not passed on"),
    "dtype": idle("`bf16` and `fp16` say the arithmetic's; frozen weights are in it too"),
    "torch_dtype": idle("an older name of `dtype`"),
    "attn_implementation": idle("`model.attention`"),
    "use_peft": equal("lora", "without it all weights are trained"),
    "lora_r": equal("lora.r"),
    "lora_alpha": equal("lora.alpha"),
    "lora_dropout": equal("lora.dropout", "0 where `disable_dropout` is on, as by default of dpo, kto and reward"),
    "lora_target_modules": equal("lora.targets", "without it those that PEFT takes for the architecture"),
    "lora_target_parameters": equal("lora.target_parameters", "beside the modules"),
    "lora_modules_to_save": equal("lora.modules_to_save"),
    "lora_task_type": idle("the objective says it"),
    "use_rslora": equal("lora.scaling"),
    "use_dora": equal("lora.dora"),
    "load_in_8bit": equal("model.base", "int8 by output feature, inputs not rounded (LLM.int8 has outliers apart)"),
    "load_in_4bit": equal("model.base", "nf4; for a TPU int8 is smaller and faster"),
    "bnb_4bit_quant_type": equal("model.base", "nf4"),
    "use_bnb_nested_quant": equal("model.base_double_quant"),
    "bnb_4bit_quant_storage": idle("codes are bytes"),
    "dataset_name": equal(
        "data.NAME.path, data.NAME.kind, data.NAME.format", "its format is in the rows, or `task.format`"
    ),
    "dataset_config": equal("data.NAME.hub_config"),
    "dataset_train_split": equal("data.NAME.hub_split"),
    "dataset_test_split": equal("data.NAME.eval_split", "with an `eval_strategy`"),
    "dataset_streaming": idle("data is prepared once"),
    "datasets": equal("data", "`path`, `name`, `split` and one of `data_files`"),
    "streaming": idle("data is prepared once"),
    "test_split_size": equal("data.NAME.eval_fraction"),
    "dataset_num_proc": idle("`prepare.workers`"),
    "dataset_kwargs": missing("data is always prepared here", {}),
    "dataset_text_field": equal("data.NAME.fields.text"),
    "ignore_bias_buffers": idle(OF_DEVICES),
    "chat_template_path": equal("model.chat_template_path", "a file; a model's is `model.tokenizer_path`"),
    "eos_token": equal("", "of conversations, whose answers end with the template's mark; of texts it is refused"),
    "pad_token": idle("padding is never read or learnt"),
    "max_length": equal("trainer.seq_len", "of a pair the row has both answers, and twice the tokens"),
    "max_seq_length": equal("trainer.seq_len", "an older name of `max_length`"),
    "max_prompt_length": equal("rollout.max_prompt_tokens", "of grpo and rloo; pairs cut prompts as far as needed"),
    "truncation_mode": missing("a conversation is cut behind its last whole answer", "keep_start"),
    "shuffle_dataset": idle("rows are in a random order"),
    "packing": equal("prepare.packing", "best_fit"),
    "packing_strategy": equal("prepare.packing, prepare.long_documents", "bfd, bfd_split"),
    "padding_free": idle("rows always have `trainer.seq_len` tokens"),
    "pad_to_multiple_of": idle("rows always have `trainer.seq_len` tokens"),
    "eval_packing": idle("held-out rows are packed as the others"),
    "completion_only_loss": equal(f"{MAIN}.learn"),
    "assistant_only_loss": equal(f"{MAIN}.learn", "false, the default: all tokens of a conversation are learnt"),
    "loss_type": equal("objective, objective.loss", "of dpo, kto and grpo; nll of sft"),
    "loss_weights": equal("objective.sft_weight", "of a loss and `sft`"),
    "beta": equal("objective.beta"),
    "label_smoothing": equal("objective.label_smoothing"),
    "desirable_weight": equal("objective.desirable_weight"),
    "undesirable_weight": equal("objective.undesirable_weight"),
    "center_rewards_coefficient": equal("objective.center_rewards_coefficient"),
    "disable_dropout": equal("lora.dropout"),
    "precompute_ref_log_probs": idle("the reference is always computed once, before the first step"),
    "precompute_ref_batch_size": idle("the reference is computed with the training's micro-batch"),
    "use_weighting": missing("a pair has the weight 1"),
    "f_divergence_type": missing(OF_OTHER_METHODS, "reverse_kl"),
    "f_alpha_divergence_coef": idle("it belongs to `f_divergence_type`"),
    "discopop_tau": idle("it belongs to `loss_type: discopop`"),
    "ld_alpha": missing(OF_OTHER_METHODS),
    "router_aux_loss_coef": missing("experts have no loss of their own", 0, 0.0),
    "sync_ref_model": missing("the reference is the model as it starts"),
    "ref_model_mixup_alpha": idle("it belongs to `sync_ref_model`"),
    "ref_model_sync_steps": idle("it belongs to `sync_ref_model`"),
    "reward_model_name_or_path": missing("a reward is a function here (rollout.rewards)"),
    "reward_funcs": equal("rollout.rewards", "functions by their names, which TRL's own need TRL for"),
    "reward_weights": equal("rollout.rewards.NAME.weight"),
    "num_generations": equal("rollout.samples"),
    "num_generations_eval": idle("held-out prompts are answered once, with the likeliest tokens"),
    "max_completion_length": equal("rollout.max_new_tokens"),
    "generation_batch_size": equal("rollout.prompts"),
    "steps_per_generation": equal("rollout.prompts, rollout.updates"),
    "num_iterations": equal("", "1: a row is in one step"),
    "temperature": equal("rollout.temperature"),
    "top_p": missing(OF_SAMPLING, 1, 1.0),
    "top_k": missing(OF_SAMPLING, 0),
    "min_p": missing(OF_SAMPLING, 0.0),
    "repetition_penalty": missing(OF_SAMPLING, 1, 1.0),
    "generation_kwargs": missing(OF_SAMPLING),
    "chat_template_kwargs": missing("options of a chat template are not passed on"),
    "cache_implementation": idle("the cache has a fixed length"),
    "epsilon": equal("objective.epsilon"),
    "epsilon_high": equal("objective.epsilon_high"),
    "delta": missing(OF_OTHER_METHODS),
    "importance_sampling_level": equal("objective.ratio", "token, sequence"),
    "scale_rewards": equal("objective.scale", "group, batch, none"),
    "normalize_advantages": equal("objective.scale", "of rloo: batch"),
    "multi_objective_aggregation": missing("rewards are summed, by weight", "sum_then_normalize"),
    "reward_clip_range": missing("a reward is not clipped"),
    "mask_truncated_completions": equal("rollout.masks_cut"),
    "top_entropy_quantile": missing(OF_OTHER_METHODS, 1, 1.0),
    "entropy_coef": missing(OF_OTHER_METHODS, 0, 0.0),
    "use_adaptive_entropy": missing(OF_OTHER_METHODS),
    "off_policy_mask_threshold": missing(OF_OTHER_METHODS),
    "use_bias_correction_kl": missing("the KL is that of the model's own tokens", True),
    "cast_lm_head_to_fp32": idle("the loss is computed in float32"),
    "max_tool_calling_iterations": missing("answers call no tools"),
    "vllm_importance_sampling_correction": idle("`objective.max_weight` bounds the weight of a server's tokens"),
    "vllm_importance_sampling_clip_max": equal("objective.max_weight"),
    **dict.fromkeys(
        (
            *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "sapo_temperature_neg"),
            *("sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        ),
        idle("it belongs to a loss that is refused"),
    ),
    **dict.fromkeys(
        (
            *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url"),
            *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
            *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
            *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"),
            *("ds3_gather_for_generation", "use_transformers_paged", "use_transformers_continuous_batching"),
            *("transformers_continuous_batching_config",),
        ),
        idle(OF_SERVERS),
    ),
    "vllm_structured_outputs_regex": missing("answers are free text"),
    **dict.fromkeys(
        (
            "log_completions",
            "num_completions_to_print",
            "log_unique_prompts",
            "log_completions_hub_repo",
            "log_multimodal",
        ),
        idle("a page of the run shows answers with their rewards"),
    ),
    "generate_during_eval": idle("`sample` writes answers"),
    "num_processes": idle("`task.devices` is the number of devices there"),
    "accelerate_config": idle(OF_DEVICES),
    "config_file": idle(OF_DEVICES),
    "env": idle("variables of the environment are not set"),
    "trackio_space_id": idle(OF_LOGGERS),
}
DEFAULTS_OF_TRL: dict[str, Any] = {
    **DEFAULTS,
    "learning_rate": None,
    "logging_steps": 10,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_text_field": "text",
    "max_length": 1024,
    "packing": False,
    "packing_strategy": "bfd",
    "assistant_only_loss": False,
    "label_smoothing": 0.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "num_iterations": 1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "epsilon": 0.2,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "vllm_importance_sampling_clip_max": 3.0,
    "reward_weights": None,
}
COMMANDS = tuple(RATES)


def convert(draft: Draft) -> None:
    """Convert the arguments of one command."""
    draft.refuse_without_equal()
    if draft.trainer not in COMMANDS:
        draft.refuse(
            "config",
            f"commands here are {', '.join(f'trl {each}' for each in COMMANDS)}, not {draft.trainer or 'none'}",
        )
        return
    own: dict[str, dict[str, Any]] = {"learning_rate": RATES, "beta": BETAS, "num_generations": SAMPLES}
    draft.defaults = {key: values[draft.trainer] for key, values in own.items() if draft.trainer in values}
    draft.refuse_nulls()
    architecture = set_model(draft, key="model_name_or_path")
    if (revision := draft.value("model_revision")) not in (None, "main"):
        draft.set("model.revision", str(revision), of="model_revision")
    _adapter(draft, architecture)
    _dtype(draft)
    _data(draft)
    {"sft": _sft, "dpo": _dpo, "kto": _kto, "reward": _reward}.get(draft.trainer, _policy)(draft)
    set_optimizer(draft)
    set_schedule(draft)
    set_length(draft)
    if draft.trainer not in ("grpo", "rloo"):
        set_batch(draft)
    set_whole(draft, "seed", "seed", at_least=0)
    set_intervals(draft)
    if report := draft.listed("report_to"):
        set_loggers(draft, report, key="report_to")


def _dtype(draft: Draft) -> None:
    """Set the data type of the arithmetic: bfloat16, unless it is refused there."""
    if draft.flag("fp16"):
        draft.set("model.dtype", "float16", of="fp16")
    elif draft.is_given("bf16") and not draft.flag("bf16"):
        draft.set("model.dtype", "float32", of="bf16")
    else:
        draft.set("model.dtype", "bfloat16", of="bf16")


def _adapter(draft: Draft, architecture: str | None) -> None:
    is_adapted = draft.flag("use_peft")
    draft.choose("lora", "all_linear_r16" if is_adapted else "none", of="use_peft")
    if not is_adapted:
        return
    set_whole(draft, "lora_r", "lora.r")
    set_number(draft, "lora_alpha", "lora.alpha", above=0.0)
    is_said = draft.is_given("disable_dropout")
    is_off = draft.flag("disable_dropout") if is_said else draft.trainer in ("dpo", "kto", "reward")
    if is_off and draft.trainer != "sft":
        draft.set("lora.dropout", 0.0, of="disable_dropout" if is_said else "use_peft")
        if draft.is_given("lora_dropout"):
            draft.value("lora_dropout")
            draft.note("lora_dropout", "there is none: disable_dropout is on, which is TRL's default of this command")
    else:
        set_number(draft, "lora_dropout", "lora.dropout")
    modules = draft.value("lora_target_modules")
    if modules is None:
        if architecture not in OF_PEFT:
            draft.refuse("use_peft", "what PEFT adapts of this model is not known here; write --lora_target_modules")
            return
        draft.set("lora.targets", OF_PEFT[architecture].split(), of="use_peft")
    else:
        only = modules[0] if isinstance(modules, list) and len(modules) == 1 else modules
        draft.set("lora.targets", targets_of(draft, only, key="lora_target_modules"), of="lora_target_modules")
    if saved := draft.listed("lora_modules_to_save"):
        draft.set("lora.modules_to_save", saved, of="lora_modules_to_save")
    if parameters := draft.listed("lora_target_parameters"):
        draft.set("lora.target_parameters", parameters, of="lora_target_parameters")
    if draft.flag("use_rslora"):
        draft.set("lora.scaling", "alpha_over_sqrt_r", of="use_rslora")
    if draft.flag("use_dora"):
        draft.set("lora.dora", True, of="use_dora")
    if draft.flag("load_in_4bit"):
        if draft.value("bnb_4bit_quant_type") != "nf4":
            draft.refuse("bnb_4bit_quant_type", "4 bits here are nf4")
        draft.set("model.base", "nf4", of="load_in_4bit")
        draft.set("model.base_double_quant", draft.flag("use_bnb_nested_quant"), of="use_bnb_nested_quant")
    elif draft.flag("load_in_8bit"):
        draft.set("model.base", "int8", of="load_in_8bit")
        draft.note("load_in_8bit", "int8 here has a scale by output feature and rounds no inputs")


# ---- data ---------------------------------------------------------------------------------------------------


def _data(draft: Draft) -> None:
    entries = draft.listed("datasets")
    if entries:
        for entry in entries:
            if not isinstance(entry, Mapping):
                draft.refuse("datasets", "an entry is no mapping")
                continue
            for key, why in without_equal(entry, OF_SOURCES, tool=draft.tool.name):
                draft.refuse(f"datasets.{key}", why)
            name, split = (text_in(draft, entry, key, of="datasets") for key in ("name", "split"))
            if (path := path_of(draft, entry, of="datasets")) is not None:
                _source(draft, path, name, split, of="datasets")
    elif draft.value("dataset_name") is not None:
        path, name = str(draft.value("dataset_name")), draft.value("dataset_config")
        _source(draft, resolved(draft, path), name, draft.value("dataset_train_split"), of="dataset_name")
        if str(draft.value("eval_strategy")).lower() not in ("no", "false", "none"):
            test = str(draft.value("dataset_test_split"))
            for source in names_of_sources(draft):
                draft.set(f"data.{source}.eval_split", test, of="dataset_test_split")
    else:
        draft.refuse("dataset_name", "there is none")
    hold_out(draft, key="test_split_size")
    template = draft.value("chat_template_path")
    if template is not None:
        if re.search(r"\.(jinja2?|j2)$", str(template)):
            draft.set("model.chat_template_path", str(template), of="chat_template_path")
        else:
            draft.refuse("chat_template_path", "a template is a file here; another model's is model.tokenizer_path")
    if draft.value("eos_token") is not None and draft.row_format == "text":
        draft.refuse("eos_token", "a tokenizer is read as it is saved; save it with this token")
    draft.set("model.chat_format", "tokenizer", of=["chat_template_path"] if template else [])


def _source(draft: Draft, path: str, name: Any, split: Any, *, of: str) -> None:
    values: dict[str, Any] = {}
    if name:
        values["hub_config"] = str(name)
    if split not in (None, "train"):
        values["hub_split"] = str(split)
    form = draft.row_format
    if draft.trainer in ("dpo", "reward"):
        values |= {"kind": "preference", "format": form if form in ("explicit_prompt", "implicit_prompt") else "auto"}
    elif draft.trainer == "kto":
        values |= {"kind": "preference", "format": "unpaired"}
    elif draft.trainer in ("grpo", "rloo"):
        values |= {"kind": "chat", "format": "prompt_completion" if form is None else form}
    elif form is None:
        draft.refuse(
            of,
            f"whether the rows of {path} are texts or conversations is in them; write task.format="
            f"{' or '.join(SFT_FORMATS)}",
        )
    else:
        values |= {"kind": FORMAT_KINDS.get(form, "chat"), "format": form}
        field = draft.value("dataset_text_field")
        if form == "text" and field != "text":
            values["fields"] = {"text": str(field)}
    add_source(draft, path, values, of=of)


OF_SOURCES = {
    "path": equal("data.NAME.path"),
    "name": equal("data.NAME.hub_config"),
    "split": equal("data.NAME.hub_split"),
    "data_files": equal("data.NAME.path", "one file"),
    "data_dir": missing("name the file (data.NAME.path)"),
    "columns": missing("fields are those of the format, by data.NAME.fields"),
    "fraction": missing("weights of sources mix them (data.NAME.weight)"),
}
"""Keys of an entry of `datasets`."""
SFT_FORMATS = ("text", "messages", "prompt_completion")
"""Formats of rows that `trl sft` tells apart by their columns."""


# ---- commands -----------------------------------------------------------------------------------------------


def _sft(draft: Draft) -> None:
    draft.groups["objective"] = "next_token"
    if draft.value("loss_type") not in (None, "nll"):
        draft.refuse("loss_type", "the loss of a token is -log p")
    completion, assistant = draft.flag("completion_only_loss"), draft.flag("assistant_only_loss")
    form = draft.row_format
    if form == "messages":
        learn, of = ("answers", "assistant_only_loss") if assistant else ("all", "assistant_only_loss")
    else:
        is_all = form == "prompt_completion" and draft.is_given("completion_only_loss") and not completion
        learn, of = ("all" if is_all else "answers"), "completion_only_loss"
    draft.set(f"{MAIN}.learn", learn, of=of)
    length = "max_seq_length" if draft.is_given("max_seq_length") else "max_length"
    set_row_length(draft, key=length, is_paired=False)
    is_packed, strategy = draft.flag("packing"), str(draft.value("packing_strategy"))
    draft.set("prepare.packing", "best_fit" if is_packed else "pad", of="packing")
    if is_packed and strategy not in ("bfd", "bfd_split", "bfd-requeue"):
        draft.refuse("packing_strategy", "documents are not cut and joined to full rows here; use bfd or bfd_split")
    is_split = is_packed and strategy != "bfd"
    draft.set(
        "prepare.long_documents", "split" if is_split else "truncate", of="packing_strategy" if is_packed else length
    )
    if form != "text" and not is_split:
        draft.note(length, "a conversation is cut behind its last whole answer, and not at the last token of a row")


def _pairs_of_rows(draft: Draft) -> None:
    draft.set("prepare.packing", "pad", of="max_length")
    draft.set("prepare.long_documents", "truncate", of="max_length")
    set_row_length(draft, key="max_length", is_paired=draft.trainer != "kto")
    draft.note("max_length", "what is too long loses the beginning of its prompt, and there the end of its answer")


def _dpo(draft: Draft) -> None:
    losses = draft.listed("loss_type") or ["sigmoid"]
    weights = _weights(draft, "loss_weights", count=len(losses))
    main = str(losses[0])
    draft.choose("objective", "ipo" if main == "ipo" else "dpo", of="loss_type")
    set_number(draft, "beta", "objective.beta", above=0.0)
    if main not in ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"):
        draft.refuse(
            "loss_type", "losses of pairs here are sigmoid, hinge, ipo, robust and sigmoid_norm, and sft beside one"
        )
        return
    draft.set("objective.loss", main, of="loss_type")
    if len(losses) == 2 and losses[1] == "sft" and weights[0] == 1.0:
        draft.set("objective.sft_weight", weights[1], of=("loss_type", "loss_weights"))
    elif len(losses) > 1:
        draft.refuse("loss_type", "a pair has one loss here, of weight 1, and sft beside it")
    set_number(draft, "label_smoothing", "objective.label_smoothing")
    _pairs_of_rows(draft)


def _kto(draft: Draft) -> None:
    draft.choose("objective", "kto", of="loss_type")
    if draft.value("loss_type") not in (None, "kto"):
        draft.refuse("loss_type", "the loss of single answers is kto's")
    set_number(draft, "beta", "objective.beta", above=0.0)
    set_number(draft, "desirable_weight", "objective.desirable_weight", above=0.0)
    set_number(draft, "undesirable_weight", "objective.undesirable_weight", above=0.0)
    _pairs_of_rows(draft)


def _reward(draft: Draft) -> None:
    draft.groups["objective"] = "reward"
    if (centre := draft.number("center_rewards_coefficient")) is not None:
        draft.set("objective.center_rewards_coefficient", centre, of="center_rewards_coefficient")
    _pairs_of_rows(draft)


def _weights(draft: Draft, key: str, *, count: int) -> list[float]:
    """Return the weights of several losses or rewards: 1 where none are given, and where they are refused."""
    value = draft.value(key)
    given = value if isinstance(value, list) else [] if value is None else [value]
    found = [number for each in given if (number := as_number(each)) is not None]
    if value is not None and len(found) != count:
        draft.refuse(key, f"{len(found)} numbers for {count}; each has a weight")
    return found if len(found) == count else [1.0] * count


LOSSES = {"grpo": "grpo", "bnpo": "bnpo", "dr_grpo": "dr_grpo", "dapo": "dapo"}
SCALES = {"true": "group", "group": "group", "batch": "batch", "false": "none", "none": "none"}
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Rewards of TRL that its command names without a module."""


def _policy(draft: Draft) -> None:
    command = draft.trainer
    draft.groups["objective"] = command
    set_whole(draft, "num_generations", "rollout.samples")
    if command == "grpo":
        loss = str(draft.value("loss_type") or "dapo")
        if loss not in LOSSES:
            draft.refuse("loss_type", f"losses of answers here are {', '.join(LOSSES)}")
        draft.set("objective.loss", LOSSES.get(loss, "dapo"), of="loss_type")
        scale = SCALES.get(str(draft.value("scale_rewards")).lower())
        if scale is None:
            draft.refuse("scale_rewards", "rewards are scaled by group, batch or none")
        draft.set("objective.scale", scale or "group", of="scale_rewards")
        draft.set("objective.ratio", str(draft.value("importance_sampling_level")), of="importance_sampling_level")
    elif draft.flag("normalize_advantages"):
        draft.set("objective.scale", "batch", of="normalize_advantages")
    set_number(draft, "beta", "objective.beta")
    set_number(draft, "epsilon", "objective.epsilon")
    if (high := draft.number("epsilon_high")) is not None:
        draft.set("objective.epsilon_high", high, of="epsilon_high")
    set_number(draft, "vllm_importance_sampling_clip_max", "objective.max_weight", above=0.0)
    set_number(draft, "temperature", "rollout.temperature", above=0.0)
    set_whole(draft, "max_completion_length", "rollout.max_new_tokens")
    set_whole(draft, "max_prompt_length", "rollout.max_prompt_tokens")
    if draft.flag("mask_truncated_completions"):
        draft.set("rollout.masks_cut", True, of="mask_truncated_completions")
    if draft.number("num_iterations") != 1:
        draft.refuse("num_iterations", "a row is in one step")
    _rollout(draft)
    _rewards(draft)


COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")


def _rollout(draft: Draft) -> None:
    """Set prompts and updates of an iteration."""
    counts = {key: draft.number(key) for key in (*COUNTS, "num_generations")}
    odd = [key for key, value in counts.items() if value is not None and (value < 1 or value != int(value))]
    for key in odd:
        draft.refuse(key, "it is no whole number from 1")
    micro, accumulation, more, answers, samples = (None if each is None else int(each) for each in counts.values())
    if odd or micro is None or accumulation is None or samples is None:
        return
    step = micro * accumulation * draft.devices
    answers = answers or micro * (more or accumulation) * draft.devices
    if answers % samples or answers % step:
        draft.refuse(
            "num_generations",
            f"the {answers} answers of an iteration are no multiple of {samples} answers to a prompt, or of the {step} "
            "of a step",
        )
        return
    of = [key for key in COUNTS if draft.is_given(key)]
    draft.set("rollout.prompts", answers // samples, of=of)
    draft.set("rollout.updates", answers // step, of=of)


def _rewards(draft: Draft) -> None:
    names = draft.listed("reward_funcs")
    weights = _weights(draft, "reward_weights", count=len(names))
    if not names:
        draft.refuse("reward_funcs", "there is none, and answers are learnt by what they are worth")
        return
    for name, weight in zip(names, weights, strict=True):
        full = f"trl.rewards.{name}" if name in OF_TRL else str(name)
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", full):
            draft.refuse("reward_funcs", f"{name} is no function of a module; write package.module.name")
            continue
        if name in OF_TRL and importlib.util.find_spec("trl") is None:
            draft.note("reward_funcs", f"{full} needs TRL, which is not installed here")
        short = full.rpartition(".")[2]
        if f"rollout.rewards.{short}.function" in draft.settings:
            draft.refuse("reward_funcs", f"two are called {short}, and rollout.rewards has one of a name")
        draft.set(f"rollout.rewards.{short}.function", full, of="reward_funcs")
        draft.set(
            f"rollout.rewards.{short}.weight",
            weight,
            of="reward_weights" if draft.is_given("reward_weights") else "reward_funcs",
        )
        draft.set(f"rollout.rewards.{short}.gives_messages", True, of="reward_funcs")


TRL = Tool("TRL", KEYS_OF_TRL, DEFAULTS_OF_TRL, convert)
