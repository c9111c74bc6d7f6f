"""Keys of LLaMA-Factory's config, and their conversion (hiyouga/LLaMA-Factory, its classic arguments)."""

import math
from collections.abc import Mapping
from typing import Any

from tpu_experiments.tasks.convert.sources import (
    FORMAT_KINDS,
    add_source,
    hold_out,
    names_of_sources,
    resolved,
)
from tpu_experiments.tasks.convert.table import Draft, Key, Tool, as_truth, equal, idle, missing, without_equal
from tpu_experiments.tasks.convert.training_settings import (
    DEFAULTS,
    KEYS,
    MAIN,
    OF_ADDED,
    OF_DEVICES,
    OF_EMBEDDINGS,
    OF_LOGGERS,
    OF_OTHER_METHODS,
    PICTURES,
    set_batch,
    set_dtype,
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

OF_ANSWERS = "`task=generate` and `task=serve` have their own"
OF_EXPORT = "`task=export` writes a model"
KEYS_OF_LLAMAFACTORY: dict[str, Key] = {
    **KEYS,
    "model_name_or_path": equal(
        "model, model.path", "a model of `conf/model` where its file has the same architecture"
    ),
    "model_revision": equal("model.revision"),
    "adapter_name_or_path": equal("start.run", "one adapter, trained on"),
    "adapter_folder": missing("one adapter is trained on, by its own folder (`start.run`)"),
    "create_new_adapter": missing("one adapter is trained on; merge the other with `task=export`"),
    "cache_dir": idle("the Hub's cache is in HF_HOME"),
    "use_fast_tokenizer": idle("tokenizers are fast ones"),
    "resize_vocab": missing(OF_ADDED),
    "split_special_tokens": missing("marks of the template are tokens, and those in a text are text"),
    "add_tokens": missing(OF_ADDED),
    "add_special_tokens": missing(OF_ADDED),
    "new_special_tokens_config": missing(OF_ADDED),
    "init_special_tokens": idle("it belongs to new tokens"),
    "low_cpu_mem_usage": idle("weights are read shard by shard"),
    "rope_scaling": missing("positions are those of the checkpoint's config (`model.arch` of a model from scratch)"),
    "flash_attn": idle("`model.attention`"),
    "shift_attn": missing(OF_OTHER_METHODS),
    "mixture_of_depths": missing(OF_OTHER_METHODS),
    "use_unsloth": idle("kernels change speed alone"),
    "use_unsloth_gc": idle("`model.remat` says what is kept for the backward pass"),
    "enable_liger_kernel": idle("the loss is computed in chunks, `trainer.loss_chunk_tokens`"),
    "moe_aux_loss_coef": missing("experts have no loss of their own"),
    "disable_gradient_checkpointing": idle("`model.remat` says what is kept for the backward pass"),
    "use_reentrant_gc": idle("`model.remat` says what is kept for the backward pass"),
    "upcast_layernorm": idle("norms are computed in float32"),
    "upcast_lmhead_output": idle("the loss is computed in float32"),
    "train_from_scratch": equal("model.init"),
    "use_v1_kernels": idle("kernels change speed alone"),
    "use_kv_cache": idle(OF_ANSWERS),
    "print_param_status": idle("the log counts the parameters"),
    **dict.fromkeys(
        ("hf_hub_token", "ms_hub_token", "om_hub_token"), idle("the Hub's token is in the environment (HF_TOKEN)")
    ),
    **dict.fromkeys(
        (
            *("infer_backend", "infer_dtype", "offload_folder", "vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager"),
            *("do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens"),
            *("repetition_penalty", "length_penalty", "skip_special_tokens", "eval_num_beams", "generation_max_length"),
            *("generation_num_beams", "use_kt", "kt_config", "kt_cpu_activation", "kt_weight_path"),
            *("kt_non_expert_weight_path", "kt_optimize_rule", "cpu_infer", "chunk_size", "mode"),
        ),
        idle(OF_ANSWERS),
    ),
    **dict.fromkeys(
        (
            *("export_dir", "export_size", "export_device", "export_legacy_format", "export_hub_model_id"),
            *("export_quantization_bit", "export_quantization_dataset", "export_hf_on_finish"),
        ),
        idle(OF_EXPORT),
    ),
    "quantization_bit": equal("model.base", "4 is nf4, 8 is int8 by output feature (LLM.int8 has outliers apart)"),
    "quantization_method": equal("model.base", "bnb"),
    "quantization_type": equal("model.base", "nf4"),
    "double_quantization": equal("model.base_double_quant"),
    "quantization_device_map": idle(OF_DEVICES),
    **dict.fromkeys(
        (
            *("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps"),
            *("video_maxlen", "media_dir", "image_do_pan_and_scan", "use_audio_in_video", "audio_sampling_rate"),
            *("freeze_vision_tower", "freeze_multi_modal_projector", "crop_to_patches"),
        ),
        idle("only the decoder is trained, and rows with pictures or sound are refused"),
    ),
    "freeze_language_model": missing("only the decoder is trained"),
    "stage": equal("objective, data.NAME.kind", "pt, sft, rm, dpo, kto"),
    "finetuning_type": equal("lora", "lora, full"),
    "lora_rank": equal("lora.r, lora.alpha"),
    "lora_alpha": equal("lora.alpha", "twice the rank where it is not given"),
    "lora_dropout": equal("lora.dropout"),
    "lora_target": equal("lora.targets", "`all` is all-linear"),
    "additional_target": equal("lora.modules_to_save"),
    "loraplus_lr_ratio": equal("optim.b_lr_ratio"),
    "loraplus_lr_embedding": missing(OF_EMBEDDINGS),
    "use_rslora": equal("lora.scaling"),
    "use_dora": equal("lora.dora"),
    "pissa_init": equal("lora.init", "pissa, by a whole decomposition"),
    "pissa_iter": idle("the decomposition is exact"),
    "pissa_convert": idle("`task=export` writes an adapter of the base as it is"),
    "freeze_trainable_layers": missing(f"name the layers: `{MAIN}.trainable=['*layers.3?.*']` with `lora=none`"),
    "freeze_trainable_modules": missing(f"name the modules: `{MAIN}.trainable=['*.mlp.*']` with `lora=none`"),
    "freeze_extra_modules": missing(f"name the modules: `{MAIN}.trainable=['*.mlp.*']` with `lora=none`"),
    "pure_bf16": equal("model.dtype", "pure there; updates here are float32"),
    "pref_beta": equal("objective.beta"),
    "pref_loss": equal("objective, objective.loss", "sigmoid, hinge, ipo, orpo, simpo"),
    "pref_ftx": equal("objective.sft_weight", "a mean over tokens, which is there a mean over answers"),
    "pref_bco_weight": missing(OF_OTHER_METHODS, 0, 0.0),
    "dpo_label_smoothing": equal("objective.label_smoothing"),
    "simpo_gamma": equal("objective.gamma_beta_ratio", "gamma / beta"),
    "kto_chosen_weight": equal("objective.desirable_weight"),
    "kto_rejected_weight": equal("objective.undesirable_weight"),
    "ld_alpha": missing(OF_OTHER_METHODS),
    "ref_model": missing("the reference is the model as it starts"),
    "ref_model_adapters": missing("the reference is the model as it starts"),
    "ref_model_quantization_bit": missing("the reference is the model as it starts"),
    **dict.fromkeys(
        (
            *("reward_model", "reward_model_adapters", "reward_model_type", "reward_model_quantization_bit"),
            *("ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards"),
        ),
        missing("PPO is not trained here; objective=grpo and rloo learn from rewards"),
    ),
    **dict.fromkeys(
        (
            *(
                "use_galore",
                "galore_target",
                "galore_rank",
                "galore_update_interval",
                "galore_scale",
                "galore_layerwise",
            ),
            *("galore_proj_type", "use_apollo", "apollo_target", "apollo_rank", "apollo_scale", "apollo_layerwise"),
            *("apollo_scale_type", "apollo_update_interval", "apollo_proj", "use_badam", "badam_mode"),
            *("badam_switch_mode", "badam_switch_interval", "badam_verbose", "badam_update_ratio", "use_adam_mini"),
            *("use_llama_pro", "use_dft_loss", "use_asft_loss", "asft_alpha", "use_eaft_loss", "eaft_alpha"),
            *("oft_rank", "oft_block_size", "oft_target", "module_dropout", "fp8", "fp8_backend", "use_mca"),
            *("use_megatron_bridge", "use_hyper_parallel", "use_muon"),
        ),
        missing(OF_OTHER_METHODS),
    ),
    "fp8_enable_fsdp_float8_all_gather": idle("it belongs to `fp8`"),
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
            *("context_parallel_size", "sequence_parallel", "use_distributed_optimizer", "overlap_param_gather"),
            *("overlap_grad_reduce", "bias_activation_fusion", "apply_rope_fusion", "moe_grouped_gemm"),
            *("moe_token_dispatcher_type", "recompute_granularity", "mixed_precision", "ray_num_workers"),
            *("ray_run_name", "ray_storage_path", "ray_storage_filesystem", "placement_strategy", "ray_init_kwargs"),
            *("resources_per_worker", "master_addr", "master_port"),
        ),
        idle(OF_DEVICES),
    ),
    "use_packed_sequences": idle("`packing` says it"),
    "compute_accuracy": idle("held-out rows have loss, perplexity and accuracy"),
    "disable_shuffling": missing("rows are in a random order"),
    "early_stopping_steps": equal(f"{MAIN}.exit.patience, {MAIN}.exit.ends_with"),
    "plot_loss": idle("`task=report` draws the losses"),
    "include_effective_tokens_per_second": idle("`perf/` has the tokens per second"),
    **dict.fromkeys(
        (
            *("use_swanlab", "swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode"),
            *("swanlab_api_key", "swanlab_logdir", "trackio_space_id"),
        ),
        idle(OF_LOGGERS),
    ),
    "template": equal("model.chat_format", "of the same text; see the table of templates"),
    "dataset": equal("data", "by their descriptions in dataset_info.json; see the table of descriptions"),
    "eval_dataset": equal("data.NAME.eval_path", "one, beside one of `dataset`"),
    "dataset_dir": equal("data", "the folder of dataset_info.json"),
    "cutoff_len": equal("trainer.seq_len", "of a pair the row has both answers, and twice the tokens"),
    "train_on_prompt": equal(f"{MAIN}.learn"),
    "mask_history": missing("all answers are learnt; mark those of earlier turns in the rows (`train: false`)"),
    "streaming": idle("data is prepared once"),
    "buffer_size": idle("rows are in a random order of all"),
    "mix_strategy": missing("weights of sources mix them (data.NAME.weight)", "concat"),
    "interleave_probs": missing("weights of sources mix them (data.NAME.weight)"),
    "overwrite_cache": idle("prepared data is found by the content of its files and settings"),
    "preprocessing_batch_size": idle("data is prepared in blocks"),
    "preprocessing_num_workers": idle("`prepare.workers`"),
    "max_samples": equal("data.NAME.max_documents", "the first rows of each source"),
    "ignore_pad_token_for_loss": missing("padding is never learnt", True),
    "val_size": equal("data.NAME.eval_fraction", "a share below 1"),
    "eval_on_each_dataset": idle("sources are always evaluated apart too"),
    "packing": equal("prepare.packing", "best_fit, whose documents do not see each other, as with neat_packing"),
    "neat_packing": equal("prepare.packing"),
    "tool_format": missing("tools are written by the chat template"),
    "default_system": missing("a system text is that of the rows or of the template"),
    "enable_thinking": equal("model.chat_format", "true, of qwen3: an empty block of reasoning is learnt"),
    "preserve_thinking": idle("answers of earlier turns keep their reasoning"),
    "tokenized_path": idle("prepared data is below `prepare.folder`"),
    "data_shared_file_system": idle("prepared data is below `prepare.folder`"),
}
TEMPLATES = {
    "llama3": "llama3",
    "qwen": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_nothink": "chatml",
    "chatml": "chatml",
    "gemma": "gemma3",
    "gemma2": "gemma3",
    "gemma3": "gemma3",
    "mistral": "mistral_v3",
}
"""Templates there, and `model.chat_format` of the same text."""
LEARN_A_LINE_BREAK = ("qwen2_5", "qwen3", "chatml", "gemma3")
"""Formats whose answers end with a line break that is learnt there and not here."""
ROLES_THERE = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call", "function"),
    "system_tag": ("system",),
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
}
"""Names of roles and fields of turns that are read here too, by LLaMA-Factory's tags."""
OF_DESCRIPTIONS: dict[str, Key] = {
    "file_name": equal("data.NAME.path"),
    "hf_hub_url": equal("data.NAME.path"),
    "cloud_file_name": equal("data.NAME.path"),
    "ms_hub_url": missing("data sets are read from Hugging Face's Hub"),
    "om_hub_url": missing("data sets are read from Hugging Face's Hub"),
    "script_url": missing("code of a data set does not run"),
    "formatting": equal("data.NAME.format", "alpaca: instruction; sharegpt and openai: messages"),
    "ranking": equal("data.NAME.kind", "preference"),
    "subset": equal("data.NAME.hub_config"),
    "split": equal("data.NAME.hub_split"),
    "folder": missing("name the files of the folder (data.NAME.path)"),
    "num_samples": equal("data.NAME.max_documents"),
    "columns": equal("data.NAME.fields"),
    "tags": equal("", "names of roles that are read here too"),
}
"""Keys of a data set's description in dataset_info.json."""
TEXTS_OF_DESCRIPTIONS = ("file_name", "hf_hub_url", "cloud_file_name", "subset", "split", "formatting")
DEFAULTS_OF_LLAMAFACTORY: dict[str, Any] = {
    **DEFAULTS,
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_target": "all",
    "cutoff_len": 2048,
    "dataset_dir": "data",
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "pref_ftx": 0.0,
    "simpo_gamma": 0.5,
    "kto_chosen_weight": 1.0,
    "kto_rejected_weight": 1.0,
    "val_size": 0.0,
    "quantization_method": "bnb",
    "double_quantization": True,
}


