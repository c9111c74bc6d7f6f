"""task=convert: write an experiment of another program's config; loads no torch."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from tpu_experiments.config.commands import command
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.messages import choices
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ConvertTaskConfig
from tpu_experiments.tasks.convert.overlay import checked, text_of
from tpu_experiments.tasks.convert.reading import Given, descriptions, has, read, without
from tpu_experiments.tasks.convert.table import Draft, is_neutral

KEPT = ("hw", "sharding", "output_dir")
"""Overrides of the command that the experiment is checked with, and that the next command repeats."""


def run(config: Config) -> None:
    """Write `<task.folder>/experiment/<name>.yaml` and print what became of every key.

    Raises:
        ConfigError: the other config cannot be read, would train something else here, or gives no config that the
            checks accept.
    """
    settings = config.task
    assert isinstance(settings, ConvertTaskConfig)
    if settings.config is None:
        raise ConfigError("task.config=null; write the file or command of the other program: task.config=axolotl.yaml.")
    given = read(settings.config)
    draft = drafted(given, settings)
    name = name_of(config, given)
    for line in listing(draft, given, settings):
        print(for_terminal(redacted_text(line)))
    if draft.problems:
        raise ConfigError("\n".join(refusals(draft, source=settings.config)))
    files = template_files(draft, folder=Path(settings.folder), name=name)
    text = text_of(draft, name=name, source=settings.config)
    typed = [word for word in HydraConfig.get().overrides.task if word.lstrip("+").startswith(KEPT)]
    checked(text, name=name, overrides=typed)
    files = {Path(settings.folder, "experiment", f"{name}.yaml"): text, **files}
    for path, content in files.items():
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != content:
            raise ConfigError(
                f"task.folder={settings.folder}; {path} is there already and differs; remove it, or give name=."
            )
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(f"written: {path}")
    print(f"next: {command('--config-dir', settings.folder, f'experiment={name}', *typed)}")


def drafted(given: Given, settings: ConvertTaskConfig) -> Draft:
    """Convert a config as the task's settings say."""
    values = without(given.values, settings.leave)
    draft = Draft(
        given.tool,
        {key: value for key, value in values.items() if value is not None},
        nulls=frozenset(key for key, value in values.items() if value is None),
        trainer=given.trainer,
        devices=settings.devices,
        row_format=settings.format,
        dataset_info=descriptions(given, file=settings.dataset_info),
        folder=given.folder,
    )
    given.tool.convert(draft)
    return draft


def name_of(config: Config, given: Given) -> str:
    """Return the experiment's name: what `name=` says, else that of the other config's file.

    Raises:
        ConfigError: an experiment of this project has it.
    """
    typed = config.name if any(word.startswith("name=") for word in HydraConfig.get().overrides.task) else None
    name = typed or re.sub(r"[^A-Za-z0-9_-]+", "_", given.name).strip("_-") or "converted"
    if name in choices("experiment"):
        raise ConfigError(
            f"name={name}; conf/experiment has a file of that name, which would be read instead; give name=."
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError(f"name={name}; it names a file that experiment= chooses: use letters, digits, _ and -.")
    return name


def template_files(draft: Draft, *, folder: Path, name: str) -> dict[Path, str]:
    """Name the file of a chat template that is written beside the experiment, and return it with its text."""
    if draft.template is None:
        return {}
    file = folder / "chat_templates" / f"{name}.jinja"
    draft.settings["model.chat_template_path"] = str(file)
    return {file: draft.template}


def listing(draft: Draft, given: Given, settings: ConvertTaskConfig) -> Iterator[str]:
    """Yield a line for each key: what it is here, or why it is nothing."""
    tool, values = draft.tool, given.values
    unset = [key for key, value in values.items() if value is None]
    yield f"{settings.config}: {tool.name}{f' {draft.trainer}' if draft.trainer else ''}, {len(values)} keys"
    for key, value in draft.given.items():
        if key in draft.became and key in values:
            here = ", ".join(f"{ours}={shown(each)}" for ours, each in draft.became[key].items())
            yield f"  {key}: {shown(value)} -> {here}"
    yield "no effect on what is learnt:"
    for key, value in draft.given.items():
        known = tool.keys.get(key)
        if key in draft.became or key in draft.problems or known is None or key not in values:
            continue
        if known.kind == "idle":
            yield f"  {key}: {shown(value)}; {known.why}"
        elif known.kind == "missing" or is_neutral(value, (None, False)):
            yield f"  {key}: {shown(value)}; off there and here"
        elif key in draft.read:
            yield f"  {key}: {shown(value)}; {known.why or 'the same here'}"
        else:
            yield f"  {key}: {shown(value)}; not used there with the other keys"
    if unset:
        yield f"not set (null): {', '.join(unset)}"
    if settings.leave:
        yield f"left out (task.leave), so that {tool.name}'s own values apply: {', '.join(settings.leave)}"
    defaults = {key: here for key, here in draft.became.items() if key not in values or key in settings.leave}
    if defaults:
        yield f"{tool.name}'s own values of keys that are not given:"
        for key, became in defaults.items():
            here = ", ".join(f"{ours}={shown(each)}" for ours, each in became.items())
            yield f"  {key}: {shown(draft.given.get(key, draft.default(key)))} -> {here}"
    if draft.notes:
        yield "differs:"
        yield from (f"  {key}: {text}" for key, text in draft.notes)
    if draft.devices == 1:
        yield "the other run is taken to be one on 1 device; task.devices=N multiplies the rows of a step"


def refusals(draft: Draft, *, source: str) -> Iterator[str]:
    """Yield why the config is refused, and what to do."""
    for key, why in draft.problems.items():
        value = None if key in draft.nulls else draft.given.get(key, "(not given)" if "." not in key else "")
        yield f"task.config={source:.120}; {key}{f': {shown(value)}' if value != '' else ''}; {why}."
    keys = [key for key in draft.problems if key in draft.nulls or has(draft.given, key)]
    leave = f", or leave them out: 'task.leave=[{','.join(keys)}]'" if keys else ""
    yield (
        f"task.config={source:.120}; nothing is written, since the run would train something else than the config "
        f"says ({len(draft.problems)} of its keys); change them there{leave}."
    )


def shown(value: Any) -> str:
    """Return a value for a line of the listing."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 80 else f"{text[:77]}..."
