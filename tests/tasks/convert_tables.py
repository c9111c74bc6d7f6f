"""Tables of the manual of task=convert, made from the tables that it uses: python -m tests.tasks.convert_tables."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpu_experiments.tasks.convert import axolotl, llamafactory, trl
from tpu_experiments.tasks.convert.table import Key
from tpu_experiments.tasks.convert.training_settings import KEYS, OPTIMIZERS, SCHEDULES

MANUAL = Path(__file__).parents[2] / "tpu_experiments/tasks/convert/README.md"
REASONS = {"equal": "remark", "idle": "reason", "missing": "reason"}
TITLES = {
    "equal": "Keys with an equal",
    "idle": "Keys without an effect on what is learnt",
    "missing": "Keys that are refused, unless they are off",
}


def grouped(keys: Mapping[str, Key], kind: str) -> dict[tuple[str, str], list[str]]:
    """Return the keys of a kind by what is said of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, key in keys.items():
        if key.kind == kind:
            found.setdefault((key.ours, key.why), []).append(name)
    return found


def code(names: str) -> str:
    return ", ".join(f"`{each.strip()}`" for each in names.split(",") if each.strip())


def table(keys: Mapping[str, Key], kind: str) -> Iterator[str]:
    """Yield the lines of a table."""
    rows = grouped(keys, kind)
    if not rows:
        return
    yield f"*{TITLES[kind]}*"
    yield ""
    yield "| there | here | remark |" if kind == "equal" else f"| there | {REASONS[kind]} |"
    yield "|---|---|---|" if kind == "equal" else "|---|---|"
    for (ours, why), names in rows.items():
        there = code(", ".join(names))
        yield f"| {there} | {code(ours)} | {why} |" if kind == "equal" else f"| {there} | {why} |"
    yield ""


def tables(keys: Mapping[str, Key]) -> str:
    return "\n".join(line for kind in TITLES for line in table(keys, kind)).rstrip()


def pairs(names: Mapping[str, str], *, there: str, here: str) -> str:
    by_ours: dict[str, list[str]] = {}
    for name, ours in names.items():
        by_ours.setdefault(ours, []).append(name)
    rows = [f"| {code(', '.join(each))} | `{ours}` |" for ours, each in by_ours.items()]
    return "\n".join([f"| {there} | {here} |", "|---|---|", *rows])


def own(keys: Mapping[str, Key]) -> dict[str, Key]:
    """Return the keys that are not those of transformers' TrainingArguments."""
    return {name: key for name, key in keys.items() if KEYS.get(name) is not key}


SECTIONS = {
    "shared": lambda: tables(KEYS),
    "optimizers": lambda: pairs(OPTIMIZERS, there="optimizer there", here="optim"),
    "schedules": lambda: pairs(SCHEDULES, there="schedule there", here="schedule"),
    "axolotl": lambda: tables(own(axolotl.KEYS_OF_AXOLOTL)),
    "axolotl_sources": lambda: tables(axolotl.OF_SOURCES),
    "axolotl_types": lambda: tables(axolotl.OF_TYPES),
    "axolotl_templates": lambda: pairs(axolotl.CHAT_FORMATS, there="chat_template", here="model.chat_format"),
    "llamafactory": lambda: tables(own(llamafactory.KEYS_OF_LLAMAFACTORY)),
    "llamafactory_descriptions": lambda: tables(llamafactory.OF_DESCRIPTIONS),
    "llamafactory_templates": lambda: pairs(llamafactory.TEMPLATES, there="template", here="model.chat_format"),
    "trl": lambda: tables(own(trl.KEYS_OF_TRL)),
}
"""Tables by their marks in the manual."""


def written(text: str) -> str:
    """Return the manual with every table made anew."""
    for name, made in SECTIONS.items():
        begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
        before, mark, behind = text.partition(begin)
        assert mark, f"{MANUAL} has no table {name}"
        text = f"{before}{mark}{made()}\n{end}" + behind.partition(end)[2]
    assert set(re.findall(r"<!-- table (\w+) -->", text)) == set(SECTIONS)
    return text


if __name__ == "__main__":
    MANUAL.write_text(written(MANUAL.read_text(encoding="utf-8")), encoding="utf-8")
