"""Keys of axolotl's config, and their conversion (axolotl-ai-cloud/axolotl, 0.13)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_experiments.data.reading.names import ROLES, is_reasoning
from tpu_experiments.tasks.convert.sources import (
    FORMAT_KINDS,
    SLICE,
    add_source,
    hold_out,
    names_of_sources,
    path_of,
    text_in,
)
from tpu_experiments.tasks.convert.table import Draft, Key, Tool, as_truth, equal, idle, missing, without_equal
from tpu_experiments.tasks.convert.training_settings import (
    BATCH,
    DEFAULTS,
    KEYS,
    MAIN,
    OF_ADDED,
    OF_DEVICES,
    OF_EMBEDDINGS,
    OF_LOGGERS,
    OF_OTHER_METHODS,
    OF_TOKENIZER,
    PICTURES,
    globs_of,
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

OF_KERNELS = "kernels change speed alone; the loss is computed in chunks, attention by `model.attention`"
MIXED_IN = (
    *("cut_cross_entropy.CutCrossEntropyPlugin", "liger.LigerPlugin", "kernels.KernelsPlugin"),
    *("expert_parallel.ExpertParallelPlugin", "swanlab.SwanLabPlugin", "spectrum.SpectrumPlugin"),
)
"""Plugins that change speed or logs alone."""
SHARED = {
    key: KEYS[key]
    for key in (
        *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "warmup_ratio"),
        *("warmup_steps", "max_steps", "gradient_accumulation_steps", "seed", "logging_steps", "eval_strategy"),
        *("evaluation_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit", "bf16", "fp16"),
        *("load_best_model_at_end", "lr_scheduler_kwargs", "tf32", "gradient_checkpointing", "torch_compile"),
        *("gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode", "activation_offloading"),
        *("auto_find_batch_size", "save_only_model", "save_safetensors", "hub_model_id", "hub_strategy", "output_dir"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_drop_last"),
        *("remove_unused_columns", "ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "local_rank"),
        *("ddp_broadcast_buffers", "deepspeed", "fsdp", "fsdp_config", "accelerator_config", "trust_remote_code"),
        *("resume_from_checkpoint", "neftune_noise_alpha", "optim_args", "optim_target_modules", "group_by_length"),
        *("metric_for_best_model", "greater_is_better"),
    )
}
KEYS_OF_AXOLOTL: dict[str, Key] = {
    **SHARED,
    "base_model": equal("model, model.path", "a model of `conf/model` where its file has the same architecture"),
    "base_model_config": idle("a checkpoint's own config is read"),
    "revision_of_model": equal("model.revision"),
    "model_revision": equal("model.revision"),
    "tokenizer_config": equal("model.tokenizer_path"),
    "model_type": equal("objective", "decoders; a sequence classifier with `reward_model`"),
    "type_of_model": idle("the architecture is that of the checkpoint"),
    "tokenizer_type": idle("the tokenizer is that of the checkpoint"),
    "tokenizer_use_fast": idle("tokenizers are fast ones"),
    "tokenizer_legacy": idle("a tokenizer is read as it is saved"),
    "tokenizer_save_jinja_files": idle("an export has the chat template"),
    "tokenizer_use_mistral_common": missing("mistral-common's tokenizer is not read; save it for transformers"),
    "cls_model_config": idle("the architecture is that of the checkpoint"),
    "processor_type": missing(PICTURES),
    "processor_kwargs": missing(PICTURES),
    "freeze_mm_modules": idle("only the decoder is trained"),
    "is_llama_derived_model": idle("the architecture is that of the checkpoint"),
    "is_mistral_derived_model": idle("the architecture is that of the checkpoint"),
    "model_config": equal("", "`output_router_logits` alone: without a coefficient there it adds nothing here"),
    "overrides_of_model_kwargs": missing("options of transformers' loader are not passed on"),
    "low_cpu_mem_usage": idle("weights are read shard by shard"),
    "reinit_weights": equal("model.init"),
    "chat_template": equal("model.chat_format", "of the same name, or the tokenizer's own"),
    "chat_template_jinja": equal("model.chat_template_path", "a text is written beside the overlay"),
    "chat_template_kwargs": missing("options of a chat template are not passed on"),
    "default_system_message": missing("a system text is that of the rows"),
    "eot_tokens": equal("", "an answer is always learnt with the mark that ends it"),
    "special_tokens": equal("", f"a pad token is never read or learnt; others: {OF_TOKENIZER}"),
    "tokens": missing(OF_ADDED),
    "added_tokens_overrides": missing(OF_TOKENIZER),
    "resize_token_embeddings_to_32x": idle("rows behind the vocabulary are never read"),
    "shrink_embeddings": idle("rows behind the vocabulary are never read"),
    "mean_resizing_embeddings": missing("rows of `model.vocab_size` start as the mean of the checkpoint's"),
    "embeddings_skip_upcast": idle("frozen weights are in `model.dtype`"),
    "datasets": equal("data, model.chat_format", "see the types below"),
    "test_datasets": equal("data.NAME.eval_path, data.NAME.eval_split", "one, beside one of `datasets`"),
    "pretraining_dataset": equal("data", "texts; they are prepared once, not streamed"),
    "dataset_prepared_path": idle("prepared data is below `prepare.folder`"),
    "dataset_processes": idle("`prepare.workers`"),
    "dataset_num_proc": idle("`prepare.workers`"),
    "dataset_keep_in_memory": idle("rows are read from disk"),
    "dataset_exact_deduplication": equal("data.NAME.duplicates.exact"),
    "dataset_shard_num": missing("a part of a data set: name its file, or `data.NAME.max_documents`"),
    "dataset_shard_idx": missing("a part of a data set: name its file, or `data.NAME.max_documents`"),
    "num_dataset_shards_to_save": idle("prepared data is below `prepare.folder`"),
    "push_dataset_to_hub": idle("prepared data is not uploaded"),
    "hf_use_auth_token": idle("the Hub's token is in the environment (HF_TOKEN)"),
    "shuffle_merged_datasets": equal("loader.order", "rows are always in a random order; false is refused"),
    "shuffle_before_merging_datasets": idle("rows are always in a random order"),
    "skip_prepare_dataset": equal("", "false; true trains on pictures, or prepares in another way, there"),
    "streaming": idle("data is prepared once"),
    "streaming_multipack_buffer_size": idle("data is prepared once"),
    "val_set_size": equal("data.NAME.eval_fraction"),
    "sequence_len": equal("trainer.seq_len", "of a pair the row has both answers, and twice the tokens"),
    "excess_length_strategy": equal("prepare.long_documents", "`drop` is the default there; texts are split"),
    "min_sample_len": missing("`data.NAME.clean.min_chars` is in characters"),
    "sample_packing": equal("prepare.packing", "best_fit; documents of a row do not see each other, as there"),
    "sample_packing_group_size": idle("rows are packed best fit"),
    "sample_packing_bin_size": idle("rows are packed best fit"),
    "sample_packing_sequentially": idle("rows are in a random order in any case"),
    "sample_packing_eff_est": idle("rows are counted"),
    "sample_packing_seq_len_multiplier": idle("rows are counted"),
    "sample_packing_mp_start_method": idle("`prepare.workers`"),
    "total_num_tokens": idle("tokens are counted"),
    "eval_sample_packing": idle("held-out rows are packed as the others"),
    "pad_to_sequence_len": idle("rows always have `trainer.seq_len` tokens"),
    "pretrain_multipack_attn": idle("documents of a row do not see each other"),
    "multipack_real_batches": idle("rows always have `trainer.seq_len` tokens"),
    "batch_flattening": idle("rows always have `trainer.seq_len` tokens"),
    "max_packed_sequence_len": missing("`sequence_len` is the length of a row", 0),
    "curriculum_sampling": missing("rows are in a random order"),
    "train_on_inputs": equal(f"{MAIN}.learn"),
    "micro_batch_size": equal("trainer.global_batch_rows", BATCH),
    "batch_size": equal("trainer.global_batch_rows", "where gradient_accumulation_steps is not given, as there"),
    "eval_batch_size": idle("evaluations have the training's micro-batch"),
    "num_epochs": equal(f"{MAIN}.epochs"),
    "optimizer": equal("optim", "AdamW of 32 and of 8 bits, paged or not"),
    "torchdistx_path": idle("AdamW's arithmetic is float32"),
    "lr_scheduler": equal("schedule, schedule.floor"),
    "cosine_min_lr_ratio": equal("schedule.floor", "with `lr_scheduler: cosine`"),
    "cosine_constant_lr_ratio": missing("the cosine goes on to the last step", 0, 0.0, 1.0),
    "lr_quadratic_warmup": missing("a warm-up is linear"),
    "lr_div_factor": missing("a warm-up begins near 0"),
    "embedding_lr": missing("all adapters, or all weights, have one rate"),
    "embedding_lr_scale": missing("all adapters, or all weights, have one rate"),
    "lr_groups": missing("all adapters, or all weights, have one rate"),
    "loraplus_lr_ratio": equal("optim.b_lr_ratio"),
    "loraplus_lr_embedding": missing(OF_EMBEDDINGS),
    "adapter": equal("lora, model.base", "lora, and qlora with a base of 4 bits"),
    "lora_r": equal("lora.r"),
    "lora_alpha": equal("lora.alpha"),
    "lora_dropout": equal("lora.dropout"),
    "lora_target_linear": equal("lora.targets", "all-linear"),
    "lora_target_modules": equal("lora.targets", "names, or a regular expression that shell patterns can say"),
    "lora_target_parameters": equal("lora.target_parameters, lora.targets", "alone or beside modules"),
    "lora_modules_to_save": equal("lora.modules_to_save"),
    "lora_rank_pattern": equal("lora.rank_pattern"),
    "lora_alpha_pattern": equal("lora.alpha_pattern"),
    "lora_fan_in_fan_out": idle("weights are Linears"),
    "lora_on_cpu": idle("weights go straight to where they belong"),
    "lora_model_dir": equal("start.run", "an adapter that is trained on"),
    "merge_lora": idle("`task=export` merges"),
    "peft_use_dora": equal("lora.dora"),
    "peft_use_rslora": equal("lora.scaling"),
    "peft_init_lora_weights": equal("lora.init", "true, gaussian, pissa"),
    "peft_ensure_weight_tying": equal("lora.ensure_weight_tying"),
    "peft_autocast_adapter_dtype": idle("adapters are float32"),
    "peft_trainable_token_indices": equal("lora.trainable_token_indices", "a list is of `embed_tokens`"),
    "peft_layers_to_transform": missing("name the layers: `lora.targets=['*layers.[0-7].*_proj']`"),
    "peft_layers_pattern": missing("name the layers: `lora.targets=['*layers.[0-7].*_proj']`"),
    "peft_layer_replication": missing(OF_OTHER_METHODS),
    "peft": equal("lora.init", "`loftq_config` is loftq, with `model.base=nf4`"),
    "load_in_4bit": equal("model.base", "nf4; for a TPU int8 is smaller and faster"),
    "load_in_8bit": equal("model.base", "int8 by output feature, inputs not rounded (LLM.int8 has outliers apart)"),
    "bnb_config_kwargs": equal("model.base_double_quant", "`bnb_4bit_use_double_quant`, and nf4 as the type"),
    "qlora_sharded_model_loading": idle("weights are read shard by shard"),
    "gptq": missing("a base is read in 16 bits, and held in int8 or nf4"),
    "gptq_groupsize": missing("a base is read in 16 bits, and held in int8 or nf4"),
    "gptq_model_v1": missing("a base is read in 16 bits, and held in int8 or nf4"),
    "gptq_disable_exllama": idle("there are no such kernels"),
    "model_quantization_config": missing("a base is read in 16 bits, and held in int8 or nf4"),
    "model_quantization_config_kwargs": idle("they belong to `model_quantization_config`"),
    "quantize_moe_experts": missing("experts are held as they are read"),
    "unfrozen_parameters": equal(f"{MAIN}.trainable", "regular expressions that shell patterns can say"),
    "full_finetune": equal("lora", "without an adapter all weights are trained"),
    "bfloat16": equal("model.dtype", "pure there; updates here are float32"),
    "float16": equal("model.dtype", "pure there; updates here are float32"),
    "torch_dtype": idle("`bf16` and `fp16` say the arithmetic's"),
    "fp8": missing("arithmetic is in 16 or 32 bits"),
    "fp8_enable_fsdp_float8_all_gather": idle("it belongs to `fp8`"),
    "rl": equal("objective", "dpo, ipo, kto, orpo, simpo"),
    "rl_beta": equal("objective.beta"),
    "dpo_label_smoothing": equal("objective.label_smoothing"),
    "dpo_loss_type": equal("objective.loss", "one of those that are here"),
    "dpo_loss_weights": missing("a pair has one loss"),
    "dpo_use_weighting": missing("a pair has the weight 1"),
    "dpo_padding_free": idle("rows always have `trainer.seq_len` tokens"),
    "dpo_use_liger_kernel": idle(OF_KERNELS),
    "precompute_ref_log_probs": idle("the reference is always computed once, before the first step"),
    "orpo_alpha": equal("objective.beta"),
    "simpo_gamma": equal("objective.gamma_beta_ratio", "gamma / beta"),
    "cpo_alpha": equal("objective.sft_weight"),
    "kto_desirable_weight": equal("objective.desirable_weight"),
    "kto_undesirable_weight": equal("objective.undesirable_weight"),
    "max_prompt_len": idle("a prompt is cut where an answer would not fit"),
    "trl": missing("GRPO is converted from TRL's own command (trl grpo); the beta of pairs is `rl_beta`"),
    "vllm": idle("`rollout=vllm rollout.url=` asks a server"),
    "reward_model": equal("objective", "reward"),
    "process_reward_model": missing("rewards of single steps are not learnt"),
    "center_rewards_coefficient": equal("objective.center_rewards_coefficient"),
    "num_labels": equal("", "1, of a reward model"),
    "early_stopping_patience": equal(f"{MAIN}.exit.patience, {MAIN}.exit.ends_with"),
    "evals_per_epoch": equal("trainer.eval_every_steps", "0 is 0; others are left to the default here"),
    "saves_per_epoch": idle("checkpoints are about 20 in a run, or every `checkpoint.every_steps`"),
    "save_first_step": idle("checkpoints change nothing"),
    "eval_table_size": idle("`sample` writes answers"),
    "eval_max_new_tokens": idle("`sample.max_new_tokens`"),
    "do_causal_lm_eval": idle("held-out rows have loss, perplexity and accuracy"),
    "eval_causal_lm_metrics": idle("held-out rows have loss, perplexity and accuracy"),
    "do_bench_eval": idle("`task=evaluate`"),
    "loss_watchdog_threshold": idle("`trainer.guard` watches the loss"),
    "loss_watchdog_patience": idle("`trainer.guard` watches the loss"),
    "plugins": equal("", "those of kernels and logs; others are refused"),
    "strict": idle("every key is looked at"),
    "debug": idle("the audit shows rows"),
    "attn_implementation": idle("`model.attention`"),
    **dict.fromkeys(
        (
            *("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "eager_attention"),
            *("sage_attention", "flash_optimum", "flash_attn_cross_entropy", "flash_attn_rms_norm"),
            *("flash_attn_fuse_mlp", "flash_attn_fuse_qkv", "flex_attn_compile_kwargs", "gemma4_hybrid_attn_impl"),
            *("fused_attn_kernel", "experts_implementation", "use_kernels", "use_scattermoe", "use_sonicmoe"),
            *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "unsloth_lora_mlp"),
            *("liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_rope", "liger_rms_norm_gated"),
            *("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy", "tiled_mlp"),
            *("chunked_cross_entropy", "chunked_cross_entropy_num_chunks", "llama4_linearized_experts"),
            *("use_dsv4_kernels", "use_glm_dsa_kernels", "dsv4_fp4_grouped_mode"),
        ),
        idle(OF_KERNELS),
    ),
    **dict.fromkeys(
        (
            *(
                "fsdp_version",
                "fsdp_final_state_dict_type",
                "dp_shard_size",
                "dp_replicate_size",
                "context_parallel_size",
            ),
            *("sequence_parallel_degree", "heads_k_stride", "ring_attn_func", "tensor_parallel_size", "device_map"),
            *("expert_parallel_size", "expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity", "ddp"),
            *("experimental_skip_move_to_device", "use_ray", "ray_num_workers", "ray_run_name", "world_size", "device"),
            *("deepcompile", "gpu_memory_limit"),
        ),
        idle(OF_DEVICES),
    ),
    "use_wandb": equal("logger"),
    "wandb_project": equal("logger, logger.wandb.options.project"),
    **dict.fromkeys(
        ("wandb_entity", "wandb_watch", "wandb_name", "wandb_run_id", "wandb_log_model", "wandb_mode"),
        idle("the project is in the run's own id and `logger.wandb.options`"),
    ),
    "use_tensorboard": idle("TensorBoard's files are always written"),
    **dict.fromkeys(
        (
            *("use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name", "use_comet", "comet_project_name"),
            *("use_trackio", "trackio_project_name", "trackio_run_name", "trackio_space_id", "use_swanlab"),
            *("swanlab_project", "swanlab_experiment_name", "swanlab_description", "swanlab_mode", "swanlab_workspace"),
            *("swanlab_log_completions", "swanlab_completion_log_interval", "swanlab_completion_max_buffer"),
            *("swanlab_log_model", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port"),
        ),
        idle(OF_LOGGERS),
    ),
    "auto_resume_from_checkpoints": idle("a run resumes by itself"),
    "base_model_ignore_patterns": idle("safetensors alone are read"),
    **dict.fromkeys(
        (
            *("relora", "relora_prune_ratio", "relora_prune_method", "lisa_n_layers", "lisa_step_interval", "ebft"),
            *("lisa_layers_attribute", "jagged_restart_steps", "jagged_restart_warmup_steps", "use_eaft", "eaft_alpha"),
            *("jagged_restart_anneal_steps", "eaft_k", "diffusion", "llmcompressor", "trainer_cls", "scaling_softmax"),
            *("quantization", "nvfp4_merge_aware"),
        ),
        missing(OF_OTHER_METHODS),
    ),
    "relora_cpu_offload": idle("it belongs to `relora`"),
    "qat": missing("rounded weights are learnt by `model.linear=lr_qat`, which is another method"),
    "use_onebitllms": missing("ternary weights are learnt by `model.linear=bitnet`, from random or other weights"),
}
CHAT_FORMATS = {
    "chatml": "chatml",
    "tokenizer_default": "tokenizer",
    "llama3": "llama3",
    "gemma3": "gemma3",
    "qwen_25": "qwen2_5",
    "qwen3": "qwen3",
    "mistral_v2v3": "mistral_v3",
    "mistral_v3_tekken": "mistral_tekken",
}
"""Templates there, and `model.chat_format`."""
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
ALPACA_ALONE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
STYLES = {
    "": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
}
"""Of `alpaca:STYLE`: how the system text, an instruction with an input and one without are written (prompters.py).

