"""Forty families on ten machines: a certificate of each, and the table that is made of them.

    python -m tests.benchmarks.families FOLDER [--only TYPE,...] [--machines v5e8,v6e8] [--method analytic]
    python -m tests.benchmarks.families FOLDER --table
    python -m tests.benchmarks.families FOLDER --write

Of each family config.json alone is written, with the sizes that transformers' class has by default, which are those of
a real model. `task=certify` compares a small copy of it and plans the full-size step (LoRA r=16, rows of 2,048 tokens,
256 of them a step). Attention, packing and targets are those with which `decoders` found the family right. With
`--method auto` steps are compiled, and those that take longer than `task.compile_minutes` planned by formulas.

`--write` keeps of every page what the tables need, with the page's own hash, in families.jsonl beside this file, and
writes the tables anew: families.md, and the short one of conf/model/README.md. A page whose hash is not that of its
content is refused. tests/models/test_families_table.py holds the tables against families.jsonl.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tpu_experiments.tasks.certify  # before the processes are forked
import tpu_experiments.tasks.plan.compiled  # noqa: F401
from tests.benchmarks.decoders import IDS
from tpu_experiments.command_line import main as main_of_commands
from tpu_experiments.tasks.certify.page import digest_of

REPOSITORY = Path(__file__).parents[2]
DECODERS = Path(__file__).with_name("decoders.jsonl")
STORED = Path(__file__).with_name("families.jsonl")
PAGE = Path(__file__).with_name("families.md")
MANUAL = REPOSITORY / "conf" / "model" / "README.md"
MARKED = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)
LENT = {"v5e1": "v5e1 (Colab)", "v5e8": "v5e8 (Kaggle)", "v6e1": "v6e1 (Colab)"}
"""Titles of the machines of notebook services."""
MACHINES = ("v5e1", "v5e4", "v5e8", "v5e16", "v6e1", "v6e4", "v6e8", "v6e16", "v4-8", "v5p-8")
FAMILIES = (
    *("apertus", "arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma"),
    *("gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "lfm2"),
    *("llama", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "xlstm"),
)
CHECKS = ("isolation", "logits", "adapter", "folded", "export", "generation", "step")
OF_GRANITE = {"attention_multiplier": 1 / 128, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
OWN: dict[str, dict[str, Any]] = {
    "ministral3": {"sliding_window": None},
    "granite": {**OF_GRANITE, "residual_multiplier": 0.22},
    "nemotron": {"num_key_value_heads": 8},
}
"""Values without which a class's own default is no config, or one that no model has: scores that are not divided at all
(Granite 3.0 8B's are taken) round by more than 1e-5, and of heads of keys that are open transformers builds no model
(Nemotron-4 15B's are taken, arXiv 2402.16819)."""


WITH_DROPOUT = ("gpt2", "seed_oss")
"""Types that drop weights of attention by default, which `model.attention=flash` does not compute on a TPU."""


def words_of(model_type: str, folder: Path) -> list[str]:
    """Return the settings with which the family is certified."""
    lines = DECODERS.read_text(encoding="utf-8").splitlines()
    found = next((each for each in map(json.loads, lines) if each["type"] == model_type), {})
    attention = "sdpa" if model_type in WITH_DROPOUT else found.get("attention", "eager")
    words = [f"model.attention={attention}", f"lora.targets=[{targets_of(found)}]"]
    words += ["model.remat=layer_inputs"] if model_type == "xlstm" else []  # it has no attention whose output is saved
    packing = "best_fit" if found.get("rows", "packed") == "packed" else "pad"
    more = [] if packing == "best_fit" else ["prepare.long_documents=truncate"]
    return [f"model.path={folder}", *words, f"prepare.packing={packing}", *more]


def targets_of(found: Mapping[str, Any]) -> str:
    """Return the Linear modules that PEFT reads of a family."""
    return ",".join(found.get("targets", ["all-linear"])) if "adapter" in found.get("refusals", {}) else "all-linear"


def certify(model_type: str, place: Path, *, machines: Sequence[str], method: str) -> str:
    """Make the certificate of one family; return what the command printed last."""
    config = CONFIG_MAPPING[model_type](**IDS, **OWN.get(model_type, {}))
    folder = place / "configs" / model_type
    config.save_pretrained(folder)
    command = ["run.py", "task=certify", "model=qwen05b", *words_of(model_type, folder), f"name={model_type}"]
    command += ["hw=cpu", f"task.machines=[{','.join(machines)}]", f"task.method={method}"]
    command += ["trainer.seq_len=2048", "trainer.global_batch_rows=256", "trainer.micro_batch_rows=1"]
    command += ["data=sample_text", f"task.checks=[{','.join(CHECKS)}]", f"output_dir={place}"]
    with tempfile.TemporaryFile("w+") as said:
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(command, said))
        child.start()
        child.join()
        said.seek(0)
        return (said.read().strip() or f"ended with {child.exitcode}").splitlines()[-1]


def in_child(command: Sequence[str], said: TextIO) -> None:
    """Run a command in a process that has the libraries imported already."""
    torch.set_num_threads(1)  # small matrices: threads that wait for one another take longer than one alone
    os.chdir(REPOSITORY)
    sys.argv = list(command)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main_of_commands()
    finally:
        said.flush()


def kept_of(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tables need of a certificate, with its hash.

    Raises:
        SystemExit: its hash is not that of its content.
    """
    if certificate["sha256"] != digest_of(certificate):
        raise SystemExit(f"{certificate['name']}: the page was changed after it was made; make it again")
    words = dict(word.split("=", 1) for word in certificate["command"].split() if "=" in word)
    checks = [
        {
            "name": check["name"],
            "verdict": check["verdict"],
            "said": "" if check["verdict"] == "right" else check["said"],
            "figures": {name: check["figures"][name] for name in FIGURES if name in check["figures"]},
        }
        for check in certificate["checks"]
    ]
    about = {"attention": words["model.attention"], "packing": words["prepare.packing"], "checks": checks}
    signed = {name: certificate[name] for name in ("name", "sha256", "made", "git_commit")}
    return {**signed, "transformers": certificate["versions"]["transformers"], **about}


FIGURES = ("method", "gib", "tokens_per_second_per_chip", "targets")


def table(kept: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table: numerics, then thousands of tokens/s a chip and GiB by machine."""
    machines = list(dict.fromkeys(m for each in kept for m in steps_of(each)))
    yield f"| `model_type` | numerics | {' | '.join(LENT.get(m, m) for m in machines)} |"
    yield "|---|---|" + "---|" * len(machines)
    for each in kept:
        cells = [cell_of(steps_of(each).get(machine)) for machine in machines]
        yield f"| `{each['name']}` | {numerics_of(each)} | {' | '.join(cells)} |"


def short_table(kept: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of the manual: verdict, attention, modules that have adapters, machines."""
    yield "| `model_type` | verdict | `model.attention` | adapters of `all-linear` | one step fits on |"
    yield "| --- | --- | --- | --- | --- |"
    for each in kept:
        attention = f"`{each['attention']}`" + ("" if each["packing"] == "best_fit" else ", one document a row")
        targets = next((c["figures"].get("targets") for c in each["checks"] if c["name"] == "adapter"), None)
        shown = [f"`{each['name']}`", numerics_of(each), attention, ", ".join(targets or ()), machines_of(each)]
        yield f"| {' | '.join(shown)} |"


def machines_of(kept: Mapping[str, Any]) -> str:
    """Return the machines on which a step fits; `v5e4+` are those of four chips and more."""
    steps = steps_of(kept)
    if all(step["verdict"] == "not checked" for step in steps.values()):
        return "not counted"
    fitting = [machine for machine, step in steps.items() if step["verdict"] == "right"]
    by_kind: dict[str, list[str]] = {}
    for machine in fitting:
        by_kind.setdefault(machine.partition("e")[0] if "e" in machine else machine, []).append(machine)
    return ", ".join(names[0] + ("+" if len(names) > 1 else "") for names in by_kind.values()) or "none of the ten"


def steps_of(kept: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the steps of a certificate by machine."""
    checks = (check for check in kept["checks"] if check["name"].startswith("step "))
    return {check["name"].removeprefix("step "): check for check in checks}


def numerics_of(kept: Mapping[str, Any]) -> str:
    """Return the verdict of what is no step, with the names of those that are not right."""
    checks = [check for check in kept["checks"] if not check["name"].startswith("step")]
    others = [f"{check['name']} {check['verdict']}" for check in checks if check["verdict"] != "right"]
    return ", ".join(others) or "right"


def cell_of(check: Mapping[str, Any] | None) -> str:
    """Return one machine's cell."""
    if check is None:
        return ""
    figures = check["figures"]
    if check["verdict"] != "right":
        is_large = " GiB a chip" in check["said"]
        return "too large" if is_large else {"not checked": "not counted"}.get(check["verdict"], check["verdict"])
    speed = figures.get("tokens_per_second_per_chip")
    shown = f"{speed / 1000:.1f}" if speed is not None else "?"
    how = "" if figures["method"] == "compiled" else "~"
    return f"{how}{shown}, {figures['gib']:.1f}"


def stored() -> list[dict[str, Any]]:
    """Return what is kept of the pages, by name."""
    return [json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()]


def write(certificates: Sequence[Mapping[str, Any]]) -> None:
    """Keep the pages, those of types that are not among them as they are, and write both tables."""
    kept = {each["name"]: each for each in (stored() if STORED.exists() else ())}
    kept |= {each["name"]: each for each in map(kept_of, certificates)}
    lines = [json.dumps(kept[name], sort_keys=True) for name in sorted(kept)]
    STORED.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for file, rows in ((PAGE, table(stored())), (MANUAL, short_table(stored()))):
        text = "".join(f"{row}\n" for row in rows)
        file.write_text(MARKED.sub(lambda _, text=text: text, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Certify the families that the folder lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="types, with commas; certified again")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--method", default="analytic", choices=("analytic", "auto", "compiled"))
    parser.add_argument("--table", action="store_true", help="print what there is")
    parser.add_argument("--write", action="store_true", help="write what there is into the manuals' tables")
    args = parser.parse_args()
    place: Path = args.folder.absolute()
    made = {name: place / "certificates" / name / "certificate.json" for name in FAMILIES}
    wanted = args.only.split(",") if args.only else [name for name, file in made.items() if not file.exists()]
    for model_type in () if args.table or args.write else wanted:
        said = certify(model_type, place, machines=args.machines.split(","), method=args.method)
        print(f"{model_type}: {said}", flush=True)
    found = [json.loads(file.read_text(encoding="utf-8")) for _, file in sorted(made.items()) if file.exists()]
    if args.write:
        write(found)
    else:
        print(*table([kept_of(each) for each in found]), sep="\n")


if __name__ == "__main__":
    main()
