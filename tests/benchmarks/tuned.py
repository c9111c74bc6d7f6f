"""What conf/tuned.yaml is worth: each command planned with and without its settings, compiled.

    python -m tests.benchmarks.tuned OUTPUT [COMMAND ...]     # prints a Markdown table

Without commands those of `COMMANDS`. Compilations are kept below OUTPUT, so that a second call is quick.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = "model.tokenizer_path=tpu_experiments/samples/tokenizer"
COMMANDS = (
    "model=mistral7b data=ultrachat_ro hw=v6e8",
    "model=qwen05b data=uk_law hw=v5e8",
    "model=gemma3_270m data=uk_law hw=colab",
    "experiment=mistral7b_ro",
    "experiment=qwen05b_uk_law",
    "experiment=gemma3_270m_chat",
)
TITLES = ("command", "rows x tokens", "default", "tuned", "ratio", "GiB", "compile s", "settings")


def planned(words: str, *, output: Path, tuned: str) -> dict[str, Any]:
    """The content of plan.json."""
    name = f"{tuned}_{words.replace(' ', '_').replace('=', '_')}"
    command = [sys.executable, "run.py", *shlex.split(words), "task=plan", "task.programs=train", TOKENIZER]
    command += [f"tuned={tuned}", f"name={name}", f"output_dir={output}"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((output / "plans" / name / "plan.json").read_text())
    return found


def line_of(words: str, *, output: Path) -> list[str]:
    """A line of the table; speeds are tokens per second of a chip, by default and as tuned."""
    plans = [planned(words, output=output, tuned=tuned) for tuned in ("off", "auto")]
    before, after = (plan["tokens_per_second_per_chip"] for plan in plans)
    memory = " -> ".join(f"{plan['hbm_gib_per_chip']['total']:.2f}" for plan in plans)
    seconds = " -> ".join(f"{plan['compile_seconds']:.0f}" for plan in plans)
    settings = next((note.partition(": ")[2] for note in plans[1]["notes"] if "conf/tuned.yaml" in note), "none")
    rows = f"{plans[0]['global_batch']} x {plans[0]['seq_len']:,}"
    return [f"`{words}`", rows, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.2f}", memory, seconds, settings]


def main() -> None:
    output, *commands = sys.argv[1:]
    lines = [list(TITLES), ["---"] * len(TITLES)]
    lines += [line_of(words, output=Path(output).resolve()) for words in commands or COMMANDS]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
