"""TRL's tokens of the pairs in trl_pairs.json, which `python -m tests.data.trl_pairs` writes again.

TRL is imported in a process of its own, since it takes half a minute.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).with_suffix(".json")
TOKENIZER = Path(__file__).parents[2] / "tpu_experiments" / "samples" / "tokenizer"

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def turn(role: str, content: str) -> dict[str, str]:
    """A turn as TRL reads it."""
    return {"role": role, "content": content}


QUESTION = turn(USER, "Care este capitala României?")
EXPLICIT = [
    {
        "prompt": [QUESTION],
        "chosen": [turn(ASSISTANT, "București.")],
        "rejected": [turn(ASSISTANT, "Cred că Iași, sau poate\nCluj.")],
    },
    {
        "prompt": [
            turn(SYSTEM, "Răspunde scurt."),
            QUESTION,
            turn(ASSISTANT, "București."),
            turn(USER, "Și a Franței?"),
        ],
        "chosen": [turn(ASSISTANT, "Paris, pe Sena.")],
        "rejected": [turn(ASSISTANT, "Paris,  pe Sena.")],
    },
]
IMPLICIT = [
    {name: [*row["prompt"], *row[name]] for name in ("chosen", "rejected")} for row in (EXPLICIT[1], EXPLICIT[0])
]
ROWS: dict[str, list[dict[str, Any]]] = {"explicit_prompt": EXPLICIT, "implicit_prompt": IMPLICIT}


def ids_by_trl(rows: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Return `prompt_ids`, `chosen_ids` and `rejected_ids` of each row, by the preprocessing of TRL's DPOTrainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(output_dir="outputs", report_to=[], use_cpu=True, bf16=False)
    made = DPOTrainer._prepare_dataset(
        SimpleNamespace(_tokenizer=tokenizer), Dataset.from_list(rows), tokenizer, args, "train"
    )
    return [{name: row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for row in made]


def recorded() -> dict[str, list[dict[str, list[int]]]]:
    """Return what TRL makes of `ROWS`, with the shipped tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER), trust_remote_code=False)
    return {name: ids_by_trl(rows, tokenizer) for name, rows in ROWS.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(recorded()) + "\n")