def convert(draft: Draft) -> None:
    """Convert LLaMA-Factory's keys."""
    draft.refuse_without_equal()
    draft.refuse_nulls()
    if not draft.is_given("dataset") and as_truth(draft.given.get("do_train")) is not True:
        draft.refuse(
            "dataset",
            "it names none, so that it is no config of a training; task=generate, serve and export have their own",
        )
    set_model(draft, key="model_name_or_path")
    if (revision := draft.value("model_revision")) not in (None, "main"):
        draft.set("model.revision", str(revision), of="model_revision")
    if draft.flag("train_from_scratch"):
        draft.set("model.init", "random", of="train_from_scratch")
    _adapter(draft)
    if draft.flag("pure_bf16"):
        draft.set("model.dtype", "bfloat16", of="pure_bf16")
        draft.note("pure_bf16", "parameters that are trained, and their moments, are float32 here")
    else:
        set_dtype(draft, default="float32")
    _objective(draft)
    _data(draft)
    set_optimizer(draft)
    set_schedule(draft)
    set_length(draft)
    set_batch(draft)
    set_whole(draft, "seed", "seed", at_least=0)
    set_intervals(draft)
    if report := draft.listed("report_to"):
        set_loggers(draft, report, key="report_to")
    if patience := draft.number("early_stopping_steps"):
        draft.set(f"{MAIN}.exit.patience", int(patience), of="early_stopping_steps")
        draft.set(f"{MAIN}.exit.ends_with", "best", of="early_stopping_steps")


