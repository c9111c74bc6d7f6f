"""Special ids and end tokens of an export: config.json and generation_config.json.

transformers, vLLM and TGI stop at `eos_token_id` of generation_config.json, or of config.json where there is none. A
base's own settings are kept as they are; the tokens with which training taught the model to end are added to them.
"""

import copy
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from jinja2.exceptions import TemplateError
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.data.tokens.tokenizer import text_end_ids
from tpu_experiments.models.huggingface import HuggingFaceModel

GENERATION_CONFIG = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ends:
    """Tokens and text that end an answer."""

    ids: frozenset[int]
    marker: str = ""
    """Text that ends a turn, for a chat format whose marker is not a token of the tokenizer."""


def model_config(source: HuggingFaceModel, *, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the config of an export; a decoder drawn at random has the tokenizer's special ids, not its class's."""
    config: PretrainedConfig = getattr(source, "export_config", source.config)
    if not source.random or getattr(source, "head", "causal_lm") != "causal_lm":
        return config  # an encoder's pad_token_id is also where its positions begin (RoBERTa)
    config = copy.deepcopy(config)
    for name, index in ids_of(tokenizer, size=int(config.vocab_size)).items():
        setattr(config, name, index)
    return config


def ids_of(tokenizer: PreTrainedTokenizerBase, *, size: int) -> dict[str, int | None]:
    """Return a tokenizer's `IDS`, None where it has none or the model has no embedding for it."""
    begin, end = text_end_ids(tokenizer)
    found = dict(zip(IDS, (begin, end, tokenizer.pad_token_id), strict=True))
    return {name: index if index is not None and index < size else None for name, index in found.items()}


def generation_config(
    source: HuggingFaceModel, *, tokenizer: PreTrainedTokenizerBase, learns_turns: bool, writes_text: bool = True
) -> str | None:
    """Return the text of generation_config.json; None for a model that writes no text and whose base has none.

    Args:
        learns_turns: whether conversations were trained on, whose turns end as the chat template says.
        writes_text: whether the objective is a causal decoder's.

    Raises:
        ConfigError: the base's cannot be read.
    """
    folder = None if source.random else source.folder
    values = read_generation_config(folder)
    if not writes_text:
        return None if folder is None or values is None else (folder / GENERATION_CONFIG).read_text(encoding="utf-8")
    config, is_own = model_config(source, tokenizer=tokenizer), values is None
    if values is None:
        values = {name: getattr(config, name, None) for name in IDS}
        values["pad_token_id"] = tokenizer.pad_token_id if values["pad_token_id"] is None else values["pad_token_id"]
        values = {name: index for name, index in values.items() if index is not None}
        values["transformers_version"] = transformers.__version__
    known = _listed(values.get("eos_token_id"))
    learnt = [text_end_ids(tokenizer)[1], *([turn_end_id(tokenizer)] if learns_turns else [])]
    more = [index for index in dict.fromkeys(learnt) if index is not None and index not in known]
    if not more and not is_own:
        assert folder is not None
        return (folder / GENERATION_CONFIG).read_text(encoding="utf-8")
    if known and more:
        log.info("%s: the learnt ends %s are added to eos_token_id %s", GENERATION_CONFIG, more, known)
    ends = [*known, *more]
    if ends:
        values["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def end_ids(generation: str | None) -> list[int]:
    """Return `eos_token_id` of the text of a generation_config.json as a list; empty without one."""
    return [] if generation is None else _listed(json.loads(generation).get("eos_token_id"))


def read_generation_config(folder: Path | None) -> dict[str, Any] | None:
    """Return the generation_config.json of a folder; None where it has none.

    Raises:
        ConfigError: it is no JSON object, or its end tokens are no ids.
    """
    file = None if folder is None else folder / GENERATION_CONFIG
    if file is None or not file.exists():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}; it is no JSON object ({error}); download it again, or remove it.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}; it is no JSON object ({str(values)[:40]}); download it again, or remove it.")
    ends = _listed(values.get("eos_token_id"))
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in ends):
        raise ConfigError(f"{file}; its eos_token_id={ends!r:.80} is no token's number, nor a list; mend it.")
    return values


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the added token that the chat template closes an answer with; None where it is text, or none."""
    tail = after_answer(tokenizer)
    if not tail:
        return None
    first = int(tokenizer(tail, add_special_tokens=False)["input_ids"][0])
    return first if first in tokenizer.added_tokens_decoder else None


def ends_of(tokenizer: PreTrainedTokenizerBase, *, kind: str, config: PretrainedConfig, folder: Path | None) -> Ends:
    """Return the end-of-sequence ids and, for chats, what closes a turn.

    The ids are those of the tokenizer, config.json and generation_config.json.

    Raises:
        ConfigError: generation_config.json cannot be read.
    """
    begun = read_generation_config(folder) or {}
    # The config of a model that was drawn at random has its class's ids, or a recipe's for another tokenizer.
    found = [text_end_ids(tokenizer)[1], begun.get("eos_token_id")]
    if folder is not None or found[0] is None:
        found.append(getattr(config, "eos_token_id", None))
    ids = frozenset(one for each in found for one in (each if isinstance(each, list) else [each]) if one is not None)
    tail = after_answer(tokenizer) if kind == "chat" else ""
    if not tail:
        return Ends(ids)
    closing = turn_end_id(tokenizer)
    if closing is not None:
        return Ends(ids | {closing})
    return Ends(ids, marker=tail.partition(tokenizer.eos_token or "\n")[0].strip())


def after_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes after an answer, stripped; empty without a template for such a turn."""
    if not tokenizer.chat_template:
        return ""
    try:
        text = render((("user", "?"), ("assistant", "\ufdd0")), tokenizer=tokenizer, ends_with="turn")
    except TemplateError:
        return ""
    return text.rpartition("\ufdd0")[2].strip()


def _listed(ids: Any) -> list[Any]:
    return list(ids) if isinstance(ids, list | tuple) else [] if ids is None else [ids]
