"""Masked accuracy of a small encoder trained from scratch on Romanian prose, beside unigrams and bigrams.

`python -m tests.benchmarks.masked --text ro_text.jsonl` trains a ModernBERT of 0.8 million parameters once per seed on
one core and evaluates it on the test split (`task=evaluate`); `--model` takes EuroBERT or DeBERTa-v3 of that width and
depth, and `--whole-word` masks whole words.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SIZES = "hidden_size:96,intermediate_size:192,num_hidden_layers:4,num_attention_heads:4,vocab_size:4096"
ARCHES = {
    "modernbert_base": "model_type:modernbert,max_position_embeddings:1024,local_attention:64,"
    "global_attn_every_n_layers:3,pad_token_id:0,bos_token_id:1,eos_token_id:2,cls_token_id:1,sep_token_id:2",
    "eurobert_210m": "model_type:eurobert,max_position_embeddings:1024,num_key_value_heads:4,rms_norm_eps:1.0e-5,"
    "rope_theta:250000.0,tie_word_embeddings:false,bos_token_id:1,eos_token_id:2,pad_token_id:0,mask_token_id:4",
    "deberta_v3_base": "model_type:deberta-v2,max_position_embeddings:512,relative_attention:true,position_buckets:64,"
    "norm_rel_ebd:layer_norm,share_att_key:true,pos_att_type:[p2c,c2p],position_biased_input:false,type_vocab_size:0,"
    "layer_norm_eps:1.0e-7,hidden_dropout_prob:0.0,attention_probs_dropout_prob:0.0,legacy:false,pad_token_id:0",
}
"""Values of `model.arch` beside SIZES, by preset."""


def words(text: Path, *, model: str, seed: int, steps: int, lr: float, out: Path, whole_word: bool) -> list[str]:
    """Return the overrides of a run."""
    arch = f"{{{SIZES},{ARCHES[model]}}}"
    everything = "{scope:document,min_chars:null,max_chars:null,punctuation:null,language:null,max_paragraphs:null}"
    return [
        *(f"model={model}", "model.init=random", "model.dtype=float32", f"model.arch={arch}"),
        *("model.attention=eager", "model.tokenizer_path=tpu_experiments/samples/tokenizer"),
        *("objective=mlm", "objective.mask_rate=0.3", 'objective.mask_token="<|im_end|>"'),
        *("lora=none", "sharding=replicated", "hw=cpu", "hw.runtime=eager", "hw.num_threads=1"),
        *("data=[wiki_ro]", f"data.wiki_ro.path={text}", f"data.wiki_ro.clean={everything}"),
        *("data.wiki_ro.eval_fraction=0.05", "data.wiki_ro.test_fraction=0.1"),
        *("curriculum=single", f"curriculum.stages.main.steps={steps}", "schedule.warmup_steps=30"),
        *("trainer.seq_len=128", "trainer.global_batch_rows=8", "trainer.max_eval_rows=128"),
        *(f"trainer.eval_every_steps={steps // 2}", "checkpoint.every_steps=0", "logger=jsonl"),
        *(f"optim.lr={lr:g}", "optim.weight_decay=0.01", f"seed={seed}", f"output_dir={out}"),
        *(f"objective.whole_word={str(whole_word).lower()}", f"name={name_of(model, seed, whole_word=whole_word)}"),
    ]


def name_of(model: str, seed: int, *, whole_word: bool) -> str:
    """Return the name of a run."""
    return f"{model}_{'words' if whole_word else 'tokens'}_{seed}"


def called(*overrides: str) -> None:
    """Run the project without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "run.py", *overrides], cwd=REPOSITORY, env=environment, check=True)


def shown(estimate: dict[str, Any]) -> str:
    """Return a value with its interval."""
    return f"{estimate['value']:.4f} [{estimate['low']:.4f}, {estimate['high']:.4f}]"


def main() -> None:
    """Train and evaluate once per seed and print accuracies and pseudo-perplexity."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("/tmp/masked"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", choices=ARCHES, default="modernbert_base")
    parser.add_argument("--whole-word", action="store_true")
    parser.add_argument("--documents", type=int, default=20, help="documents of the pseudo-perplexity")
    arguments = parser.parse_args()
    whole_word = arguments.whole_word
    for seed in arguments.seeds:
        folder = arguments.out / name_of(arguments.model, seed, whole_word=whole_word)
        if not (folder / "result.json").exists():
            how = {"model": arguments.model, "steps": arguments.steps, "lr": arguments.lr, "whole_word": whole_word}
            called(*words(arguments.text, seed=seed, out=arguments.out, **how))
        wanted = f"task.pseudo_perplexity_documents={arguments.documents}"
        called("task=evaluate", f"task.run={folder}", wanted, "hw=cpu", "hw.runtime=eager", "hw.num_threads=1")
        found = json.loads((folder / "test_results.json").read_text())
        (beside,), (pseudo,) = found["baselines"].values(), found["pseudo_perplexity"].values()
        measures = ("accuracy", "unigram", "bigram", "above_bigram")
        print(
            f"{folder.name}: {beside['num_tokens']:,} masked tokens of {beside['num_documents']} documents; "
            + "; ".join(f"{name} {shown(beside['trained'][name])}" for name in measures)
            + f"; loss {found['loss']:.4f}; pseudo-perplexity {shown(pseudo['trained']['pseudo_perplexity'])} of "
            f"{pseudo['num_tokens']:,} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
