"""Masked accuracy of a small encoder trained from scratch on Romanian prose, beside unigrams and bigrams.

`python -m tests.benchmarks.masked --text ro_text.jsonl` trains a ModernBERT of 0.8 million parameters once per seed on
one core, and predicts the same masked tokens of held-out rows from counts of the training rows: the commonest token,
and the commonest after the token before it, which is taken as it was even where it is masked.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.objectives.base import Computing, objective_of
from tpu_experiments.objectives.masked import Masked
from tpu_experiments.training.batches import RunInputs, evaluation_batches, load_run_tokenizer, prepare_sources
from tpu_experiments.training.evaluation import host_tensors

REPOSITORY = Path(__file__).parents[2]
ARCH = (
    "{model_type:modernbert,hidden_size:96,intermediate_size:192,num_hidden_layers:4,num_attention_heads:4,"
    "vocab_size:4096,max_position_embeddings:1024,local_attention:64,global_attn_every_n_layers:3,pad_token_id:0,"
    "bos_token_id:1,eos_token_id:2,cls_token_id:1,sep_token_id:2}"
)


def words(text: Path, *, seed: int, steps: int, out: Path) -> list[str]:
    """Return the overrides of a run."""
    everything = "{scope:document,min_chars:null,max_chars:null,punctuation:null,language:null,max_paragraphs:null}"
    return [
        *("model=modernbert_base", "model.init=random", "model.dtype=float32", f"model.arch={ARCH}"),
        *("model.attention=eager", "model.tokenizer_path=tpu_experiments/samples/tokenizer"),
        *("objective=mlm", "objective.mask_rate=0.3", 'objective.mask_token="<|im_end|>"'),
        *("lora=none", "sharding=replicated", "hw=cpu", "hw.runtime=eager", "hw.num_threads=1"),
        *("data=[wiki_ro]", f"data.wiki_ro.path={text}", f"data.wiki_ro.clean={everything}"),
        *("data.wiki_ro.eval_fraction=0.05", "data.wiki_ro.test_fraction=0.1"),
        *("curriculum=single", f"curriculum.stages.main.steps={steps}", "schedule.warmup_steps=30"),
        *("trainer.seq_len=128", "trainer.global_batch_rows=8", "trainer.max_eval_rows=128"),
        *(f"trainer.eval_every_steps={steps // 2}", "checkpoint.every_steps=0", "logger=jsonl"),
        *("optim.lr=3e-3", "optim.weight_decay=0.01", f"seed={seed}", f"name=small_{seed}", f"output_dir={out}"),
    ]


def trained(overrides: list[str], *, out: Path, seed: int) -> dict[str, Any]:
    """Train, unless it is done, and return result.json."""
    place = out / f"small_{seed}" / "result.json"
    if not place.exists():
        command = [sys.executable, "run.py", *overrides]
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def baselines(config: Config) -> dict[str, float]:
    """Return accuracy and loss of unigrams and accuracy of bigrams on the masked tokens of the run's evaluations."""
    tokenizer, stages = load_run_tokenizer(config), resolve_stages(config)
    inputs = RunInputs(tokenizer, prepare_sources(config, tokenizer=tokenizer, stages=stages), stages)
    objective = objective_of(config, Computing(), tokenizer=tokenizer)
    assert isinstance(objective, Masked)
    size = objective.vocabulary.size
    rows = inputs.sources["wiki_ro"].store("train", config.trainer.seq_len).take(slice(None))
    pairs = _same_document(rows.segments_NT)
    unigrams = np.bincount(rows.ids_NT[rows.learn_NT > 0], minlength=size)
    bigrams = np.zeros((size, size), np.int32)
    np.add.at(bigrams, (rows.ids_NT[:, :-1][pairs], rows.ids_NT[:, 1:][pairs]), 1)
    commonest = int(unigrams.argmax())
    after = np.where(bigrams.any(1), bigrams.argmax(1), commonest)
    shares = (unigrams + 1) / (unigrams.sum() + size)
    count, hits, nats = 0, np.zeros(2), 0.0
    for batch in evaluation_batches(inputs, config)["wiki_ro"]:
        with torch.no_grad():
            chosen = objective.chosen(host_tensors(batch)).numpy()
        left = np.pad(after[batch.ids_GT[:, :-1]], ((0, 0), (1, 0)), constant_values=commonest)
        begins = np.pad(~_same_document(batch.segments_GT), ((0, 0), (1, 0)), constant_values=True)
        guesses = np.where(begins, commonest, left)
        targets = batch.ids_GT[chosen]
        count += len(targets)
        hits += ((targets == commonest).sum(), (targets == guesses[chosen]).sum())
        nats -= float(np.log(shares[targets]).sum())
    return {"tokens": count, "unigram": hits[0] / count, "bigram": hits[1] / count, "unigram loss": nats / count}


def _same_document(segments: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return whether each token but a row's last has the next one in its document."""
    same: NDArray[np.bool_] = (segments[:, :-1] == segments[:, 1:]) & (segments[:, 1:] > 0)
    return same


def main() -> None:
    """Train once per seed and print accuracies and losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("/tmp/masked"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        overrides = words(arguments.text, seed=seed, steps=arguments.steps, out=arguments.out)
        result = trained(overrides, out=arguments.out, seed=seed)
        counted = baselines(composed(*overrides))
        print(
            f"seed {seed}: {counted['tokens']:,} masked tokens; accuracy {result['eval_measures']['accuracy']:.4f}, "
            f"unigram {counted['unigram']:.4f}, bigram {counted['bigram']:.4f}; loss {result['eval_loss']:.4f}, "
            f"unigram {counted['unigram loss']:.4f}; {result['num_parameters']:,} parameters",
            flush=True,
        )


if __name__ == "__main__":
    main()
