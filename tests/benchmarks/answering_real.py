"""LoRA on a real small model: ours, TRL's SFTTrainer and a PEFT loop in turns on the same rows, scored by one script.

python -m tests.benchmarks.answering_real FILE.gguf [--folder DIR] [--seeds 0 1] [--threads 1] [--steps 40]

FILE is the one that `model=smollm2_135m` names. All of them begin with the weights that it holds, in bfloat16, and
train adapters of r=16 on seven projections in plain torch, 40 steps at 1e-3, cosine to a tenth, AdamW without decay,
on the 450 orders of `data=orders`. Ours packs them, 4 rows of 256 tokens a step, which hold 12 orders; the others have
12 orders a step, padded to the longest of them, as their users have them on a CPU (packing without leaks needs flash
attention there). Scores are those of the 64 questions of `data=orders`, whose names, items and cities no training row
has, by transformers and PEFT in float32: the loss of the expected answer with its end mark; whole answers and fields
of the JSON that are right, greedy, 64 tokens at most.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAMPLES = Path("tpu_experiments/samples/orders")
ORDERS_A_STEP, RATE, FLOOR, WARMUP = 12, 1e-3, 0.1, 1
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("--folder", type=Path)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--measure", choices=("base", "trl", "peft", "score"), help=argparse.SUPPRESS)
    options.add_argument("--adapter", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        print(json.dumps(globals()[f"measure_{given.measure}"](given)))
        return
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="answering_real_"))
    child(given, "base")
    print(json.dumps({"by": "base"} | child(given, "score")), flush=True)
    for seed in given.seeds:
        given.seeds = [seed]
        for by in ("ours", "trl", "peft"):
            load = os.getloadavg()[0]
            own = train_ours(given) if by == "ours" else child(given, by)
            scored = child(given, "score", "--adapter", own.pop("adapter"))
            print(json.dumps({"by": by, "seed": seed, "load": round(load, 1)} | own | scored), flush=True)


def child(given: argparse.Namespace, *words: str) -> Row:
    """Measure in a process of its own: TRL beside torch_xla takes its device."""
    command = [sys.executable, "-m", "tests.benchmarks.answering_real", str(given.model), "--folder", str(given.folder)]
    command += ["--seeds", str(given.seeds[0]), "--threads", str(given.threads), "--steps", str(given.steps)]
    started = time.time()
    env = os.environ | {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1"}
    env |= {"STARTED": str(started)}
    done = subprocess.run([*command, "--measure", *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found if words[0] == "score" else found | {"seconds": round(time.time() - started)}


def train_ours(given: argparse.Namespace) -> Row:
    """Train as a user would, and return the speed and the adapter."""
    name = f"ours_{given.seeds[0]}"
    words = [sys.executable, "run.py", "experiment=smollm2_orders", f"model.path={given.folder / 'base'}"]
    source = "data.messages"  # the same rows, without questions to ask
    words += [
        "data=messages",
        f"{source}.path={SAMPLES}/orders.jsonl",
        f"{source}.eval_path={SAMPLES}/known_forms.jsonl",
    ]
    words += [f"{source}.test_fraction=0", "trainer.max_eval_rows=1"]
    words += [f"curriculum.stages.main.steps={given.steps}", "trainer.eval_every_steps=0", "trainer.log_every_steps=1"]
    words += [f"optim.lr={RATE}", "optim.weight_decay=0", "optim.beta2=0.999", f"schedule.warmup_steps={WARMUP}"]
    words += ["checkpoint.every_steps=0", f"hw.num_threads={given.threads}", f"seed={given.seeds[0]}", f"name={name}"]
    words += [f"output_dir={given.folder}", "tuned=off"]
    started = time.time()
    env = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    seconds = time.time() - started
    assert done.returncode == 0, done.stdout + done.stderr
    folder = given.folder / name
    result = json.loads((folder / "result.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "train/loss" in record]
    ends = [record["time"] for record in records]
    tokens = [record["perf/tokens_per_second"] * record["perf/step_seconds"] for record in records]
    return {
        "tokens_per_second": round(sum(tokens[1:]) / (ends[-1] - ends[0])),
        "to_first_step": round(ends[0] - started, 1),
        "peak_gib": round(result["peak_host_rss_gib"], 2),
        "seconds": round(seconds),
        "losses": [round(record["train/loss"], 3) for record in records[::10]],
        "adapter": str(folder / "adapter"),
    }


def measure_base(given: argparse.Namespace) -> Row:
    """Write the weights of the file in bfloat16, as a folder of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tpu_experiments.storage.gguf.opening import opened

    folder = opened(given.model, revision=None)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    tokenizer.save_pretrained(given.folder / "base")
    model.save_pretrained(given.folder / "base")
    return {}


