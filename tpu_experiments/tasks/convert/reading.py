"""Reading of another program's config: a YAML or JSON file, a command line, or a script with one."""

import json
import os
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.regular_files import MIB, NotRegular, read_regular
from tpu_experiments.config.yaml_bounds import LOADER, OF_VALUES, require_bounded
from tpu_experiments.tasks.convert.axolotl import AXOLOTL
from tpu_experiments.tasks.convert.llamafactory import LLAMAFACTORY
from tpu_experiments.tasks.convert.table import Tool
from tpu_experiments.tasks.convert.trl import COMMANDS, TRL

ADVICE = (
    "give an axolotl or LLaMA-Factory YAML file, or a command in quotes: 'task.config=\"trl sft --config sft.yaml\"'"
)
SUFFIXES = (".yaml", ".yml", ".json")
SCRIPTS = {
    **{name: name for name in COMMANDS},
    "reward_modeling": "reward",
    "train_sft": "sft",
    "train_dpo": "dpo",
    "train_grpo": "grpo",
    "train_kto": "kto",
    "train_reward": "reward",
}
"""TRL's scripts, and the commands that they are."""
DESCRIPTIONS = "dataset_info.json"


@dataclass(frozen=True)
class Given:
    """Another program's config as it was given."""

    tool: Tool
    values: dict[str, Any]
    trainer: str
    """Command of TRL."""
    folder: str
    """Folder of the file; empty for a command."""
    name: str
    """Name of the file or command, for the run."""


def read(config: str) -> Given:
    """Read another program's config.

    Args:
        config: path of a file, or a command line.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is no config of a program that is known.
    """
    if os.path.isfile(config):
        text = _text(config)
        if config.lower().endswith(SUFFIXES):
            return _of_mapping(_mapping(text, place=config), place=config)
        return _of_command(_words(text), place=config, folder=os.path.dirname(config), name=Path(config).stem)
    words = _words(config)
    if len(words) < 2 or (config.lower().endswith(SUFFIXES) and len(words) == 1):
        raise ConfigError(f"task.config={config}; there is no such file; {ADVICE}.")
    return _of_command(words, place=config, folder="", name="")


def _text(file: str) -> str:
    try:
        return read_regular(file, most=MIB, key="task.config").decode()
    except NotRegular as error:
        raise ConfigError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.config={file}; it cannot be read ({error}); {ADVICE}.") from error


def _mapping(text: str, *, place: str) -> dict[str, Any]:
    """Return the mapping of a YAML or JSON file."""
    require_bounded(text, place=f"task.config={place}")
    try:
        found = yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, *OF_VALUES) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"task.config={place}; it is not YAML ({said}); {ADVICE}.") from error
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"task.config={place}; it holds no keys with values; {ADVICE}.")
    return {str(key): value for key, value in found.items()}


def _of_mapping(values: dict[str, Any], *, place: str) -> Given:
    """Recognise the program by its keys."""
    folder, name = os.path.dirname(place), Path(place).stem
    if "base_model" in values:
        return Given(AXOLOTL, values, "", folder, name)
    if "model_name_or_path" in values and {"stage", "finetuning_type", "template", "cutoff_len"} & set(values):
        return Given(LLAMAFACTORY, values, "", folder, name)
    if "model_name_or_path" in values or "dataset_name" in values:
        raise ConfigError(
            f"task.config={place}; a file of TRL does not say which command it is for; write it: "
            f"'task.config=\"trl sft --config {place}\"' ({', '.join(COMMANDS)})."
        )
    if {"model", "train_dataset"} <= set(values) or "dist_config" in values:
        raise ConfigError(
            f"task.config={place}; it is a config of LLaMA-Factory's v1, which is not read; {ADVICE}, with "
            "model_name_or_path, stage and finetuning_type."
        )
    known = ["base_model (axolotl)", "model_name_or_path (LLaMA-Factory, TRL)"]
    raise ConfigError(
        f"task.config={place}; it is no config that is known: it has none of {', '.join(known)}, but "
        f"{', '.join(list(values)[:8])}; {ADVICE}."
    )


