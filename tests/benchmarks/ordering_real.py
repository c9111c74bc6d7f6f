"""The recipe `smollm2_orders`, TRL's SFTTrainer and a plain PEFT loop in turns on the same rows, scored by one script.

python -m tests.benchmarks.ordering_real [--folder DIR] [--steps 40] [--seeds 0 1] [--threads 1] [--who ours trl peft]

To be given: the model's file, as `conf/experiment/smollm2_orders.yaml` says. Adapters of r=16 on seven projections over
a base in bfloat16, learning rate 1e-3 with a cosine to a tenth, 1,024 tokens a step, plain torch. Held out are the 64
questions of the recipe; the score, in float32 by transformers and PEFT, is the loss of their answers with the end mark
and how many greedy answers are the expected JSON.
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

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FOLDER = Path("tpu_experiments/samples/orders")
ROW, ROWS, NEW, CONVERSATIONS = 256, 4, 48, 13
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--who", nargs="+", default=["ours", "trl", "peft"])
    options.add_argument("--measure", choices=("trl", "peft", "score"), help=argparse.SUPPRESS)
    options.add_argument("--base", help=argparse.SUPPRESS)
    options.add_argument("--adapter", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        torch.set_num_threads(given.threads)
        measures = {"trl": train_trl, "peft": train_peft, "score": score}
        print(json.dumps(measures[given.measure](given)))
        return
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="ordering_real_"))
    given.base = base_of(given)
    print(json.dumps({"model": "base"} | child(given, "score", adapter=None)), flush=True)
    for seed in given.seeds:
        given.seeds = [seed]
        for who in given.who:
            load = os.getloadavg()[0]
            own = train_ours(given) if who == "ours" else child(given, who, adapter=None)
            scored = child(given, "score", adapter=own.pop("adapter"))
            print(json.dumps({"model": who, "seed": seed, "load": round(load, 1)} | own | scored), flush=True)


def base_of(given: argparse.Namespace) -> str:
    """Return the folder that the model's file is decoded to."""
    from tests.config.composing import composed_as_typed
    from tpu_experiments.objectives.base import model_source

    return str(model_source(composed_as_typed("experiment=smollm2_orders")).folder)


