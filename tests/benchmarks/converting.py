"""What task=convert makes of examples of axolotl, LLaMA-Factory and TRL: keys covered, and rows beside their own code.

    python -m tests.benchmarks.converting coverage --sources FOLDER
    python -m tests.benchmarks.converting rows --sources FOLDER        # tokens and loss masks of ten examples
    python -m tests.benchmarks.converting runs --sources FOLDER        # the ten train in smoke form

FOLDER has checkouts of the three projects as `axolotl`, `LLaMA-Factory` and `trl`, of which nothing is in this
repository. Their own code makes the rows beside ours; axolotl's needs `pip install colorama addict` (also into
FOLDER/extra), and a module `torchaudio`, which is imported and not used, is taken to be empty. The models are small
ones of the same architecture. No Hub is needed: tokenizers are trained here, byte-level BPE with the marks of the
family, or one like Mistral's of SentencePiece, and rows are LLaMA-Factory's demonstration files.
"""

import argparse
import collections
import dataclasses
import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.data import small_tokenizers
from tpu_experiments.config.schema import register
from tpu_experiments.config.task_schema import ConvertTaskConfig
from tpu_experiments.tasks.convert import drafted, template_files
from tpu_experiments.tasks.convert.overlay import checked, text_of
from tpu_experiments.tasks.convert.reading import read
from tpu_experiments.tasks.convert.table import Draft, is_neutral

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {"axolotl": "examples", "LLaMA-Factory": "examples", "trl": ""}
COMMAND = re.compile(r"^[ \t]*((?:trl|python|accelerate launch)\b(?:[^\n`\\]|\\\n|\\.)*)", re.MULTILINE)
YAML_OF_TRL = re.compile(r"```yaml\n# (sft|dpo|reward|grpo|rloo|kto)_config.yaml\n(.*?)```", re.DOTALL)
Encoded = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a document, and the places that are learnt."""


# ---- coverage -----------------------------------------------------------------------------------------------


def examples(sources: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the program and the config or command of every example of a training."""
    for name, key in (("axolotl", "base_model"), ("LLaMA-Factory", "stage")):
        for file in sorted((sources / name / FOLDERS[name]).rglob("*.y*ml")):
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
            if isinstance(values, dict) and key in values:
                yield name, str(file)
    places = [
        *(sources / "trl" / "docs").rglob("*.md"),
        *(sources / "trl").rglob("*.py"),
        sources / "trl" / "README.md",
    ]
    seen = set()
    for place in sorted(places):
        text = (
            place.read_text(encoding="utf-8").replace("\n# ", "\n")
            if place.suffix == ".py"
            else place.read_text("utf-8")
        )
        for number, found in enumerate(YAML_OF_TRL.finditer(text)):
            file = folder / f"{place.stem}_{number}.yaml"
            file.write_text(found[2])
            yield "trl", f"trl {found[1]} --config {file}"
        for found in COMMAND.finditer(text):
            command = " ".join(found[1].replace("\\\n", " ").split())
            is_one = re.search(
                r"(^trl (sft|dpo|reward|grpo|rloo|kto) --)|trl/scripts/(sft|dpo|reward|grpo|rloo|kto)\.py --", command
            )
            if is_one and "--config " not in command and "..." not in command and command not in seen:
                seen.add(command)
                yield "trl", command


def converted(config: str, **settings: Any) -> Draft:
    task = ConvertTaskConfig(name="convert", config=config, **settings)
    return drafted(read(config), task)


def settings_of(program: str, config: str, sources: Path) -> dict[str, Any]:
    if program == "LLaMA-Factory":
        return {"dataset_info": str(sources / "LLaMA-Factory" / "data" / "dataset_info.json")}
    return {"format": "messages"} if program == "trl" and re.search(r"\bsft\b|sft\.py", config) else {}


def kind_of(draft: Draft, key: str, value: Any) -> str:
    known = draft.tool.keys.get(key)
    if known is None:
        return "unknown"
    if any(each.partition(".")[0] == key for each in draft.problems):
        return "refused"
    if known.kind == "equal":
        return "equal"
    return "idle" if known.kind == "idle" else "off" if is_neutral(value, known.neutral) else "refused"