Those with marks of a chat format have none here: a mark in a prompt that is written whole is text, not its token."""
MARKS = re.compile(r"<\|[^|]*\|>|</?s>|\[/?INST\]|<(start|end)_of_turn>")
OF_SOURCES: dict[str, Key] = {
    "path": equal("data.NAME.path"),
    "type": equal("data.NAME.kind, data.NAME.format, data.NAME.asked_as, data.NAME.asked_alone_as, model.chat_format"),
    "name": equal("data.NAME.hub_config"),
    "split": equal("data.NAME.hub_split", "with a part of the rows too, of sets that `datasets` streams"),
    "revision": equal("data.NAME.revision"),
    "data_files": equal("data.NAME.path", "one file"),
    "ds_type": idle("the type of a file is recognised"),
    "field": equal("data.NAME.fields.text"),
    "text_column": equal("data.NAME.fields.text"),
    "field_messages": equal("data.NAME.fields.messages"),
    "message_property_mappings": equal("", "role and content, or from and value: both are read"),
    "message_field_role": equal("", "role or from: both are read"),
    "message_field_content": equal("", "content or value: both are read"),
    "message_field_training": equal("", "`train`, `weight` and other marks of a turn are read"),
    "message_field_training_detail": missing("a turn is learnt whole or not at all"),
    "field_tools": equal("data.NAME.fields.tools"),
    "field_thinking": equal("", "`thinking`, `reasoning_content` and other usual names are read"),
    "template_thinking_key": idle("reasoning goes to the template under the name that it reads"),
    "field_chosen": equal("data.NAME.fields.chosen"),
    "field_rejected": equal("data.NAME.fields.rejected"),
    "field_human": missing("turns are lists of role and content"),
    "field_model": missing("turns are lists of role and content"),
    "roles": equal("", "names that are read as these roles here too"),
    "roles_to_train": equal("", "assistant"),
    "train_on_eos": equal("", "turn: an answer is learnt with the mark that ends it"),
    "train_on_eot": equal("", "turn: an answer is learnt with the mark that ends it"),
    "chat_template": equal("model.chat_format"),
    "chat_template_jinja": missing("all sources have one template; write it as `chat_template_jinja` of the config"),
    "conversation": equal("model.chat_format", "of `sharegpt`"),
    "drop_system_message": missing("system texts are read; remove them from the file"),
    "split_thinking": missing("reasoning inside of an answer stays there"),
    "shards": missing("a part of a data set: `data.NAME.max_documents`"),
    "shards_idx": missing("a part of a data set: `data.NAME.max_documents`"),
    "preprocess_shards": idle("data is prepared in blocks"),
    "trust_remote_code": idle("code of a data set does not run"),
    "skip": missing("rows are read from the first on", 0),
    "input_format": missing("turns are lists of role and content"),
    "input_transform": missing(OF_OTHER_METHODS),
    "logprobs_field": missing("log-probabilities of a teacher are not read"),
    "temperature": missing("log-probabilities of a teacher are not read"),
    "step_separator": missing("rewards of single steps are not learnt"),
    "max_completion_length": missing("rewards of single steps are not learnt"),
    "train_on_last_step_only": missing("rewards of single steps are not learnt"),
}
"""Keys of an entry of `datasets`; those of a `type` that is a mapping are in `OF_TYPES`."""
OF_TYPES: dict[str, Key] = {
    "field_instruction": equal("data.NAME.fields.instruction"),
    "field_input": equal("data.NAME.fields.input"),
    "field_output": equal("data.NAME.fields.output"),
    "field_system": missing("a prompt that is written whole has no system text of its row"),
    "format": equal("data.NAME.asked_as"),
    "no_input_format": equal("data.NAME.asked_alone_as"),
    "system_prompt": equal("data.NAME.asked_as, data.NAME.asked_alone_as"),
    "system_format": equal("data.NAME.asked_as, data.NAME.asked_alone_as"),
}
DEFAULTS_OF_AXOLOTL: dict[str, Any] = {
    **{key: DEFAULTS[key] for key in SHARED if key in DEFAULTS and key != "warmup_steps"},
    "learning_rate": None,
    "num_epochs": 1.0,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "sequence_len": 512,
    "sample_packing": False,
    "train_on_inputs": False,
    "val_set_size": 0.0,
    "lora_dropout": 0.0,
    "eval_strategy": None,
}


def convert(draft: Draft) -> None:
    """Convert axolotl's keys."""
    draft.refuse_without_equal()
    set_model(draft, key="base_model")
    for there, here in (("revision_of_model", "revision"), ("model_revision", "revision")):
        if (value := draft.value(there)) is not None:
            draft.set(f"model.{here}", str(value), of=there)
    if (tokenizer := draft.value("tokenizer_config")) is not None:
        draft.set("model.tokenizer_path", str(tokenizer), of="tokenizer_config")
    if draft.flag("reinit_weights"):
        draft.set("model.init", "random", of="reinit_weights")
    _tokenizer(draft)
    _adapter(draft)
    set_dtype_of_axolotl(draft)
    _objective(draft)
    _data(draft)
    set_optimizer(draft, key="optimizer")
    _schedule(draft)
    set_length(draft, epochs="num_epochs")
    _batch(draft)
    set_whole(draft, "seed", "seed", at_least=0)
    _watch(draft)
    _odds_and_ends(draft)