def _words(text: str) -> list[str]:
    """Return the words of the first command in a text that is one of a known program, else of the whole text."""
    joined = re.sub(r"\\\s*\n", " ", text)
    for line in joined.splitlines():
        try:
            for command in commands(line):
                words = shlex.split(command)
                if _verb(words) is not None:
                    return words
        except ValueError as error:
            raise ConfigError(f"task.config={line:.80}; it is no command line ({error}); {ADVICE}.") from error
    try:
        return shlex.split(joined)
    except ValueError:
        return [text]


SHELL = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?P<comment>(?<!\S)\#.*)|(?P<operator>[|&;]+(?![<>]))"""
    r"""|(?P<redirection>(?:(?<!\S)\d+|&)?[<>]+&?\s*(?:"[^"]*"|'[^']*'|[^\s|&;<>"'])+)|(?P<odd>[<>])"""
)
"""What a shell reads in a line beside words."""
VARIABLE = re.compile(r"\$[\w{(@*]|`")


def commands(line: str) -> list[str]:
    """Return the commands of a line of a shell, without comments and redirections.

    >>> commands("cd a && trl sft --eos_token '<|end|>' 2>&1 | tee log  # now")
    ['cd a ', " trl sft --eos_token '<|end|>'  ", ' tee log  ']

    Raises:
        ValueError: a `<` or `>` is neither quoted nor followed by a file.
    """
    found, at = [""], 0
    for match in SHELL.finditer(line):
        found[-1] += line[at : match.start()]
        at = match.end()
        if match["odd"]:
            raise ValueError(f"a {match['odd']} without a file")
        if match["quoted"]:
            found[-1] += match["quoted"]
        elif match["operator"]:
            found.append("")
    return [*found[:-1], found[-1] + line[at:]]


def _verb(words: Sequence[str]) -> tuple[str, str, int] | None:
    """Return program, command and the place behind them: `trl sft`, `python .../sft.py`, `llamafactory-cli train`."""
    for at, word in enumerate(words):
        program, following = Path(word).name, words[at + 1] if at + 1 < len(words) else ""
        if program == "trl" and following:
            return "trl", following, at + 2
        if program == "axolotl" and following in ("train", "preprocess"):
            return "axolotl", following, at + 2
        if program in ("llamafactory-cli", "lmf") and following == "train":
            return "llamafactory", following, at + 2
        if program.endswith(".py") and program.removesuffix(".py") in SCRIPTS:
            return "trl", SCRIPTS[program.removesuffix(".py")], at + 1
    return None


def _of_command(words: list[str], *, place: str, folder: str, name: str) -> Given:
    found = _verb(words)
    if found is None:
        raise ConfigError(
            f"task.config={place:.120}; it is no file and no command of TRL, axolotl or LLaMA-Factory; {ADVICE}."
        )
    program, command, behind = found
    tool = {"trl": TRL, "axolotl": AXOLOTL}.get(program, LLAMAFACTORY)
    rest = list(words[behind:])
    if variable := next((word for word in rest if VARIABLE.search(word)), None):
        raise ConfigError(
            f"task.config={place:.120}; {variable:.80} in the command is a shell's variable, whose value is not known "
            "here; write the value."
        )
    values: dict[str, Any] = {}
    files = [rest.pop(0)] if rest and not rest[0].startswith("-") and rest[0].lower().endswith(SUFFIXES) else []
    typed = arguments(rest, known=tool.keys)
    files += [str(typed.pop("config"))] if "config" in typed else []
    for file in files:
        found_at = _place_of(file, folder=folder)
        values |= _mapping(_text(found_at), place=found_at)
        folder, name = os.path.dirname(found_at) or folder, name or Path(file).stem
    values |= typed
    if program == "trl":
        if command not in COMMANDS:
            raise ConfigError(
                f"task.config={place:.120}; there is nothing here for trl {command}. {suggest(command, COMMANDS)}"
            )
        return Given(TRL, values, command, folder, name or f"trl_{command}")
    return Given(tool, values, "", folder, name or program)