def coverage(sources: Path) -> None:
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    files: collections.Counter[str] = collections.Counter()
    whole: collections.Counter[str] = collections.Counter()
    composed: collections.Counter[str] = collections.Counter()
    names: dict[str, set[str]] = collections.defaultdict(set)
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        for program, config in examples(sources, Path(folder)):
            draft = converted(config, **settings_of(program, config, sources))
            given = read(config).values
            files[program] += 1
            whole[program] += not draft.problems
            composed[program] += not draft.problems and composes(draft)
            for key, value in given.items():
                if value is not None:
                    kinds[program][kind_of(draft, key, value)] += 1
                    names[program].add(key)
            reasons[program].update(list(draft.problems))
    print(
        "| program | examples | keys with a value | different | equal | no effect | off | refused | unknown "
        "| whole | and compose |"
    )
    print(f"|{'---|' * 11}")
    for program, count in files.items():
        total = kinds[program].total()
        shares = [f"{kinds[program][kind] / total:.1%}" for kind in ("equal", "idle", "off", "refused", "unknown")]
        print(
            f"| {program} | {count} | {total:,} | {len(names[program])} | {' | '.join(shares)} "
            f"| {whole[program]} | {composed[program]} |"
        )
    for program, counted in reasons.items():
        print(f"\n{program}, refused: " + ", ".join(f"{key} {count}" for key, count in counted.most_common(14)))


def composes(draft: Draft) -> bool:
    template_files(draft, folder=Path("outputs"), name="example")
    checked(text_of(draft, name="example", source="example"), name="example", overrides=["~local"])
    return True


# ---- ten examples -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """An example, the rows and the tokenizer that stand for its own, and the other program's rows."""

    name: str
    program: str
    config: str
    rows: str
    """Kind of the rows: a function `rows_KIND` makes the file."""
    marks: str
    """Marks of the tokenizer."""
    model: str
    """Model of conf/model whose small copy trains."""
    theirs: Callable[["Made"], list[Encoded]]
    leave: tuple[str, ...] = ()
    format: str | None = None
    edit: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Made:
    """What a case is compared with: its config, rows and tokenizer."""

    case: Case
    values: Mapping[str, Any]
    rows: list[dict[str, Any]]
    tokenizer: Any
    sources: Path


def instructions(sources: Path) -> list[dict[str, Any]]:
    rows = json.loads((sources / "LLaMA-Factory/data/alpaca_en_demo.json").read_text(encoding="utf-8"))
    long = [row for row in rows if row["input"]][:60] + [row for row in rows if not row["input"]][:60]
    return [{key: row[key] for key in ("instruction", "input", "output")} for row in long if len(row["output"]) < 900]


def rows_instructions(sources: Path) -> list[dict[str, Any]]:
    return instructions(sources)


def rows_turns(sources: Path) -> list[dict[str, Any]]:
    """Return conversations of two questions, every third with a system text."""
    rows, found = instructions(sources), []
    for number, (first, second) in enumerate(zip(rows[::2], rows[1::2], strict=False)):
        system = [{"from": "system", "value": "Answer briefly."}] if number % 3 == 0 else []
        turns = [
            ("human", first["instruction"]),
            ("gpt", first["output"]),
            ("human", second["instruction"]),
            ("gpt", second["output"]),
        ]
        found.append({"conversations": [*system, *({"from": role, "value": text.strip()} for role, text in turns)]})
    return found


def rows_messages(sources: Path) -> list[dict[str, Any]]:
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    return [
        {"messages": [{"role": names[t["from"]], "content": t["value"]} for t in row["conversations"]]}
        for row in rows_turns(sources)
    ]


def rows_texts(sources: Path) -> list[dict[str, Any]]:
    return [{"text": f"{row['instruction']}\n\n{row['output']}"} for row in instructions(sources)]


def rows_completions(sources: Path) -> list[dict[str, Any]]:
    def turn(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text.strip()}]

    return [
        {"prompt": turn("user", row["instruction"]), "completion": turn("assistant", row["output"])}
        for row in instructions(sources)
    ]