def _tokenizer(draft: Draft) -> None:
    special = draft.mapping("special_tokens")
    changed = [
        f"{name}: {token}" for name, token in special.items() if name not in ("pad_token", "unk_token") and token
    ]
    if changed:
        draft.refuse("special_tokens", f"{', '.join(changed)}: {OF_TOKENIZER}")
    draft.value("eot_tokens")


def set_dtype_of_axolotl(draft: Draft) -> None:
    """Set the data type, which has older names too."""
    for key, dtype in (("bfloat16", "bfloat16"), ("float16", "float16")):
        if draft.flag(key):
            draft.set("model.dtype", dtype, of=key)
            return
    set_dtype(draft, default="float32")


def _adapter(draft: Draft) -> None:
    kind = draft.value("adapter")
    draft.value("full_finetune")
    if kind not in (None, "", "lora", "qlora"):
        draft.refuse("adapter", "adapters here are lora and qlora")
        return
    if not kind:
        draft.choose("lora", "none", of=["adapter"] if draft.is_given("adapter") else ["full_finetune"])
        _unfrozen(draft)
        return
    draft.choose("lora", "all_linear_r16", of="adapter")
    set_whole(draft, "lora_r", "lora.r")
    set_number(draft, "lora_alpha", "lora.alpha", above=0.0)
    set_number(draft, "lora_dropout", "lora.dropout")
    if draft.value("lora_r") is None:
        draft.refuse("adapter", "it has no lora_r")
    _targets(draft)
    for there, here in (("lora_rank_pattern", "rank_pattern"), ("lora_alpha_pattern", "alpha_pattern")):
        if pattern := draft.mapping(there):
            draft.set(f"lora.{here}", dict(pattern), of=there)
    if saved := draft.listed("lora_modules_to_save"):
        draft.set("lora.modules_to_save", saved, of="lora_modules_to_save")
    if rows := draft.value("peft_trainable_token_indices"):
        named = {"embed_tokens": rows} if isinstance(rows, list) else rows
        draft.set("lora.trainable_token_indices", named, of="peft_trainable_token_indices")
        if not isinstance(named, dict):
            draft.refuse("peft_trainable_token_indices", "it is neither a list of tokens nor a mapping of such lists")
    if draft.flag("peft_use_dora"):
        draft.set("lora.dora", True, of="peft_use_dora")
    if draft.flag("peft_use_rslora"):
        draft.set("lora.scaling", "alpha_over_sqrt_r", of="peft_use_rslora")
    if draft.flag("peft_ensure_weight_tying"):
        draft.set("lora.ensure_weight_tying", True, of="peft_ensure_weight_tying")
    if (start := draft.value("lora_model_dir")) is not None:
        draft.set("start.run", str(start), of="lora_model_dir")
    set_number(draft, "loraplus_lr_ratio", "optim.b_lr_ratio", above=0.0)
    _initial(draft)
    _base(draft)


