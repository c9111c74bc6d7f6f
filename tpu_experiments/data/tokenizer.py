"""The tokenizer of a run, from a local folder or the Hub; never imports torch_xla."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.paths import find_local, near_misses


def load_tokenizer(path: str, *, revision: str | None, chat_template_path: str | None) -> PreTrainedTokenizerBase:
    """Tokenizer of a folder or Hub id, with the chat template of `chat_template_path` if given.

    Raises:
        ConfigError: no tokenizer there, one without character offsets, or no such template file.
    """
    local = find_local(path)
    if local is None and path.startswith((".", "/", "~")):
        raise ConfigError(
            f"model.tokenizer_path={path}; there is no such folder. {near_misses(path)}"
            "Name the folder of a tokenizer, or a Hub id."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(local or path), revision=revision)
    except Exception as error:  # transformers and the Hub client raise a dozen unrelated types
        where = "this folder holds no tokenizer" if local else "the Hub gave no tokenizer"
        raise ConfigError(
            f"model.tokenizer_path={path}; {where} ({_first_line(error)}); point "
            "model.tokenizer_path= at a folder with tokenizer.json and tokenizer_config.json."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.tokenizer_path={path}; {type(tokenizer).__name__} gives no character offsets, "
            "which the chat masks need; use a tokenizer with a tokenizer.json."
        )
    if chat_template_path is not None:
        tokenizer.chat_template = _read_template(chat_template_path)
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, *, source: str) -> None:
    """Raise when the tokenizer cannot render the conversations of `source`.

    Raises:
        ConfigError: it has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.{source}.kind=chat; the tokenizer {tokenizer.name_or_path} has no chat template;"
            " set model.chat_template_path=FILE or use a text source."
        )


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id that fills rows up: padding, else end of sequence, else 0; it is never attended to."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _read_template(path: str) -> str:
    local = find_local(path)
    if local is None or local.is_dir():
        raise ConfigError(
            f"model.chat_template_path={path}; there is no such file. {near_misses(path)}Name a Jinja file."
        )
    return Path(local).read_text(encoding="utf-8")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
