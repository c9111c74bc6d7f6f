"""task=convert: keys of axolotl, LLaMA-Factory and TRL, what is refused, and the experiment that is written."""

import ast
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tasks.convert_tables import MANUAL, written
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.messages import choices
from tpu_experiments.config.schema import register
from tpu_experiments.config.task_schema import ConvertTaskConfig
from tpu_experiments.tasks.convert import drafted, listing, refusals
from tpu_experiments.tasks.convert.axolotl import ALPACA_ALONE, AXOLOTL, OF_SOURCES, OF_TYPES
from tpu_experiments.tasks.convert.llamafactory import LLAMAFACTORY, OF_DESCRIPTIONS
from tpu_experiments.tasks.convert.overlay import checked, text_of
from tpu_experiments.tasks.convert.reading import arguments, read
from tpu_experiments.tasks.convert.table import Draft
from tpu_experiments.tasks.convert.training_settings import OPTIMIZERS, SCHEDULES, globs_of
from tpu_experiments.tasks.convert.trl import DEFAULTS_OF_TRL, RATES, TRL

REPOSITORY = Path(__file__).parents[2]
register()

QLORA = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
cosine_min_lr_ratio: 0.1
warmup_steps: 10
bf16: auto
tf32: false
gradient_checkpointing: true
weight_decay: 0.01
wandb_project: mine
wandb_entity:
special_tokens:
  pad_token: <|end_of_text|>
"""
CHAT = """
base_model: Qwen/Qwen3-0.6B
chat_template: qwen3
datasets:
  - path: rows.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
