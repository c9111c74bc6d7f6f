"""What the audit finds in real data, and in copies of it that have one fault each.

    python -m tests.benchmarks.findings FOLDER

FOLDER has .jsonl files of texts and conversations. Rows are of the default length for a model of 4,096 positions, with
the shipped tokenizer. Prints a table.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.config.composing import composed
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.documents import Document, spec_of
from tpu_experiments.data.reading.sources import read_documents
from tpu_experiments.training.batches import load_run_tokenizer, prepare_sources, stages_with_data
from tpu_experiments.training.row_lengths import measure_rows

Turns = list[tuple[str, str]]


def changed_answers(change: Callable[[str, str], str]) -> Callable[[Turns], Turns]:
    """Return a function that changes every answer of a conversation by the question before it and itself."""

    def of(turns: Turns) -> Turns:
        earlier = ["", *(content for _, content in turns)]
        return [
            (role, change(before, content) if role == "assistant" else content)
            for before, (role, content) in zip(earlier, turns, strict=False)
        ]

    return of


FAULTS: dict[str, Callable[[Turns], Turns]] = {
    "as it is": lambda turns: turns,
    "answers cut at 400 characters": changed_answers(lambda _, answer: answer[:400]),
    "every answer is one": changed_answers(lambda _, answer: "I am not able to help with that."),
    "every answer repeats its question": changed_answers(lambda question, _: question),
    "empty thoughts": changed_answers(lambda _, answer: f"<think>\n\n</think>\n\n{answer}"),
}


def rendered(turns: Turns) -> str:
    """Return a conversation in ChatML."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def copies(documents: list[Document]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield name, kind and rows of every copy."""
    if documents[0].messages is None:
        yield "as it is", "text", [{"text": document.text} for document in documents]
        yield "cut at 1,000 characters", "text", [{"text": (document.text or "")[:1000]} for document in documents]
        return
    for name, change in FAULTS.items():
        turns = [change(list(document.messages or ())) for document in documents]
        yield (
            name,
            "chat",
            [{"messages": [{"role": role, "content": content} for role, content in each]} for each in turns],
        )
    yield "rendered as text", "text", [{"text": rendered(list(document.messages or ()))} for document in documents]


def main() -> None:
    """Print a line for every file and copy."""
    print("| data | copy | row | findings |")
    print("|---|---|---|---|")
    for file in sorted(Path(sys.argv[1]).glob("*.jsonl")):
        kind = "text" if "text" in json.loads(file.open(encoding="utf-8").readline()) else "chat"
        source = composed("data=messages", f"data.messages.path={file}", f"data.messages.kind={kind}").data["messages"]
        found = list(read_documents(spec_of("messages", source, data_size="full")))
        documents = [document for document in found if isinstance(document, Document)]
        for name, own, rows in copies(documents):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                config = measure_rows(
                    composed(
                        *("model=tiny", "model.row_tokens=4096", "model.arch.max_position_embeddings=4096"),
                        *("data=messages", f"data.messages.path={path}", f"data.messages.kind={own}"),
                        f"output_dir={folder}",
                    )
                )
                sources = prepare_sources(config, tokenizer=load_run_tokenizer(config), stages=stages_with_data(config))
                findings = audit_findings([m for each in sources.values() for m in each.manifests.values()])
                shown = "; ".join(finding.message.split("; ")[1] for finding in findings) or "none"
                print(
                    f"| {file.stem} | {name} | {config.trainer.seq_len:,} | {shown.replace('|', chr(92) + '|')} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
