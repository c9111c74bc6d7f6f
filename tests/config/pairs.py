"""What each model, source and machine composes to: the table of conf/PAIRS.md.

`python -m tests.config.pairs` writes it; tests/config/test_pairs.py holds the file against it.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.config.composing import CONF, composed, names, of_file, sources_of_pairs
from tpu_experiments.config.compose import machine
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import with_lengths
from tpu_experiments.metrics.flops import FAMILIES
from tpu_experiments.planning.analytic import largest_stage
from tpu_experiments.planning.plan import chip_limit_gib
from tpu_experiments.planning.tuned import tuned

MANUAL = CONF / "PAIRS.md"
TABLE = re.compile(r"(?<=<!-- pairs -->\n).*?(?=<!-- end of pairs -->)", re.DOTALL)


def is_fine_tuned(model: str) -> bool:
    """Whether the model is a decoder with published weights: what `python run.py model=... data=...` fine-tunes."""
    given = of_file("model", model)
    return given.arch.model_type in FAMILIES and not given.path.startswith("outputs/")


MODELS = [name for name in names("model") if name not in ("tiny", "reader") and is_fine_tuned(name)]
DATA = [name for name in names("data") if not name.startswith(("sample", "stories")) and name not in sources_of_pairs()]
HW = {"v5e1, colab": "v5e1", "v5e8 (Kaggle)": "v5e8", "v6e1, colab_v6e": "v6e1", "v6e8": "v6e8"}


def table() -> str:
    """The table as Markdown."""
    titles = ["model", "data", "row", "epochs", "lr", *HW]
    lines = [titles, ["---"] * len(titles), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows() -> Iterator[list[str]]:
    """A line for each model and source."""
    for model in MODELS:
        for data in DATA:
            config = composed(f"model={model}", f"data={data}", "task=plan")
            configs = [replace(config, hw=machine(name)) for name in HW.values()]
            (stage,) = resolve_stages(configs[0])
            first = [model, data, f"{stage.geometry.seq_len:,}", f"{stage.epochs:g}", f"{stage.lr:g}"]
            yield [*first, *map(on_machine, configs)]


def on_machine(config) -> str:
    """Rows of a step, those of a chip at once, the memory that formulas give the step, and what it saves."""
    config = tuned(with_lengths(config, None), is_logged=False)
    stage, memory = largest_stage(config, config.model.arch, resolve_stages(config))
    rows, limit = stage.geometry, chip_limit_gib(config.hw)
    fits = f"{memory.total:.1f} GiB" if memory.total <= limit else f"**{memory.total:.1f} of {limit:g} GiB**"
    saved = "unrolled" if config.model.stack == "unrolled" else config.model.remat
    return f"{rows.global_rows} by {rows.micro_rows}, {fits}, {saved}"


if __name__ == "__main__":
    MANUAL.write_text(TABLE.sub(lambda _: table(), MANUAL.read_text(encoding="utf-8")), encoding="utf-8")