def _adapter(draft: Draft) -> None:
    kind = str(draft.value("finetuning_type"))
    draft.choose("lora", "none" if kind == "full" else "all_linear_r16", of="finetuning_type")
    if kind not in ("lora", "full"):
        draft.refuse("finetuning_type", f"it is lora or full here; of layers: {MAIN}.trainable with lora=none")
    if kind != "lora":
        return
    set_whole(draft, "lora_rank", "lora.r")
    alpha = draft.number("lora_alpha")
    rank = draft.number("lora_rank") or 8
    draft.set("lora.alpha", alpha or rank * 2, of="lora_alpha" if alpha else "lora_rank")
    set_number(draft, "lora_dropout", "lora.dropout")
    draft.set("lora.targets", targets_of(draft, draft.value("lora_target"), key="lora_target"), of="lora_target")
    if saved := draft.listed("additional_target"):
        names = [name.strip() for each in saved for name in str(each).split(",")]
        draft.set("lora.modules_to_save", names, of="additional_target")
    for there, here, value in (
        ("use_rslora", "lora.scaling", "alpha_over_sqrt_r"),
        ("use_dora", "lora.dora", True),
        ("pissa_init", "lora.init", "pissa"),
    ):
        if draft.flag(there):
            draft.set(here, value, of=there)
    set_number(draft, "loraplus_lr_ratio", "optim.b_lr_ratio", above=0.0)
    if (start := draft.value("adapter_name_or_path")) is not None:
        if "," in str(start):
            draft.refuse("adapter_name_or_path", "one adapter is trained on; merge the others with task=export")
        draft.set("start.run", str(start), of="adapter_name_or_path")
    _base(draft)


