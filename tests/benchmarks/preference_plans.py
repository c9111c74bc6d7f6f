"""What preferences cost: the planned step of DPO beside the next token's at the same rows, model and adapter.

    python -m tests.benchmarks.preference_plans                                   # Mistral 7B on v6e-8 and v5e-8
    python -m tests.benchmarks.preference_plans "experiment=qwen05b_dpo" --output FOLDER

Needs libtpu. Compilations are kept in the folder of `--output`, so that a second call only prints.
"""

import argparse
from pathlib import Path

from tests.benchmarks.recipes import planned

COMMANDS = ("experiment=mistral7b_ro_dpo", "experiment=mistral7b_ro_dpo hw=v5e8")
NEXT_TOKEN = ("objective=next_token", "data=[ultrachat_ro]")
COLUMNS = ("command", "rows x tokens", "next token: tokens/s a chip", "DPO", "ratio", "GiB", "GiB of DPO", "ratio")


def line_of(words: str, *, output: Path) -> list[str]:
    """Plan a command with both objectives, with the same settings, and return a line of the table."""
    name = words.replace("experiment=", "").replace(" ", "_").replace("=", "_")
    given = [*words.split(), "tuned=off"]
    kinds = {"sft": NEXT_TOKEN, "dpo": ()}
    both = [planned(f"{name}_{kind}", *given, *more, output=output) for kind, more in kinds.items()]
    speeds = [plan["tokens_per_second_per_chip"] for plan in both]
    sizes = [plan["hbm_gib_per_chip"]["total"] for plan in both]
    cells = [f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[1] / speeds[0]:.3f}"]
    cells += [f"{sizes[0]:.2f}", f"{sizes[1]:.2f}", f"{sizes[1] / sizes[0]:.3f}"]
    return [f"`{words}`", f"{both[1]['global_batch']} x {both[1]['seq_len']:,}", *cells]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", default=COMMANDS)
    parser.add_argument("--output", type=Path, default=Path("outputs/preference_plans").absolute())
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for words in given.commands:
        print(f"| {' | '.join(line_of(words, output=given.output.absolute()))} |", flush=True)


if __name__ == "__main__":
    main()