OUTSIDE = ("embed_tokens", "lm_head")
"""Modules that are none of a layer, and so not of `all-linear`."""


def _targets(draft: Draft) -> None:
    """Set what is adapted: modules, or experts' matrices."""
    parameters = draft.listed("lora_target_parameters")
    targets: list[str] = []
    of: list[str] = []
    if (modules := draft.value("lora_target_modules")) not in (None, []):
        targets = targets_of(draft, modules, key="lora_target_modules")
        of.append("lora_target_modules")
    if draft.flag("lora_target_linear"):
        targets = ["all-linear", *(each for each in targets if each in OUTSIDE)]
        of = ["lora_target_linear", *(of if targets[1:] else [])]
    if not targets and not parameters:
        draft.refuse("adapter", "it has none of lora_target_modules, lora_target_linear and lora_target_parameters")
    draft.set("lora.targets", targets, of=of or "lora_target_parameters")
    if parameters:
        draft.set("lora.target_parameters", parameters, of="lora_target_parameters")


def _initial(draft: Draft) -> None:
    init = draft.value("peft_init_lora_weights")
    is_named = isinstance(init, str) and init.lower() in ("gaussian", "pissa", "loftq")
    if init is not None and not is_named and as_truth(init) is not True:
        draft.refuse("peft_init_lora_weights", "starts here are those of true, pissa and loftq")
    elif isinstance(init, str) and init.lower() == "gaussian":
        draft.refuse("peft_init_lora_weights", "A here is Kaiming-uniform, as with true")
    elif isinstance(init, str) and init.lower() in ("pissa", "loftq"):
        draft.set("lora.init", init.lower(), of="peft_init_lora_weights")
    peft = draft.mapping("peft")
    if others := set(peft) - {"loftq_config"}:
        draft.refuse("peft", f"nothing is known of {', '.join(map(str, others))} here")
    if loftq := peft.get("loftq_config"):
        if not isinstance(loftq, Mapping):
            draft.refuse("peft", "loftq_config is no mapping")
        elif loftq.get("loftq_bits", 4) != 4:
            draft.refuse("peft", "LoftQ here is of 4 bits")
        draft.set("lora.init", "loftq", of="peft")
        draft.set("model.base", "nf4", of="peft")


