"""Plan every line of conf/tuned.yaml again with its own settings, and write a new table.

    python -m tests.benchmarks.retune OUTPUT [MODEL ...]

The new table is OUTPUT/tuned.yaml; compilations are kept below OUTPUT, and lines that are in the new table already are
left out, so that a second call goes on. Copy it over conf/tuned.yaml when it is whole. To look for faster settings
than those of a line, use task=plan task.explore=search (conf/README.md).
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tpu_experiments.config.compose import CONF, config_of
from tpu_experiments.config.overlay import override_of
from tpu_experiments.config.schema import register
from tpu_experiments.planning.tuned import Line, facts_of, lines

REPOSITORY = CONF.parent
AS_IT_IS = "task.search.axes={trainer.micro_batch_rows:[],sharding:[],model.stack:[],model.remat:[]}"
TOKENIZER = "model.tokenizer_path=tpu_experiments/samples/tokenizer"


BASES: list[list[str]] = [[], ["model.base=int8"], ["model.base=nf4"]]
"""Forms of the base, which a line holds only as part of a hash."""


def words_of(line: Line) -> list[str]:
    """The step of a line on the command line."""
    settings = {
        "trainer.seq_len": line.row_tokens,
        "trainer.micro_batch_rows": line.micro_tokens // line.row_tokens,
        "trainer.global_batch_rows": line.step_tokens // line.row_tokens,
        "lora.r": line.rank,
        "lora.targets": list(line.targets),
        **line.settings,
    }
    words = [
        f"model={line.model}",
        "data=sample_text",
        f"hw={line.hw}",
        *(override_of(key, value) for key, value in settings.items()),
    ]
    for base in BASES:
        if facts_of(config_of([*words, *base, "tuned=off", "task=plan", "~local"])) == line.facts:
            return [*words, *base]
    raise SystemExit(f"{line.model} on {line.hw} was planned with settings that a line does not hold; plan it by hand")


def key_of(line: Line) -> tuple[Any, ...]:
    """What tells the lines of a table apart."""
    return line.model, line.hw, line.row_tokens, line.rank, line.step_tokens, line.settings["model.stack"]


def main() -> None:
    """Plan what the new table lacks, line by line."""
    register()
    output, *models = sys.argv[1:]
    table = Path(output).resolve() / "tuned.yaml"
    table.parent.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(lines()):
        lines.cache_clear()
        if (models and line.model not in models) or key_of(line) in {key_of(each) for each in lines(table)}:
            continue
        command = [sys.executable, "run.py", *words_of(line), "tuned=off", "task=plan", "task.programs=train"]
        command += ["task.explore=search", AS_IT_IS, f"task.search.table={table}", f"name=line{number}", TOKENIZER]
        done = subprocess.run([*command, f"output_dir={table.parent}"], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        lines.cache_clear()
        new = next((each for each in lines(table) if key_of(each) == key_of(line)), None)
        after = (
            f"{new.tokens_per_second:,.0f}, {new.hbm_gib} GiB, compiled in {new.compile_seconds:.0f} s" if new else "-"
        )
        print(f"{line.model} {line.hw} {line.words}: {line.tokens_per_second:,.0f} -> {after} ({done.returncode})")


if __name__ == "__main__":
    main()