def child(given: argparse.Namespace, measure: str, *, adapter: str | None) -> Row:
    """Measure in a process of its own: TRL beside torch_xla takes its device."""
    words = ["--folder", str(given.folder), "--steps", str(given.steps), "--seeds", str(given.seeds[0])]
    words += ["--threads", str(given.threads), "--base", given.base, "--measure", measure]
    words += [] if adapter is None else ["--adapter", adapter]
    env = os.environ | {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1"}
    started = time.time()
    env["STARTED"] = str(started)
    command = [sys.executable, "-m", "tests.benchmarks.ordering_real", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found if measure == "score" else found | {"seconds": round(time.time() - started)}


def train_ours(given: argparse.Namespace) -> Row:
    """Train as a user would, without questions and samples in between, and return the speed and the adapter."""
    name = f"ours_{given.seeds[0]}"
    words = [sys.executable, "run.py", "experiment=smollm2_orders", "data.orders.test_fraction=0"]
    words += [
        f"data.orders.eval_path={FOLDER / 'known_forms.jsonl'}",
        "~data.orders.questions.known_forms",
        "~data.orders.questions.new_forms",
        "sample.max_new_tokens=0",
    ]
    words += [f"curriculum.stages.main.steps={given.steps}", f"trainer.eval_every_steps={given.steps}"]
    words += ["trainer.log_every_steps=1", f"hw.num_threads={given.threads}", f"seed={given.seeds[0]}", f"name={name}"]
    words += [f"output_dir={given.folder}", "checkpoint.every_steps=0"]
    env = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    started = time.time()
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seconds, folder = round(time.time() - started), given.folder / name
    result = json.loads((folder / "result.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    return {
        "steps": len(steps),
        "tokens": result["tokens"],
        "tokens_per_second": round(result["tokens_per_second"]),
        "seconds_to_first_step": round(steps[0]["time"] - started) if "time" in steps[0] else None,
        "peak_gib": round(result["peak_host_rss_gib"], 1),
        "last_loss": round(steps[-1]["train/loss"], 4),
        "seconds": seconds,
        "adapter": str(folder / "adapter"),
    }


def conversations(path: Path) -> list[list[Row]]:
    """Return the conversations of a file."""
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def loaded(given: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return transformers' tokenizer and model of the base."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.base, trust_remote_code=False)
    return tokenizer, AutoModelForCausalLM.from_pretrained(given.base, dtype=dtype, trust_remote_code=False)


def lora() -> Any:
    """Return PEFT's settings of the same adapters."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM")


def measured(ends: list[float], *, tokens: float) -> Row:
    """Return the speed between the first and the last step, and the memory, of this process."""
    return {
        "steps": len(ends),
        "tokens": round(tokens),
        "tokens_per_second": round(tokens * (len(ends) - 1) / len(ends) / (ends[-1] - ends[0])),
        "seconds_to_first_step": round(ends[0] - float(os.environ["STARTED"])),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }


def train_trl(given: argparse.Namespace) -> Row:
    """Train by TRL's own SFTTrainer on packed rows, and return the speed and the adapter."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.time())

    rows = [{"prompt": each[:-1], "completion": each[-1:]} for each in conversations(FOLDER / "orders.jsonl")]
    folder, clock = given.folder / f"trl_{given.seeds[0]}", Clock()
    config = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=given.steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, given.steps // 20),
        adam_beta2=0.95,
        max_length=ROW,
        packing=True,
        completion_only_loss=True,
        seed=given.seeds[0],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch",
    )
    tokenizer, model = loaded(given, torch.bfloat16)
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora(),
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    tokens = sum(lengths) / len(lengths) * ROWS * len(clock.ends)
    return measured(clock.ends, tokens=tokens) | {"last_loss": round(losses[-1], 4), "adapter": str(folder)}


def train_peft(given: argparse.Namespace) -> Row:
    """Train by a loop of the user's own: conversations padded to the longest of a batch, transformers' own loss."""
    from peft import get_peft_model
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    torch.manual_seed(given.seeds[0])
    tokenizer, base = loaded(given, torch.bfloat16)
    model = get_peft_model(base, lora())
    model.train()
    rows = [tokenised(tokenizer, each) for each in conversations(FOLDER / "orders.jsonl")]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, max(1, given.steps // 20), given.steps, min_lr_rate=0.1
    )
    ends, order, tokens = [], [], 0
    for _ in range(given.steps):
        if len(order) < CONVERSATIONS:
            order += torch.randperm(len(rows)).tolist()
        own, order = [rows[index] for index in order[:CONVERSATIONS]], order[CONVERSATIONS:]
        longest = max(len(ids) for ids, _ in own)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in own])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in own])
        labels = [[-100] * begin + ids[begin:] + [-100] * (longest - len(ids)) for ids, begin in own]
        loss = model(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += int(mask.sum())
        ends.append(time.time())
    folder = given.folder / f"peft_{given.seeds[0]}"
    model.save_pretrained(folder)
    return measured(ends, tokens=tokens) | {"last_loss": round(float(loss), 4), "adapter": str(folder)}


def tokenised(tokenizer: Any, messages: list[Row]) -> tuple[list[int], int]:
    """Return a conversation's ids up to its end mark, and where its answer begins."""
    start = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    end = len(whole) - whole[::-1].index(tokenizer.eos_token_id)  # without the line break behind the end mark
    return whole[:end], len(start)


def score(given: argparse.Namespace) -> Row:
    """Return the loss of the expected answers to the questions, and how many greedy answers are exactly they."""
    from peft import PeftModel

    tokenizer, model = loaded(given, torch.float32)
    model.eval()
    if given.adapter is not None:
        model = PeftModel.from_pretrained(model, given.adapter).eval()
    nats, num, found = 0.0, 0, {}
    for name in ("known_forms", "new_forms"):
        each, right = conversations(FOLDER / f"{name}.jsonl"), 0
        rows = [tokenised(tokenizer, messages) for messages in each]
        longest = max(begin for _, begin in rows)
        with torch.no_grad():
            for ids, begin in rows:
                logits = model(torch.tensor([ids])).logits[0, begin - 1 : -1]
                nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[begin:]), reduction="sum"))
                num += len(ids) - begin
            prompts = torch.tensor([[0] * (longest - begin) + ids[:begin] for ids, begin in rows])
            mask = torch.tensor([[0] * (longest - begin) + [1] * begin for _, begin in rows])
            written = model.generate(
                input_ids=prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        for messages, ids in zip(each, written[:, longest:], strict=True):
            right += tokenizer.decode(ids, skip_special_tokens=True).strip() == messages[-1]["content"]
        found[name] = f"{right} of {len(each)}"
    return {"held_out_loss": round(nats / num, 4), "exact": found}


if __name__ == "__main__":
    main()