def rows_pairs(sources: Path) -> list[dict[str, Any]]:
    rows = json.loads((sources / "LLaMA-Factory/data/dpo_en_demo.json").read_text(encoding="utf-8"))
    keep = [row for row in rows if len(json.dumps(row)) < 3000][:60]
    for row in keep:
        for turn in (*row["conversations"], row["chosen"], row["rejected"]):
            turn["value"] = turn["value"].strip()
    return [row for row in keep if row["chosen"] != row["rejected"]]


def rows_preferences(sources: Path) -> list[dict[str, Any]]:
    """Return pairs of whole conversations, as trl-lib/ultrafeedback_binarized has them."""
    found = []
    for row in rows_pairs(sources):
        if len(row["conversations"]) == 1:
            question = {"role": "user", "content": row["conversations"][0]["value"]}
            found.append(
                {key: [question, {"role": "assistant", "content": row[key]["value"]}] for key in ("chosen", "rejected")}
            )
    return found


MARKS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"]),
    "chatml": (None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>", "<think>", "</think>"]),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>", "<pad>"]),
}
"""BOS, EOS and further marks of the families."""


def tokenizer_of(marks: str, *, folder: Path, sources: Path) -> Any:
    """Return a tokenizer: one like Mistral's, or a byte-level BPE trained on the rows."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if marks == "mistral":
        made = small_tokenizers.mistral()
        backend = made.backend_tokenizer
        beginning = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=beginning)
        made.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)
    bos, eos, more = MARKS[marks]
    backend = Tokenizer(models.BPE())
    # Llama 3's and Qwen's pattern, so that a line break and the word behind it are two pieces as there.
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    pattern += r"\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = [each for each in (bos, eos, *more) if each]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((json.dumps(row, ensure_ascii=False) for row in instructions(sources)), trainer)
    if bos is not None:  # as the families' own tokenizers do
        beginning = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=beginning)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=more[-1], additional_special_tokens=more
    )
    if marks == "chatml":  # what `--chat_template` of the model's own is there
        made.chat_template = (REPOSITORY / "tpu_experiments/data/tokens/chat_formats/qwen2_5.jinja").read_text()
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def encoded(ids: list[int], labels: list[int]) -> Encoded:
    """Return a document as it is compared: a first token has no context, and is never learnt here."""
    return tuple(ids), tuple(at for at, label in enumerate(labels) if label != -100 and at > 0)


def by_axolotl(made: Made) -> list[Encoded]:
    from axolotl.prompt_strategies import load
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter
    from axolotl.utils.dict import DictDefault

    entry = DictDefault(dict(made.values["datasets"][0]))
    cfg = DictDefault(
        {**made.values, "datasets": [entry], "train_on_inputs": made.values.get("train_on_inputs", False)}
    )
    if entry.type == "alpaca":
        strategy = AlpacaPromptTokenizingStrategy(
            AlpacaPrompter(), made.tokenizer, cfg.train_on_inputs, cfg.sequence_len
        )
    else:
        strategy = load(entry.type, made.tokenizer, cfg, entry)
    if entry.type in ("completion",):
        batch = {key: [row[key] for row in made.rows] for key in made.rows[0]}
        found = strategy.tokenize_prompt(batch)
        return [encoded(ids, labels) for ids, labels in zip(found["input_ids"], found["labels"], strict=True)]
    rows = [strategy.tokenize_prompt(dict(row)) for row in made.rows]
    return [encoded(row["input_ids"], row["labels"]) for row in rows]


def _llamafactory(made: Made, kind: Any) -> Any:
    """Return LLaMA-Factory's processor of rows, of a class of it."""
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams.data_args import DataArguments

    arguments = DataArguments(template=made.values["template"], cutoff_len=made.values["cutoff_len"])
    template = get_template_and_fix_tokenizer(made.tokenizer, arguments)
    return kind(template=template, tokenizer=made.tokenizer, processor=None, data_args=arguments)


def _turns(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str]:
    turns = row["conversations"]
    system = turns[0]["value"] if turns[0]["from"] == "system" else ""
    names = {"human": "user", "gpt": "assistant"}
    return [{"role": names[t["from"]], "content": t["value"]} for t in turns if t["from"] != "system"], system


