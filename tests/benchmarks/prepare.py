"""Preparing conversations for training: ours beside TRL's packing and a plain `datasets.map`, from file to packed rows.

    python -m tests.benchmarks.prepare [--mb 60] [--joined 2 5] [--rounds 1] [--cases ours ours_1 ...]

All cases read one JSONL file of `messages`, with one tokenizer (a byte-level BPE trained here) and Qwen2.5's template,
answers only in the loss, rows of 1,024 tokens. Every case is a fresh process; its time is from opening the file to rows
on disk, without imports and the model; TRL's is `load_dataset("json")` and the trainer's own `_prepare_dataset`. TRL's
workers are forks of a process that has imported all; the server that ours are forked from has 5 s to import, as
`task=prepare` starts it before it loads the tokenizer. Ours also looks for exact duplicates and counts for the audit. A
conversation joins 2 to 5 short ones, drawn at random, with a tag of new words in every user turn, so that none repeats
another. CPU seconds and memory are sums over processes, sampled once a second; a page that n processes share counts as
1/n of one for each (PSS). Tokens leave out padding: TRL's `bfd` and the plain case cut conversations at 1,024 and drop
the rest, the others split them. TRL also learns the line breaks around an answer.

The cases of pairs read a file of preference pairs in its place: the same conversations, whose last answer is chosen,
and that of another one rejected. TRL's is the preprocessing of `DPOTrainer`, which pads pairs later and fills no rows;
ours ends with packed rows, of 4,096 tokens, since a pair is two conversations in one row. Tokens are those of both
conversations of a pair, with the prompt in each.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from tpu_experiments.storage.process import GIB, PeakMemory

REPOSITORY = Path(__file__).parents[2]
SHARED, SAMPLES = REPOSITORY.parent / "shared" / "data", REPOSITORY / "tpu_experiments" / "samples"
SEQ_LEN, PAIR_LEN, VOCAB_SIZE = 1024, 4096, 32_000
NEW_WORDS = 3  # a user turn; 60 MB then have some 3e5 distinct words, as many as the samples' growth (Heaps) predicts
IMPORTING_SECONDS = 5
CORES = len(os.sched_getaffinity(0))
CASES = {
    "ours": "ours",
    "ours_1": "ours",
    "ours_near": "ours, near duplicates too",
    "trl_bfd": "TRL bfd (cuts)",
    "trl_bfd_1": "TRL bfd (cuts)",
    "trl_bfd_split": "TRL bfd_split",
    "trl_bfd_split_1": "TRL bfd_split",
    "plain": "datasets.map, next fit (cuts)",
}
CASES_OF_PAIRS = {
    "ours_pairs": "ours, pairs",
    "ours_pairs_1": "ours, pairs",
    "trl_pairs": "TRL DPOTrainer",
    "trl_pairs_1": "TRL DPOTrainer",
}
NAMES = CASES | CASES_OF_PAIRS
COLUMNS = "case|processes|s|CPU s|tokens/s|ours / this|tokens|rows|filled|supervised|PSS, GiB|left out"

Turns = list[dict[str, str]]
Bases = list[tuple[float, Turns]]
Result = dict[str, Any]


def main() -> None:
    """Print the table, or run one case for `measure`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=60, help="size of the corpus")
    parser.add_argument("--joined", type=int, nargs=2, default=(2, 5), help="fewest and most short ones in one")
    parser.add_argument("--rounds", type=int, default=1, help="the fastest counts")
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(CASES))
    parser.add_argument("--case", nargs=2, metavar=("CASE", "FOLDER"), help="one case, in this process")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case[0], Path(args.case[1]))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, bases = Path(temporary), base_conversations()
        num_rows = write_corpus(folder / "corpus.jsonl", bases, num_bytes=int(args.mb * 1e6), joined=args.joined)
        if not CASES_OF_PAIRS.keys().isdisjoint(args.cases):
            write_pairs(folder)
        train_tokenizer(folder / "tokenizer", bases)
        packages = ", ".join(f"{name} {version(name)}" for name in ("trl", "datasets", "transformers", "tokenizers"))
        print(f"{platform.machine()}, {CORES} cores, load {os.getloadavg()[0]:.1f}; {packages}")
        print(f"{args.mb:g} MB, {num_rows:,} conversations of {args.joined} joined, fastest of {args.rounds}\n")
        print(f"|{COLUMNS}|\n|{'---|' * len(COLUMNS.split('|'))}")
        speeds: dict[int, float] = {}
        for case in args.cases:
            runs = [measure(case, folder) for _ in range(args.rounds)]
            print(line(case, min(runs, key=lambda run: run["seconds"]), speeds), flush=True)


