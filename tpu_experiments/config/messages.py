"""The text of `--help`, and one-sentence messages for errors of Hydra and OmegaConf.

Messages have the form: key=value; what is wrong; what to do. `--help` reads only the folders of conf/, because Hydra's
own help takes two seconds to list the same groups.
"""

import dataclasses
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from tpu_experiments.config.commands import PROGRAM
from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.config.errors import nearest, suggest
from tpu_experiments.config.folders import CONF, PACKAGE
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.overlay import OWN_ENTRIES
from tpu_experiments.config.schema import Config
from tpu_experiments.config.words import CHOICES, machines_near, of_habit

GROUPS = {
    "task": "what the command does",
    "model": "what is trained",
    "data": "what it is trained on; one or several: data=[a,b]",
    "hw": "the machine; changes the speed, never the mathematics",
    "curriculum": "stages, in order",
    "lora": "adapters; none trains every weight",
    "objective": "what is learnt from a row of tokens",
    "rollout": "answers that the model writes in training (objective=grpo)",
    "reward": "what such an answer is worth; one or several",
    "optim": "optimizer",
    "schedule": "learning rate over a stage",
    "sharding": "what is split over the devices",
    "trainer": "the training loop",
    "logger": "where metrics go; one or several",
    "callbacks": "what is called at steps, evaluations, checkpoints and the end; one or several",
    "experiment": "a whole recipe: model, data, hw and settings",
    "sweep": "many runs, one after the other",
    "debug": "laid over anything else, to try it out first",
    "local": "settings of this machine, conf/local/default.yaml",
}

HEADER = """\
Fine-tune and pre-train language models on TPUs with torch_xla; the same command runs on this machine's CPU.

  python run.py [GROUP=CHOICE ...] [KEY=VALUE ...]

Without arguments it trains an adapter for a tiny model that has read Romanian stories, here, in a minute and a half:
it learns to answer questions about a story, and is asked 120 held-out ones before and after.

Groups and their choices (the files of conf/GROUP):
"""

FOOTER = """
Examples:
  python run.py                                                     # the shipped stories, on this machine's CPU
  python run.py model=mistral7b data=[wiki_ro,ultrachat_ro] hw=v6e8 # two data sets, on a TPU v6e-8
  python run.py experiment=mistral7b_ro debug=smoke                 # try a recipe: tiny model, shipped samples, CPU
  python run.py data=wiki_ro data.wiki_ro.path=/data/articles.jsonl # a file of your own in the same format
  python run.py -m lora.r=8,16,32 lora.alpha=16,32                  # a sweep: one run per combination

See the config without running anything: add `--cfg job --resolve`; one part of it: `--package optim`.
Every key with its unit and meaning:
  tpu_experiments/config/{schema,model_schema,data_schema,hardware,start,task_schema}.py
A value with commas, brackets or = in it needs quotes for the shell and for Hydra: 'sample.prompt="Salut, lume"'.

A run lives in OUTPUT_DIR/NAME: outputs/<model>_<data>_<hw>, where model.path= gives <model> its name, or name=...
The same name and config resume the run where it stopped; the same name with another config is refused.

Exit codes:
   0  finished
   1  failed; the message and the log say why; of task=resume_check: the resumed run differs; of task=doctor: training
      would not start; of task=certify: a check failed; of a sweep: a point failed
   2  refused: something in the command, the config or the data; nothing was run or written (task=certify writes a page)
  75  stopped on request (Ctrl-C, SIGTERM, preemption) after a checkpoint, or by a TPU that stopped working; the same
      command resumes

--hydra-help lists Hydra's own flags.
"""