def read_rows(name: str) -> list[list[Row]]:
    """Return the conversations of a file of the data set."""
    return [json.loads(line)["messages"] for line in (SAMPLES / f"{name}.jsonl").read_text().splitlines()]


def measure_trl(given: argparse.Namespace) -> Row:
    """Train by TRL's own SFTTrainer, and return the speed and the adapter."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.time())

    folder, clock = given.folder / f"trl_{given.seeds[0]}", Clock()
    config = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ORDERS_A_STEP,
        max_steps=given.steps,
        learning_rate=RATE,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": FLOOR},
        warmup_steps=WARMUP,
        max_length=256,
        seed=given.seeds[0],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,  # the weights are in bfloat16
        gradient_checkpointing=False,
        optim="adamw_torch",
    )
    rows = [{"prompt": row[:-1], "completion": row[-1:]} for row in read_rows("orders")]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            given.folder / "base", dtype=torch.bfloat16, trust_remote_code=False
        ),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(given.folder / "base", trust_remote_code=False),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset) / len(rows) * ORDERS_A_STEP * given.steps
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return speed(clock.ends, tokens) | {"losses": losses[::10], "adapter": str(folder)}


def measure_peft(given: argparse.Namespace) -> Row:
    """Train by a loop as PEFT's manual has it, and return the speed and the adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

    torch.manual_seed(given.seeds[0])
    tokenizer = AutoTokenizer.from_pretrained(given.folder / "base", trust_remote_code=False)
    base = AutoModelForCausalLM.from_pretrained(given.folder / "base", dtype=torch.bfloat16, trust_remote_code=False)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters).train()
    rows = [asked_and_answered(tokenizer, row) for row in read_rows("orders")]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, WARMUP, given.steps, min_lr_rate=FLOOR)
    order: list[int] = []
    ends, losses, tokens = [], [], 0
    for _ in range(given.steps):
        while len(order) < ORDERS_A_STEP:
            order += torch.randperm(len(rows)).tolist()
        own, order = [rows[i] for i in order[:ORDERS_A_STEP]], order[ORDERS_A_STEP:]
        loss = model(**padded(own)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 3))
        ends.append(time.time())
        tokens += sum(len(asked) + len(answer) for asked, answer in own)
    folder = given.folder / f"peft_{given.seeds[0]}"
    model.save_pretrained(folder)
    return speed(ends, tokens) | {"losses": losses[::10], "adapter": str(folder)}


def speed(ends: list[float], tokens: float) -> Row:
    """Return what the ends of the steps say, without the first one in the tokens a second."""
    num_steps = len(ends)
    return {
        "tokens_per_second": round(tokens * (num_steps - 1) / num_steps / (ends[-1] - ends[0])),
        "to_first_step": round(ends[0] - float(os.environ["STARTED"]), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def asked_and_answered(tokenizer: Any, messages: list[Row]) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and those of its answer with the end mark."""
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)[:-1]  # without the line break behind the mark
    return asked, whole[len(asked) :]


def padded(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Return rows as a batch of transformers, padded at their ends."""
    longest = max(len(asked) + len(answer) for asked, answer in rows)
    ids, mask, labels = [], [], []
    for asked, answer in rows:
        fill = longest - len(asked) - len(answer)
        ids.append([*asked, *answer, *[0] * fill])
        mask.append([1] * (longest - fill) + [0] * fill)
        labels.append([-100] * len(asked) + answer + [-100] * fill)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def measure_score(given: argparse.Namespace) -> Row:
    """Return losses and right answers of the questions, by transformers and PEFT in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = given.folder / "base"
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    if given.adapter:
        model = PeftModel.from_pretrained(model, given.adapter).merge_and_unload()
    scores: Row = {}
    for name in ("known_forms", "new_forms"):
        questions = read_rows(name)
        rows = [asked_and_answered(tokenizer, question) for question in questions]
        with torch.no_grad():
            loss = model(**padded(rows)).loss
        expected = [question[-1]["content"] for question in questions]
        found = written(model, tokenizer, [asked for asked, _ in rows])
        scores[name] = {
            "loss": round(float(loss), 4),
            "right": sum(a.strip() == b for a, b in zip(found, expected, strict=True)),
            "fields": sum(fields(a, json.loads(b)) for a, b in zip(found, expected, strict=True)),
        }
    return scores


def written(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[str]:
    """Return the greedy answers to prompts of different lengths."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        rows = model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
    return list(tokenizer.batch_decode(rows[:, longest:], skip_special_tokens=True))


def fields(answer: str, expected: Row) -> int:
    """Return how many of the four fields an answer has right."""
    try:
        found = json.loads(answer)
    except json.JSONDecodeError:
        return 0
    return sum(found.get(key) == value for key, value in expected.items()) if isinstance(found, dict) else 0


if __name__ == "__main__":
    main()
