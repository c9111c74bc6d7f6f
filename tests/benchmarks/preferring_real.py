"""DPO on a real small model, ours and TRL's DPOTrainer in turns on the same pairs, scored by one script in float32.

python -m tests.benchmarks.preferring_real MODEL ROWS [--folder DIR] [--pairs 96] [--lr 2e-4] [--seeds 0 1]

MODEL is a folder in the format of transformers whose tokenizer has a chat template, ROWS a JSON Lines file of
`instruction`, `input` and `output`. An answer is preferred to that of the other instruction that shares most words
with its own. Adapters of r=16 on seven projections, bfloat16, one epoch, cosine, beta 0.1, one thread, plain torch.
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
HELD_OUT, MOST_WORDS, PAIRS_A_STEP, ROW = 40, 40, 8, 512
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("rows", type=Path)
    options.add_argument("--folder", type=Path)
    options.add_argument("--pairs", type=int, default=96)
    options.add_argument("--lr", type=float, default=2e-4)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options.add_argument("--measure", choices=("trl", "score"), help=argparse.SUPPRESS)
    options.add_argument("--adapter", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure == "score":
        print(json.dumps(score(given.model, given.folder / "held_out.jsonl", given.adapter)))
        return
    if given.measure == "trl":
        print(json.dumps(train_trl(given)))
        return
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="preferring_real_"))
    write_pairs(given)
    print(json.dumps({"model": "base"} | child(given, "score")), flush=True)
    for seed in given.seeds:
        given.seeds = [seed]
        for own in (train_ours(given), {"model": "TRL"} | child(given, "trl")):
            load = os.getloadavg()[0]
            scored = child(given, "score", "--adapter", own.pop("adapter"))
            print(json.dumps({"seed": seed, "load": round(load, 1)} | own | scored), flush=True)


def write_pairs(given: argparse.Namespace) -> None:
    """Write the pairs to train on and those held out."""
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    short = [row for row in rows if len(f"{row['instruction']} {row['input']}".split()) <= MOST_WORDS]
    short = [row for row in short if 2 <= len(row["output"].split()) <= MOST_WORDS][: given.pairs + HELD_OUT]
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, own in (("train", short[HELD_OUT:]), ("held_out", short[:HELD_OUT])):
        lines = (f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in pairs_of(own))
        (given.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def pairs_of(rows: list[Row]) -> list[Row]:
    """Return a pair for every row, of these rows alone."""
    words = [set(f"{row['instruction']} {row['input']}".lower().split()) for row in rows]
    pairs = []
    for own, row in zip(words, rows, strict=True):
        alike = sorted(range(len(rows)), key=lambda i: (-len(own & words[i]) / len(own | words[i]), i))
        other = next(i for i in alike if rows[i]["output"] != row["output"])
        prompt = f"{row['instruction']}\n{row['input']}".strip()
        pairs.append({"prompt": prompt, "chosen": row["output"], "rejected": rows[other]["output"]})
    return pairs


def child(given: argparse.Namespace, *words: str) -> Row:
    """Measure in a process of its own: TRL beside torch_xla takes its device."""
    command = [sys.executable, "-m", "tests.benchmarks.preferring_real", str(given.model), str(given.rows)]
    command += ["--folder", str(given.folder), "--lr", str(given.lr), "--seeds", str(given.seeds[0]), "--measure"]
    env = os.environ | {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found if "score" in words else found | {"seconds": round(time.monotonic() - started)}


def train_ours(given: argparse.Namespace) -> Row:
    """Train as a user would, and return the speed and the adapter."""
    name = f"ours_{given.seeds[0]}"
    source = f"data.orca_dpo_pairs.path={given.folder / 'train.jsonl'}"
    words = [sys.executable, "run.py", "model=qwen05b", f"model.path={given.model}", "objective=dpo"]
    words += ["data=orca_dpo_pairs", source, "data.orca_dpo_pairs.format=auto"]
    words += [f"data.orca_dpo_pairs.eval_path={given.folder / 'held_out.jsonl'}", "trainer.max_eval_rows=2"]
    words += ["data.orca_dpo_pairs.test_fraction=0", "data.orca_dpo_pairs.epochs=1", "lora=all_linear_r16"]
    words += ["lora.alpha=16", f"optim.lr={given.lr}", "optim.weight_decay=0", "optim.clip_norm=1", "schedule=cosine"]
    words += ["schedule.warmup_steps=2", "schedule.floor=0", f"trainer.seq_len={ROW}", "trainer.global_batch_rows=2"]
    words += ["trainer.log_every_steps=1", "sample.max_new_tokens=0", "checkpoint.every_steps=0", "hw.runtime=eager"]
    words += ["hw.num_threads=1", f"seed={given.seeds[0]}", f"name={name}", f"output_dir={given.folder}", "tuned=off"]
    started = time.monotonic()
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = given.folder / name
    result = json.loads((folder / "result.json").read_text())
    losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in losses if "train/loss" in record]
    return {
        "model": "ours",
        "steps": len(losses),
        "tokens": result["tokens"],
        "tokens_per_second": round(result["tokens_per_second"]),
        "seconds": round(time.monotonic() - started),
        "peak_gib": round(result["peak_host_rss_gib"], 1),
        "first": losses[0],
        "last_4": sum(losses[-4:]) / 4,
        "adapter": str(folder / "adapter"),
    }


def train_trl(given: argparse.Namespace) -> Row:
    """Train by TRL's own DPOTrainer, and return the speed and the adapter."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.monotonic())

    pairs = [json.loads(line) for line in (given.folder / "train.jsonl").read_text().splitlines()]
    rows = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            **{name: [{"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")},
        }
        for pair in pairs
    ]
    folder, clock = given.folder / f"trl_{given.seeds[0]}", Clock()
    config = DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PAIRS_A_STEP,
        num_train_epochs=1,
        learning_rate=given.lr,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        beta=0.1,
        max_length=ROW,
        seed=given.seeds[0],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch",
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16, trust_remote_code=False),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(given.model, trust_remote_code=False),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules=list(TARGETS), task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    own = trainer.train_dataset
    tokens = sum(2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in own)
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    num_steps = len(clock.ends)
    return {
        "steps": num_steps,
        "tokens": tokens,
        "tokens_per_second": round(tokens * (num_steps - 1) / num_steps / (clock.ends[-1] - clock.ends[0])),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "first": losses[0],
        "last_4": sum(losses[-4:]) / 4,
        "adapter": str(folder),
    }