def _base(draft: Draft) -> None:
    if draft.flag("load_in_4bit") or draft.value("adapter") == "qlora":
        key = "load_in_4bit" if draft.is_given("load_in_4bit") else "adapter"
        draft.set("model.base", "nf4", of=key)
        options = draft.mapping("bnb_config_kwargs")
        if options.get("bnb_4bit_quant_type", "nf4") != "nf4":
            draft.refuse("bnb_config_kwargs", "4 bits here are nf4")
        if "bnb_4bit_use_double_quant" in options:
            is_double = as_truth(options["bnb_4bit_use_double_quant"])
            draft.set("model.base_double_quant", is_double is True, of="bnb_config_kwargs")
            if is_double is None:
                draft.refuse("bnb_config_kwargs", "bnb_4bit_use_double_quant is neither true nor false")
    elif draft.flag("load_in_8bit"):
        draft.set("model.base", "int8", of="load_in_8bit")
        draft.note("load_in_8bit", "int8 here has a scale by output feature and rounds no inputs")


def _unfrozen(draft: Draft) -> None:
    patterns = draft.listed("unfrozen_parameters")
    if not patterns:
        return
    globs = [globs_of(str(each), is_whole=False) for each in patterns]
    if any(each is None for each in globs) or any(re.search(r"\[\d+:\d+\]$", str(each)) for each in patterns):
        draft.refuse("unfrozen_parameters", f"a pattern says more than a shell pattern can; write {MAIN}.trainable")
        return
    draft.set(f"{MAIN}.trainable", [one for each in globs if each for one in each], of="unfrozen_parameters")