def base_conversations() -> Bases:
    """Short conversations, weighted so that each file gives characters in proportion to its size."""
    shared = [SHARED / f"{name}.jsonl" for name in ("chat_messages", "ro_chat", "instruct_en")]
    files = shared if SHARED.is_dir() else [SAMPLES / "ultrachat_ro.json", SAMPLES / "uk_law.jsonl"]
    bases = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        rows = json.loads(text) if file.suffix == ".json" else map(json.loads, text.splitlines())
        turns = list(filter(None, map(_turns, rows)))
        bases += [(file.stat().st_size / len(turns), own) for own in turns]
    return bases


def _turns(row: Result) -> Turns:
    """The turns of a row from the first user's to the last assistant's, without system texts."""
    if "messages" in row:
        turns = [turn for turn in row["messages"] if turn["role"] != "system"]
    else:
        question = row.get("question") or f"{row.get('instruction')}\n{row.get('input')}".strip()
        texts = row.get("data") or [question, row.get("answer") or row["output"]]
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    return turns


def write_corpus(path: Path, bases: Bases, *, num_bytes: int, joined: tuple[int, int]) -> int:
    """Write conversations until the file has `num_bytes`; returns their number."""
    generator, weights, number = random.Random(0), [weight for weight, _ in bases], 0
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            parts = generator.choices([turns for _, turns in bases], weights, k=generator.randint(*joined))
            turns = [dict(turn) for part in parts for turn in part]
            for place, turn in enumerate(turns):
                if turn["role"] == "user":
                    new = ("".join(generator.choices("aeiorstnlcm", k=8)) for _ in range(NEW_WORDS))
                    turn["content"] += f" ({number}.{place} {' '.join(new)})"
            file.write(json.dumps({"messages": turns}, ensure_ascii=False).encode() + b"\n")
            number += 1
    return number


def write_pairs(folder: Path) -> None:
    """Write pairs.jsonl from corpus.jsonl: the rejected answer is the last one of the conversation before."""
    other = {"role": "assistant", "content": "-"}
    with (folder / "corpus.jsonl").open(encoding="utf-8") as source, (folder / "pairs.jsonl").open("wb") as file:
        for text in source:
            *prompt, answer = json.loads(text)["messages"]
            row = {"prompt": prompt, "chosen": [answer], "rejected": [other]}
            if answer != other:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            other = answer