def score(model_path: Path, held_out: Path, adapter: str | None) -> Row:
    """Return accuracy, margins and losses of the held-out pairs, by transformers and PEFT in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, trust_remote_code=False)
    pairs = [json.loads(line) for line in held_out.read_text().splitlines()]

    def answers(model: Any) -> tuple[Tensor, Tensor]:
        """Log-probability of every answer with its end mark, (pairs, 2), and their numbers of tokens."""
        sums, sizes = [], []
        for pair in pairs:
            for name in ("chosen", "rejected"):
                asked = [{"role": "user", "content": pair["prompt"]}]
                start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
                whole = tokenizer.apply_chat_template(
                    [*asked, {"role": "assistant", "content": pair[name]}], return_dict=False
                )[:-1]  # without the line break behind the end mark
                with torch.no_grad():
                    found = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
                picked = found.gather(1, torch.tensor(whole[1:])[:, None])[len(start) - 1 :, 0]
                sums.append(picked.sum())
                sizes.append(len(picked))
        return torch.stack(sums).view(-1, 2), torch.tensor(sizes).view(-1, 2)

    base, sizes = answers(model)
    own = base if adapter is None else answers(PeftModel.from_pretrained(model, adapter).eval())[0]
    rewards = 0.1 * (own - base)
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "loss": round(float(-torch.nn.functional.logsigmoid(margins).mean()), 4),
        "accuracy_of_rewards": round(float((margins > 0).float().mean()), 3),
        "accuracy_of_logps": round(float((own[:, 0] > own[:, 1]).float().mean()), 3),
        "accuracy_of_mean_logps": round(float((own / sizes)[:, 0].gt((own / sizes)[:, 1]).float().mean()), 3),
        "margin": round(float(margins.mean()), 3),
        "chosen": round(float(own[:, 0].mean()), 2),
        "rejected": round(float(own[:, 1].mean()), 2),
        "chosen_loss": round(float(-own[:, 0].sum() / sizes[:, 0].sum()), 4),
    }


if __name__ == "__main__":
    main()