def _place_of(file: str, *, folder: str) -> str:
    """Return the path of a file that a command names, looked for here and beside the command's own file."""
    beside = os.path.join(folder, file)
    place = file if os.path.isfile(file) or not os.path.isfile(beside) else beside
    if not os.path.isfile(place):
        raise ConfigError(f"task.config; the command names {file}, which is no file here; {ADVICE}.")
    return place


def arguments(words: Sequence[str], *, known: Container[str] = ()) -> dict[str, Any]:
    """Return the values of `--key value ...`, `--key=value`, `key=value` and `--no_key`.

    Args:
        known: keys of the program, of which one that begins with `no_` is itself.

    >>> arguments(["--lora_r", "8", "--packing", "--no_tf32", "--targets", "q", "v", "lr=1e-4"])
    {'lora_r': 8, 'packing': True, 'tf32': False, 'targets': ['q', 'v'], 'lr': '1e-4'}
    """
    found: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            key = name.replace("-", "_")
            found[key] = [_scalar(value)] if equals else []
        elif match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
            key = match[1]
            found[key] = [_scalar(match[2])]
            key = ""
        elif key:
            found[key].append(_scalar(word))
        else:
            raise ConfigError(f"task.config; {word!r:.80} in the command belongs to no argument; write --key value.")
    given: dict[str, Any] = {}
    for name, values in found.items():
        is_negated = not values and name.startswith("no_") and name not in known
        key = name.removeprefix("no_") if is_negated else name
        given[key] = not is_negated if not values else values[0] if len(values) == 1 else values
    return given


def _scalar(text: str) -> Any:
    """Return a value of a command line: a number, a truth value, a list or mapping of JSON, or a text."""
    require_bounded(text, place="task.config")
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except ValueError:
            return text
    if re.fullmatch(r"[+-]?(0|[1-9]\d*)", text):
        return int(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return None if text.lower() in ("null", "none") and text != "none" else text


def descriptions(given: Given, *, file: str | None) -> Mapping[str, Any] | None:
    """Return LLaMA-Factory's descriptions of data sets, from a file or from `dataset_dir`; None where there are none.

    Raises:
        ConfigError: the file is named and cannot be read.
    """
    folder = str(given.values.get("dataset_dir") or "data")
    places = (
        [file] if file is not None else [f"{folder}/{DESCRIPTIONS}", os.path.join(given.folder, folder, DESCRIPTIONS)]
    )
    for place in places:
        if os.path.isfile(place):
            return _mapping(_text(place), place=place)
    if file is not None:
        raise ConfigError(f"task.dataset_info={file}; there is no such file; name LLaMA-Factory's data/{DESCRIPTIONS}.")
    return None


def without(values: Mapping[str, Any], leave: Sequence[str]) -> dict[str, Any]:
    """Return the values without keys that are left out: `key`, or `key.inner` of mappings, also in lists.

    Raises:
        ConfigError: there is no such key.
    """
    found = dict(values)
    for key in leave:
        if not has(values, key):
            names = list(dict.fromkeys(_names(values)))
            raise ConfigError(f"task.leave=[{', '.join(leave)}]; the config has no key {key}. {suggest(key, names)}")
        found = _less(found, key.split("."))
    return found


def has(values: Any, key: str) -> bool:
    """Return whether there is such a key: `key`, or `key.inner` of a mapping or of one of a list."""
    return key in _names(values)


def _names(value: Any) -> Iterator[str]:
    """Yield the dotted names of all keys of a mapping, or of those of a list."""
    for entry in value if isinstance(value, list) else [value]:
        for name, inner in entry.items() if isinstance(entry, Mapping) else ():
            yield str(name)
            yield from (f"{name}.{each}" for each in _names(inner))


def _less(value: Any, path: Sequence[str]) -> Any:
    """Return a value without the key at a path."""
    if isinstance(value, list):
        return [_less(each, path) for each in value]
    if not isinstance(value, Mapping):
        return value
    first, *rest = path
    if not rest:
        return {name: each for name, each in value.items() if str(name) != first}
    return {name: _less(each, rest) if str(name) == first else each for name, each in value.items()}