def by_llamafactory(made: Made) -> list[Encoded]:
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor

    processor = _llamafactory(made, SupervisedDatasetProcessor)
    found = []
    for row in made.rows:
        asked = "\n".join(text for text in (row["instruction"], row["input"]) if text)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        found.append(encoded(*processor._encode_data_example(turns[:-1], turns[-1:], "", "", [], [], [])))
    return found


def by_llamafactory_in_pairs(made: Made) -> list[Encoded]:
    from llamafactory.data.processor.pairwise import PairwiseDatasetProcessor

    processor = _llamafactory(made, PairwiseDatasetProcessor)
    found = []
    for row in made.rows:
        turns, system = _turns(row)
        answers = [{"role": "assistant", "content": row[key]["value"]} for key in ("chosen", "rejected")]
        chosen, learnt, rejected, also = processor._encode_data_example(turns, answers, system, "", [], [], [])
        found += [encoded(chosen, learnt), encoded(rejected, also)]
    return found


def by_trl(made: Made) -> list[Encoded]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    completion = None if made.case.rows != "completions" else True
    args = SFTConfig(output_dir="outputs", report_to=[], use_cpu=True, bf16=False, max_length=4096)
    holder = types.SimpleNamespace(
        _tokenizer=made.tokenizer, processing_class=made.tokenizer, chat_template=made.tokenizer.chat_template,
        completion_only_loss=bool(completion), _is_vlm=False, args=args, _is_vision_dataset=False,
    )  # fmt: skip
    rows = SFTTrainer._prepare_dataset(holder, Dataset.from_list(made.rows), made.tokenizer, args, False, None, "train")
    return [encoded(row["input_ids"], row["labels"] if "labels" in row else row["input_ids"]) for row in rows]


def by_trl_in_pairs(made: Made) -> list[Encoded]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(output_dir="outputs", report_to=[], use_cpu=True, bf16=False, max_length=4096)
    holder = types.SimpleNamespace(_tokenizer=made.tokenizer)
    found = []
    for row in DPOTrainer._prepare_dataset(holder, Dataset.from_list(made.rows), made.tokenizer, args, "train"):
        for key in ("chosen_ids", "rejected_ids"):
            found.append(encoded(row["prompt_ids"] + row[key], [-100] * len(row["prompt_ids"]) + row[key]))
    return found


LLAMA_DATA = (("dataset: identity,alpaca_en_demo", "dataset: alpaca_en_demo"),)
SFT = (
    "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name rows.jsonl "
    "--learning_rate 2.0e-5 --num_train_epochs 1 "
)
CASES = (
    Case(
        "llama-3/qlora-1b.yml",
        "axolotl",
        "examples/llama-3/qlora-1b.yml",
        "instructions",
        "llama3",
        "llama32_1b",
        by_axolotl,
    ),
    Case(
        "mistral/qlora.yml", "axolotl", "examples/mistral/qlora.yml", "instructions", "mistral", "mistral7b", by_axolotl
    ),
    Case(
        "llama-3/instruct-lora-8b.yml",
        "axolotl",
        "examples/llama-3/instruct-lora-8b.yml",
        "messages",
        "llama3",
        "llama3_8b",
        by_axolotl,
    ),
    Case(
        "gemma3/gemma-3-1b-qlora.yml",
        "axolotl",
        "examples/gemma3/gemma-3-1b-qlora.yml",
        "turns",
        "gemma",
        "gemma3_1b",
        by_axolotl,
    ),
    Case(
        "loraplus/llama3_lora_sft.yaml",
        "LLaMA-Factory",
        "examples/extras/loraplus/llama3_lora_sft.yaml",
        "instructions",
        "llama3",
        "llama3_8b",
        by_llamafactory,
        edit=LLAMA_DATA,
    ),
    Case(
        "train_lora/qwen3_lora_sft.yaml",
        "LLaMA-Factory",
        "examples/train_lora/qwen3_lora_sft.yaml",
        "instructions",
        "chatml",
        "qwen3_06b",
        by_llamafactory,
        edit=LLAMA_DATA,
    ),
    Case(
        "train_lora/qwen3_lora_dpo.yaml",
        "LLaMA-Factory",
        "examples/train_lora/qwen3_lora_dpo.yaml",
        "pairs",
        "chatml",
        "qwen3_06b",
        by_llamafactory_in_pairs,
    ),
    Case(
        "trl sft, conversations", "trl", SFT + "--packing", "messages", "chatml", "qwen05b", by_trl, format="messages"
    ),
    Case(
        "trl sft, completions",
        "trl",
        SFT + "--use_peft --lora_r 32 --lora_alpha 16",
        "completions",
        "chatml",
        "qwen05b",
        by_trl,
        format="prompt_completion",
    ),
    Case(
        "trl dpo",
        "trl",
        "trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name rows.jsonl --use_peft --lora_r 32",
        "preferences",
        "chatml",
        "qwen05b",
        by_trl_in_pairs,
    ),
)
"""Examples of the projects; of TRL, commands as in its documentation, with a file in the place of the data set."""


