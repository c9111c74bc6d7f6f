"""Export of the tokenizer, with the chat template used in training, beside a model or adapter.

transformers 5 picks a tokenizer's class by tokenizer_config.json and by the model type in the config.json beside it,
and some classes build the splitting of text by rules of their own, whatever tokenizer.json says. So what is written is
read back as it will be read, and compared with the tokenizer that trained.
"""

import json
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.data.tokens.tokenizer import AS_WRITTEN, GENERIC, HARD_LINES, first_apart
from tpu_experiments.data.tokens.words import backend_of
from tpu_experiments.models.huggingface import silent
from tpu_experiments.storage import paths

SETTINGS = "tokenizer_config.json"
ENDS = ("add_bos_token", "add_eos_token")
"""Settings with which transformers replaces what tokenizer.json puts around a text."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
PORTABLE = GENERIC[1]
"""Name of the class that takes tokenizer.json as it is; transformers 4 and 5 both know it."""
UNNAMED = ""
"""Class name that transformers from 5.11 on (5.15 and 5.20 to 5.23 were tried) takes for the same class, also beside
the model types whose named class it replaces by its own (qwen2); 5.10 does not, and transformers 4 refuses it."""

log = logging.getLogger(__name__)


def write_tokenizer(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: PretrainedConfig | None = None,
    lines: Iterable[str] = (),
) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(folder)` reads as `tokenizer`, chat template included.

    Args:
        config: of the model whose config.json is in the folder; None: the folder has none (an adapter's).
        lines: text that is compared besides `HARD_LINES`.

    Raises:
        ConfigError: no form of the files is read as this tokenizer; nothing was written.
    """
    with tempfile.TemporaryDirectory() as local:
        passed = _write_readable(Path(local), tokenizer, config=config, lines=tuple(lines))
        if passed:
            log.info("%s of %s is in the form that transformers reads rightly: otherwise %s", SETTINGS, folder, passed)
        for file in sorted(Path(local).iterdir()):
            if file.name != "config.json":
                paths.write_bytes_atomic(paths.join(folder, file.name), file.read_bytes())


def require_readable(
    tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig | None, lines: Iterable[str] = ()
) -> None:
    """Require that some form of the tokenizer's files is read back as it; arguments are those of `write_tokenizer`.

    Raises:
        ConfigError: none is.
    """
    with tempfile.TemporaryDirectory() as local:
        _write_readable(Path(local), tokenizer, config=config, lines=tuple(lines))


def _write_readable(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig | None, lines: Sequence[str]
) -> str:
    """Write the first form that is read back rightly; return what is wrong of the usual one, empty where nothing is."""
    # Of several chat templates, those with names would be files of a folder, which exports do not have.
    tokenizer.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(_what_names_a_class(config)), encoding="utf-8")
    saved = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    if saved.get("tokenizer_class") == AS_WRITTEN:
        saved["tokenizer_class"] = PORTABLE
    has_own_code = not type(tokenizer).__module__.startswith("transformers.")
    bare = {name: value for name, value in saved.items() if name not in (*ENDS, "auto_map")}
    forms = [saved, *({**bare, "tokenizer_class": name} for name in (PORTABLE, UNNAMED))]
    reasons: list[str] = []
    for values in forms:
        (folder / SETTINGS).write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
        reason = "" if has_own_code else _difference(folder, tokenizer, lines)
        if not reason:
            return reasons[0] if reasons else ""
        reasons.append(reason)
    beside = "by itself" if config is None else f"beside a config.json of model_type={config.model_type}"
    raise ConfigError(
        f"model.tokenizer_path={tokenizer.name_or_path}; {beside}, transformers reads this tokenizer otherwise than "
        f"training used it, in whatever form it is written: {reasons[-1]}; take the tokenizer that such models have, "
        "or another type of model."
    )


def _what_names_a_class(config: PretrainedConfig) -> dict[str, Any]:
    """Return the part of a config.json by which AutoTokenizer picks a class."""
    found = {"model_type": config.model_type, "tokenizer_class": getattr(config, "tokenizer_class", None)}
    return {name: value for name, value in found.items() if value is not None}


def _difference(folder: Path, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str]) -> str:
    """Return in what AutoTokenizer's reading of a folder differs from a tokenizer; empty where in nothing."""
    try:
        with silent():
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' classes raise a dozen unrelated types over files of another kind
        return f"it cannot be read ({one_line(error, most=120)})"
    kind = type(found).__name__
    if not found.is_fast:
        return f"{kind} has no tokenizer.json"
    around = [f"one {token} two{token}" for token in list(tokenizer.get_added_vocab())[:64]]
    apart = first_apart(backend_of(tokenizer), backend_of(found), (*HARD_LINES, *around, *lines), whole=True)
    if apart is not None:
        return f"{kind} splits {apart[:80]!r} into other tokens"
    for name in SPECIAL:
        ours, theirs = (getattr(each, f"{name}_id", None) for each in (tokenizer, found))
        if ours != theirs:
            return f"{kind} has {name} as {theirs}, and it is {ours}"
    if len(found) != len(tokenizer):
        return f"{kind} has {len(found)} tokens, and there are {len(tokenizer)}"
    if found.chat_template != tokenizer.chat_template:
        return f"{kind} has another chat template"
    ids = tokenizer(HARD_LINES[0], add_special_tokens=False)["input_ids"]
    return "" if found.decode(ids) == tokenizer.decode(ids) else f"{kind} writes {HARD_LINES[0]!r} otherwise"