def train_tokenizer(folder: Path, bases: Bases) -> None:
    """A byte-level BPE with Qwen2.5's control tokens and template."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options = {"special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "show_progress": False}
    options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, **options)
    backend.train_from_iterator((turn["content"] for _, turns in bases for turn in turns), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    # TRL knows this template by its text, and takes its own training variant for it.
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer.save_pretrained(folder)


def measure(case: str, folder: Path) -> Result:
    """Run one case in a fresh process, with caches and output in a folder that is deleted."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "tests.benchmarks.prepare", "--case", case, str(folder)]
        env = os.environ | {"HF_HOME": scratch, "HF_DATASETS_CACHE": f"{scratch}/datasets", "TMPDIR": scratch}
        # Otherwise a case of one process would tokenise with a thread for every core.
        env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(case: str, result: Result, speeds: dict[int, float]) -> str:
    """One line of the table; `speeds` are those of ours so far, by number of processes."""
    seconds, tokens, rows = result["seconds"], result["tokens"], result["rows"]
    processes, speed = 1 if case.endswith("_1") else CORES, tokens / seconds
    cells = [NAMES[case], processes, f"{seconds:.1f}", f"{result['cpu']:.1f}", f"{speed:,.0f}"]
    speeds |= {processes: speed} if case.startswith("ours") and case != "ours_near" else {}
    cells += [f"{speeds[processes] / speed:.2f}" if processes in speeds else "-", f"{tokens:,}", f"{rows:,}"]
    cells += [f"{tokens / (rows * result.get('seq_len', SEQ_LEN)):.2%}", f"{result['supervised_tokens']:,}"]
    cells += [f"{result['pss'] / GIB:.2f}", result["left_out"]]
    return "| " + " | ".join(map(str, cells)) + " |"


class Peak(PeakMemory):
    """`PeakMemory` that also samples CPU seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[int, float] = {}

    def _sample(self) -> None:
        super()._sample()
        for process in [me := psutil.Process(), *me.children(recursive=True)]:
            with suppress(psutil.Error, OSError):  # ended meanwhile
                self.cpu[process.pid] = sum(process.cpu_times()[:2])


@contextmanager
def measured(result: Result) -> Iterator[None]:
    """Add seconds and CPU seconds of the block to the result, and raise its peaks of memory."""
    with Peak() as peak:
        started, cpu = time.perf_counter(), sum(peak.cpu.values())
        yield
        result["seconds"] += time.perf_counter() - started
    result["cpu"] += sum(peak.cpu.values()) - cpu
    result["pss"] = max(result["pss"], peak.peak_bytes)


def run_case(case: str, folder: Path) -> Result:
    """Seconds, memory and what is in the rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    name, processes = case.removesuffix("_1"), None if case.endswith("_1") else CORES
    file, result = str(folder / "corpus.jsonl"), {"seconds": 0.0, "cpu": 0.0, "pss": 0}
    if name == "trl_pairs":
        counts = trl_pairs(str(folder / "pairs.jsonl"), tokenizer, result, processes=processes)
    elif name == "ours_pairs":
        file = str(folder / "pairs.jsonl")
        counts = ours(file, tokenizer, result, near=None, workers=processes or 1, kind="preference", seq_len=PAIR_LEN)
    elif name.startswith("ours"):
        counts = ours(file, tokenizer, result, near=0.8 if name == "ours_near" else None, workers=processes or 1)
    elif name == "plain":
        counts = plain(file, tokenizer, result, processes=processes)
    else:
        counts = trl(file, tokenizer, result, strategy=name.removeprefix("trl_"), processes=processes)
    return result | counts


def ours(
    file: str,
    tokenizer: Any,
    result: Result,
    *,
    near: float | None,
    workers: int,
    kind: str = "chat",
    seq_len: int = SEQ_LEN,
) -> Result:
    """Exact duplicates are looked for, and the audit's numbers counted, within the time."""
    from tpu_experiments.config.data_schema import DataSourceConfig, PrepareConfig
    from tpu_experiments.data.prepare import Preparation, prepare
    from tpu_experiments.data.steps.workers import start_server

    if workers > 1:
        start_server()
        time.sleep(IMPORTING_SECONDS)
    source = DataSourceConfig(path=file, kind=kind, eval_fraction=0, test_fraction=0)
    source.duplicates.near = near
    with tempfile.TemporaryDirectory() as out:
        how = Preparation(PrepareConfig(workers=workers), out, tokenizer, {})
        with measured(result):
            prepared = prepare({"chat": source}, data_size="full", seq_lens=[seq_len], preparation=how)
    manifest = prepared["chat"].manifests[seq_len]
    left_out = ", ".join(f"{count} {reason}" for reason, count in manifest["documents_reported"].items())
    return {"left_out": left_out or "0", "seq_len": seq_len, **manifest["splits"]["train"]}