sequence_len: 512
micro_batch_size: 4
learning_rate: 1e-5
max_steps: 100
warmup_ratio: 0.1
optimizer: adamw_torch
lr_scheduler: constant_with_warmup
unfrozen_parameters: ["^lm_head.weight$", "model.layers.2[0-7]+.mlp"]
train_on_inputs: true
seed: 7
save_steps: 50
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
report_to: none
"""
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json", "columns": {"prompt": "ask", "response": "output"}},
    "dpo_en_demo": {
        "file_name": "d.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "pictures": {
        "file_name": "p.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
    },
}
COMMANDS = {
    "sft": "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-5 "
    "--packing --use_peft --lora_r 32 --lora_target_modules q_proj v_proj --warmup_steps 5 --bf16 False",
    "dpo": "accelerate launch --num_processes 4 trl/scripts/dpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct "
    "--dataset_name trl-lib/ultrafeedback_binarized --use_peft --loss_type sigmoid sft --loss_weights 1.0 0.5",
    "kto": "trl kto --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/kto-mix-14k --beta 0.2",
    "reward": "trl reward --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name d --max_length 512",
    "grpo": "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/DeepMath-103K "
    "--reward_funcs tests.rewards.drawn.good --num_generations 4 --gradient_accumulation_steps 2 "
    "--steps_per_generation 4",
}


def drafted_of(config, tmp_path=None, *, text=None, **settings):
    if text is not None:
        config = tmp_path / "config.yaml"
        config.write_text(text, encoding="utf-8")
    task = ConvertTaskConfig(name="convert", config=str(config), **settings)
    given = read(str(config))
    draft = drafted(given, task)
    return draft, "\n".join(listing(draft, given, task))


def experiment(draft):
    """Return the checked config of a draft that is not refused."""
    assert draft.problems == {}
    return checked(text_of(draft, name="mine", source="config.yaml"), name="mine", overrides=["~local"])


# ---- the tools ----------------------------------------------------------------------------------------------


def test_axolotl_qlora_on_instructions(tmp_path):
    draft, said = drafted_of(None, tmp_path, text=QLORA, devices=2)
    config = experiment(draft)
    assert (config.model.path, config.model.base, config.model.dtype) == (
        "NousResearch/Llama-3.2-1B",
        "nf4",
        "bfloat16",
    )
    assert config.model.arch["hidden_size"] == 2048, "of conf/model/llama32_1b"
    lora = config.lora
    assert (lora.r, lora.alpha, lora.dropout, lora.targets) == (32, 16.0, 0.05, ["all-linear"])
    assert (config.trainer.global_batch_rows, config.trainer.seq_len) == (16, 2048)
    assert (config.prepare.packing, config.prepare.long_documents) == ("best_fit", "drop")
    optim = config.optim
    assert (optim.lr, optim.weight_decay, optim.beta2, optim.clip_norm) == (2e-4, 0.01, 0.999, 1.0)
    assert optim._target_.endswith("AdamW8bit")
    assert (config.schedule.name, config.schedule.floor, config.schedule.warmup_steps) == ("cosine", 0.1, 10)
    [source] = config.data.values()
    assert source.asked_alone_as == f"{ALPACA_ALONE}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n"
    assert (source.eval_fraction, source.test_fraction, source.duplicates.exact) == (0.1, 0.0, "keep")
    assert config.model.chat_format == "raw"
    stage = config.curriculum.stages["main"]
    assert (stage.epochs, stage.steps, stage.learn) == (1.0, None, "answers")
    assert config.logger["wandb"].options == {"project": "mine"}
    assert "not set (null): wandb_entity" in said
    assert "tf32: false" in said


def test_axolotl_conversations_of_all_weights(tmp_path):
    draft, said = drafted_of(None, tmp_path, text=CHAT)
    config = experiment(draft)
    assert config.lora.r == 0
    stage = config.curriculum.stages["main"]
    assert (stage.steps, stage.epochs, stage.learn) == (100, None, "all")
    assert stage.trainable == ["lm_head.weight", "*layers.2[0-7]*.mlp*"]
    [source] = config.data.values()
    assert (source.path, source.kind, source.format, source.fields) == (
        "rows.jsonl", "chat", "messages", {"messages": "conversations"},
    )  # fmt: skip
    assert config.model.chat_format == "qwen3"
    assert config.prepare.packing == "pad"
    assert (config.schedule.warmup_ratio, config.schedule.warmup_steps) == (0.1, None)
    assert (config.seed, config.checkpoint.every_steps) == (7, 50)
    assert "num_epochs" not in said.partition("own values")[2]


def test_llamafactory(tmp_path):
    (tmp_path / "info.json").write_text(json.dumps(INFO))
    draft, _ = drafted_of(None, tmp_path, text=FACTORY, dataset_info=str(tmp_path / "info.json"), devices=4)
    config = experiment(draft)
    assert (config.lora.r, config.lora.alpha, config.lora.dropout, config.lora.targets) == (
        8,
        16.0,
        0.0,
        ["all-linear"],
    )
    assert config.trainer.global_batch_rows == 32
    first, second = config.data.values()
    assert (first.path, first.asked_as, first.max_documents) == ("data/identity.json", "{instruction}\n{input}", 1000)
    assert second.fields == {"instruction": "ask", "input": ""}
    assert config.model.chat_format == "llama3"
    assert (config.seed, config.optim.weight_decay, config.schedule.floor) == (42, 0.0, 0.0)


def test_llamafactory_takes_the_smaller_number_of_rows(tmp_path):
    for rows, most in ((10, 10), (5000, 1000)):
        (tmp_path / "info.json").write_text(
            json.dumps({"identity": {"file_name": "identity.json", "num_samples": rows}})
        )
        text = FACTORY.replace("identity,alpaca_en_demo", "identity")
        draft, _ = drafted_of(None, tmp_path, text=text, dataset_info=str(tmp_path / "info.json"))
        assert draft.settings["data.identity.max_documents"] == most


def test_llamafactory_pairs(tmp_path):
    (tmp_path / "info.json").write_text(json.dumps(INFO))
    text = FACTORY.replace("stage: sft", "stage: dpo\npref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 1.0")
    text = text.replace("identity,alpaca_en_demo", "dpo_en_demo")
    draft, _ = drafted_of(None, tmp_path, text=text, dataset_info=str(tmp_path / "info.json"))
    config = experiment(draft)
    assert (config.objective.loss, config.objective.beta, config.objective.gamma_beta_ratio) == ("simpo", 2.0, 0.5)
    assert (config.trainer.seq_len, config.prepare.packing) == (4096, "pad")


def test_trl_sft():
    draft, said = drafted_of(COMMANDS["sft"], format="messages")
    config = experiment(draft)
    assert (config.lora.r, config.lora.alpha, config.lora.targets) == (32, 32.0, ["q_proj", "v_proj"])
    assert config.curriculum.stages["main"].learn == "all", "TRL learns all tokens of a conversation by default"
    assert (config.trainer.seq_len, config.prepare.packing, config.prepare.long_documents) == (
        1024,
        "best_fit",
        "truncate",
    )
    assert (config.model.dtype, config.trainer.global_batch_rows, config.schedule.name) == ("float32", 8, "linear")
    assert "TRL sft" in said


def test_trl_of_other_objectives():
    dpo = experiment(drafted_of(COMMANDS["dpo"], devices=4)[0])
    assert (dpo.lora.dropout, dpo.objective.beta, dpo.objective.sft_weight) == (0.0, 0.1, 0.5)
    assert (dpo.optim.lr, dpo.trainer.global_batch_rows, dpo.trainer.seq_len) == (1e-6, 32, 2048)
    kto = experiment(drafted_of(COMMANDS["kto"])[0])
    assert (kto.objective.name, kto.objective.beta, kto.trainer.seq_len) == ("kto", 0.2, 1024)
    reward = experiment(drafted_of(COMMANDS["reward"])[0])
    assert (reward.objective.name, reward.optim.lr, reward.trainer.seq_len) == ("reward", 1e-4, 1024)


def test_trl_grpo_counts_prompts_and_updates():
    draft, _ = drafted_of(COMMANDS["grpo"], devices=2)
    rollout = {
        key.removeprefix("rollout."): value for key, value in draft.settings.items() if key.startswith("rollout.")
    }
    assert (rollout["prompts"], rollout["samples"], rollout["updates"]) == (8 * 4 * 2 // 4, 4, 2)
    assert rollout["rewards.good.function"] == "tests.rewards.drawn.good"
    assert draft.settings["objective.loss"] == "dapo"
    more, _ = drafted_of(COMMANDS["grpo"] + " --num_iterations 2 --top_p 0.9 --num_generations 7")
    assert set(more.problems) == {"num_iterations", "top_p", "num_generations"}
    plain, _ = drafted_of(f"{COMMANDS['grpo']} --top_p 1.0 --repetition_penalty 1.0 --entropy_coef 0.0")
    assert plain.problems == {}


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("", "scale", "group"),
        ("--scale_rewards false", "scale", "none"),
        ("--scale_rewards none", "scale", "none"),
        ("--scale_rewards True", "scale", "group"),
        ("--beta 0.5", "beta", 0.5),
        ("", "beta", 0.0),
    ],
)
def test_trl_grpo_values_that_are_off(more, key, value):
    assert drafted_of(f"{COMMANDS['grpo']} {more}")[0].settings[f"objective.{key}"] == value


@pytest.mark.parametrize(
    ("command", "more", "key", "said"),
    [
        ("dpo", "--beta 0", "beta", "no number above 0"),
        ("kto", "--beta 0", "beta", "no number above 0"),
        ("dpo", "--loss_weights 1.0", "loss_weights", "1 numbers for 2"),
        ("grpo", "--reward_funcs m.a m.b --reward_weights 2", "reward_weights", "1 numbers for 2"),
        ("grpo", "--reward_weights high", "reward_weights", "0 numbers for 1"),
        ("grpo", "--reward_funcs x.good y.good", "reward_funcs", "two are called good"),
        ("grpo", "--reward_funcs org/reward-0.5b", "reward_funcs", "no function of a module"),
        ("grpo", "--num_generations 0", "num_generations", "no whole number from 1"),
        ("reward", "--test_split_size 200", "test_split_size", "a share below 1"),
        ("reward", "--max_length 512.5", "max_length", "no whole number from 8"),
    ],
)
def test_trl_refuses_numbers(command, more, key, said):
    [(found, why)] = drafted_of(f"{COMMANDS[command]} {more}")[0].problems.items()
    assert found == key
    assert said in why


def test_trl_holds_a_share_out():
    draft, _ = drafted_of(f"{COMMANDS['reward']} --test_split_size 0.1")
    assert draft.settings["data.d.eval_fraction"] == 0.1


def test_trl_sources_in_a_file(tmp_path):
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndatasets:\n  - {path: org/name, data_files: train.jsonl, name: en}\n"
    file = tmp_path / "a.yaml"
    file.write_text(text)
    draft, _ = drafted_of(f"trl sft --config {file}", format="messages")
    assert draft.settings["data.train.path"] == "hf://datasets/org/name/train.jsonl"
    assert draft.problems == {}
    file.write_text(f"{text}  - {{path: b, fraction: 0.5}}\nmax_length: null\n")
    draft, _ = drafted_of(f"trl sft --config {file}", format="messages")
    assert set(draft.problems) == {"datasets.fraction", "max_length"}
    assert "in the place of 1024" in draft.problems["max_length"]
    left, _ = drafted_of(f"trl sft --config {file}", format="messages", leave=["max_length", "datasets.fraction"])
    assert left.problems == {}


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "said"),
    [
        ("lora_dropuot: 0.05", "lora_dropuot", "did you mean lora_dropout?"),
        ("neftune_noise_alpha: 5", "neftune_noise_alpha", "no noise"),
        ("optimizer: lion_8bit", "optimizer", "no such optimizer"),
        ("lr_scheduler: inverse_square", "lr_scheduler", "no such schedule"),
        ("chat_template: command_a", "chat_template", None),
        ("plugins: [axolotl.integrations.kd.KDPlugin]", "plugins", "KDPlugin"),
        ("special_tokens: {eos_token: <|im_end|>}", "special_tokens", "eos_token: <|im_end|>"),
        ("rl: gdpo", "rl", "objectives here"),
        ("model_config: {rope_scaling: 2}", "model_config", "rope_scaling"),
        ("learning_rate: fast", "learning_rate", "no number above 0"),
        ("resume_from_checkpoint: a", "resume_from_checkpoint", "start.run"),
        ("optimizer: muon", "optimizer", "no such optimizer"),
        ("optimizer: schedule_free_adamw", "optimizer", "no such optimizer"),
        ("trl: {beta: 0.5}", "trl", "trl grpo"),
        ("peft: {loftq_config: true}", "peft", "no mapping"),
        ("lora_rank_pattern: [4]", "lora_rank_pattern", "no mapping"),
    ],
)
def test_axolotl_refuses_by_name(tmp_path, line, key, said):
    text = "\n".join(each for each in QLORA.splitlines() if not each.startswith(f"{key}:"))
    text = re.sub(r"special_tokens:\n  pad_token: \S+", "", text) if key == "special_tokens" else text
    draft, _ = drafted_of(None, tmp_path, text=f"{text}\n{line}\n")
    if said is None:  # a template is of no use to prompts that are written whole
        assert key not in draft.problems
        return
    assert said in draft.problems[key]
    lines = list(refusals(draft, source="a.yaml"))
    assert f"'task.leave=[{key}]'" in lines[-1] if set(draft.problems) == {key} else key in lines[-1]


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ("{path: a, type: alpaca, shards: 4}", "datasets.shards"),
        ("{path: a, type: chat_template, roles_to_train: [user]}", "datasets.roles_to_train"),
        ("{path: a, type: chat_template, train_on_eos: none}", "datasets.train_on_eos"),
        (
            "{path: a, type: chat_template, message_property_mappings: {role: speaker}}",
            "datasets.message_property_mappings",
        ),
        ("{path: a, type: chat_template, roles: {assistant: [narrator]}}", "datasets.roles"),
        ("{path: a, type: input_output}", "datasets.type"),
        ("{path: a, type: alpaca, fild: x}", "datasets.fild"),
        ("{path: a, type: chat_template, message_field_role: speaker}", "datasets.message_field_role"),
        ("{path: a, type: chat_template, roles: [user]}", "datasets.roles"),
        ("{path: a, type: chat_template, roles: {assistant: null}}", "datasets.roles"),
        ("{path: a, type: chat_template, message_property_mappings: role}", "datasets.message_property_mappings"),
        ("{path: a, type: chat_template, field_thinking: mine}", "datasets.field_thinking"),
        ("{path: a, type: chat_template, field_tools: [b]}", "datasets.field_tools"),
        ("{path: a, type: chat_template, chat_template_jinja: '{{ x }}'}", "datasets.chat_template_jinja"),
        ("{path: a, type: {field_instruction: q, field_system: s}}", "datasets.type.field_system"),
        ("{path: a, type: {field_instruction: q, format: 3}}", "datasets.type.format"),
        ("{path: a, type: alpaca, data_files: [b, c]}", "datasets.data_files"),
    ],
)
def test_axolotl_refuses_keys_of_a_source(tmp_path, entry, key):
    text = re.sub(r"datasets:\n(  .*\n)+", f"datasets:\n  - {entry}\n", QLORA)
    draft, _ = drafted_of(None, tmp_path, text=text)
    assert set(draft.problems) == {key}
    left, said = drafted_of(None, tmp_path, text=text, leave=[key])
    assert key not in left.problems or key == "datasets.type"
    assert f"left out (task.leave), so that axolotl's own values apply: {key}" in said


def test_axolotl_reads_fields_and_templates_of_sources(tmp_path):
    def drafted_with(entry, **settings):
        text = re.sub(r"datasets:\n(  .*\n)+", f"datasets:\n  - {entry}\nchat_template: chatml\n", QLORA)
        draft, _ = drafted_of(None, tmp_path, text=text, **settings)
        assert draft.problems == {}
        return draft.settings

    found = drafted_with("{path: r.jsonl, type: chat_template, field_tools: functions}")
    assert found["data.r.fields"] == {"tools": "functions"}
    found = drafted_with("{path: r.jsonl}", format="messages")
    assert (found["data.r.format"], found["model.chat_format"]) == ("messages", "chatml")
    assert "model.chat_format" not in drafted_with("{path: r.jsonl}", format="text")
    held_out = "{path: r.jsonl, type: alpaca}\ntest_datasets:\n  - {path: json, data_files: e.jsonl, split: train}"
    assert drafted_with(held_out)["data.r.eval_path"] == "e.jsonl"


def test_what_is_advised_can_be_left_out(tmp_path):
    entries = "datasets:\n  - {type: alpaca}\n  - {path: r.jsonl, type: alpaca, shards: 3}\n"
    text = re.sub(r"datasets:\n(  .*\n)+", entries, QLORA)
    draft, _ = drafted_of(None, tmp_path, text=text)
    assert "'task.leave=[datasets,datasets.shards]'" in list(refusals(draft, source="a"))[-1]
    left, _ = drafted_of(None, tmp_path, text=text, leave=["datasets", "datasets.shards"])
    assert left.problems == {"datasets": "there are none"}
    assert list(refusals(left, source="a"))[-1].endswith("(1 of its keys); change them there.")


def test_axolotl_adapters_of_experts_and_rows(tmp_path):
    more = "lora_target_parameters: [mlp.experts.down_proj]\npeft_trainable_token_indices: [5, 7]\n"
    text = QLORA.replace("lora_target_linear: true", "").replace("lora_dropout: 0.05", "") + more
    lora = experiment(drafted_of(None, tmp_path, text=text)[0]).lora
    assert (lora.targets, lora.target_parameters) == ([], ["mlp.experts.down_proj"])
    assert lora.trainable_token_indices == {"embed_tokens": [5, 7]}
    both, _ = drafted_of(None, tmp_path, text=f"{QLORA}lora_target_modules: [q_proj, embed_tokens]\n")
    assert experiment(both).lora.targets == ["all-linear", "embed_tokens"]
    draft, _ = drafted_of(None, tmp_path, text=QLORA.replace("lora_target_linear: true", "loraplus_lr_embedding: 1e-6"))
    assert set(draft.problems) == {"adapter", "loraplus_lr_embedding"}


def test_axolotl_takes_numbers_of_its_command(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(CHAT)
    draft, _ = drafted_of(f"axolotl train {file} --val-set-size 0.2")
    assert draft.settings["data.rows.eval_fraction"] == 0.2


def test_warmup_is_steps_or_a_share(tmp_path):
    for given, steps, ratio in (("warmup_steps: 0", 0, None), ("warmup_steps: 0.25", None, 0.25)):
        settings = drafted_of(None, tmp_path, text=QLORA.replace("warmup_steps: 10", given))[0].settings
        assert (settings.get("schedule.warmup_steps"), settings.get("schedule.warmup_ratio")) == (steps, ratio)
    for given in ("warmup_ratio: 1.5", "warmup_steps: 2.5", "warmup_steps: 0\nwarmup_ratio: 0.1"):
        draft, _ = drafted_of(None, tmp_path, text=QLORA.replace("warmup_steps: 10", given))
        assert set(draft.problems) == {given.rpartition("\n")[2].partition(":")[0]}


def test_what_is_left_out_has_the_other_programs_default(tmp_path):
    text = QLORA.replace("adamw_bnb_8bit", "lion_8bit")
    assert set(drafted_of(None, tmp_path, text=text)[0].problems) == {"optimizer"}
    draft, said = drafted_of(None, tmp_path, text=text, leave=["optimizer"])
    assert draft.groups["optim"] == "adamw"
    assert "  optimizer: adamw_torch_fused -> optim=adamw" in said.partition("own values of keys that are not given")[2]
    with pytest.raises(ConfigError, match=r"has no key optimiser\. Did you mean 'optimizer'"):
        drafted_of(None, tmp_path, text=text, leave=["optimiser"])


def test_two_templates_of_sources_are_refused(tmp_path):
    text = QLORA.replace("    type: alpaca\n", "    type: alpaca\n  - {path: b.jsonl, type: chat_template}\n")
    assert set(drafted_of(None, tmp_path, text=text)[0].problems) == {"datasets.type"}


def test_llamafactory_refuses(tmp_path):
    (tmp_path / "info.json").write_text(json.dumps(INFO))
    text = FACTORY.replace("identity,alpaca_en_demo", "pictures").replace("template: llama3", "template: vicuna")
    draft, _ = drafted_of(None, tmp_path, text=text + "use_galore: true\n", dataset_info=str(tmp_path / "info.json"))
    assert set(draft.problems) == {"dataset", "template", "use_galore"}
    assert "pictures and sound" in draft.problems["dataset"]
    without, _ = drafted_of(None, tmp_path, text=FACTORY)
    assert "task.dataset_info=FILE" in without.problems["dataset"]


@pytest.mark.parametrize(
    ("stage", "columns", "fields"),
    [
        (
            "dpo",
            {"messages": "talk", "chosen": "good", "rejected": "bad"},
            {"prompt": "talk", "chosen": "good", "rejected": "bad"},
        ),
        ("kto", {"prompt": "q", "response": "a", "kto_tag": "ok"}, {"prompt": "q", "completion": "a", "label": "ok"}),
        ("kto", {"messages": "messages", "kto_tag": "label"}, {"prompt": "messages"}),
    ],
)
def test_llamafactory_columns_of_pairs(tmp_path, stage, columns, fields):
    form = "sharegpt" if "messages" in columns else "alpaca"
    info = {"x": {"file_name": "x.json", "formatting": form, "columns": columns}}
    (tmp_path / "info.json").write_text(json.dumps(info))
    text = FACTORY.replace("stage: sft", f"stage: {stage}").replace("identity,alpaca_en_demo", "x")
    draft, _ = drafted_of(None, tmp_path, text=text, dataset_info=str(tmp_path / "info.json"))
    assert draft.problems == {}
    assert draft.settings["data.x.fields"] == fields


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_samples": "10"}, "num_samples: '10' is no whole number from 1"),
        ({"file_name": ["a"]}, "file_name: it is no text"),
        ({"columns": {"prompt": ["a"]}}, "columns: prompt: it is no name"),
        ({"rankng": True}, "did you mean ranking?"),
    ],
)
def test_llamafactory_refuses_descriptions(tmp_path, more, said):
    (tmp_path / "info.json").write_text(json.dumps({"x": {"file_name": "x.json", **more}}))
    text = FACTORY.replace("identity,alpaca_en_demo", "x")
    draft, _ = drafted_of(None, tmp_path, text=text, dataset_info=str(tmp_path / "info.json"))
    assert set(draft.problems) == {"dataset"}
    assert said in draft.problems["dataset"]


def test_trl_refuses():
    draft, _ = drafted_of(COMMANDS["sft"])
    assert "task.format=text or messages" in draft.problems["dataset_name"]
    draft, _ = drafted_of(COMMANDS["sft"] + " --packing_strategy wrapped --no_such 1", format="text")
    assert set(draft.problems) == {"packing_strategy", "such"} or set(draft.problems) == {"packing_strategy", "no_such"}


def test_a_share_of_warmup_needs_its_key_or_the_steps(tmp_path):
    draft, _ = drafted_of(None, tmp_path, text=QLORA.replace("warmup_steps: 10", "warmup_ratio: 0.1"))
    assert draft.settings["schedule.warmup_ratio"] == 0.1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [1]\nb: *a\n- c", "it is not YAML"),
        ("just text", "no keys with values"),
        ("model_name_or_path: a\ndataset_name: b\n", "trl sft --config"),
        ("model: a\ntrain_dataset: b\n", "LLaMA-Factory's v1"),
        ("foo: 1\n", "no config that is known"),
        ("a: !!python/object/apply:os.system [ls]\n", "it is not YAML"),
        (
            "a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(f"c{n}: &c{n} [*b, *b, *b, *b]\n" for n in range(3)) * 900,
            "keys and values",
        ),
    ],
)
def test_files_that_are_no_config(tmp_path, text, said):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(str(file))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("trl sft --lora_r 8 --use_peft 2>&1 | tee log.txt", {"lora_r": 8, "use_peft": True}),
        ("cd a && A=1 trl sft --packing && echo done", {"packing": True}),
        ("trl sft --packing > 'a file' --lora_r 4; trl dpo --beta 1  # it's all", {"packing": True, "lora_r": 4}),
        ("trl sft --eos_token '<|im_end|>' --run_name \"a;b\"", {"eos_token": "<|im_end|>", "run_name": "a;b"}),
        ("trl sft --no_cuda --no_tf32 --model_revision 007", {"no_cuda": True, "tf32": False, "model_revision": "007"}),
    ],
)
def test_commands_end_where_a_shell_ends_them(line, values):
    assert read(line).values == values


def test_variables_of_a_shell_are_not_known():
    for word in ("$MODEL", "a/${NAME}", "$(cat a)", "`cat a`"):
        with pytest.raises(ConfigError, match="a shell's variable, whose value is not known here; write the value"):
            read(f"trl sft --model_name_or_path {word} --packing")
    assert read("CUDA_VISIBLE_DEVICES=$X trl sft --lora_target_modules '.*proj$' --r 1").values["r"] == 1
    with pytest.raises(ConfigError, match="a < without a file"):
        read("trl sft --eos_token <|im_end|>")


@pytest.mark.parametrize(
    ("value", "is_on"),
    [("1", True), ("yes", True), ("T", True), ("0", False), ("n", False), ("2", None), ("a b", None)],
)
def test_truth_values_of_a_command(value, is_on):
    draft, _ = drafted_of(f"trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name a/b --use_peft {value}")
    assert draft.groups["lora"] == ("all_linear_r16" if is_on else "none")
    assert draft.problems == ({} if is_on is not None else {"use_peft": "it is neither true nor false"})


@pytest.mark.parametrize("words", ["missing.yaml", "hello there", "trl env --x 1", "axolotl train none.yaml"])
def test_commands_that_are_none(words):
    with pytest.raises(ConfigError, match=r"task\.config"):
        read(words)


def test_a_script_with_a_command(tmp_path):
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\ndataset_name: c\nlearning_rate: 0.1\n")
    (tmp_path / "run.sh").write_text("#!/bin/bash\n# trl dpo\nexport A=1\ntrl sft --config sft.yaml \\\n  --lora_r 4\n")
    given = read(str(tmp_path / "run.sh"))
    assert (given.tool.name, given.trainer, given.name) == ("TRL", "sft", "run")
    assert given.values == {"model_name_or_path": "a/b", "dataset_name": "c", "learning_rate": 0.1, "lora_r": 4}


def test_the_folder_of_a_config_that_a_script_names(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sft.yaml").write_text("model_name_or_path: a/b\ndataset_name: c\n")
    (tmp_path / "run.sh").write_text("trl sft --config a/sft.yaml\n")
    assert read(str(tmp_path / "run.sh")).folder == str(tmp_path / "a")


def test_arguments_of_every_form():
    found = arguments(["--a", "1", "2", "--b=x", "--no_c", "--d", "c=3", '--e={"f": 1}', "--g", "None"])
    assert found == {"a": [1, 2], "b": "x", "c": 3, "d": True, "e": {"f": 1}, "g": None}


ODD = (
    1,
    -1,
    2.5,
    True,
    "x",
    "2e-5",
    "",
    [],
    {},
    [1, "a"],
    {"a": 1},
    [{"path": 3}],
    [{"path": "p", "type": {"format": 3}}],
)
"""Values of every type, where most keys take one."""


INNER = {
    "datasets": ("path", *OF_SOURCES),
    "test_datasets": ("path", *OF_SOURCES),
    "peft": ("loftq_config",),
    "bnb_config_kwargs": ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    "lr_scheduler_kwargs": ("min_lr", "min_lr_rate", "num_cycles"),
}
"""Keys inside of others."""
TYPES = ("chat_template", "chatml.intel", "chat_template.default", "alpaca", "completion", "bradley_terry.x", "input")


@pytest.mark.parametrize("tool", [AXOLOTL, LLAMAFACTORY, TRL], ids=lambda tool: tool.name)
def test_inner_values_of_any_type_are_refused_or_taken(tool):
    drawn = random.Random(1)
    odd = (*ODD, None, float("nan"), ["x"], {"x": None}, {"role": ["x"]}, "train", "a.jsonl")
    for _ in range(1000):
        entries = {
            key: {name: drawn.choice(odd) for name in drawn.sample(names, min(4, len(names)))}
            for key, names in INNER.items()
        }
        kinds = (*TYPES, {name: drawn.choice(odd) for name in drawn.sample(list(OF_TYPES), 3)})
        for key in ("datasets", "test_datasets"):
            entries[key] = [{"path": "p", "type": drawn.choice(kinds), **entries[key]}]
        keys = {
            "base_model": "a/b",
            "model_name_or_path": "a/b",
            "rl": drawn.choice((None, "dpo", "kto")),
            "adapter": "qlora",
        }
        keys |= {
            "stage": drawn.choice(("sft", "dpo", "kto", "pt")),
            "dataset": "x",
            "learning_rate": 1e-3,
            "num_train_epochs": 1,
        }
        given = {key: value for key, value in {**keys, **entries}.items() if key in tool.keys and value is not None}
        columns = {name: drawn.choice(odd) for name in drawn.sample(("prompt", "response", "messages", "images"), 2)}
        about = {name: drawn.choice(odd) for name in drawn.sample(list(OF_DESCRIPTIONS), 2)}
        info = {"x": {"file_name": "f", "columns": columns, **about}}
        draft = Draft(tool, given, trainer="sft", row_format=drawn.choice((None, "messages")), dataset_info=info)
        tool.convert(draft)
        for line in refusals(draft, source="a"):
            assert "\n" not in line


@pytest.mark.parametrize("tool", [AXOLOTL, LLAMAFACTORY, TRL], ids=lambda tool: tool.name)
def test_values_of_any_type_are_refused_or_taken(tool):
    drawn = random.Random(0)
    names = list(tool.keys)
    for _ in range(400):
        given = {name: drawn.choice((*ODD, float("nan"), 10**400)) for name in drawn.sample(names, 12)}
        info = {"x": drawn.choice((3, {}, {"columns": 1}, {"file_name": "f"}))}
        command = drawn.choice((*RATES, "none"))
        draft = Draft(
            tool, given, trainer=command, row_format=drawn.choice((None, "text", "messages")), dataset_info=info
        )
        tool.convert(draft)
        assert draft.problems, "none of these is a whole config"


# ---- what is written ----------------------------------------------------------------------------------------


def test_texts_of_the_other_config_are_no_interpolations(tmp_path):
    text = QLORA.replace("teknium/GPT4-LLM-Cleaned", '"${oc.env:HOME}/x.jsonl"')
    [source] = experiment(drafted_of(None, tmp_path, text=text)[0]).data.values()
    assert source.path == "${oc.env:HOME}/x.jsonl"


def run(tmp_path, *words):
    return subprocess.run(
        [sys.executable, "run.py", "task=convert", f"task.folder={tmp_path / 'out'}", *words],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_writes_an_experiment_that_composes(tmp_path):
    file = tmp_path / "my-config.yaml"
    file.write_text(CHAT.replace("chat_template: qwen3", "chat_template_jinja: '{{ messages }}'"))
    done = run(tmp_path, f"task.config={file}")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert done.stdout.splitlines()[-1] == f"next: python run.py --config-dir {out} experiment=my-config"
    assert (out / "chat_templates" / "my-config.jinja").read_text() == "{{ messages }}"
    made = yaml.safe_load((out / "experiment" / "my-config.yaml").read_text())
    assert made["model"]["chat_template_path"] == str(out / "chat_templates" / "my-config.jinja")
    assert run(tmp_path, f"task.config={file}").returncode == 0, "the same again"
    with (out / "experiment" / "my-config.yaml").open("a") as edited:
        edited.write("# mine\n")
    again = run(tmp_path, f"task.config={file}")
    assert again.returncode == 2
    assert "my-config.yaml is there already and differs" in again.stderr


def test_a_template_of_another_is_not_written_over(tmp_path):
    file, template = tmp_path / "mine.yaml", tmp_path / "out" / "chat_templates" / "mine.jinja"
    file.write_text(CHAT.replace("chat_template: qwen3", "chat_template_jinja: '{{ messages }}'"))
    template.parent.mkdir(parents=True)
    template.write_text("{{ another }}")
    done = run(tmp_path, f"task.config={file}")
    assert done.returncode == 2
    assert "mine.jinja is there already and differs" in done.stderr
    assert template.read_text() == "{{ another }}"
    assert not (tmp_path / "out" / "experiment").exists()


def test_the_command_refuses_and_writes_nothing(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(f"{CHAT}neftune_noise_alpha: 5\nhub_model_id: hf_{'a' * 34}\n")
    done = run(tmp_path, f"task.config={file}")
    assert done.returncode == 2
    assert "neftune_noise_alpha: 5; no noise is added to embeddings." in done.stderr
    assert not (tmp_path / "out").exists()
    assert "lr_scheduler: constant_with_warmup -> schedule=constant" in done.stdout
    assert "aaaa" not in done.stdout + done.stderr, "a token is not shown"
    odd = run(tmp_path, f"task.config={file}", "task.leave=[neftune_noise_alpha]", "hw=v6e8")
    assert odd.returncode == 2, "4 rows do not divide among 8 chips"
    assert "trainer.global_batch_rows=4" in odd.stderr
    assert not (tmp_path / "out").exists()
    taken = run(tmp_path, f"task.config={file}", "task.leave=[neftune_noise_alpha]", "name=qwen05b_dpo")
    assert "conf/experiment has a file of that name" in taken.stderr


# ---- the tables ---------------------------------------------------------------------------------------------


def test_the_manual_has_the_tables_of_the_code():
    text = MANUAL.read_text(encoding="utf-8")
    assert written(text) == text, "python -m tests.tasks.convert_tables"


def test_every_key_is_said_to_be_what_it_becomes(tmp_path):
    (tmp_path / "info.json").write_text(json.dumps(INFO))
    drafts = [drafted_of(None, tmp_path, text=text)[0] for text in (QLORA, CHAT)]
    drafts.append(drafted_of(None, tmp_path, text=FACTORY, dataset_info=str(tmp_path / "info.json"))[0])
    drafts += [
        drafted_of(command, format="messages" if name == "sft" else None)[0] for name, command in COMMANDS.items()
    ]
    wrong = []
    for draft in drafts:
        for key, here in draft.became.items():
            said = {each.strip() for each in draft.tool.keys[key].ours.split(",")}
            for each in here:
                plain = re.sub(r"^(data|rollout\.rewards)\.[^.]+", r"\1.NAME", each)
                known = {plain, plain.split(".")[0], re.sub(r"\.NAME.*", "", plain)} & said
                wrong += (
                    [] if known or is_of_the_length(each) else [f"{draft.tool.name} {key}: {each} is not in {said}"]
                )
    assert wrong == []
    assert sum(len(draft.became) for draft in drafts) > 100


def is_of_the_length(key):
    """Return whether a key is one that several settle together: the length of a run and of its rows."""
    return key in ("prepare.packing", "prepare.long_documents", "model.tokenizer_path", "model.name")


def classes_of(module):
    """Return the annotated fields of each class in a module's source, with their defaults, without importing it."""
    origin = importlib.util.find_spec(module.partition(".")[0]).submodule_search_locations[0]
    file = Path(origin, *module.split(".")[1:]).with_suffix(".py")
    found = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            fields = [
                each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            found[node.name] = {each.target.id: default_of(each.value) for each in fields}
    return found


def default_of(node):
    if isinstance(node, ast.Call):
        values = {each.arg: each.value for each in node.keywords}
        node = values.get("default")
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


CONFIGS = {
    "trl.trainer.base_config": "_BaseConfig",
    "trl.trainer.sft_config": "SFTConfig",
    "trl.trainer.dpo_config": "DPOConfig",
    "trl.trainer.kto_config": "KTOConfig",
    "trl.trainer.reward_config": "RewardConfig",
    "trl.trainer.grpo_config": "GRPOConfig",
    "trl.trainer.rloo_config": "RLOOConfig",
    "trl.trainer.model_config": "ModelConfig",
    "trl.scripts.utils": "ScriptArguments",
    "trl.scripts.grpo": "GRPOScriptArguments",
    "transformers.training_args": "TrainingArguments",
}


@pytest.mark.parametrize("module", CONFIGS)
def test_every_argument_of_the_installed_trl_is_known(module):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    fields = {name: value for name, value in classes_of(module)[CONFIGS[module]].items() if not name.startswith("_")}
    assert [name for name in fields if name not in TRL.keys] == []
    if module.startswith("transformers"):
        assert len(fields) > 80
    for name in ("lora_r", "lora_alpha", "lora_dropout", "max_length", "packing_strategy", "max_completion_length"):
        if name in fields:
            assert DEFAULTS_OF_TRL[name] == fields[name], name
    command = module.rpartition(".")[2].removesuffix("_config")
    if command in RATES and "learning_rate" in fields:
        assert RATES[command] == fields["learning_rate"]


def test_every_tool_has_the_hundred_keys():
    for tool in (AXOLOTL, LLAMAFACTORY, TRL):
        kinds = [key.kind for key in tool.keys.values()]
        assert len(kinds) > 150
        assert kinds.count("equal") > 50
        assert set(tool.defaults) <= set(tool.keys), tool.name


def test_choices_that_are_named_exist():
    assert set(OPTIMIZERS.values()) <= set(choices("optim"))
    assert set(SCHEDULES.values()) <= set(choices("schedule"))
    draft, _ = drafted_of(COMMANDS["kto"])
    assert all(choice in (*choices(group), "base") for group, choice in draft.groups.items() if isinstance(choice, str))


@pytest.mark.parametrize(
    ("pattern", "globs"),
    [
        (
            r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj",
            ["*layers.*.mlp.up_proj", "*layers.*.self_attn.q_proj"],
        ),
        (
            r".*\.layers\.(3|7)\.self_attn\.q_proj|.*\.mlp\.up_proj",
            ["*layers.3.self_attn.q_proj", "*layers.7.self_attn.q_proj", "*.mlp.up_proj"],
        ),
        (r"(?!lm_head).*", None),
        (r"a{3}", None),
    ],
)
def test_regular_expressions_that_shell_patterns_can_say(pattern, globs):
    assert globs_of(pattern) == globs