def prepared_case(case: Case, *, folder: Path, sources: Path) -> tuple[Made, Draft]:
    """Convert an example whose data set is a file of rows here."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = globals()[f"rows_{case.rows}"](sources)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    tokenizer = tokenizer_of(case.marks, folder=folder / "tokenizer", sources=sources)
    config, settings = case.config, {}
    if case.program != "trl":
        text = (sources / case.program / case.config).read_text(encoding="utf-8")
        for old, new in case.edit:
            text = text.replace(old, new)
        config = str(folder / "config.yaml")
        Path(config).write_text(text, encoding="utf-8")
        settings = settings_of(case.program, config, sources)
    given = read(config)
    task = ConvertTaskConfig(name="convert", config=config, leave=list(case.leave), format=case.format, **settings)
    draft = drafted(given, task)
    assert not draft.problems, draft.problems
    [name] = {key.split(".")[1] for key in draft.settings if key.startswith("data.")}
    draft.settings[f"data.{name}.path"] = str(file)
    draft.settings.pop(f"data.{name}.max_documents", None)
    return Made(case, given.values, rows, tokenizer, sources), draft


def ours(made: Made, draft: Draft, *, folder: Path) -> list[Encoded]:
    """Return the documents in our rows."""
    import numpy as np

    from tests.data.preparing import all_rows, prepared
    from tpu_experiments.config.curriculum import resolve_stages
    from tpu_experiments.data.tokens.tokenizer import load_tokenizer

    overrides = [f"model={made.case.model}", "data.{0}.eval_fraction=0.0", "~local"]
    [name] = {key.split(".")[1] for key in draft.settings if key.startswith("data.")}
    config = checked(
        text_of(draft, name="case", source="case"), name="case", overrides=[each.format(name) for each in overrides]
    )
    place = str(folder / "tokenizer")
    tokenizer = load_tokenizer(
        place, revision=None, chat_template_path=config.model.chat_template_path, chat_format=config.model.chat_format
    )
    settings = {key: getattr(config.prepare, key) for key in ("packing", "long_documents")}
    [stage] = resolve_stages(config)
    length = config.trainer.seq_len
    [source] = prepared(
        config.data, folder=folder / "prepared", tokenizer=tokenizer, seq_lens=(length,), **settings
    ).values()
    rows, found = all_rows(source, "train", length), []
    for ids, learn, segments in zip(rows.ids_NT, rows.learn_NT, rows.segments_NT, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            at = np.flatnonzero(segments == segment)
            learnt = np.arange(1, len(at)) if stage.learn == "all" else np.flatnonzero(learn[at])
            found.append((tuple(int(i) for i in ids[at]), tuple(int(i) for i in learnt)))
    return found


def compare(here: list[Encoded], there: list[Encoded], tokenizer: Any) -> str:
    """Return a line of the table: documents, equal ids, equal masks, and what differs in the others."""
    of_ids = collections.Counter(ids for ids, _ in here)
    same_ids = sum((of_ids & collections.Counter(ids for ids, _ in there)).values())
    both = sum((collections.Counter(here) & collections.Counter(there)).values())
    learnt = {ids: set(mask) for ids, mask in here}
    only_there: collections.Counter[str] = collections.Counter()
    only_here: collections.Counter[str] = collections.Counter()
    for ids, mask in there:
        if ids in learnt:
            only_there.update(tokenizer.decode([ids[at]]) for at in set(mask) - learnt[ids])
            only_here.update(tokenizer.decode([ids[at]]) for at in learnt[ids] - set(mask))
    differing = [f"learnt there alone: {dict(only_there)}"] if only_there else []
    differing += [f"learnt here alone: {dict(only_here)}"] if only_here else []
    if not same_ids:  # a tokenizer that sets a blank before a text sets one before an answer that is tokenized alone
        first = {ids[: mask[0]] for ids, mask in here if mask} & {ids[: mask[0]] for ids, mask in there if mask}
        differing.append(f"{len(first)} equal prompts; answers begin with another token")
    return f"{len(there)} | {len(here)} | {same_ids} | {both} | {'; '.join(differing)}"


def with_their_code(sources: Path) -> None:
    """Put the other programs' code on the path; `torchaudio` is imported there and not used."""
    for name in ("axolotl", "LLaMA-Factory"):
        sys.path.append(str(sources / name / "src"))
    sys.path.append(str(sources / "extra"))
    os.environ["DISABLE_VERSION_CHECK"] = (
        "1"  # LLaMA-Factory names versions of transformers, and its templates need none
    )
    empty = types.ModuleType("torchaudio")
    empty.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", empty)