def choices(group: str) -> list[str]:
    """Return the names of the files in conf/<group>; empty if there is no such group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def help_text() -> str:
    """Return the text of `--help`."""
    width = max(map(len, GROUPS)) + 2
    lines = []
    for group, meaning in GROUPS.items():
        lines.append(f"  {group:<{width}}{meaning}")
        if choices(group):
            lines.append(f"  {'':<{width}}  {', '.join(choices(group))}")
    text = HEADER + "\n".join(lines) + "\n" + FOOTER
    return text.replace("python run.py", " ".join(PROGRAM))


MAX_SHOWN, MAX_OVERRIDES = 100, 4  # characters of an override, and overrides, in a message
# Pattern of the library's message, and the advice for it; {key} and {value} are those of the override.
FILE = re.compile(r"\.(jsonl|json|csv|tsv|parquet|txt|gz|zst|safetensors|gguf|bin|pt)$", re.IGNORECASE)
CURLY = "\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
"""Quotes that word processors and web pages put in place of straight ones."""
OVERRIDE = re.compile(r"-|[~+]*[\w.@/]+=|~")
OPTIONS_WITH_VALUE = frozenset(
    {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
    | {"--experimental-rerun", "--info", "-i"}
)
OPTIONS = frozenset(
    {word for word in OPTIONS_WITH_VALUE if word.startswith("--")}
    | {"--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun", "--shell-completion"}
)
"""Options of Hydra, which may be shortened."""
COMPLAINTS = {
    r"could not be converted to Integer": "it must be a whole number.",
    r"could not be converted to Float": "it must be a number.",
    r"is not a ListConfig, list or tuple": "it must be a list; write '{key}=[{value}]'.",
    r"is not Optional": "null is not allowed here; give a value or leave the override out.",
    r"does not support deletion": "a setting cannot be removed; give it another value instead.",
    r"Cannot assign \w+ to Dict": "it must be a mapping; write '{key}={{NAME: VALUE}}'.",
    r"dict is not a subclass of": "the command line cannot add one; write it in a YAML file of conf/{group}.",
}


def sentence(error: HydraException | OmegaConfBaseException) -> str:
    """Return one sentence for what Hydra or OmegaConf refused."""
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    ambiguous = re.search(r"Ambiguous value for argument '(.*)'", str(error))
    if ambiguous:
        key, _, value = ambiguous[1].partition("=")
        return (
            f"{key}={value}; a comma separates values: write '{key}=[{value}]' for a list, "
            f"'{key}=\"{value}\"' for a text, or add -m to run once per value."
        )
    absent = re.search(r"Could not delete from config. '(.*)' does not exist", str(error))
    if absent:
        return f"~{absent[1]}; there is nothing of that name to remove. {suggest(absent[1], get_type_hints(Config))}"
    # Hydra raises `from` the cause for an override, and inside its handler for a file
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException):
        file = re.match(r"In '(.+?)': ", str(error))
        return _refused_value(cause, override=_override_of(error), file=file[1] if file else "")
    return _plain(error)


def unreadable_yaml(error: MarkedYAMLError) -> str:
    """Return a sentence for a YAML file with a syntax error or a duplicate key."""
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1} of {mark.name}" if mark else "a YAML file"
    return f"{place} cannot be read: {error.problem}; mend it."


def is_of_composition(error: Exception) -> bool:
    """Return whether Hydra's composition raised the error, without this package but its entry point."""
    files = {Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not any(file.is_relative_to(PACKAGE) for file in files - {PACKAGE / "command_line.py"})


def uncomposable(error: Exception, overrides: list[str]) -> str:
    """Return a sentence for Python exceptions raised by Hydra, some of which have no text."""
    if "Config group override must be" in str(error):
        return _null_group(overrides)
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else _plain(error).rstrip(".")
    if "Unexpected type for root" in reason:
        reason = "a key is below one that is null"
    shown = " ".join(o if len(o) <= MAX_SHOWN else f"{o[:MAX_SHOWN]}..." for o in overrides[-MAX_OVERRIDES:])
    return (
        f"{shown}; Hydra cannot make a config of this, or of a YAML file that it names ({reason}); write each override "
        "as KEY=VALUE or GROUP=CHOICE, and each YAML file as those of conf are."
    )


def _null_group(overrides: list[str]) -> str:
    """Return a sentence for `lora=null` and `lora=16`, for which Hydra raises a ValueError."""
    values = r"null|~||true|false|[+-]?[\d._]+(e[+-]?\d+)?|inf|nan"
    given = [o for o in overrides if re.fullmatch(rf"({'|'.join(GROUPS)})=({values})", o, re.IGNORECASE)]
    group, _, value = (given or ["GROUP=null"])[0].partition("=")
    if value.lower() not in ("null", "~", ""):
        return f"{group}={value}; it is the name of no choice. {_instead_of_choice(group, value)}"
    given = given or ["GROUP=null"]
    return f"{given[0]}; a group cannot be null; leave it out, or name a choice: {', '.join(choices(group))}."


def _override_of(error: Exception) -> str:
    """Return the override that Hydra was processing, empty when it came from a YAML file."""
    found = re.search(r"(?:Error merging override |To append to your config use \+)(.+)", str(error))
    given = found[1] if found else ""
    own = given.removeprefix("++")
    return own if OWN_ENTRIES.fullmatch(own) else given


def _unknown_choice(error: MissingConfigException) -> str:
    """Return a sentence for `model=mistrl7b`, with the missing file, the near miss and what exists."""
    missing = error.missing_cfg_file or ""
    name = missing[0] if isinstance(missing, list | tuple) else str(missing)
    group, _, wanted = name.rpartition("/")
    if not group:
        return _plain(error)
    top, _, below = name.partition("/")
    if top in ("model", "data") and _is_place(below):
        return f"{top}={below}; {_instead_of_place(top, below)}"
    group = group.strip("/")
    offered = [o for o in (error.options or []) if not o.startswith("base")]
    if (group, wanted) == ("hydra/sweeper", "optuna"):
        return "hydra/sweeper=optuna; hydra-optuna-sweeper is not installed; pip install -e '.[optuna]' does that."
    if not wanted:
        return f"{group}=; it has no value. {suggest(wanted, {*offered, *choices(group)})}"
    return f"{group}={wanted}; there is no conf/{group}/{wanted}.yaml. {_instead_of_choice(group, wanted, offered)}"


def _instead_of_choice(group: str, wanted: str, offered: Iterable[str] = ()) -> str:
    """Return what to write in place of a choice that does not exist."""
    known = {*offered, *choices(group)}
    meant = CHOICES.get(group, {}).get(wanted.lower())
    if meant is not None:
        return f"Here it is {group}={meant}. Names that exist: {', '.join(sorted(known))}."
    near = machines_near(wanted, known) if group == "hw" else ""
    if near:
        return f"{near} Names that exist: {', '.join(sorted(known))}."
    rank = re.fullmatch(r"r?(\d+)", wanted) if group == "lora" else None
    if rank:
        return f"Write lora.r={rank[1]} for adapters of that rank, or one of: {', '.join(sorted(known))}."
    return suggest(wanted, known)


def _is_place(value: str) -> bool:
    """Return whether somebody meant a file, a folder or a Hub id with a choice."""
    return "/" in value or "\\" in value or value.startswith((".", "~")) or bool(FILE.search(value))


def _instead_of_place(group: str, path: str) -> str:
    """Return how to name a file, folder or Hub id of a model or of data."""
    if group == "data":
        return (
            "a source is named, and its file, folder or Hub id is one of its settings; write data=messages "
            f"data.messages.path={path} for conversations, data=wiki_ro data.wiki_ro.path={path} for plain text."
        )
    shipped = [name for name in choices("model") if path_of_model(name) == path]
    if shipped:
        return f"it is conf/model/{shipped[0]}.yaml; write model={shipped[0]}."
    near = nearest(path.rstrip("/").rpartition("/")[2].lower(), choices("model")) or "tiny"
    return f"a folder or Hub id is the path of a model; write model={near} model.path={path} (model= has the settings)."


def path_of_model(model: str) -> str | None:
    """Return `path` in the file of a model of conf/model; None where there is no such file, or no path in it."""
    if model not in choices("model"):
        return None
    found = re.search(r"^path: (\S+)$", (CONF / "model" / f"{model}.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def is_own(model: ModelConfig) -> bool:
    """Return whether a preset's model is trained, and not another one that `model.path` names in its place."""
    is_drawn = model.size != "full" or model.init == "random"
    return is_drawn or path_of_model(model.name) in (None, model.path)


def argument_problem(arguments: Sequence[str]) -> str | None:
    """Return a sentence for arguments that Hydra would take for others than are meant; None if there are none.

    These are options of other programs (`--lr 1e-4`), and spaces beside a `=`.
    """
    for before, word, after in zip(["", *arguments], arguments, [*arguments, ""][1:], strict=False):
        if before in OPTIONS_WITH_VALUE:
            continue
        if word.startswith("=") or (re.fullmatch(r"[\w.+~]+=", word) and after and not OVERRIDE.match(after)):
            key, value = (before, word[1:] or after) if word.startswith("=") else (word[:-1], after)
            return f"{key} = {value}; there is no space beside =; write {key}={value}."
        name, equals, value = word.partition("=")
        if not name.startswith("--") or len(name) < 3 or any(each.startswith(name) for each in OPTIONS):
            continue
        key = name[2:].replace("-", "_")
        value = value if equals else "" if after.startswith("-") or OVERRIDE.match(after) else after
        meant = None if key in GROUPS or key in get_type_hints(Config) else of_habit(key, value)
        shown, value = f"{name}{equals or ' '}{value}".strip(), value or "VALUE"
        return f"{shown}; a setting has no dashes. {meant or f'Write {key}={value}.'}"
    return None


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    curly = next((letter for letter in override if letter in CURLY), None)
    if curly is not None:
        return f"{override}; it has the typographic quote {curly}; write ' or \", or leave the quotes out."
    if not equals:
        groups = [group for group in GROUPS if override in choices(group)]
        written = " or ".join(f"{group}={override}" for group in groups) or f"{key}=VALUE"
        several = ", several as 'data=[A,B]'" if "data" in groups else ""
        return f"{override!r} is no key=value; write {written}{several}, or see --help."
    if value.startswith("~"):
        return f"{override}; ~ is not replaced behind a =; write {key}=$HOME{value[1:]} or the whole path."
    if key != key.strip():
        return f"{override!r} has a space beside its key; write {key.strip()}={value}."
    return (
        f"{key}={value}; the value cannot be read; close its brackets and quotes, and quote a value that holds any "
        f"of = : , [ ] {{ }} like this: '{key}=\"VALUE\"'."
    )


def _refused_value(error: OmegaConfBaseException, *, override: str, file: str) -> str:
    key = str(error.full_key or override.partition("=")[0].lstrip("+~"))
    shown = override or (f"{key} in {file}.yaml".lstrip() if file else key)
    kind = error.object_type
    if "not in '" in str(error) and kind is not None and dataclasses.is_dataclass(kind):
        return f"{shown}; there is no key {key}. {_hint(key, get_type_hints(kind), value=override.partition('=')[2])}"
    if "is not in struct" in str(error) and isinstance(error.parent_node, DictConfig):
        return _unknown_entry(shown, key=key, parent_node=error.parent_node)
    forced = OWN_ENTRIES.fullmatch(override)
    if forced and "dict is not a subclass of" in str(error):
        return f"{forced[0]}; {forced[1]} is not selected. {suggest(forced[1], choices('data'))}"
    value = override.partition("=")[2] or "VALUE"
    for pattern, advice in COMPLAINTS.items():
        if re.search(pattern, str(error)):
            group = re.split(r"[.=]", override.lstrip("+~"))[0]
            return f"{shown}; {advice.format(key=key, value=value, group=group)}"
    return f"{shown}; {_plain(error)}"


def _hint(key: str, siblings: dict[str, Any], *, value: str = "") -> str:
    """Return what stands for a key of another trainer, the places of a key of that name, or a near miss."""
    parent, _, leaf = key.rpartition(".")
    meant = of_habit(key, value)
    if meant is not None:
        return meant
    if key.isupper():
        return f"A variable of the environment stands before the command: {key}={value or 'VALUE'} python run.py ..."
    homes = [known for known in dict.fromkeys(known_keys()) if known.rpartition(".")[2] == leaf]
    if not homes or len(homes) > 4:
        return suggest(leaf, siblings)
    place = f" in {parent}" if parent else ""
    return f"Did you mean {' or '.join(homes)}? Names that exist{place}: {', '.join(sorted(siblings))}."


def _unknown_entry(shown: str, *, key: str, parent_node: DictConfig) -> str:
    """Return a sentence for a name missing in a mapping (selected sources, stages, arch values)."""
    parent, _, leaf = key.rpartition(".")
    entries = [str(name) for name in parent_node]
    if parent in ("data", "logger", "callbacks"):
        if leaf in choices(parent):
            alone = f"choose it: {parent}={leaf}, or add it" if parent == "data" else "add it"
            return f"{shown}; {leaf} is not selected; {alone}: '{parent}=[{','.join([*entries, leaf])}]'."
        if parent == "data" and leaf in get_type_hints(DataSourceConfig):
            return f"{shown}; a setting of data is one of a source; write data.{entries[0]}.{leaf}=VALUE."
        return f"{shown}; {parent}={','.join(entries)} has no {leaf}. {suggest(leaf, {*entries, *choices(parent)})}"
    if parent == "rollout.rewards":
        if leaf in choices("reward"):
            return f"{shown}; {leaf} is not selected; choose it: reward={leaf}."
        own = f"'+{parent}={{{leaf}: {{function: package.module.name}}}}'"
        return f"{shown}; there is no reward {leaf}; write {own}, or choose one: reward={', '.join(choices('reward'))}."
    problem = f"{shown}; {parent} has no {leaf}. {suggest(leaf, entries)}"
    if dataclasses.is_dataclass(parent_node._metadata.element_type):
        return f"{problem} A new one is written in a YAML file of conf/{parent.partition('.')[0]}."
    return f"{problem} To add it write '+{shown}'." if "=" in shown else problem


def known_keys(kind: Any = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema; `<name>` stands for a source, stage or logger."""
    for name, hint in get_type_hints(kind).items():
        yield f"{prefix}{name}"
        inner = f"{prefix}{name}.<name>." if get_origin(hint) is dict else f"{prefix}{name}."
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                for variant in (part, *part.__subclasses__()):
                    yield from known_keys(variant, inner)


def _plain(error: Exception) -> str:
    """Return the library's own message on one line, without paths and OmegaConf's trailer."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    reason = [line for line in lines if line and not re.match(r"(full_key|object_type|reference_type|To append)", line)]
    text = " ".join(reason[:2]) or type(error).__name__
    return text if text.endswith(("?", ".")) else text + "."
