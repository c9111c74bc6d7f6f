"""GRPO on a real small model: which of two numbers is larger, by the last number of a free answer.

python -m tests.benchmarks.rewarding_real MODEL [--folder DIR] [--steps 12] [--lr 3e-4] [--seeds 0]

MODEL is a folder of SmolLM2-135M-Instruct in the format of transformers. Expected beforehand: answers that end on the
right number rise from below 40 % to above 70 % for pairs of numbers that training never has, most of it by form.
Right answers are counted in draws at temperature 1 before and after, by transformers and PEFT: pass@1, pass@8, the
share that ends within the limit, and the right ones of those whose last number is one of the two.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HELD_OUT, TRAINED, DRAWS, PROMPTS, MAX_NEW = 32, 256, 8, 4, 12
BASE = "base"
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("--folder", type=Path)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--lr", type=float, default=3e-4)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--score", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.score:
        print(json.dumps(score(given.model, rows()[:HELD_OUT], None if given.score == BASE else given.score)))
        return
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="rewarding_real_"))
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", rows()[:HELD_OUT]), ("train", rows()[HELD_OUT:])):
        (given.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    print(json.dumps({"model": BASE} | scored(given, BASE)), flush=True)
    for seed in given.seeds:
        own = trained(given, seed)
        adapter = str(given.folder / f"seed_{seed}" / "adapter")
        print(json.dumps({"model": f"seed {seed}"} | own | scored(given, adapter)), flush=True)


def rows() -> list[Row]:
    """Return questions about different pairs of numbers, those held out first; the larger is named first in half."""
    draws = random.Random(0)
    pairs = draws.sample([(a, b) for a in range(10, 100) for b in range(a + 1, 100)], HELD_OUT + TRAINED)
    pairs = [pair[::-1] if number % 2 else pair for number, pair in enumerate(pairs)]
    return [{"question": f"Which is larger, {a} or {b}?", "answer": str(max(a, b))} for a, b in pairs]


def scored(given: argparse.Namespace, adapter: str) -> Row:
    """Count right answers in a process of its own, without torch_xla's device."""
    command = [sys.executable, "-m", "tests.benchmarks.rewarding_real", str(given.model), "--score", adapter]
    env = os.environ | {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def trained(given: argparse.Namespace, seed: int) -> Row:
    """Train as a user would; return held-out rewards and what an iteration took."""
    name, source = f"seed_{seed}", f"data.messages.path={given.folder / 'train.jsonl'}"
    words = [sys.executable, "run.py", "model=qwen05b", f"model.path={given.model}", "model.chat_format=chatml"]
    words += ["objective=grpo", "reward=number", "data=messages", source, "data.messages.format=question_answer"]
    words += [f"data.messages.eval_path={given.folder / 'held_out.jsonl'}", "data.messages.test_fraction=0"]
    words += ["curriculum=single", f"trainer.max_stage_steps={given.steps}", "trainer.eval_every_steps=0"]
    words += [f"rollout.prompts={PROMPTS}", f"rollout.samples={DRAWS}", f"rollout.max_new_tokens={MAX_NEW}"]
    words += ["objective.epsilon_high=0.28", "lora=all_linear_r16", f"optim.lr={given.lr}", "optim.weight_decay=0"]
    words += ["schedule=constant", "schedule.warmup_steps=1", "trainer.seq_len=40", "trainer.log_every_steps=1"]
    words += ["sample.max_new_tokens=0", "checkpoint.every_steps=0", "hw.runtime=eager", "hw.num_threads=1"]
    words += [f"seed={seed}", f"name={name}", f"output_dir={given.folder}", "tuned=off"]
    started = time.monotonic()
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    (given.folder / f"{name}.log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (given.folder / name / "metrics.jsonl").read_text().splitlines()]

    def of(key: str) -> list[float]:
        return [round(record[key], 3) for record in records if key in record]

    parts = {key: of(f"perf/{key}") for key in ("sample_seconds", "reward_seconds", "step_seconds")}
    middle = {key: sorted(values)[len(values) // 2] for key, values in parts.items() if values}
    found = {"seconds": round(time.monotonic() - started), "eval_reward": of("eval/reward"), **middle}
    return found | {"train_reward": of("train/reward"), "cut": of("train/completions/clipped_ratio")}


def score(model_path: Path, own: list[Row], adapter: str | None) -> Row:
    """Return shares of answers drawn at temperature 1 and of the likeliest answers, the base in bfloat16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tpu_experiments.rewards.functions import number, result_of

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, trust_remote_code=False)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    prompts = [f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n" for row in own]
    asked = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    found: Row = {}
    for name, how in (
        ("drawn", {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": DRAWS}),
        ("likeliest", {"do_sample": False, "num_return_sequences": 1}),
    ):
        with torch.no_grad():
            ids = model.eval().generate(**asked, **how, max_new_tokens=MAX_NEW)[:, asked["input_ids"].shape[1] :]
        num = int(how["num_return_sequences"])
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        each = [(text, own[place // num]) for place, text in enumerate(texts)]
        right = torch.tensor([number("", text, row) for text, row in each]).view(-1, num)
        one_of = [str(result_of(text)) in row["question"].split("larger,")[1].rstrip("?").split() for text, row in each]
        found[name] = {
            "pass@1": round(float(right.mean()), 3),
            f"pass@{num}": round(float(right.amax(1).mean()), 3),
            "ends on one of the two": round(sum(one_of) / len(each), 3),
            "answers": texts[: 3 * num : num],
        }
    return found


if __name__ == "__main__":
    main()