def rows(sources: Path, only: str) -> None:
    with_their_code(sources)
    print("| example | rows there | rows here | equal ids | and masks | what differs |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(CASES):
            if not case.config or only not in case.name:
                continue
            folder = Path(place, str(number))
            made, draft = prepared_case(case, folder=folder, sources=sources)
            here = ours(made, draft, folder=folder)
            print(f"| {case.program}: {case.name} | {compare(here, case.theirs(made), made.tokenizer)} |", flush=True)


def runs(sources: Path, only: str) -> None:
    """Train every example in smoke form, by the command that the user has."""
    print("| example | exit | held-out loss before | after | tokens |\n|---|---|---|---|---|")
    for number, case in enumerate(CASES):
        if not case.config or only not in case.name:
            continue
        folder = Path("outputs", "converting", str(number)).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        _, draft = prepared_case(case, folder=folder, sources=sources)
        [name] = {key.split(".")[1] for key in draft.settings if key.startswith("data.")}
        place = folder / "conf" / "experiment"
        place.mkdir(parents=True)
        (place / "converted.yaml").write_text(text_of(draft, name="converted", source=case.name), encoding="utf-8")
        words = [
            *("--config-dir", str(folder / "conf"), "experiment=converted", "debug=smoke", f"model={case.model}"),
            *("data_size=full", f"model.tokenizer_path={folder / 'tokenizer'}"),
            *(f"output_dir={folder / 'out'}", f"data.{name}.eval_fraction=0.1", "trainer.seq_len=512"),
            *("prepare.long_documents=drop", "logger=[console,jsonl]", "sample.max_new_tokens=0"),
            *("trainer.max_stage_steps=3", "trainer.eval_every_steps=0", "hw.runtime=eager"),
            *("++model.tiny_arch.vocab_size=4096", "++model.tiny_arch.max_position_embeddings=1024"),
        ]
        done = subprocess.run(
            [sys.executable, "run.py", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        (folder / "stderr").write_text(done.stderr)
        (folder / "stdout").write_text(done.stdout)
        [result] = [*(folder / "out").rglob("result.json")] or [None]
        found = {} if result is None else json.loads(result.read_text(encoding="utf-8"))
        losses = f"{found.get('eval_loss_before')} | {found.get('eval_loss')} | {found.get('tokens')}"
        print(f"| {case.program}: {case.name} | {done.returncode} | {losses} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("coverage", "rows", "runs"))
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    register()
    if args.what == "coverage":
        coverage(args.sources)
    else:
        {"rows": rows, "runs": runs}[args.what](args.sources, args.only)


if __name__ == "__main__":
    main()
