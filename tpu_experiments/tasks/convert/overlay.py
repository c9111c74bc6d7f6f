"""The experiment that a draft becomes: its text, and the check that it composes."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tpu_experiments.config.compose import config_of
from tpu_experiments.config.schema import Config
from tpu_experiments.tasks.convert.table import Draft

ORDER = ("objective", "model", "data", "curriculum", "lora", "optim", "schedule", "logger")
"""Groups in the order of an experiment's defaults: an objective's file chooses data and curriculum too."""


def text_of(draft: Draft, *, name: str, source: str) -> str:
    """Return the experiment's YAML."""
    choices = {"objective": "next_token", "data": [], **draft.groups}
    defaults = [{f"override /{group}": choices[group]} for group in ORDER if group in choices]
    body: dict[str, Any] = {"defaults": defaults, "name": name}
    for key, value in draft.settings.items():
        node = body
        *outer, leaf = key.split(".")
        for part in outer:
            node = node.setdefault(part, {})
        node[leaf] = literal(value)
    dumped = yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)
    origin = f"{' '.join(source.split())[:200]} ({draft.tool.name})"
    return f"# @package _global_\n# Written by task=convert from {origin}.\n{dumped}"


def literal(value: Any) -> Any:
    """Return a value whose texts OmegaConf takes as they are: another's config names no variable and no key of ours.

    >>> literal(["${oc.env:HOME}"])
    ['\\\\${oc.env:HOME}']
    """
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [literal(each) for each in value]
    return {key: literal(each) for key, each in value.items()} if isinstance(value, dict) else value


def checked(text: str, *, name: str, overrides: Sequence[str] = ()) -> Config:
    """Compose an experiment, with further overrides, as `--config-dir` and `experiment=` do.

    Raises:
        ConfigError: Hydra or the checks refuse it.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "experiment")
        place.mkdir()
        (place / f"{name}.yaml").write_text(text, encoding="utf-8")
        return config_of([f"hydra.searchpath=[file://{folder}]", f"experiment={name}", "task=train", *overrides])