def trl(file: str, tokenizer: Any, result: Result, *, strategy: str, processes: int | None) -> Result:
    """The trainer itself, with a model of two layers; None processes is its default, the main one."""
    from datasets import load_dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **values: Any) -> Any:
            with measured(result):
                return super()._prepare_dataset(*args, **values)

    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 32}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **widths))
    with measured(result):
        dataset = load_dataset("json", data_files=file, split="train")
    options = {"packing": True, "packing_strategy": strategy, "max_length": SEQ_LEN, "assistant_only_loss": True}
    options |= {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "report_to": "none"}
    config = SFTConfig(dataset_num_proc=processes, **options)
    trainer = TimedTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)
    return counted(trainer.train_dataset)


def trl_pairs(file: str, tokenizer: Any, result: Result, *, processes: int | None) -> Result:
    """The trainer's own preprocessing, without a trainer, which would need a model."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer

    options = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "report_to": "none"}
    config = DPOConfig(dataset_num_proc=processes, max_length=PAIR_LEN // 2, **options)
    with measured(result):
        dataset = load_dataset("json", data_files=file, split="train")
        made = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=tokenizer), dataset, tokenizer, config, "train")
    answers = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in made)
    tokens = answers + 2 * sum(len(row["prompt_ids"]) for row in made)
    left_out = f"{len(dataset) - len(made)} prompts of {PAIR_LEN // 2}"
    rows = {"rows": 2 * len(made), "seq_len": PAIR_LEN // 2}
    return {"tokens": tokens, "supervised_tokens": answers, "left_out": left_out, **rows}


def plain(file: str, tokenizer: Any, result: Result, *, processes: int | None) -> Result:
    """The few lines a user writes: template and tokens, then rows filled in order."""
    from datasets import load_dataset
    from trl.chat_template_utils import get_training_chat_template

    template = get_training_chat_template(tokenizer)

    def tokenize(batch: Result) -> Result:
        options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
        return tokenizer.apply_chat_template(batch["messages"], **options)

    with measured(result):
        dataset = load_dataset("json", data_files=file, split="train")
        options = {"batched": True, "num_proc": processes}
        dataset = dataset.map(tokenize, remove_columns=dataset.column_names, **options)
        dataset = dataset.map(next_fit, remove_columns=dataset.column_names, **options)
    return counted(dataset)


def next_fit(batch: Result) -> Result:
    """Each conversation, cut at the length of a row, goes into the last row or begins the next."""
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for ids, mask in zip(batch["input_ids"], batch["assistant_masks"], strict=True):
        ids = ids[:SEQ_LEN]
        labels = [token if learnt else -100 for token, learnt in zip(ids, mask, strict=False)]
        if not rows["input_ids"] or len(rows["input_ids"][-1]) + len(ids) > SEQ_LEN:
            for values in rows.values():
                values.append([])
        rows["input_ids"][-1] += ids
        rows["labels"][-1] += labels
        rows["seq_lengths"][-1].append(len(ids))
    return rows


def counted(dataset: Any) -> Result:
    """Rows, tokens and supervised tokens; a segment's first token is never predicted, whatever its label."""
    import numpy as np
    import pyarrow.compute as pc

    table = dataset.with_format("arrow")[:]
    lengths_S = pc.list_flatten(table["seq_lengths"]).to_numpy()
    learnt_L = pc.list_flatten(table["labels"]).to_numpy() != -100
    assert lengths_S.sum() == len(learnt_L), "segments do not add up to the tokens"
    learnt_L[np.cumsum(lengths_S) - lengths_S] = False
    return {"tokens": len(learnt_L), "rows": len(table), "supervised_tokens": int(learnt_L.sum()), "left_out": "-"}


if __name__ == "__main__":
    main()
