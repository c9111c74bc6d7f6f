"""Full fine-tuning steps whose time on a TPU is published, planned by this project: predicted beside published.

    python -m tests.benchmarks.calibration

The published programs are other people's, with other choices of what to keep and where; what differs is in the table.
The factor in conf/hw/v6e8.yaml is not from here but from those programs themselves, compiled in the same way.
"""

import argparse
from pathlib import Path

from tests.benchmarks.recipes import planned

FULL = ("lora=none", "data=sample_text", "curriculum=single", "trainer.seq_len=8192")
MISTRAL = ("model=mistral7b", "model.arch.sliding_window=null")
LLAMA = (
    "model=mistral7b",
    "model.arch={model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, "
    "num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, vocab_size: 128256, "
    "max_position_embeddings: 131072, rms_norm_eps: 1.0e-5, rope_theta: 500000.0, tie_word_embeddings: false}",
)
FOUR = ("hw=v6e4", "optim=adafactor", "trainer.global_batch_rows=8", "trainer.micro_batch_rows=2")
STEPS = {
    "mistral7b_maxtext": (
        6.320,
        (*MISTRAL, "hw=v6e8", "trainer.global_batch_rows=48", "trainer.micro_batch_rows=1"),
        "6 micro-batches, layer inputs kept; theirs in one, what does not fit kept on the host",
    ),
    "llama31_8b_maxtext": (
        3.443,
        (*LLAMA, "hw=v6e8", "trainer.global_batch_rows=24", "trainer.micro_batch_rows=1"),
        "3 micro-batches, layer inputs kept; theirs in one",
    ),
    "llama31_8b_torchprime": (
        2.407,
        (*LLAMA, *FOUR),
        "Adafactor and layer inputs kept; float32 weights",
    ),
    "llama31_8b_torchprime_offload": (
        2.801,
        (*LLAMA, *FOUR, "model.remat=offload"),
        "layer inputs on the host in both; float32 weights in ours",
    ),
}
"""Name to (published seconds of a step, overrides, what differs)."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--output", type=Path, default=Path("outputs/calibration").absolute())
    given = parser.parse_args()
    columns = ("step", "hw", "GiB per chip", "XLA s", "kernels s", "network s", "planned s", "published s", "ratio")
    print(f"| {' | '.join(columns)} | ours differs by |\n|{'---|' * (len(columns) + 1)}")
    for name in given.steps:
        published, overrides, differs = STEPS[name]
        plan = planned(name, *FULL, *overrides, output=given.output)
        memory, parts = plan["hbm_gib_per_chip"], plan["estimated_step_parts"]
        step = plan["estimated_step_seconds"]
        cells = [name, plan["hw"], f"{memory['total']:.2f} of {memory['limit']:.2f}"]
        if step is None:
            cells += ["-", "-", "-", "does not fit", f"{published:.3f}", "-"]
        else:
            seconds = (parts["compute"], parts["kernels"], parts["exposed_network"], step, published)
            cells += [*(f"{value:.3f}" for value in seconds), f"{published / step:.2f}"]
        print(f"| {' | '.join(cells)} | {differs} |", flush=True)


if __name__ == "__main__":
    main()