OBJECTIVES = {"dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}


def _objective(draft: Draft) -> None:
    kind = draft.value("rl")
    of_model = str(draft.value("model_type") or "")
    if draft.flag("reward_model"):
        draft.choose("objective", "reward", of="reward_model")
        set_number(draft, "center_rewards_coefficient", "objective.center_rewards_coefficient")
        if draft.value("num_labels") not in (None, 1):
            draft.refuse("num_labels", "a reward model has one output")
        return
    if draft.value("num_labels") is not None:
        draft.refuse("num_labels", "only a reward model has a head of its own")
    if "Classification" in of_model:
        draft.refuse("model_type", "a classifier is trained here with objective=classify, or objective=reward")
    if "ImageTextToText" in of_model:
        draft.refuse("model_type", PICTURES)
    if kind is None:
        draft.choose("objective", "next_token", of=["rl"] if draft.is_given("rl") else [])
        return
    if str(kind) not in OBJECTIVES:
        draft.refuse("rl", f"objectives here are {', '.join(OBJECTIVES)}; GRPO is converted from TRL's own command")
        return
    draft.choose("objective", OBJECTIVES[str(kind)], of="rl")
    beta = draft.number("rl_beta")
    if beta is None and kind == "orpo":
        beta = draft.number("orpo_alpha")
    draft.set("objective.beta", 0.1 if beta is None else beta, of="rl" if beta is None else _given_beta(draft))
    if kind == "kto":
        for there, here in (("kto_desirable_weight", "desirable"), ("kto_undesirable_weight", "undesirable")):
            set_number(draft, there, f"objective.{here}_weight", above=0.0)
    if kind == "simpo":
        gamma, alpha = draft.number("simpo_gamma"), draft.number("cpo_alpha")
        ratio = (0.5 if gamma is None else gamma) / (beta or 0.1)
        draft.set("objective.gamma_beta_ratio", ratio, of=["simpo_gamma"] if gamma is not None else ["rl"])
        draft.set("objective.sft_weight", 1.0 if alpha is None else alpha, of=["cpo_alpha"] if alpha else ["rl"])
    if kind == "dpo":
        _loss_of_pairs(draft)


def _given_beta(draft: Draft) -> str:
    return "rl_beta" if draft.is_given("rl_beta") else "orpo_alpha"


def _loss_of_pairs(draft: Draft) -> None:
    losses = draft.listed("dpo_loss_type")
    if losses and (len(losses) != 1 or losses[0] not in ("sigmoid", "hinge", "ipo", "robust")):
        draft.refuse("dpo_loss_type", "a pair has one loss here: sigmoid, hinge, ipo or robust")
    elif losses:
        draft.set("objective.loss", losses[0], of="dpo_loss_type")
    set_number(draft, "dpo_label_smoothing", "objective.label_smoothing")


# ---- data ---------------------------------------------------------------------------------------------------


def _data(draft: Draft) -> None:
    sources = draft.listed("datasets")
    pretraining = draft.listed("pretraining_dataset")
    if not sources and not pretraining:
        draft.refuse("datasets", "there are none")
    templates = [_source(draft, entry, of="datasets") for entry in sources]
    for entry in pretraining:
        entry = {"path": entry} if isinstance(entry, str) else entry
        known = {"type": "pretrain", **entry} if isinstance(entry, Mapping) else entry
        _source(draft, known, of="pretraining_dataset")
    _template(draft, dict(each for each in templates if each is not None))
    if draft.flag("skip_prepare_dataset"):
        draft.refuse("skip_prepare_dataset", KEYS_OF_AXOLOTL["skip_prepare_dataset"].why)
    if draft.is_given("shuffle_merged_datasets") and not draft.flag("shuffle_merged_datasets"):
        draft.refuse("shuffle_merged_datasets", "rows are always in a random order")
    if draft.flag("dataset_exact_deduplication"):
        for name in names_of_sources(draft):
            draft.set(f"data.{name}.duplicates.exact", "drop", of="dataset_exact_deduplication")
    hold_out(draft, key="val_set_size")
    _held_out(draft)
    _rows(draft)
    draft.set(f"{MAIN}.learn", "all" if draft.flag("train_on_inputs") else "answers", of="train_on_inputs")


def _held_out(draft: Draft) -> None:
    tests = draft.listed("test_datasets")
    if not tests:
        return
    [name, *others] = names_of_sources(draft) or [""]
    if others or len(tests) > 1 or not name or not isinstance(tests[0], Mapping):
        draft.refuse("test_datasets", "one set of held-out rows belongs to one source; write data.NAME.eval_path")
        return
    place, split = path_of(draft, tests[0], of="test_datasets"), text_in(draft, tests[0], "split", of="test_datasets")
    if place is None:
        return
    if place == draft.settings.get(f"data.{name}.path") and split:
        draft.set(f"data.{name}.eval_split", split, of="test_datasets")
    elif split not in (None, "train"):
        draft.refuse("test_datasets.split", "of other data than the source's it is the whole (data.NAME.eval_path)")
    else:
        draft.set(f"data.{name}.eval_path", place, of="test_datasets")


def _source(draft: Draft, entry: Any, *, of: str) -> tuple[str, str] | None:
    """Add the source of an entry; return its chat template with the key that says so, None of texts."""
    if not isinstance(entry, Mapping):
        draft.refuse(of, "an entry has no path")
        return None
    for key, why in without_equal(entry, OF_SOURCES, tool=draft.tool.name):
        draft.refuse(f"{of}.{key}", why)
    path = path_of(draft, entry, of=of)
    if path is None:
        return None
    values: dict[str, Any] = {}
    for there, here in (("name", "hub_config"), ("split", "hub_split"), ("revision", "revision")):
        value = text_in(draft, entry, there, of=of)
        if value and (there != "split" or value != "train"):
            values[here] = value
    if SLICE.fullmatch(values.get("hub_split", "")) and "://" not in path:
        draft.note(f"{of}.split", "a part of a split is read of data sets that `datasets` streams, not of JSON files")
    kind, name = entry.get("type"), str(entry.get("type") or "")
    form, style = draft.row_format, name.partition(":")[2]
    template: tuple[str, str] | None = None
    if isinstance(kind, Mapping):
        values |= _user_defined(draft, kind, of=of)
        template = "raw", of
    elif draft.value("rl") or draft.flag("reward_model"):
        values |= _pairs(draft, name, entry, of=of)
        family = name.partition(".")[0]
        template = (family, of) if family in ("chatml", "llama3") else _own_template(draft, entry, of=of)
    elif name.startswith(("chat_template", "sharegpt")):
        values |= {"kind": "chat", "format": "messages"}
        names = {here: text_in(draft, entry, f"field_{here}", of=of) for here in ("messages", "tools")}
        if fields := {here: there for here, there in names.items() if there not in (None, here)}:
            values["fields"] = fields
        _conversations(draft, entry, of=of)
        template = _own_template(draft, entry, of=of)
    elif name in ("completion", "pretrain"):
        field = text_in(draft, entry, "field", of=of) or text_in(draft, entry, "text_column", of=of) or "text"
        values |= {"kind": "text", "format": "text", **({"fields": {"text": field}} if field != "text" else {})}
    elif re.fullmatch(r"alpaca(:\w*)?", name) and style in STYLES:
        values |= _asked(STYLES[style], system=ALPACA, system_alone=ALPACA_ALONE)
        template = "raw", of
    elif form is not None:
        values |= {"kind": FORMAT_KINDS.get(form, "chat"), "format": form}
        template = None if values["kind"] == "text" else _own_template(draft, entry, of=of)
    else:
        draft.refuse(
            f"{of}.type", f"rows of the type {name or None} of {path} are not read here; task.format names another"
        )
    add_source(draft, path, values, of=of)
    return template


def _own_template(draft: Draft, entry: Mapping[str, Any], *, of: str) -> tuple[str, str]:
    """Return the chat template of an entry's conversations, its own or that of the config, with the key."""
    for key in ("chat_template", "conversation"):
        if own := text_in(draft, entry, key, of=of):
            return own, of
    return str(draft.value("chat_template") or "tokenizer_default"), "chat_template"


def _conversations(draft: Draft, entry: Mapping[str, Any], *, of: str) -> None:
    """Refuse what conversations have that is not read as it is there."""
    named = {key: f"message_field_{key}" for key in ("role", "content")}
    fields: dict[str, Mapping[str, Any]] = {
        there: {key: text_in(draft, entry, there, of=of)} for key, there in named.items()
    }
    fields["message_property_mappings"] = _mapping_in(draft, entry, "message_property_mappings", of=of)
    names = {"role": ("role", "from"), "content": ("content", "value")}
    for there, mapped in fields.items():
        for key, value in mapped.items():
            if value is not None and value not in names.get(key, (key,)):
                draft.refuse(f"{of}.{there}", f"a turn's {key} is not read from {value!r}; rename it")
    for role, sources in _mapping_in(draft, entry, "roles", of=of).items():
        listed = sources if isinstance(sources, list) else [sources]
        unread = [each for each in listed if ROLES.get(str(each).lower()) != ROLES.get(role)]
        if unread:
            draft.refuse(f"{of}.roles", f"turns of {', '.join(map(str, unread))} are not read as {role}; rename them")
    if entry.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        draft.refuse(f"{of}.roles_to_train", "the assistant's turns are learnt; marks in the rows choose among them")
    for key in ("train_on_eos", "train_on_eot"):
        if entry.get(key) not in (None, "turn", "all"):
            draft.refuse(f"{of}.{key}", "an answer is learnt with the mark that ends it")
    if entry.get("train_on_eos") == "all":
        draft.refuse(f"{of}.train_on_eos", "marks that end other turns are not learnt")
    if entry.get("message_field_training") not in (None, "train", "training", "weight", "train_on"):
        draft.refuse(f"{of}.message_field_training", "marks of turns are read from `train` or `weight`; rename them")
    thinking = text_in(draft, entry, "field_thinking", of=of)
    if thinking and not is_reasoning(thinking):
        draft.refuse(f"{of}.field_thinking", f"a turn's reasoning is not read from {thinking!r}; rename it")


def _mapping_in(draft: Draft, entry: Mapping[str, Any], key: str, *, of: str) -> Mapping[str, Any]:
    """Return a mapping of an entry; an empty one where there is none, and of what is none, which is refused."""
    value = entry.get(key)
    if value is not None and not isinstance(value, Mapping):
        draft.refuse(f"{of}.{key}", "it is no mapping")
        return {}
    return value or {}


def _asked(style: tuple[str, str, str], *, system: str, system_alone: str) -> dict[str, Any]:
    """Return a source of instructions whose prompt is written whole."""
    of_system, with_input, alone = style
    before = of_system.replace("{system}", system) if system else ""
    before_alone = of_system.replace("{system}", system_alone) if system_alone else ""
    return {
        "kind": "chat",
        "format": "instruction",
        "asked_as": before + with_input,
        "asked_alone_as": before_alone + alone,
    }


def _user_defined(draft: Draft, kind: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    of = f"{of}.type"
    for key, why in without_equal(kind, OF_TYPES, tool=draft.tool.name):
        draft.refuse(f"{of}.{key}", why)
    if draft.value("rl"):
        draft.refuse(of, "pairs are rendered by a chat template; name their fields in data.NAME.fields")
        return {"kind": "preference"}
    given = {key: text_in(draft, kind, key, of=of) for key in OF_TYPES if key != "field_system"}
    form = given["format"] or "{instruction} {input}"
    alone = given["no_input_format"] or "{instruction}"
    system = given["system_prompt"] or ""
    of_system = given["system_format"] or "{system}"
    if "{input}" not in form:
        form += "" if given["field_input"] is None else "{input}"
    if MARKS.search(of_system + form + alone + system):
        draft.refuse(of, "a mark of a chat format in a prompt is text here; use type: chat_template")
    values = _asked((of_system, form, alone), system=system, system_alone=system)
    fields = {
        here: there
        for here in ("instruction", "input", "output")
        if (there := given[f"field_{here}"]) not in (None, here)
    }
    return {**values, **({"fields": fields} if fields else {})}


OF_PAIRS = {
    **dict.fromkeys(("default", "intel", "icr", "argilla", "prompt_pairs"), "explicit_prompt"),
    **dict.fromkeys(("ultra", "argilla_chat"), "implicit_prompt"),
}
"""Formats of the rows of `chatml.NAME` and `llama3.NAME`."""


def _pairs(draft: Draft, name: str, entry: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return a source of pairs, or of single answers with a label."""
    family, _, variant = name.partition(".")
    _conversations(draft, entry, of=of)
    values: dict[str, Any] = {"kind": "preference"}
    if draft.value("rl") == "kto":
        if family not in ("chatml", "llama3", "chat_template"):
            draft.refuse(f"{of}.type", f"answers with labels of the type {name} are not read here")
        return {**values, "format": "unpaired"}
    if family in ("chatml", "llama3") and (variant or "default") in OF_PAIRS:
        return {**values, "format": OF_PAIRS[variant or "default"]}
    if family == "bradley_terry":
        return {**values, "format": "explicit_prompt", "fields": {"prompt": "input"}}
    if family == "chat_template" and variant in ("", "default"):
        fields = {
            here: there
            for here in ("chosen", "rejected")
            if (there := text_in(draft, entry, f"field_{here}", of=of)) not in (None, here)
        }
        fields["prompt"] = text_in(draft, entry, "field_messages", of=of) or "messages"
        return {**values, "format": "explicit_prompt", "fields": fields}
    if family == "chat_template" and variant in ("argilla", "argilla_chat"):
        return {**values, "format": "implicit_prompt"}
    draft.refuse(f"{of}.type", f"pairs of the type {name or None} are not read here")
    return values


def _template(draft: Draft, wanted: Mapping[str, str]) -> None:
    """Choose the one chat template of all sources, of those that they want with the keys that say so."""
    text = draft.value("chat_template_jinja")
    if text is not None and "raw" not in wanted:
        file = Path(draft.folder, str(text))
        if str(text).endswith((".jinja", ".jinja2", ".j2")):
            draft.set("model.chat_template_path", str(file if file.exists() else text), of="chat_template_jinja")
        else:
            draft.template = str(text)
            draft.became.setdefault("chat_template_jinja", {})["model.chat_template_path"] = "chat_template.jinja"
        draft.set("model.chat_format", "tokenizer", of="chat_template_jinja")
        return
    if len(wanted) > 1:
        draft.refuse("datasets.type", f"all sources have one chat template here, and these have {', '.join(wanted)}")
    for name, key in list(wanted.items())[:1]:
        base = name.removeprefix("tokenizer_default_fallback_")
        ours = "raw" if name == "raw" else CHAT_FORMATS.get(name)
        if base != name:
            ours = "tokenizer"
            draft.note(
                key,
                f"the tokenizer's own template; if it has none, write model.chat_format={CHAT_FORMATS.get(base, base)}",
            )
        if ours is None:
            draft.refuse(
                key, f"there is no template {name} here; write its text into model.chat_template_path=FILE.jinja"
            )
            continue
        draft.set("model.chat_format", ours, of=key)
        if ours == "raw":
            draft.note("datasets", "a tokenizer like Llama 2's and Mistral 7B's sets a blank before the answer there")
        elif not draft.is_given("eot_tokens"):
            draft.note(
                key, "an answer's end mark is learnt here; there where it is the tokenizer's EOS or in eot_tokens"
            )


def _rows(draft: Draft) -> None:
    """Set the length of rows, and how documents are put into them."""
    kinds = {draft.settings.get(f"data.{name}.kind") for name in names_of_sources(draft)}
    is_paired = "preference" in kinds and draft.value("rl") != "kto"
    set_row_length(draft, key="sequence_len", is_paired=is_paired)
    is_packed = draft.flag("sample_packing") or draft.value("pretraining_dataset") is not None
    key = "sample_packing" if draft.is_given("sample_packing") else "sequence_len"
    draft.set("prepare.packing", "best_fit" if is_packed else "pad", of=key)
    strategy = str(draft.value("excess_length_strategy") or "drop").lower()
    of = "excess_length_strategy" if draft.is_given("excess_length_strategy") else "sequence_len"
    if kinds == {"text"}:
        if is_packed:
            draft.set("prepare.long_documents", "split", of=of)
        else:
            draft.refuse(
                "sample_packing",
                "texts longer than a row are split there; write sample_packing: true, which does so here",
            )
        return
    if "text" in kinds:
        draft.note(of, "texts longer than a row are split there, and dropped here as conversations are")
    draft.set("prepare.long_documents", "truncate" if strategy == "truncate" else "drop", of=of)
    if strategy == "truncate":
        draft.note(of, "a conversation is cut behind its last whole answer")


# ---- schedule, batch, watching ------------------------------------------------------------------------------


def _schedule(draft: Draft) -> None:
    set_schedule(draft, key="lr_scheduler")
    if (ratio := draft.number("cosine_min_lr_ratio")) is not None:
        if draft.value("lr_scheduler") == "cosine":
            draft.set("schedule.floor", ratio, of="cosine_min_lr_ratio")
        else:
            draft.refuse("cosine_min_lr_ratio", "it belongs to lr_scheduler: cosine")
    if not {"schedule.warmup_steps", "schedule.warmup_ratio"} & set(draft.settings):
        steps = draft.number("max_steps") or 0
        if steps > 0:
            draft.set("schedule.warmup_steps", min(int(0.03 * steps), 100), of="lr_scheduler")
        else:
            draft.set("schedule.warmup_steps", None, of="lr_scheduler")
            draft.note("lr_scheduler", "the warm-up is 3 % of the steps, at most 100 there and 1,000 here")


def _batch(draft: Draft) -> None:
    total = draft.number("batch_size")
    if total and not draft.is_given("gradient_accumulation_steps"):
        micro = draft.number("micro_batch_size") or 1
        rows = int(max(1, total // micro) * micro) * draft.devices
        draft.set("trainer.global_batch_rows", rows, of=("batch_size", "micro_batch_size"))
        return
    set_batch(draft, micro="micro_batch_size")


def _watch(draft: Draft) -> None:
    set_intervals(draft)
    if draft.number("evals_per_epoch") == 0:
        draft.set("trainer.eval_every_steps", 0, of="evals_per_epoch")
    patience = draft.number("early_stopping_patience")
    if patience and patience >= 1:
        draft.set(f"{MAIN}.exit.patience", int(patience), of="early_stopping_patience")
        draft.set(f"{MAIN}.exit.ends_with", "best", of="early_stopping_patience")
    project = draft.value("wandb_project")
    if (project or draft.flag("use_wandb")) and draft.value("use_wandb") is not False:
        set_loggers(draft, ["wandb"], key="wandb_project" if project else "use_wandb", project=project)


def _odds_and_ends(draft: Draft) -> None:
    unknown = [each for each in draft.listed("plugins") if not str(each).endswith(MIXED_IN)]
    if unknown:
        draft.refuse("plugins", f"{', '.join(map(str, unknown))}: {OF_OTHER_METHODS}")
    overrides = draft.mapping("model_config")
    if isinstance(overrides, Mapping) and set(overrides) - {"output_router_logits"}:
        changed = ", ".join(sorted(set(overrides) - {"output_router_logits"}))
        draft.refuse("model_config", f"values of a checkpoint's config are not changed ({changed})")


AXOLOTL = Tool("axolotl", KEYS_OF_AXOLOTL, DEFAULTS_OF_AXOLOTL, convert)