def _base(draft: Draft) -> None:
    bits = draft.number("quantization_bit")
    if bits is None:
        return
    if str(draft.value("quantization_method")) not in ("bnb", "bitsandbytes"):
        draft.refuse("quantization_method", "a base is held in bitsandbytes' nf4, or in int8")
    if bits == 4:
        if draft.value("quantization_type") not in (None, "nf4"):
            draft.refuse("quantization_type", "4 bits here are nf4")
        draft.set("model.base", "nf4", of="quantization_bit")
        draft.set("model.base_double_quant", draft.flag("double_quantization"), of="double_quantization")
    elif bits == 8:
        draft.set("model.base", "int8", of="quantization_bit")
        draft.note("quantization_bit", "int8 here has a scale by output feature and rounds no inputs")
    else:
        draft.refuse("quantization_bit", "a base is held in 4 or 8 bits")


PREFERENCES = {"sigmoid": "dpo", "hinge": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def _objective(draft: Draft) -> None:
    stage = str(draft.value("stage"))
    if stage in ("pt", "sft"):
        draft.choose("objective", "next_token", of="stage")
    elif stage == "rm":
        draft.choose("objective", "reward", of="stage")
    elif stage == "kto":
        draft.choose("objective", "kto", of="stage")
        set_number(draft, "pref_beta", "objective.beta", above=0.0)
        set_number(draft, "kto_chosen_weight", "objective.desirable_weight", above=0.0)
        set_number(draft, "kto_rejected_weight", "objective.undesirable_weight", above=0.0)
    elif stage == "dpo":
        _pairs(draft)
    else:
        draft.refuse("stage", "stages here are pt, sft, rm, dpo and kto; objective=grpo and rloo learn from rewards")


def _pairs(draft: Draft) -> None:
    loss = str(draft.value("pref_loss"))
    if loss not in PREFERENCES:
        draft.refuse("pref_loss", f"losses of pairs here are {', '.join(PREFERENCES)}")
        return
    draft.choose("objective", PREFERENCES[loss], of=("pref_loss", "stage"))
    if loss == "hinge":
        draft.set("objective.loss", "hinge", of="pref_loss")
    set_number(draft, "pref_beta", "objective.beta", above=0.0)
    if (weight := draft.number("pref_ftx")) and loss not in ("orpo", "simpo"):
        draft.set("objective.sft_weight", weight, of="pref_ftx")
        draft.note("pref_ftx", "a mean over all tokens of chosen answers here, over answers' means there")
    if (smoothing := draft.number("dpo_label_smoothing")) is not None:
        draft.set("objective.label_smoothing", smoothing, of="dpo_label_smoothing")
    if loss == "simpo":
        gamma, beta = draft.number("simpo_gamma") or 0.0, draft.number("pref_beta") or 0.1
        draft.set("objective.gamma_beta_ratio", gamma / beta, of=("simpo_gamma", "pref_beta"))


# ---- data ---------------------------------------------------------------------------------------------------


def _data(draft: Draft) -> None:
    folder = str(draft.value("dataset_dir"))
    for name in [name.strip() for each in draft.listed("dataset") for name in str(each).split(",")]:
        if name:
            _source(draft, name, folder=folder)
    _template(draft)
    for name in names_of_sources(draft):
        key = f"data.{name}.max_documents"
        known = draft.settings.get(key, math.inf)
        set_whole(draft, "max_samples", key)
        if known < draft.settings.get(key, 0):
            draft.set(key, known, of="max_samples")
    hold_out(draft, key="val_size")
    _held_out(draft, folder=folder)
    _rows(draft)
    draft.set(f"{MAIN}.learn", "all" if draft.flag("train_on_prompt") else "answers", of="train_on_prompt")


def _held_out(draft: Draft, *, folder: str) -> None:
    name = draft.value("eval_dataset")
    if name is None:
        return
    sources, found = names_of_sources(draft), (draft.dataset_info or {}).get(str(name))
    if len(sources) != 1 or not isinstance(found, Mapping) or not isinstance(found.get("file_name"), str):
        draft.refuse("eval_dataset", "one file of held-out rows belongs to one source; write data.NAME.eval_path")
        return
    place = resolved(draft, f"{folder}/{found['file_name']}")
    draft.set(f"data.{sources[0]}.eval_path", place, of="eval_dataset")


def _source(draft: Draft, name: str, *, folder: str) -> None:
    info = draft.dataset_info
    if info is None or name not in info:
        where = "task.dataset_info names none, and dataset_dir has none here" if info is None else "it is not in it"
        if draft.row_format is not None and info is None:
            kind = FORMAT_KINDS.get(draft.row_format, "chat")
            add_source(
                draft, resolved(draft, f"{folder}/{name}"), {"kind": kind, "format": draft.row_format}, of="dataset"
            )
            return
        draft.refuse("dataset", f"{name} is described in dataset_info.json ({where}); write task.dataset_info=FILE")
        return
    found = info[name]
    if not isinstance(found, Mapping) or not all(
        isinstance(found.get(key) or {}, Mapping) for key in ("columns", "tags")
    ):
        draft.refuse("dataset", f"{name}: its description is no mapping")
        return
    for key, why in without_equal(found, OF_DESCRIPTIONS, tool=draft.tool.name):
        if key not in ("ms_hub_url", "om_hub_url") or not {"hf_hub_url", "file_name"} & set(found):
            draft.refuse("dataset", f"{name}: {key}: {why}")
    odd = [key for key in TEXTS_OF_DESCRIPTIONS if not isinstance(found.get(key) or "", str)]
    if odd:
        draft.refuse("dataset", f"{name}: {', '.join(odd)}: it is no text")
        return
    path = found.get("hf_hub_url") or found.get("cloud_file_name")
    path = path or resolved(draft, f"{folder}/{found.get('file_name') or name}")
    values: dict[str, Any] = {"hub_config": found["subset"]} if found.get("subset") else {}
    if (rows := found.get("num_samples")) is not None:
        values["max_documents"] = rows
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            draft.refuse("dataset", f"{name}: num_samples: {rows!r} is no whole number from 1")
            return
    if found.get("split") not in (None, "", "train"):
        values["hub_split"] = found["split"]
    values |= _rows_of(draft, name, found)
    add_source(draft, path, values, of="dataset")


def _rows_of(draft: Draft, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return kind, format and fields of a description."""
    columns, tags = found.get("columns") or {}, found.get("tags") or {}
    stage, form = str(draft.value("stage")), found.get("formatting") or "alpaca"
    if odd := [there for there, column in columns.items() if not isinstance(column, str | None)]:
        draft.refuse("dataset", f"{name}: columns: {', '.join(map(str, odd))}: it is no name")
        return {}
    unread = [each for each in ("images", "videos", "audios") if columns.get(each)]
    if unread:
        draft.refuse("dataset", f"{name}: {PICTURES} ({', '.join(unread)})")
    for tag, value in tags.items():
        if value not in ROLES_THERE.get(tag, ()):
            draft.refuse("dataset", f"{name}: {tag} {value} is not read as that here; rename it in the file")
    if stage == "pt":
        field = columns.get("prompt", "instruction")
        return {"kind": "text", "format": "text", **({} if field == "text" else {"fields": {"text": field}})}
    names = {"system": "system", "tools": "tools", "history": "history"}
    fields = {here: columns[there] for there, here in names.items() if columns.get(there) not in (None, here)}
    if stage in ("dpo", "rm", "kto"):
        fields |= _fields_of_pairs(draft, name, columns, is_turns=form in TURNS)
        kind = {"kind": "preference", "format": "unpaired" if stage == "kto" else "explicit_prompt"}
        return {**kind, **({"fields": fields} if fields else {})}
    if form in TURNS:
        messages = columns.get("messages", "conversations")
        fields |= {} if messages in ("messages", "conversations") else {"messages": str(messages)}
        return {"kind": "chat", "format": "messages", **({"fields": fields} if fields else {})}
    for there, here in (("prompt", "instruction"), ("query", "input"), ("response", "output")):
        # Where a description has columns, those that it does not name are not there.
        column = columns.get(there) if columns else here
        if column is None and here != "input":
            draft.refuse("dataset", f"{name}: its columns name no {there}")
        elif column != here:
            fields[here] = str(column or "")
    return {
        **{"kind": "chat", "format": "instruction", "asked_as": "{instruction}\n{input}"},
        **({"fields": fields} if fields else {}),
    }


TURNS = ("sharegpt", "openai")
"""Formats whose prompts are turns."""


def _fields_of_pairs(draft: Draft, name: str, columns: Mapping[str, Any], *, is_turns: bool) -> dict[str, str]:
    """Return the fields of two answers, or of one with its label, where the columns call them otherwise."""
    if not is_turns and (columns.get("query") if columns else "input"):
        draft.refuse(
            "dataset",
            f"{name}: a prompt of two fields, instruction and input, is not read in pairs; write it into one, or as "
            "turns",
        )
    own = columns or ({"messages": "conversations"} if is_turns else {"prompt": "instruction", "response": "output"})
    wanted = {"messages" if is_turns else "prompt": "prompt"}
    if str(draft.value("stage")) == "kto":
        wanted |= {"kto_tag": "label"} if is_turns else {"response": "completion", "kto_tag": "label"}
    else:
        wanted |= {"chosen": "chosen", "rejected": "rejected"}
    lacking = [there for there in wanted if not own.get(there)]
    if lacking:
        draft.refuse("dataset", f"{name}: its columns name no {', '.join(lacking)}")
    return {here: own[there] for there, here in wanted.items() if there not in lacking and own[there] != here}


def _template(draft: Draft) -> None:
    name = draft.value("template")
    if str(draft.value("stage")) == "pt":
        return
    if name is None:
        draft.set("model.chat_format", "tokenizer", of="template")
        draft.note("template", "none is given: the tokenizer's own")
        return
    ours = TEMPLATES.get(str(name))
    if ours is None:
        same = ", ".join(TEMPLATES)
        draft.refuse(
            "template",
            f"of these names there is the same text here: {same}; another is a file of model.chat_template_path=",
        )
        return
    if draft.is_given("enable_thinking") and not draft.flag("enable_thinking") and ours == "qwen3":
        draft.refuse(
            "enable_thinking", "an empty block of reasoning is part of the answer here; use template: qwen3_nothink"
        )
    draft.set("model.chat_format", ours, of="template")
    if ours in LEARN_A_LINE_BREAK:
        draft.note("template", "the line break behind the mark that ends an answer is learnt there, and not here")
    if ours == "mistral_v3":
        draft.note("template", "a system text is before the first question there, before the last here")


def _rows(draft: Draft) -> None:
    stage = str(draft.value("stage"))
    set_row_length(draft, key="cutoff_len", is_paired=stage in ("dpo", "rm"))
    neat = draft.flag("neat_packing")
    is_packed = neat or (draft.flag("packing") if draft.is_given("packing") else stage == "pt")
    key = "neat_packing" if neat else "packing" if draft.is_given("packing") else "cutoff_len"
    draft.set("prepare.packing", "best_fit" if is_packed else "pad", of=key)
    if is_packed and not neat:
        draft.note(key, "documents of a row do not see each other here, as with neat_packing: true")
    if stage == "pt":
        draft.set("prepare.long_documents", "split" if is_packed else "truncate", of="cutoff_len")
        draft.note("stage", "a text begins with BOS here, where the tokenizer has one")
    else:
        draft.set("prepare.long_documents", "drop" if is_packed else "truncate", of="cutoff_len")
        if not is_packed:
            draft.note("cutoff_len", "a conversation is cut behind its last whole answer; there both parts are cut")


LLAMAFACTORY = Tool("LLaMA-Factory", KEYS_OF_LLAMAFACTORY, DEFAULTS_OF_LLAMAFACTORY, convert)
